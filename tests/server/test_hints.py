"""Sessions end to end: a real pool, over each transport, hears what its users say."""

from __future__ import annotations

import pytest

from kvpool import ClientConfig, Closed, MasterLost, Pool, UsageError, WriteStatus, dev
from kvpool.errors import BadMessage, PeerError
from kvpool.master import service
from kvpool.protocols import Link
from kvpool.server.eviction import order
from tests.conftest import NAMESPACE, eventually, keys, values
from tests.support import messages as wire
from tests.support.raw_peers import ask

SIZE = 1 << 20  # 16 of them fill the server


async def put(pool: Pool, chain: list[bytes], session: str = "") -> None:
    statuses = await pool.write(NAMESPACE, chain, values(chain, SIZE), session=session)
    assert set(statuses) == {WriteStatus.STORED}


async def length(pool: Pool, chain: list[bytes]) -> int:
    return (await pool.match(NAMESPACE, chain)).length


async def test_a_write_tells_when_its_session_resumes(pool: Pool, pool_dev: dev.Dev) -> None:
    (server,) = pool_dev.servers
    chain = keys("chain", 4)
    buffers = values(chain, SIZE)
    await pool.write(NAMESPACE, chain, buffers, session="agent", resume_in=60.0)
    assert server.store.extents.policy.figures["announced_bytes"] == 4 * SIZE
    assert await pool.session("agent").hint(resume_in=5.0) is True
    await eventually(lambda: server.store.extents.policy.figures.get("hints_accepted", 0) == 2)
    await eventually(
        lambda: pool_dev.master.directory.servers.members(0.0)[0].stats.counters["sessions"] == 1
    )


async def test_every_server_hears_a_hint(two_servers: dev.Dev) -> None:
    config = ClientConfig(masters=[two_servers.address])
    async with two_servers.pool(config) as pool:
        for number in range(20):
            await pool.write(NAMESPACE, keys(f"{number}", 1), [b"x"], session="wide")
        await pool.session("wide").end()
    stores = [server.store for server in two_servers.servers]
    assert all(store.index.stored for store in stores)
    await eventually(
        lambda: all(s.extents.policy.figures.get("hints_accepted") == 1 for s in stores)
    )


async def test_without_a_master_a_hint_is_refused_and_nothing_raised(pool_dev: dev.Dev) -> None:
    async with pool_dev.pool() as pool:
        await pool_dev.master.close()
        assert await pool.session("anybody").end(timeout=0.3) is False
        assert pool.counters["hint_refused"] == 1


async def test_a_session_of_a_closed_pool_says_so(pool_dev: dev.Dev) -> None:
    async with pool_dev.pool() as pool:
        session = pool.session("agent")
        with pytest.raises(UsageError, match="expected seconds"):
            await session.end(timeout=float("nan"))
    with pytest.raises(Closed, match="the pool is closed"):
        await session.end()


# --- bad input ---------------------------------------------------------------------------

NO_SESSIONS = {"none": "", "long": "s" * 129, "NUL": "a\0", "a line": "a\nb", "r-t-l": "a\u202e"}


@pytest.mark.parametrize("name", NO_SESSIONS)
async def test_what_is_no_name_of_a_session(pool_dev: dev.Dev, name: str) -> None:
    session = NO_SESSIONS[name]
    async with pool_dev.pool() as pool:
        with pytest.raises(UsageError, match="1 to 128 printable"):
            pool.session(session)
        with pytest.raises(UsageError):
            await pool.write(NAMESPACE, keys("a", 1), [b"x"], session=session, resume_in=1.0)
        if session:
            with pytest.raises(UsageError):
                await pool.match(NAMESPACE, keys("a", 1), session=session)


@pytest.mark.parametrize("resume_in", [-1.0, float("nan"), float("inf")])
async def test_what_is_no_time_to_resume(pool_dev: dev.Dev, resume_in: float) -> None:
    async with pool_dev.pool() as pool:
        with pytest.raises(UsageError, match="resume_in"):
            await pool.session("s").hint(resume_in=resume_in)
        with pytest.raises(UsageError, match="resume_in"):
            await pool.write(NAMESPACE, keys("a", 1), [b"x"], session="s", resume_in=resume_in)


@pytest.mark.parametrize("session", ["", "a\0b", "new\nline", "s" * 129])
async def test_a_master_refuses_what_is_no_session(link: Link, session: str) -> None:
    """Of hints and of questions."""
    find = wire.Find("n", 1, 16, bytes(16), True, session)
    for message in (wire.Hint(session, None), *([find] if session else [])):
        with pytest.raises((BadMessage, PeerError)):
            await ask(link, message, wire.Error)


async def test_without_sessions_a_hint_is_about_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when their files and their lines in the two tables are gone."""
    monkeypatch.setattr(service, "HINTS", service.HINTS[:1])
    monkeypatch.setattr(order, "ORDERS", order.ORDERS[:1])
    async with dev.pool("4MiB") as pool:
        chain, session = keys("chain", 4), pool.session("agent")
        blocks = [digest * 2048 for digest in chain]
        for number in range(20):  # more than fits, so that others are evicted
            others = keys(f"others {number}", 4)
            await pool.write(NAMESPACE, others, blocks, session="others", resume_in=60.0)
        stored = await pool.write(NAMESPACE, chain, blocks, session="agent", resume_in=1.0)
        assert stored == [WriteStatus.STORED] * 4
        assert await session.end() is False
        assert await session.arrived() is False
        with pytest.raises(MasterLost, match="not a request to a master"):
            await session.explain()
        match = await pool.match(NAMESPACE, chain, session="agent")
        into = [bytearray(65536) for _ in chain]
        await pool.read(NAMESPACE, chain, into, match=match)
        assert into == blocks
