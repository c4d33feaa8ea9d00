"""The scheduler half's lookups: started and taken by the engine's thread, which never waits long.

While the pool is silent, requests do not wait for their lookups: one at a time goes on without a
request, and its answer ends the silence. (design: pool-thread)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvpool import KvpoolError, Match, MatchPoller, Namespace, ReadStatus
from kvpool.backoff import Backoff
from kvpool_connector.records.values import LookupRequest

#: After so many lookups in a row without an answer in time the pool is silent, for `_PAUSE_S` at
#: least, doubled when the first lookup after it is late as well.
_SILENT_AFTER: Final = 3
_PAUSE_S: Final = 0.5
_PAUSE_S_MAX: Final = 5.0
#: Between two reports of the metrics.
_DURATIONS_MAX: Final = 4096
#: Why a lookup ended without an answer, labels of a metric: the request has waited as long as it
#: may; the workers have not reported yet, so there are no names to ask for; no master is connected,
#: or each one refused; earlier lookups were late.
LATE: Final = "lookup timeout"
NO_NAMESPACE: Final = "no namespace"
NO_MASTER: Final = "no master"
SILENT: Final = "silent pool"
LATE_REASONS: Final = (LATE, NO_NAMESPACE, NO_MASTER, SILENT)


class LookupResult(NamedTuple):
    """The answer to a `LookupRequest`: a match for each group, or none and the reason."""

    request_id: str
    serial: int
    matches: tuple[Match, ...]
    reason: str


class _Waiting(NamedTuple):
    """A lookup that a request waits for."""

    request_id: str
    began: float


class Lookups:
    """Asks masters for one engine, and notices when none answers."""

    def __init__(
        self, poller: MatchPoller, connect_wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._poller = poller
        self._connect_wait_s = connect_wait_s
        self._clock = clock
        self._first_at: float | None = None
        #: By serial, those that a request waits for. What else the poller has runs on alone.
        self._waiting: dict[int, _Waiting] = {}
        self._results: list[LookupResult] = []  # not taken yet
        #: How long requests waited for lookups, in seconds; the owner takes them out.
        self.durations: deque[float] = deque(maxlen=_DURATIONS_MAX)
        self._late = 0  # in a row
        self._answered = False  # since the last late one
        self._pause = Backoff(_PAUSE_S, _PAUSE_S_MAX)
        self._silent_until = 0.0

    @property
    def waiting(self) -> bool:
        """A request waits for a lookup."""
        return bool(self._waiting)

    def start(self, lookup: LookupRequest, namespaces: Sequence[Namespace]) -> str:
        """Start a lookup. Returns why its request need not wait for it, as a rule "" (it must)."""
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
        silent = self._is_silent(now)
        if silent:
            self._poll(0.0)  # an answer that has come meanwhile counts for this request already
            silent = self._is_silent(now)
        if silent and len(self._poller):
            return SILENT
        try:
            groups = range(len(namespaces)) if lookup.groups is None else lookup.groups
            asked = [namespaces[group] for group in groups]
            chains = list(zip(asked, lookup.chains, strict=True))
            self._poller.start(lookup.serial, chains, lookup.session)
        except KvpoolError as error:
            return type(error).__name__
        if silent:
            return SILENT
        if not self._is_connecting(now) and not self._poller.is_sent(lookup.serial):
            return NO_MASTER
        self._waiting[lookup.serial] = _Waiting(lookup.request_id, now)
        return ""

    def take(self, wait_s: float = 0.0) -> list[LookupResult]:
        """The lookups that have ended. Waits for one at most `wait_s` (up to 5 ms) if none has."""
        self._poll(0.0 if self._results else wait_s)
        results, self._results = self._results, []
        return results

    def give_up(self, serial: int) -> str:
        """The request of this lookup waits no longer. Returns why there was no answer."""
        self._stop_waiting(serial)
        self._count_late()
        return LATE if self._poller.is_sent(serial) else NO_MASTER

    def close(self) -> None:
        self._poller.close()

    def _poll(self, wait_s: float) -> None:
        for serial, matches in self._poller.poll(wait_s):
            assert isinstance(serial, int)
            answered = not any(match.stopped is ReadStatus.NO_MASTER for match in matches)
            self._answered |= answered
            waiting = self._stop_waiting(serial)
            if waiting is None:
                continue
            if answered:
                self._late = 0
                self._pause.reset()
            else:
                self._count_late()
            self._results.append(LookupResult(waiting.request_id, serial, matches, NO_MASTER))
        if self._waiting and not self._poller.connected and not self._is_connecting(self._clock()):
            for serial in tuple(self._waiting):
                if (waiting := self._stop_waiting(serial)) is not None:
                    self._results.append(LookupResult(waiting.request_id, serial, (), NO_MASTER))

    def _stop_waiting(self, serial: int) -> _Waiting | None:
        """What was waited for under this serial; counts how long."""
        waiting = self._waiting.pop(serial, None)
        if waiting is not None:
            self.durations.append(self._clock() - waiting.began)
        return waiting

    def _is_connecting(self, now: float) -> bool:
        """No master was ever connected, and the first lookup began a moment ago."""
        since = now if self._first_at is None else self._first_at
        return not self._poller.connected and now < since + self._connect_wait_s

    def _count_late(self) -> None:
        self._late += 1
        self._answered = False
        if self._late >= _SILENT_AFTER:
            # Otherwise every request would wait for its own timeout.
            self._silent_until = self._clock() + self._pause.next_delay()

    def _is_silent(self, now: float) -> bool:
        if self._late < _SILENT_AFTER:
            return False
        if now < self._silent_until or not self._answered:
            return True
        # One more that is late, and the pool is silent again.
        self._late = _SILENT_AFTER - 1
        return False
