"""Sessions wait before the router, as the product's `Admission` says, until there is room for them.

What it goes by is what a pool tells: `Room.share`, measured by the prompts that have been let in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.prompts import AGENTS, Prompt
from kvpool.client.room import OBSERVED_S
from kvpool.master.state.demand import DemandMeter
from kvpool_agents.admission import Admission, Seat

#: The pool is asked so often, and the line looked at while some wait.
_ASK_S: Final = 10.0
_LOOK_S: Final = 1.0


class FleetAdmission:
    """`route`s prompts, those of a session that has no place later. `memory` in blocks."""

    def __init__(
        self, events: EventQueue, memory: int, engines: int, route: Callable[[Prompt], None]
    ) -> None:
        self._engines = engines
        self._events, self._memory, self._route = events, memory, route
        self._admission = Admission()
        self._meter = DemandMeter()
        self._asked_at = 0.0
        self._seats: dict[str, Seat] = {}  # of each prompt that is waiting or served
        self._waiting: list[Prompt] = []

    def add(self, prompt: Prompt, session: int) -> None:
        """A prompt of this session has come."""
        seat = self._admission.asks(AGENTS, str(session), self._events.now)
        self._seats[prompt.id] = seat
        if seat.placed:
            self._let_in(prompt)
            return
        self._waiting.append(prompt)
        if len(self._waiting) == 1:
            self._events.after(_LOOK_S, self._look)
        self._admit()

    def first_token(self) -> None:
        """Of a prompt that was let in."""
        self._admission.computes(-1, self._events.now)

    def answered(self, prompt: Prompt, *, ends: bool) -> None:
        """It has its answer, the last one of its session if somebody has said so."""
        self._admission.leaves(self._seats.pop(prompt.id), self._events.now, ends=ends)
        self._admit()

    def _look(self) -> None:
        self._admit()
        if self._waiting:
            self._events.after(_LOOK_S, self._look)

    def _admit(self) -> None:
        now = self._events.now
        if now - self._asked_at >= _ASK_S:
            self._asked_at, demand = now, self._meter.demand(now)
            known = bool(demand.size) and demand.seconds >= OBSERVED_S
            self._admission.measured(self._memory / demand.size if known else None, self._engines)
        if self._admission.admit(now):
            waiting, self._waiting = self._waiting, []
            for prompt in waiting:
                if self._seats[prompt.id].placed:
                    self._let_in(prompt)
                else:
                    self._waiting.append(prompt)

    def _let_in(self, prompt: Prompt) -> None:
        self._meter.asked(prompt.namespace, prompt.chain, self._events.now, 1)
        self._admission.computes(1, self._events.now)
        self._route(prompt)
