"""Which of several paths to another host is the faster one, measured on calls that are made anyway.

Paths inside a host are not compared: memory that both sides map beats a network. Of the remote
paths the first is taken until another was measured to be clearly faster. To measure, a few large
calls, one at a time, take the other path, once it is connected; the first of them warms it up and
does not count. Both paths are compared over the same moments, so a busy minute does not count
against either. A path that was slower is tried again, more and more rarely
(design: path-selection).

Pure: no clock and no I/O; `now` is in seconds, of any origin.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Container, Hashable, Sequence
from typing import Final, Generic, TypeVar

P = TypeVar("P", bound=Hashable)

#: A call that moves fewer bytes measures latency more than speed.
LARGE: Final = 4 << 20
#: Calls that are compared; a trial is one call longer.
CALLS: Final = 3
#: A path must be this much faster than the best one, to replace it.
GAIN: Final = 1.25
#: Time from one trial to the next, doubling up to the second value while the best path stays.
AGAIN_S: Final = 30.0
AGAIN_S_MAX: Final = 1800.0


class PathSelector(Generic[P]):
    """The remote paths to one server, and how fast they were.

    | state   | `candidate`                 | `select` of a large call | leaves it when           |
    |---------|-----------------------------|--------------------------|--------------------------|
    | settled | the next path, but None     | `best`, or the candidate | a call takes the         |
    |         | before `next_trial_at`      | if it is connected       | candidate                |
    | trial   | the path that is tried      | the candidate, while no  | `CALLS + 1` calls ended, |
    |         |                             | other call is on it      | or one failed            |
    """

    def __init__(self, paths: Sequence[P]) -> None:
        self._paths = list(paths)
        self._rates: dict[P, deque[float]] = {path: deque(maxlen=CALLS) for path in paths}
        self._trial: P | None = None
        self._calls_left = 0
        self._trial_running = False  # one call of the trial is under way
        self._next_path = 0
        self._next_trial_at = 0.0
        self._again_s = AGAIN_S
        #: The path that is taken.
        self.best: P = self._paths[0]

    def __repr__(self) -> str:
        return f"<PathSelector {self.best!r} of {len(self._paths)}>"

    @property
    def paths(self) -> list[P]:
        """As they were given."""
        return list(self._paths)

    def candidate(self, now: float) -> P | None:
        """The path that the next large call is a trial of, once it is connected."""
        if self._trial is not None:
            return self._trial
        measured = len(self._rates[self.best]) == CALLS  # something to compare with
        others = [path for path in self._paths if path != self.best]
        if not others or not measured or now < self._next_trial_at:
            return None
        return others[self._next_path % len(others)]

    def select(self, size: int, now: float, connected: Container[P]) -> list[P]:
        """The paths for a call that moves `size` bytes; those behind the first are for failures.

        Changes the state when the first is not `best`: then the call is one of a trial, and
        `record` or `record_failure` must follow.
        """
        first = [self.best]
        candidate = self.candidate(now)
        if (
            size >= LARGE
            and not self._trial_running
            and candidate is not None
            and candidate in connected
        ):
            if self._trial is None:
                self._trial = candidate
                self._calls_left = CALLS + 1
                self._rates[candidate].clear()
            self._trial_running = True
            first = [candidate, self.best]
        return first + [path for path in self._paths if path not in first]

    def record(self, path: P, size: int, seconds: float, now: float) -> bool:
        """A call over `path` took so long; True when another path became `best` by it.

        A path that is not one of these, such as shared memory inside the server's host, is not
        compared with them.
        """
        if path not in self._rates:
            return False
        trial = path == self._trial
        if trial:
            self._trial_running = False
        if size < LARGE or seconds <= 0:
            return False
        if trial:
            self._calls_left -= 1
        if not trial or self._calls_left < CALLS:  # the first of a trial warms it up
            self._rates[path].append(size / seconds)
        return trial and self._calls_left == 0 and self._compare(path, now)

    def record_failure(self, path: P, now: float) -> None:
        """A call over `path` failed or was cancelled, or the path could not be connected."""
        if path == self.candidate(now):
            self._end_trial(now, self._again_s * 2)

    def check(self) -> None:
        """The invariants: a trial is of another path, and no longer than it may be."""
        assert self.best in self._rates
        assert self._trial is None or self._trial != self.best
        assert self._trial is not None or not self._trial_running
        assert 0 <= self._calls_left <= CALLS + 1

    def _compare(self, path: P, now: float) -> bool:
        # The median: one call that had to wait for another must not decide.
        new, old = (statistics.median(self._rates[one]) for one in (path, self.best))
        faster = new > GAIN * old
        if faster:
            self.best = path
        self._end_trial(now, AGAIN_S if faster else self._again_s * 2)
        return faster

    def _end_trial(self, now: float, again_s: float) -> None:
        self._next_path += 1
        self._next_trial_at = now + self._again_s
        self._again_s = min(again_s, AGAIN_S_MAX)
        self._trial = None
        self._trial_running = False
        self._calls_left = 0
