"""Whether coding takes less time than the bytes that it saves, by what was measured: pure."""

from __future__ import annotations

from typing import Final

#: While it does not pay, one of so many blocks is coded all the same: it may pay again.
_TRIED_EVERY: Final = 64
_DECAY: Final = 0.9
#: So many times faster than before: that was measured when all was different.
_RESET_RATIO: Final = 4.0


class _Rate:
    """Seconds of bytes; older measurements weigh less."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, x (bytes), y (seconds), x * x and x * y

    @property
    def per_byte_s(self) -> float:
        return self._sums[2] / self._sums[1] if self._sums[1] else 0.0

    @property
    def per_byte_more_s(self) -> float:
        """Without the time of a call of no bytes, which calls of one size do not tell."""
        weight, x, y, xx, xy = self._sums
        if (spread := weight * xx - x * x) <= 0.01 * x * x:
            return self.per_byte_s
        return min(max((weight * xy - x * y) / spread, 1e-13), self.per_byte_s)

    def observe(self, size: int, seconds: float) -> None:
        if size:
            seconds = max(seconds, 1e-6)
            kept = 0.0 if seconds * _RESET_RATIO < self.per_byte_more_s * size else _DECAY
            new = 1.0, size, seconds, size * size, size * seconds
            self._sums = [a * kept + b for a, b in zip(self._sums, new, strict=True)]


class Payoff:
    """Of one engine. A block is encoded and written once, and counts as loaded and decoded once.

    Until both a way and the coding were measured, it pays.
    """

    def __init__(self) -> None:
        #: Bytes that came from the pool, and went to it.
        self.reads, self.writes = _Rate(), _Rate()
        #: Bytes of blocks that were encoded, and decoded.
        self.encoding, self.decoding = _Rate(), _Rate()
        self._before = self._after = 0.0  # bytes, older ones weigh less
        self._asked = 0

    def on_encoded(self, size: int, smaller: int, seconds: float) -> None:
        """A block of `size` bytes became a `smaller` one."""
        self.encoding.observe(size, seconds)
        self._before = self._before * _DECAY + size
        self._after = self._after * _DECAY + smaller

    def codes(self) -> bool:
        """Whether the next block is encoded."""
        self._asked += 1
        return self.pays() or self._asked % _TRIED_EVERY == 0

    def pays(self) -> bool:
        ways = _both(self.writes.per_byte_more_s, self.reads.per_byte_more_s)
        coding = _both(self.encoding.per_byte_s, self.decoding.per_byte_s)
        known = ways and coding and self._before
        return not known or ways * (1 - self._after / self._before) > coding


def _both(*seconds: float) -> float:
    """There and back. One that was not measured is as the other: some engines only save, some only
    load. 0: neither was."""
    known = [one for one in seconds if one]
    return 2 * sum(known) / len(known) if known else 0.0
