"""What happens when something dies, lies or stops (G4 to G7, G11); all parts in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from kvpool import ClientConfig, MasterConfig, MasterLost, ReadStatus, WriteStatus, admin, dev
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from kvpool_transports.streams.stream import Stream
from tests.conftest import NAMESPACE, UCX, buffers, eventually, key, keys, patient, value, values

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


# --- limits ----------------------------------------------------------------------------


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
