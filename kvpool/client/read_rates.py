"""How fast this client's own reads were lately. Pure."""

from __future__ import annotations

import math
from typing import Final

#: Bytes per second until a read was measured: memory that is mapped, and a slow local network.
PRIOR_NEAR_RATE: Final = 4e9
PRIOR_FAR_RATE: Final = 1e9
#: A smaller read measures latency more than speed.
MEASURED_BYTES_MIN: Final = 1 << 20
#: Weight of earlier reads when a new one comes: the last two count for two thirds.
_DECAY: Final = 0.6
_SERVERS_MAX: Final = 4096


class ReadRates:
    """Bytes per second of this client's own reads: from its host (True), from others (False), and
    from each server."""

    def __init__(self) -> None:
        self._sums: dict[bool | str, tuple[float, float, float]] = {}

    def record(self, source: bool | str, size: int, seconds: float, now: float) -> None:
        """Reads from memory moved `size` bytes in that time."""
        moved, took, _ = self._sums.pop(source, (0.0, 0.0, 0.0))
        if len(self._sums) > _SERVERS_MAX:  # those that were read least lately
            del self._sums[next(iter(self._sums))]
        self._sums[source] = moved * _DECAY + size, took * _DECAY + max(seconds, 1e-6), now

    def rate(self, source: bool | str, since: float = -math.inf) -> float | None:
        """Bytes per second, at least 1; None if nothing was measured since then."""
        moved, took, at = self._sums.get(source, (0.0, 0.0, -math.inf))
        return max(moved / took, 1.0) if took and at >= since else None
