"""The scheduler half's lookups: started and taken by the engine's thread, which never waits long.

While the pool is silent, requests do not wait for their lookups: one at a time goes on without a
request, and its answer ends the silence. (design: pool-thread)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvpool import KvpoolError, Match, MatchPoller, ReadStatus
from kvpool.backoff import Backoff
from kvpool_connector.identity.naming import EngineNames
from kvpool_connector.plan.planner import Planner
from kvpool_connector.records.values import LookupRequest
from kvpool_connector.scheduler.pool_messages import PoolMessages
from kvpool_connector.scheduler.sharing_watch import LATE, NO_MASTER, NO_NAMESPACE, SILENT
from kvpool_engines.pool_thread import START_WAIT_S

#: After so many lookups in a row without an answer in time the pool is silent, for `_PAUSE_S` at
#: least, doubled when the first lookup after it is late as well.
_SILENT_AFTER: Final = 3
_PAUSE_S: Final = 0.5
_PAUSE_S_MAX: Final = 5.0
#: Between two reports of the metrics.
_DURATIONS_MAX: Final = 4096
#: A master answers within a millisecond as a rule. Where the engine computes for other requests, a
#: lookup that is not waited for so long costs its request a whole step. So long in all per step.
_WAIT_S: Final = 0.001


class _Silence:
    """Whether the pool is silent: lookups are late, one after the other."""

    def __init__(self) -> None:
        self._late = 0  # in a row
        self._answered = False  # since the last late one
        self._pause = Backoff(_PAUSE_S, _PAUSE_S_MAX)
        self._until = 0.0

    def on_late(self, now: float) -> None:
        self._late += 1
        self._answered = False
        if self._late >= _SILENT_AFTER:
            # Otherwise every request would wait for its own timeout.
            self._until = now + self._pause.next_delay()

    def on_answer(self, *, in_time: bool) -> None:
        self._answered = True
        if in_time:
            self._late = 0
            self._pause.reset()

    def is_on(self, now: float) -> bool:
        if self._late < _SILENT_AFTER:
            return False
        if now < self._until or not self._answered:
            return True
        # One more that is late, and the pool is silent again.
        self._late = _SILENT_AFTER - 1
        return False


@dataclass
class Lookups:
    """Asks masters what the planner of one engine wants to look up, gives it the answers, and
    notices when none comes.

    Names come with the first step, which may be slow: that is no reason to miss. So lookups are
    held for `START_WAIT_S` at most, and their own time begins when there are names.
    """

    _planner: Planner
    _names: EngineNames
    _poller: MatchPoller
    _messages: PoolMessages
    _clock: Callable[[], float]
    #: By serial, until there are names; and when they are held no longer, with or without names.
    _held: dict[int, LookupRequest] = field(default_factory=dict)
    names_by: float = math.inf
    _wait_left_s: float = _WAIT_S
    _first_at: float | None = None
    #: By serial, the requests that wait for a lookup, and since when. What else the poller has runs
    #: on alone.
    _waiting: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: Not given to the planner yet.
    _answers: list[tuple[str, int, tuple[Match, ...]]] = field(default_factory=list)
    #: How long requests waited for lookups, in seconds; the owner takes them out.
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_DURATIONS_MAX))
    _silence: _Silence = field(default_factory=_Silence)

    @property
    def waiting(self) -> bool:
        """A request waits for a lookup."""
        return bool(self._waiting)

    def start(self, lookup: LookupRequest | None) -> None:
        if lookup is None:
            return
        now = self._clock()
        if self._names.namespaces:
            reason = self._ask(lookup, now)
        else:
            self.names_by = min(self.names_by, now + START_WAIT_S)
            reason = NO_NAMESPACE if self._names.problem or now > self.names_by else ""
            if not reason:
                self._planner.lookups.began(lookup.request_id, self.names_by)
                self._held[lookup.serial] = lookup
        if reason:
            self._planner.lookups.on_result(lookup.request_id, lookup.serial, (), reason)

    def take(self, wait_s: float = 0.0) -> None:
        """Give the planner what has been answered. Waits for one answer at most `wait_s` (up to
        5 ms) if there is none."""
        self._poll(0.0 if self._answers else wait_s)
        answers, self._answers = self._answers, []
        for request_id, serial, matches in answers:
            self.start(self._planner.lookups.on_result(request_id, serial, matches, NO_MASTER))

    def take_for(self, request_id: str) -> None:
        """The same, for a request that may wait a moment: as long as the hooks of a step may."""
        self.take()
        if self.waiting and self._planner.lookups.is_running(request_id) and self._wait_left_s > 0:
            began = time.perf_counter()
            self.take(_WAIT_S)
            self._wait_left_s -= time.perf_counter() - began

    def end_late(self, request_id: str, tokens: int, computed: int, now: float) -> None:
        """A request whose lookup takes longer than it may goes on without its answer."""
        late = self._planner.lookups.late(request_id, tokens, computed, now)
        if late is None:
            return
        reason = NO_NAMESPACE
        if self._held.pop(late, None) is None:
            self._stop_waiting(late)
            self._silence.on_late(self._clock())
            reason = LATE if self._poller.is_sent(late) else NO_MASTER
        self._planner.lookups.on_result(request_id, late, (), reason)

    def waits_for_names(self, request_id: str, now: float) -> bool:
        """Whether a request that is not looked up waits until its blocks have a name.

        An engine that only saves would otherwise compute its first prompt before there are names,
        and a prompt that generates one token ends with that step: it would never be saved.
        """
        named = self._names.namespaces or self._names.problem
        if named or self._planner.lookups.is_running(request_id):
            return False
        self.names_by = min(self.names_by, now + START_WAIT_S)
        return now < self.names_by and self._planner.wants_names(request_id)

    def on_step(self) -> None:
        """A new step: its hooks may wait once more."""
        self._wait_left_s = _WAIT_S

    def on_names(self) -> None:
        """The blocks have a name: what was held begins now."""
        held, self._held = self._held, {}
        for lookup in held.values():
            self._planner.lookups.began(lookup.request_id, self._clock())
            self.start(lookup)

    def reset(self) -> None:
        """The blocks have no name any more. What was held is looked up by nobody."""
        self._held.clear()
        self.names_by = math.inf

    def close(self) -> None:
        self._poller.close()

    # --- inside -----------------------------------------------------------------------------

    def _ask(self, lookup: LookupRequest, now: float) -> str:
        """Returns why its request need not wait for the answer, as a rule "" (it must)."""
        if lookup.session:
            self._messages.request_waits(lookup.request_id, lookup.session, now)
        if self._first_at is None:
            self._first_at = now
        silent = self._silence.is_on(now)
        if silent:
            self._poll(0.0)  # an answer that has come meanwhile counts for this request already
            silent = self._silence.is_on(now)
        if silent and len(self._poller):
            return SILENT
        namespaces = self._names.namespaces
        try:
            groups = range(len(namespaces)) if lookup.groups is None else lookup.groups
            asked = [namespaces[group] for group in groups]
            chains = list(zip(asked, lookup.chains, strict=True))
            self._poller.start(lookup.serial, chains, lookup.session)
        except KvpoolError as error:
            return type(error).__name__
        if silent:
            return SILENT
        if not self._may_connect(now) and not self._poller.is_sent(lookup.serial):
            return NO_MASTER
        self._waiting[lookup.serial] = lookup.request_id, now
        return ""

    def _poll(self, wait_s: float) -> None:
        for serial, matches in self._poller.poll(wait_s):
            assert isinstance(serial, int)
            answered = not any(match.stopped is ReadStatus.NO_MASTER for match in matches)
            request_id = self._stop_waiting(serial)
            if answered:
                self._silence.on_answer(in_time=request_id is not None)
            if request_id is None:
                continue
            if not answered:
                self._silence.on_late(self._clock())
            self._answers.append((request_id, serial, matches))
        if self._waiting and not self._may_connect(self._clock()):
            for serial in tuple(self._waiting):
                if (request_id := self._stop_waiting(serial)) is not None:
                    self._answers.append((request_id, serial, ()))

    def _stop_waiting(self, serial: int) -> str | None:
        """The request that was waiting for this lookup; counts how long."""
        request_id, began = self._waiting.pop(serial, (None, 0.0))
        if request_id is not None:
            self.durations.append(self._clock() - began)
        return request_id

    def _may_connect(self, now: float) -> bool:
        """A master is connected or may be in a moment, or the first lookup began a moment ago."""
        since = now if self._first_at is None else self._first_at
        starts = not self._poller.connected and now < since + START_WAIT_S
        return starts or self._poller.promising
