"""A dict of millions of keys that never does much at once.

A dict that grows moves all its entries in one step: 0.6 s with 20 million, in which an event loop
answers nobody. And nobody can walk a dict in several steps while others change it.
(design: turns)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Mean number of keys in a piece. A piece holds up to twice as many before it is split, and these
#: numbers lie just below those at which a dict grows (683 and 1366), so that little memory is idle.
PIECE_KEYS: Final = 580


class PiecewiseDict(Generic[K, V]):
    """A dict in many small dicts, its *pieces*, by the hashes of the keys.

    It grows by one piece at a time: linear hashing (W. Litwin, VLDB 1980), so adding a key takes at
    most the time to split one piece. It does not shrink, but `compact` makes pieces small.

    For loops over many keys: the piece of a key is `table[hash(key) & mask]`. Change pieces
    directly, then call `changed` with the number of keys that were added or removed; `table` and
    `mask` are valid until then.
    """

    __slots__ = ("_count", "_half", "_pieces", "mask", "table")

    def __init__(self) -> None:
        piece: dict[K, V] = {}
        #: The pieces; those that are still to be split in this round are in it twice.
        self.table: list[dict[K, V]] = [piece, piece]
        self.mask = 1
        self._half = 1  # pieces when this round of splits began
        self._pieces = 1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: K) -> bool:
        return key in self.table[hash(key) & self.mask]

    def __getitem__(self, key: K) -> V:
        return self.table[hash(key) & self.mask][key]

    def __setitem__(self, key: K, value: V) -> None:
        piece = self.table[hash(key) & self.mask]
        before = len(piece)
        piece[key] = value
        if len(piece) != before:
            self._count += 1
            if self._count > self._pieces * PIECE_KEYS:
                self._split()

    def __delitem__(self, key: K) -> None:
        del self.table[hash(key) & self.mask][key]
        self._count -= 1

    def discard(self, key: K) -> None:
        """Remove a key if it is here."""
        if self.table[hash(key) & self.mask].pop(key, None) is not None:
            self._count -= 1

    def get(self, key: K) -> V | None:
        """The value of a key; None if it has none."""
        return self.table[hash(key) & self.mask].get(key)

    def get_all(self, keys: Sequence[K]) -> list[V | None]:
        """The value of each key, or None."""
        table, mask = self.table, self.mask
        if self._pieces == 1:
            return list(map(table[0].get, keys))
        return [table[hash(key) & mask].get(key) for key in keys]

    def changed(self, added: int) -> None:
        """So many keys were added to pieces directly (negative: removed). Splits pieces if due."""
        self._count += added
        while self._count > self._pieces * PIECE_KEYS:
            self._split()

    def pieces(self) -> Iterator[dict[K, V]]:
        """Every piece, for a walk in steps between which others may change this dict.

        A key that is here from the first step to the last is met at least once; it is met again
        when its piece is split after the walk has passed it. Change no keys *during* a step.
        """
        number = 0
        while number < self._pieces:
            yield self.table[number]
            number += 1

    def piece(self, number: int) -> dict[K, V] | None:
        """The piece with this number, for a walk as that of `pieces` that keeps its own place; None
        behind the last one."""
        return self.table[number] if 0 <= number < self._pieces else None

    def items(self) -> Iterator[tuple[K, V]]:
        """Every key and its value, as `dict.items`; in one step."""
        for piece in self.pieces():
            yield from piece.items()

    def values(self) -> Iterator[V]:
        """Every value, as `dict.values`; in one step."""
        for piece in self.pieces():
            yield from piece.values()

    def __iter__(self) -> Iterator[K]:
        for piece in self.pieces():
            yield from piece

    def _split(self) -> None:
        """Move half of the keys of the next piece into a new one.

        In a round, pieces 0 to `_half - 1` are split in this order; piece `n` gives the keys whose
        hash has the bit `_half` to the new piece `n + _half`.
        """
        number, bit = self._pieces - self._half, self._half
        piece = self.table[number]
        # New dicts for both, because one that has lost keys keeps its memory.
        self.table[number] = {key: piece[key] for key in piece if not hash(key) & bit}
        self.table[number + bit] = {key: piece[key] for key in piece if hash(key) & bit}
        self._pieces += 1
        if self._pieces == 2 * self._half:
            self._half *= 2
            self.table += self.table
            self.mask = 2 * self._half - 1


def compact(piece: dict[K, V]) -> None:
    """Give back the memory of the keys that a piece has lost."""
    kept = dict(piece.items())
    piece.clear()
    piece.update(kept)
