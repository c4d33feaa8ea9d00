"""What became of blocks that are gone, for as long as the record lasts.

A miss without a reason is the support case nobody can close, so the last `limit` departures are
remembered. The bound is what keeps a scan of a million dead keys from filling memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvpool.types import Namespace, ReadStatus


class Tombstones:
    """The last departures: (namespace, digest) to the status a reader sees now."""

    def __init__(self, limit: int = 65_536) -> None:
        self.limit = limit
        self.forgotten = 0  # departures that have aged out
        self._reasons: OrderedDict[tuple[Namespace, bytes], ReadStatus] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[tuple[Namespace, bytes, ReadStatus]]:
        """Every departure that is remembered, oldest first."""
        for (namespace, digest), status in self._reasons.items():
            yield namespace, digest, status

    def left(self, namespace: Namespace, digest: bytes, reason: ReadStatus) -> None:
        """Remember that a block left. Forgets the oldest departure at the limit."""
        self._reasons.pop((namespace, digest), None)
        self._reasons[namespace, digest] = reason
        if len(self._reasons) > self.limit:
            self._reasons.popitem(last=False)
            self.forgotten += 1

    def came_back(self, namespace: Namespace, digest: bytes) -> None:
        """The block is here again; its old departure says nothing any more."""
        if self._reasons:
            self._reasons.pop((namespace, digest), None)

    def reason(self, namespace: Namespace, digest: bytes) -> ReadStatus:
        """Why it is gone; NEVER_WRITTEN also stands for a departure that has aged out."""
        return self._reasons.get((namespace, digest), ReadStatus.NEVER_WRITTEN)
