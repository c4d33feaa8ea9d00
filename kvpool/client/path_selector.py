"""Which of several paths to a server is the faster one, found out on calls that are made anyway.

Paths inside a host are not compared: memory that both sides map beats a wire. Of those that lead
to other hosts the first is taken until another was measured to be clearly faster. To measure, a
few large calls, one at a time, take the other path, once it is connected; the first of them warms
it up and does not count. The verdict compares what both did in the same moments, so a busy minute
says nothing against either. A path that lost is tried again, ever more rarely.

Pure: no clock and no I/O; `now` is in seconds, of any origin.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Container, Hashable, Sequence
from typing import Final, Generic, TypeVar

P = TypeVar("P", bound=Hashable)

#: A call that moves fewer bytes says more about latency than about speed.
LARGE: Final = 4 << 20
#: Calls that make a verdict; a trial is one longer.
CALLS: Final = 3
#: A path must be this much faster than the one that is taken.
GAIN: Final = 1.25
#: After a trial the next one is so far away, doubling up to the second value while nothing changes.
AGAIN_S: Final = 30.0
AGAIN_S_MAX: Final = 1800.0


class Choice(Generic[P]):
    """The paths to one server, and what they have done so far."""

    def __init__(self, paths: Sequence[P]) -> None:
        self._paths = list(paths)
        self._rates: dict[P, deque[float]] = {path: deque(maxlen=CALLS) for path in paths}
        self._trial: P | None = None
        self._left = 0
        self._out = False
        self._turn = 0
        self._due = 0.0
        self._again_s = AGAIN_S
        #: The path that is taken.
        self.best: P = self._paths[0]

    def __repr__(self) -> str:
        return f"<Choice {self.best!r} of {len(self._paths)}>"

    @property
    def paths(self) -> list[P]:
        """As they were given."""
        return list(self._paths)

    def candidate(self, now: float) -> P | None:
        """The path that the next large call is a trial of, once it is connected."""
        if self._trial is not None:
            return self._trial
        enough = len(self._rates[self.best]) == CALLS  # something to compare with
        others = [path for path in self._paths if path != self.best]
        return others[self._turn % len(others)] if others and enough and now >= self._due else None

    def order(self, size: int, now: float, connected: Container[P]) -> list[P]:
        """Whom to ask to move `size` bytes; the others are for when it fails.

        When the first is not `best`, this call is a trial: `moved` or `gave_up` must be told.
        """
        first = [self.best]
        candidate = self.candidate(now)
        if size >= LARGE and not self._out and candidate is not None and candidate in connected:
            if self._trial is None:
                self._trial = candidate
                self._left = CALLS + 1
                self._rates[candidate].clear()
            self._out = True
            first = [candidate, self.best]
        return first + [path for path in self._paths if path not in first]

    def moved(self, path: P, size: int, seconds: float, now: float) -> bool:
        """A call over `path` took so long; True when it decided that another path is `best`.

        One that is not of these, such as shared memory on the server's own host, is compared with
        none of them.
        """
        if path not in self._rates:
            return False
        trial = path == self._trial
        if trial:
            self._out = False
        if size < LARGE or seconds <= 0:
            return False
        if trial:
            self._left -= 1
        if not trial or self._left < CALLS:  # the first of a trial warms it up
            self._rates[path].append(size / seconds)
        return trial and self._left == 0 and self._judge(path, now)

    def gave_up(self, path: P, now: float) -> None:
        """A call over `path` failed, or was left, or it could not be connected."""
        if path == self.candidate(now):
            self._end(now, self._again_s * 2)

    def check(self) -> None:
        """The invariants: a trial is of another path, and no longer than it may be."""
        assert self.best in self._rates
        assert self._trial is None or self._trial != self.best
        assert self._trial is not None or not self._out
        assert 0 <= self._left <= CALLS + 1

    def _judge(self, path: P, now: float) -> bool:
        new, old = (statistics.median(self._rates[one]) for one in (path, self.best))
        faster = new > GAIN * old
        if faster:
            self.best = path
        self._end(now, AGAIN_S if faster else self._again_s * 2)
        return faster

    def _end(self, now: float, again_s: float) -> None:
        self._turn += 1
        self._due = now + self._again_s
        self._again_s = min(again_s, AGAIN_S_MAX)
        self._trial = None
        self._out = False
        self._left = 0
