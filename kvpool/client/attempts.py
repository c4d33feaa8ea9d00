"""Which server is asked for which blocks of a read: the best of each block, then the next; and how
fast reads were. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.types import BATCH_BLOCKS_MAX, ReadResult, ReadStatus

_HIT = ReadStatus.HIT
#: Bytes that one call to a channel carries; larger batches go in several.
_BATCH_BYTES: Final = 256 << 20
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


class Attempt(NamedTuple):
    """Blocks, by position, that one server is asked for in one message."""

    server: str
    positions: list[int]
    #: Of a piece: whether it should be left for an idle way now.
    overdue: Callable[[float], bool] | None = None


class Standing(NamedTuple):
    """How good a server is for a reader; the smallest is the best."""

    ailing: bool
    far: bool  # on another host
    networked: bool  # no path through memory


@dataclass(slots=True)
class Attempts:
    """The plan of one read, on whose lists it works.

    A block is asked in one `Attempt` at a time: its buffer has one writer. `ended` has it asked of
    the next server, unless it is read or has no candidate any more.
    """

    candidates: list[list[str]]  # of each block, best last; who is asked is taken out
    sizes: Sequence[int]
    results: Sequence[ReadResult]
    unresponsive: Set[str]
    standing: Callable[[str], Standing]
    rates: ReadRates
    under_way: Counter[str]  # attempts of all reads of this client, by server: they share its link
    hedge_s: float
    _asked: dict[str, int] = field(default_factory=dict)  # attempts that have not ended

    def begin(self, positions: Sequence[int], now: float) -> list[Attempt]:
        """What to ask now, for these blocks, which nobody is asked for."""
        candidates, results = self.candidates, self.results
        return self._ask([i for i in positions if candidates[i] and results[i].status is not _HIT])

    def ended(self, attempt: Attempt, now: float) -> list[Attempt]:
        """Its results are there, and nothing writes to its buffers. What to ask next."""
        self._count(attempt.server, -1)
        return self.begin(attempt.positions, now)

    def close(self) -> None:
        """The read has ended, perhaps in the middle: nothing of it is under way any more."""
        for server, asked in self._asked.items():
            self._count(server, -asked)

    def _ask(self, wanted: Sequence[int]) -> list[Attempt]:
        """The next server of each block."""
        attempts = group_by_server(wanted, self.candidates, self.sizes) if wanted else []
        for attempt in attempts:
            self._count(attempt.server, 1)
        return attempts

    def _count(self, server: str, more: int) -> None:
        self._asked[server] = self._asked.get(server, 0) + more
        self.under_way[server] += more
        if not self.under_way[server]:
            del self.under_way[server]


def group_by_server(
    positions: Sequence[int], candidates: list[list[str]], sizes: Sequence[int]
) -> list[Attempt]:
    """Take the next server of each block; blocks of one server go together, in batches.

    Blocks without another replica are kept apart from those that have one: for them `attempt_s`
    counts, not `hedge_s`.
    """
    groups: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for position in positions:
        others = candidates[position]
        groups[others.pop(), bool(others)].append(position)
    return [
        Attempt(server, batch)
        for (server, _), together in groups.items()
        for batch in batches(together, sizes)
    ]


def batches(positions: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive positions in batches that a channel takes in one call."""
    total = sum([sizes[position] for position in positions])
    if len(positions) <= BATCH_BLOCKS_MAX and total <= _BATCH_BYTES:
        return [list(positions)] if positions else []
    batches: list[list[int]] = []
    held = 0
    for position in positions:
        size = sizes[position]
        if not batches or len(batches[-1]) >= BATCH_BLOCKS_MAX or held + size > _BATCH_BYTES:
            batches.append([])
            held = 0
        batches[-1].append(position)
        held += size
    return batches
