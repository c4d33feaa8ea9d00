"""Client buffers on a device, without one: a hit is never early, a miss or an end never late.

Tensors that say they lie on `cuda:0`, and copy as late as CUDA may (`late_device.py`), over the
real transports. What staged and direct calls have in common is in test_direct.py, and what a GPU is
needed for in test_gpu.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

import kvpool
from kvpool import BadBuffer, ClientConfig, Pool, TooLarge, Unavailable, WriteStatus, dev, sync
from kvpool.client import device_staging as staging
from kvpool.client.buffers import HostRows, with_device_blocks
from kvpool.device import lane
from kvpool.device.lane import Lane
from kvpool.device.thread import DeviceFailed, DeviceThread
from kvpool.errors import Closed, ConfigError, DeadlineExceeded
from tests.conftest import NAMESPACE, TRANSPORTS, eventually, key, keys, value, values
from tests.support.late_device import Gate, LateEvent, LateTensor

torch = pytest.importorskip("torch", reason="devices need torch")

SIZE = 96 << 10


class OnGpu(LateTensor):
    """Says that it lies on a device."""

    is_cuda = True
    device = torch.device("cuda", 0)


class Past:
    """The mark of a caller whose device is idle."""

    passed = True

    def query(self) -> bool:
        return self.passed


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[DeviceThread]:
    """Those that clients make, for the device that there is: to the host, and to the device."""
    made: list[DeviceThread] = []

    def late(_: Any, prepare: Callable[[], object]) -> Lane:
        thread = Lane(torch.device("cpu"), prepare)
        thread._event = LateEvent()
        made.append(thread)
        return thread

    def pinned(size: int, _: Any) -> Any:
        return torch.empty(size, dtype=torch.uint8).as_subclass(LateTensor)

    monkeypatch.setattr(staging, "Lane", late)
    monkeypatch.setattr(lane, "pinned", pinned)
    monkeypatch.setattr("kvpool.client.device_buffers.record_event", lambda *_: Past())
    return made


@pytest.fixture(params=TRANSPORTS)
async def client(
    request: pytest.FixtureRequest, pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pool]:
    """Its rounds have two blocks, and there is room for three of them."""
    monkeypatch.setattr(staging, "ROUND", 2 * SIZE)
    async with pool_dev.pool(configured(pool_dev, request.param)) as pool:
        yield pool


@pytest.fixture
async def tcp(pool_dev: dev.Dev) -> AsyncIterator[Pool]:
    async with pool_dev.pool(configured(pool_dev, "tcp")) as pool:
        yield pool


def configured(pool_dev: dev.Dev, scheme: str, path: str = "staged") -> ClientConfig:
    return ClientConfig(
        masters=[pool_dev.address],
        transports=[scheme],
        device_staging=6 * SIZE,
        device_path=path,
        attempt_s=5.0,
    )


def on_gpu(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).as_subclass(OnGpu)


def empty(size: int = SIZE) -> Any:
    return on_gpu(bytes(size))


def content(tensor: Any) -> bytes:
    return bytes(tensor.as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8).numpy())


def hits(results: Sequence[Any]) -> list[bool]:
    return [result.status.hit for result in results]


# --- the same bytes ---------------------------------------------------------------------------


async def test_blocks_go_from_device_to_device(client: Pool) -> None:
    """More of them than staging memory."""
    chain = keys("gpu", 11)
    data = values(chain, SIZE)
    sources = [on_gpu(block) for block in data]
    assert set(await client.write(NAMESPACE, chain, sources)) == {WriteStatus.STORED}
    for source in sources:  # the call has ended: the memory is the caller's again
        source.as_subclass(torch.Tensor).zero_()
    targets = [empty() for _ in chain]
    assert all(hits(await client.read(NAMESPACE, chain, targets)))
    assert [content(target) for target in targets] == data
    assert client.counters["staged_write_bytes"] == 11 * SIZE
    assert client.counters["staged_read_bytes"] == client.counters["read_bytes"] == 11 * SIZE
    assert (await client.match(NAMESPACE, chain)).length == 11


async def test_tensors_of_any_type_and_in_pieces(tcp: Pool) -> None:
    """As engines have them: a layer is a tensor of its own, of another type than bytes."""
    name = key("layers")
    data = value(name, SIZE)
    layers = [on_gpu(data[i::4]).view(torch.bfloat16).view(4, -1) for i in range(4)]
    assert await tcp.write(NAMESPACE, [name], [layers]) == [WriteStatus.STORED]
    with torch.inference_mode():  # as in most engines' threads
        target = [torch.zeros(SIZE // 16, dtype=torch.int32).as_subclass(OnGpu) for _ in range(4)]
        seen = with_device_blocks([target])
    assert hits(await tcp.read(NAMESPACE, [name], seen)) == [True]
    assert [content(piece) for piece in target] == [data[i::4] for i in range(4)]


async def test_a_block_larger_than_a_round(tcp: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "ROUND", 4096)
    chain = keys("large", 3)
    data = [value(chain[0], 6 * SIZE), value(chain[1], 5), value(chain[2], 3 * SIZE + 1)]
    await tcp.write(NAMESPACE, chain, [on_gpu(block) for block in data])
    targets = [empty(len(block)) for block in data]
    assert all(hits(await tcp.read(NAMESPACE, chain, targets)))
    assert [content(target) for target in targets] == data


async def test_many_calls_share_the_staging_memory(tcp: Pool) -> None:
    """Large and small ones: none waits for ever."""
    chain = keys("many", 24)
    sizes = [(1, 5 * SIZE, SIZE)[i % 3] for i in range(24)]
    data = [value(digest, size) for digest, size in zip(chain, sizes, strict=True)]
    calls = [tcp.write(NAMESPACE, [d], [on_gpu(b)]) for d, b in zip(chain, data, strict=True)]
    assert await asyncio.gather(*calls) == [[WriteStatus.STORED]] * 24
    targets = [empty(size) for size in sizes]
    reads = [tcp.read(NAMESPACE, [d], [t]) for d, t in zip(chain, targets, strict=True)]
    assert all(hits([result for (result,) in await asyncio.gather(*reads)]))
    assert [content(target) for target in targets] == data
    assert not tcp._memory.pinned.arena.taken


async def test_blocks_are_sent_in_order_while_others_cross(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parents first: a child is placed where its parent is. And neither side waits idly."""
    monkeypatch.setattr(staging, "ROUND", SIZE)
    both = staging.Staging(6 * SIZE, Counter())
    blocks = dict(enumerate(with_device_blocks([empty() for _ in range(7)])))
    deadline = asyncio.get_running_loop().time() + 5
    sent: list[object] = []
    waited = [0]

    async def send(rows: HostRows) -> dict[int, WriteStatus]:
        sent.append(tuple(rows))
        await asyncio.sleep(0.01 if len(sent) % 2 else 0)
        ahead = both._counters["staged_write_bytes"] // SIZE - len(sent) // 2
        waited.append(ahead)
        sent.append(None)
        return dict.fromkeys(rows, WriteStatus.STORED)

    cross = both._transfer
    crossing = iter([0.02])

    async def slow_at_first(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(next(crossing, 0))
        await cross(*args, **kwargs)

    monkeypatch.setattr(both, "_transfer", slow_at_first)
    statuses = await both.write(blocks, send, deadline)  # type: ignore[arg-type]
    assert sent == [one for i in range(7) for one in ((i,), None)]  # one at a time
    assert list(statuses.values()) == [WriteStatus.STORED] * 7
    assert max(waited) == 2  # the next one had crossed while this one was sent
    both.close()


async def test_a_large_block_is_not_passed_for_ever_by_small_ones() -> None:
    both = staging.Staging(4 * SIZE, Counter())
    deadline = asyncio.get_running_loop().time() + 5
    order: list[int] = []

    async def takes(size: int, held: asyncio.Event) -> None:
        (block,) = with_device_blocks([empty(size)])
        async with both._allocate({0: block}, [0], deadline):  # type: ignore[dict-item]
            order.append(size)
            await held.wait()

    first, others = asyncio.Event(), asyncio.Event()
    others.set()
    tasks = [asyncio.ensure_future(takes(3 * SIZE, first))]
    await eventually(lambda: len(order) == 1)
    for size in (4 * SIZE, SIZE, SIZE):
        tasks.append(asyncio.ensure_future(takes(size, others)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    with pytest.raises(DeadlineExceeded):  # who comes last waits no longer than it may
        async with asyncio.timeout(5), both.arena.allocate(1, asyncio.get_running_loop().time()):
            pass
    first.set()
    await asyncio.gather(*tasks)
    assert order == [3 * SIZE, 4 * SIZE, SIZE, SIZE]
    both.close()


async def test_tensors_of_the_host_are_used_in_place(tcp: Pool) -> None:
    name = key("host")
    data = value(name, SIZE)
    source = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(8, -1)
    await tcp.write(NAMESPACE, [name], [source])
    target = [torch.zeros(SIZE // 4, dtype=torch.float16), bytearray(SIZE // 2)]
    assert hits(await tcp.read(NAMESPACE, [name], [target])) == [True]
    assert content(target[0]) + target[1] == data
    assert not tcp.counters["staged_read_bytes"]
    with pytest.raises(BadBuffer, match="not contiguous"):
        await tcp.read(NAMESPACE, [name], [torch.zeros(8, 8).t()])


# --- wrong bytes, time, and ends ----------------------------------------------------------------


async def test_a_copy_waits_for_what_its_caller_asked_the_device_for(
    tcp: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = chain = keys("computed", 1)
    source = empty()
    monkeypatch.setattr(Past, "passed", False)
    writing = asyncio.ensure_future(tcp.write(NAMESPACE, chain, [source]))
    await asyncio.sleep(0.05)
    assert not tcp._memory.pinned.arena.taken  # it holds nothing that others wait for
    source.as_subclass(torch.Tensor).copy_(on_gpu(value(name, SIZE)).as_subclass(torch.Tensor))
    monkeypatch.setattr(Past, "passed", True)
    assert await writing == [WriteStatus.STORED]
    got = bytearray(SIZE)
    await tcp.read(NAMESPACE, chain, [got])
    assert got == value(name, SIZE)


async def test_closing_the_pool_ends_its_calls(
    tcp: Pool, threads: list[DeviceThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of two rounds end, and that of the third does not begin."""
    monkeypatch.setattr(staging, "ROUND", SIZE)
    chain = keys("closing", 3)
    await tcp.write(NAMESPACE, chain, values(chain, SIZE))
    targets = [empty() for _ in chain]
    await tcp.read(NAMESPACE, chain[:1], targets[:1])
    gate = Gate()
    gate.open = lambda: threads[1]._closed
    threads[1]._event = gate
    reading = asyncio.ensure_future(tcp.read(NAMESPACE, chain, targets))
    await eventually(lambda: gate.waiting)
    await tcp.close()
    (outcome,) = await asyncio.gather(reading, return_exceptions=True)
    assert type(outcome).__name__ == "Closed"
    assert content(targets[2]) == bytes(SIZE)


async def test_an_error_of_the_callers_own_work_is_told(
    tcp: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports it to whoever asks next."""

    def fails(_: Past) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with")

    monkeypatch.setattr(Past, "query", fails)
    with pytest.raises(Unavailable, match=r"device-side assert triggered$"):
        await tcp.write(NAMESPACE, [key("assert")], [empty()])


def test_threads_have_streams_of_their_own(
    dev_in_thread: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a caller asked the device for is on the stream of his thread, not of the pool's. That
    one has the context of the same device, before it asks events: not one on the first device."""
    marked: list[str] = []
    contexts: list[Any] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda of: contexts.append((threading.current_thread().name, of))
    )
    query = Past.query

    def asked(event: Past) -> bool:
        assert contexts
        return query(event)

    monkeypatch.setattr(Past, "query", asked)

    def mark(*_: object) -> Past:
        marked.append(threading.current_thread().name)
        return Past()

    monkeypatch.setattr("kvpool.client.device_buffers.record_event", mark)
    with sync.connect(dev_in_thread.address) as pool:
        chain = keys("thread", 2)
        data = values(chain, SIZE)
        pool.contains(NAMESPACE, chain)
        pool.read(NAMESPACE, chain, [torch.zeros(SIZE, dtype=torch.uint8) for _ in chain])
        assert not contexts  # memory of the host needs none
        pool.write(NAMESPACE, chain, [on_gpu(block) for block in data])
        targets = [empty(), empty()]
        assert all(hits(pool.read(NAMESPACE, chain, targets)))
        assert [content(target) for target in targets] == data
        pool.read(NAMESPACE, chain, buffers=targets)
    assert marked == ["MainThread"] * 3  # once for a device and a call
    assert contexts == [("kvpool", OnGpu.device)]


# --- what it refuses ----------------------------------------------------------------------------


class Foreign:
    """An array of another library, on a device that this machine does not have."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {
            "shape": (16,), "typestr": "|u1", "data": (1 << 40, False), "version": 3, "stream": 1
        }  # fmt: skip


Foreign.__cuda_array_interface__ = None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("memory", "error", "text"),
    [
        (lambda: empty(64).view(8, 8).t(), BadBuffer, "buffer 1 is not contiguous"),
        (lambda: empty(64)[::2], BadBuffer, "buffer 1 is not contiguous"),
        (lambda: empty(64)[:0], BadBuffer, "buffer 1 is empty"),
        (lambda: [empty(8), bytearray(8)], BadBuffer, "buffer 1 has pieces on a device and others"),
        (lambda: [torch.zeros(8), empty(8)], BadBuffer, "buffer 1 has pieces on a device and"),
        (lambda: empty(6 * SIZE + 1), TooLarge, "raise client.device_staging"),
        (Foreign, BadBuffer, "buffer 1 cannot be used: .*CUDA"),
    ],
)
async def test_memory_that_cannot_be_used(
    tcp: Pool, memory: Any, error: type[Exception], text: str
) -> None:
    chain = keys("wrong", 2)
    with pytest.raises(error, match=text):
        await tcp.write(NAMESPACE, chain, [empty(), memory()])
    await tcp.write(NAMESPACE, chain, values(chain, 16))
    with pytest.raises(error, match=text):
        await tcp.read(NAMESPACE, chain, [empty(), memory()])


async def test_memory_that_is_too_small(tcp: Pool) -> None:
    (name,) = keys("size", 1)
    await tcp.write(NAMESPACE, [name], [value(name, SIZE)])
    with pytest.raises(BadBuffer, match="buffer 0 has 10 bytes"):
        await tcp.read(NAMESPACE, [name], [empty(10)])


async def test_short_deadlines_pin_memory_once(tcp: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than a call may take: the call ends in time, and a later one has it."""
    pinned = threading.Event()
    sizes: list[int] = []

    def slowly(size: int, _: Any) -> Any:
        sizes.append(size)
        assert pinned.wait(20)
        return torch.empty(size, dtype=torch.uint8).as_subclass(LateTensor)

    monkeypatch.setattr(lane, "pinned", slowly)
    (name,) = chain = keys("pinned", 1)
    async with asyncio.timeout(10):
        for _ in range(3):
            calls = [tcp.write(NAMESPACE, chain, [empty()], timeout=0.05) for _ in range(2)]
            assert await asyncio.gather(*calls) == [[WriteStatus.DEADLINE]] * 2
        writing = asyncio.ensure_future(
            tcp.write(NAMESPACE, chain, [on_gpu(value(name, SIZE))], timeout=10)
        )
        await asyncio.sleep(0.05)
        pinned.set()
        assert await writing == [WriteStatus.STORED]
    assert sizes == [6 * SIZE]


async def test_memory_that_is_pinned_too_late_is_given_back(
    pool_dev: dev.Dev, threads: list[DeviceThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool was closed meanwhile."""
    pinned = threading.Event()

    def slowly(size: int, _: Any) -> Any:
        assert pinned.wait(20)
        return torch.empty(size, dtype=torch.uint8).as_subclass(LateTensor)

    monkeypatch.setattr(lane, "pinned", slowly)
    async with pool_dev.pool(configured(pool_dev, "tcp")) as pool:
        writing = asyncio.ensure_future(pool.write(NAMESPACE, keys("late", 1), [empty()]))
        await asyncio.sleep(0.05)
    pinned.set()
    with pytest.raises(Closed):
        await writing
    assert [thread._closed for thread in threads] == [True, True]
    assert pool._memory.pinned is not None
    assert pool._memory.pinned._pinned is None


def out_of_memory(*_: object) -> None:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might")


NOT_PINNED = r"^576 KiB of pinned host .* out of memory; see client\.device_staging$"


async def test_pinned_memory_that_cannot_be_had(tcp: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "pinned", out_of_memory)
    with pytest.raises(ConfigError, match=NOT_PINNED):
        await tcp.write(NAMESPACE, [key("x")], [empty()])


@pytest.mark.parametrize("path", ["staged", "auto"])
async def test_memory_that_is_pinned_at_the_start(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Then no call waits for it, and what is wrong is told there."""
    config = configured(pool_dev, "tcp", path)
    for _ in range(2):
        kvpool.reserve_device_memory(OnGpu.device, config)
    monkeypatch.setattr(lane, "pinned", out_of_memory)
    chain = keys("reserved", 3)
    async with pool_dev.pool(config) as pool:
        assert set(await pool.write(NAMESPACE, chain, [empty()] * 3)) == {WriteStatus.STORED}
        assert all(hits(await pool.read(NAMESPACE, chain, [empty() for _ in chain])))
        with pytest.raises(ConfigError, match=NOT_PINNED):  # this client has it
            kvpool.reserve_device_memory(OnGpu.device, config)


def test_a_device_that_makes_no_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks are staged as where they come directly, which `auto` then leaves."""
    monkeypatch.setattr(torch.cuda, "Stream", out_of_memory)
    why = r"^device cuda:0: RuntimeError: CUDA error: out of memory$"
    with pytest.raises(DeviceFailed, match=why):
        DeviceThread(OnGpu.device)
