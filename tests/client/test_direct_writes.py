"""Direct writes alone, without a GPU: blocks are hashed on a fake device and go by UCX from there.

UCX reads a device's memory when it likes, and knows nothing of streams: what is sent too early are
other bytes. What reads and writes have in common is in `test_direct.py`.
"""

# ruff: noqa: F811  # fixtures

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections import deque
from itertools import chain
from typing import Any

import pytest

from kvpool import Pool, connect
from kvpool.client import device_direct as direct
from kvpool.client import device_writes as writes
from kvpool.client.device_arena import Arena
from kvpool.device.checksum import copy_rows
from kvpool.tools.subprocesses import Child
from tests.client.direct_blocks import (  # noqa: F401
    LARGE,
    SIZE,
    SMALL,
    Blocks,
    Make,
    apart,
    auto,
    client,
    gpu,
    hasty,
    in_both,
    in_rows,
    labels,
    of_kind,
    read_back,
    served,
    to_read,
    to_write,
    torch,
    ucx,
    warm,
    writer,
)
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.support import messages as wire
from tests.support.fake_device import FakeGpu, FakeTensor

Transfer = ucx.Transfer
Patch = pytest.MonkeyPatch


# --- the same bytes ---------------------------------------------------------------------------


async def arrive_whole(client: Pool, blocks: Blocks) -> None:
    """Two writes of an engine at once, in several rounds, with the work that fills the blocks still
    queued; their memory is used again when they have ended."""
    late = []
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        for ready in blocks.memory:
            late.append(
                [blocks.gpu.tensor(b"-" * piece.numel()).view(piece.shape) for piece in ready]
            )
            for piece, one in zip(late[-1], ready, strict=True):
                piece.copy_(one)  # runs when it is waited for
        blocks.memory = late

        async def write(part: slice) -> list[str]:
            written = await blocks.move(client, part)
            for piece in chain(*blocks.memory[part]):
                piece.behind.fill_(7)
            return written

        written = await asyncio.gather(write(slice(7)), write(slice(7, 14)))
    assert written == [["stored"] * 7] * 2
    assert await blocks.there() == blocks.data


async def test_what_is_on_its_way_to_the_blocks_is_waited_for(
    client: Pool, to_write: Make, gpu: FakeGpu
) -> None:
    blocks = await to_write("sent", [SIZE] * 14, in_both)
    await arrive_whole(client, blocks)
    blocks.refill(in_rows)
    assert await blocks.move(client) == ["already stored"] * 14


def late_card(patch: Patch, seconds: float = 0.15) -> None:
    """A card that has much to do: it begins to read a device's memory after a while."""
    send = Transfer.send

    class LateRequest:
        def __init__(self) -> None:
            self.real: Any = None

        @property
        def completed(self) -> bool:
            return self.real is not None and self.real.completed

        def check_error(self) -> None:
            self.real.check_error()

    def later(transfer: Transfer, buffer: Any) -> bool:
        if not isinstance(buffer, FakeTensor) or len(buffer) == 8:
            return send(transfer, buffer)
        request = LateRequest()

        def begin() -> None:
            others, keep = transfer._requests, transfer._keep
            transfer._requests, transfer._keep = deque(), deque()
            send(transfer, buffer)
            (request.real,) = transfer._requests
            transfer._requests, transfer._keep = others, keep

        transfer._requests.append(request)  # type: ignore[arg-type]
        transfer._keep.append(buffer)
        asyncio.get_running_loop().call_later(seconds, begin)
        return False

    patch.setattr(Transfer, "send", later)


async def test_memory_is_kept_until_a_late_card_has_read_it(
    client: Pool, to_write: Make, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", 2 * SIZE + 1000)
    late_card(monkeypatch)
    await arrive_whole(client, await to_write("late card", [SIZE] * 14, in_both))


async def test_one_launch_gathers_a_batch(client: Pool, to_write: Make, monkeypatch: Patch) -> None:
    copies: list[int] = []

    def gathered(sources: Any, targets: Any) -> None:
        copies.append(len(sources))
        copy_rows(sources, targets)

    monkeypatch.setattr(writes, "copy_rows", gathered)
    await (await to_write("launch", [SIZE] * 5)).arrive(client)
    assert copies == [5 * 4]  # three pieces are one row


async def test_a_payload_that_is_small_after_all(client: Pool, to_write: Make) -> None:
    """The server has all but one block: what is left is small, and goes with its frame."""
    blocks = await to_write("rest", [SMALL - 1] * 6, in_rows)
    await blocks.writer.write(NAMESPACE, blocks.chain[:5], blocks.data[:5])
    assert await blocks.move(client) == ["already stored"] * 5 + ["stored"]
    assert await blocks.there() == blocks.data


async def test_a_write_that_meets_another_version(client: Pool, to_write: Make) -> None:
    """What a device has is compared by its checksum; no byte of it is fetched for that."""
    blocks = await to_write("version")
    await blocks.writer.write(NAMESPACE, blocks.chain, [bytes(SIZE)] * 3)
    assert await blocks.move(client) == ["already stored"] * 3
    assert await blocks.there() == [bytes(SIZE)] * 3


# --- the token ---------------------------------------------------------------------------------


async def test_each_lane_is_proved_for_each_device_once(
    client: Pool, gpu: FakeGpu, monkeypatch: Patch
) -> None:
    sent: list[wire.SendToken] = []
    send = ucx.Stream.send

    async def noted(self: Any, message: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(message, wire.SendToken):
            sent.append(message)
        return await send(self, message, *arguments, **named)

    monkeypatch.setattr(ucx.Stream, "send", noted)
    for number in range(4):
        digests = keys(f"token {number}", 2)
        blocks = [gpu.tensor(one, number % 2) for one in values(digests, SIZE)]
        assert labels(await client.write(NAMESPACE, digests, blocks)) == ["stored"] * 2
    assert len(sent) == len({one.content for one in sent}) == 2


async def test_lanes_that_send_without_a_rendezvous_are_refused(
    client: Pool, to_write: Make, monkeypatch: Patch
) -> None:
    """What has begun to arrive could not be stopped: no block goes that way."""
    send, sent = Transfer.send, []

    def eager(transfer: Transfer, buffer: Any) -> bool:
        sent.append(len(buffer))
        return send(transfer, buffer) or isinstance(buffer, FakeTensor)

    monkeypatch.setattr(Transfer, "send", eager)
    blocks = await to_write("eager", memory=in_rows)
    assert await blocks.move(client) == ["refused"] * 3
    assert max(sent) == 8
    await blocks.have_not_come()
    assert client.counters["failed_ucx"]


async def test_a_token_that_arrives_as_another_is_refused(client: Pool, to_write: Make) -> None:
    """Bytes of the device are wrong on their way: known before a block is sent."""
    token = await client._memory.direct_writes()._devices.token(
        torch.device("cuda", 0), asyncio.get_running_loop().time() + 9
    )
    token.memory.behind[0] ^= 1  # type: ignore[attr-defined]
    blocks = await to_write("other token", memory=in_rows)
    assert await blocks.move(client) == ["refused"] * 3
    await blocks.have_not_come()


# --- wrong bytes -------------------------------------------------------------------------------


def damage(monkeypatch: Patch, *, once: bool = False) -> list[int]:
    """The first byte of each block changes between the device and the wire."""
    send, changed = Transfer.send, []

    def other(transfer: Transfer, buffer: Any) -> bool:
        if isinstance(buffer, FakeTensor) and len(buffer) > 8 and not (once and changed):
            changed.append(len(buffer))
            data = bytearray(buffer.behind.numpy())
            data[0] ^= 4
            return send(transfer, memoryview(data))
        return send(transfer, buffer)

    monkeypatch.setattr(Transfer, "send", other)
    return changed


async def test_bytes_that_change_on_the_wire_are_refused(
    client: Pool, to_write: Make, monkeypatch: Patch
) -> None:
    """The server is asked to verify the first batch, and drops what is wrong in it."""
    blocks = await to_write("wire", [SIZE] * 12, in_rows)
    with monkeypatch.context() as patch:
        changed = damage(patch)
        assert await blocks.move(client) == ["refused"] * 12
    assert len(changed) == client.counters["direct_corrupt"] == 12
    assert not any(isinstance(one, bytes) for one in await blocks.there())
    await blocks.arrive(client)


async def test_bytes_that_change_later_are_found_by_readers(
    client: Pool, to_write: Make, monkeypatch: Patch
) -> None:
    await (await to_write("before", memory=in_rows)).arrive(client)
    damage(monkeypatch, once=True)
    blocks = await to_write("later", memory=in_rows)
    await blocks.move(client)
    assert await blocks.there() == ["corrupt", *blocks.data[1:]]


# --- auto --------------------------------------------------------------------------------------


async def test_auto_stages_what_is_left_where_the_device_fails(
    auto: Pool, to_write: Make, gpu: FakeGpu
) -> None:
    blocks = await to_write("fails to gather")
    gpu.fails = "CUDA error: an illegal memory access was encountered"
    await blocks.arrive(auto)
    assert auto.counters["staged_write_bytes"] == 3 * SIZE


async def test_auto_stages_a_batch_that_came_wrong_and_then_all(
    auto: Pool, to_write: Make, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        damage(patch, once=True)
        await (await to_write("distrust", memory=in_rows)).arrive(auto)
    assert auto.counters["direct_corrupt"] == 1
    await (await to_write("distrusted", memory=in_rows)).arrive(auto)
    assert auto.counters["direct_write_bytes"] == 2 * SIZE
    assert auto.counters["staged_write_bytes"] == 4 * SIZE


async def test_blocks_that_are_gathered_when_the_way_is_distrusted_are_staged(
    auto: Pool, to_write: Make, monkeypatch: Patch
) -> None:
    """Of another call: they would be sent the wrong way, found wrong and sent once more."""
    write_to, begun = writes.DirectWrites.write_to, []
    both_gathered, first_ended = asyncio.Event(), asyncio.Event()

    async def in_turn(*arguments: Any) -> Any:
        begun.append(arguments)
        if len(begun) == 1:
            await both_gathered.wait()
        else:
            both_gathered.set()
            await first_ended.wait()
        return await write_to(*arguments)

    first, second = [await to_write(name, memory=in_rows) for name in ("first", "second")]
    damage(monkeypatch)
    monkeypatch.setattr(writes.DirectWrites, "write_to", in_turn)
    writing = asyncio.ensure_future(first.arrive(auto))
    await eventually(lambda: begun)
    late = asyncio.ensure_future(second.arrive(auto))
    await writing
    first_ended.set()
    await late
    assert auto.counters["direct_corrupt"] == 3
    assert auto.counters["staged_write_bytes"] == 6 * SIZE


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["its device", "its server"])
async def test_a_read_is_not_behind_a_write(
    client: Pool, to_read: Make, to_write: Make, monkeypatch: Patch, slow: str
) -> None:
    """A request waits for a read, and nobody for a write: it may gather, or be on its way."""
    go_on, begun, sent = threading.Event(), threading.Event(), asyncio.Event()
    gather, send = writes.copy_rows, writes.DirectWrites.write_to

    def gathers(sources: Any, targets: Any) -> None:
        begun.set()
        assert slow == "its server" or go_on.wait(20)
        gather(sources, targets)

    async def sends(*arguments: Any) -> Any:
        await sent.wait()
        return await send(*arguments)

    monkeypatch.setattr(writes, "copy_rows", gathers)
    monkeypatch.setattr(writes.DirectWrites, "write_to", sends)
    old, new = await to_read("old"), await to_write("new")
    writing = asyncio.ensure_future(new.arrive(client))
    assert await asyncio.to_thread(begun.wait, 20)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await old.arrive(client)
    assert not writing.done()
    go_on.set()
    sent.set()
    await writing


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_ends_in_mid_transfer(
    apart: tuple[str, Child], monkeypatch: Patch, signal_: int
) -> None:
    """No block counts as stored, and UCX has let go of the memory when the call ends."""
    address, server = apart
    gpu = FakeGpu(monkeypatch)
    digests = keys("dies", 24)
    look, ended = Transfer.look, []

    def die(transfer: Transfer) -> None:
        look(transfer)
        sends = [one for one in gpu.registered if isinstance(one, FakeTensor) and len(one) > 8]
        if sends and transfer.completed >= 5 and not ended:
            ended.append(transfer)
            server.signal(signal_)

    monkeypatch.setattr(direct, "hash_rows", lambda rows, seeds: torch.zeros(len(rows)))
    monkeypatch.setattr(writes, "unsigned", lambda found: [0] * len(found))
    async with await connect(config=hasty(address)) as pool:
        monkeypatch.setattr(Transfer, "look", die)
        sources = [in_both(gpu, i, one) for i, one in enumerate(values(digests, LARGE))]
        try:
            written = await pool.write(NAMESPACE, digests, sources, timeout=3.0)
            assert ended
            assert not any(status.present for status in written)
            assert not ended[0]._requests  # UCX uses no buffer any more
        finally:
            if signal_ == signal.SIGSTOP:
                server.signal(signal.SIGCONT)
        if signal_ == signal.SIGSTOP:
            for one in gpu.registered:
                one.behind.fill_(9)  # that memory is used again
            await asyncio.sleep(0.3)
            results = await pool.read(NAMESPACE, digests, buffers(24, LARGE))
            assert not any(result.status.hit for result in results)


# --- mistakes that people make: each is seen ------------------------------------------------------


def hashed_before_the_caller_has_ended(patch: Patch) -> None:
    """Nobody waits for the work that fills the blocks."""

    async def at_once(blocks: Any, deadline: float) -> None:
        pass

    patch.setattr(writes, "wait_for_stream", at_once)


def scratch_used_before_the_bytes_have_left(patch: Patch) -> None:
    """Another round gathers in that memory while UCX still sends from it."""

    @contextlib.asynccontextmanager
    async def at_the_start(self: Any, size: int, deadline: float) -> Any:
        yield 0

    late_card(patch)
    patch.setattr(Arena, "allocate", at_the_start)


def stored_before_the_bytes_have_left(patch: Patch) -> None:
    """Neither side waits for its transfers, so the block is sealed when they have begun."""

    async def at_once(self: Transfer, left: int, deadline: float | None) -> None:
        self.look()

    late_card(patch)
    patch.setattr(Transfer, "until", at_once)


@pytest.mark.parametrize(
    "mistake",
    [
        hashed_before_the_caller_has_ended,
        scratch_used_before_the_bytes_have_left,
        stored_before_the_bytes_have_left,
    ],
)
async def test_a_planted_mistake_is_seen(
    client: Pool, to_write: Make, monkeypatch: Patch, mistake: Any
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", 2 * SIZE + 1000)
    await arrive_whole(client, await to_write("right", [SIZE] * 14, in_both))
    with monkeypatch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            await arrive_whole(client, await to_write("wrong", [SIZE] * 14, in_both))
