"""A decode engine: all of its requests advance together, one token each step."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.prompts import Prompt


class DecodeEngine:
    """A step takes longer for each request in it; a request keeps the pace that it began with."""

    def __init__(
        self, events: EventQueue, constants: Constants, done: Callable[[Prompt], None]
    ) -> None:
        self.requests = 0
        self._events = events
        self._constants = constants
        self._done = done

    def add(self, prompt: Prompt) -> None:
        """A prompt's KV comes from the prefill engine, then its tokens follow."""
        constants = self._constants
        self.requests += 1
        prompt.token_s = constants.token_s + constants.token_each_s * self.requests
        transfer_s = prompt.tokens * constants.kv_bytes / constants.decode_link_bytes_s
        prompt.first_token_at = (
            self._events.now + transfer_s + constants.first_byte_s + prompt.token_s
        )
        end = prompt.first_token_at + (prompt.output - 1) * prompt.token_s
        self._events.at(end, self._ended, prompt)

    def _ended(self, prompt: Prompt) -> None:
        self.requests -= 1
        prompt.done_at = self._events.now
        self._done(prompt)
