"""Blocks of a server's HBM tier, read into a client's device without a stop in a host's memory.

As in `test_direct.py` all of the path is real but the driver: here both the server's tier and the
client's memory are on fake devices.
"""

# ruff: noqa: F811  # fixtures

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kvpool import Pool, ReadStatus, dev, removals
from kvpool.server.state.holdings import Limits
from kvpool.testing.invariants import check_invariants
from kvpool.tools.subprocesses import Child, process_of
from kvpool.types import Pin
from kvpool_tiers.hbm import Hbm
from tests.client.direct_blocks import (  # noqa: F401
    LISTEN,
    SIZE,
    SMALL,
    Blocks,
    Make,
    auto,
    client,
    configured,
    gpu,
    in_both,
    in_rows,
    of_kind,
    partly_on_the_host,
    to_read,
    torch,
    transports,
    ucx,
    warm,
    writer,
)
from tests.client.test_direct import damage, read_while_it_ends, still
from tests.conftest import NAMESPACE, buffers, eventually, key
from tests.support.fake_device import FakeGpu, FakeTensor

Transfer = ucx.Transfer
Patch = pytest.MonkeyPatch
MIB = 1 << 20


@pytest.fixture
async def served(gpu: FakeGpu, monkeypatch: Patch) -> AsyncIterator[dev.Dev]:
    """A server whose blocks are demoted to a device."""
    monkeypatch.setattr(ucx, "SMALL", SMALL)
    with gpu.on_stream(torch.cuda.Stream(torch.device("cuda", 0))):
        serving = dev.serve(
            listen=LISTEN,
            transports=transports(),
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


def pins(served: dev.Dev) -> int:
    return sum(store.held.pins for store in served.servers[0].stack.stores)


def hbm(served: dev.Dev) -> Hbm:
    tier = served.servers[0].tiers[1]
    assert isinstance(tier, Hbm)
    return tier


def rot(served: dev.Dev, digest: bytes) -> None:
    """The last byte of the tier's copy changes."""
    entry = served.servers[0].stack.stores[1].index.peek(NAMESPACE, 0, digest)
    rotten: Any = hbm(served).device_view(entry.offset, SIZE)
    rotten.behind[SIZE - 1] ^= 1


async def leave_memory(served: dev.Dev, chain: Sequence[bytes]) -> None:
    """As when the memory is full."""
    stack = served.servers[0].stack
    device = stack.stores[1]
    await eventually(lambda: all(device.index.peek(NAMESPACE, 0, key) is not None for key in chain))
    await eventually(lambda: not stack.front.held.pins and not device.held.pins)
    stack.front.remove(NAMESPACE, chain, ReadStatus.EVICTED)
    assert all(stack.index.below(NAMESPACE, 0, key) is not None for key in chain)


@pytest.fixture
def on_the_device(served: dev.Dev, to_read: Make) -> Make:
    """Makes blocks that the server has in its HBM tier alone."""

    async def make(name: str, *arguments: Any, **options: Any) -> Blocks:
        made = await to_read(name, *arguments, **options)
        await leave_memory(served, made.chain)
        return made

    return make


def promoted(served: dev.Dev, blocks: Blocks) -> int:
    """How many of them have come to the server's host memory."""
    front = served.servers[0].store
    return sum(front.index.peek(NAMESPACE, 0, digest) is not None for digest in blocks.chain)


# --- the same bytes ---------------------------------------------------------------------------


async def test_blocks_go_from_one_device_to_another(
    served: dev.Dev, client: Pool, on_the_device: Make, gpu: FakeGpu
) -> None:
    blocks = await on_the_device("hbm", [SIZE] * 7, in_both)
    for _ in range(2):  # the second time the lanes are proved
        await blocks.arrive(client)
        blocks.refill(in_both)
    assert promoted(served, blocks) == 0
    sent = [len(one) for one in gpu.registered if one.place.index == 1]  # only the tier is on it
    assert (sent.count(SIZE), sent.count(8)) == (14, 1)
    assert served.servers[0].stack.index.hits == [0, 14]
    assert client._memory.pinned is None


async def test_an_answer_from_memory_and_from_the_device(
    served: dev.Dev, client: Pool, to_read: Make, gpu: FakeGpu
) -> None:
    """Sizes of their own, in any order, and a miss among them."""
    blocks = await to_read("mixed", [SIZE, 100, 3 * SIZE, 5, SIZE, 2 * SIZE], in_rows, spare=9)
    await leave_memory(served, [blocks.chain[i] for i in (0, 1, 4)])
    blocks.chain.insert(1, key("never"))
    blocks.data.insert(1, b"")
    for row in (blocks.chain, blocks.data):
        row.insert(0, row.pop(5))
    blocks.refill(in_rows)
    assert await blocks.move(client) == ["hit"] * 2 + ["never written"] + ["hit"] * 4
    assert await blocks.there() == [one + b"-" * 9 for one in blocks.data]
    assert promoted(served, blocks) == 3


async def test_a_block_that_the_host_has_is_sent_from_there(
    served: dev.Dev, client: Pool, writer: Pool, on_the_device: Make, gpu: FakeGpu
) -> None:
    blocks = await on_the_device("both")
    await writer.read(NAMESPACE, blocks.chain, buffers(3, SIZE))
    assert promoted(served, blocks) == 3
    await blocks.arrive(client)
    assert not [one for one in gpu.registered if one.place.index == 1]


@pytest.mark.parametrize("size", [1, SMALL // 2, SMALL // 2 + 1])
async def test_small_answers_come_from_the_hosts_memory(
    served: dev.Dev, client: Pool, on_the_device: Make, size: int
) -> None:
    """They go with their frame; one byte more for each of the two, and they do not."""
    blocks = await on_the_device("small", [size] * 2, in_rows)
    await blocks.arrive(client)
    assert promoted(served, blocks) == (2 if 2 * size <= SMALL else 0)


async def test_readers_without_a_device_are_served_from_memory(
    served: dev.Dev, client: Pool, on_the_device: Make
) -> None:
    """Over the same transport, and in the same call."""
    blocks = await on_the_device("hosts", [SIZE] * 4, partly_on_the_host)
    await blocks.arrive(client)
    assert promoted(served, blocks) == 2


async def test_a_connection_may_pin_a_part_of_the_device(
    served: dev.Dev, client: Pool, on_the_device: Make
) -> None:
    """The rest comes in further answers, from the host's memory, or when the pins are gone."""
    store = served.servers[0].stack.stores[1]
    assert store.held.limits.copies.total == 16 * MIB  # a quarter
    assert store.held.limits.copies.each == 8 * MIB
    blocks = await on_the_device("much", [SIZE] * 7)
    extent = store.allocator.rounded(SIZE)
    store.held.limits = Limits.of(4 * extent, 4 * extent)
    most, pin = 0, store.pin

    def watched(*arguments: Any, **options: Any) -> list[Pin]:
        nonlocal most
        found = pin(*arguments, **options)
        most = max(most, store.held.limits.copies.used)
        return found

    store.pin = watched  # type: ignore[method-assign]
    await blocks.arrive(client)
    assert most == 2 * extent


# --- wrong bytes --------------------------------------------------------------------------------


async def test_bytes_that_rot_in_the_tier_are_found_on_the_other_device(
    served: dev.Dev, client: Pool, on_the_device: Make
) -> None:
    """The server looks at its copy, and drops it."""
    blocks = await on_the_device("rot", [SIZE] * 4)
    for digest in blocks.chain[1:3]:
        rot(served, digest)
    assert await blocks.move(client) == ["hit", "corrupt", "corrupt", "hit"]
    nothing = b"-" * SIZE
    assert await blocks.there() == [blocks.data[0], nothing, nothing, blocks.data[3]]
    stack = served.servers[0].stack
    kept = [stack.peek(NAMESPACE, 0, digest) is not None for digest in blocks.chain]
    assert kept == [True, False, False, True]
    assert await blocks.move(client, slice(1, 2)) == ["corrupt"]  # and says why it is gone


async def test_a_report_about_a_block_that_is_right_leaves_it(
    client: Pool, on_the_device: Make, monkeypatch: Patch
) -> None:
    blocks = await on_the_device("wire")
    with monkeypatch.context() as patch:
        damage(patch)
        assert await blocks.move(client) == ["corrupt", "hit", "hit"]
    assert (await blocks.there())[0] == b"-" * SIZE
    await blocks.arrive(client)


async def test_a_tier_that_cannot_be_read_is_not_accused(
    client: Pool, on_the_device: Make, gpu: FakeGpu, monkeypatch: Patch
) -> None:
    blocks = await on_the_device("unread", [SIZE] * 2, in_rows)
    read_into = Hbm.read_into

    async def fails(self: Hbm, offset: int, buffer: memoryview) -> None:
        gpu.fails = "CUDA error: unspecified launch failure"
        await read_into(self, offset, buffer)

    with monkeypatch.context() as patch:
        damage(patch)
        patch.setattr(Hbm, "read_into", fails)
        assert await blocks.move(client) == ["corrupt", "hit"]
    await blocks.arrive(client)


async def test_a_rotten_copy_is_not_the_ways_fault(
    served: dev.Dev, auto: Pool, writer: Pool, on_the_device: Make, monkeypatch: Patch
) -> None:
    """It is gone when the block is read once more, and another copy may be right."""
    blocks = await on_the_device("acquitted")
    rot(served, blocks.chain[1])
    report = removals.report_corruption

    async def and_written_again(*arguments: Any, **named: Any) -> list[bool]:
        answer = await report(*arguments, **named)
        await writer.write(NAMESPACE, blocks.chain, blocks.data)
        return answer

    monkeypatch.setattr(removals, "report_corruption", and_written_again)
    await blocks.arrive(auto)
    assert auto.counters["direct_corrupt"] == 1
    before = auto.counters["direct_read_bytes"]
    await blocks.arrive(auto)
    assert auto.counters["direct_read_bytes"] == before + 3 * SIZE  # the way is still used


# --- lanes that do not send from a device ---------------------------------------------------------


def sends_without_rendezvous(patch: Patch) -> None:
    send = Transfer.send
    patch.setattr(
        Transfer, "send", lambda self, one: send(self, one) or isinstance(one, FakeTensor)
    )


def changes_what_it_sends(patch: Patch) -> None:
    send = Transfer.send

    def wrong(self: Transfer, buffer: Any) -> bool:
        if isinstance(buffer, FakeTensor):
            other = buffer.behind.clone()
            other[0] ^= 1
            buffer = memoryview(other.numpy())
        return send(self, buffer)

    patch.setattr(Transfer, "send", wrong)


def cannot_register(patch: Patch) -> None:
    send = Transfer.send

    def fails(self: Transfer, buffer: Any) -> bool:
        if isinstance(buffer, FakeTensor):
            raise ucx.LinkBroken("UCX send: this memory cannot be registered")
        return send(self, buffer)

    patch.setattr(Transfer, "send", fails)


@pytest.mark.parametrize("lane", [sends_without_rendezvous, changes_what_it_sends, cannot_register])
@pytest.mark.parametrize("path", ["client", "auto"])
async def test_a_lane_that_cannot_send_from_a_device_is_not_asked_again(
    served: dev.Dev,
    client: Pool,
    auto: Pool,
    on_the_device: Make,
    gpu: FakeGpu,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    lane: Any,
    path: str,
) -> None:
    """The blocks come through the server's memory, into the client's device, in the same call."""
    pool = client if path == "client" else auto
    lane(monkeypatch)
    for number in range(2):
        blocks = await on_the_device(f"lane {number}", memory=in_rows)
        await blocks.arrive(pool)
        assert promoted(served, blocks) == 3
    assert pool.counters["direct_read_bytes"] == 6 * SIZE
    assert not pool.counters["failed_ucx"]
    assert caplog.text.count("blocks on the server's device come through its memory") == 1
    if lane is not cannot_register:
        assert all(len(one) in (8, SIZE) for one in gpu.registered)


async def test_a_lane_that_is_silent_is_not_asked_again(
    served: dev.Dev, on_the_device: Make, monkeypatch: Patch
) -> None:
    send = Transfer.send
    monkeypatch.setattr(
        Transfer, "send", lambda self, one: not isinstance(one, FakeTensor) and send(self, one)
    )
    blocks = await on_the_device("silent", [SIZE] * 2, in_rows)
    async with served.pool(configured(served, "direct")) as pool:
        assert "hit" not in await blocks.move(pool, timeout=0.3)
        await blocks.arrive(pool, timeout=4.0)
        assert promoted(served, blocks) == 2


# --- pins, ends -----------------------------------------------------------------------------------


async def test_a_read_that_is_cancelled_anywhere_leaves_nothing_behind(
    served: dev.Dev, client: Pool, on_the_device: Make, gpu: FakeGpu
) -> None:
    """After every number of turns of the loop, until one has ended by itself."""
    blocks = await on_the_device("cancelled", [SIZE] * 4, in_both)
    turns = cancelled = 0
    while True:
        blocks.refill(in_both)
        reading = asyncio.ensure_future(blocks.move(client))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            assert reading.result() == ["hit"] * 4
            break
        cancelled += 1
        await still(client, gpu, blocks.memory)
        there = await blocks.there()
        assert all(there[n] in (b"-" * SIZE, blocks.data[n]) for n in (1, 3)), "those in layers"
        turns += 1 + turns // 6
    assert cancelled > 10
    await eventually(lambda: pins(served) == 0)
    assert promoted(served, blocks) == 0


async def test_the_source_is_pinned_until_the_last_byte_has_left(
    served: dev.Dev, client: Pool, on_the_device: Make, gpu: FakeGpu, monkeypatch: Patch
) -> None:
    """Also when the block is removed meanwhile: its place is nobody else's."""
    blocks = await on_the_device("pinned", [MIB] * 2, in_rows)
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
            if held[-1] and len([o for o in gpu.registered if len(o) == MIB]) >= 1:
                removed = True
                served.servers[0].stack.remove(NAMESPACE, blocks.chain)
                for entry in store.extents.pending_free.values():
                    assert entry.pins
                # A new block of the same size gets another place.
                other: Any = hbm(served).device_view(0, 64 * MIB)
                for hole in range(0, 64 * MIB, MIB):
                    if all(
                        abs(hole - e.offset) > MIB - 1 for e in store.extents.pending_free.values()
                    ):
                        other.behind[hole : hole + MIB] = 0
        look(transfer)

    monkeypatch.setattr(Transfer, "look", watched)
    await blocks.arrive(client)
    assert removed
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
    apart: tuple[str, Child], gpu: FakeGpu, monkeypatch: Patch, signal_: int
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
    served: dev.Dev, client: Pool, on_the_device: Make, gpu: FakeGpu, monkeypatch: Patch
) -> None:
    """Its kernel ends the connection while the server sends; nothing is sent from there after."""
    blocks = await on_the_device("cut", [MIB] * 8, in_rows)
    store = served.servers[0].stack.stores[1]
    send, pinned_at_end = Transfer.send, []
    stop, killed = Transfer.stop, []

    def cut(transfer: Transfer, buffer: Any) -> bool:
        at_once = send(transfer, buffer)
        if isinstance(buffer, FakeTensor) and len(buffer) == MIB and not killed:
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
    await blocks.move(client)
    assert killed
    await eventually(lambda: len(pinned_at_end) == 2)
    assert all(pinned_at_end)  # until UCX uses the memory no more
    await eventually(lambda: store.held.pins == 0)
    assert store.held.limits.copies.used == 0


def client_streams(client: Pool) -> list[Any]:
    """Those that are at work."""
    found = []
    for record in client._servers.known.values():
        for channel in record.channels.values():
            if isinstance(channel, ucx.UcxChannel):
                found += list(channel._streams._busy)
    return found
