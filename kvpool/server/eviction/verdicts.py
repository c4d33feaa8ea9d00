"""What a policy tells people: what it takes its blocks for, how often it was right, why one went.

At each use a policy expects that a block, or a conversation, comes back (*returning*), if more than
half of its kind did, or that it does not (*dead*). What became of it shows how well the policy
knows its traffic; what it evicts follows from more than this, its densities.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

#: Nothing is expected of a kind of which fewer were seen.
_SEEN_MIN: Final = 16
#: Departures whose reason is kept, the last ones: a megabyte.
_GONE_MAX: Final = 4096
#: Why a block was never stored, in words.
REFUSED: Final = "refused when it came: all that is stored was expected to bring more hits"
_ENDS: Final = ("came", "left", "asked")


class Kind(Protocol):
    """What was measured of blocks, or conversations, that are alike."""

    began: float  # uses
    came: float  # that another one followed


def returning(kind: Kind) -> bool | None:
    """Whether more than half of the kind come back. None: too few were seen."""
    if kind.began < _SEEN_MIN:
        return None
    return kind.came * 2 > kind.began


def worth(share: float, age_s: float, what: str) -> str:
    """Why something was worth less than all else, in words."""
    of_such = f"{share:.0%} of such {what} come back after that"
    return f"quiet for {age_s:,.0f} s: {of_such}, and all else was expected to bring more hits"


class Guesses:
    """What became of what was expected, by number of the kind: it `came` back while it was stored,
    or `left`; and of what has left, how often it was `asked` for again. Whoever counts adds one."""

    def __init__(self, kinds: int) -> None:
        self.came, self.left, self.asked = [0] * kinds, [0] * kinds, [0] * kinds
        self._seen = Counter(
            {f"inferred_{what}_{end}": 0 for what in ("returning", "dead") for end in _ENDS}
        )

    def figures(self, expected: Sequence[bool | None]) -> Counter[str]:
        """With what was counted since the last call, by what is `expected` of each kind now."""
        for end in _ENDS:
            counts = getattr(self, end)
            for number, one in enumerate(expected):
                if one is not None:
                    self._seen[f"inferred_{'returning' if one else 'dead'}_{end}"] += counts[number]
                counts[number] = 0
        return self._seen.copy()


class Departures:
    """Why the last blocks went: number of their kind, and seconds since their last use."""

    def __init__(self, words: Callable[[int, float], str]) -> None:
        self._words = words
        self._gone: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def add(self, digest: bytes, kind: int, age_s: float) -> None:
        gone = self._gone
        gone[digest] = kind, age_s
        gone.move_to_end(digest)
        if len(gone) > _GONE_MAX:
            gone.popitem(last=False)

    def why(self, digest: bytes) -> str:
        """In words; empty when that is not known."""
        found = self._gone.get(digest)
        return self._words(*found) if found is not None else ""
