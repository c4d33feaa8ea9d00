"""The lookups of an engine whose blocks may have no name yet: held until they have, or too long.

Called by the engine's thread. (design: pool-thread)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from kvpool_connector.identity.naming import EngineNames
from kvpool_connector.plan.planner import Planner
from kvpool_connector.records.values import LookupRequest
from kvpool_connector.scheduler.lookups import NO_NAMESPACE, Lookups
from kvpool_connector.scheduler.pool_messages import PoolMessages

#: A master answers within a millisecond as a rule. Where the engine computes for other requests, a
#: lookup that is not waited for so long costs its request a whole step. So long in all per step.
_WAIT_S: Final = 0.001


class NamedLookups:
    """Starts what the planner wants to look up, and gives it the answers.

    Names come with the first step, which may be slow: that is no reason to miss. So lookups are
    held for `start_wait_s` at most, and their own time begins when there are names.
    """

    def __init__(
        self,
        planner: Planner,
        names: EngineNames,
        lookups: Lookups,
        messages: PoolMessages,
        start_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._names = names
        self._lookups = lookups
        self._messages = messages
        self._start_wait_s = start_wait_s
        self._clock = clock
        self._held: dict[int, LookupRequest] = {}  # by serial, until there are names
        self._names_by = math.inf  # they are held no longer, with or without names
        self._wait_left_s = _WAIT_S

    @property
    def waiting(self) -> bool:
        """A request waits for an answer."""
        return self._lookups.waiting

    def start(self, lookup: LookupRequest | None) -> None:
        if lookup is None:
            return
        now = self._clock()
        if not self._names.namespaces:
            self._names_by = min(self._names_by, now + self._start_wait_s)
            if self._names.problem or now > self._names_by:
                self._miss(lookup, NO_NAMESPACE)
            else:
                self._planner.lookups.began(lookup.request_id, self._names_by)
                self._held[lookup.serial] = lookup
            return
        if lookup.session:
            self._messages.request_waits(lookup.request_id, lookup.session, now)
        if reason := self._lookups.start(lookup, self._names.namespaces):
            self._miss(lookup, reason)

    def take(self, wait_s: float = 0.0) -> None:
        """Give the planner what has been answered. Waits for one answer at most `wait_s`."""
        for result in self._lookups.take(wait_s):
            self.start(self._planner.lookups.on_result(*result))

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
        if late is not None:
            held = self._held.pop(late, None)
            reason = self._lookups.give_up(late) if held is None else NO_NAMESPACE
            self._planner.lookups.on_result(request_id, late, (), reason)

    def waits_for_names(self, request_id: str, now: float) -> bool:
        """Whether a request that is not looked up waits until its blocks have a name.

        An engine that only saves would otherwise compute its first prompt before there are names,
        and a prompt that generates one token ends with that step: it would never be saved.
        """
        named = self._names.namespaces or self._names.problem
        if named or self._planner.lookups.is_running(request_id):
            return False
        self._names_by = min(self._names_by, now + self._start_wait_s)
        return now < self._names_by and self._planner.wants_names(request_id)

    def on_step(self) -> None:
        """A new step: its hooks may wait once more."""
        self._wait_left_s = _WAIT_S

    def names_are_late(self, now: float) -> bool:
        """Whether lookups that were held for a name have waited too long."""
        return now >= self._names_by

    def on_names(self) -> None:
        """The blocks have a name: what was held begins now."""
        held, self._held = self._held, {}
        for lookup in held.values():
            self._planner.lookups.began(lookup.request_id, self._clock())
            self.start(lookup)

    def reset(self) -> None:
        """The blocks have no name any more. What was held is looked up by nobody."""
        self._held.clear()
        self._names_by = math.inf

    def close(self) -> None:
        self._lookups.close()

    def _miss(self, lookup: LookupRequest, reason: str) -> None:
        self._planner.lookups.on_result(lookup.request_id, lookup.serial, (), reason)
