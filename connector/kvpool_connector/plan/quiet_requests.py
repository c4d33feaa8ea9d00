"""Which of the scheduled requests a step need not look at: those that complete no block. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: More tokens than any request has.
NEVER: Final = 1 << 62


class QuietRequests:
    """The tracked requests of one engine, of which nearly all decode, and complete a block in one
    step of 16. To ask each how far it is takes longer than all else that a step needs.

    | state | next                                                                              |
    |-------|-----------------------------------------------------------------------------------|
    | awake | quiet, with `sleep`                                                               |
    | quiet | awake, with `wake`, or when steps have computed as many tokens as it sleeps for   |

    All quiet requests of a step count as if each had computed as many tokens as that which has
    computed most: none sleeps too long. A request that is not tracked is awake.
    """

    def __init__(self) -> None:
        self._passed = 0  # tokens that a quiet request can have computed, in all steps
        self._wakes_at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._wakes_at)

    def wake(self, request_id: str) -> None:
        """Track it, and show it to the planner in its next step."""
        self._wakes_at[request_id] = 0

    def sleep(self, request_id: str, tokens: int) -> None:
        """It need not be shown before the step with which it has computed so many more."""
        self._wakes_at[request_id] = self._passed + tokens

    def forget(self, request_id: str) -> None:
        del self._wakes_at[request_id]

    def left(self, request_id: str) -> int:
        """Tokens for which it stays quiet at least."""
        return max(0, self._wakes_at[request_id] - self._passed)

    def awake(self, scheduled: Mapping[str, int]) -> list[str]:
        """Those that the planner must know of, of a step that computes so many tokens of each."""
        wakes_at, passed = self._wakes_at.get, self._passed
        most = max(scheduled.values(), default=0)
        if most > 1:  # of a prompt, as a rule
            several = [one for one, count in scheduled.items() if count > 1]
            most = max((scheduled[one] for one in several if wakes_at(one, 0) > passed), default=1)
        self._passed = passed = passed + most
        return [one for one in scheduled if wakes_at(one, 0) <= passed]
