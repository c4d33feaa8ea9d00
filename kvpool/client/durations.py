"""How long a client waited: a count for each operation, transport and duration.

Durations are rounded to two digits, so a sum is right to 5 %, every histogram can be made of the
counts, and there are some hundred of them for each operation and transport. A duration costs a
microsecond, once for a message and never for a block.
"""

from __future__ import annotations

from kvpool.types import Duration


class Durations:
    """Counts since the client was opened. `counts` may be copied in any thread."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}

    def record(self, operation: str, transport: str, seconds: float) -> None:
        """One more that took so long."""
        key = operation, transport, f"{seconds:.2g}"
        self._counts[key] = self._counts.get(key, 0) + 1

    def counts(self) -> dict[Duration, int]:
        """As of now."""
        copied = self._counts.copy()  # in one step, for other threads
        return {Duration(key[0], key[1], float(key[2])): count for key, count in copied.items()}
