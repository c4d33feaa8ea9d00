"""What a server does when something in it goes wrong beside other work that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool import dev
from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.config import ServerConfig
from kvpool.protocols import Connection, Peer, ReserveRequest, Tier
from kvpool.server.block_server import BlockServer
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Cluster
from kvpool_tiers.dram import Dram
from kvpool_tiers.nvme.tier import Nvme
from tests.conftest import NAMESPACE, eventually, key, keys

SIZE = 8 << 20  # hashed in many steps


def later(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def store(
    writer: Connection, digest: bytes, *, spoilt: bool = False, size: int = SIZE
) -> None:
    """Write a block; with `spoilt` its bytes change afterwards."""
    request = ReserveRequest(NAMESPACE, 0, [digest], [ROOT], [size])
    (answer,) = await writer.reserve(request, deadline=later())
    assert answer.extent is not None
    (view,) = writer.views([answer])
    view[:] = bytes(size)
    sealed = checksum(view, block_seed(namespace_seed(NAMESPACE, 0), digest))
    await writer.seal([answer.id], [sealed], visible=False, deadline=later())
    if spoilt:
        view[5] ^= 1


@pytest.mark.parametrize("stored_anew", [False, True])
async def test_a_second_report_of_a_corrupt_block_leaves_the_one_stored_since(
    stored_anew: bool,
) -> None:
    """It has looked at the bytes before; what was stored anew under that name stays."""
    async with dev.serve("128MiB", listen=()) as running:
        (server,) = running.servers
        writer, one, two = (server.connect(Peer(name, "tcp")) for name in ("w", "1", "2"))
        bad, others = key("bad"), keys("others", 6)
        await store(writer, bad, spoilt=True)
        for digest in others:
            await store(writer, digest)
        second = asyncio.create_task(two.report_corruption(NAMESPACE, 0, [bad, *others]))
        for _ in range(12):  # it has hashed the bad block, and hashes the others
            await asyncio.sleep(0)
        assert not second.done()
        assert await one.report_corruption(NAMESPACE, 0, [bad]) == [True]
        assert server.stack.peek(NAMESPACE, 0, bad) is None
        if stored_anew:
            await store(writer, bad)
        assert await second == [True, *[False] * len(others)]
        assert (server.stack.peek(NAMESPACE, 0, bad) is not None) is stored_anew
        assert all(server.stack.peek(NAMESPACE, 0, digest) for digest in others)


async def test_every_reader_finds_a_corrupt_block_gone() -> None:
    async with dev.serve("128MiB", listen=()) as running:
        (server,) = running.servers
        writer = server.connect(Peer("w", "tcp"))
        chain = keys("two", 2)
        for digest in chain:
            await store(writer, digest, spoilt=True)
        assert await writer.report_corruption(NAMESPACE, 0, chain) == [True, True]
        assert [server.stack.peek(NAMESPACE, 0, digest) for digest in chain] == [None, None]


async def test_a_bug_while_blocks_go_to_the_disk_ends_no_write_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = ("dram:32MiB", f"nvme:{tmp_path}/blocks:128MiB")
    async with dev.serve("32MiB", tiers=tiers) as running:
        (server,) = running.servers
        good: Callable[..., Any] = server.stack.transfers.next_writebacks
        left = 2  # one for each of the tasks that write back

        def bug(*arguments: Any) -> Any:
            nonlocal left
            if left:
                left -= 1
                raise ValueError("a bug, twice")
            return good(*arguments)

        monkeypatch.setattr(server.stack.transfers, "next_writebacks", bug)
        writer = server.connect(Peer("w", "tcp"))
        for digest in keys("dirty", 8):  # twice what the memory holds
            await store(writer, digest)
        await eventually(lambda: not server.stack.front.extents.dirty_bytes)
        assert not left
    lines = [line for line in caplog.messages if "runs again" in line]
    assert lines
    assert "write-back" in lines[0]


class Faulty(Nvme):
    """Fails as no tier may: calls that `failing` names do. Writes wait while `paused`."""

    def __init__(self, path: Path, failures: Sequence[tuple[str, Exception]] = ()) -> None:
        super().__init__(32 << 20, path, direct=False)
        self.failures = list(failures)
        self.going = asyncio.Event()
        self.going.set()
        self.running: set[int] = set()
        self.written_twice: set[int] = set()

    def _may_fail(self, name: str) -> None:
        if self.failures and self.failures[0][0] == name:
            raise self.failures.pop(0)[1]

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        self._may_fail("write_from")
        if offset in self.running:
            self.written_twice.add(offset)
        self.running.add(offset)
        await self.going.wait()
        self.running.discard(offset)
        await super().write_from(offset, buffer)

    async def persist(self, records: Any) -> None:
        self._may_fail("persist")
        await super().persist(records)

    async def erase(self, offsets: Any) -> None:
        self._may_fail("erase")
        await super().erase(offsets)

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        self._may_fail("read_into")
        await super().read_into(offset, buffer)


@asynccontextmanager
async def one_server(*tiers: Tier) -> AsyncIterator[BlockServer]:
    config = ServerConfig(masters=(), listen=())
    server = BlockServer(config, cluster=Cluster(), network=None, transports={}, tiers=tiers)
    await server._context.mover.recover(server.cluster)
    server._context.mover.start()
    try:
        yield server
    finally:
        await server.close()


def on_disk(server: BlockServer, chain: Sequence[bytes]) -> list[bool]:
    return [server.stack.backing.index.peek(NAMESPACE, 0, digest) is not None for digest in chain]


async def test_a_tier_that_fails_as_it_may_not_frees_nothing_that_it_still_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [("write_from", ValueError("a bug")), ("write_from", OSError(24, "no files"))]
    tier = Faulty(tmp_path / "blocks", failures)
    tier.going.clear()
    async with one_server(Dram(4 << 20, prefault=False), tier) as server:
        chain = keys("batch", 3)
        writer = server.connect(Peer("w", "tcp"))
        for digest in chain:
            await store(writer, digest, size=4096)
        await eventually(lambda: len(tier.running) == 1)
        await store(writer, key("later"), size=4096)  # the other task's, meanwhile
        await eventually(lambda: len(tier.running) == 2)
        tier.going.set()
        await eventually(lambda: all(on_disk(server, [*chain, key("later")])))
        assert not tier.written_twice
        assert server.stats(0.0).usage[1].failures == 2
        check_invariants(server.stack)
    assert [line for line in caplog.messages if "a tier has failed" in line]


@pytest.mark.parametrize("call", ["persist", "erase"])
async def test_a_record_that_a_tier_could_not_write_or_erase_is_tried_again(
    tmp_path: Path, call: str
) -> None:
    tier = Faulty(tmp_path / "blocks", [(call, ValueError("a bug"))])
    chain = keys("chain", 2)
    async with one_server(Dram(4 << 20, prefault=False), tier) as server:
        writer = server.connect(Peer("w", "tcp"))
        for digest in chain:
            await store(writer, digest, size=4096)
        await eventually(lambda: all(on_disk(server, chain)))
        await writer.remove(NAMESPACE, chain[:1])
        assert not tier.failures
        assert await server._context.mover.erase()
    async with one_server(Dram(4 << 20, prefault=False), Faulty(tmp_path / "blocks")) as server:
        assert on_disk(server, chain) == [False, True], "what was removed does not come back"


async def test_a_read_that_fails_as_it_may_not_is_a_miss(tmp_path: Path) -> None:
    tier = Faulty(tmp_path / "blocks", [("read_into", ValueError("a bug"))])
    async with one_server(Dram(1 << 20, prefault=False), tier) as server:
        chain = keys("chain", 300)  # more than memory holds
        writer = server.connect(Peer("w", "tcp"))
        for digest in chain:
            await store(writer, digest, size=4096)
        await eventually(lambda: server.stack.front.index.peek(NAMESPACE, 0, chain[0]) is None)
        (pin,) = await writer.pin(NAMESPACE, 0, chain[:1], [4096])
        assert not pin.status.hit
        assert not tier.failures
        check_invariants(server.stack)


async def test_what_goes_to_another_tier_is_not_given_up_with_the_disk(tmp_path: Path) -> None:
    """Both are in one batch; only what goes to the lost disk may be given up."""
    cache, disk = Faulty(tmp_path / "cache"), Faulty(tmp_path / "disk")
    cache.going.clear()
    disk.going.clear()
    memory = Dram(4 << 20, prefault=False)
    async with one_server(memory, cache, disk) as server:
        writer = server.connect(Peer("w", "tcp"))
        await store(writer, key("one"), size=4096)
        server.stack.transfers._to_promote.append(
            server.stack.front.index.peek(NAMESPACE, 0, key("one"))
        )
        server._context.mover.wake()
        await eventually(lambda: bool(cache.running and disk.running))
        server._context.mover.health.take_offline(2, "stuck")
        await asyncio.sleep(0)
        cached = server.stack.stores[1]
        for _ in range(5):
            await asyncio.sleep(0)
        assert cached.held.reservations == 1, "it is still being written"
        disk.going.set()
        cache.going.set()
        await eventually(lambda: cached.index.peek(NAMESPACE, 0, key("one")) is not None)
        check_invariants(server.stack)
