"""The blocks of memory that the tier below has yet to get, and whose turn it is. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from kvpool.server.state.entry import MOVER, Account, Entry
from kvpool.server.state.extent_state import State
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.write_back import WriteBack

#: Blocks of a lost tier that are dealt with in one step: a millisecond or two.
DROPPED_STEP: Final = 64
#: More bytes than any queue has.
_ALL: Final = 1 << 62
#: The blocks of one write are used within this time: none of them is older than its parent.
_ONE_USE_US: Final = 10_000


class WritebackQueue:
    """Which blocks of the front tier are to be copied to the backing tier, and how many now.

    A sealed block of the front tier is in one of these places; `add` and `next` move it:

    | place      | clean | why                                                                  |
    |------------|-------|----------------------------------------------------------------------|
    | `dirty`    | no    | it waits for its turn, in the order of writing                       |
    | (none)     | no    | it is on its way, pinned by the mover; `moving_bytes` counts it      |
    | `unwritten`| yes   | the backing tier was `read_only`: it may be evicted, and is overdue  |
    | (none)     | yes   | another tier has it, or the backing tier has refused it              |
    """

    def __init__(self, front: FrontStore, *, write_back: bool) -> None:
        self._extents = front.extents
        self._held = front.held
        #: Not a dict, see `unwritten`.
        self.dirty: OrderedDict[Entry, None] = OrderedDict()
        #: Not a dict, which takes linear time to find its first entry when those before it are
        #: gone.
        self.unwritten: OrderedDict[Entry, None] = OrderedDict()
        #: Whole extents on their way to the backing tier.
        self.moving_bytes = 0
        #: The backing tier takes no writes: `stop_writing` and `resume_writing` change it.
        self.read_only = False
        #: Fetched from another server and not written back: they make room there by their age.
        self.fetched: set[Entry] = set()
        #: Evicted by the backing tier and kept by memory: their last use at that time.
        self._written_again: dict[Entry, int] = {}
        #: None: write-through. What is in the queue is written as soon as possible.
        self.write_back = WriteBack(self._extents, self.dirty) if write_back else None

    def __len__(self) -> int:
        return len(self.dirty) + len(self.unwritten)

    @property
    def waiting(self) -> int:
        """Blocks that wait to be written back. None while the backing tier is read-only, and, with
        write-back, while little enough is dirty."""
        return 0 if self.read_only or self.due_bytes <= 0 else len(self)

    @property
    def due_bytes(self) -> int:
        """How much is to be written back now; blocks of a tier that was read-only are overdue."""
        if not self._extents.demotes:
            return 0
        if self.write_back is None or self.unwritten:
            return _ALL
        return self.write_back.due_bytes(self.moving_bytes)

    @property
    def is_under_pressure(self) -> bool:
        """True when writers must soon wait for the backing tier: too much of memory is dirty."""
        if self.write_back is not None:
            return self.write_back.is_late
        return self._extents.dirty_bytes * 4 > self._extents.allocator.capacity

    def add(self, entry: Entry) -> None:
        """A dirty block is to be written when its turn comes."""
        if self.read_only:
            self.unwritten[entry] = None
            self._extents.mark_clean(entry)
        else:
            self.dirty[entry] = None
            if self.write_back is not None:
                self.write_back.queued(entry)

    def next(self) -> Entry:
        """The block whose turn it is; those that had to wait for a read-only tier come last."""
        if self.dirty and self.write_back is not None:
            entry = self.write_back.next()
        elif self.dirty:
            entry, _ = self.dirty.popitem(last=False)
        else:
            entry, _ = self.unwritten.popitem(last=False)
            self._extents.mark_dirty(entry)
        return entry

    def done(self, entry: Entry) -> None:
        """The backing tier has the block, or refuses it: memory may evict it."""
        self._extents.mark_clean(entry)
        self.fetched.discard(entry)

    def left(self, entry: Entry) -> None:
        """The block has left its tier."""
        self.unwritten.pop(entry, None)
        self._written_again.pop(entry, None)
        self.fetched.discard(entry)
        self.dirty.pop(entry, None)

    def refused(self, size: int) -> None:
        """Memory had no space for so many bytes: what is dirty must be written for them."""
        if self.write_back is not None:
            self.write_back.wanted_bytes = max(size, self.write_back.wanted_bytes) if size else 0

    def older_waits(self, entry: Entry, of: Callable[[Account], bool]) -> bool:
        """Whether a block of such tenants that was used before this one is on its way to the
        backing tier, or the next that goes there."""
        if self.read_only:
            return False
        moving = (one for one in self._held.pinned_by(MOVER) if not one.clean)
        waiting = (next(moving, None), self._head)
        before = entry.last_used - _ONE_USE_US
        return any(
            one is not None and one.last_used < before and of(one.index.account) for one in waiting
        )

    @property
    def _head(self) -> Entry | None:
        if not self.dirty:
            return None
        if self.write_back is not None:
            return self.write_back.least_recently_used()
        return next(iter(self.dirty))

    def is_given_up(self, entry: Entry) -> bool:
        """Whether a block of the front tier that the backing tier has evicted stays without a copy.

        It is written again once for each use. Two blocks that take each other's place on a full
        disk would be written for ever; and those that wait behind them would stay dirty, so that
        nothing in memory could make room for a reader.
        """
        if self.write_back is not None and self.write_back.is_flushing:
            return True
        given_up = self._written_again.get(entry) == entry.last_used
        self._written_again[entry] = entry.last_used
        return given_up

    # --- the server stops, or the backing tier fails: in steps between which the loop may run ---

    def flush(self) -> Iterator[None]:
        """The server stops: from now on all that is dirty is due, the most valuable first."""
        if self.write_back is not None:
            yield from self.write_back.flush()

    def stop_writing(self) -> Iterator[None]:
        """The backing tier takes no writes: evict as if it had every block, until it does again.

        Ends early after `resume_writing`.
        """
        self.read_only = True
        number = 0
        while self.read_only and self.dirty:
            entry = self.next()
            if entry.state is State.STORED and not entry.clean:
                self.add(entry)
            number += 1
            if number % 1024 == 0:
                yield

    def resume_writing(self) -> int:
        """The backing tier takes writes again. How many blocks are written late."""
        self.read_only = False
        return len(self.unwritten)

    def end(self) -> WriteBack | None:
        """The backing tier is lost: nothing is due any more. `forget` takes what this returns."""
        self._extents.demotes = self._extents.drops_useless = self.read_only = False
        write_back, self.write_back = self.write_back, None
        return write_back

    def forget(self, write_back: WriteBack | None) -> Iterator[None]:
        """Without a tier below no block can be written back: each may be evicted as it is."""
        for queue in (self.dirty, self.unwritten):
            while queue:
                for _ in range(min(DROPPED_STEP, len(queue))):
                    self._extents.mark_clean(queue.popitem(last=False)[0])
                yield
        if write_back is not None:
            yield from write_back.forget()
