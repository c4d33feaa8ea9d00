"""Announcing to a master over a link that loses answers: the numbers show what is missing (G7)."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from kvpool import dev
from kvpool.config import MasterConfig
from kvpool.errors import DeadlineExceeded, Unavailable
from kvpool.master.service import Master
from kvpool.master.state.server_record import Inventories
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Link, ReserveRequest
from kvpool.server import announcer as module
from kvpool.server import outbox
from kvpool.server.announcer import Announcer, AnnouncerState, Identity
from kvpool.server.block_server import BlockServer
from kvpool.server.context import ServerContext, Visibility
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, ServerStats
from kvpool.wire import messages as wire
from kvpool.wire.frames import BODY_SIZE_MAX
from tests.conftest import eventually, key, keys

ONE = Namespace("one")
HEARTBEAT_S = 0.02


class LossyLink:
    """To a master in this process. `lost` answers are not delivered, or their requests neither."""

    address = "master"

    def __init__(self, master: Master) -> None:
        self._master = master
        self.lost = ""
        self.sent: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = 0
        #: Sees each request that arrives.
        self.watch: Callable[[int, bytes], object] = lambda type, body: None

    async def request(
        self, type: int, body: bytes, *, deadline: float, hasty: bool = False
    ) -> tuple[int, bytes]:
        message = wire.message_type(type)
        assert message is not None
        self.sent[message.__name__] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        lost = self.lost
        answer = None
        if lost != "requests":
            self.watch(type, body)
            answer = self._master.handle(type, body)
        try:
            await asyncio.sleep(HEARTBEAT_S if lost else 0)
        finally:
            self.in_flight -= 1
        if lost or answer is None:
            raise DeadlineExceeded("the master did not answer in time")
        return answer

    def close(self) -> None:
        pass


class Setup:
    """A store of one server, its announcer, and the master."""

    def __init__(self, link: Link | None = None, heartbeat_s: float | None = None) -> None:
        self.master = Master(MasterConfig(), cast(Any, None))
        self.link = LossyLink(self.master)
        self.store = Blocks([Store(1 << 20, alignment=64)])
        identity = Identity("s", 1, "host", [], ["dram"], b"secret")
        self.announcer = Announcer(
            identity,
            self.store,
            link or self.link,
            HEARTBEAT_S if heartbeat_s is None else heartbeat_s,
            stats=lambda now: ServerStats(),
        )

    def write(self, digests: list[bytes]) -> None:
        count = len(digests)
        request = ReserveRequest(ONE, 0, digests, [ROOT] * count, [64] * count)
        for answer in self.store.reserve(1, request, 0.0):
            self.store.seal(1, answer.id, 0, 0.0)
        self.announcer.enqueue(self.store.change_log.take(), self.store.fingerprint)

    def read(self, namespace: Namespace, digests: list[bytes]) -> None:
        """As a connection of a reader does, which a master may have sent here."""
        sizes = [64] * len(digests)
        self.store.unpin(2, self.store.pin(2, namespace, 0, digests, 0.0, sizes))
        self.announcer.enqueue(self.store.change_log.take(), self.store.fingerprint)
        self.announcer.correct(self.store.change_log.missed.take())

    async def until_known(self, digests: list[bytes]) -> None:
        known = self.master.directory
        await eventually(lambda: known.match(ONE, digests).length == len(digests))
        await eventually(lambda: not self.link.in_flight)


@asynccontextmanager
async def running(blocks: list[bytes]) -> AsyncIterator[Setup]:
    setup = Setup()
    setup.write(blocks)
    setup.announcer.start()
    await setup.until_known(blocks)
    try:
        yield setup
    finally:
        await setup.announcer.close()


async def test_many_hints_leave_the_loop_to_others_and_delay_no_change() -> None:
    turns, now, flushed = Counter[int](), 0, list[asyncio.Future[bool]]()
    async with running(keys("block", 1)) as setup:
        setup.announcer.master.heartbeat_s = 9.0
        vars(setup.store)["hint"] = lambda *_, **__: turns.update([now])
        for number in range(500):
            setup.master.hints.asked(f"{number}")
        while turns.total() < 500:
            await asyncio.sleep(0)
            now += 1
            if turns and not flushed:
                setup.write(keys("written meanwhile", 1))
                flushed.append(setup.announcer.flushed())
        assert flushed[0].done()
    assert max(turns.values()) <= 8


@pytest.mark.parametrize("times", [1, 3])
async def test_a_bug_in_a_heartbeat_ends_no_announcements(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server stays known, the next blocks are told, and the log says what has failed."""
    left = times
    async with running(keys("before", 3)) as setup:

        def bug(now: float) -> ServerStats:
            nonlocal left
            if left:
                left -= 1
                raise KeyError("a bug in a policy")
            return stats(now)

        stats, setup.announcer._stats = setup.announcer._stats, bug
        await eventually(lambda: not left and setup.announcer.registered)
        after = keys("after", 2)
        setup.write(after)
        async with asyncio.timeout(1):
            await setup.announcer.flushed()
        await setup.until_known(after)
        await eventually(lambda: setup.announcer.master.problem is None)
    lines = [line for line in caplog.messages if "runs again" in line]
    assert len(lines) == times
    assert "announce to" in lines[0]


async def test_a_block_that_a_master_lists_by_mistake_is_corrected_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Soon, not with the next heartbeat."""
    monkeypatch.setattr("tests.server.test_announcer.HEARTBEAT_S", 60.0)
    async with running(keys("here", 1)) as setup:
        await eventually(lambda: setup.announcer.registered)
        directory, wrong = setup.master.directory, keys("wrong", 3)
        directory.stored("s", ONE, 0, 0, [*wrong, *[one[1:] for one in wrong]])
        for left, one in (5, wrong[0]), (3, wrong[1]):  # the second ones wait a moment
            setup.read(ONE, [one, one[1:]])  # digests have any size
            await eventually(lambda n=left: len(directory) == n)  # type: ignore[misc]
        assert directory.match(ONE, wrong[2:]).length == 1
        assert directory.match(ONE, keys("here", 1)).length == 1


async def test_a_correction_waits_for_the_changes_that_came_before_it() -> None:
    """Else the map is compared with what the server held before them, and an inventory is sent."""
    async with running(keys("here", 2)) as setup:
        await eventually(lambda: setup.announcer.registered)
        setup.store.remove(ONE, keys("here", 1))  # queued a little later
        setup.announcer.correct([(ONE, 0, keys("here", 1))])
        sent = setup.link.sent["Heartbeat"]
        await eventually(lambda: setup.link.sent["Heartbeat"] > sent + 5)
        assert setup.announcer.map.differences == 0
        setup.read(ONE, [])
        await eventually(lambda: len(setup.master.directory) == 1)
        assert setup.link.sent["Inventory"] == 1


async def test_a_block_that_was_missed_and_is_here_by_then_is_not_corrected() -> None:
    async with running(keys("here", 1)) as setup:
        await eventually(lambda: setup.announcer.registered)
        late, now = keys("late", 3), setup.link.sent
        setup.read(ONE, keys("never", 1))  # the next ones wait a while
        await eventually(lambda: now["Announce"] == 1)
        setup.read(ONE, late)
        setup.write(late)
        await setup.until_known(late)
        setup.read(ONE, keys("gone", 1))
        await eventually(lambda: now["Announce"] == 3)
        assert setup.master.directory.match(ONE, late).length == 3
        assert setup.announcer.map.differences == 0
        assert now["Inventory"] == 1


async def test_keys_that_never_were_cost_a_master_little_and_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the master pauses: neither a queue overflows nor is an inventory sent."""
    evil, mine = Namespace("@acme/none"), Namespace("@globex/m")
    async with running(keys("here", 1)) as setup:
        await eventually(lambda: setup.announcer.registered)
        directory, wrong = setup.master.directory, keys("wrong", 1)
        monkeypatch.setattr(Inventories, "differs", lambda *heartbeat: False)
        directory.stored("s", mine, 0, 0, wrong)
        announced: list[int] = []
        apply = setup.master.servers._apply

        def watched(server: str, changes: Any) -> int:
            announced.append(sum(len(digests) for _, _, digests, _ in changes))
            return apply(server, changes)

        setup.master.servers._apply = watched  # type: ignore[method-assign]
        setup.link.lost = "requests"
        for number in range(200):
            setup.read(evil, keys(f"e{number}", 1024))
        setup.read(mine, wrong)
        await asyncio.sleep(3 * HEARTBEAT_S)
        setup.link.lost = ""
        await eventually(lambda: directory.match(mine, wrong).length == 0)
        assert sum(announced) < 1100
        assert setup.announcer.outbox.missed.shares.refused.total() > 190 * 512
        assert setup.link.sent["Inventory"] == 1


async def test_a_server_that_leaves_is_lost_at_once() -> None:
    """It says so, and takes no change for that master any more."""
    chain = keys("c", 3)
    async with running(chain) as setup:
        await eventually(lambda: setup.announcer.registered)
        assert setup.master.directory.match(ONE, chain).length == 3
        await setup.announcer.close()
        assert setup.link.sent["Leave"] == 1
        assert not setup.announcer.registered
        assert setup.master.directory.match(ONE, chain).length == 0
        sent = setup.link.sent.total()
        setup.write(keys("later", 1))
        await asyncio.sleep(3 * HEARTBEAT_S)
        assert setup.link.sent.total() == sent


async def test_a_master_that_is_gone_is_asked_ten_times_a_heartbeat() -> None:
    """Soon enough to find the next one at once, and no load for its host."""
    setup, tries = Setup(), 0

    async def refused(*message: object, **how: object) -> tuple[int, bytes]:
        nonlocal tries
        tries += 1
        raise Unavailable("connection refused")

    setup.link.request, request = refused, setup.link.request  # type: ignore[method-assign]
    setup.write(blocks := keys("a", 3))
    began = asyncio.get_running_loop().time()
    setup.announcer.start()
    await asyncio.sleep(10 * HEARTBEAT_S)
    heartbeats = (asyncio.get_running_loop().time() - began) / HEARTBEAT_S
    assert 3 < tries <= 10 * heartbeats + 1
    setup.link.request = request  # type: ignore[method-assign]
    await setup.until_known(blocks)
    await setup.announcer.close()


async def test_nobody_waits_for_a_master_whose_connection_is_broken() -> None:
    """Its system says so when its process is killed: long before an answer would be late."""
    network = TcpNetwork()
    asked: list[int] = []

    def handle(type: int, *request: Any) -> tuple[int, bytes]:
        asked.append(type)
        return setup.master.handle(type, *request)

    listener = await network.serve("127.0.0.1:0", handle)
    setup = Setup(network.connect(listener.address), heartbeat_s=20.0)
    setup.announcer.start()
    setup.write(blocks := keys("a", 3))
    await setup.until_known(blocks)
    await eventually(lambda: setup.announcer._state is AnnouncerState.STREAMING)
    await listener.close()
    setup.write(keys("b", 1))
    async with asyncio.timeout(5):
        await setup.announcer.flushed()
    assert not setup.announcer.registered

    # Nobody asks in vain meanwhile, and nothing is sent anew but what was not applied.
    asked.clear()
    await network.serve(listener.address, handle)
    await setup.until_known([*blocks, *keys("b", 1)])
    assert asked == [wire.TYPES[wire.Announce]]
    await setup.announcer.close()
    network.close()


async def test_a_master_says_that_its_misses_are_partial_until_it_has_all_inventories(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of servers that it can know of; then a server that sends it anew is no reason."""
    setup = Setup()
    master, find = setup.master, wire.encode(wire.Find("one", 1, 32, key("never"), True))
    passed = 0.0
    monkeypatch.setattr(master, "uptime_s", lambda now: passed)

    async def is_partial() -> bool:
        await master._tick()
        return wire.decode_answer(wire.FindReply, *master.handle(*find)).partial

    assert await is_partial()
    identity = ("s", 1, bytes(16))
    register = wire.Register(*identity, "host", ["x://s"], ["dram"], 1 << 20, 0, False, 1000)
    master.handle(*wire.encode(register))
    master.handle(*wire.encode(wire.Inventory(*identity, 1, 0, False, [])))
    passed = 2 * master._config.timeout_s
    assert await is_partial()
    master.handle(*wire.encode(wire.Inventory(*identity, 1, 1, True, [])))
    assert not await is_partial()
    master.handle(*wire.encode(wire.Inventory(*identity, 2, 0, False, [])))
    assert not await is_partial()


async def test_late_answers_are_no_gap() -> None:
    """Neither lost answers nor lost requests, for many heartbeats, cost an inventory."""
    chain = keys("c", 60)
    async with running(chain[:20]) as setup:
        inventories = setup.link.sent["Inventory"]
        for count, lost in ((40, "answers"), (60, "requests")):
            setup.link.lost = lost
            setup.write(chain[count - 20 : count])
            async with asyncio.timeout(5):
                await setup.announcer.flushed()  # nobody waits for a master that is late
            await asyncio.sleep(8 * HEARTBEAT_S)
            assert not setup.announcer.registered
            setup.link.lost = ""
            await setup.until_known(chain[:count])
        assert setup.link.sent["Inventory"] == inventories
        assert len(setup.master.directory) == 60
        check_invariants(setup.master.directory)


async def test_pieces_are_sent_side_by_side_and_again_when_answers_are_late() -> None:
    chain = keys("c", 12_000)
    setup = Setup()
    setup.write(chain)
    setup.link.lost = "answers"
    setup.announcer.start()
    await asyncio.sleep(3 * HEARTBEAT_S)
    setup.link.lost = ""
    await setup.until_known(chain)
    assert setup.link.most_in_flight == module._PIECES_IN_FLIGHT
    await eventually(lambda: setup.announcer.registered)
    assert setup.master.directory.servers.records["s"].inventories.earlier == []
    check_invariants(setup.master.directory)
    await setup.announcer.close()


async def test_pieces_are_no_larger_than_a_message_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the index may have more blocks than one piece."""
    sizes: list[int] = []
    monkeypatch.setattr(outbox, "_PIECE_BLOCKS", 100)
    setup, chain = Setup(), keys("c", 1_050)

    def watch(type: int, body: bytes) -> None:
        if type == wire.TYPES[wire.Inventory]:
            changes = wire.decode(wire.Inventory, type, body).changes
            sizes.append(sum(len(one.digests) // one.digest_size for one in changes))

    setup.link.watch = watch
    setup.write(chain)
    setup.announcer.start()
    await setup.until_known(chain)
    await eventually(lambda: setup.announcer.registered)
    assert sum(sizes) >= 1_050
    assert max(sizes) <= 100
    check_invariants(setup.master.directory)
    await setup.announcer.close()


async def test_long_names_of_namespaces_make_no_message_too_large() -> None:
    """A tenant chooses them: with 600, no master would know this server or its changes any more."""
    setup = Setup()
    names = [f"{number:04}".ljust(512, "\N{BANKNOTE WITH DOLLAR SIGN}") for number in range(600)]
    sizes: list[int] = []
    setup.link.watch = lambda type, body: sizes.append(len(body))

    def write(digest: bytes) -> None:
        for name in names:
            request = ReserveRequest(Namespace(name), 0, [digest], [ROOT], [64])
            (answer,) = setup.store.reserve(1, request, 0.0)
            setup.store.seal(1, answer.id, 0, 0.0)
        setup.announcer.enqueue(setup.store.change_log.take(), setup.store.fingerprint)

    write(key("gone"))
    for name in names:  # an inventory says why
        setup.store.remove(Namespace(name), [key("gone")])
    write(key("before"))
    setup.announcer.start()
    await eventually(lambda: setup.announcer.registered and len(setup.master.directory) == 600)
    write(key("after"))
    await asyncio.wait_for(setup.announcer.flushed(), 5)
    assert len(setup.master.directory) == 1200
    assert max(sizes) <= BODY_SIZE_MAX
    assert setup.link.sent["Register"] == 1
    for name in names:
        setup.read(Namespace(name), keys("nobody has these", 1))
    await asyncio.sleep(0)
    await eventually(lambda: not setup.link.in_flight)
    assert max(sizes) <= BODY_SIZE_MAX
    check_invariants(setup.master.directory)
    await setup.announcer.close()


@pytest.mark.parametrize(("heartbeat_s", "least", "most"), [(60.0, 0, 1), (0.0, 10, 30)])
async def test_heartbeats_go_on_between_the_pieces_of_an_inventory(
    monkeypatch: pytest.MonkeyPatch, heartbeat_s: float, least: int, most: int
) -> None:
    """Those that are due, and no others: a server with a large inventory is not lost."""
    monkeypatch.setattr(outbox, "_PIECE_BLOCKS", 50)
    monkeypatch.setattr("tests.server.test_announcer.HEARTBEAT_S", heartbeat_s)
    chain, setup, sent = keys("c", 1000), Setup(), [0]

    def watch(type: int, body: bytes) -> None:
        if type == wire.TYPES[wire.Inventory]:
            sent.append(setup.link.sent["Heartbeat"])

    setup.link.watch = watch
    setup.write(chain)
    setup.announcer.start()
    await setup.until_known(chain)
    assert len(sent) > 20
    assert least <= sent[-1] <= most
    await setup.announcer.close()


async def test_a_heartbeat_that_somebody_waits_for_is_sent_at_once() -> None:
    setup = Setup(heartbeat_s=60.0)
    setup.announcer.start()
    async with asyncio.timeout(10):
        for _ in range(2):
            await setup.announcer.heartbeat_soon()
            await asyncio.sleep(0.05)  # nothing is left to do before the next one is due
    await setup.announcer.close()


async def test_blocks_that_come_and_go_during_an_inventory_are_right_in_the_end() -> None:
    """Pieces are made from the index as it is then; changes follow the last piece."""
    chain, later = keys("c", 8_000), keys("later", 3_000)
    setup = Setup()
    setup.write(chain)
    setup.announcer.start()
    for _ in range(1000):
        await asyncio.sleep(0)
        if len(setup.master.directory):
            break
    setup.write(later)
    setup.store.remove(ONE, chain[::2])
    setup.announcer.enqueue(setup.store.change_log.take(), setup.store.fingerprint)
    assert len(setup.master.directory) < 8_000, "the inventory is under way"
    await setup.until_known(chain[1::2] + later)
    await eventually(lambda: len(setup.master.directory) == 7_000)
    check_invariants(setup.master.directory)
    await setup.announcer.close()


async def test_blocks_for_which_a_map_has_no_room_are_sent_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with each heartbeat: the map is as full then, and an inventory is long."""
    monkeypatch.setattr(module, "_RELIST_AFTER_S", 50 * HEARTBEAT_S)
    async with running(keys("first", 1)) as setup:
        directory = setup.master.directory
        directory.blocks_max = 4
        setup.write(keys("many", 5))
        await eventually(lambda: setup.announcer.map.unlisted == 2)
        listed_at, sent = asyncio.get_running_loop().time(), setup.link.sent["Inventory"]
        setup.write(keys("more", 1))
        await eventually(lambda: setup.announcer.map.unlisted == 3)
        lines = [one for one in caplog.messages if one.startswith("a master does not list")]
        assert len(lines) == 1
        for number in range(20):  # nothing of what is acknowledged is kept meanwhile
            setup.write(keys(f"more {number}", 1))
            await asyncio.sleep(HEARTBEAT_S / 10)
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert setup.link.sent["Inventory"] == sent
        assert len(setup.announcer.outbox._marks) <= 4
        directory.blocks_max = 100
        await eventually(lambda: setup.link.sent["Inventory"] > sent)
        assert asyncio.get_running_loop().time() - listed_at > 45 * HEARTBEAT_S
        await eventually(lambda: len(directory) == 27)
        assert setup.announcer.map.unlisted == 0


async def test_a_map_that_stays_wrong_is_sent_again_with_growing_delays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(keys("block", 3)) as setup:
        before = setup.link.sent["Inventory"]
        monkeypatch.setattr(Inventories, "differs", lambda *heartbeat: True)
        # After 0, 1 and 2 heartbeats more or less: the unit of the first delay is a heartbeat.
        await eventually(lambda: setup.link.sent["Inventory"] >= before + 3, within_s=5)
        await eventually(lambda: setup.announcer.map.differences >= 30, within_s=20)
        sent = setup.link.sent["Inventory"] - before
        assert sent < setup.announcer.map.differences / 2, (
            "an inventory for each heartbeat is a storm"
        )
        monkeypatch.undo()
        await setup.until_known(keys("block", 3))


class LateMaster:
    """The announcer to a master that does not answer; or has said whether blocks are here alone."""

    def __init__(self, alone: bool | None = None, *, registered: bool = True) -> None:
        self.alone, self.registered = alone, registered

    def flushed(self) -> asyncio.Future[bool]:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.alone is not None:
            future.set_result(self.alone)
        return future


@pytest.mark.parametrize(
    ("masters", "alone"),
    [
        ([LateMaster(True), LateMaster(True)], True),
        ([LateMaster(True), LateMaster(False)], False),
        ([LateMaster(True), LateMaster()], False),
        ([LateMaster(True), LateMaster(registered=False)], False),
    ],
)
async def test_blocks_are_on_one_server_alone_if_all_masters_say_so(
    masters: list[LateMaster], alone: bool
) -> None:
    """Two masters may not have heard of the same servers."""
    context = ServerContext.__new__(ServerContext)
    context.announcers = cast(Any, masters)
    told = await context.wait_until_announced(asyncio.get_running_loop().time() + 0.05)
    assert (told is Visibility.ALONE) is alone


@pytest.mark.parametrize("left_s", [-5.0, 0.0, 0.1])
async def test_a_call_waits_for_masters_until_its_deadline_and_no_longer(left_s: float) -> None:
    context = ServerContext.__new__(ServerContext)
    context.announcers = [cast(Any, LateMaster())]
    now = asyncio.get_running_loop().time
    began = now()
    assert not await context.wait_until_announced(began + left_s)
    assert left_s - 0.01 <= now() - began < max(0.0, left_s) + 0.7
    context.announcers = []
    assert await context.wait_until_announced(now() - 1)


async def test_a_server_that_starts_waits_for_a_master_to_know_it(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,) = pool_dev.servers
    await server.wait_until_registered(0.0)
    monkeypatch.setattr(BlockServer, "registered", False)
    with pytest.raises(Unavailable, match="no master has answered yet"):
        await server.wait_until_registered(asyncio.get_running_loop().time() + 0.1)
    server._context.announcers[0].master.problem = Unavailable("its answer")
    with pytest.raises(Unavailable, match="its answer"):
        await server.wait_until_registered(0.0)


async def test_the_loser_of_an_id_says_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    """A master says how many seconds ago it heard the winner: no other reason each time."""
    setup, seconds = Setup(), itertools.count(0.0, 0.1)
    setup.master.servers._now = lambda: next(seconds)  # type: ignore[method-assign]
    token = b"o" * 16
    setup.master.handle(*wire.encode(wire.Register("s", 7, token, "host", [], ["dram"], 1 << 20)))

    def said() -> list[str]:
        return [one for one in caplog.messages if "cannot be told" in one]

    setup.announcer.start()
    try:
        await eventually(lambda: setup.link.sent["Register"] >= 8)
        assert len(said()) == 1
        heard = wire.encode(wire.Heartbeat("s", 7, token, ServerStats()))
        await eventually(lambda: setup.master.handle(*heard) and len(said()) == 2)
        assert "belongs to another living server" in said()[-1]
        tried = setup.link.sent["Register"]
        await eventually(
            lambda: setup.master.handle(*heard) and setup.link.sent["Register"] > tried + 3
        )
        assert len(said()) == 2
    finally:
        await setup.announcer.close()
