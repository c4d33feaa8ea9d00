"""An object store that all servers share as their cold tier, and what must hold of it.

In these worlds servers have memory and this tier, and nothing moves between servers but by it. The
oracles of the memory see what comes up; here is what they cannot see: what lies in the store, who
answers for it, and that what was removed does not come back from it (design: cold).
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvpool.errors import InvariantViolated, Unavailable
from kvpool.protocols.cold_tier import ColdSettings, Gone, Listed, ReadInto
from kvpool.protocols.persistent_tier import Record
from kvpool.server.cold import ColdRing
from kvpool.server.cold.state.book import OBJECTS
from kvpool.server.cold.state.format import TAIL, ColdBlock, ObjectKeys, parse_index, parse_tail
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import Event
from kvpool.server.state.tier_stores import SPAN, ColdExtents, ColdStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace, ReadStatus
from tests.simulation.blocks import values
from tests.simulation.truth import BlockPart, GroundTruth

if TYPE_CHECKING:
    from kvpool.server.block_server import BlockServer
    from tests.simulation.oracles import WatchedStore
    from tests.simulation.plan import WorldPlan
    from tests.simulation.world import World

#: Further kinds of fault in these worlds.
FAULTS_OF_COLD: Final = ("store fails", "store forgets")
#: No secret: what anybody can derive.
_KEYS: Final = ObjectKeys(b"")
#: A request and its answer take at most so long.
_ASKED_S: Final = 0.2
_ANSWERED_S: Final = 0.02
#: Reasons for which a block may be found again in the same object.
_MAY_COME_BACK: Final = (ReadStatus.EVICTED, ReadStatus.TIER_LOST)

T = TypeVar("T")

#: A block in an object: the name of that, and where it begins.
Place = tuple[str, int]


class Shelf:
    """The store: bytes and times by name. It outlives all servers; its clock is the true one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, tuple[bytes, float]] = {}
        #: Where each block lies in them: in several objects, if it was written again.
        self.places: defaultdict[BlockPart, set[Place]] = defaultdict(set)
        self.rng = world.rng["shelf"]
        #: The part of the requests that fail, each before or after it has done its work.
        self.failing = 0.0
        #: Of each server: when a request of it failed last, and when it looked for objects last.
        self.refused_at: dict[str, float] = {}
        self.searched_at: dict[str, float] = {}
        #: Who has deleted an object: a server, or somebody else ("").
        self.deleted_by: dict[str, str] = {}
        #: A client was told that they are removed, then.
        self.promised: dict[Place, float] = {}

    @staticmethod
    def slow_s(blocks: int) -> float:
        """Seconds for so many blocks one by one: memory may have room for no more at a time."""
        return blocks * (_ASKED_S + _ANSWERED_S)

    def blocks_of(self, name: str) -> list[ColdBlock]:
        data, _ = self.objects[name]
        tail = parse_tail(data[-TAIL.size :], len(data))
        return parse_index(name, tail, data[tail.start : tail.start + tail.size], _KEYS)

    def erased(
        self, servers: Collection[str], namespace: Namespace, digest: bytes, began: float
    ) -> None:
        """A client has removed a block, and this server alone had it: it must not come back.

        Unless the store could not be told in time, or the server was stopped meanwhile.
        """
        for node in self.world.servers:
            oracle = node.cold
            if node.name not in servers or not node.process.alive or oracle is None:
                continue
            failed = self.refused_at.get(node.name, -1.0) >= began
            if failed or oracle.ring._bucket.problem or node.process.frozen_s:
                continue
            for part in range(namespace.parts):
                for when, place in oracle.removed[namespace, digest, part]:
                    if when >= began:
                        self.promised.setdefault(place, self.world.loop.now)

    async def fail(self) -> None:
        """For a while, some or all requests fail."""
        with self.world.incident("store fails", settle_s=20.0):
            self.failing = self.rng.choice([0.3, 1.0])
            await asyncio.sleep(self.rng.choice([0.5, 4, 12]))
            self.failing = 0.0

    async def forget(self) -> None:
        """Somebody deletes an object."""
        names = [name for name in self.objects if name.startswith(OBJECTS)]
        if names:
            name = self.rng.choice(names)
            with self.world.incident("store forgets"):
                self.deleted_by[name] = ""
                del self.objects[name]

    def first_problem(self) -> str | None:
        """What is not as it must be some time after the last fault; None when all is."""
        oracles = [node.cold for node in self.world.servers if node.cold is not None]
        for oracle in oracles:
            if (problem := oracle.first_problem()) is not None:
                return problem
        for name in self.objects:
            if name.startswith(OBJECTS):
                having = [one for one in oracles if name in one.ring._index.book.by_name]
                if len(having) > 1 or (not having and not self.world.plan.cold_is_small):
                    return f"{len(having)} servers answer for {name}"
        return None


class ShelfObjects:
    """The store as one process of a server reaches it."""

    def __init__(self, shelf: Shelf, server: str) -> None:
        self._shelf = shelf
        self._server = server

    async def put(self, name: str, data: bytes | memoryview) -> None:
        def put() -> None:
            self._shelf.objects[name] = bytes(data), self._shelf.world.loop.now
            for block in self._shelf.blocks_of(name) if name.startswith(OBJECTS) else ():
                key = block.namespace, block.digest, block.part
                self._shelf.places[key].add((name, block.position))

        await self._ask(put)

    async def get(self, name: str, start: int, size: int) -> bytes:
        def get() -> bytes:
            if name not in self._shelf.objects:
                raise Gone("there is no such object")
            return self._shelf.objects[name][0][start : start + size]

        return await self._ask(get)

    async def listing(self, prefix: str) -> list[Listed]:
        return await self._ask(
            lambda: [
                Listed(name, len(data), at)
                for name, (data, at) in self._shelf.objects.items()
                if name.startswith(prefix)
            ]
        )

    async def folders(self, prefix: str) -> list[str]:
        self._shelf.searched_at[self._server] = self._shelf.world.loop.now
        listed = await self.listing(prefix)
        return sorted({one.name.removeprefix(prefix).split("/")[0] for one in listed})

    async def delete(self, name: str) -> None:
        def delete() -> None:
            if self._shelf.objects.pop(name, None) is not None:
                self._shelf.deleted_by[name] = self._server

        await self._ask(delete)

    async def _ask(self, act: Callable[[], T]) -> T:
        """The request, its work, and the answer: each may be lost."""
        rng = self._shelf.rng
        await asyncio.sleep(rng.choice([0.001, 0.001, 0.02, _ASKED_S]))
        await self._perhaps_fail()
        answer = act()
        await asyncio.sleep(rng.choice([0.001, _ANSWERED_S]))
        await self._perhaps_fail()
        return answer

    async def _perhaps_fail(self) -> None:
        shelf = self._shelf
        if shelf.rng.random() < shelf.failing:
            shelf.refused_at[self._server] = shelf.world.loop.now
            if shelf.rng.random() < 0.2:
                await asyncio.sleep(3600)
            raise Unavailable("503")


class SimCold:
    """The tier of one process of a server."""

    name = "shelf"
    survives_restart = True
    is_cold = True
    status_text = ""

    def __init__(self, shelf: Shelf, server: str, plan: WorldPlan) -> None:
        self.capacity = 2 * plan.capacity if plan.cold_is_small else 1 << 30
        self.alignment = plan.alignment
        rng = random.Random(f"{plan.seed}/cold settings")
        self.cold_settings = ColdSettings(
            object_size=rng.choice([500, 3_000, 1 << 20]),
            wait_s=rng.choice([0.05, 1.0]),
            requests=0,
            beat_s=rng.choice([0.3, 1.0]),
        )
        self._objects = ShelfObjects(shelf, server)
        self._read_into: ReadInto

    def objects(self, prefix: str) -> ShelfObjects:
        return self._objects

    def begin(self, read_into: ReadInto, status_text: Callable[[], str]) -> None:
        self._read_into = read_into

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        await self._read_into(offset, buffer)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class WatchedColdExtents(ColdExtents):
    """The real departures, each of them checked."""

    oracle: ColdOracle

    def remove(self, entry: Entry, event: Event, reason: ReadStatus, *, free: bool = True) -> None:
        if reason not in _MAY_COME_BACK:
            self.oracle.is_removed(entry)
        log: Any = self.index.change_log
        before, log.true_reason = log.true_reason, reason
        super().remove(entry, event, reason, free=free)
        log.true_reason = before


class WatchedColdStore(ColdStore):
    """The index of the cold tier of one process, compared with what is in the store."""

    extents: WatchedColdExtents
    extents_type = WatchedColdExtents

    def __init__(self, life: str, capacity: int, alignment: int, truth: GroundTruth) -> None:
        super().__init__(capacity, alignment)
        self._life = life
        self._truth = truth

    def add(self, record: Record, born: int) -> Entry | None:
        entry = super().add(record, born)
        if entry is not None:
            key = record.namespace, record.digest, record.part
            self.extents.oracle.comes(entry)
            if key not in self._truth.held_by(self._life):
                self._truth.sealed(self._life, key)
                self._truth.probes.add("a block was found in the object store")
        return entry


class ColdOracle:
    """Checks both tiers of one server process together, and what it takes from the store."""

    def __init__(
        self, server: BlockServer, top: WatchedStore, cold: WatchedColdStore, shelf: Shelf
    ) -> None:
        (self.ring,) = (one for one in server.extensions.all if isinstance(one, ColdRing))
        self._server = server
        self._top = top
        self._cold = cold
        self._shelf = shelf
        self._world = shelf.world
        self._due = False
        #: When a block was removed here, and where it lay in the store or on its way there.
        self.removed: defaultdict[BlockPart, list[tuple[float, Place]]] = defaultdict(list)
        cold.extents.oracle = self
        top.inspect = self.inspect
        server.extensions.on_removed.append(self._removed_on_its_way)

    def inspect(self) -> None:
        """Check both stores as soon as both are consistent."""
        if not self._due:
            self._due = True
            self._world.loop.after_this(self.check)

    def check(self) -> None:
        """The stack's invariants, and that it has exactly the recorded blocks (G5)."""
        self._due = False
        truth = self._world.truth
        if not truth.is_living(self._top.life):
            return
        try:
            check_invariants(self._server.store)
        except InvariantViolated as error:
            truth.fail(f"G3/G4: tiers of {self._top.life}: {error}")
        here = {_key(entry) for one in (self._top, self._cold) for entry in one.index.inventory()}
        if wrong := here ^ truth.held_by(self._top.life):
            truth.fail(f"G5: {self._top.life}: {len(wrong)} blocks are here or recorded only")

    def comes(self, entry: Entry) -> None:
        """A block has entered the index: its bytes are right, and nobody has removed it (G8)."""
        truth, name, place = self._world.truth, *self._place(entry)
        data = self._shelf.objects.get(name)
        written = data[0][place : place + entry.size] if data is not None else None
        known = (None, *values(*_key(entry)))
        if written not in known and not truth.history(*_key(entry)).corrupted:
            truth.fail(f"G1: {entry!r} has wrong bytes in {name}")
        since = self._shelf.promised.get((name, place), float("inf"))
        own = any(where == (name, place) for _, where in self.removed[_key(entry)])
        # Who looked for objects before that may not have heard of it.
        if own or since < self._shelf.searched_at.get(self._server.server, 0.0):
            truth.fail(f"G8: {entry!r} was removed, but comes back from {name}")

    def is_removed(self, entry: Entry) -> None:
        """From every object that this server lists."""
        for place in self._shelf.places[_key(entry)]:
            if place[0] in self.ring._index.book.by_name:
                self.removed[_key(entry)].append((self._world.loop.now, place))

    def _removed_on_its_way(
        self, namespace: Namespace, digests: Sequence[bytes], part: int | None
    ) -> None:
        for draft in self.ring._writer.drafts.values():
            for digest in digests:
                for which, place in draft.places.get((namespace, digest), {}).items():
                    if part in (None, which):
                        where = self._world.loop.now, (draft.name, place)
                        self.removed[namespace, digest, which].append(where)

    def first_problem(self) -> str | None:
        """What is not finished some time after the last fault; None when all is."""
        ring, name = self.ring, self._server.server
        if ring._writer.waiting.size or ring._writer.drafts:
            return f"{name}: blocks wait to be written to the object store"
        book = ring._index.book
        for object_name, place in {where for many in self.removed.values() for _, where in many}:
            known = book.by_name.get(object_name)
            if known is not None and place not in known.removed:
                return f"{name}: what was removed at {place} of {object_name} would come back"
        for one in book.by_name.values():
            if one.name in book.lost:
                return f"{name}: blocks of {one.name} were left out, and are not found again"
            if one.name not in self._shelf.objects:
                if self._shelf.deleted_by[one.name] == name:
                    return f"{name} lists {one.name}, which it has deleted"
                continue  # somebody else has; the next reader finds it out
            for block in self._shelf.blocks_of(one.name):
                key = block.namespace, block.part, block.digest
                if block.position not in one.removed and self._cold.index.peek(*key) is None:
                    return f"{name}: {block.digest.hex()[:12]} of {one.name} is not listed"
        return None

    def _place(self, entry: Entry) -> Place:
        one = self.ring._index.book.at(entry.offset)
        assert one is not None
        return one.name, entry.offset % SPAN


def _key(entry: Entry) -> BlockPart:
    return entry.index.namespace, entry.digest, entry.index.part
