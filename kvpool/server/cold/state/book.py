"""What one server knows of the objects that it answers for, and which wait to be written. Pure.

Every object belongs to the server that has written it, by the id of that. While no such server
lives, one of the living answers for it: all find the same one, without asking (`responsible`). Two
servers that see the living differently for a moment both list a block, or neither does: it is there
twice, or a miss.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from kvpool.protocols.cold_tier import Listed
from kvpool.server.cold.state.format import Tail
from kvpool.server.eviction.lazy_heap import LazyHeap
from kvpool.server.state.tier_stores import SPAN
from kvpool.shares import Recent
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace, ReadStatus

#: Folders: the objects, what was removed of each, and one small object for each living server.
OBJECTS: Final = "blocks"
REMOVED: Final = "removed"
LIVING: Final = "servers"
#: Blocks that wait to be written, at most.
WAITING_MAX: Final = 65_536
#: Blocks that one object gets, and namespaces of them: so that its index, of which all is made in
#: one turn of the loop, is one that readers accept (`INDEX_MAX`), however long the names are.
BLOCKS_WRITTEN: Final = 2048
NAMESPACES_WRITTEN: Final = 256

Key = tuple[Namespace, int, bytes]


def folder(server: str) -> str:
    """The name of a server's folder: one step, whatever its id is."""
    return quote(server, safe="")


def server_of(folder: str) -> str:
    return unquote(folder)


def owner_of(name: str) -> str:
    """The server that has written this object."""
    return server_of(name.split("/")[1])


def removed_of(name: str) -> str:
    """The name of the object that says what was removed of this one."""
    return f"{REMOVED}/{name.partition('/')[2]}"


def object_of(removed: str) -> str:
    """The object of which this one says what was removed."""
    return f"{OBJECTS}/{removed.partition('/')[2]}"


def responsible(name: str, living: Collection[str]) -> str:
    """Which of the living servers answers for an object."""
    owner = owner_of(name)
    if owner in living:
        return owner

    def weight(server: str) -> bytes:
        return hashlib.blake2b(f"{name}\n{server}".encode(), digest_size=8).digest()

    return max(living, key=weight)


class Living(NamedTuple):
    """Who lives, and the time, both by the clock of the store: no other clock is looked at."""

    servers: frozenset[str]
    now: float

    @classmethod
    def of(cls, beats: Iterable[Listed], me: str, lost_s: float) -> Living:
        """`beats` are the objects of LIVING, mine is among them and has just been written."""
        last = {unquote(one.name.rpartition("/")[2]): one.written_at for one in beats}
        now = last.get(me, max(last.values(), default=0.0))
        alive = {server for server, at in last.items() if now - at < lost_s}
        return cls(frozenset({*alive, me}), now)


class ColdObject:
    """One object in the store."""

    __slots__ = "blocks", "gone", "leaves", "name", "number", "places", "removed", "size", "tail"

    def __init__(self, name: str, number: int, size: int, tail: Tail) -> None:
        self.name = name
        self.number = number
        self.size = size
        self.tail = tail
        #: Blocks of it that are in the index.
        self.blocks = 0
        #: Where its blocks begin.
        self.places = array("Q")
        #: The places of those that must not come back.
        self.removed: set[int] = set()
        #: Somebody has deleted it.
        self.gone = False
        #: Its blocks are leaving the index, step by step: none may enter it behind them.
        self.leaves = False

    def __repr__(self) -> str:
        return f"<ColdObject {self.name}, {self.blocks} blocks>"

    @property
    def start(self) -> int:
        """The address of its first byte."""
        return self.number * SPAN


class Book:
    """The objects of one server, at most so many bytes as it may use."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.size = 0
        #: Bytes of objects that are on their way to the store.
        self.coming = 0
        #: That which was read longest ago first.
        self.by_name: OrderedDict[str, ColdObject] = OrderedDict()
        #: How many objects each server has written. There may be too many to count them.
        self.written_by: Counter[str] = Counter()
        #: Names of those of which blocks were left out because they could not be read: to be found
        #: once more.
        self.lost: set[str] = set()
        self._by_number: dict[int, ColdObject] = {}
        self._numbers = 0
        #: Objects that may have to go, so that nobody has to look at all of them.
        self._doubtful: dict[int, ColdObject] = {}
        #: When each was written, with its number.
        self._ages: LazyHeap[tuple[float, int]] = LazyHeap(lambda age: age[1] in self._by_number)
        #: Objects of which something was removed that the store does not know yet.
        self.unsaved: dict[str, ColdObject] = {}

    def enter(self, name: str, size: int, written_at: float, tail: Tail) -> ColdObject:
        self._numbers += 1
        one = ColdObject(name, self._numbers, size, tail)
        self.by_name[name] = self._by_number[one.number] = one
        self._ages.push((written_at, one.number), len(self.by_name))
        self.written_by[owner_of(name)] += 1
        self.size += size
        return one

    def leave(self, one: ColdObject) -> None:
        """Idempotent."""
        if self.by_name.pop(one.name, None) is not None:
            del self._by_number[one.number]
            self._doubtful.pop(one.number, None)
            self.lost.discard(one.name)
            self._ages.tidy(len(self.by_name))
            self.unsaved.pop(one.name, None)
            self.written_by.subtract((owner_of(one.name),))
            self.size -= one.size

    def at(self, address: int) -> ColdObject | None:
        return self._by_number.get(address // SPAN)

    def read(self, one: ColdObject) -> None:
        """A reader has got a block of it; it may have left meanwhile."""
        if one.name in self.by_name:
            self.by_name.move_to_end(one.name)

    def left(self, address: int, reason: ReadStatus) -> None:
        """A block is not in the index any more."""
        one = self.at(address)
        if one is None:
            return
        one.blocks -= 1
        if reason is ReadStatus.TIER_LOST:
            self.lost.add(one.name)
        elif reason is not ReadStatus.EVICTED:
            self.remove(one, address % SPAN)
        self.look_at(one)

    def look_at(self, one: ColdObject) -> None:
        """It has changed, and may have to go."""
        if self._is_useless(one) and one.name in self.by_name:
            self._doubtful[one.number] = one

    def _is_useless(self, one: ColdObject) -> bool:
        return one.gone or not (one.blocks or one.name in self.lost)

    def remove(self, one: ColdObject, place: int) -> None:
        """What lies there must not come back."""
        one.removed.add(place)
        self.unsaved[one.name] = one

    def has_room(self, size: int = 0) -> bool:
        return self.size + self.coming + size <= self.size_max

    def next_to_go(self, written_before: float) -> ColdObject | None:
        """Gone, too old, without a block, or, where what is on its way has no room, that which was
        read longest ago."""
        while self._doubtful:
            number, one = self._doubtful.popitem()
            if self._is_useless(one):
                self._doubtful[number] = one  # until it has left
                return one
        while (age := self._ages.first()) is not None and age[0] < written_before:
            if (old := self._by_number.get(age[1])) is not None:
                return old
            self._ages.pop()
        if self.by_name and not self.has_room():
            return next(iter(self.by_name.values()))
        return None


class Waiting:
    """Blocks that have come to this server and are to be written, the oldest first. Where too many
    wait, the oldest of a tenant that has more than its part are left out.

    An object has blocks of one tenant: it is deleted with its last block, so nothing is left of a
    tenant that is removed, and nobody's reads keep what is another's.
    """

    def __init__(self) -> None:
        self._blocks: Recent[Key, tuple[str, int, float]] = Recent(WAITING_MAX)
        #: By tenant.
        self._sizes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def left_out(self) -> int:
        """Blocks that were left out because too many waited."""
        return self._blocks.dropped

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self._sizes.total()

    def add(self, key: Key, size: int, now: float) -> int:
        """Of its tenant so many bytes wait now; 0: it did so before."""
        tenant = tenant_of(key[0].name)
        if self._blocks.get(tenant, key) is not None:
            return 0
        dropped = self._blocks.put(tenant, key, (tenant, size, now))
        if dropped is not None:
            self._count(*dropped)
        self._sizes[tenant] += size
        return self._sizes[tenant]

    def due_in(self, size: int, wait_s: float, now: float) -> tuple[float, str] | None:
        """Seconds until an object of `size` bytes is to be written, and of which tenant; None:
        nothing waits."""
        oldest = self._blocks.oldest()
        if oldest is None:
            return None
        _, _, (tenant, _, since) = oldest
        seconds = max(0.0, since + wait_s - now)
        if seconds:
            most = max(self._sizes, key=self._sizes.__getitem__)
            if self._sizes[most] >= size:
                return 0.0, most
        return seconds, tenant

    def take(self, tenant: str, size: int) -> Sequence[Key]:
        """The oldest of one tenant, for one object of about `size` bytes."""
        taken: list[tuple[Key, tuple[str, int, float]]] = []
        left, spaces = size, set[Namespace]()
        for key, waits in self._blocks.of(tenant):
            if left <= 0 or len(taken) == BLOCKS_WRITTEN or len(spaces) == NAMESPACES_WRITTEN:
                break
            taken.append((key, waits))
            spaces.add(key[0])
            left -= waits[1]
        for key, waits in taken:
            self._blocks.pop(tenant, key)
            self._count(*waits)
        return [key for key, _ in taken]

    def _count(self, tenant: str, size: int, since: float) -> None:
        """It waits no longer."""
        self._sizes[tenant] -= size
        if not self._sizes[tenant]:
            del self._sizes[tenant]
