"""Which blocks of a server are read, of those that should have copies; and the extra copies here.

Pure: `copy_keeper.py` asks masters and other servers (design: movers).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.server.moves.state.drain_plan import BlockName
from kvpool.server.state.entry import Entry
from kvpool.types import Namespace

#: Reads that are remembered until they are looked at: of more the last ones, and at most so many
#: blocks of them in one round. What is still read comes again.
_BATCHES_MAX: Final = 256
_COUNTED_MAX: Final = 4096
_STEP: Final = 512
_FOLLOWED_MAX: Final = 8192
_EXTRAS_MAX: Final = 65_536
#: A block is looked at again after so long at the earliest.
CHECK_S: Final = 5.0

_Batch = tuple[Namespace, int, Sequence[bytes]]
_Find = Callable[[Namespace, int, bytes], Entry | None]


@dataclass(slots=True)
class _Followed:
    """A block that is read and was written with copies."""

    checked_at: float = -math.inf
    short: int = 0  # looks in a row at which it had too few copies


class CopyDemand:
    """The reads of one server, bounded whatever clients do."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque(maxlen=_BATCHES_MAX)
        self._followed: OrderedDict[BlockName, _Followed] = OrderedDict()
        self._extras: OrderedDict[BlockName, None] = OrderedDict()

    def read(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """A client has read these blocks. One append, for any size."""
        self._batches.append((namespace, part, digests))

    def read_since(self, find: _Find, now: float) -> Iterator[list[Entry]]:
        """What was read since the last round, in small steps: the blocks whose copies should be
        looked at."""
        names = _last_of(self._batches)
        self._batches.clear()
        for first in range(0, len(names), _STEP):
            due = []
            for name in names[first : first + _STEP]:
                entry = find(*name)
                if entry is None or entry.copies <= 1:
                    continue
                followed = self._follow(name)
                if now >= followed.checked_at + CHECK_S:
                    followed.checked_at = now
                    due.append(entry)
            yield due

    def may_copy(self, name: BlockName, rank: int, *, short: bool) -> bool:
        """Whether this server has a copy of the block made now, if it has too few (`short`).

        Of the servers that have it the one with `rank` 0 does so at once, and each other one only
        if at later looks nobody has: two of them would make two.
        """
        followed = self._follow(name)
        followed.short = followed.short + 1 if short else 0
        return followed.short > rank

    def copied(self, name: BlockName) -> None:
        """It has got a copy."""
        self._follow(name).short = 0

    # --- extra copies that are here ----------------------------------------------------------

    def brought_extra(self, name: BlockName) -> BlockName | None:
        """An extra copy was fetched; one that is not looked after any more, if there are many."""
        self._extras[name] = None
        self._extras.move_to_end(name)
        return self._extras.popitem(last=False)[0] if len(self._extras) > _EXTRAS_MAX else None

    def extras(self, count: int) -> list[BlockName]:
        """The next ones to look at; those that are looked at again come last."""
        found = [self._extras.popitem(last=False)[0] for _ in range(min(count, len(self._extras)))]
        self._extras.update(dict.fromkeys(found))
        return found

    def drop_extra(self, name: BlockName) -> None:
        """It has left, or is no extra copy any more."""
        self._extras.pop(name, None)

    # --- inside ------------------------------------------------------------------------------

    def _follow(self, name: BlockName) -> _Followed:
        followed = self._followed.get(name)
        if followed is None:
            followed = self._followed[name] = _Followed()
            if len(self._followed) > _FOLLOWED_MAX:
                self._followed.popitem(last=False)
        else:
            self._followed.move_to_end(name)
        return followed


def _last_of(batches: Sequence[_Batch]) -> list[BlockName]:
    """The blocks of the last batches, as many as one round looks at."""
    names: list[BlockName] = []
    for namespace, part, digests in reversed(batches):
        taken = digests[: _COUNTED_MAX - len(names)]
        names += [BlockName(namespace, part, digest) for digest in taken]
    return names
