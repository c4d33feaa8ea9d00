"""Shows that a server lives, looks who else does, and finds what it answers for."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Final, TypeVar

from kvpool import logs
from kvpool.protocols.cold_tier import ColdSettings, Gone, Listed
from kvpool.server.cold.index import ColdIndex
from kvpool.server.cold.state import book as names
from kvpool.server.cold.state.book import ColdObject, Living, responsible
from kvpool.server.cold.state.format import (
    INDEX_MAX,
    TAIL,
    ColdBlock,
    Damaged,
    Tail,
    parse_index,
    parse_removed,
    parse_tail,
)
from kvpool.sorting import sorted_runs
from kvpool.threads import in_thread, wait_for_all

T = TypeVar("T")

log = logs.get("kvpool.cold")

#: Objects that one search names in the log: whoever may write there must not fill it.
_NAMED_MAX: Final = 8
#: Objects whose ends are read at a time.
_READERS: Final = 16
#: The end of an object that is read first: tail and index of some hundred blocks.
_END: Final = 64 << 10
#: A server without a sign of life for so many of its beats is lost.
_LOST_BEATS: Final = 3
#: Names that are looked at in one turn of the loop, for each server that could answer for them.
_STEP: Final = 1024
_WRITTEN_AT: Final = attrgetter("written_at")
#: Names that are deleted between two beats, at most: the sign of life must not wait for them.
_DELETED_MAX: Final = 64
#: The objects of lost servers are looked for so often, whatever happens.
_SEARCH_S: Final = 600.0


class Searcher:
    """Who lives, by the object store, and which objects that leaves to this server."""

    def __init__(
        self,
        me: str,
        epoch: int,
        index: ColdIndex,
        settings: ColdSettings,
        counters: Counter[str],
        drafts: Collection[str],
    ) -> None:
        """`drafts`: the names of the objects that are being written."""
        self._me = me
        self._sign = f"{epoch:016x}".encode()
        self._index = index
        self._settings = settings
        self._counters = counters
        self._drafts = drafts
        self._living = Living(frozenset(), 0.0)
        self._beats: Sequence[Listed] = ()
        self._search_at = 0.0
        self._shown_at = 0.0  # when the store took the last sign of life, or the first was tried
        #: Set when a search may be due.
        self._wake = asyncio.Event()
        #: Names of objects that are not what they should be; each is in the log once, of many some.
        self._damaged: set[str] = set()
        self._left_out = 0  # by this search

    async def beat(self) -> None:
        """Show that this server lives, and look who else does. Raises Unavailable.

        Nothing else is done here: the sign must not wait for a search, which may take minutes, or
        the others would take over what is here. While the store took no sign of this server it took
        none of others: they have as much more time, or who comes back first took all for lost.
        """
        folder, beat_s = f"{names.LIVING}/", self._settings.beat_s
        self._shown_at = self._shown_at or _now()
        self._beats = await self._index.bucket.show(folder, names.folder(self._me), self._sign)
        silent_s, self._shown_at = _now() - self._shown_at, _now()
        lost_s = _LOST_BEATS * beat_s + max(0.0, silent_s - beat_s)
        living = Living.of(self._beats, self._me, lost_s)
        if living.servers != self._living.servers or self._index.book.lost:
            # Of those blocks were left out while the store did not answer, which it does again.
            self._search_at = 0.0
        self._living = living
        self._index.now, self._index.oldest = living.now, living.now - self._settings.keep_s
        self._wake.set()

    async def step(self) -> None:
        """After a beat: search, if it is due, and delete what is too old. Raises Unavailable."""
        await self._wake.wait()
        self._wake.clear()
        if _now() >= self._search_at:
            self._search_at = _now() + _SEARCH_S
            try:
                await self._search()
            except BaseException:
                self._search_at = 0.0
                raise
        await self._index.make_room()

    async def delete_outdated(self) -> None:
        """Some of it. Raises Unavailable; the rest has time."""
        gone, outdated = self._index.gone, self._index.outdated
        for name in [*islice(gone, _DELETED_MAX)]:
            if not gone[name]:
                await self._index.delete(name)
            del gone[name]  # no search is under way that has listed it
        listed = self._index.book.by_name
        for _ in range(min(_DELETED_MAX, len(outdated))):
            name = outdated.pop()
            if name in listed or names.object_of(name) in listed:
                continue  # found again meanwhile
            try:
                await self._index.bucket.delete(name)
            except BaseException:
                outdated.append(name)
                raise

    async def end(self) -> None:
        """Another server may answer for the objects at once. Raises Unavailable."""
        await self._index.bucket.delete(f"{names.LIVING}/{names.folder(self._me)}")

    async def _search(self) -> None:
        """Drop the objects that others answer for now, and find those that this server does, the
        newest first."""
        oldest = self._index.oldest
        self._index.outdated = [one.name for one in self._beats if one.written_at < oldest]
        await self._drop(lambda known: not self._is_mine(known.name))
        found, removed = await self._list()
        lost = self._index.book.lost
        await self._drop(lambda known: known.name in lost and known.name not in found)
        self._index.outdated += [one async for one in self._orphans(found, removed)]
        new = [one async for one in _in_turns(found.values()) if self._is_wanted(one)]
        self._damaged &= found.keys()
        self._left_out = 0
        waiting, came = await self._newest_last(new), list[ColdObject]()

        async def load() -> None:
            while waiting:
                one = await self._load(waiting.pop(), removed)
                if one is not None:
                    came.append(one)

        await wait_for_all(load() for _ in range(_READERS))
        if self._left_out > _NAMED_MAX:
            log.warning("more objects are left out", count=self._left_out - _NAMED_MAX)
        if came:
            owners = {names.owner_of(one.name) async for one in _in_turns(came)}
            log.info(
                "cold tier has found blocks",
                objects=len(came),
                blocks=sum(one.blocks for one in came),
                of=", ".join(sorted(owners)[:8]),
            )

    async def _drop(self, goes: Callable[[ColdObject], bool]) -> None:
        async for known in _in_turns(list(self._index.book.by_name.values()), self._names_a_turn):
            if goes(known):
                await self._index.drop(known)

    async def _list(self) -> tuple[dict[str, Listed], dict[str, Listed]]:
        """The objects that this server answers for, and what was removed of them, by name."""
        bucket = self._index.bucket
        found: dict[str, Listed] = {}
        removed: dict[str, Listed] = {}
        folders = {*await bucket.folders(f"{names.OBJECTS}/")}
        folders.update(await bucket.folders(f"{names.REMOVED}/"))
        for owner in map(names.server_of, sorted(folders)):
            if owner in self._living.servers and owner != self._me:
                continue
            folder = names.folder(owner)
            listed = await bucket.listing(f"{names.OBJECTS}/{folder}/")
            async for one in _in_turns(listed, self._names_a_turn):
                if self._is_mine(one.name):
                    found[one.name] = one
            listed = await bucket.listing(f"{names.REMOVED}/{folder}/")
            async for one in _in_turns(listed, self._names_a_turn):
                if self._is_mine(names.object_of(one.name)):
                    removed[one.name] = one
        return found, removed

    @property
    def _names_a_turn(self) -> int:
        """Names for each of which `_is_mine` is asked in one turn of the loop."""
        return _STEP // len(self._living.servers) + 1

    def _is_mine(self, name: str) -> bool:
        return responsible(name, self._living.servers) == self._me

    async def _orphans(
        self, found: Mapping[str, Listed], removed: Mapping[str, Listed]
    ) -> AsyncIterator[str]:
        """What was removed of objects that are gone, or too old. What is not listed yet, because it
        is on its way, is younger than `oldest`."""
        oldest = self._index.oldest
        async for one in _in_turns(removed.values()):
            its = found.get(names.object_of(one.name))
            if one.written_at < oldest and (its is None or its.written_at < oldest):
                yield one.name

    async def _newest_last(self, listed: Sequence[Listed]) -> list[Listed]:
        """Those that are not too old; the others are to be deleted."""
        runs: list[list[Listed]] = []
        for run in sorted_runs(listed, _WRITTEN_AT):
            runs.append(run)
            await asyncio.sleep(0)
        kept: list[Listed] = []
        async for one in _in_turns(merge(*runs, key=_WRITTEN_AT)):
            if one.written_at < self._index.oldest:
                self._index.outdated.append(one.name)
            else:
                kept.append(one)
        return kept

    def _is_wanted(self, one: Listed) -> bool:
        known = self._index.book.by_name.get(one.name)
        if known is not None:
            return one.name in self._index.book.lost
        return one.name not in self._drafts and one.name not in self._damaged

    async def _load(self, listed: Listed, removed: Mapping[str, Listed]) -> ColdObject | None:
        """Read the end of one object and enter its blocks, if there is room for it; the object, if
        it was not known."""
        name = listed.name
        book = self._index.book
        known = book.by_name.get(name)
        if known is None and not book.has_room(listed.size):
            return None  # another server may have it, or its time will end
        try:
            tail, blocks = await self._read_end(listed)
            gone = await self._read_removed(name, removed.get(names.removed_of(name)))
        except Gone:
            return None
        except Damaged as error:
            self._counters["cold_damaged"] += 1
            self._damaged.add(name)
            self._left_out += 1
            if self._left_out <= _NAMED_MAX:
                log.warning("an object is left out", object=name, why=str(error))
            return None
        if not self._is_mine(name) or name in self._index.gone:
            return None  # meanwhile its server has come back, or it has left
        if known is None and not book.has_room(listed.size):
            return None  # any more: what is entered beyond it would be deleted
        one = known or book.enter(name, listed.size, listed.written_at, tail)
        one.removed |= gone
        one.places = array("Q", [block.position for block in blocks])
        await self._index.enter(one, blocks)
        return one if known is None else None

    async def _read_end(self, listed: Listed) -> tuple[Tail, list[ColdBlock]]:
        """Raises Damaged, Gone and Unavailable."""
        name, size = listed.name, listed.size
        if size < TAIL.size:
            raise Damaged("it is cut off")
        first = min(size, _END)
        end = await self._index.bucket.get(name, size - first, first)
        tail = parse_tail(bytes(end[-TAIL.size :]), size)
        if tail.size + TAIL.size <= first:
            index = bytes(end[-TAIL.size - tail.size : -TAIL.size])
        else:
            index = bytes(await self._index.bucket.get(name, tail.start, tail.size))
        return tail, await in_thread(parse_index, name, tail, index, self._index.keys)

    async def _read_removed(self, name: str, listed: Listed | None) -> set[int]:
        if listed is None:
            return set()
        if listed.size > INDEX_MAX:
            raise Damaged("what was removed of it is too long")
        data = await self._index.bucket.get(listed.name, 0, listed.size)
        return parse_removed(name, bytes(data), self._index.keys)


async def _in_turns(items: Iterable[T], step: int = _STEP) -> AsyncIterator[T]:
    """The items; others have their turn of the loop after so many of them."""
    for number, one in enumerate(items, 1):
        yield one
        if number % step == 0:
            await asyncio.sleep(0)


def _now() -> float:
    return asyncio.get_running_loop().time()
