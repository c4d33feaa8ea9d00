"""The index of a server's cold tier: which blocks lie where, what was removed, what must go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Final

from kvpool.errors import Unavailable
from kvpool.protocols.cold_tier import Gone
from kvpool.protocols.persistent_tier import Record
from kvpool.server.cold.bucket import REQUEST_S, Bucket
from kvpool.server.cold.state import book as names
from kvpool.server.cold.state.book import Book, ColdObject
from kvpool.server.cold.state.format import TAG_SIZE, ColdBlock, Damaged, ObjectKeys, pack_removed
from kvpool.server.context import ServerContext
from kvpool.server.state.extent_state import State
from kvpool.server.state.tier_stores import SPAN, ColdStore
from kvpool.tenant_names import tenant_of
from kvpool.threads import in_thread
from kvpool.types import ReadStatus

#: Blocks that enter or leave the index in one turn of the loop.
_STEP: Final = 128


class ColdIndex:
    """The blocks that this server answers for."""

    def __init__(
        self, context: ServerContext, store: ColdStore, bucket: Bucket, keys: ObjectKeys
    ) -> None:
        self._context = context
        self._stack = context.store
        self.store = store
        self.bucket = bucket
        self.keys = keys
        self.book = Book(store.allocator.capacity)
        store.extents.on_left = self.book.left
        #: What was written before that, by the clock of the store, is too old.
        self.oldest = float("-inf")
        #: By that clock, when this server showed last that it lives.
        self.now = 0.0
        #: Names that are to be deleted, as a search has found them; from its end, objects before
        #: what was removed of them.
        self.outdated: list[str] = []
        #: Objects that have left for good: a search must not find them again, for what was removed
        #: of them is not known any more. True: the store has deleted it.
        self.gone: dict[str, bool] = {}
        #: One request at a time says what was removed: the last one has all of it.
        self._saving = asyncio.Lock()

    async def read_into(self, address: int, buffer: memoryview) -> None:
        """The block at this address, and zeros behind it. Raises Unavailable, also for one that is
        not there any more."""
        one, entry = self.book.at(address), self.store.extents.blocks_at.get(address)
        if one is None or entry is None:
            raise Unavailable("object store: the block is not there any more")
        position, size = address % SPAN, entry.size
        hidden = size + one.tail.encrypted * TAG_SIZE
        try:
            tenant = tenant_of(entry.index.namespace.name)
            data = await self.bucket.read(one.name, position, hidden, tenant)
        except Gone:
            one.gone = True
            self.book.look_at(one)
            raise Unavailable("object store: somebody has deleted the object") from None
        if len(data) != hidden:
            raise Unavailable(f"object store: {len(data)} bytes instead of {hidden}")
        if one.tail.encrypted:
            cipher = self.keys.cipher(one.tail.salt)
            try:
                data = await in_thread(cipher.decrypt, position, data)
            except Damaged:
                data = bytes(size)  # its checksum is not right, as for any other damage
        buffer[:size] = data
        buffer[size:] = bytes(len(buffer) - size)
        self.book.read(one)

    async def enter(
        self, one: ColdObject, blocks: Sequence[ColdBlock], born: Sequence[int] = ()
    ) -> None:
        """Enter the blocks of an object that are not removed, and announce them."""
        self.book.lost.discard(one.name)
        try:
            for number, block in enumerate(blocks, 1):
                if one.leaves:
                    return
                if block.position not in one.removed:
                    self._enter_block(one, block, born[number - 1] if born else 0)
                if number % _STEP == 0 or number == len(blocks):
                    self._context.on_change()
                    await asyncio.sleep(0)
        finally:
            self.book.look_at(one)

    def _enter_block(self, one: ColdObject, block: ColdBlock, born: int) -> None:
        namespace, part, digest, parent, position, size, checksum, copies = block
        address = one.start + position
        here = self._stack.peek(namespace, part, digest)
        cold = self.store.index.peek(namespace, part, digest)
        if cold is not None and cold.offset == address:
            return
        if cold is not None or (here is not None and here.checksum != checksum):
            # One place and one version of a block on one server: that which came first. Else this
            # one would come back when that is removed.
            self.book.remove(one, position)
            return
        record = Record(namespace, part, digest, parent, address, size, checksum, 0, copies)
        entry = self.store.add(record, born)
        if entry is None:
            return
        one.blocks += 1
        if here is None:
            change_log = self._stack.change_log
            change_log.tombstones.came_back_all(namespace, [digest])
            change_log.add(entry.index, [entry.digest], ReadStatus.HIT, self.store.index.tier)

    async def drop(self, one: ColdObject) -> None:
        """Take an object and its blocks out of the index."""
        one.leaves = True
        for number, place in enumerate(one.places, 1):
            entry = self.store.extents.blocks_at.get(one.start + place)
            if entry is not None and entry.state is State.STORED:
                index = entry.index
                self.store.remove(index.namespace, [entry.digest], ReadStatus.EVICTED, index.part)
            if number % _STEP == 0:
                self._context.on_change()
                await asyncio.sleep(0)
        self.book.leave(one)
        self._context.on_change()

    async def save_removed(self) -> None:
        """Tell the object store what was removed. Raises Unavailable; then it is told later."""
        unsaved = self.book.unsaved
        async with self._saving:  # who comes second waits for what the first one has taken
            while unsaved:
                name, one = next(iter(unsaved.items()))
                del unsaved[name]
                try:
                    await self._put_removed(name, one.removed)
                except BaseException:
                    unsaved.setdefault(name, one)
                    raise

    async def save_removed_of(self, name: str, places: Iterable[int]) -> None:
        """The same, of an object that is on its way."""
        async with self._saving:
            await self._put_removed(name, places)

    async def _put_removed(self, name: str, places: Iterable[int]) -> None:
        data = pack_removed(name, places, self.keys)
        await self.bucket.put(names.removed_of(name), data, REQUEST_S)

    async def make_room(self) -> None:
        """Delete what is too old, and what was not read for longest where there is no room."""
        while (one := self.book.next_to_go(self.oldest)) is not None:
            self.gone[one.name] = False
            await self.drop(one)
            with contextlib.suppress(Unavailable):  # it is tried again
                await self.delete(one.name)

    async def delete(self, name: str) -> None:
        """An object that has left. Raises Unavailable."""
        await self.bucket.delete(name)
        await self.bucket.delete(names.removed_of(name))
        self.gone[name] = True

    @property
    def to_delete(self) -> int:
        """Names that wait for that."""
        return len(self.outdated) + len(self.gone)
