"""Links between engines and servers, each one direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.fleet.events import EventQueue


@dataclass(slots=True)
class _Queue:
    free_at: float = 0.0


class QueuedLink:
    """Transfers pass one after another, in the order in which they begin. Those of a link `beside`
    it wait in the same queue."""

    def __init__(self, bytes_s: float, beside: QueuedLink | None = None) -> None:
        self.moved = 0.0  # bytes so far
        self._bytes_s = bytes_s
        self._queue: _Queue = _Queue() if beside is None else beside._queue

    def wait_s(self, now: float) -> float:
        """How long a transfer that begins now waits for those before it."""
        return max(0.0, self._queue.free_at - now)

    def hold(self, until: float) -> None:
        """What comes next waits until then."""
        self._queue.free_at = max(self._queue.free_at, until)

    def take(self, size: float, now: float) -> float:
        """When the last of `size` bytes has passed that are there now."""
        self._queue.free_at = max(now, self._queue.free_at) + size / self._bytes_s
        self.moved += size
        return self._queue.free_at


@dataclass(slots=True, eq=False)
class LinkTransfer:
    """`left` bytes of it have not passed yet."""

    size: float
    left: float
    ended: Callable[[], None]


class SharedLink:
    """Transfers pass at the same time, each with an equal share and no more than `each_max`, as
    several streams do."""

    def __init__(self, events: EventQueue, bytes_s: float, each_max: float = float("inf")) -> None:
        self.moved = 0.0  # bytes so far
        self.bytes_s = bytes_s
        self._each_max = each_max
        self._events = events
        self._running: list[LinkTransfer] = []
        self._known_at = 0.0  # when `left` of each was right
        self._alarm = 0  # the number of the alarm that counts

    @property
    def left(self) -> float:
        """Bytes of all transfers that have not passed yet."""
        seconds = self._events.now - self._known_at
        passed = seconds * min(self.bytes_s, self._each_max * len(self._running))
        return max(0.0, sum(one.left for one in self._running) - passed)

    def start(self, size: float, ended: Callable[[], None]) -> LinkTransfer:
        """Call `ended` when so many bytes have passed."""
        self._advance()
        transfer = LinkTransfer(size, size, ended)
        self._running.append(transfer)
        self._set_alarm()
        return transfer

    def stop(self, transfer: LinkTransfer) -> float:
        """Break it off, if it has not ended. Returns the bytes of it that have passed."""
        if transfer in self._running:
            self._advance()
            self._running.remove(transfer)
            self._set_alarm()
        return transfer.size - transfer.left

    def _advance(self) -> None:
        seconds = self._events.now - self._known_at
        self._known_at = self._events.now
        if not self._running:
            return
        share = seconds * self._share()
        for transfer in self._running:
            passed = min(transfer.left, share)
            transfer.left -= passed
            self.moved += passed

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._running:
            least = min(transfer.left for transfer in self._running)
            self._events.after(least / self._share(), self._end, self._alarm)

    def _share(self) -> float:
        """Bytes a second of each."""
        return min(self.bytes_s / len(self._running), self._each_max)

    def _end(self, alarm: int) -> None:
        if alarm != self._alarm:
            return  # others have come or gone since
        self._advance()
        least = min(transfer.left for transfer in self._running)
        ended = [one for one in self._running if one.left <= least]
        for transfer in ended:
            self.moved += transfer.left  # what rounding has left
            transfer.left = 0.0
            self._running.remove(transfer)
        self._set_alarm()
        for transfer in ended:
            transfer.ended()
