"""Whether coding takes less time than the bytes that it saves, by what was measured: pure."""

from __future__ import annotations

from typing import Final

from kvpool_connector.plan.cost_model import TransferCost

#: While it does not pay, one of so many blocks is coded all the same: it may pay again.
_TRIED_EVERY: Final = 64
_DECAY: Final = 0.9


class Payoff:
    """Of one engine. A block is encoded and written once, and counts as loaded and decoded once.

    Until both a way and the coding were measured, it pays.
    """

    def __init__(self) -> None:
        self._reads, self._writes = TransferCost(), TransferCost()
        self._encoding, self._decoding = TransferCost(), TransferCost()
        self._before = self._after = 0.0  # bytes, older ones weigh less
        self._asked = 0

    def on_read(self, size: int, seconds: float) -> None:
        """So many bytes came from the pool."""
        if size:
            self._reads.observe(size, seconds)

    def on_written(self, size: int, seconds: float) -> None:
        """So many bytes went to the pool."""
        if size:
            self._writes.observe(size, seconds)

    def on_encoded(self, size: int, smaller: int, seconds: float) -> None:
        """A block of `size` bytes became a `smaller` one."""
        self._encoding.observe(size, seconds)
        self._before = self._before * _DECAY + size
        self._after = self._after * _DECAY + smaller

    def on_decoded(self, size: int, seconds: float) -> None:
        """Encodings became so many bytes of blocks."""
        if size:
            self._decoding.observe(size, seconds)

    def codes(self) -> bool:
        """Whether the next block is encoded."""
        self._asked += 1
        return self.pays() or self._asked % _TRIED_EVERY == 0

    def pays(self) -> bool:
        ways = self._both(self._writes, self._reads)
        coding = self._both(self._encoding, self._decoding)
        if ways is None or coding is None:
            return True
        return ways * (1 - self._after / self._before) > coding

    @staticmethod
    def _both(there: TransferCost, back: TransferCost) -> float | None:
        """Seconds that a byte takes there and back. One that was not measured is as the other:
        some engines only save, some only load. None: neither was."""
        known = [1 / one.bandwidth for one in (there, back) if one.samples]
        return 2 * sum(known) / len(known) if known else None
