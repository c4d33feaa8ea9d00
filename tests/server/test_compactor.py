"""Blocks are moved in the memory of a running server, under readers and writers (G1, G4, G9)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from kvpool import Pool, ReadStatus, WriteStatus, dev
from kvpool.config import ClientConfig
from kvpool.errors import Closed
from kvpool.protocols import ReserveRequest
from kvpool.server import compactor
from kvpool.server.compactor import Compactor
from kvpool.server.state.extents import MAKING_ROOM
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace
from tests.conftest import NAMESPACE, TRANSPORTS, key, keys, listening, read_back, values

KIB, MIB = 1 << 10, 1 << 20
SMALL, LARGE = 16 * KIB, MIB
ONE = Namespace("one")


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[dev.Dev]:
    async with dev.serve(tiers=["dram:16MiB"], listen=listening(request)) as running:
        yield running
        check_invariants(running.servers[0].stack)
        check_invariants(running.master.directory)


@pytest.fixture(params=TRANSPORTS)
async def pool(request: pytest.FixtureRequest, server: dev.Dev) -> AsyncIterator[Pool]:
    config = ClientConfig(masters=[server.address], transports=[request.param], timeout_s=20)
    async with server.pool(config) as client:
        yield client


async def write(pool: Pool, digests: list[bytes], size: int) -> None:
    """Blocks that are no chain."""
    parents = [ROOT] * len(digests)
    written = await pool.write(NAMESPACE, digests, values(digests, size), parents=parents)
    assert set(written) == {WriteStatus.STORED}


async def right(pool: Pool, digests: list[bytes], size: int) -> int:
    """How many are here; the others were evicted."""
    found = await read_back(pool, digests, size)
    assert set(found) <= {ReadStatus.HIT, ReadStatus.EVICTED}
    return found.count(ReadStatus.HIT)


async def test_large_blocks_find_room_among_small_ones(server: dev.Dev, pool: Pool) -> None:
    small = keys("small", 1024)
    for first in range(0, 1024, 128):
        await write(pool, small[first : first + 128], SMALL)
    random.Random(1).shuffle(small)
    for first in range(0, 1024, 128):
        assert await right(pool, small[first : first + 128], SMALL) == 128
    large = keys("large", 4)
    reading = asyncio.create_task(read_until_cancelled(pool, small))
    for digest in large:
        await write(pool, [digest], LARGE)
    reading.cancel()
    assert isinstance((await asyncio.gather(reading, return_exceptions=True))[0], BaseException)
    assert await right(pool, large, LARGE) == 4
    there = sum([await right(pool, small[i : i + 128], SMALL) for i in range(0, 1024, 128)])
    store = server.servers[0].store
    assert store.extents.evicted_bytes <= 2 * 4 * LARGE + SMALL
    assert there == 1024 - store.extents.evicted
    stats = server.servers[0].stats(0.0)
    assert stats.counters["moved_blocks"] > 0
    assert stats.counters["moved_bytes"] == stats.counters["moved_blocks"] * SMALL


async def read_until_cancelled(pool: Pool, digests: list[bytes]) -> None:
    while True:
        await right(pool, random.Random(2).sample(digests, 4), SMALL)
        await asyncio.sleep(0)


async def test_no_turn_of_the_loop_is_long() -> None:
    """One block of 8 MiB into 32 MiB of small ones: thousands are evicted and moved."""
    store = Store(32 * MIB)
    memory = Memory(32 * MIB)
    mover = Compactor(store, memory, lambda: None)
    fill(store, memory, 4 * KIB)
    touched = [0]  # blocks, after each turn
    call = asyncio.create_task(reserve(store, mover, key("large"), 8 * MIB))
    while not call.done():
        await asyncio.sleep(0)
        touched.append(store.extents.evicted + mover.moved_blocks)
    assert (await call) == "RESERVED"
    assert store.extents.evicted_bytes <= 16 * MIB + 4 * KIB
    assert touched[-1] > 2000
    assert max(after - before for before, after in pairwise(touched)) <= 256


async def test_a_cancelled_writer_frees_a_target_only_when_its_copy_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(16 * MIB)
    memory = Memory(16 * MIB)
    mover = Compactor(store, memory, lambda: None)
    fill(store, memory, 2 * MIB)
    began, end = threading.Event(), threading.Event()

    def slow(target: memoryview, source: memoryview) -> None:
        began.set()
        end.wait(10)
        target[:] = source

    monkeypatch.setattr(compactor, "_copy", slow)
    call = asyncio.create_task(reserve(store, mover, key("large"), 3 * MIB))
    assert await asyncio.to_thread(began.wait, 10)
    for _ in range(3):
        call.cancel()
        await asyncio.sleep(0.01)
    assert not call.done()
    assert len(store.extents.move_targets) == 1
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not store.extents.move_targets
    assert store.extents.clearing is None
    assert not store.held.pins
    check_invariants(store)


class Memory:
    """A tier's memory."""

    def __init__(self, size: int) -> None:
        self.bytes = memoryview(bytearray(size))

    def view(self, offset: int, size: int) -> memoryview:
        return self.bytes[offset : offset + size]


def fill(store: Store, memory: Memory, size: int) -> None:
    """With blocks that were used in random order."""
    digests = keys("fill", store.allocator.capacity // size)
    for digest in digests:
        (answer,) = store.reserve(9, ReserveRequest(ONE, 0, [digest], [ROOT], [size]), 0.0)
        store.seal(9, answer.id, 0, 0.0)
    random.Random(1).shuffle(digests)
    for digest in digests:
        (pin,) = store.pin(9, ONE, 0, [digest], 1.0)
        store.unpin(9, pin.id)
    store.index.change_log.take()


async def reserve(store: Store, mover: Compactor, digest: bytes, size: int) -> str:
    """As a connection does it."""
    try:
        while True:
            request = ReserveRequest(ONE, 0, [digest], [ROOT], [size])
            (answer,) = store.reserve(1, request, 2.0)
            if answer is not MAKING_ROOM:
                return answer.status.name
            await mover.make_room(1, asyncio.get_running_loop().time() + 30)
    finally:
        mover.stop(1)


async def test_a_server_that_has_ended_holds_no_memory() -> None:
    async with dev.serve(tiers=["dram:1MiB"]) as running:
        (server,) = running.servers
        (memory,) = server.tiers
        assert len(memory.view(0, 4096)) == 4096
    with pytest.raises(Closed):
        memory.view(0, 4096)
