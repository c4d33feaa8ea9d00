"""Writes whose bytes are on their way: answered at once, as `reserve` would, or NOT_YET."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator

import pytest

from kvpool import WriteStatus, dev
from kvpool.master.state.demand import listed_of
from kvpool.protocols import Connection, Peer, ReserveRequest
from kvpool.server.state.holdings import Limits
from kvpool.server.tenancy import Tenancy
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Cluster, Namespace
from kvpool.wire import messages as wire
from tests.conftest import NAMESPACE, eventually, key, keys, value
from tests.support.raw_peers import frame, raw, write

MIB = 1 << 20


def request(name: str, *sizes: int) -> ReserveRequest:
    digests = keys(name, len(sizes))
    return ReserveRequest(NAMESPACE, 0, digests, [ROOT] * len(sizes), list(sizes))


@pytest.fixture
async def connection(pool_dev: dev.Dev) -> AsyncIterator[Connection]:
    (server,) = pool_dev.servers
    made = server.connect(Peer("writer"))
    yield made
    made.close()
    check_invariants(server.store)


def statuses(connection: Connection, asked: ReserveRequest) -> list[WriteStatus]:
    return [answer.status for answer in connection.reserve_now(asked)]


async def test_what_would_wait_for_space_is_asked_for_again(
    pool_dev: dev.Dev, connection: Connection
) -> None:
    """A reader holds all: nothing is refused, and nothing is counted as refused."""
    (server,) = pool_dev.servers
    server.store.held.limits = Limits.none()
    chain = keys("full", 16)
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain, [value(digest, MIB) for digest in chain])
        async with pool.read_view(NAMESPACE, chain):
            assert statuses(connection, request("new", MIB, MIB)) == [WriteStatus.NOT_YET] * 2
    counters = server.stats(0.0).counters
    assert counters["refused_blocks"] == 0
    assert not server._context._waiting_for_space
    assert statuses(connection, request("new", MIB)) == [WriteStatus.RESERVED]


async def test_who_gets_a_part_asks_again_for_the_rest(
    pool_dev: dev.Dev, connection: Connection
) -> None:
    """Refused for good, it would go elsewhere with the rest of its chain."""
    (server,) = pool_dev.servers
    server.store.held.limits = Limits.none()
    answers = statuses(connection, request("larger than all", *[6 * MIB] * 3))
    assert answers == [WriteStatus.RESERVED, WriteStatus.RESERVED, WriteStatus.NOT_YET]


async def test_a_server_that_leaves_refuses_for_good(
    pool_dev: dev.Dev, connection: Connection
) -> None:
    (server,) = pool_dev.servers
    assert statuses(connection, request("held", MIB)) == [WriteStatus.RESERVED]
    server._context.draining = True
    assert statuses(connection, request("late", MIB)) == [WriteStatus.NO_SPACE]
    assert server.stats(0.0).counters["refused_blocks"] == 1
    server._context.draining = False


async def test_no_range_is_emptied_for_a_write_that_does_not_wait(
    pool_dev: dev.Dev, connection: Connection
) -> None:
    """It would be fenced off for as long as the connection lives."""
    (server,) = pool_dev.servers
    server.store.held.limits = Limits.none()
    small = keys("small", 1024)
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, small, [bytes(16 << 10)] * 1024, parents=[ROOT] * 1024)
    random.Random(1).shuffle(small)
    for digest in small:  # so those that were used least lie far from each other
        (pin,) = server.store.pin(9, NAMESPACE, 0, [digest], 1.0)
        server.store.unpin(9, pin.id)
    while not server.store.extents.evicted:
        assert statuses(connection, request("large", MIB)) == [WriteStatus.NOT_YET]
    # For those that follow, blocks would move.
    for size in (MIB, MIB // 2):
        assert statuses(connection, request("large", size)) == [WriteStatus.NOT_YET]
        assert server.store.extents.clearing is None
    known = functools.partial(listed_of, pool_dev.master.directory, NAMESPACE, small)
    await eventually(lambda: known() == server.store.index.stored)


@pytest.mark.parametrize("at_once", [True, False])
async def test_what_a_write_evicts_is_told_with_what_it_stores(
    pool_dev: dev.Dev, connection: Connection, at_once: bool
) -> None:
    """Its caller waits for one message. If the bytes do not come, masters hear of the rest."""
    (server,), master = pool_dev.servers, pool_dev.master
    (announcer,) = server._context.announcers
    server.store.held.limits = Limits.none()
    old = keys("old", 16)

    def known() -> int:
        return master.directory.match(NAMESPACE, old).length

    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, old, [value(digest, MIB) for digest in old])
    before, deadline = announcer._sequence, asyncio.get_running_loop().time() + 5
    if at_once:
        (granted,) = connection.reserve_now(request("new", MIB))
    else:
        (granted,) = await connection.reserve(request("new", MIB), deadline=deadline)
    await asyncio.sleep(0)
    assert (known(), announcer._sequence) == (16, before)
    await connection.seal([granted.id], [0], visible=True, deadline=deadline)
    assert (known(), announcer._sequence) == (15, before + 1)
    assert statuses(connection, request("never sent", MIB)) == [WriteStatus.RESERVED]
    await eventually(lambda: known() == 14)


async def test_a_block_of_another_writer_is_acknowledged_when_masters_know_it(
    watched: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to a writer that does not ask for it: readers would look for it in vain."""
    (server,) = watched.servers
    waits: list[float] = []
    wait = server._context.wait_until_announced

    async def watched_wait(deadline: float) -> bool:
        waits.append(deadline)
        return await wait(deadline)

    monkeypatch.setattr(server._context, "wait_until_announced", watched_wait)
    async with raw(watched) as peer:
        await peer.ask(wire.Hello("default", "raw"), wire.Welcome)
        for status, count in ((WriteStatus.STORED, 0), (WriteStatus.ALREADY_STORED, 1)):
            await peer.send(frame(write(key("a"), visible=False), bytes(64)))
            assert (await peer.ask(None, wire.StatusReply)).statuses == bytes([status])
            assert len(waits) == count


async def test_a_tenants_rate_counts_what_is_stored(pool_dev: dev.Dev) -> None:
    """What it does not store is given back, and above the rate it is asked to wait."""
    (server,) = pool_dev.servers
    namespace = Namespace("@acme/model")
    proved = Cluster("default", b"secret", tenant="acme")
    connection = server.connect(Peer("acme", proved=proved))
    rates = Tenancy.of(server).guard.rates
    rates.replace({"acme": MIB})
    asked = request("rate", MIB)._replace(namespace=namespace)
    (granted,) = connection.reserve_now(asked)
    deadline = asyncio.get_running_loop().time() + 5
    await connection.seal([granted.id], [0], visible=False, deadline=deadline)
    rates.replace({})
    rates.replace({"acme": MIB})
    for _ in range(10):  # it is there: ten of them would be paid for in nine seconds
        assert statuses(connection, asked) == [WriteStatus.ALREADY_STORED]
    more = request("rate more", 3 * MIB)._replace(namespace=namespace)
    assert statuses(connection, more) == [WriteStatus.RESERVED]
    assert statuses(connection, more) == [WriteStatus.NOT_YET]
    connection.close()
