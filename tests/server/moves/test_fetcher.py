"""Blocks that a server fetches from another one: whole, verified, announced, and never too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvpool import Namespace, Pool, dev, moves, removals
from kvpool.errors import DeadlineExceeded, LinkBroken
from kvpool.moves import pack_sessions, unpack_sessions
from kvpool.protocols import Channel, Connection, Peer, ReserveRequest
from kvpool.server.block_server import BlockServer
from kvpool.server.moves import fetcher as fetcher_module
from kvpool.server.moves.fetcher import FetchCall, Fetcher
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.server.state.entry import Entry
from kvpool.server.tenancy import Tenancy
from kvpool.testing.invariants import check_invariants
from kvpool.types import Cluster, MoveStatus, ReadStatus, SessionHint
from kvpool.wire.moves import SESSION_RUNS_MAX
from tests.conftest import NAMESPACE, eventually, key, keys, values
from tests.support import messages as wire
from tests.support.moves import SIZE, moves_of, now, put

FETCHED, NOT_YET, NO_ROOM = MoveStatus.DONE, MoveStatus.NOT_YET, MoveStatus.NO_ROOM


class Pair:
    """A pool of two servers, the source and the target."""

    def __init__(self, running: dev.Dev, pool: Pool) -> None:
        self.pool = pool
        self.source, self.target, *self.others = running.servers

    async def chain(self, count: int, **more: Any) -> list[bytes]:
        """A new chain, stored at the source."""
        chain = keys("chain", count)
        await self.put(chain, **more)
        return chain

    async def put(
        self, chain: Sequence[bytes], server: BlockServer | None = None, **more: Any
    ) -> None:
        """Store a chain on one server, at the source if no other is named."""
        await put(self.pool, server or self.source, chain, **more)

    async def fetch(
        self, digests: Sequence[bytes], source: str | None = None, within_s: float = 5.0
    ) -> list[MoveStatus]:
        """Ask the target to fetch blocks, as any member of the cluster may."""
        name = self.source.server if source is None else source

        async def ask(channel: Channel) -> list[MoveStatus]:
            return await moves.fetch(
                channel, NAMESPACE, 0, digests, name, deadline=now() + within_s
            )

        return await self.pool._servers.call(self.target.server, ask, now() + within_s)

    async def remove(self, digests: Sequence[bytes], **more: Any) -> list[bool]:
        """Have the source remove blocks."""

        async def ask(channel: Channel) -> list[bool]:
            return await removals.remove(channel, NAMESPACE, digests, deadline=now() + 5, **more)

        return await self.pool._servers.call(self.source.server, ask, now() + 5)

    def entry(self, server: BlockServer, digest: bytes) -> Entry:
        entry = server.store.index.peek(NAMESPACE, 0, digest)
        assert entry is not None
        return entry

    def has(self, server: BlockServer, digests: Sequence[bytes]) -> list[bool]:
        return [server.stack.peek(NAMESPACE, 0, digest) is not None for digest in digests]

    def check(self) -> None:
        for server in (self.source, self.target):
            check_invariants(server.stack)
            assert not server.store.held.reservations
            assert not server.store.held.pins
            assert len(moves_of(server).fetcher.fetches) == 0


@asynccontextmanager
async def pair(
    capacity: str = "32MiB", listen: Sequence[str] = ("tcp://127.0.0.1:0",), **more: Any
) -> AsyncIterator[Pair]:
    options = {"servers": 2, "listen": ("inproc://", *listen), **more}
    async with dev.serve(capacity, **options) as running, running.pool() as pool:
        both = Pair(running, pool)
        yield both
        both.check()


@pytest.mark.parametrize("address", ["inproc://other", "tcp://127.0.0.1:0", "shm://"])
async def test_a_server_fetches_blocks_and_serves_them(address: str) -> None:
    listen = () if address.startswith("inproc") else (address,)
    async with pair(listen=listen) as both:
        chain = await both.chain(100)
        if listen:  # between the two servers only the transport that is tried
            del moves_of(both.target).peers._transports["inproc"]  # type: ignore[attr-defined]
        assert await both.fetch(chain) == [FETCHED] * 100
        for entry in both.source.store.index.inventory():
            copy = both.entry(both.target, entry.digest)
            assert (copy.checksum, copy.parent) == (entry.checksum, entry.parent)
        match = await both.pool.match(NAMESPACE, chain)
        assert {replica.server for replica in match.runs[0].replicas} == {"dev-0", "dev-1"}
        assert await both.fetch(chain) == [MoveStatus.HERE] * 100
        await both.source.close()
        into = [bytearray(SIZE) for _ in chain]
        results = await both.pool.read(NAMESPACE, chain, into)
        assert all(result.status.hit for result in results)
        assert list(map(bytes, into)) == values(chain)
        counters = both.target.stats(now()).counters
        assert (counters["fetch_done"], counters["fetched_bytes"]) == (100, 100 * SIZE)


async def test_what_cannot_be_fetched_has_a_reason() -> None:
    async with pair() as both:
        chain = await both.chain(3)
        assert await both.fetch(chain, "nobody") == [MoveStatus.LOST] * 3
        assert await both.fetch(chain, both.target.server) == [MoveStatus.LOST] * 3
        assert await both.fetch([key("never written")]) == [MoveStatus.GONE]
        await both.pool.remove(NAMESPACE, chain[1:2])
        assert await both.fetch(chain) == [FETCHED, MoveStatus.GONE, FETCHED]


async def ask_to_fetch(
    asks: Connection, namespace: Namespace, chain: Sequence[bytes], within_s: float
) -> list[MoveStatus]:
    request = wire.Fetch(*wire.keys_of(namespace, chain), 0, "dev-0", within_s)
    return moves.moved(await asks.answer(request), len(chain))


async def test_a_tenant_that_has_blocks_fetched_pays_as_for_a_write() -> None:
    """And it alone: what the pool moves for its own reasons is nobody's."""
    mine = Namespace("@acme/m")
    async with pair() as both:
        chain = await both.chain(48, namespace=mine)
        rates = Tenancy.of(both.target).guard.rates
        rates.replace({"acme": 16 * SIZE}, now())
        moves_of(both.target).fetcher.budget = FetchBudget(1e12)
        asks = both.target.connect(Peer("c", proved=Cluster(tenant="acme")))

        async def fetch(first: int, last: int, within_s: float) -> list[MoveStatus]:
            return await ask_to_fetch(asks, mine, chain[first:last], within_s)

        began = now()
        assert await fetch(0, 32, 5.0) == [FETCHED] * 32
        assert await fetch(32, 40, 0.2) == [NOT_YET] * 8, "what came is not paid for yet"
        assert both.target.stats(now()).counters["over_rate_writes"] == 1
        assert await fetch(32, 40, 5.0) == [FETCHED] * 8
        assert now() - began > 0.8
        assert rates.wait_s("acme", now()) > 0
        server = both.target.connect(Peer("dev-2"))
        rest = await ask_to_fetch(server, mine, chain[40:], 0.1)
        assert rest == [FETCHED] * 8
        asks.close()
        server.close()


async def test_what_a_tenant_asks_for_and_does_not_come_costs_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = Namespace("@acme/m")
    async with pair() as both:
        chain = await both.chain(8, namespace=mine)
        Tenancy.of(both.target).guard.rates.replace({"acme": SIZE}, now())
        channel = await moves_of(both.target).peers.channel("dev-0", now() + 5)

        async def fails(*args: Any, **more: Any) -> Any:
            raise LinkBroken("the source is gone")

        monkeypatch.setattr(type(channel), "read", fails)  # also of a fresh one
        asks = both.target.connect(Peer("c", proved=Cluster(tenant="acme")))
        statuses = await ask_to_fetch(asks, mine, chain, 5)
        assert statuses == [MoveStatus.LOST] * 8
        assert Tenancy.of(both.target).guard.rates.wait_s("acme", now()) == 0.0
        asks.close()


@pytest.mark.parametrize("where", ["connecting", "reading"])
async def test_a_frozen_server_keeps_nobody_from_fetching_from_others(where: str) -> None:
    async with pair(servers=3) as both:
        frozen, fine = both.source, both.others[0]
        held, wanted = keys("held", 12), keys("wanted", 12)
        await both.put(held, frozen)
        await both.put(wanted, fine)
        moves_of(both.target).fetcher.budget = FetchBudget(1e12)
        peers, never, at_it = moves_of(both.target).peers, asyncio.Event(), asyncio.Event()

        async def stuck(*args: Any, **more: Any) -> Any:
            at_it.set()
            await never.wait()
            raise DeadlineExceeded("it was frozen")

        connect = peers._connect

        async def connect_to(server: str, epoch: int, paths: Any, deadline: float) -> Any:
            frozen_now = server == frozen.server
            return await (stuck() if frozen_now else connect(server, epoch, paths, deadline))

        if where == "connecting":
            peers._connect = connect_to  # type: ignore[method-assign]
        else:
            (await peers.channel(frozen.server, now() + 5)).read = stuck  # type: ignore[method-assign]
        waits = [asyncio.create_task(both.fetch([digest])) for digest in held]
        await at_it.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        assert await both.fetch(wanted, fine.server, within_s=1.0) == [FETCHED] * 12
        assert not any(task.done() for task in waits)
        never.set()
        assert {one for task in waits for one in await task} == {MoveStatus.LOST}


async def test_corrupt_bytes_are_not_stored_and_leave_the_source() -> None:
    async with pair() as both:
        chain = await both.chain(3)
        entry = both.entry(both.source, chain[1])
        both.source.tier.view(entry.offset, entry.size)[5] ^= 1  # type: ignore[attr-defined]
        assert await both.fetch(chain) == [FETCHED, MoveStatus.CORRUPT, FETCHED]
        assert both.has(both.target, chain) == [True, False, True]
        assert both.has(both.source, chain) == [True, False, True]


async def test_blocks_that_a_client_wants_stay_in_a_full_server() -> None:
    async with pair("1MiB") as both:
        old, new = keys("old", 8), keys("new", 120)
        await both.put(old)
        await asyncio.sleep(0.05)
        await both.put(new, both.target)
        stored = both.target.store.index.stored
        assert await both.fetch(old) == [FETCHED] * 8
        assert both.target.store.index.stored == stored + 8
        await both.put(keys("filler", 6), both.target)  # evicts nothing: 6 of 128 extents are free
        more = keys("older", 4)
        for digest in more:
            await both.put([digest])
            both.entry(both.source, digest).last_used = 1
        before = both.target.store.extents.evicted
        assert set(await both.fetch(more)) <= {NO_ROOM, FETCHED}
        assert both.target.store.extents.evicted == before


async def test_without_room_for_a_head_its_tail_stays_where_it_is() -> None:
    async with pair("1MiB") as both:
        chain, other = keys("chain", 4), keys("another", 1)
        await both.put(chain)
        await both.put(other)
        await asyncio.sleep(0.05)
        await both.put(keys("new", 126), both.target)
        room = both.target.store.allocator.available // SIZE
        assert room == 2
        assert await both.fetch([*chain, *other]) == [FETCHED, FETCHED, NO_ROOM, NO_ROOM, NO_ROOM]
        assert both.target.store.extents.evicted == 0


async def test_what_comes_before_its_head_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source reads the head from a slow disk: the time is over before it comes."""
    read = Fetcher._read

    async def late(self: Fetcher, call: FetchCall, *more: Any) -> list[int]:
        arrived = await read(self, call, *more)
        return [i for i in reversed(arrived) if call.digests[i] != chain[1]]

    monkeypatch.setattr(Fetcher, "_read", late)
    monkeypatch.setattr(fetcher_module, "_STEP_BLOCKS", 4)
    async with pair() as both:
        chain, other = await both.chain(6), keys("another", 2)
        await both.put(other)
        assert await both.fetch([*chain, *other]) == [FETCHED, *[NOT_YET] * 5, FETCHED, FETCHED]
        assert both.has(both.target, chain) == [True, *[False] * 5]


async def test_what_waits_for_its_turn_does_not_become_younger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large move waits for minutes: it evicts nothing used since, and stays connected."""
    turn, waits, goes_on = Fetcher._turn, asyncio.Event(), asyncio.Event()

    async def late(self: Fetcher, call: FetchCall, step: Sequence[int]) -> float | None:
        waits.set()
        await goes_on.wait()
        return await turn(self, call, step)

    monkeypatch.setattr(Fetcher, "_turn", late)
    monkeypatch.setattr("kvpool.server.moves.peer_servers._IDLE_S", 0.1)
    async with pair("1MiB") as both:
        old = keys("old", 8)
        await both.put(old, session_hint=SessionHint("one", 60.0))
        moved = asyncio.create_task(both.fetch(old))
        await waits.wait()
        await asyncio.sleep(0.3)
        await both.put(keys("new", 126), both.target)
        await asyncio.sleep(0.3)
        assert both.source.server in moves_of(both.target).peers._channels
        goes_on.set()
        assert await moved == [FETCHED] * 2 + [NO_ROOM] * 6
        assert both.target.store.extents.evicted == 0
        due = [
            server.store.extents.policy.sessions["one"].due for server in (both.source, both.target)
        ]
        assert due == [pytest.approx(due[0], abs=0.3)] * 2, "nor is the session expected later"


async def test_a_block_of_another_size_than_was_offered_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has been replaced meanwhile: it is another block, and nothing is wrong with its bytes."""
    turn = Fetcher._turn

    async with pair() as both:
        chain, source = keys("chain", 3), both.source.store
        await both.put(chain)

        async def replaced(self: Fetcher, call: FetchCall, step: Sequence[int]) -> float | None:
            if source.remove(NAMESPACE, chain[1:2]) == [True]:
                request = ReserveRequest(NAMESPACE, 0, chain[1:2], chain[:1], [SIZE // 2])
                (answer,) = source.reserve(1 << 40, request, now())
                source.seal(1 << 40, answer.id, 0, now())
            return await turn(self, call, step)

        monkeypatch.setattr(Fetcher, "_turn", replaced)
        statuses = await both.fetch(chain[:2])
        assert statuses == [FETCHED, MoveStatus.GONE]
        assert both.has(both.target, chain) == [True, False, False]
        assert both.source.store.index.peek(NAMESPACE, 0, chain[1]) is not None


async def test_what_the_source_refuses_for_now_is_not_gone_and_its_chain_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tiers=["dram:1MiB", f"nvme:{tmp_path}/{{server}}:16MiB"]) as both:
        chain, front = await both.chain(200), both.source.store.index
        below = [one for one in chain if front.peek(NAMESPACE, 0, one) is None][:1]
        asked = [*below, *chain[chain.index(below[0]) + 1 :][:3]]
        await both.pool.prefetch(NAMESPACE, asked[1:])
        await eventually(lambda: all(front.peek(NAMESPACE, 0, one) for one in asked[1:]))

        async def no_room(*_: Any) -> bool:
            return False

        mover = both.source._context.mover
        with monkeypatch.context() as readers_hold_memory:
            readers_hold_memory.setattr(mover, "promote_and_wait", no_room)
            readers_hold_memory.setattr(mover, "promote", lambda *_: None)
            assert await both.fetch(asked) == [NOT_YET] * 4
        assert await both.fetch(asked) == [FETCHED] * 4
        await eventually(lambda: not both.target.stack.is_writing_back)


async def test_a_block_that_is_removed_on_its_way_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as both:
        chain = await both.chain(3)
        verify = fetcher_module.Fetcher._is_right
        removals = []

        async def remove_meanwhile(self: Any, *arguments: Any) -> bool:
            if not removals:
                removals.append(asyncio.create_task(both.pool.remove(NAMESPACE, chain[1:])))
                await asyncio.wait(removals)
            return await verify(self, *arguments)

        monkeypatch.setattr(fetcher_module.Fetcher, "_is_right", remove_meanwhile)
        gone = MoveStatus.GONE
        assert await both.fetch(chain) == [FETCHED, gone, gone]
        assert removals[0].result() == [True, True]
        for server in (both.source, both.target):
            assert both.has(server, chain) == [True, False, False]
        assert (await both.pool.match(NAMESPACE, chain)).length == 1


async def test_the_budget_holds_and_asking_again_goes_on() -> None:
    async with pair() as both:
        chain = await both.chain(200)
        moves_of(both.target).fetcher.budget = FetchBudget(1e6)  # 200 blocks in 1.6 s
        began, asked = now(), 0
        while not all(both.has(both.target, chain)):
            with suppress(DeadlineExceeded):  # a busy machine may be late with the answer
                statuses = await both.fetch(chain, within_s=1.0)
                assert set(statuses) <= {FETCHED, MoveStatus.HERE, NOT_YET}
            here = both.has(both.target, chain)
            assert here == sorted(here, reverse=True), "heads first"
            asked += 1
            assert asked < 50
        step = fetcher_module._STEP_BLOCKS * SIZE
        assert now() - began >= (200 * SIZE - step) / 1e6
        assert asked > 1


async def test_two_calls_fetch_a_block_once() -> None:
    async with pair() as both:
        chain = await both.chain(100)
        first, second = await asyncio.gather(both.fetch(chain), both.fetch(chain))
        brought = first.count(FETCHED) + second.count(FETCHED)
        assert brought == 100
        assert set(first + second) == {FETCHED, MoveStatus.IN_PROGRESS}
        assert both.target.stats(now()).counters["fetched_bytes"] == 100 * SIZE


async def test_a_caller_that_gives_up_leaves_nothing() -> None:
    async with pair() as both:
        chain = await both.chain(400)
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.02):
            calling = asyncio.create_task(both.fetch(chain))
            await asyncio.sleep(delay_s)
            calling.cancel()
            await asyncio.wait([calling])
            await asyncio.sleep(0.05)
            both.check()
        assert set(await both.fetch(chain)) <= {FETCHED, MoveStatus.HERE}


async def test_a_source_that_ends_meanwhile_costs_a_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as both:
        chain = await both.chain(100)
        step = fetcher_module.Fetcher._step
        steps = []

        async def end_source(self: Any, *arguments: Any) -> list[int]:
            steps.append(1)
            if len(steps) == 2:
                await both.source.close()
            return await step(self, *arguments)

        monkeypatch.setattr(fetcher_module.Fetcher, "_step", end_source)
        statuses = await both.fetch(chain)
        count = statuses.count(FETCHED)
        assert statuses == [FETCHED] * count + [MoveStatus.LOST] * (100 - count)
        assert 0 < count < 100
        assert await both.fetch(chain[count:]) == [MoveStatus.LOST] * (100 - count)


async def test_blocks_of_a_disk_are_fetched_into_memory_and_disk(tmp_path: Path) -> None:
    tiers = ["dram:1MiB", f"nvme:{tmp_path}/{{server}}:8MiB"]
    async with pair(tiers=tiers) as both:
        chain = keys("chain", 300)  # 2.4 MiB: most of it is on the disk alone
        for first in range(0, 300, 50):
            await both.put(chain[first : first + 50])
        statuses = await both.fetch(chain, within_s=20.0)
        assert statuses == [FETCHED] * 300
        for server in (both.source, both.target):
            assert all(both.has(server, chain))
        await both.source.close()
        into = [bytearray(SIZE) for _ in chain]
        results = await both.pool.read(NAMESPACE, chain, into, timeout=20)
        assert all(result.status is ReadStatus.HIT for result in results)
        assert list(map(bytes, into)) == values(chain)


async def test_a_master_that_is_late_keeps_the_source_from_forgetting() -> None:
    """FETCHED means that every living master knows of the copy."""
    async with pair() as both:
        chain = await both.chain(3)
        (announcer,) = both.target._context.announcers
        deliver, may_go = announcer._deliver, asyncio.Event()

        async def late(*message: Any) -> bool:
            await may_go.wait()
            return await deliver(*message)

        announcer._deliver = late  # type: ignore[method-assign]
        assert await both.fetch(chain, within_s=0.5) == [NOT_YET] * 3
        assert all(both.has(both.target, chain))
        may_go.set()
        assert await both.fetch(chain) == [MoveStatus.HERE] * 3


async def test_a_connection_that_has_broken_is_made_anew() -> None:
    """The one that is kept may lead to the process before a restart, or was closed with another
    call. For a fetch as for a removal that is passed on."""
    async with pair() as both:
        chain = await both.chain(3)
        (await moves_of(both.target).peers.channel(both.source.server, now() + 5)).abort()
        assert await both.fetch(chain) == [FETCHED] * 3
        (await moves_of(both.source).peers.channel(both.target.server, now() + 5)).abort()
        assert await both.remove(chain[2:]) == [True], "it came to the target before the fetch"
        assert both.has(both.target, chain) == [True, True, False]
        assert both.source.stats(now()).counters["passed_on_removals"] == 1


async def test_a_removal_reaches_the_others_when_one_of_them_fails_oddly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair(servers=3) as both:
        chain = await both.chain(2)
        source, (third,) = both.source, both.others
        assert await moves_of(third).fetcher.fetch(
            NAMESPACE, 0, chain, source.server, deadline=now() + 5
        )
        await both.fetch(chain)
        good = moves_of(source).peers.channel

        async def channel(server: str, deadline: float) -> Channel:
            if server == both.target.server:
                raise OSError(24, "Too many open files")
            await asyncio.sleep(0.01)  # the other one has failed by now
            return await good(server, deadline)

        monkeypatch.setattr(moves_of(source).peers, "channel", channel)
        writer = source.connect(Peer("w", "tcp"))
        assert await writer.remove(NAMESPACE, chain) == [True, True]
        assert both.has(third, chain) == [False, False]


async def test_a_removal_of_one_version_is_passed_on_as_such() -> None:
    """And it is not the removal of every version that may still come."""
    async with pair() as both:
        chain = await both.chain(2)
        await both.fetch(chain)
        checksums = [both.entry(both.source, digest).checksum for digest in chain]
        checksums[1] ^= 1
        assert await both.remove(chain, part=0, checksums=checksums) == [True, False]
        assert both.has(both.target, chain) == [False, True]
        checksums[1] ^= 1
        assert await both.remove(chain, part=0, checksums=checksums) == [False, True]
        assert both.has(both.target, chain) == [False, False]


async def test_fetched_blocks_keep_their_session_and_when_it_resumes() -> None:
    async with pair() as both:
        chain, ended = keys("chain", 100), keys("ended", 3)
        await both.put(chain, session_hint=SessionHint("one", 60.0))
        await both.put(ended, session_hint=SessionHint("two"))
        both.source.store.hint("two", None, now())
        assert await both.fetch(chain[60:]) == [FETCHED] * 40  # its end comes first
        assert await both.fetch([*chain[:60], *ended]) == [FETCHED] * 63
        entries = [both.entry(both.target, digest) for digest in (*chain, *ended)]
        sessions = [one.session.name if one.session else "" for one in entries]
        assert sessions == ["one"] * 100 + [""] * 3
        due = both.target.store.extents.policy.sessions["one"].due
        assert due is not None
        assert 50.0 < due - now() < 60.0
        assert not any(one.superseded_at for one in entries)
        session = entries[0].session
        assert session is not None
        assert [end.digest for end in session.chain_ends.values()] == chain[-1:]
        assert session.last_use == 0.0, "it was used elsewhere, and not by a client here"


async def test_what_the_receiver_knows_of_a_session_stays() -> None:
    async with pair() as both:
        chain, more = keys("chain", 4), keys("more", 4)
        await both.put(chain, session_hint=SessionHint("one", 60.0))
        await both.put(more, both.target, session_hint=SessionHint("one", 5.0))
        assert await both.fetch(chain) == [FETCHED] * 4
        due = both.target.store.extents.policy.sessions["one"].due
        assert due is not None
        assert due - now() < 5.0


def test_sessions_of_an_offer_are_sent_in_runs() -> None:
    one, two = SessionHint("one", 2.5), SessionHint("two")
    hints = [None, one, one, two, None, None]
    runs = pack_sessions(hints)
    assert runs == [(1, "", None), (2, "one", 2.5), (1, "two", None), (2, "", None)]
    assert list(unpack_sessions(runs)) == hints
    assert pack_sessions([None, None]) == []
    many = [SessionHint(str(n)) for n in range(300)]
    assert list(unpack_sessions(pack_sessions(many))) == many[:SESSION_RUNS_MAX]
