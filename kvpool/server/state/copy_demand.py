"""Which blocks of a server are read, and how often from other hosts; and the extra copies here.

Pure: `copy_keeper.py` asks masters and other servers (design: lost-copies).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.server.state.drain_plan import BlockName
from kvpool.server.state.entry import Entry
from kvpool.types import Namespace, ServerStats

#: Reads that are remembered until they are counted. Of more the last ones stand for all.
_BATCHES_MAX: Final = 256
#: Blocks that are counted in one round; the others are counted in their place.
_COUNTED_MAX: Final = 4096
_STEP: Final = 512
_FOLLOWED_MAX: Final = 8192
_EXTRAS_MAX: Final = 65_536
#: A read counts for so long, on average.
MEMORY_S: Final = 60.0
#: A block is looked at again after so long at the earliest.
CHECK_S: Final = 5.0
#: For an extra copy a block must be read from other hosts so often within `MEMORY_S`: a copy costs
#: as much as a read, so copies are a quarter of what is read at most.
READS_MIN: Final = 4.0
#: What a copy displaces is computed again when it is asked for: as dear as so many reads.
_MISS_READS: Final = 10.0
#: With less memory free than this part, a copy displaces something.
_FREE: Final = 0.1

#: Namespace, part, digests, whether the reader is on another host, and its address.
_Batch = tuple[Namespace, int, Sequence[bytes], bool, str]
_Find = Callable[[Namespace, int, bytes], Entry | None]


@dataclass(slots=True)
class _Followed:
    """A block that is read. `reads` are those from other hosts; older ones count less.

    `reader` is the address of the host that reads it most, if one reads more than all others: by
    majority vote (Boyer and Moore, "A Fast Majority Vote Algorithm", 1981), in a constant space.
    """

    reads: float = 0.0
    at: float = 0.0
    reader: str = ""
    votes: float = 0.0
    checked_at: float = -math.inf
    short: int = 0  # looks in a row at which it had too few copies

    def count(self, reads: float, now: float, reader: str) -> None:
        self.reads = self.reads_at(now) + reads
        self.votes *= math.exp((self.at - now) / MEMORY_S)
        self.at = now
        if reader == self.reader:
            self.votes += reads
        elif reads > self.votes:
            self.reader, self.votes = reader, reads - self.votes
        else:
            self.votes -= reads

    def reads_at(self, now: float) -> float:
        return self.reads * math.exp((self.at - now) / MEMORY_S)


class CopyDemand:
    """The reads of one server, bounded whatever clients do."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque(maxlen=_BATCHES_MAX)
        self._noted = 0
        self._followed: OrderedDict[BlockName, _Followed] = OrderedDict()
        self._extras: OrderedDict[BlockName, None] = OrderedDict()

    def read(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        *,
        remote: bool,
        reader: str = "",
    ) -> None:
        """A client has read these blocks; `remote`: from another host, at the address `reader`.
        One append, for any size."""
        self._batches.append((namespace, part, digests, remote, reader))
        self._noted += 1

    def counted(self, find: _Find, now: float, *, grows: bool) -> Iterator[list[Entry]]:
        """Count what was read since the last round, in small steps: the blocks whose copies should
        be looked at. With `grows` also those that are read from other hosts often enough for an
        extra copy."""
        batches, noted = list(self._batches), self._noted
        self._batches.clear()
        self._noted = 0
        names, readers = _sample(batches)
        if not names:
            return
        blocks = sum(len(digests) for _, _, digests, _, _ in batches)
        weight = blocks / len(names) * noted / len(batches)
        for first in range(0, len(names), _STEP):
            due = []
            for name, reader in zip(
                names[first : first + _STEP], readers[first : first + _STEP], strict=True
            ):
                entry = find(*name)
                is_remote = reader is not None
                if entry is None or not (entry.copies > 1 or (grows and is_remote)):
                    continue
                followed = self._follow(name)
                if reader is not None:
                    followed.count(weight, now, reader)
                hot = grows and followed.reads_at(now) > READS_MIN
                if (entry.copies > 1 or hot) and now >= followed.checked_at + CHECK_S:
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

    def reads(self, name: BlockName, now: float) -> float:
        """How often the block was read from other hosts in the last minute."""
        followed = self._followed.get(name)
        return followed.reads_at(now) if followed is not None else 0.0

    def reader(self, name: BlockName) -> str:
        """The address of the host that reads the block most; empty if that is not known."""
        followed = self._followed.get(name)
        return followed.reader if followed is not None else ""

    def copied(self, name: BlockName, *, extra: bool) -> None:
        """It has got a copy. For the next extra one it must be read as often again."""
        followed = self._follow(name)
        followed.short = 0
        if extra:
            followed.reads = 0.0

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


def _sample(
    batches: Sequence[_Batch],
) -> tuple[list[BlockName], list[str | None]]:
    """The blocks of the last batches, as many as one round counts; each with the address of its
    reader, None if that is on this host."""
    names: list[BlockName] = []
    readers: list[str | None] = []
    for namespace, part, digests, is_remote, reader in reversed(batches):
        taken = digests[: _COUNTED_MAX - len(names)]
        names += [BlockName(namespace, part, digest) for digest in taken]
        readers += [reader if is_remote else None] * len(taken)
    return names, readers


def reads_for_a_copy(target: ServerStats, capacity: int) -> float:
    """How often a block must be read from other hosts within `MEMORY_S`, so that an extra copy on
    this server pays.

    Its size does not matter: a copy costs as many bytes as a read saves. What it displaces, if the
    server is full, would be asked for about once in the age of the next victim.
    """
    if target.used < (1 - _FREE) * capacity:
        return READS_MIN
    return READS_MIN + _MISS_READS * MEMORY_S / max(1.0, target.victim_age_s)
