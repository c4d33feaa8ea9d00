"""What changes in a pool: rates, a history of an hour, what is moved, and the last events.

Pure: whoever looks at the pool calls `sample` about once a second with what masters know of it. A
server that starts again counts from zero, which is no negative traffic.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from kvpool.ops.tables import problem_of
from kvpool.types import Member

#: Samples that are kept: five minutes of them.
SAMPLES_MAX: Final = 300
#: Of the last hour a point for each 20 s.
HOUR_STEP_S: Final = 20.0
HOUR_POINTS_MAX: Final = 180
EVENTS_MAX: Final = 100
#: Heartbeats and samples are each about a second apart; a mean of so many steps does not flicker.
_STEPS: Final = 3
#: A drain's speed is a mean of so many: it moves in bursts.
_DRAIN_STEPS: Final = 15
#: Counters of bytes that servers move by themselves, and what that is called; and from which rate
#: on it is told.
_FLOWS: Final = {"fetched_bytes": "copies", "prefetched_bytes": "prefetch"}
_FLOW_MIN: Final = 1024.0


class AskedTotals(NamedTuple):
    """What clients asked one master for since it started."""

    asked_blocks: int = 0
    found_blocks: int = 0
    refusals: int = 0
    #: Matches by what ended them.
    stopped: Mapping[str, int] = MappingProxyType({})


class UnderWay(NamedTuple):
    """Blocks that a server moves. `move` is `drain` (to other servers), `copies` (from others) or
    `prefetch` (up from a disk).

    `left_bytes` is None where nobody knows what is still to come, `left_s` also while nothing
    moves.
    """

    server: str
    move: str
    bytes_s: float
    moved_bytes: int = 0
    left_bytes: int | None = None
    left_s: float | None = None


class WatchEvent(NamedTuple):
    """Something that happened: `at` on the clock of the samples, a word, and a sentence."""

    at: float
    server: str
    event: str
    text: str


class Point(NamedTuple):
    """One step of the history; `hit_rate` is None where nothing was asked for."""

    at: float
    read_bytes_s: float
    written_bytes_s: float
    hit_rate: float | None
    used: int


class _Total(NamedTuple):
    at: float
    read: int
    written: int
    asked: int
    found: int
    stopped: Mapping[str, int]


class _Seen(NamedTuple):
    """A server at the last sample."""

    epoch: int
    alive: bool
    left: bool
    draining: bool
    broken: dict[str, str]  # tiers out of service, or that take no writes
    read: int
    written: int
    flows: tuple[int, ...]  # as _FLOWS


class _Drain:
    """How far one drain is. `most` is what was left when it began."""

    def __init__(self) -> None:
        self.most = 0
        self._left: deque[tuple[float, int]] = deque(maxlen=_DRAIN_STEPS)

    def sample(self, now: float, left: int) -> None:
        self.most = max(self.most, left)
        self._left.append((now, left))

    def under_way(self, server: str) -> UnderWay:
        (began, first), (now, left) = self._left[0], self._left[-1]
        rate = (first - left) / (now - began) if now > began and first > left else 0.0
        left_s = 0.0 if not left else left / rate if rate else None
        return UnderWay(server, "drain", rate, self.most - left, left, left_s)


class PoolWatch:
    """Holds at most SAMPLES_MAX points of the last minutes and HOUR_POINTS_MAX of the last hour,
    EVENTS_MAX events, and a few numbers for each server."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=SAMPLES_MAX)
        self.hour: deque[Point] = deque(maxlen=HOUR_POINTS_MAX)
        self.events: deque[WatchEvent] = deque(maxlen=EVENTS_MAX)
        #: Bytes per second of each server, read and written, as of the last sample.
        self.rates: dict[str, tuple[float, float]] = {}
        self._totals: deque[_Total] = deque(maxlen=_STEPS + 1)
        self._hour_totals: deque[_Total] = deque(maxlen=HOUR_POINTS_MAX + 1)
        self._means: dict[str, tuple[float, ...]] = {}  # as _moved
        self._drains: dict[str, _Drain] = {}
        self._seen: dict[str, _Seen] = {}
        self._refusals = 0

    def sample(self, now: float, members: Sequence[Member], asked: AskedTotals) -> None:
        """Note what is different from the sample before."""
        first = not self._totals
        read = written = 0
        last = self._totals[-1] if self._totals else _Total(now, 0, 0, *asked[:2], {})
        seconds = now - last.at
        seen: dict[str, _Seen] = {}
        for member in members:
            known = self._seen.get(member.server)
            one = seen[member.server] = _seen(member)
            if not first and (known is None or known[:5] != one[:5]):
                for event, text in _differences(known, one):
                    self.events.append(WatchEvent(now, member.server, event, text))
            moved = _moved(known, one)
            read, written = read + moved[0], written + moved[1]
            before = self._means.get(member.server)
            means = _mean(before, moved, seconds if member.alive else 0.0)
            self._means[member.server], self.rates[member.server] = means, (means[0], means[1])
            if member.alive and member.stats.draining:
                drain = self._drains.setdefault(member.server, _Drain())
                drain.sample(now, member.stats.drain_left_bytes)
            else:
                self._drains.pop(member.server, None)
        for server in self._seen.keys() - seen.keys():
            self.events.append(WatchEvent(now, server, "forgotten", "its record is dropped"))
            self.rates.pop(server, None)
            self._means.pop(server, None)
            self._drains.pop(server, None)
        if asked.refusals > self._refusals and not first:
            text = f"{asked.refusals - self._refusals} messages were refused: see the master's log"
            self.events.append(WatchEvent(now, "", "refused", text))
        self._seen, self._refusals = seen, asked.refusals
        total = _Total(now, last.read + read, last.written + written, *asked[:2], asked.stopped)
        self._totals.append(total)
        used = sum(member.stats.used for member in members if member.alive)
        if not first:
            self.points.append(_point(self._totals[0], total, used))
        if first:
            self._hour_totals.append(total)
        elif now - self._hour_totals[-1].at >= HOUR_STEP_S:
            self.hour.append(_point(self._hour_totals[-1], total, used))
            self._hour_totals.append(total)

    def under_way(self) -> list[UnderWay]:
        """What servers move now: drains first, then what is fastest."""
        flows = [
            UnderWay(server, move, rate)
            for server, means in self._means.items()
            for move, rate in zip(_FLOWS.values(), means[2:], strict=True)
            if rate >= _FLOW_MIN
        ]
        drains = [drain.under_way(server) for server, drain in sorted(self._drains.items())]
        return drains + sorted(flows, key=lambda one: (-one.bytes_s, one.server))

    def last_hour(self) -> tuple[float, AskedTotals]:
        """Seconds, an hour at most, and what clients asked for in them. Empty before a sample."""
        if not self._totals:
            return 0.0, AskedTotals()
        first, last = self._hour_totals[0], self._totals[-1]
        stopped = Counter(last.stopped)
        stopped.subtract(first.stopped)
        asked, found = last.asked - first.asked, last.found - first.found
        return last.at - first.at, AskedTotals(asked, found, stopped=+stopped)


def _mean(
    before: Sequence[float] | None, moved: Sequence[float], seconds: float
) -> tuple[float, ...]:
    """Rates as means over some steps."""
    if seconds <= 0:
        return (0.0,) * len(moved)
    share = 1 / _STEPS
    known = before or (0.0,) * len(moved)
    return tuple(
        rate + share * (size / seconds - rate) for rate, size in zip(known, moved, strict=True)
    )


def _point(first: _Total, last: _Total, used: int) -> Point:
    """The mean between two."""
    seconds = max(1e-3, last.at - first.at)
    asked = last.asked - first.asked
    return Point(
        last.at,
        (last.read - first.read) / seconds,
        (last.written - first.written) / seconds,
        (last.found - first.found) / asked if asked > 0 else None,
        used,
    )


def _seen(member: Member) -> _Seen:
    counters: Mapping[str, int] = member.stats.counters
    return _Seen(
        member.epoch,
        member.alive,
        member.left,
        member.stats.draining,
        {tier.name: text for tier in member.stats.usage if (text := problem_of(tier))},
        counters.get("read_bytes", 0),
        counters.get("written_bytes", 0),
        tuple(counters.get(name, 0) for name in _FLOWS),
    )


def _moved(known: _Seen | None, now: _Seen) -> list[int]:
    """Bytes read, written and moved since; of a server that is new here nothing is known."""
    if known is None:
        return [0] * (2 + len(_FLOWS))
    before = (0,) * (2 + len(_FLOWS))
    if known.epoch == now.epoch:
        before = (known.read, known.written, *known.flows)
    return [
        max(0, count - was)
        for count, was in zip((now.read, now.written, *now.flows), before, strict=True)
    ]


def _differences(known: _Seen | None, now: _Seen) -> Iterator[tuple[str, str]]:
    if known is None:
        yield "joined", "it has registered"
        return
    if now.alive and known.left:
        yield "back", "it had ended in order, and has registered again"
    elif known.epoch != now.epoch:
        yield "restarted", "it has registered again"
    elif now.alive and not known.alive:
        yield "back", "its heartbeats come again"
    if now.left and not known.left:
        yield "left", "it has ended in order"
    elif known.alive and not now.alive:
        yield "lost", "no heartbeat comes"
    if now.draining and not known.draining:
        yield "leaving", "its blocks go to other servers"
    if known.draining and not now.draining and now.alive and known.epoch == now.epoch:
        yield "stays", "its drain is cancelled"
    for tier, text in now.broken.items():
        if known.broken.get(tier) != text:
            yield "tier", f"tier {tier} {text}"
    for tier in known.broken.keys() - now.broken.keys():
        yield "tier", f"tier {tier} works again"
