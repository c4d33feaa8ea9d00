"""What follows a master's map: it is right about all of it, or knows that it must begin anew."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvpool.client import pool_events
from kvpool.client.pool_events import EventPosition, EventReader, PoolEvent, PoolEventKind
from kvpool.config import MasterConfig
from kvpool.errors import MasterLost
from kvpool.master.service import Master
from kvpool.master.state.block_map import MARK_BITS
from kvpool.master.state.change_ring import CHANGES_MAX, ChangeRing, blocks_of
from kvpool.master.state.changes import ChangeKind, LoggedChange
from kvpool.master.state.directory import Directory
from kvpool.master.state.server_record import Registration
from kvpool.master.state.snapshot import MapCursor, snapshot
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace, ReadStatus, ServerStats
from kvpool.wire import messages as wire
from tests.support.sweeping import sweep_all

NAMESPACES = [Namespace("a", 1), Namespace("a", 2), Namespace("b", 1)]
TIERS = ("dram", "nvme")


def digest(number: int, size: int = 16) -> bytes:
    return number.to_bytes(size, "big")


class Fleet:
    """Servers that do what servers do, and what the map must be about them."""

    def __init__(self, seed: int, changes_max: int = CHANGES_MAX) -> None:
        self.directory = Directory()
        self.directory.servers.changes = self.log = ChangeRing(changes_max)
        self.master = Master(
            MasterConfig(), cast(Any, None), directory=self.directory, rng=random.Random(seed)
        )
        self.sweeper = self.master.sweeper
        self.random = random.Random(seed)
        self.epochs: dict[str, int] = {}
        self.numbers: dict[str, int] = {}

    def act(self) -> None:
        server = f"s{self.random.randrange(4)}"
        do = self.random.choice(["store", "store", "store", "remove", "restart", "leave", "beat"])
        if server not in self.epochs or do == "restart":
            self.register(server)
        elif do == "store":
            self.store(server)
        elif do == "remove":
            self.directory.removed(
                server, *self.some(), self.digests(), self.random.choice(list(ReadStatus)[1:])
            )
        elif do == "leave":
            self.directory.servers.leave(server, self.epochs[server])
        else:
            self.directory.servers.heartbeat(server, self.epochs[server], ServerStats(), 0.0)
        if self.random.random() < 0.2:
            self.inventory(server)
        if self.random.random() < 0.5:
            self.sweeper.step(8)

    def register(self, server: str) -> None:
        self.epochs[server] = self.random.getrandbits(32)
        self.numbers[server] = 0
        problem = self.directory.servers.register(
            server, Registration(self.epochs[server], "here", ("tcp://h:1",), TIERS, 1 << 30), 0.0
        )
        assert problem is None

    def store(self, server: str) -> None:
        namespace, part = self.some()
        tier = self.random.randrange(len(TIERS))
        self.directory.stored(server, namespace, part, tier, self.digests())

    def inventory(self, server: str) -> None:
        """It lists a few blocks only: the others it has no more."""
        number = self.directory.servers.records[server].inventories.sequence + 1
        self.directory.servers.check_piece(server, self.epochs[server], number, 0)
        self.store(server)
        self.directory.servers.check_piece(server, self.epochs[server], number, 1, last=True)
        self.directory.servers.end_inventory(server)

    def some(self) -> tuple[Namespace, int]:
        namespace = self.random.choice(NAMESPACES)
        return namespace, self.random.randrange(namespace.parts)

    def digests(self) -> list[bytes]:
        size = self.random.choice([16, 32])
        return [digest(self.random.randrange(3000), size) for _ in range(self.random.randrange(40))]

    def rest(self) -> None:
        sweep_all(self.directory)

    def truth(self) -> dict[tuple[str, Namespace, int, bytes], str]:
        """The tier of each part of a block at each server, of what the map has."""
        found = {}
        for namespace, blocks in self.directory.blocks.items():
            for one, tag in blocks.items():
                for where in self.directory.locations.by_id[tag >> MARK_BITS].locations:
                    if not where.inventory.retired:
                        name = (where.inventory.server, namespace, where.part, one)
                        found[name] = TIERS[where.tier]
        return found

    def alive(self) -> dict[str, bool]:
        return {one.server: one.alive for one in self.directory.servers.members(0.0)}


class View:
    """What a reader of the events believes."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, Namespace, int, bytes], str] = {}
        self.servers: dict[str, bool] = {}
        self.resets = 0
        self.live = False
        self.at = -1

    def apply(self, event: PoolEvent) -> None:
        kind, server = event.kind, event.server
        self.at = event.position.number
        self.live = self.live or kind is PoolEventKind.LIVE
        if kind is PoolEventKind.RESET:
            self.held.clear()
            self.servers.clear()
            self.resets += 1
        elif kind is PoolEventKind.CLEARED:
            self.held = {name: tier for name, tier in self.held.items() if name[0] != server}
        elif kind in (PoolEventKind.LOST, PoolEventKind.LEFT, PoolEventKind.BACK):
            self.servers[server] = kind is PoolEventKind.BACK
        elif event.namespace is not None:
            for one in event.digests:
                name = (server, event.namespace, event.part, one)
                if kind is PoolEventKind.STORED:
                    self.held[name] = event.tier
                else:
                    self.held.pop(name, None)


class Asked:
    """A master that is asked directly; `before` runs before each answer."""

    def __init__(self, fleet: Fleet, before: Callable[[], None] = lambda: None) -> None:
        self.fleet = fleet
        self.before = before
        self.questions = 0

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        self.questions += 1
        self.before()
        return wire.decode_answer(answer, *self.fleet.master.handle(*wire.encode(message)))


def reader(asked: Asked, at: EventPosition | None = None) -> EventReader:
    return EventReader(asked, lambda: 0.0, at)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_S", "_RETRY_S", "_RETRY_S_MAX"):
        monkeypatch.setattr(pool_events, name, 0.0001)


@pytest.mark.parametrize("number", range(12))
async def test_a_reader_is_right_about_a_map_that_never_rests(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a snapshot are of different moments, and everything changes in between."""
    monkeypatch.setattr("kvpool.master.follower_requests._SNAPSHOT_BLOCKS", 64)
    monkeypatch.setattr("kvpool.master.follower_requests._CHANGES_BLOCKS", 50)
    fleet = Fleet(number)
    for _ in range(150):
        fleet.act()
    left = 200

    def act() -> None:
        nonlocal left
        if left:
            left -= 1
            fleet.act()
        else:
            fleet.rest()

    view = View()

    async def follow() -> None:
        async for event in reader(Asked(fleet, act)):
            view.apply(event)
            await asyncio.sleep(0)

    following = asyncio.create_task(follow())

    def settled() -> bool:
        fleet.rest()
        return not left and view.live and view.at == fleet.log.last

    async with asyncio.timeout(20):
        while not settled():  # noqa: ASYNC110 - nothing else would tell
            await asyncio.sleep(0.001)
    following.cancel()
    assert view.held == fleet.truth()
    assert view.servers == fleet.alive()
    assert view.resets == 1
    check_invariants(fleet.directory)


async def until_live(asked: Asked, view: View) -> EventPosition:
    async for event in reader(asked):
        view.apply(event)
        if event.kind is PoolEventKind.LIVE:
            return event.position
    raise AssertionError


async def test_a_reader_goes_on_where_it_was() -> None:
    fleet = Fleet(1)
    for _ in range(100):
        fleet.act()
    asked, view = Asked(fleet), View()
    at = await until_live(asked, view)
    for _ in range(100):
        fleet.act()
    fleet.rest()
    async for event in reader(asked, at):
        view.apply(event)
        if event.position.number == fleet.log.last:
            break
    assert view.held == fleet.truth()
    assert view.resets == 1


@pytest.mark.parametrize("wrong", ["another master's", "the future", "before the buffer"])
async def test_a_position_that_is_not_known_is_a_reset(wrong: str) -> None:
    fleet = Fleet(2)
    for _ in range(100):
        fleet.act()
    asked, view = Asked(fleet), View()
    at = await until_live(asked, view)
    if wrong == "another master's":
        at = EventPosition(at.stream ^ 1, at.number)
    elif wrong == "the future":
        at = EventPosition(at.stream, at.number + 10**6)
    else:
        fleet.log._kept.clear()
        at = EventPosition(at.stream, at.number - 1)
    async for event in reader(asked, at):
        assert event.kind is PoolEventKind.RESET
        break


async def test_a_snapshot_that_is_overtaken_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is shorter than what happens between two questions: nothing wrong is believed."""
    monkeypatch.setattr("kvpool.master.follower_requests._SNAPSHOT_BLOCKS", 16)
    fleet = Fleet(3, changes_max=2)
    for _ in range(50):
        fleet.act()
    busy = 40

    def act() -> None:
        nonlocal busy
        if busy:
            busy -= 1
            for _ in range(5):
                fleet.act()

    view = View()
    await until_live(Asked(fleet, act), view)
    assert view.resets > 1
    assert busy == 0
    # What is retired and not swept yet is still on its way to the reader.
    assert view.held.items() >= fleet.truth().items()


async def test_a_reader_waits_while_no_master_answers() -> None:
    fleet = Fleet(4)
    fleet.act()
    refused = 3

    def refuse() -> None:
        nonlocal refused
        if refused:
            refused -= 1
            raise MasterLost("nobody")

    view = View()
    async with asyncio.timeout(5):
        await until_live(Asked(fleet, refuse), view)
    assert view.servers


def test_the_log_is_bounded_in_changes_and_blocks() -> None:
    log = ChangeRing(changes_max=10, blocks_max=100)
    for number in range(50):
        log.add_blocks(ChangeKind.STORED, "s", NAMESPACES[0], 0, [digest(number)] * 3)
    assert (len(log), log.blocks, log.last) == (10, 30, 50)
    log.add_blocks(ChangeKind.STORED, "s", NAMESPACES[0], 0, [digest(1)] * 90)
    assert (log.blocks, log.last) == (99, 51)
    log.add_blocks(ChangeKind.STORED, "s", NAMESPACES[0], 0, [digest(1)] * 101)
    assert (len(log), log.blocks, log.last) == (0, 0, 52), "a reader sees the gap"
    assert log.since(51, 10) is None
    assert log.since(52, 10) == ([], 52)
    assert log.since(53, 10) is None


def test_the_log_gives_its_changes_in_order_and_in_parts() -> None:
    log = ChangeRing(changes_max=4)
    for number in range(6):
        log.add(LoggedChange(ChangeKind.BACK, f"s{number + 1}"))
    assert log.since(1, 10) is None
    changes, last = log.since(2, 10) or ([], 0)
    assert ([one.server for one in changes], last) == (["s3", "s4", "s5", "s6"], 6)
    changes, last = log.since(3, 2) or ([], 0)
    assert ([one.server for one in changes], last) == (["s4", "s5"], 5)
    log.add_blocks(ChangeKind.STORED, "s", NAMESPACES[0], 0, [digest(1), digest(2, 32)])
    sizes = [(one.digest_size, blocks_of(one)) for one in (log.since(6, 10) or ([], 0))[0]]
    assert sorted(sizes) == [(16, 1), (32, 1)]


def test_a_snapshot_comes_in_small_parts_and_has_every_block() -> None:
    fleet = Fleet(5)
    fleet.register("s0")
    for first in range(0, 100_000, 1000):
        fleet.directory.stored(
            "s0", NAMESPACES[0], 0, 0, [digest(n, 32) for n in range(first, first + 1000)]
        )
    cursor: MapCursor | None = MapCursor()
    seen: set[bytes] = set()
    while cursor is not None:
        changes, cursor = snapshot(fleet.directory, cursor, 1024)
        assert sum(map(blocks_of, changes)) < 1024 + 1300
        for one in changes:
            seen.update(wire.unpack_digests(one.digests, 32))
    assert len(seen) == 100_000


def test_a_snapshot_leaves_out_what_a_server_has_lost_already() -> None:
    """Its CLEARED has gone out before: nothing would take such blocks back from the reader."""
    fleet = Fleet(6)
    fleet.register("s0")
    fleet.directory.stored("s0", NAMESPACES[0], 0, 0, [digest(1), digest(2)])
    fleet.register("s0")  # restarted, and not swept yet
    assert len(fleet.directory) == 2
    assert snapshot(fleet.directory, MapCursor(), 1024) == ([], None)


def test_a_block_that_moves_to_another_tier_is_stored_there() -> None:
    fleet = Fleet(7)
    fleet.register("s0")
    fleet.directory.stored("s0", NAMESPACES[0], 0, 0, [digest(1)])
    before = fleet.log.last
    fleet.directory.stored("s0", NAMESPACES[0], 0, 0, [digest(1)])
    assert fleet.log.last == before, "nothing has changed"
    fleet.directory.stored("s0", NAMESPACES[0], 0, 1, [digest(1)])
    (moved,), _ = fleet.log.since(before, 10) or ([], 0)
    assert (moved.kind, moved.tier, moved.digests) == (ChangeKind.STORED, "nvme", digest(1))
