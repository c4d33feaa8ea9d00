"""The decoding half of a mixed engine: prompts are computed in chunks, in the same steps."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.prompts import Prompt


class MixedDecoder:
    """Continuous batching: each step gives every request one token, and has a chunk of a prompt
    while one is computed.

    So all requests have the same pace, and one count of steps says when each of them ends.
    """

    def __init__(
        self, events: EventQueue, constants: Constants, done: Callable[[Prompt], None]
    ) -> None:
        self._events = events
        self._constants = constants
        self._done = done
        self._running: list[tuple[float, int, Prompt]] = []  # a heap by the step of the last token
        self._serials = itertools.count()
        self._steps = 0.0  # so far
        self._known_at = 0.0  # when that was right
        self._computing_steps_s: float | None = None  # steps a second while a prompt is computed
        self._alarm = 0  # the number of the alarm that counts

    @property
    def requests(self) -> int:
        return len(self._running)

    def compute(self, tokens: int, seconds: float) -> float:
        """A prompt's computing begins that would take so long alone. Returns how long it takes."""
        self._advance()
        chunks = max(1, math.ceil(tokens / self._constants.chunk_tokens))
        if self._running:
            seconds += chunks * self._step_s()
        self._computing_steps_s = chunks / seconds
        self._set_alarm()
        return seconds

    def computed(self) -> None:
        """It has ended."""
        self._advance()
        self._computing_steps_s = None
        self._set_alarm()

    def add(self, prompt: Prompt) -> None:
        """The step that ended its computing has given its first token."""
        self._advance()
        prompt.first_token_at = self._events.now
        last = self._steps + prompt.output - 1
        heapq.heappush(self._running, (last, next(self._serials), prompt))
        self._set_alarm()

    def _step_s(self) -> float:
        return self._constants.token_s + self._constants.token_each_s * len(self._running)

    def _pace(self) -> float:
        return self._computing_steps_s or 1 / self._step_s()

    def _advance(self) -> None:
        self._steps += (self._events.now - self._known_at) * self._pace()
        self._known_at = self._events.now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._steps)
            self._events.after(left / self._pace(), self._end, self._alarm)

    def _end(self, alarm: int) -> None:
        if alarm != self._alarm:
            return  # the pace has changed since
        self._advance()
        last, _, prompt = heapq.heappop(self._running)
        self._steps = max(self._steps, last)  # what rounding has left
        prompt.done_at = self._events.now
        seconds = prompt.done_at - prompt.first_token_at
        prompt.token_s = seconds / max(1, prompt.output - 1)
        self._set_alarm()
        self._done(prompt)
