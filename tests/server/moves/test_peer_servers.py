"""Servers that call each other keep no connection that they do not use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool import ClientConfig, admin, dev, removals
from kvpool.errors import DeadlineExceeded, LinkBroken, Overloaded, ServerLost, Unavailable
from kvpool.protocols import Channel
from kvpool.server.moves import peer_servers
from tests.conftest import NAMESPACE, eventually, keys, values
from tests.support.moves import moves_of


async def test_what_is_not_used_is_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_servers, "_IDLE_S", 0.3)
    async with dev.serve("16MiB", servers=3, listen=("tcp://127.0.0.1:0",)) as running:
        config = ClientConfig(masters=[running.address], transports=["tcp"])
        peers = [moves_of(server).peers for server in running.servers]

        def connections() -> int:
            return sum(server.stats(0.0).counters["connections"] for server in running.servers)

        for name in ("first", "second"):
            chain = keys(name, 8)
            async with running.pool(config) as pool:
                await pool.write(NAMESPACE, chain, values(chain))
                await admin(pool).spread(NAMESPACE, chain, to=3)
                assert [server.store.index.stored > 0 for server in running.servers] == [True] * 3
            await asyncio.sleep(0.05)
            assert connections() > 0  # between the servers: the client has left
            await eventually(lambda: not any(one._channels for one in peers))
            await eventually(lambda: not any(one.masters.are_connected for one in peers))
            await eventually(lambda: connections() == 0)  # the other side notices a moment later


async def test_a_call_that_fails_late_leaves_the_connection_that_was_opened_since() -> None:
    """Two calls on one connection fail; the second one hears of it when a third one runs."""
    async with dev.serve("16MiB", servers=2, listen=("tcp://127.0.0.1:0",)) as running:
        peers = moves_of(running.servers[0]).peers
        name, until = running.servers[1].server, asyncio.get_running_loop().time() + 5
        old = await peers.channel(name, until)
        peers.failed(name, old)
        fresh = await peers.channel(name, until)
        assert fresh is not old
        peers.failed(name, old)
        peers.failed(name, None)
        assert await peers.channel(name, until) is fresh
        assert await removals.remove(fresh, NAMESPACE, keys("none", 1), deadline=until) == [False]


async def test_a_better_path_that_failed_once_is_used_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a call on the worse one ends well, if it is made at once."""
    monkeypatch.setattr(peer_servers, "_IDLE_S", 1.0)
    async with dev.serve("16MiB", servers=2, listen=("shm://", "tcp://127.0.0.1:0")) as running:
        peers = moves_of(running.servers[0]).peers
        name, until = running.servers[1].server, asyncio.get_running_loop().time() + 10

        def refuse(*_: object, **__: object) -> None:
            raise Unavailable("not yet")

        with monkeypatch.context() as broken:
            broken.setattr(type(peers._transports["shm"]), "connect", refuse)
            worse = await peers.channel(name, until)
        assert await peers.channel(name, until) is worse
        for _ in range(100):  # used all the time
            await asyncio.sleep(0.05)
            if (better := await peers.channel(name, until)) is not worse:
                break
        for one in (worse, better):
            assert await removals.remove(one, NAMESPACE, keys("none", 1), deadline=until) == [False]
        await asyncio.sleep(0.2)
        assert await peers.channel(name, until) is better, "there is no better one"
        await eventually(lambda: not peers._replaced)
        with pytest.raises(Unavailable):
            await removals.remove(worse, NAMESPACE, keys("none", 1), deadline=until)


async def test_while_a_better_path_fails_the_worse_one_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when masters are away. Only the call that tries the better one waits, and shortly."""
    monkeypatch.setattr(peer_servers, "_IDLE_S", 0.6)
    loop = asyncio.get_running_loop()
    async with dev.serve("16MiB", servers=2, listen=("shm://", "tcp://127.0.0.1:0")) as running:
        peers, name = moves_of(running.servers[0]).peers, running.servers[1].server
        shm, tcp = [type(peers._transports[scheme]) for scheme in ("shm", "tcp")]
        tries: list[tuple[float, float]] = []

        async def fail(*_: object, deadline: float, **__: object) -> None:
            tries.append((loop.time(), deadline - loop.time()))
            if len(tries) != 2:
                raise Overloaded("not now")
            await asyncio.sleep(deadline - loop.time())
            raise DeadlineExceeded("it hangs")

        monkeypatch.setattr(shm, "connect", fail)
        worse = await peers.channel(name, loop.time() + 10)
        monkeypatch.setattr(tcp, "connect", lambda *_, **__: pytest.fail("it is open already"))
        monkeypatch.setattr(peers.masters, "_addresses", ())
        peers.masters.close()
        peers.masters.members_changed()
        for count, timeout in ((2, 0.1), (3, 10.0)):
            while len(tries) < count:
                tried, others = [
                    asyncio.create_task(peers.channel(name, loop.time() + one))
                    for one in (timeout, 10.0)
                ]
                assert await others is worse
                assert tried.done() or len(tries) == 2, "only that call waits"
                assert await tried is worse
                await asyncio.sleep(0.02)
        (first, _), (second, left), (third, long_left) = tries
        assert min(second - first, third - second) >= 0.6
        assert left <= 0.05, "half of its time"
        assert long_left <= 0.5
        until = loop.time() + 5
        assert await removals.remove(worse, NAMESPACE, keys("none", 1), deadline=until) == [False]


async def test_a_first_path_that_hangs_leaves_time_for_the_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with dev.serve("16MiB", servers=2, listen=("shm://", "tcp://127.0.0.1:0")) as running:
        peers, name = moves_of(running.servers[0]).peers, running.servers[1].server
        loop = asyncio.get_running_loop()
        channel: Channel | None = None

        async def hang(*_: object, deadline: float, **__: object) -> None:
            await asyncio.sleep(deadline - loop.time())
            raise DeadlineExceeded("it hangs")

        for scheme in ("shm", "tcp"):
            monkeypatch.setattr(type(peers._transports[scheme]), "connect", hang)
            began = loop.time()
            if scheme == "tcp":
                peers.failed(name, channel)
                patient = asyncio.create_task(peers.channel(name, began + 1.0))
                await asyncio.sleep(0.05)
                with pytest.raises(DeadlineExceeded, match="still connecting"):
                    await peers.channel(name, began + 0.2)
                assert loop.time() - began < 0.8, "it does not wait as long as another call"
                with pytest.raises(DeadlineExceeded, match="it hangs"):
                    await patient
                continue
            channel = await peers.channel(name, began + 1.0)
            assert 0.4 <= loop.time() - began < 0.9
            assert await removals.remove(
                channel, NAMESPACE, keys("none", 1), deadline=began + 5
            ) == [False]


async def test_masters_are_left_although_no_other_server_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_servers, "_IDLE_S", 0.1)
    async with dev.serve("16MiB") as running:
        masters = moves_of(running.servers[0]).peers.masters
        for _ in range(3):  # the last question is younger than the first timer
            await masters.members(asyncio.get_running_loop().time() + 5)
            masters.members_changed()
            await asyncio.sleep(0.04)
        assert masters.are_connected
        await eventually(lambda: not masters.are_connected)


@pytest.mark.parametrize("is_better", [False, True])
async def test_a_connection_that_is_made_while_the_server_closes_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_better: bool
) -> None:
    async with dev.serve("16MiB", servers=2, listen=("tcp://127.0.0.1:0",)) as running:
        peers, other = moves_of(running.servers[0]).peers, running.servers[1]
        connect, asked, go_on = peers._connect, asyncio.Event(), asyncio.Event()
        made: list[Channel] = []

        async def slowly(*path: Any) -> Any:
            asked.set()
            await go_on.wait()
            kept = await connect(*path)
            made.append(kept.channel)
            return kept

        until = asyncio.get_running_loop().time() + 5
        if is_better:  # than the one that is there
            await peers.channel(other.server, until)
            kept = peers._channels[other.server]
            paths = peers._paths((await peers.masters.members(until))[other.server])
            peers._channels[other.server] = kept._replace(better=paths, again_at=0.0)
        monkeypatch.setattr(peers, "_connect", slowly)
        call = asyncio.create_task(peers.channel(other.server, until))
        await asked.wait()
        await peers.close()
        go_on.set()
        with pytest.raises((ServerLost, LinkBroken), match="clos"):
            await removals.remove(await call, NAMESPACE, keys("none", 1), deadline=until)
        with pytest.raises(LinkBroken):
            await removals.remove(made[0], NAMESPACE, keys("none", 1), deadline=until)
        await eventually(lambda: not other.stats(0.0).counters["connections"])
