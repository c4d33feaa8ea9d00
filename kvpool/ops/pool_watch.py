"""What changes in a pool: rates, a history of some minutes, and the last events.

Pure: whoever looks at the pool calls `sample` about once a second with what masters know of it. A
server that starts again counts from zero, which is no negative traffic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from kvpool.ops.tables import problem_of
from kvpool.types import Member

#: Samples that are kept: five minutes of them.
SAMPLES_MAX: Final = 300
EVENTS_MAX: Final = 100
#: Heartbeats and samples are each about a second apart; a mean of so many steps does not flicker.
_STEPS: Final = 3


class ServerState(Enum):
    """What an operator calls a server. LATE: heartbeats are missing, and it still counts as up.
    LEFT: it has ended in order, and may come back."""

    UP = "up"
    LATE = "late"
    LEAVING = "leaving"
    LEFT = "left"
    LOST = "lost"


#: A heartbeat comes once a second by default; after this one and a half are missing.
LATE_S: Final = 1.5


def state_of(member: Member, late_s: float = LATE_S) -> ServerState:
    """The state of a server, as masters know it."""
    if not member.alive:
        return ServerState.LEFT if member.left else ServerState.LOST
    if member.heard_s > late_s:
        return ServerState.LATE
    return ServerState.LEAVING if member.stats.draining else ServerState.UP


class AskedTotals(NamedTuple):
    """What clients asked one master for since it started."""

    asked_blocks: int = 0
    found_blocks: int = 0
    refusals: int = 0


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


class _Seen(NamedTuple):
    """A server at the last sample."""

    epoch: int
    alive: bool
    left: bool
    draining: bool
    broken: dict[str, str]  # tiers out of service, or that take no writes
    read: int
    written: int


class PoolWatch:
    """Holds at most SAMPLES_MAX points, EVENTS_MAX events, and a few numbers for each server."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=SAMPLES_MAX)
        self.events: deque[WatchEvent] = deque(maxlen=EVENTS_MAX)
        #: Bytes per second of each server, read and written, as of the last sample.
        self.rates: dict[str, tuple[float, float]] = {}
        self._totals: deque[_Total] = deque(maxlen=_STEPS + 1)
        self._seen: dict[str, _Seen] = {}
        self._refusals = 0

    def sample(self, now: float, members: Sequence[Member], asked: AskedTotals) -> None:
        """Note what is different from the sample before."""
        first = not self._totals
        read = written = 0
        last = self._totals[-1] if self._totals else _Total(now, 0, 0, *asked[:2])
        seconds = now - last.at
        seen: dict[str, _Seen] = {}
        for member in members:
            known = self._seen.get(member.server)
            one = seen[member.server] = _seen(member)
            if not first and (known is None or known[:5] != one[:5]):
                for event, text in _differences(known, one):
                    self.events.append(WatchEvent(now, member.server, event, text))
            came, went = _moved(known, one)
            read, written = read + came, written + went
            self._smooth(member.server, member.alive, came, went, seconds)
        for server in self._seen.keys() - seen.keys():
            self.events.append(WatchEvent(now, server, "forgotten", "its record is dropped"))
            self.rates.pop(server, None)
        if asked.refusals > self._refusals and not first:
            text = f"{asked.refusals - self._refusals} messages were refused: see the master's log"
            self.events.append(WatchEvent(now, "", "refused", text))
        self._seen, self._refusals = seen, asked.refusals
        self._totals.append(_Total(now, last.read + read, last.written + written, *asked[:2]))
        if not first:
            used = sum(member.stats.used for member in members if member.alive)
            self.points.append(self._point(used))

    def _smooth(self, server: str, alive: bool, came: int, went: int, seconds: float) -> None:
        if seconds <= 0 or not alive:
            self.rates[server] = (0.0, 0.0)
            return
        before = self.rates.get(server, (0.0, 0.0))
        share = 1 / _STEPS
        now = (came / seconds, went / seconds)
        self.rates[server] = (
            before[0] + share * (now[0] - before[0]),
            before[1] + share * (now[1] - before[1]),
        )

    def _point(self, used: int) -> Point:
        """The mean of the last steps."""
        first, last = self._totals[0], self._totals[-1]
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
    )


def _moved(known: _Seen | None, now: _Seen) -> tuple[int, int]:
    """Bytes read and written since; of a server that is new here nothing is known."""
    if known is None:
        return 0, 0
    restarted = known.epoch != now.epoch
    before = (0, 0) if restarted else (known.read, known.written)
    return max(0, now.read - before[0]), max(0, now.written - before[1])


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
