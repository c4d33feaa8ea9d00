"""Why blocks are gone: the reasons of the last departures.

A miss without a reason cannot be explained to the user who asks. So the last `limit` departures are
recorded. The limit bounds the memory when millions of blocks leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from kvpool.piecewise_dict import PiecewiseDict
from kvpool.types import Namespace, ReadStatus

#: A block: name and parts of its namespace, and its digest. Hashed without a call of Python.
_Key: TypeAlias = tuple[str, int, bytes]
#: Of the value of a record: below its number the status.
_STATUS_BITS: Final = 8
_STATUS_MASK: Final = (1 << _STATUS_BITS) - 1


class Tombstones:
    """The last `limit` departures: from (namespace, digest) to the status that a reader gets.

    Departures are numbered. `_order` has the block of each, the oldest first, and `_reasons` for
    each block that is gone the number and the status of its last departure: what is in `_order`
    under another number has come back, or left once more. An OrderedDict would move all its
    records at once now and then: 5 to 12 ms with 65,536 (design: turns).
    """

    def __init__(self, limit: int = 65_536) -> None:
        self.limit = limit
        self.forgotten = 0  # departures that have aged out, or had no reason
        self._reasons: PiecewiseDict[_Key, int] = PiecewiseDict()
        self._order: deque[_Key] = deque()
        self._next = 0  # number of the next departure

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[tuple[Namespace, bytes, ReadStatus]]:
        """Every recorded departure, oldest first."""
        for (namespace, digest), status in self.records():
            yield namespace, digest, status

    def records(self) -> list[tuple[tuple[Namespace, bytes], ReadStatus]]:
        """Every recorded departure, oldest first, as ((namespace, digest), status)."""
        return [one for step in self.steps(self.limit) for one in step]

    def steps(self, count: int) -> Iterator[list[tuple[tuple[Namespace, bytes], ReadStatus]]]:
        """The same in lists of at most `count`, for a walk in steps: without those that came back
        before their step, or left once more, and without those that left after the first step."""
        named: dict[tuple[str, int], Namespace] = {}
        order = list(self._order)
        number = self._next - len(order)
        for first in range(0, len(order), count):
            found = []
            for key in order[first : first + count]:
                value = self._reasons.get(key)
                if value is not None and value >> _STATUS_BITS == number:
                    name, parts, digest = key
                    namespace = named.get((name, parts))
                    if namespace is None:
                        namespace = named[name, parts] = Namespace(name, parts)
                    found.append(((namespace, digest), _STATUSES[value & _STATUS_MASK]))
                number += 1
            yield found

    def left(self, namespace: Namespace, digest: bytes, reason: ReadStatus) -> None:
        """Record that a block left. At the limit the oldest record is dropped.

        NEVER_WRITTEN stands for a reason that is not known: then none is recorded.
        """
        if reason is ReadStatus.NEVER_WRITTEN:
            self.forgotten += 1
            return
        self.left_all(namespace, (digest,), reason)

    def left_all(self, namespace: Namespace, digests: Sequence[bytes], reason: ReadStatus) -> None:
        """The same for several blocks, with a reason that is known."""
        order, name, parts = self._order, namespace.name, namespace.parts
        table, mask = self._reasons.table, self._reasons.mask
        added = 0
        for digest in digests:
            key = name, parts, digest
            piece = table[hash(key) & mask]
            added += key not in piece
            piece[key] = self._next << _STATUS_BITS | reason
            order.append(key)
            self._next += 1
            if len(order) > self.limit:
                oldest = order.popleft()
                piece = table[hash(oldest) & mask]
                if piece.get(oldest, -1) >> _STATUS_BITS == self._next - 1 - self.limit:
                    del piece[oldest]
                    added -= 1
                    self.forgotten += 1
        self._reasons.changed(added)

    def came_back(self, namespace: Namespace, digest: bytes) -> None:
        """The block is stored again: drop the record of its departure."""
        self.came_back_all(namespace, (digest,))

    def came_back_all(self, namespace: Namespace, digests: Sequence[bytes]) -> None:
        """The same for several blocks."""
        if not len(self._reasons):
            return
        name, parts = namespace.name, namespace.parts
        table, mask = self._reasons.table, self._reasons.mask
        dropped = 0
        for digest in digests:
            key = name, parts, digest
            dropped += table[hash(key) & mask].pop(key, None) is not None
        self._reasons.changed(-dropped)

    def reason(self, namespace: Namespace, digest: bytes) -> ReadStatus:
        """Why the block is gone. NEVER_WRITTEN also when its record was dropped at the limit."""
        value = self._reasons.get((namespace.name, namespace.parts, digest))
        return ReadStatus.NEVER_WRITTEN if value is None else _STATUSES[value & _STATUS_MASK]


#: A call of the enum for each record would take longer.
_STATUSES: Final = {int(status): status for status in ReadStatus}
