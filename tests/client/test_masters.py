"""How a client asks masters: several pages, several messages, several masters.

The masters are scripts; what they answer and when they are asked is known exactly.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

import kvpool
from kvpool import ClientConfig, Namespace, Pool, ReadStatus, WriteStatus, admin, dev, spans
from kvpool.client import lookup as lookup_module
from kvpool.client import masters as masters_module
from kvpool.client import pool as pool_module
from kvpool.client.admin import list_namespaces
from kvpool.client.lookup import Lookup
from kvpool.client.masters import Masters
from kvpool.client.servers import Servers
from kvpool.errors import DeadlineExceeded, LinkBroken, MasterLost, ServerLost
from kvpool.protocols import BlockStore, Channel, CountedListener, Link, Listener, Transport
from kvpool.runtime import Host
from kvpool.types import Cluster, Match, Member, Replica, Run, ServerStats
from kvpool_transports.streams import StreamChannel
from tests.conftest import NAMESPACE, buffers, keys, value, values
from tests.support import messages as wire
from tests.support.virtual_time import virtual_time

HERE = Host("here", "here", "here", lambda: 0)
Answer = Callable[[Any], wire.Message]


class ScriptedMaster:
    """A link whose answers a test gives; a message that arrives while it is silent is lost."""

    def __init__(self, address: str, answer: Answer) -> None:
        self.address = address
        self.answer = answer
        self.asked: list[wire.Message] = []
        self.is_silent = self.is_broken = False
        self.late_s = 0.0  # once

    async def request(
        self, type: int, body: bytes, *, deadline: float, hasty: bool = False
    ) -> tuple[int, bytes]:
        kind = wire.message_type(type)
        assert kind is not None
        message = wire.decode(kind, type, body)
        self.asked.append(message)
        left_s = deadline - asyncio.get_running_loop().time()
        late_s, self.late_s = self.late_s, 0.0
        if self.is_silent or self.is_broken or late_s > left_s:
            await asyncio.sleep(0.0 if self.is_broken and hasty else left_s)
            raise DeadlineExceeded(f"{self.address} is silent")
        await asyncio.sleep(late_s)
        return wire.encode(self.answer(message))

    def close(self) -> None:
        pass


class ScriptedNetwork:
    authenticated = True

    def __init__(self, **masters: Answer) -> None:
        self.masters = {name: ScriptedMaster(name, answer) for name, answer in masters.items()}

    def connect(self, address: str) -> Link:
        return self.masters[address]

    async def serve(self, address: str, handler: object) -> CountedListener:
        raise NotImplementedError

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


def config(network: ScriptedNetwork, **settings: Any) -> ClientConfig:
    return ClientConfig(masters=list(network.masters), **settings)


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def member(server: str, *, epoch: int = 1, host: str = "far") -> Member:
    return Member(server, epoch, host, (f"x://{server}",), ("dram",), True, 0.0, 1, _STATS)


_STATS = ServerStats()


class ScriptedTransport:
    """Channels to nowhere; while it is `broken` there are none."""

    scheme = "x"
    same_host = False
    authenticated = True

    def __init__(self) -> None:
        self.broken = True
        self.connected = 0
        self.channels: list[Any] = []

    async def listen(self, address: str, store: BlockStore) -> Listener:
        raise NotImplementedError

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        self.connected += 1
        if self.broken:
            raise LinkBroken("refused")
        channel = Mock(spec=StreamChannel)
        channel.close = AsyncMock()
        self.channels.append(channel)
        return channel


def client(
    network: ScriptedNetwork, transport: ScriptedTransport | None = None, **settings: Any
) -> tuple[Lookup, Servers]:
    chosen = config(network, **settings)
    masters = Masters(network, chosen)
    counters: Counter[str] = Counter()
    transports: dict[str, Transport] = {"x": transport or ScriptedTransport()}
    servers = Servers(chosen, Cluster(), HERE, transports, masters, counters, random.Random(1))
    return Lookup(masters, servers), servers


# --- several pages, several messages -----------------------------------------------------------


@virtual_time
async def test_every_page_of_the_members_is_asked_for() -> None:
    names = [f"server-{number:02}" for number in range(7)]

    def answer(question: wire.Members) -> wire.Message:
        page = [member(name) for name in names if name > question.after][:3]
        more = page[-1].server < names[-1]
        return wire.MembersReply("m", 1.0, 0, page, more)

    _, servers = client(ScriptedNetwork(m=answer))
    assert [one.server for one in await servers.refresh(later(5))] == names


@virtual_time
async def test_namespaces_with_one_name_are_on_several_pages() -> None:
    """They differ in their parts: the next page begins behind both."""
    found = [("a", 1), ("a", 2), ("a", 8), ("b", 1)]

    def answer(question: wire.Namespaces) -> wire.Message:
        page = [one for one in found if one > (question.after, question.parts)][:1]
        return wire.NamespacesReply([(*one, 5) for one in page], page[-1] != found[-1])

    network = ScriptedNetwork(m=answer)
    lookup, _ = client(network)
    names = await list_namespaces(lookup._masters, later(5))
    assert [(one.name, one.parts) for one, _ in names] == found
    assert len(network.masters["m"].asked) == 4


@pytest.mark.parametrize("page", [[], ["a"], ["b", "a"]], ids=str)
@virtual_time
async def test_pages_that_do_not_go_on_come_to_an_end(page: list[str]) -> None:
    """A master that always has one more page would be asked for ever."""

    def answer(question: wire.Members | wire.Namespaces) -> wire.Message:
        if isinstance(question, wire.Members):
            return wire.MembersReply("m", 1.0, 0, [member(name) for name in page], True)
        return wire.NamespacesReply([(name, 1, 5) for name in page], True)

    network = ScriptedNetwork(m=answer)
    lookup, servers = client(network)
    assert [one.server for one in await servers.refresh(later(5))] == page
    assert [one.name for one, _ in await list_namespaces(lookup._masters, later(5))] == page
    assert len(network.masters["m"].asked) <= 4


@pytest.mark.parametrize("blocks", [0, 2, 4])
@virtual_time
async def test_an_answer_for_another_number_of_blocks_is_none(blocks: int) -> None:
    """Three blocks were asked for. What a master answered for two may be of any two of them."""

    def answer(question: wire.Message) -> wire.Message:
        if isinstance(question, wire.Find):
            return wire.FindReply([(0, blocks - 1, [("s", "dram", 0)])] if blocks else [], b"")
        if isinstance(question, wire.Explain):
            return wire.Explained([(int(ReadStatus.EVICTED), "", [])] * blocks)
        assert isinstance(question, wire.Place)
        return wire.PlaceReply(["s"], [0] * blocks)

    network = ScriptedNetwork(m=answer)
    chain = keys("short", 3)
    pool = Pool(config(network), cluster=Cluster(), network=network, transports={})
    match = await pool.match(NAMESPACE, chain)
    assert (match.length, match.stopped) == (0, ReadStatus.NO_MASTER)
    results = await pool.read(NAMESPACE, chain, buffers(3))
    assert [result.status for result in results] == [ReadStatus.NO_MASTER] * 3
    statuses = await pool.write(NAMESPACE, chain, values(chain))
    assert statuses == [WriteStatus.NO_MASTER] * 3
    with pytest.raises(MasterLost, match=f"{blocks} of 3"):
        await admin(pool).explain(NAMESPACE, chain)
    await pool.close()


@virtual_time
async def test_a_namespace_that_cannot_be_is_no_answer() -> None:
    """What a master lists must be usable as it is, in the next question, too."""
    network = ScriptedNetwork(m=lambda _: wire.NamespacesReply([("a\nb", 1, 5)], False))
    lookup, _ = client(network)
    with pytest.raises(MasterLost, match="printable"):
        await list_namespaces(lookup._masters, later(5))


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks in a message, so that ten take three."""
    for name in ("_FIND_KEYS", "_MATCH_KEYS", "_FIRST_KEYS"):
        monkeypatch.setattr(lookup_module, name, 4)
    monkeypatch.setattr(spans, "SPAN_BLOCKS", 2)
    monkeypatch.setattr(lookup_module, "BATCH_BLOCKS_MAX", 4)
    monkeypatch.setattr(pool_module, "BATCH_BLOCKS_MAX", 4)


@pytest.mark.usefixtures("small_messages")
async def test_a_chain_that_takes_several_messages_is_matched_and_read(
    two_servers: Any,
) -> None:
    chain = keys("long", 10)
    async with two_servers.pool() as writer, two_servers.pool() as reader:
        for number, digest in enumerate(chain):
            await admin(writer).write_to(f"dev-{number // 5}", NAMESPACE, digest, value(digest))
        match = await reader.match(NAMESPACE, chain)
        assert (match.length, match.stopped) == (10, ReadStatus.HIT)
        assert [(run.first, run.last, run.replicas[0].server) for run in match.runs] == [
            (0, 4, "dev-0"),
            (5, 9, "dev-1"),
        ]
        got = buffers(10)
        results = await reader.read(NAMESPACE, chain, got, match=match)
        assert all(result.status.hit for result in results)
        assert got == values(chain)
        assert [one.status for one in await admin(reader).explain(NAMESPACE, chain)] == [
            ReadStatus.HIT
        ] * 10


@pytest.mark.usefixtures("small_messages")
async def test_misses_in_later_messages_have_their_own_reasons(pool_dev: Any) -> None:
    chain = keys("long", 10)
    async with pool_dev.pool() as writer, pool_dev.pool() as reader:
        await writer.write(NAMESPACE, chain[:9], values(chain[:9]))
        assert await writer.remove(NAMESPACE, [chain[5], chain[9], chain[6]]) == [True, False, True]
        assert await writer.remove(NAMESPACE, [*keys("no", 6), chain[8]]) == [False] * 6 + [True]
        match = await reader.match(NAMESPACE, chain)
        assert (match.length, match.stopped) == (5, ReadStatus.REMOVED)
        results = await reader.read(NAMESPACE, chain, buffers(10))
        explained = await admin(reader).explain(NAMESPACE, chain)
    removed, never = ReadStatus.REMOVED, ReadStatus.NEVER_WRITTEN
    expected = [ReadStatus.HIT] * 5 + [removed, removed, ReadStatus.HIT, removed, never]
    assert [result.status for result in results] == expected
    assert [one.status for one in explained] == expected
    assert [one.key.digest for one in explained] == chain


# --- several masters ---------------------------------------------------------------------------


def tells(name: str) -> Answer:
    return lambda _: wire.MembersReply(name, 1.0, 0, [], False)


async def ask(masters: Masters, timeout_s: float) -> str:
    reply = await masters.ask(wire.Members(), wire.MembersReply, later(timeout_s))
    return reply.master


@virtual_time
async def test_the_master_that_answered_last_is_asked_first() -> None:
    network = ScriptedNetwork(a=tells("a"), b=tells("b"))
    masters = Masters(network, config(network, hedge_s=0.05, attempt_s=1.0))
    assert await ask(masters, 5) == "a"
    network.masters["a"].is_silent = True
    assert await ask(masters, 5) == "b"
    asked = len(network.masters["a"].asked)
    network.masters["a"].is_silent = False
    assert await ask(masters, 5) == "b"
    assert len(network.masters["a"].asked) == asked


@virtual_time
async def test_a_short_deadline_leaves_time_for_the_other_masters() -> None:
    network = ScriptedNetwork(a=tells("a"), b=tells("b"))
    network.masters["a"].is_silent = True
    masters = Masters(network, config(network, hedge_s=3.0, attempt_s=4.0))
    began = later(0)
    assert await ask(masters, 1.0) == "b"
    assert later(0) - began < 0.95


@virtual_time
async def test_a_master_that_was_just_started_does_not_end_a_write() -> None:
    """It knows no server yet: it is believed if no other one answers, and is not asked first."""
    place = wire.Place("ns", 1, 32, b"k" * 32, b"", 64, "here", 1)

    def names(*servers: str) -> Answer:
        return lambda _: wire.PlaceReply(list(servers), b"\0")

    network = ScriptedNetwork(a=names("s"), b=names())
    old, new = network.masters.values()
    masters = Masters(network, config(network, hedge_s=0.01, attempt_s=0.1))
    old.is_silent = True
    assert (await masters.ask(place, wire.PlaceReply, later(1.0))).servers == []
    old.is_silent = False
    for _ in range(2):
        assert (await masters.ask(place, wire.PlaceReply, later(1.0))).servers == ["s"]
    assert len(new.asked) == 1

    old.answer, new.answer = new.answer, old.answer
    assert (await masters.ask(place, wire.PlaceReply, later(1.0))).servers == ["s"]


def young_and_old() -> tuple[ScriptedMaster, ScriptedMaster, Masters]:
    """The one that is asked first was just started: it does not know yet what the other one has."""
    network = ScriptedNetwork(
        young=lambda _: wire.FindReply([], b"\1", partial=True),
        old=lambda _: wire.FindReply([(0, 0, [("s", "dram", 0)])], b""),
    )
    return *network.masters.values(), Masters(network, config(network, hedge_s=0.2, attempt_s=8))


async def is_found(masters: Masters) -> bool:
    find = wire.Find("ns", 1, 32, b"k" * 32, True)
    return bool((await masters.ask(find, wire.FindReply, later(10))).runs)


@pytest.mark.parametrize("late_s", [0.0, 0.1])
@virtual_time
async def test_a_miss_of_a_master_that_was_just_started_is_not_believed(late_s: float) -> None:
    young, old, masters = young_and_old()
    old.late_s = late_s
    assert await is_found(masters)
    assert await is_found(masters)
    assert (len(young.asked), len(old.asked)) == (1, 2)  # who knows more is asked first

    old.late_s = 0.3  # so that the young one is asked, too, and answers at once
    assert await is_found(masters)
    assert len(young.asked) == 2


@virtual_time
async def test_a_master_that_knows_little_is_believed_when_no_other_one_answers_soon() -> None:
    young, old, masters = young_and_old()
    old.is_silent = True
    for _ in range(2):
        began = later(0)
        assert not await is_found(masters)
        assert later(0) - began < 2
    old.is_silent = False
    assert await is_found(masters)  # the better one is found again

    old.is_broken = True
    took = []
    for _ in range(2):
        began = later(0)
        assert not await is_found(masters)
        took.append(later(0) - began)
    assert took[1] < 0.15  # it is not waited for: its connection is known to be broken
    young.is_broken = True
    began = later(0)
    with pytest.raises(MasterLost):
        await masters.ask(wire.Members(), wire.MembersReply, later(0.5))
    assert later(0) - began > 0.4  # one of them may come back


@virtual_time
async def test_masters_that_are_silent_cost_one_attempt() -> None:
    network = ScriptedNetwork(a=tells("a"))
    network.masters["a"].is_silent = True
    masters = Masters(network, config(network, hedge_s=0.05, attempt_s=0.2))
    began = later(0)
    with pytest.raises(MasterLost, match="silent"):
        await ask(masters, 30)
    assert 0.15 < later(0) - began < 5
    began = later(0)
    with pytest.raises(MasterLost):
        await ask(masters, 0.1)
    assert later(0) - began < 0.19


# --- what is known of a server -------------------------------------------------------------------


def listing(*members: Member) -> Answer:
    return lambda _: wire.MembersReply("m", 1.0, 0, list(members), False)


@asynccontextmanager
async def knowing(
    *members: Member, broken: bool = False
) -> AsyncIterator[tuple[ScriptedMaster, ScriptedTransport, Servers]]:
    """A client that has heard of these servers; and what it heard it from, and reaches them by."""
    network, transport = ScriptedNetwork(m=listing(*members)), ScriptedTransport()
    transport.broken = broken
    _, servers = client(network, transport)
    await servers.refresh(later(5))
    yield network.masters["m"], transport, servers
    await servers.close()


@virtual_time
async def test_servers_of_this_host_come_first_and_silent_ones_last() -> None:
    far = member("far")
    async with knowing(far, member("near", host="here")) as (master, _, servers):
        assert servers.rank(["far", "near"]) == ["near", "far"]
        for _ in range(6):
            servers.mark_unresponsive("near", "silent", given_up=False)
        assert servers.rank(["far", "near"]) == ["far", "near"]
        # It has restarted: what was known of the process before says nothing.
        master.answer = listing(far, member("near", epoch=2, host="here"))
        await servers.refresh(later(5))
        assert servers.rank(["far", "near"]) == ["near", "far"]
        servers.mark_unresponsive("near", "silent", given_up=False)
        assert servers.known["near"].slow_until <= later(0.4)


@virtual_time
async def test_of_equal_servers_that_comes_first_which_is_read_from_least() -> None:
    async with knowing(member("a"), member("b"), member("near", host="here")) as (*_, servers):
        first, second = servers.rank(["a", "b"])
        servers.under_way[first] += 1
        assert servers.rank(["a", "b"], now=True) == [second, first]
        assert servers.rank(["a", "b"]) == [first, second]  # whom all ask, as far as they can
        servers.under_way["near"] += 9
        assert servers.rank(["a", "b", "near"], now=True)[0] == "near"  # which has no link


@virtual_time
async def test_what_another_server_has_in_memory_is_not_read_from_a_disk() -> None:
    async with knowing(member("a"), member("b"), member("near", host="here")) as (*_, servers):

        def candidates(*tiers: str) -> list[str]:
            replicas = tuple(map(Replica, ("a", "b", "near"), tiers))
            match = Match((Run(0, 0, replicas),), 1, ReadStatus.HIT)
            return Lookup(None, servers).locate_in(match, 0, 1)[1][0][::-1]  # type: ignore[arg-type]

        servers.under_way.update(a=1)
        assert candidates("dram", "nvme") == ["a", "b"]
        assert candidates("nvme", "dram") == ["b", "a"]
        assert candidates("hbm", "objects") == ["a", "b"]
        assert candidates("nvme", "nvme") == ["b", "a"], "which is read from least"
        assert candidates("nvme", "dram", "nvme") == ["near", "b", "a"], "no link is the best one"
        parts = Replica("b", "nvme", 0), Replica("a", "dram", 1), Replica("b", "dram", 1)
        match = Match((Run(0, 0, parts),), 1, ReadStatus.HIT)
        found = Lookup(None, servers).locate_in(match, 1, 1)[1][0]  # type: ignore[arg-type]
        assert found[-1] == "b", "another part of it lies on the disk"
        for _ in range(6):
            servers.mark_unresponsive("b", "silent", given_up=False)
        assert candidates("nvme", "dram") == ["a", "b"]


async def ping(channel: object) -> str:
    return "pong"


@virtual_time
async def test_a_lost_server_is_not_asked_for_a_moment() -> None:
    """At most 0.4 s at first; meanwhile a call ends at once, and masters are seldom asked."""
    async with knowing(member("s"), broken=True) as (master, transport, servers):
        with pytest.raises(ServerLost):
            await servers.call("s", ping, later(5))
        asked, connected = len(master.asked), transport.connected
        lost_at = later(0)
        while later(0) < lost_at + 0.1:
            with pytest.raises(ServerLost):
                await servers.call("s", ping, later(5))
            await asyncio.sleep(0.01)
        assert transport.connected == connected
        assert len(master.asked) <= asked + 1
        transport.broken = False
        await asyncio.sleep(max(0.0, lost_at + 0.41 - later(0)))
        assert await servers.call("s", ping, later(5)) == "pong"


@virtual_time
async def test_while_a_server_is_lost_masters_are_asked_for_a_new_one() -> None:
    """It may have restarted elsewhere: that is noticed before the delay is over."""
    async with knowing(member("s"), broken=True) as (master, transport, servers):
        for _ in range(5):  # the delays grow to seconds
            with pytest.raises(ServerLost):
                await servers.call("s", ping, later(5))
            servers.known["s"].retry_at = 0.0
        servers.known["s"].retry_at = later(60)
        master.answer = listing(member("s", epoch=2))
        transport.broken = False
        await asyncio.sleep(0.55)
        assert await servers.call("s", ping, later(5)) == "pong"


@virtual_time
async def test_a_server_that_has_restarted_is_connected_anew() -> None:
    """The old connections end at the process that is gone."""
    async with knowing(member("s")) as (master, transport, servers):
        for _ in range(2):
            assert await servers.call("s", ping, later(5)) == "pong"
        await servers.refresh(later(5))
        (old,) = transport.channels
        master.answer = listing(member("s", epoch=2))
        await servers.refresh(later(5))
        old.abort.assert_called_once()
        assert await servers.call("s", ping, later(5)) == "pong"
        _, new = transport.channels
        new.abort.assert_not_called()


@virtual_time
async def test_a_call_that_succeeds_ends_the_memory_of_failures() -> None:
    async with knowing(member("s")) as (_, _, servers):
        for _ in range(6):
            servers.mark_unresponsive("s", "silent", given_up=False)
        assert await servers.call("s", ping, later(5)) == "pong"
        servers.known["s"].slow_until = 0.0
        servers.mark_unresponsive("s", "silent", given_up=False)
        assert servers.known["s"].slow_until <= later(0.4)


@virtual_time
async def test_another_path_is_taken_when_a_server_was_given_up() -> None:
    """The network of that path may be at fault. Memory of this host cannot be."""
    addresses = ["local://s", "x://s", "y://s"]
    info = msgspec.structs.replace(member("s", host="here"), addresses=addresses)
    network = ScriptedNetwork(m=listing(info))
    made = {scheme: ScriptedTransport() for scheme in ("local", "x", "y")}
    for transport in made.values():
        transport.broken = False
    chosen, counters = config(network), Counter[str]()
    masters = Masters(network, chosen)
    servers = Servers(chosen, Cluster(), HERE, made, masters, counters, random.Random(1))
    assert await servers.call("s", ping, later(5)) == "pong"
    assert [transport.connected for transport in made.values()] == [1, 0, 0]
    made["local"].same_host = True
    await servers.refresh(later(5))
    assert await servers.call("s", ping, later(5)) == "pong"
    servers.mark_unresponsive("s", "silent", given_up=True)
    assert await servers.call("s", ping, later(5)) == "pong"
    assert [transport.connected for transport in made.values()] == [2, 0, 0]
    made["local"].broken = True
    servers.mark_unresponsive("s", "silent", given_up=True)
    assert await servers.call("s", ping, later(5)) == "pong"
    assert [transport.connected for transport in made.values()] == [3, 1, 0]
    servers.mark_unresponsive("s", "silent", given_up=True)
    assert await servers.call("s", ping, later(5)) == "pong"
    assert made["y"].connected == 1
    await servers.close()


@virtual_time
async def test_a_pool_closes_while_a_master_is_silent() -> None:
    network = ScriptedNetwork(a=tells("a"), b=tells("b"))
    for master in network.masters.values():
        master.is_silent = True
    settings = config(network, hedge_s=0.05, attempt_s=0.2)
    pool = Pool(settings, cluster=Cluster(), network=network, transports={})
    match = await pool.match(Namespace("x"), keys("x", 3))
    assert match.stopped is ReadStatus.NO_MASTER
    await pool.close()


# --- a caller with many calls at once ----------------------------------------------------------


class SlowMaster(ScriptedMaster):
    """Answers one request after the other, each after `each_s`."""

    def __init__(self, address: str, answer: Answer, each_s: float) -> None:
        super().__init__(address, answer)
        self.each_s = each_s
        self.held = self.most_held = 0
        self._turn = asyncio.Lock()

    async def request(
        self, type: int, body: bytes, *, deadline: float, hasty: bool = False
    ) -> tuple[int, bytes]:
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                await asyncio.sleep(self.each_s)
            return await super().request(type, body, deadline=deadline)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.address} is slow") from None
        finally:
            self.held -= 1


@virtual_time
async def test_a_client_with_many_questions_waits_for_its_own_and_not_in_vain() -> None:
    """All of them take longer than an attempt may: what is late is this client's queue."""
    network = ScriptedNetwork()
    master = network.masters["a"] = SlowMaster("a", tells("a"), 0.001)
    masters = Masters(network, config(network, attempt_s=0.3))
    began = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*[ask(masters, 30) for _ in range(600)])
    assert answers == ["a"] * 600
    assert asyncio.get_running_loop().time() - began > 0.6
    assert master.most_held <= 64


@virtual_time
async def test_questions_that_wait_for_a_silent_master_end_after_an_attempt() -> None:
    network = ScriptedNetwork(a=tells("a"))
    masters = Masters(network, config(network, attempt_s=0.2))
    network.masters["a"].is_silent = True
    began = asyncio.get_running_loop().time()
    answers = await asyncio.gather(
        *[ask(masters, 30) for _ in range(300)],
        return_exceptions=True,
    )
    assert {type(answer) for answer in answers} == {MasterLost}
    assert asyncio.get_running_loop().time() - began < 5
    network.masters["a"].is_silent = False
    assert await ask(masters, 5) == "a"  # none is held back


@virtual_time
async def test_a_question_that_is_given_up_leaves_its_place() -> None:
    network = ScriptedNetwork(a=tells("a"))
    masters = Masters(network, config(network, attempt_s=30))
    network.masters["a"].is_silent = True
    asked = [asyncio.create_task(ask(masters, 30)) for _ in range(100)]
    await asyncio.sleep(0.05)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    network.masters["a"].is_silent = False
    assert await ask(masters, 5) == "a"


async def test_a_thousand_reads_at_once_are_no_silence_of_a_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """64 streams carry them; those that wait have time, and the log is quiet."""
    async with dev.serve("32MiB", listen=("tcp://127.0.0.1:0",)) as running:
        settings = ClientConfig(
            masters=[running.address], transports=["tcp"], attempt_s=0.2, hedge_s=0.05
        )
        async with await kvpool.connect(config=settings) as pool:
            chain = keys("crowd", 1000)
            await pool.write(NAMESPACE, chain, values(chain), timeout=60)
            match = await pool.match(NAMESPACE, chain, timeout=60)
            got = buffers(1000)
            results = await asyncio.gather(
                *[
                    pool.read(NAMESPACE, [digest], [into], match=match.of(i, i + 1), timeout=60)
                    for i, (digest, into) in enumerate(zip(chain, got, strict=True))
                ]
            )
            assert {result.status for (result,) in results} == {ReadStatus.HIT}
            assert got == values(chain)
            assert not pool.counters["failed_tcp"]
        patient = ClientConfig(masters=[running.address], transports=["tcp"])
        async with await kvpool.connect(config=patient) as pool:
            stored = await asyncio.gather(
                *[
                    pool.write(NAMESPACE, [digest], [value(digest)], timeout=60)
                    for digest in keys("crowd of writers", 500)
                ]
            )
            assert stored == [[WriteStatus.STORED]] * 500
    assert not [one for one in caplog.records if one.name.startswith("kvpool.client")]


@virtual_time
async def test_one_line_says_that_a_server_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(channel: Channel) -> str:
        await asyncio.sleep(0)
        raise LinkBroken("gone")

    async with knowing(member("s", host="here")) as (_, _, servers):
        for _ in range(100):
            servers.mark_unresponsive("s", "silent", given_up=True)
        calls = [servers.call("s", broken, later(5)) for _ in range(100)]
        await asyncio.gather(*calls, return_exceptions=True)
        lines = [one.message.split(" server=")[0] for one in caplog.records]
        assert lines == ["server is silent or slow", "transport failed"]


# --- what the log has of a lost pool -----------------------------------------------------------


@virtual_time
async def test_the_log_has_once_that_the_pool_is_lost_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters_module, "_LOST_AFTER_S", 0.03)
    caplog.set_level("INFO", logger="kvpool.client.masters")
    network = ScriptedNetwork(a=lambda question: wire.NamespacesReply([], False))
    masters = Masters(network, config(network, attempt_s=0.02))

    async def ask(times: int) -> int:
        failures = 0
        for _ in range(times):
            try:
                await masters.ask(wire.Namespaces("", 0), wire.NamespacesReply, later(0.02))
            except MasterLost:
                failures += 1
        return failures

    def logged() -> list[tuple[str, str]]:
        return [(record.levelname, record.message) for record in caplog.records]

    assert await ask(2) == 0
    network.masters["a"].is_silent = True
    assert await ask(1) == 1
    network.masters["a"].is_silent = False
    await ask(1)
    assert logged() == []  # one late answer is no loss
    for _ in range(2):
        network.masters["a"].is_silent = True
        assert await ask(4) == 4
        network.masters["a"].is_silent = False
        assert await ask(2) == 0
    lost, back, *again = logged()
    assert lost == (
        "WARNING",
        "kvpool: the pool is lost, no master answers masters=a why='a is silent'",
    )
    assert back[0] == "INFO"
    assert back[1].startswith("kvpool: the pool is back masters=a lost_s=0.")
    assert [level for level, _ in again] == ["WARNING", "INFO"]
