"""Writes what comes to a server into objects of its own, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from kvpool.errors import Unavailable
from kvpool.protocols.cold_tier import ColdSettings
from kvpool.server.cold.index import ColdIndex
from kvpool.server.cold.state import book as names
from kvpool.server.cold.state.book import Key, Waiting
from kvpool.server.cold.state.format import SALT_SIZE, TAIL, ColdBlock, pack_end, parse_tail
from kvpool.server.context import ServerContext
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.threads import in_thread
from kvpool.types import ROOT, Namespace

#: Bytes that are copied in one turn of the loop.
_COPY_STEP: Final = 2 << 20
_BLOCKS_STEP: Final = 128
#: Pause after a write that failed; the bucket has its own, longer one.
_AFTER_FAILURE_S: Final = 1.0
_LOOK_S: Final = 0.01
#: Of the pins for copies of blocks. Connections count from 1, fetches from 1 << 48.
_OWNER: Final = 1 << 60


class _Draft:
    """An object that is being written: its blocks, and which of them were removed meanwhile."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        #: Of the blocks that it was begun for, those that are in no object.
        self.missing = blocks
        self.salt = os.urandom(SALT_SIZE)
        self.payload = bytearray()
        self.blocks: list[ColdBlock] = []
        self.born: list[int] = []
        #: By block and part.
        self.places: defaultdict[tuple[Namespace, bytes], dict[int, int]] = defaultdict(dict)
        self.removed: set[int] = set()


class ObjectWriter:
    """The blocks that wait, and the objects that are being written. Several tasks `step`."""

    def __init__(
        self,
        context: ServerContext,
        index: ColdIndex,
        settings: ColdSettings,
        counters: Counter[str],
    ) -> None:
        self._context = context
        self._stack = context.store
        self._index = index
        self._settings = settings
        self._counters = counters
        self.waiting = Waiting()
        self.drafts: dict[str, _Draft] = {}
        self._folder = f"{names.OBJECTS}/{names.folder(context.server)}/{context.epoch:016x}"
        self._written = 0
        self._wake = asyncio.Event()
        self._leaving = False
        #: What a disk has kept from an earlier life, and was not offered yet.
        self._kept: Iterator[object] | None = None

    def start(self) -> None:
        """What earlier lives have left is known: write the rest."""
        if self._kept is None:
            self._kept = self._offer_kept()
            self._wake.set()

    async def finish(self) -> None:
        """Return when nothing waits any more."""
        self._leaving = True
        self._wake.set()
        while len(self.waiting) or self.drafts:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def offer(self, entry: Entry) -> None:
        """A block has come to this server."""
        waiting, index = self.waiting, entry.index
        key = index.namespace, index.part, entry.digest
        size, full = waiting.add(key, entry.size, _now()), self._settings.object_size
        if len(waiting) == 1 or size - entry.size < full <= size:
            self._wake.set()

    def removed(self, namespace: Namespace, digests: Sequence[bytes], part: int | None) -> None:
        """Blocks that are on their way into an object are removed there, too."""
        for draft in self.drafts.values():
            for digest in digests:
                places = draft.places.get((namespace, digest), {})
                draft.removed.update(
                    place for which, place in places.items() if part in (None, which)
                )

    async def save_removed(self) -> None:
        """Of what is on its way, too. Raises Unavailable."""
        for draft in [one for one in self.drafts.values() if one.removed]:
            await self._index.save_removed_of(draft.name, draft.removed)
        await self._index.save_removed()

    async def step(self) -> None:
        """The next object, or the wait for one."""
        settings = self._settings
        while self._kept is not None and len(self.waiting) < names.WAITING_MAX // 2:
            if next(self._kept, self) is self:
                break
            await asyncio.sleep(0)
        due = self.waiting.due_in(settings.object_size, settings.wait_s, _now())
        if self._kept is None or due is None or (due[0] > 0 and not self._leaving):
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due[0] if due and self._kept is not None else None):
                    await self._wake.wait()
            return
        keys = self.waiting.take(due[1], settings.object_size)
        self._written += 1
        draft = _Draft(f"{self._folder}-{self._written:08d}", len(keys))
        self.drafts[draft.name] = draft
        try:
            await self._gather(draft, keys)
            if draft.blocks:
                await self._put(draft)
        finally:
            self._counters["cold_not_written"] += draft.missing
            del self.drafts[draft.name]

    def _offer_kept(self) -> Iterator[object]:
        for _, entries in self._stack.backing.index.inventory_steps():
            for entry in entries:
                if entry.state is State.STORED:
                    self._index.store.look_at(entry)
            yield None

    async def _gather(self, draft: _Draft, keys: Sequence[Key]) -> None:
        """Copy the blocks that are still here and in no object."""
        copied = 0
        for number, (namespace, part, digest) in enumerate(keys, 1):
            entry = self._stack.peek(namespace, part, digest)
            if self._index.store.index.peek(namespace, part, digest) is not None:
                draft.missing -= 1
            elif entry is not None:
                await self._copy(draft, entry)
                copied += entry.size
            if copied >= _COPY_STEP or number % _BLOCKS_STEP == 0:
                copied = 0
                await asyncio.sleep(0)

    async def _copy(self, draft: _Draft, entry: Entry) -> None:
        index, stack = entry.index, self._stack
        store, position = stack.stores[index.tier], len(draft.payload)
        key = index.namespace, index.part, entry.digest
        places = draft.places[index.namespace, entry.digest]
        places[index.part] = position  # a removal from now on finds it
        pin = store.held.pin(_OWNER, entry)
        try:
            if store is stack.front:
                data = self._context.memory.view(entry.offset, entry.size)
            else:
                data = memoryview(bytearray(entry.size))
                await self._context.tiers[index.tier].read_into(entry.offset, data)
            if self._settings.encrypt:
                cipher = self._index.keys.cipher(draft.salt)
                draft.payload += await in_thread(cipher.encrypt, position, data)
            else:
                for start in range(0, entry.size, _COPY_STEP):
                    draft.payload += data[start : start + _COPY_STEP]
                    if start + _COPY_STEP < entry.size:
                        await asyncio.sleep(0)
        except Unavailable:  # the disk has failed, and says so
            # The next block has its place, and is not what was, or will be, removed.
            del draft.payload[position:], places[index.part]
            draft.removed.discard(position)
            return
        finally:
            store.unpin(_OWNER, pin)
        parent = entry.parent or ROOT
        block = ColdBlock(*key, parent, position, entry.size, entry.checksum, entry.copies)
        draft.blocks.append(block)
        draft.born.append(entry.born)

    async def _put(self, draft: _Draft) -> None:
        """Until the store has it: this writer takes no other block meanwhile. Its room counts from
        the start, so that the other writer, and a search, find what is left."""
        start, encrypt = len(draft.payload), self._settings.encrypt
        end = pack_end(draft.name, draft.blocks, start, self._index.keys, draft.salt, encrypt)
        draft.payload += end
        size, book = len(draft.payload), self._index.book
        while book.coming and book.coming + size > book.size_max:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)  # a tier with room for one of them
        book.coming += size
        try:
            await self._index.make_room()
            while True:
                try:
                    await self._index.bucket.put(draft.name, memoryview(draft.payload))
                    break
                except Unavailable:
                    if self._leaving:
                        return
                    await asyncio.sleep(_AFTER_FAILURE_S)
            draft.missing -= len(draft.blocks)
            tail = parse_tail(end[-TAIL.size :], size)
            one = book.enter(draft.name, size, self._index.now, tail)
        finally:
            book.coming -= size
        one.places = array("Q", [block.position for block in draft.blocks])
        if draft.removed:
            book.unsaved[one.name] = one
        one.removed = draft.removed  # the same set: a removal may still come
        await self._index.enter(one, draft.blocks, draft.born)
        self._counters["cold_written_blocks"] += len(draft.blocks)
        self._counters["cold_written_bytes"] += size


def _now() -> float:
    return asyncio.get_running_loop().time()
