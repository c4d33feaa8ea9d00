"""What happens when something dies, lies or stops (G4 to G7, G11); all parts in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from kvpool import (
    ClientConfig,
    MasterConfig,
    MasterLost,
    ReadStatus,
    WriteStatus,
    admin,
    connect,
    dev,
)
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Peer, ReserveRequest
from kvpool.testing.invariants import check_invariants
from kvpool.wire.messages import Hello, Reserved, Welcome
from kvpool_transports.streams.stream import Stream
from tests.conftest import NAMESPACE, UCX, buffers, eventually, key, keys, patient, value, values
from tests.support.raw_peers import payload, raw, reserve

#: More than travels with its words over ucx, if there are a few of them.
LARGE = 64 << 10

# --- masters ---------------------------------------------------------------------------


async def restart_master(running: dev.Dev) -> Master:
    """The master dies with everything it knows; another one starts at its address."""
    address = running.master.address
    await running.master.close()
    network = TcpNetwork()
    master = Master(MasterConfig(bind=address), network)
    for _ in range(100):
        with contextlib.suppress(Exception):
            await master.start()
            break
        await asyncio.sleep(0.02)
    running.master = master
    return master


async def test_a_restarted_master_has_the_map_back_within_two_heartbeats(
    two_servers: dev.Dev,
) -> None:
    """G7: nothing is lost, because the servers own the truth."""
    async with two_servers.pool() as pool:
        chains = [keys(f"chain-{n}", 40) for n in range(10)]
        for chain in chains:
            await pool.write(NAMESPACE, chain, values(chain))
        master = await restart_master(two_servers)
        await eventually(lambda: len(master.directory) == 400, within_s=patient(2.0))
        for chain in chains:
            assert (await pool.match(NAMESPACE, chain)).length == 40
            got = buffers(40)
            await pool.read(NAMESPACE, chain, got)
            assert got == values(chain)
        await master.close()


@pytest.mark.parametrize("scheme", ["inproc", UCX])
async def test_reads_with_a_match_need_no_master(pool_dev: dev.Dev, scheme: str) -> None:
    chain = keys("known", 10)
    config = ClientConfig(masters=[pool_dev.address], transports=[scheme])
    async with pool_dev.pool(config) as pool:
        await pool.write(NAMESPACE, chain, values(chain, LARGE))
        match = await pool.match(NAMESPACE, chain)
        await pool_dev.master.close()
        got = buffers(10, LARGE)
        results = await pool.read(NAMESPACE, chain, got, match=match)
        assert all(result.status.hit for result in results)
        assert got == values(chain, LARGE)
        lost = await pool.match(NAMESPACE, chain, timeout=0.3)
        assert (lost.length, lost.stopped) == (0, ReadStatus.NO_MASTER)
        (status,) = await pool.write(NAMESPACE, [key("w")], [b"x"], timeout=0.3)
        # The only server has it, and tells a master that comes.
        assert status in (WriteStatus.STORED, WriteStatus.NO_MASTER, WriteStatus.DEADLINE)
        with pytest.raises(MasterLost, match=pool_dev.address):
            await pool.members(timeout=0.3)


async def test_any_master_that_answers_is_good(pool_dev: dev.Dev) -> None:
    chain = keys("any", 5)
    config = ClientConfig(masters=["127.0.0.1:9", pool_dev.address], attempt_s=0.2)
    async with pool_dev.pool(config) as pool:
        assert set(await pool.write(NAMESPACE, chain, values(chain))) == {WriteStatus.STORED}
        assert (await pool.match(NAMESPACE, chain)).length == 5


async def test_a_master_of_another_cluster_is_refused(pool_dev: dev.Dev) -> None:
    config = ClientConfig(masters=[pool_dev.address], timeout_s=1.0)
    with pytest.raises(MasterLost, match="another cluster"):
        await connect(config=config, cluster="elsewhere")


# --- servers ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcp", UCX])
async def test_a_lost_server_is_a_miss_with_a_reason(two_servers: dev.Dev, scheme: str) -> None:
    """G6: the other server's blocks are still read; the lost ones are misses, in time."""
    async with two_servers.pool(
        ClientConfig(masters=[two_servers.address], transports=[scheme])
    ) as pool:
        mine: dict[str, list[bytes]] = {"dev-0": [], "dev-1": []}
        for digest in keys("spread", 12):
            for server in mine:
                if len(mine[server]) < 6:
                    await admin(pool).write_to(server, NAMESPACE, digest, value(digest, LARGE))
                    mine[server].append(digest)
                    break
        match_all = [*mine["dev-0"], *mine["dev-1"]]
        assert (await pool.match(NAMESPACE, match_all)).length == 12
        await two_servers.servers[1].close()
        loop = asyncio.get_running_loop()
        started = loop.time()
        got = buffers(12, LARGE)
        results = await pool.read(NAMESPACE, match_all, got, timeout=2)
        assert loop.time() - started < patient(2)
        assert [r.status.hit for r in results] == [True] * 6 + [False] * 6
        assert {r.status for r in results[6:]} == {ReadStatus.SERVER_LOST}
        assert got[:6] == values(match_all[:6], LARGE)


@pytest.mark.parametrize("scheme", ["shm", UCX])
async def test_the_next_transport_is_used_when_one_fails(
    pool_dev: dev.Dev, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scheme == "ucx":
        from kvpool_transports.ucx import UcxTransport

        monkeypatch.setattr(UcxTransport, "has_fabric", True)  # else tcp came first
    chain = keys("fallback", 4)
    config = ClientConfig(masters=[pool_dev.address], transports=[scheme, "tcp"])
    async with pool_dev.pool(config) as pool:
        await pool.write(NAMESPACE, chain, values(chain, LARGE))
        (server,) = pool_dev.servers
        first = next(x for x in server._listeners if x.address.startswith(scheme))
        await first.close()
        got = buffers(4, LARGE)
        results = await pool.read(NAMESPACE, chain, got)
        assert all(result.status.hit for result in results)
        assert got == values(chain, LARGE)
        assert pool.counters[f"failed_{scheme}"] == 1


async def test_a_writer_that_dies_leaves_nothing(pool_dev: dev.Dev) -> None:
    """A connection that ends with reservations gives their space back at once."""
    (server,) = pool_dev.servers
    async with raw(pool_dev) as peer:
        await peer.ask(Hello("default", "test"), Welcome)
        await peer.ask(reserve(key("half"), size=1 << 20), Reserved)
        await peer.send(payload(1 << 20)[:1000])
        assert server.store.held.reservations == 1
    await eventually(lambda: server.store.held.reservations == 0)
    assert server.store.allocator.allocated == 0
    check_invariants(server.store)


@pytest.mark.parametrize("scheme", ["tcp", UCX])
async def test_an_unread_answer_holds_its_pins_and_then_lets_go(
    pool_dev: dev.Dev, scheme: str
) -> None:
    """A peer that stops reading keeps its own pins only; they go with its connection (G4)."""
    (server,) = pool_dev.servers
    chain = keys("unread", 12)
    config = ClientConfig(masters=[pool_dev.address], transports=[scheme])
    async with pool_dev.pool(config) as pool:
        await pool.write(NAMESPACE, chain, values(chain, 1 << 20))
        slow = asyncio.create_task(pool.read(NAMESPACE, chain, buffers(12, 1 << 20)))
        await asyncio.sleep(0.01)
        async with pool_dev.pool() as other:
            got = buffers(12, 1 << 20)
            results = await other.read(NAMESPACE, chain, got)
            assert all(result.status.hit for result in results)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await eventually(lambda: server.store.held.pins == 0)


# --- limits ----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcp", UCX])
async def test_no_more_connections_than_allowed(pool_dev: dev.Dev, scheme: str) -> None:
    (server,) = pool_dev.servers
    held = [server.connect(Peer("test")) for _ in range(1024)]
    config = ClientConfig(masters=[pool_dev.address], transports=[scheme])
    async with pool_dev.pool(config) as pool:
        refused = await admin(pool).write_to("dev-0", NAMESPACE, key("x"), b"x", timeout=1)
        assert refused is WriteStatus.REFUSED
        for connection in held:
            connection.close()
        assert await admin(pool).write_to("dev-0", NAMESPACE, key("x"), b"x") is WriteStatus.STORED


async def test_a_frozen_writers_memory_is_not_reused(pool_dev: dev.Dev) -> None:
    """G3, G4: when we close the link of a process that may still write, its extents rest."""
    (server,) = pool_dev.servers
    loop = asyncio.get_running_loop()
    connection = server.connect(Peer("test"))
    await connection.reserve(
        ReserveRequest(NAMESPACE, 0, [key("frozen")], [b""], [1 << 20]), deadline=loop.time() + 1
    )
    held = server.store.allocator.allocated
    connection.close(writer_may_be_alive=True)
    assert server.store.held.quarantined == 1
    assert server.store.allocator.allocated == held
    async with pool_dev.pool() as pool:
        storm = keys("storm", 32)
        assert WriteStatus.STORED in await pool.write(NAMESPACE, storm, values(storm, 1 << 20))
    assert server.store.held.quarantined == 1
    check_invariants(server.store)
    connection.writer_exited()
    assert server.store.held.quarantined == 0


async def test_hanging_up_waits_for_who_is_at_work() -> None:
    """G4: the peer of a stream hears its end when the owner has stopped, not when EOF arrives."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, stream = await loop.create_connection(Stream, sock=ours)
    theirs.shutdown(socket.SHUT_WR)
    await eventually(lambda: stream.lost)
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    stream.abort()
    assert await asyncio.wait_for(loop.sock_recv(theirs, 1), 5) == b""
    theirs.close()


async def test_a_server_may_close_while_somebody_looks(pool_dev: dev.Dev) -> None:
    """A view outlives its server: the memory goes with the last look, and nothing raises."""
    (server,) = pool_dev.servers
    for transport in ("inproc", "shm"):
        config = ClientConfig(masters=[pool_dev.address], transports=[transport])
        async with pool_dev.pool(config) as pool:
            digest = key(f"seen over {transport}")
            await pool.write(NAMESPACE, [digest], [value(digest)])
            async with pool.read_view(NAMESPACE, [digest]) as (view,):
                await pool.close()
                if transport == "shm":
                    await server.close()
                assert view.data == value(digest)


async def test_a_kept_exception_keeps_no_segment_mapped(pool_dev: dev.Dev) -> None:
    """A dead server's memory is free when its clients have let go, not when they collect garbage.

    An exception that somebody keeps leads to the frames that it went through (chaos, seed 11).
    """

    def mapped() -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:kvpool" in line for line in maps)

    config = ClientConfig(masters=[pool_dev.address], transports=["shm"])
    chain = keys("kept", 4)
    before = mapped()
    kept: BaseException | None = None
    async with pool_dev.pool(config) as pool:
        await pool.write(NAMESPACE, chain, values(chain))
        try:
            async with pool.read_view(NAMESPACE, chain) as views:
                assert [view.data for view in views] == values(chain)
                raise LookupError
        except LookupError as error:
            kept = error
        assert mapped() > before
    assert mapped() == before
    assert kept is not None
