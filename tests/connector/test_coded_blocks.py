"""Blocks that pass through a codec, on a real pool: equal, or a miss with a reason."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch

from kvpool import ConfigError, ReadResult, ReadStatus, WriteStatus
from kvpool_codecs import coder
from kvpool_codecs.checks import Sample, like_kv
from kvpool_codecs.codec import codec_id
from kvpool_codecs.coded_tail import TAIL_BYTES, CodedTail, content_of
from kvpool_codecs.coder import Coder
from kvpool_codecs.lossless import Lossless
from kvpool_codecs.payoff import Payoff
from kvpool_connector import settings
from kvpool_connector.form_choice import fields_of, form_of
from kvpool_connector.memory.block_memory import DirectBlockMemory, memory_of
from kvpool_connector.records.provenance import MARK_BYTES, BlockWriter
from tests.conftest import NAMESPACE, keys
from tests.connector.test_codecs import planes, unpacked
from tests.connector.test_halves import BYTES, Engine, Start, ended, pool, start
from tests.support import raising
from tests.support.local_pool import LocalPool

__all__ = ["pool", "start"]  # fixtures

END: Final = TAIL_BYTES + MARK_BYTES
MARK: Final = BlockWriter(b"w" * 8, "somebody").mark()


@pytest.fixture(autouse=True)
def _with_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressor is not what is tested."""
    both = (lambda data: zlib.compress(data, 1), unpacked)
    monkeypatch.setattr("kvpool_codecs.lossless._zstd", lambda: both)


def coded(start: Start, codec: str = "lossless", **options: Any) -> Engine:
    """An engine with a codec, whose memory has numbers that are like KV."""
    fields = {"model": "tiny", **fields_of(codec)}
    options = {"dtype": torch.bfloat16, "engine": {"fields": fields}, **options}
    engine: Engine = start(codec=codec, **options)

    def fill(blocks: Sequence[int], seed: int) -> None:
        for memory in engine.memory:
            for block in blocks:
                [layer] = like_kv(seed + block, 1, 2, BYTES // 64)
                data = Sample.of("", [layer], "bfloat16").block
                whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                memory[block] = whole.view(memory.shape[1:])

    engine.fill = fill  # type: ignore[method-assign]
    return engine


def load(engine: Engine, hashes: list[bytes], blocks: list[int]) -> dict[str, float]:
    """Load these into those, and what was counted."""
    engine.load("r", hashes, blocks)
    assert ended(engine)
    return engine.workers[0].take_counters()


def stored_bytes(pool: LocalPool, engine: Engine, digest: bytes) -> bytes:
    """What the pool has of a block."""
    room = bytearray(2 * BYTES)
    name = engine.scheduler.namespaces[0]
    [result] = pool.ask(lambda client: client.read(name, [digest], [room]))
    assert result.status.hit
    return bytes(room[: result.size])


@pytest.mark.parametrize("options", [{}, {"kv_head_parts": 4, "revision": "one"}])
def test_what_is_saved_smaller_is_loaded_as_it_was(
    pool: LocalPool, start: Start, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Payoff, "codes", lambda _: True)  # however busy this machine is
    writer, reader = coded(start, **options), coded(start, **options)
    hashes = keys(f"coded {options}", 5)
    writer.save(hashes, [3, 4, 5, 6, 7])
    counted = writer.workers[0].take_counters()
    parts = options.get("kv_head_parts", 1)
    assert counted["coded_blocks encoded"] == 5 * parts
    assert counted["coded_bytes_before"] == 5 * BYTES
    assert counted["save_bytes"] == 5 * BYTES, "what the engine has saved, not what is left of it"
    stored = stored_bytes(pool, writer, hashes[0])
    assert len(stored) < 0.9 * BYTES / parts + END

    counters = load(reader, hashes, [10, 9, 12, 11, 13])
    assert not reader.failed
    assert torch.equal(reader.memory[0][[10, 9, 12, 11, 13]], writer.memory[0][3:8])
    assert not reader.memory[0][14:].any()
    assert counters["load_bytes"] == 5 * BYTES


def test_engines_share_only_with_the_same_codec(start: Start) -> None:
    plain, writer = start(dtype=torch.bfloat16), coded(start)
    hashes = keys("other form", 2)
    writer.save(hashes, [1, 2])
    assert "codec=lossless/1" in writer.scheduler.namespaces[0].name
    assert plain.ask("r", hashes) == 0


def test_what_gets_no_smaller_or_does_not_pay_stays_as_it_is(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = coded(start), coded(start)
    del writer.fill  # random bytes
    first, second = keys("random", 2), keys("does not pay", 2)
    writer.save(first, [1, 2])
    assert writer.workers[0].take_counters()["coded_blocks no smaller"] == 2
    monkeypatch.setattr(Payoff, "pays", lambda payoff: False)
    writer.stored = 0
    writer.fill([3, 4], 3)
    writer.compute("again", second, [3, 4])
    writer.until(lambda: writer.stored == 2)
    assert writer.workers[0].take_counters()["coded_blocks slower"] == 2
    load(reader, first, [10, 11])
    assert torch.equal(reader.memory[0][10:12], writer.memory[0][1:3])
    reader.loaded.clear()
    reader.scheduler.on_request_finished("r")
    load(reader, second, [20, 21])
    assert torch.equal(reader.memory[0][20:22], writer.memory[0][3:5])


def bad_blocks() -> Iterator[tuple[str, bytes]]:
    """Why it is a miss, and what the pool has."""
    [numbers] = like_kv(0, 1, 2, BYTES // 64)
    good = Sample.of("", [numbers], "bfloat16")
    codec = planes()
    data, name = codec.encode(good.block, good.layers), codec_id(codec)
    tail = CodedTail(True, BYTES, name, content_of(good.block))
    flipped = bytearray(data)
    flipped[4] ^= 1  # of a plane that is not compressed: it decodes
    other = codec.encode(good.block[::-1], good.layers)
    yield "bad encoding", data[:-1] + tail.packed() + MARK
    yield "bad encoding", data[: len(data) // 2] + tail.packed() + MARK
    yield "bad encoding", tail.packed() + MARK
    yield "bad encoding", good.block + tail.packed() + MARK
    yield "wrong content", bytes(flipped) + tail.packed() + MARK
    yield "wrong content", other + tail.packed() + MARK
    yield "wrong size", data + tail._replace(size=1 << 60).packed() + MARK
    yield "wrong size", data + tail._replace(encoded=False).packed() + MARK
    yield "wrong size", MARK
    yield "not coded", good.block + MARK
    yield "not coded", data
    yield "not coded", data + tail.packed() + MARK[1:]


@pytest.mark.parametrize(("reason", "stored"), list(bad_blocks()), ids=lambda one: str(one)[:16])
def test_a_block_that_cannot_be_decoded_is_a_miss_with_a_reason(
    pool: LocalPool, start: Start, reason: str, stored: bytes
) -> None:
    reader = coded(start)
    hashes = keys(f"bad {hash(stored)}", 2)
    name = reader.scheduler.namespaces[0]
    [numbers] = like_kv(0, 1, 2, BYTES // 64)
    good = Sample.of("", [numbers], "bfloat16").block
    plain = good + CodedTail(False, BYTES, codec_id(planes())).packed() + MARK
    written = pool.ask(lambda client: client.write(name, hashes, [plain, stored]))
    assert written == [WriteStatus.STORED] * 2
    counters = load(reader, hashes, [30, 31])
    assert reader.bad_blocks == {31}
    assert counters[f"load_miss {reason}"] == 1
    assert counters["load_bytes"] == BYTES
    assert bytes(reader.memory[0][30].numpy()) == good


def test_decoding_ends_by_the_loads_deadline(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded until then counts; and then nobody writes into these blocks any more."""
    writer = coded(start)
    hashes = keys("slow", 6)
    writer.save(hashes, [1, 2, 3, 4, 5, 6])
    decode, running = Lossless.decode, threading.Semaphore(0)

    def slow(*arguments: Any) -> None:
        time.sleep(0.15)
        decode(*arguments)
        running.release()

    monkeypatch.setattr(Lossless, "decode", slow)
    reader = coded(start, load_timeout_s=0.4)
    counters = load(reader, hashes, [11, 12, 13, 14, 15, 16])
    loaded = {11, 12, 13, 14, 15, 16} - reader.bad_blocks
    assert 0 < len(loaded) < 6
    assert counters["load_miss deadline"] >= 1
    reader.memory[0].zero_()
    time.sleep(0.2)
    assert not reader.memory[0].any()


async def test_a_cancelled_load_waits_for_the_block_that_is_decoded() -> None:
    began, go, ran = threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        began.set()
        go.wait(5)
        ran.append(number)

    jobs = [coder.coders().submit(work, number) for number in range(20)]
    waiting = asyncio.create_task(coder._done(jobs))
    await asyncio.to_thread(began.wait, 5)
    for _ in range(2):
        waiting.cancel()
        await asyncio.sleep(0.01)
    assert not waiting.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(ran) <= coder.coders()._max_workers
    assert all(job.done() for job in jobs)


async def test_without_a_thread_nothing_is_decoded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of the block fails, and its memory has another use."""
    form, go_on = Coder("lossless"), threading.Event()
    memory = memory_of({"layer": torch.ones(4, 64, dtype=torch.bfloat16)})
    async with memory.source([1], None) as source:
        block = bytes(source[0][0])
        *data, tail = await form.encoded([memoryview(block)], memory.layers)
    encoded = b"".join(data)
    room = bytearray(encoded.ljust(len(block), b"."))
    with ThreadPoolExecutor(4) as busy:
        busy.submit(go_on.wait)
        monkeypatch.setattr(coder, "coders", lambda: busy)
        monkeypatch.setattr(threading.Thread, "start", raising.no_thread)
        arrived, until = ([memoryview(room)], len(encoded), bytes(tail)), time.monotonic() + 60
        problems = await form.decoded([arrived] * 2, memory.layers, until)
        plain = await form.encoded([memoryview(block)], memory.layers)
        go_on.set()
    assert problems == ["can't start new thread"] * 2
    assert room == encoded.ljust(len(block), b".")
    assert plain[0] == block


async def test_a_codec_that_is_broken_costs_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> bytes:
        raise MemoryError

    form = Coder("lossless")
    memory = memory_of({"layer": torch.ones(4, 64, dtype=torch.bfloat16)})
    monkeypatch.setattr(Lossless, "encode", fails)
    async with memory.source([1], None) as source:
        stored = b"".join(await form.encoded([memoryview(source[0][0])], memory.layers))
    assert stored[:128] == torch.ones(64, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert form.take_counters()["coded_blocks not encodable"] == 1
    assert form.take_counters() == {}


async def test_no_change_of_a_stored_block_is_loaded_as_another_one() -> None:
    """Each byte of it wrong, missing or there twice, or cut off there: equal, or a miss."""
    block = Sample.of("", like_kv(0, 1, 2, 16), "bfloat16").block
    numbers = torch.frombuffer(bytearray(block), dtype=torch.bfloat16).view(2, 1, 16, 16)
    form, memory = form_of("lossless"), memory_of({"one": numbers[:1], "two": numbers[1:]})
    stored: list[bytes] = []

    class OneBlock:  # a pool
        async def write(self, *arguments: Any, **options: Any) -> list[WriteStatus]:
            stored.append(b"".join(arguments[2][0]))
            return [WriteStatus.STORED]

        async def read(self, *arguments: Any, **options: Any) -> list[ReadResult]:
            rest = stored[-1]
            for piece in arguments[2][0]:
                piece[: len(rest)] = rest[: len(piece)]
                rest = rest[len(piece) :]
            return [ReadResult(ReadStatus.HIT, len(stored[-1]))]

    pool: Any = OneBlock()
    async with memory.source([0], None) as source:
        await form.write(pool, NAMESPACE, memory, keys("one", 1), source, MARK)
    [written] = stored

    async def load(data: bytes) -> str:
        stored.append(data)
        pieces, until = [bytearray(512), bytearray(512)], time.monotonic() + 60
        [found] = await form.read(
            pool, NAMESPACE, memory, keys("one", 1), [pieces], part=0, match=None, until=until
        )
        assert found.problem or b"".join(pieces) == block
        return found.problem

    assert not await load(written)
    tail, mark, harmless = len(written) - END, len(written) - MARK_BYTES, []
    for at, byte in enumerate(written):
        if not await load(written[:at] + bytes([byte ^ 1 << at % 8]) + written[at + 1 :]):
            harmless.append(at - tail)
        for end in (written[at + 1 :], written[at : at + 1] + written[at:], b""):
            assert await load(written[:at] + end)
    assert [at for at in harmless if 0 <= at < mark - tail] == [5, 6, 7], "bytes that say nothing"


def test_what_waits_for_a_write_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_connector.memory.block_form.STAGING_BYTES", 1024)
    memory = memory_of({"layer": torch.ones(4, 64, dtype=torch.bfloat16)})
    [memory] = form_of("lossless").memories([memory])
    assert memory.blocks_per_transfer == 8


def test_what_a_codec_cannot_take_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="codec: no codec 'losless' is installed; installed: "):
        settings.parse({"codec": "losless"})
    for spec in ("lossless?level=3", "lossless?level"):
        with pytest.raises(ConfigError, match="codec"):
            settings.parse({"codec": spec})
    with pytest.raises(ConfigError, match="device_path must be staged"):
        settings.parse({"codec": "lossless", "device_path": "direct"})
    with pytest.raises(ConfigError, match="host"):
        form_of("lossless").memories([DirectBlockMemory.__new__(DirectBlockMemory)])
    with pytest.raises(ConfigError, match="'lookup_timeout_s' is gone"):
        settings.parse({"lookup_timeout_s": 1})


MIB = 1 << 20


@pytest.mark.parametrize(
    ("way", "coding", "share", "pays"),
    [
        (0.1e9, 1.0e9, 0.7, True),  # 3 ns for a byte less, 1 ns of coding
        (1.0e9, 1.0e9, 0.7, False),  # 0.3 ns less
        (1.0e9, 1.0e9, 1.0, False),
        (0.1e9, 1.0e9, 0.95, False),
        (5.0e9, 20.0e9, 0.5, True),
    ],
)
def test_coding_pays_where_its_time_is_less_than_that_of_the_bytes_it_saves(
    way: float, coding: float, share: float, pays: bool
) -> None:
    payoff = Payoff()
    assert payoff.pays(), "nobody knows yet"
    for size in (MIB, 4 * MIB, 16 * MIB):
        payoff.on_encoded(size, int(size * share), size / coding)
        payoff.writes.observe(size, 0.05 + size / way)
    assert payoff.pays() is pays
    for size in (MIB, 4 * MIB, 16 * MIB):
        payoff.decoding.observe(size, size / coding)
        payoff.reads.observe(size, 0.05 + size / way)
    assert payoff.pays() is pays


def test_a_codec_that_does_not_pay_is_tried_again_now_and_then() -> None:
    payoff = Payoff()
    payoff.on_encoded(MIB, MIB // 2, 1.0)
    payoff.writes.observe(MIB, 0.001)
    assert sum(payoff.codes() for _ in range(640)) == 10
    for _ in range(9):  # the link has become slow
        payoff.writes.observe(MIB, 30.0)
    assert payoff.codes()


def test_slow_reads_make_it_pay_also_where_writes_are_fast() -> None:
    payoff = Payoff()
    payoff.on_encoded(MIB, MIB // 2, 0.01)
    payoff.writes.observe(MIB, 0.001)
    assert not payoff.pays()
    payoff.reads.observe(MIB, 1.0)
    assert payoff.pays()
