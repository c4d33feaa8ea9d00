"""Whether coding takes less time than the bytes that it saves, by what was measured: pure."""

from __future__ import annotations

from typing import Final

#: While it does not pay, one of so many blocks is coded all the same: it may pay again.
_TRIED_EVERY: Final = 64
_DECAY: Final = 0.8
#: So many times faster than before: that was measured when all was different.
_RESET_RATIO: Final = 4.0


class _Rate:
    """Seconds that a byte takes; older measurements weigh less."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    @property
    def per_byte_s(self) -> float:
        return self._seconds / self._bytes if self._bytes else 0.0

    def observe(self, size: int, seconds: float) -> None:
        if not size:
            return
        seconds = max(seconds, 1e-6)
        if seconds * _RESET_RATIO < self.per_byte_s * size:
            self._bytes = self._seconds = 0.0
        self._bytes = self._bytes * _DECAY + size
        self._seconds = self._seconds * _DECAY + seconds


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
        ways, coding = _both(self.writes, self.reads), _both(self.encoding, self.decoding)
        if not ways or not coding or not self._before:
            return True
        return ways * (1 - self._after / self._before) > coding


def _both(there: _Rate, back: _Rate) -> float:
    """Seconds that a byte takes there and back. One that was not measured is as the other: some
    engines only save, some only load. 0: neither was."""
    known = [one.per_byte_s for one in (there, back) if one.per_byte_s]
    return 2 * sum(known) / len(known) if known else 0.0
