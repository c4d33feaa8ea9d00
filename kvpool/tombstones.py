"""Why blocks are gone: the reasons of the last departures.

A miss without a reason cannot be explained to the user who asks. So the last `limit` departures are
recorded. The limit bounds the memory when millions of blocks leave (design: tombstones).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvpool.types import Namespace, ReadStatus


class Tombstones:
    """The last departures: from (namespace, digest) to the status that a reader gets."""

    def __init__(self, limit: int = 65_536) -> None:
        self.limit = limit
        self.forgotten = 0  # departures that have aged out, or had no reason
        self._reasons: OrderedDict[tuple[Namespace, bytes], ReadStatus] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[tuple[Namespace, bytes, ReadStatus]]:
        """Every recorded departure, oldest first."""
        for (namespace, digest), status in self._reasons.items():
            yield namespace, digest, status

    def records(self) -> list[tuple[tuple[Namespace, bytes], ReadStatus]]:
        """Every recorded departure, oldest first, as ((namespace, digest), status)."""
        return list(self._reasons.items())

    def left(self, namespace: Namespace, digest: bytes, reason: ReadStatus) -> None:
        """Record that a block left. At the limit the oldest record is dropped.

        NEVER_WRITTEN stands for a reason that is not known: then none is recorded.
        """
        if reason is ReadStatus.NEVER_WRITTEN:
            self.forgotten += 1
            return
        self._reasons.pop((namespace, digest), None)
        self._reasons[namespace, digest] = reason
        if len(self._reasons) > self.limit:
            self._reasons.popitem(last=False)
            self.forgotten += 1

    def came_back(self, namespace: Namespace, digest: bytes) -> None:
        """The block is stored again: drop the record of its departure."""
        if self._reasons:
            self._reasons.pop((namespace, digest), None)

    def reason(self, namespace: Namespace, digest: bytes) -> ReadStatus:
        """Why the block is gone. NEVER_WRITTEN also when its record was dropped at the limit."""
        return self._reasons.get((namespace, digest), ReadStatus.NEVER_WRITTEN)
