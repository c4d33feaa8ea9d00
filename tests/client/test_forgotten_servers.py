"""What a client forgets of servers that are gone, and what is connected while either closes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool import ClientConfig, dev, removals
from kvpool.client import servers as servers_module
from kvpool.errors import Closed, LinkBroken
from kvpool.protocols import Channel
from kvpool.types import Member, ServerStats
from kvpool.wire import messages as wire
from tests.conftest import NAMESPACE, eventually, keys

OTHERS = keys("others", 1)


def listed(*names: str) -> wire.MembersReply:
    def one(name: str) -> Member:
        return Member(name, 1, "h", (f"tcp://{name}:1",), (), True, 0.0, 1, ServerStats())

    return wire.MembersReply("m", 1.0, 0, [one(name) for name in sorted(names)], False)


async def test_servers_that_are_gone_are_forgotten_and_calls_of_them_end_first(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autoscaled servers have new names each time."""
    monkeypatch.setattr(servers_module, "_FORGET_S", 0.05)
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    async with pool_dev.pool(config) as pool:
        servers, deadline = pool._servers, asyncio.get_running_loop().time() + 20
        await pool.members()
        go_on = asyncio.Event()

        async def operation(channel: Channel) -> list[bool]:
            await go_on.wait()
            return await removals.remove(channel, NAMESPACE, OTHERS[:1], deadline=deadline)

        call = asyncio.create_task(servers.call("dev-0", operation, deadline))
        await eventually(lambda: servers.known["dev-0"].calls == 1)
        answer = listed()

        async def ask(*_: object, **__: object) -> wire.MembersReply:
            return answer

        monkeypatch.setattr(servers._masters, "ask", ask)
        for number in range(8):
            answer = listed(f"s{number}", f"s{number + 1}")
            await pool.members()
            assert {"dev-0", f"s{number - 1 if number else 0}"} <= servers.known.keys()
            await asyncio.sleep(0.06)
        await pool.members()
        assert servers.known.keys() == {"dev-0", "s7", "s8"}
        (channel,) = servers.known["dev-0"].channels.values()
        go_on.set()
        assert await call == [False]
        answer = listed("s7")
        await pool.members()  # `s8` is missing for the first time: a master may have just started
        assert servers.known.keys() == {"s7", "s8"}
        with pytest.raises(LinkBroken):
            await operation(channel)
        for names in (("s7", "s8"), ("s7",)):  # listed again, so it is missing for the first time
            await asyncio.sleep(0.06)
            answer = listed(*names)
            await pool.members()
            assert servers.known.keys() == {"s7", "s8"}
        monkeypatch.setattr(servers_module, "_MEMBERS_MAX", 3)
        monkeypatch.setattr(servers_module, "_FORGET_S", 60.0)
        for number in range(0, 40, 2):
            answer = listed(f"t{number}", f"t{number + 1}")
            await pool.members()
            assert len(servers.known) <= 8


async def test_a_connection_that_is_made_while_the_client_closes_is_closed(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    made: list[Channel] = []
    asked, go_on = asyncio.Event(), asyncio.Event()
    async with pool_dev.pool(config) as pool:
        tcp = pool._servers.transports["tcp"]
        connect = tcp.connect

        async def slowly(*words: Any, **more: Any) -> Channel:
            asked.set()
            await go_on.wait()
            made.append(await connect(*words, **more))
            return made[-1]

        monkeypatch.setattr(tcp, "connect", slowly)
        writing = asyncio.create_task(pool.write(NAMESPACE, OTHERS[:1], [b"w"]))
        await asked.wait()
    go_on.set()
    with pytest.raises(Closed):
        await writing
    with pytest.raises(LinkBroken):
        await removals.remove(
            made[0], NAMESPACE, OTHERS[:1], deadline=asyncio.get_running_loop().time() + 5
        )
    assert len(made) == 1
    assert not pool._servers.known["dev-0"].channels
