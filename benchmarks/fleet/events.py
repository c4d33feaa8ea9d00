"""Virtual time: what happens when, in one heap."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Callbacks by their time. Two at the same time run in the order in which they were added."""

    def __init__(self) -> None:
        #: Seconds since the beginning.
        self.now = 0.0
        self._serials = itertools.count()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call it at `time`, or at once if that has passed."""
        entry = (max(time, self.now), next(self._serials), callback, arguments)
        heapq.heappush(self._heap, entry)

    def after(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call it so much later."""
        self.at(self.now + seconds, callback, *arguments)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now, _, callback, arguments = heapq.heappop(self._heap)
            callback(*arguments)
