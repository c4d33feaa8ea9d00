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
    computed most: none sleeps too long. A step looks at those only that are awake, or wake in it.
    """

    def __init__(self) -> None:
        self._passed = 0  # tokens that a quiet request can have computed, in all steps
        self._wakes_at: dict[str, int] = {}
        self._awake: dict[str, None] = {}
        self._calendar: dict[int, dict[str, None]] = {}  # quiet ones, by when they wake

    def __len__(self) -> int:
        return len(self._wakes_at)

    def wake(self, request_id: str) -> None:
        """Track it, and show it to the planner in its next step."""
        self.sleep(request_id, 0)

    def sleep(self, request_id: str, tokens: int) -> None:
        """It need not be shown before the step with which it has computed so many more."""
        self.forget(request_id)
        self._wakes_at[request_id] = at = self._passed + tokens
        if tokens <= 0:
            self._awake[request_id] = None
        elif tokens < NEVER:
            self._calendar.setdefault(at, {})[request_id] = None

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._awake.pop(request_id, None)
        self._calendar.get(self._wakes_at.pop(request_id, 0), {}).pop(request_id, None)

    def left(self, request_id: str) -> int:
        """Tokens for which it stays quiet at least."""
        return max(0, self._wakes_at[request_id] - self._passed)

    def awake(self, scheduled: Mapping[str, int], total: int) -> list[str]:
        """Those that the planner must know of, of a step that computes so many tokens of each, and
        `total` of all."""
        awake, most = self._awake, 1
        if total > len(scheduled):
            several = [one for one, count in scheduled.items() if count > 1 and one not in awake]
            most = max([scheduled[one] for one in several], default=1)
        self._passed = passed = self._passed + most
        due = [passed] if most == 1 else sorted(at for at in self._calendar if at <= passed)
        for at in due:
            awake.update(self._calendar.pop(at, {}))
        few, others = (awake, scheduled) if len(awake) < len(scheduled) else (scheduled, awake)
        return [one for one in few if one in others]
