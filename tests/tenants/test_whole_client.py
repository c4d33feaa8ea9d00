"""What a client can do, a tenant's client can, with its own names, over several servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvpool import BadKey, ClientConfig, MoveStatus, WriteStatus, admin
from kvpool.client.match_poller import MatchPoller
from kvpool.errors import UsageError
from kvpool.sync import admin as sync_admin
from kvpool.sync import connect as sync_connect
from kvpool.types import SESSION_NAME_MAX, Namespace
from kvpool_transports.tcp import TcpTransport
from tests.conftest import buffers, eventually, keys, values
from tests.support.tenant_pool import MODEL, OPERATOR, tenant, tenant_pool

CHAIN = keys("whole client", 40)


async def test_every_call_of_a_pool(tmp_path: Path) -> None:
    async with tenant_pool(tmp_path) as pool:
        await pool.start_server("second", {"tcp": TcpTransport()}, listen=["tcp://127.0.0.1:0"])
        async with await pool.client(tenant("acme")) as acme:
            statuses = await acme.write(
                MODEL, CHAIN[:8], values(CHAIN[:8]), copies=2, session="chat"
            )
            assert statuses == [WriteStatus.STORED] * 8
            assert acme.counters["copies_missing"] == 0
            await acme.write(MODEL, CHAIN[8:], values(CHAIN[8:]), parent=CHAIN[7])
            report = await admin(acme).spread(MODEL, CHAIN, to=2)
            assert [(one.blocks, one.problem) for one in report.servers] == [(40, "")]
            members = await acme.members()
            for near in ("", members[0].host):
                statuses = await acme.prefetch(MODEL, CHAIN, near=near)
                assert statuses == [MoveStatus.HERE] * 40
            match = await acme.match(MODEL, CHAIN, session="chat")
            assert match.length == 40
            got = buffers(40)
            results = await acme.read(MODEL, CHAIN, got, match=match)
            assert all(one.status.hit for one in results)
            assert got == values(CHAIN)
            (score,) = await acme.score(MODEL, CHAIN, [members[0].host])
            assert score.near == 40
            assert await acme.contains(MODEL, CHAIN) == [True] * 40
            assert all(await acme.where(MODEL, CHAIN))
            assert await acme.session("chat").hint(resume_in=5) is True
            assert await acme.session("chat").arrived() is True

            # Servers find the session's blocks: they were written in the same, qualified name.
            async def servers() -> bool:
                found = (await acme.session("chat").explain()).servers
                return bool(found) and None not in [one[1] for one in found]

            await eventually(servers)
            assert await acme.session("chat").end() is True
            assert await acme.remove(MODEL, CHAIN[20:]) == [True] * 20
            await eventually(lambda: all(one.store.index.stored == 20 for one in pool.servers))
        for server in pool.servers:
            assert not server.stats(0.0).counters.get("forbidden_requests")
        assert not [reason for reason in pool.master.refusals if "forbidden" in reason]


async def test_the_other_two_clients(tmp_path: Path) -> None:
    """The one for threads, and the one that polls."""
    async with tenant_pool(tmp_path) as pool:
        async with await pool.client(tenant("acme")) as acme:
            await acme.write(MODEL, CHAIN, values(CHAIN))

        def in_a_thread() -> tuple[int, list[tuple[Namespace, int]]]:
            with sync_connect(pool.master.address, cluster=tenant("acme")) as sync:
                return sync.match(MODEL, CHAIN).length, sync_admin(sync).namespaces()

        assert await asyncio.to_thread(in_a_thread) == (40, [(MODEL, 40)])

        def polled(name: str) -> int:
            config = ClientConfig(masters=[pool.master.address])
            poller = MatchPoller(config, tenant(name))
            try:
                poller.start("one", [(MODEL, CHAIN)], "chat")
                while not (ended := poller.poll(0.005)):
                    pass
                return ended[0].matches[0].length
            finally:
                poller.close()

        assert await asyncio.to_thread(polled, "acme") == 40
        assert await asyncio.to_thread(polled, "blue") == 0
        async with await pool.client(OPERATOR) as operator:
            assert (await operator.session("@acme/chat").explain()).hints
            assert not (await operator.session("chat").explain()).hints


async def test_names_have_room_for_the_tenants(tmp_path: Path) -> None:
    """Said in the user's words: how long a name may be, not how long it became."""
    async with tenant_pool(tmp_path) as pool, await pool.client(tenant("acme")) as acme:
        room = SESSION_NAME_MAX - len("@acme/")
        assert await acme.session("s" * room).hint(resume_in=1) is True
        with pytest.raises(UsageError, match=f"at most {room} characters for a client of tenant"):
            await acme.session("s" * (room + 1)).hint(resume_in=1)
        assert (await acme.match(Namespace("n" * 506), CHAIN)).length == 0
        with pytest.raises(BadKey, match="at most 506 characters for a client of tenant 'acme'"):
            await acme.match(Namespace("n" * 507), CHAIN)
