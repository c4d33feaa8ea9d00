"""How long to wait before the next attempt: longer after each failure.

Pure: no clock, and the random numbers come from the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Delays in seconds: `base_s` after the first failure, then twice as long, to `max_s`.

    With an `rng` a delay is between half and all of its length, so that clients who failed together
    do not return together.
    """

    def __init__(self, base_s: float, max_s: float, *, rng: Random | None = None) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._rng = rng
        # The next delay itself and not a count of failures: 2.0 ** count overflows a float after a
        # thousand failures, which takes an hour.
        self._next_s = base_s
        #: Since the last success.
        self.failures = 0

    def next_delay(self) -> float:
        """Count one more failure; how long to wait now."""
        self.failures += 1
        delay_s = min(self._next_s, self._max_s)
        self._next_s = min(delay_s * 2.0, self._max_s)
        return delay_s if self._rng is None else delay_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Something succeeded: the next delay is `base_s` again."""
        self.failures = 0
        self._next_s = self._base_s
