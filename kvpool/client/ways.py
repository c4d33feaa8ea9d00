"""Which server brings which blocks of a read, when several have them: pure.

Each server that holds a block, and that is reached over a network, is a *way* for it. Blocks with
several ways wait together. A way that is idle takes a piece of them, which no other way has then;
the faster it was lately, the larger is the piece. So all ways end at about the same time. A way
that brought nothing, was silent, or is much slower than an idle one, is left: what it had waits
again (design: hedging). Reads of one client share the links: each counts on its share.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.client.attempts import PRIOR_FAR_RATE, Attempt, Attempts
from kvpool.types import BATCH_BLOCKS_MAX, SHARED_BYTES_MIN, ReadStatus

_HIT = ReadStatus.HIT
#: A piece takes so long at least, or messages cost more than a tenth of it.
_PIECE_S: Final = 0.005
#: What all ways bring in so many of that, each brings as one last piece, of this much at least.
_LAST: Final = 0.4, 4
_PIECE_BYTES_MIN: Final = 1 << 20
_PIECE_BYTES_MAX: Final = 128 << 20
#: Ways of one block: each is a connection to another server.
_WAYS_MAX: Final = 8
#: A way is left for an idle one that would have brought the piece in this part of the time: some of
#: the piece has arrived, and is thrown away.
_LEAVE_AFTER: Final = 2.0
#: A rate holds so long: then a slow way is tried again.
_RATE_HOLDS_S: Final = 30.0


class _Piece(NamedTuple):
    """What a way is bringing. `sharers`: the pieces that shared its link when this one began."""

    ways: tuple[str, ...]
    size: int
    began: float
    sharers: int


@dataclass(slots=True)
class Ways(Attempts):
    """The plan of one read, which shares it among all good ways.

    A block waits in `_waiting` until one of its ways is idle, or fewer than two are good. It is
    asked in one `Attempt` at a time: its buffer has one writer. `ended` lets it wait again unless
    it is read, or has no candidate any more.
    """

    _waiting: dict[tuple[str, ...], deque[int]] = field(default_factory=dict)
    _bytes: dict[tuple[str, ...], int] = field(default_factory=dict)  # that wait
    _pieces: dict[str, _Piece] = field(default_factory=dict)
    _fruitless: set[str] = field(default_factory=set)

    def begin(self, positions: Sequence[int], now: float) -> list[Attempt]:
        """What to ask now, for these blocks, which nobody is asked for, and for those that wait."""
        candidates, results = self.candidates, self.results
        wanted = [i for i in positions if candidates[i] and results[i].status is not _HIT]
        for ways in [one for one in self._waiting if sum(map(self._is_good, one)) < 2]:
            wanted += self._waiting.pop(ways)
            del self._bytes[ways]
        if self._fruitless or self.unresponsive:
            for position in wanted:
                candidates[position].sort(key=self._is_good)
        if self._waiting or (
            sum([self.sizes[i] for i in wanted]) >= SHARED_BYTES_MIN
            and max(map(len, map(candidates.__getitem__, wanted))) > 1
        ):
            wanted = self._share(wanted)
        attempts = self._ask(wanted)
        return attempts + self._take(now) if self._waiting else attempts

    def ended(self, attempt: Attempt, now: float) -> list[Attempt]:
        """Its results are there, and nothing writes to its buffers. What to ask next."""
        server, positions, overdue = attempt
        sharers = self._sharers(server)
        self._count(server, -1)
        if overdue is not None:
            _, _, began, sharers_then = self._pieces.pop(server)
            moved = sum([one.size for i in positions if (one := self.results[i]).status is _HIT])
            if not moved:
                self._fruitless.add(server)
            if moved or server in self.unresponsive:
                alone_s = (now - began) * 2 / (sharers_then + sharers)
                self.rates.record(server, moved, alone_s, now)
        return self.begin(positions, now)

    def _sharers(self, server: str) -> int:
        """One attempt of this read, and those of others, which share the link."""
        return 1 + self.under_way[server] - self._asked.get(server, 0)

    def _is_good(self, server: str) -> bool:
        return server not in self._fruitless and server not in self.unresponsive

    def _share(self, positions: Sequence[int]) -> list[int]:
        """Have blocks with several good ways wait; the others."""
        good_ways, others = functools.cache(self._good_ways), list[int]()
        for position in positions:
            if len(ways := good_ways(tuple(self.candidates[position]))) < 2:
                others.append(position)
            else:
                self._waiting.setdefault(ways, deque()).append(position)
                self._bytes[ways] = self._bytes.get(ways, 0) + self.sizes[position]
        return others

    def _good_ways(self, candidates: tuple[str, ...]) -> tuple[str, ...]:
        """Those that are as good as the best. Memory of this host needs no help."""
        best = self.standing(candidates[-1])
        if len(candidates) < 2 or best.ailing or not best.networked:
            return ()
        same = [s for s in candidates if self._is_good(s) and self.standing(s) == best]
        return tuple(same[-_WAYS_MAX:])

    def _take(self, now: float) -> list[Attempt]:
        """A piece for each idle way, the fastest first."""
        ways = {way for ways in self._waiting for way in ways if self._is_good(way)}
        known = {way: rate for way in ways if (rate := self.rates.rate(way, now - _RATE_HOLDS_S))}
        new = max(known.values(), default=PRIOR_FAR_RATE)
        rates = {way: known.get(way, new) / self._sharers(way) for way in ways}
        idle = sorted((w for w in ways if not self._asked.get(w)), key=lambda w: (-rates[w], w))
        pieces = [self._piece(way, rates, way in known, now) for way in idle]
        return [piece for piece in pieces if piece is not None]

    def _piece(
        self, way: str, rates: dict[str, float], is_known: bool, now: float
    ) -> Attempt | None:
        """The next piece of one way: of the blocks that the fewest others can bring."""
        ways = min((one for one in self._waiting if way in one), key=len, default=None)
        if ways is None:
            return None
        speeds = {one: rates[one] for one in ways if one in rates}
        waiting, rest, rate = self._waiting[ways], self._bytes[ways], rates[way]
        together = sum(speeds.values())
        busy = [  # until when, in seconds, and how fast
            (max(0.0, piece.began + piece.size / speeds[one] - now), speeds[one])
            for one, piece in self._pieces.items()
            if one in speeds
        ]
        # Half of its share: the last pieces are small. A new way shows first how fast it is.
        share = rest * rate / together / 2 if is_known else 0
        wanted = min(share, rate * self.hedge_s / _LEAVE_AFTER, _PIECE_BYTES_MAX)
        # The last ones are so large that all ways end together.
        last = rate * (rest + sum([left_s * speed for left_s, speed in busy])) / together
        least = rate * _PIECE_S
        if last < least * (_LAST[1] if is_known else 1):
            least = max(last, least * _LAST[0])
        wanted = min(max(wanted, least, _PIECE_BYTES_MIN), rest, _PIECE_BYTES_MAX)
        if any(left_s + rest / speed < wanted / rate for left_s, speed in busy):
            return None  # that way will have brought all by then
        positions, size = list[int](), 0
        while waiting and size < wanted and len(positions) < BATCH_BLOCKS_MAX:
            positions.append(waiting.popleft())
            size += self.sizes[positions[-1]]
            self.candidates[positions[-1]].remove(way)
        self._bytes[ways] -= size
        if not waiting:
            del self._waiting[ways], self._bytes[ways]
        self._pieces[way] = _Piece(ways, size, now, self._sharers(way))
        self._count(way, 1)
        return Attempt(way, positions, functools.partial(self._overdue, way))

    def _overdue(self, way: str, now: float) -> bool:
        piece = self._pieces[way]
        idle = [one for one in piece.ways if not self._asked.get(one) and self._is_good(one)]
        rate, sharers = self.rates.rate, self._sharers
        speed = max(((rate(one) or PRIOR_FAR_RATE) / sharers(one) for one in idle), default=0.0)
        passed = now - piece.began
        alone = passed / sharers(way)  # reads that share its link do not make it slow
        return passed >= self.hedge_s and alone * speed >= piece.size * _LEAVE_AFTER
