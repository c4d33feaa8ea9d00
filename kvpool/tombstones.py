"""Why blocks are gone: the reasons of the last departures.

A miss without a reason cannot be explained to the user who asks: the last `limit` are recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final, TypeAlias

from kvpool.piecewise_dict import PiecewiseDict
from kvpool.tenant_names import TENANTS_MAX, tenant_of
from kvpool.types import Namespace, ReadStatus

#: A block: name and parts of its namespace, and its digest. Hashed without a call of Python.
_Key: TypeAlias = tuple[str, int, bytes]
#: Of the value of a record: below its number the status.
_STATUS_BITS: Final = 8
_STATUS_MASK: Final = (1 << _STATUS_BITS) - 1


class _Departures(deque[_Key]):
    """The blocks of one tenant's departures, the oldest first; `next` numbers the one to come."""

    next = 0
    tenant = ""


class Tombstones:
    """The last `limit` departures: from (namespace, digest) to the status that a reader gets.

    Where one more does not fit, the oldest of a tenant that has more than its part is dropped. Each
    block that is gone has the number, in its tenant's line, and the status of its last departure:
    what is in the line under another number has come back, or left once more. An OrderedDict would
    move all its records at once now and then: 5 to 12 ms with 65,536 (design: turns).
    """

    def __init__(self, limit: int = 65_536) -> None:
        self.limit = limit
        self.forgotten = 0  # departures that have aged out, or had no reason
        self._reasons: PiecewiseDict[_Key, int] = PiecewiseDict()
        self._lines: dict[str, _Departures] = {}
        self._largest = _Departures()  # that had more than its part when that was looked at last
        self._since_search = 0  # departures that were dropped since then
        self._held = 0  # in all lines

    def __len__(self) -> int:
        return len(self._reasons)

    def steps(self, count: int) -> Iterator[list[tuple[tuple[Namespace, bytes], ReadStatus]]]:
        """Every recorded departure as ((namespace, digest), status), each tenant's oldest first, in
        lists of at most `count`, for a walk in steps: without those that came back before their
        step, or left once more, and without those that left after the first step."""
        named: dict[tuple[str, int], Namespace] = {}
        lines = [enumerate(list(one), one.next - len(one)) for one in self._lines.values()]
        walk = chain.from_iterable(lines)
        while step := list(islice(walk, count)):
            found = []
            for number, key in step:
                value = self._reasons.get(key)
                if value is not None and value >> _STATUS_BITS == number:
                    if (namespace := named.get(key[:2])) is None:
                        namespace = named[key[:2]] = Namespace(*key[:2])
                    found.append(((namespace, key[2]), _STATUSES[value & _STATUS_MASK]))
            yield found

    def left(self, namespace: Namespace, digest: bytes, reason: ReadStatus) -> None:
        """Record that a block left.

        NEVER_WRITTEN stands for a reason that is not known: then none is recorded.
        """
        if reason is ReadStatus.NEVER_WRITTEN:
            self.forgotten += 1
            return
        self.left_all(namespace, (digest,), reason)

    def left_all(self, namespace: Namespace, digests: Sequence[bytes], reason: ReadStatus) -> None:
        """The same for several blocks, with a reason that is known."""
        name, parts = namespace.name, namespace.parts
        table, mask = self._reasons.table, self._reasons.mask
        tenant = tenant_of(name)
        if tenant not in self._lines:
            tenant = tenant if len(self._lines) <= TENANTS_MAX else ""  # such names are made up
            self._lines.setdefault(tenant, _Departures()).tenant = tenant
        line, added = self._lines[tenant], 0
        for number, digest in enumerate(digests, line.next):
            key = name, parts, digest
            piece = table[hash(key) & mask]
            added += key not in piece
            piece[key] = number << _STATUS_BITS | reason
            line.append(key)
        line.next += len(digests)
        self._held += len(digests)
        for _ in range(self._held - self.limit):
            largest = self._largest
            if len(largest) * len(self._lines) <= self.limit:  # else it has more than its part
                # To search costs as much as there are tenants: once for as many departures.
                parts = len(self._lines)
                search = self._since_search >= parts or len(line) * parts <= self.limit
                largest = self._largest = max(self._lines.values(), key=len) if search else line
                self._since_search *= not search
            self._since_search += 1
            number, oldest = largest.next - len(largest), largest.popleft()
            piece = table[hash(oldest) & mask]
            if piece.get(oldest, -1) >> _STATUS_BITS == number:
                del piece[oldest]
                added -= 1
                self.forgotten += 1
            self._held -= 1
            if not largest:
                del self._lines[largest.tenant]
        self._reasons.changed(added)

    def came_back_all(self, namespace: Namespace, digests: Sequence[bytes]) -> None:
        """The blocks are stored again: drop the records of their departures."""
        if not self._held:
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
        return self.reasons(namespace, (digest,))[0]

    def reasons(self, namespace: Namespace, digests: Sequence[bytes]) -> list[ReadStatus]:
        """The same for each of several blocks."""
        name, parts = namespace.name, namespace.parts
        if "" not in self._lines and tenant_of(name) not in self._lines:  # none of it has left
            return [ReadStatus.NEVER_WRITTEN] * len(digests)
        values = self._reasons.get_all([(name, parts, digest) for digest in digests])
        return [
            ReadStatus.NEVER_WRITTEN if value is None else _STATUSES[value & _STATUS_MASK]
            for value in values
        ]


#: A call of the enum for each record would take longer.
_STATUSES: Final = {int(status): status for status in ReadStatus}
