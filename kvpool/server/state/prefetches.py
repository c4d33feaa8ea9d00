"""Blocks that come up from a slower tier before a reader asks for them (design: promotion).

Pure, as the stores are: `now` is an argument. `moves/prefetcher.py` has the blocks moved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of

if TYPE_CHECKING:
    from kvpool.server.state.entry import Entry

#: Seconds for which a block that has come up waits for its reader, and for which a chain waits for
#: room. A prompt that is queued for longer reads from the disk.
HOLD_S: Final = 30.0
#: One part of the memory in so many may hold blocks that have come up and were not read.
SHARE: Final = 8
#: Seconds. What was used so lately is not evicted for a block that nobody has read yet.
FRESH_S: Final = 2.0
#: Blocks that one call gives up, or lets go.
_STEP: Final = 256


class PrefetchedBlocks:
    """The blocks of the front tier that came up before a reader asked, and were not read yet.

    While other blocks may be evicted, these are not. A block leaves the list in one of two ways, so
    at any time `came` is `used` + `wasted` + `bytes` (all in bytes):

    | counted in | when                                                                        |
    |------------|-----------------------------------------------------------------------------|
    | `used`     | it is read                                                                  |
    | `wasted`   | `HOLD_S` are over, or nothing else may be evicted for a writer or a reader: |
    |            | it is the next victim then; or it leaves for another reason (a removal)     |
    """

    def __init__(self) -> None:
        self._until: OrderedDict[Entry, float] = OrderedDict()  # oldest first
        self._extents: dict[Entry, int] = {}
        #: Bytes of whole extents, by tenant, with those of blocks that are still on their way.
        self._shares = Shares(0)
        self.coming = 0  # the latter, of all tenants
        self.bytes = 0
        self.blocks_came = 0
        self.came = 0
        self.used = 0
        self.wasted = 0

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._until

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._until)

    @property
    def held(self) -> int:
        """Bytes of whole extents, of those that are here."""
        return self._shares.used - self.coming

    def room(self, memory: int, tenant: str) -> int:
        """Bytes of whole extents that more blocks of a tenant may take, of a memory of so many: its
        share, or none if the last block took more than was left.

        Blocks on their way count: the step that began them may have ended without them, because
        the disk is slow, and they still come.
        """
        self._shares.total = memory // SHARE
        return self._shares.room(tenant)

    def begins(self, entry: Entry, extent: int) -> None:
        """A block is on its way, into an extent of so many bytes."""
        self.coming += extent
        self._shares.hold(_tenant_of(entry), extent)

    def ended(self, entry: Entry, extent: int) -> None:
        """It comes no more, or is here."""
        self.coming -= extent
        self._shares.give_back(_tenant_of(entry), extent)

    def add(self, entry: Entry, extent: int, now: float) -> None:
        """A block has come up, into an extent of so many bytes."""
        self._until[entry] = now + HOLD_S
        self._extents[entry] = extent
        self._shares.hold(_tenant_of(entry), extent)
        self.bytes += entry.size
        self.blocks_came += 1
        self.came += entry.size

    def read(self, entry: Entry) -> None:
        """A reader has pinned the block: from now on it is one as all others."""
        if self._leaves(entry):
            self.used += entry.size

    def drop(self, entry: Entry) -> None:
        """The block has left its tier, or is not kept any longer, without having been read."""
        if self._leaves(entry):
            self.wasted += entry.size

    def lapsed(self, now: float) -> list[Entry]:
        """Drop those whose time is over, some at a time, and return them."""
        over = [entry for entry, until in islice(self._until.items(), _STEP) if until <= now]
        for entry in over:
            self.drop(entry)
        return over

    def give_up(self, helps: Callable[[Entry], bool]) -> list[Entry]:
        """Drop those that came last, some at a time, and return them: tails before heads.

        Of them only what `helps`: blocks that could go, but for this list.
        """
        last = list(filter(helps, islice(reversed(self._until), _STEP)))
        for entry in last:
            self.drop(entry)
        return last

    def _leaves(self, entry: Entry) -> bool:
        if self._until.pop(entry, None) is None:
            return False
        self.bytes -= entry.size
        self._shares.give_back(_tenant_of(entry), self._extents.pop(entry))
        return True


def _tenant_of(entry: Entry) -> str:
    return tenant_of(entry.index.namespace.name)
