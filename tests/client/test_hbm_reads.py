"""Blocks of a server's HBM tier, read into a client's device without a stop in a host's memory.

As in `test_direct.py` all of the path is real but the driver: here both the server's tier and the
client's memory are on fake devices.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kvpool import Pool, ReadStatus, dev
from kvpool.client import reader
from kvpool.server.state.budget import Limits
from kvpool.testing.invariants import check_invariants
from kvpool.tools.subprocesses import Child, process_of
from kvpool.types import Pin
from tests.client.test_direct import (
    SIZE,
    SMALL,
    auto,  # noqa: F401
    configured,
    damage,
    joined,
    labels,
    layers,
    read_while_it_ends,
    still,
    warm,  # noqa: F401
)
from tests.conftest import NAMESPACE, buffers, eventually, keys, value, values
from tests.support.fake_device import FakeGpu, FakeTensor

torch = pytest.importorskip("torch", reason="devices need torch")
pytest.importorskip("ucxx", reason="direct reads need ucxx: pip install kvpool[ucx]")

from kvpool_tiers.hbm import Hbm  # noqa: E402
from kvpool_transports import ucx  # noqa: E402
from kvpool_transports.inproc import InprocTransport  # noqa: E402
from kvpool_transports.tcp import TcpTransport  # noqa: E402
from kvpool_transports.ucx import UcxTransport  # noqa: E402
from kvpool_transports.ucx_worker import Transfer  # noqa: E402


@pytest.fixture
def gpu(warm: None, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:  # noqa: F811
    return FakeGpu(monkeypatch)


@pytest.fixture
async def served(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dev.Dev]:
    """A server whose blocks are demoted to a device."""
    monkeypatch.setattr(ucx, "SMALL", SMALL)
    transports = {
        "ucx": UcxTransport(tls="tcp,cuda_copy,self"),
        "tcp": TcpTransport(),
        "inproc": InprocTransport(),
    }
    listen = ("ucx://127.0.0.1:0", "tcp://127.0.0.1:0", "inproc://")
    with gpu.on_stream(torch.cuda.Stream(torch.device("cuda", 0))):
        serving = dev.serve(
            listen=listen,
            transports=transports,
            tiers=["dram:16MiB", "hbm:64MiB?device=cuda:1"],
        )
        running = await serving.__aenter__()
    try:
        yield running
        (server,) = running.servers
        await eventually(lambda: pins(running) == 0)
        check_invariants(server.stack)
        assert sum(limit.used for store in server.stack.stores for limit in store.held.limits) == 0
    finally:
        await serving.__aexit__(None, None, None)


@pytest.fixture
async def writer(served: dev.Dev) -> AsyncIterator[Pool]:
    async with served.pool(configured(served, "staged", "tcp")) as pool:
        yield pool


@pytest.fixture
async def client(served: dev.Dev) -> AsyncIterator[Pool]:
    async with served.pool(configured(served, "direct")) as pool:
        yield pool


def pins(served: dev.Dev) -> int:
    return sum(store.held.pins for store in served.servers[0].stack.stores)


def hbm(served: dev.Dev) -> Hbm:
    tier = served.servers[0].tiers[1]
    assert isinstance(tier, Hbm)
    return tier


async def on_the_device(
    served: dev.Dev, writer: Pool, name: str, count: int, size: int = SIZE
) -> tuple[list[bytes], list[bytes]]:
    """Blocks that the server has in its HBM tier alone."""
    chain = keys(name, count)
    data = values(chain, size)
    await writer.write(NAMESPACE, chain, data)
    await leave_memory(served, chain)
    return chain, data


async def leave_memory(served: dev.Dev, chain: Sequence[bytes]) -> None:
    """As when the memory is full."""
    stack = served.servers[0].stack
    device = stack.stores[1]
    await eventually(lambda: all(device.index.peek(NAMESPACE, 0, key) is not None for key in chain))
    await eventually(lambda: not stack.front.held.pins and not device.held.pins)
    stack.front.remove(NAMESPACE, chain, ReadStatus.EVICTED)
    assert all(stack.index.below(NAMESPACE, 0, key) is not None for key in chain)


def promoted(served: dev.Dev, chain: Sequence[bytes]) -> int:
    """How many of them have come to the server's host memory."""
    front = served.servers[0].store
    return sum(front.index.peek(NAMESPACE, 0, key) is not None for key in chain)


async def read(client: Pool, chain: Sequence[bytes], targets: Sequence[Any]) -> list[str]:
    return labels(await client.read(NAMESPACE, chain, targets))


# --- the same bytes ---------------------------------------------------------------------------


async def test_blocks_go_from_one_device_to_another(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    chain, data = await on_the_device(served, writer, "hbm", 7)
    for _ in range(2):  # the second time the lanes are proved
        targets = [layers(gpu) if i % 2 else [gpu.tensor(bytes(SIZE))] for i in range(7)]
        assert await read(client, chain, targets) == ["hit"] * 7
        assert [joined(gpu, target) for target in targets] == data
    assert promoted(served, chain) == 0
    sent = [one for one in gpu.registered if one.place.index == 1]  # only the tier is on it
    assert len([one for one in sent if len(one) == SIZE]) == 14
    assert len([one for one in sent if len(one) == 8]) == 1
    assert served.servers[0].stack.index.hits == [0, 14]
    assert client._memory.pinned is None


async def test_an_answer_from_memory_and_from_the_device(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """Sizes of their own, in any order, and a miss among them."""
    chain = keys("mixed", 6)
    sizes = (SIZE, 100, 3 * SIZE, 5, SIZE, 2 * SIZE)
    data = [value(k, size) for k, size in zip(chain, sizes, strict=True)]
    await writer.write(NAMESPACE, chain, data)
    await leave_memory(served, [chain[i] for i in (0, 1, 4)])
    asked = [chain[4], keys("never", 1)[0], *chain[:4], chain[5]]
    wanted = [data[4], b"", *data[:4], data[5]]
    targets = [gpu.tensor(b"-" * (len(one) + 9)) for one in wanted]
    assert await read(client, asked, targets) == ["hit", "never written"] + ["hit"] * 5
    assert [gpu.content(t) for t in targets] == [one + b"-" * 9 for one in wanted]
    assert promoted(served, chain) == 3


async def test_a_block_that_the_host_has_is_sent_from_there(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    chain, data = await on_the_device(served, writer, "both", 3)
    assert await read(writer, chain, buffers(3, SIZE)) == ["hit"] * 3
    assert promoted(served, chain) == 3
    targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
    assert await read(client, chain, targets) == ["hit"] * 3
    assert [gpu.content(target) for target in targets] == data
    assert not [one for one in gpu.registered if one.place.index == 1]


@pytest.mark.parametrize("size", [1, SMALL // 2, SMALL // 2 + 1])
async def test_small_answers_come_from_the_hosts_memory(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu, size: int
) -> None:
    """They go with their frame; one byte more for each of the two, and they do not."""
    chain, data = await on_the_device(served, writer, "small", 2, size)
    targets = [gpu.tensor(b"-" * size) for _ in chain]
    assert await read(client, chain, targets) == ["hit"] * 2
    assert [gpu.content(target) for target in targets] == data
    assert promoted(served, chain) == (2 if 2 * size <= SMALL else 0)


async def test_readers_without_a_device_are_served_from_memory(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """Over the same transport, and in the same call."""
    chain, data = await on_the_device(served, writer, "hosts", 4)
    host = buffers(2, SIZE)
    targets = [gpu.tensor(bytes(SIZE)), host[0], gpu.tensor(bytes(SIZE)), host[1]]
    assert await read(client, chain, targets) == ["hit"] * 4
    assert host == [data[1], data[3]]
    assert [gpu.content(targets[i]) for i in (0, 2)] == [data[0], data[2]]
    assert promoted(served, chain) == 2


async def test_a_connection_may_pin_a_part_of_the_device(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """The rest comes in further answers, from the host's memory, or when the pins are gone."""
    store = served.servers[0].stack.stores[1]
    assert store.held.limits.copies.total == 16 << 20  # a quarter
    assert store.held.limits.copies.each == 8 << 20
    chain, data = await on_the_device(served, writer, "much", 7)
    extent = store.allocator.rounded(SIZE)
    store.held.limits = Limits.of(4 * extent, 4 * extent)
    most, pin = 0, store.pin

    def watched(*arguments: Any, **options: Any) -> list[Pin]:
        nonlocal most
        found = pin(*arguments, **options)
        most = max(most, store.held.limits.copies.used)
        return found

    store.pin = watched  # type: ignore[method-assign]
    targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
    assert await read(client, chain, targets) == ["hit"] * 7
    assert [gpu.content(target) for target in targets] == data
    assert most == 2 * extent


# --- wrong bytes --------------------------------------------------------------------------------


async def test_bytes_that_rot_in_the_tier_are_found_on_the_other_device(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """The server looks at its copy, and drops it."""
    chain, data = await on_the_device(served, writer, "rot", 4)
    stack = served.servers[0].stack
    for number in (1, 2):
        entry = stack.stores[1].index.peek(NAMESPACE, 0, chain[number])
        assert entry is not None
        rotten: Any = hbm(served).device_view(entry.offset, SIZE)
        rotten.behind[SIZE - 1] ^= 1
    targets = [gpu.tensor(b"-" * SIZE), gpu.tensor(b"-" * SIZE), layers(gpu), layers(gpu)]
    assert await read(client, chain, targets) == ["hit", "corrupt", "corrupt", "hit"]
    assert gpu.content(targets[0]) == data[0]
    assert joined(gpu, targets[2]) == b"-" * SIZE
    assert joined(gpu, targets[3]) == data[3]
    assert [stack.peek(NAMESPACE, 0, key) is not None for key in chain] == [
        True,
        False,
        False,
        True,
    ]
    assert await read(client, chain[1:2], targets[1:2]) == ["corrupt"]  # and says why it is gone


async def test_a_report_about_a_block_that_is_right_leaves_it(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, data = await on_the_device(served, writer, "wire", 3)
    with monkeypatch.context() as patch:
        damage(patch)
        targets = [layers(gpu) for _ in chain]
        assert await read(client, chain, targets) == ["corrupt", "hit", "hit"]
    assert joined(gpu, targets[0]) == b"-" * SIZE
    assert await read(client, chain, targets) == ["hit"] * 3
    assert [joined(gpu, target) for target in targets] == data


async def test_a_tier_that_cannot_be_read_is_not_accused(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, _ = await on_the_device(served, writer, "unread", 2)
    with monkeypatch.context() as patch:
        damage(patch)
        gpu_fails = "CUDA error: unspecified launch failure"
        read_into = Hbm.read_into

        async def fails(self: Hbm, offset: int, buffer: memoryview) -> None:
            gpu.fails = gpu_fails
            await read_into(self, offset, buffer)

        patch.setattr(Hbm, "read_into", fails)
        targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
        assert await read(client, chain, targets) == ["corrupt", "hit"]
    assert await read(client, chain, targets) == ["hit"] * 2


# --- auto ---------------------------------------------------------------------------------------


async def test_a_rotten_copy_is_not_the_ways_fault(
    served: dev.Dev,
    auto: Pool,  # noqa: F811
    writer: Pool,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is gone when the block is read once more, and another copy may be right."""
    chain, data = await on_the_device(served, writer, "acquitted", 3)
    stack = served.servers[0].stack
    entry = stack.stores[1].index.peek(NAMESPACE, 0, chain[1])
    assert entry is not None
    rotten: Any = hbm(served).device_view(entry.offset, SIZE)
    rotten.behind[7] ^= 1
    report = reader._report_to

    async def and_written_again(*arguments: Any) -> list[bool]:
        answer = await report(*arguments)
        assert [status.name for status in await writer.write(NAMESPACE, chain, data)]
        return answer

    monkeypatch.setattr(reader, "_report_to", and_written_again)
    targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
    assert await read(auto, chain, targets) == ["hit"] * 3
    assert [gpu.content(target) for target in targets] == data
    assert auto.counters["direct_corrupt"] == 1
    again = auto.counters["direct_read_bytes"]
    assert await read(auto, chain, targets) == ["hit"] * 3
    assert auto.counters["direct_read_bytes"] == again + 3 * SIZE  # the way is still used


# --- lanes that do not send from a device ---------------------------------------------------------


def sends_without_rendezvous(patch: pytest.MonkeyPatch) -> None:
    send = Transfer.send
    patch.setattr(
        Transfer, "send", lambda self, one: send(self, one) or isinstance(one, FakeTensor)
    )


def changes_what_it_sends(patch: pytest.MonkeyPatch) -> None:
    send = Transfer.send

    def wrong(self: Transfer, buffer: Any) -> bool:
        if isinstance(buffer, FakeTensor):
            other = buffer.behind.clone()
            other[0] ^= 1
            buffer = memoryview(other.numpy())
        return send(self, buffer)

    patch.setattr(Transfer, "send", wrong)


def cannot_register(patch: pytest.MonkeyPatch) -> None:
    send = Transfer.send

    def fails(self: Transfer, buffer: Any) -> bool:
        if isinstance(buffer, FakeTensor):
            raise ucx.LinkBroken("UCX send: this memory cannot be registered")
        return send(self, buffer)

    patch.setattr(Transfer, "send", fails)


@pytest.mark.parametrize("lane", [sends_without_rendezvous, changes_what_it_sends, cannot_register])
@pytest.mark.parametrize("path", ["direct", "auto"])
async def test_a_lane_that_cannot_send_from_a_device_is_not_asked_again(
    served: dev.Dev,
    client: Pool,
    auto: Pool,  # noqa: F811
    writer: Pool,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    lane: Any,
    path: str,
) -> None:
    """The blocks come through the server's memory, into the client's device, in the same call."""
    pool = client if path == "direct" else auto
    said: list[Any] = []
    monkeypatch.setattr(ucx.log, "warning", lambda text, **fields: said.append((text, fields)))
    lane(monkeypatch)
    for number in range(2):
        chain, data = await on_the_device(served, writer, f"lane {number}", 3)
        targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
        assert await read(pool, chain, targets) == ["hit"] * 3
        assert [gpu.content(target) for target in targets] == data
        assert promoted(served, chain) == 3
    assert pool.counters["direct_read_bytes"] == 6 * SIZE
    assert not pool.counters["failed_ucx"]
    ((text, _),) = said
    assert text == "blocks on the server's device come through its memory"
    if lane is not cannot_register:
        assert all(len(one) in (8, SIZE) for one in gpu.registered)


async def test_a_lane_that_is_silent_is_not_asked_again(
    served: dev.Dev, gpu: FakeGpu, writer: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Transfer.send
    monkeypatch.setattr(
        Transfer,
        "send",
        lambda self, one: False if isinstance(one, FakeTensor) else send(self, one),
    )
    chain, data = await on_the_device(served, writer, "silent", 2)
    config = configured(served, "direct")
    async with served.pool(config) as pool:
        targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
        late = await pool.read(NAMESPACE, chain, targets, timeout=0.3)
        assert not any(result.status.hit for result in late)
        again = await pool.read(NAMESPACE, chain, targets, timeout=4.0)
        assert labels(again) == ["hit"] * 2
        assert [gpu.content(target) for target in targets] == data
        assert promoted(served, chain) == 2


# --- pins, ends -----------------------------------------------------------------------------------


async def test_a_read_that_is_cancelled_anywhere_leaves_nothing_behind(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """After every number of turns of the loop, until one has ended by itself."""
    chain, data = await on_the_device(served, writer, "cancelled", 4)
    turns = cancelled = 0
    while True:
        targets = [[gpu.tensor(b"-" * SIZE)] if i % 2 else layers(gpu) for i in range(4)]
        reading = asyncio.ensure_future(client.read(NAMESPACE, chain, targets))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            assert labels(reading.result()) == ["hit"] * 4
            break
        cancelled += 1
        await still(client, gpu, targets)
        for number, target in enumerate(targets):
            if number % 2 == 0:
                assert joined(gpu, target) in (b"-" * SIZE, data[number])
        turns += 1 + turns // 6
    assert cancelled > 10
    await eventually(lambda: pins(served) == 0)
    assert promoted(served, chain) == 0


async def test_the_source_is_pinned_until_the_last_byte_has_left(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the block is removed meanwhile: its place is nobody else's."""
    size = 1 << 20
    chain, data = await on_the_device(served, writer, "pinned", 2, size)
    store = served.servers[0].stack.stores[1]
    held: list[int] = []
    look = Transfer.look
    removed = False

    def watched(transfer: Transfer) -> None:
        nonlocal removed
        sending = any(
            isinstance(one, FakeTensor) and one.place.index == 1 for one in gpu.registered
        )
        if sending and not removed:
            held.append(store.held.pins)
            if held[-1] and len([o for o in gpu.registered if len(o) == size]) >= 1:
                removed = True
                served.servers[0].stack.remove(NAMESPACE, chain)
                for entry in store.extents.pending_free.values():
                    assert entry.pins
                # A new block of the same size gets another place.
                other: Any = hbm(served).device_view(0, 64 << 20)
                for hole in range(0, 64 << 20, size):
                    if all(
                        abs(hole - e.offset) >= size for e in store.extents.pending_free.values()
                    ):
                        other.behind[hole : hole + size] = 0
        look(transfer)

    monkeypatch.setattr(Transfer, "look", watched)
    targets = [gpu.tensor(bytes(size)) for _ in chain]
    assert await read(client, chain, targets) == ["hit"] * 2
    assert removed
    assert [gpu.content(target) for target in targets] == data
    await eventually(lambda: store.held.pins == 0 and not store.extents.pending_free)


# --- a peer that dies or stops in mid-transfer ----------------------------------------------------


@pytest.fixture
async def apart() -> AsyncIterator[tuple[str, Child]]:
    """A server in a process of its own, with all blocks on its device."""
    async with process_of("tests.support.hbm_server") as server:
        while not (line := await server.line()).startswith("master at "):
            pass  # UCX says that there is no CUDA
        yield line.removeprefix("master at "), server


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_ends_in_mid_transfer(
    apart: tuple[str, Child], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, signal_: int
) -> None:
    taken = ucx.UcxStream.take_device_token
    proved: list[bytes] = []

    async def noted(stream: Any, content: bytes, deadline: float) -> None:
        await taken(stream, content, deadline)
        proved.append(content)

    async def written() -> None:
        await asyncio.sleep(0.5)  # they leave the memory of its host
        monkeypatch.setattr(ucx.UcxStream, "take_device_token", noted)

    await read_while_it_ends(apart, gpu, monkeypatch, signal_, written)
    assert proved  # they came from its device


async def test_a_reader_that_is_killed_gives_its_pins_back(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel ends the connection while the server sends; nothing is sent from there after."""
    chain, _ = await on_the_device(served, writer, "cut", 8, 1 << 20)
    store = served.servers[0].stack.stores[1]
    send, pinned_at_end = Transfer.send, []
    stop, killed = Transfer.stop, []

    def cut(transfer: Transfer, buffer: Any) -> bool:
        at_once = send(transfer, buffer)
        if isinstance(buffer, FakeTensor) and len(buffer) == 1 << 20 and not killed:
            killed.append(transfer)
            for stream in list(client_streams(client)):
                stream._transport.abort()  # a reset, as of a process that is gone
        return at_once

    async def stopped(transfer: Transfer) -> None:
        if transfer in killed:
            pinned_at_end.append(store.held.pins)
        await stop(transfer)
        if transfer in killed:
            pinned_at_end.append(store.held.pins)

    monkeypatch.setattr(Transfer, "send", cut)
    monkeypatch.setattr(Transfer, "stop", stopped)
    targets = [gpu.tensor(bytes(1 << 20)) for _ in chain]
    await client.read(NAMESPACE, chain, targets)
    assert killed
    await eventually(lambda: len(pinned_at_end) == 2)
    assert all(pinned_at_end)  # until UCX uses the memory no more
    await eventually(lambda: store.held.pins == 0)
    assert store.held.limits.copies.used == 0


def client_streams(client: Pool) -> list[Any]:
    """Those that are at work."""
    found = []
    for record in client._servers._records.values():
        for channel in record.channels.values():
            if isinstance(channel, ucx.UcxChannel):
                found += list(channel._streams._busy)
    return found
