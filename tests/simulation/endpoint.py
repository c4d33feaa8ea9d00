"""One end of a simulated byte stream, with TCP's behaviour.

Bytes arrive in order, in pieces of any size, late, or never after a reset. Bytes that the sender's
kernel has not taken yet stay in the sender's own memory without a copy, as with a real socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.network import Net


class Endpoint(asyncio.Transport):
    """One end of a byte stream, as its protocol sees it."""

    def __init__(self, net: Net, process: Process, number: int, *, local: bool) -> None:
        super().__init__()
        self.local = local
        self.process = process
        self.number = number
        self.peer: Endpoint
        self.protocol: Any = None
        self._net = net
        self.backlog: deque[memoryview] = deque()  # the sender's own memory, not copied
        self._flight: deque[bytes] = deque()  # in kernels or on the wire to the peer
        self._in_flight = 0
        self._inbox: deque[memoryview] = deque()
        self._due = 0.0
        self._travelling = False
        self._pumping = False
        self._paused = False
        self._protocol_paused = False
        self._closing = False  # this side has closed
        self._ended = False  # the peer gets EOF after the last byte
        self._eof = False  # the peer has closed, or sends no more
        self._lost = False

    # --- the protocol's side ---------------------------------------------------------------

    def start(self, factory: Callable[[], Any]) -> None:
        if not self._lost:
            self.protocol = factory()
            self.protocol.connection_made(self)
            self._pump_soon()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.peer.process if name == "peer" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.backlog))

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def write(self, data: Any) -> None:
        if not self.is_closing() and len(data):
            self.backlog.append(memoryview(data))
            self._push()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:  # not joined: since Python 3.12 asyncio keeps the sender's memory
            self.write(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Send EOF after the last byte; this side still reads."""
        if not self.is_closing():
            self._ended = True
            self._send_next()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._pump_soon()

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Close: bytes that the kernel has taken still arrive, others do not."""
        if not self.is_closing():
            self._closing = True
            self.backlog.clear()
            self._net.loop.call_soon(self._notify_lost, None, context=self.process.context)
            self._send_eof()

    # --- the kernel's side -------------------------------------------------------------------

    def process_died(self) -> None:
        """The process has died: its kernel closes the connection."""
        if not self.is_closing():
            self._closing = True
            self._send_eof()

    def lose(self, error: Exception | None) -> None:
        """End the connection; the protocol is called when its process runs."""
        if not self._lost:
            self._lost = True
            self.backlog.clear()
            self._flight.clear()
            self._net.loop.call_soon(self._notify_lost, error, context=self.process.context)

    def resume_after_partition(self) -> None:
        """Send what waited for the end of a partition."""
        self._travelling = False
        self._send_next()

    def _notify_lost(self, error: Exception | None) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    def _push(self) -> None:
        """Give the kernel as many bytes as it takes."""
        while self.backlog and self._in_flight < self._net.conditions.window:
            data = self.backlog[0]
            count = min(len(data), self._net.conditions.window - self._in_flight)
            self._flight.append(bytes(data[:count]))
            self._in_flight += count
            if count == len(data):
                self.backlog.popleft()
            else:
                self.backlog[0] = data[count:]
        self._send_next()
        if self.protocol is not None and bool(self.backlog) is not self._protocol_paused:
            self._protocol_paused = bool(self.backlog)
            if self._protocol_paused:
                self.protocol.pause_writing()
            else:
                self.protocol.resume_writing()

    def _send_next(self) -> None:
        if not self._travelling and (self._flight or self._ended) and not self._lost:
            self._travelling = True
            if self._cut():
                self._net.stuck.append(self)
                return
            self._due = max(self._due, self._net.loop.now + self._net.delay())
            self._net.loop.at(self._due, self._arrive)

    def _arrive(self) -> None:
        if self._cut():
            self._net.stuck.append(self)
            return
        self._travelling = False
        if self._flight:
            data = self._flight.popleft()
            count = self._net.piece(len(data))
            if count < len(data):
                self._flight.appendleft(data[count:])
                self._net.faults["chopped"] += 1
            self.peer._receive(data[:count])
            self._send_next()
        elif self._ended and not self.backlog:
            self.peer._end()

    def _cut(self) -> bool:
        return not self.local and self._net.is_cut(self.process, self.peer.process)

    def _receive(self, data: bytes) -> None:
        if not self._lost and not self._closing:
            self._inbox.append(memoryview(data))
            self._pump_soon()
        else:
            self.peer._acknowledge(len(data))

    def _end(self) -> None:
        self._eof = True
        self._pump_soon()

    def _send_eof(self) -> None:
        self._ended = True
        self._net.connections.pop(self.number, None)
        self._send_next()

    def _pump_soon(self) -> None:
        if not self._pumping and not self._paused and (self._inbox or self._eof):
            self._pumping = True
            self._net.loop.call_soon(self._pump, context=self.process.context)

    def _pump(self) -> None:
        """Give the bytes that have arrived to the protocol."""
        self._pumping = False
        while self._inbox and not self._paused and self.protocol is not None:
            data = self._inbox.popleft()
            buffer = self.protocol.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            if count < len(data):
                self._inbox.appendleft(data[count:])
            self.peer._acknowledge(count)
            self.protocol.buffer_updated(count)
        if self._eof and not self._inbox and self.protocol is not None and not self._lost:
            self._eof = False  # only one call of `eof_received`
            if not self.protocol.eof_received():
                self.abort()

    def _acknowledge(self, count: int) -> None:
        """The peer has read `count` bytes: the kernels have space for so many again."""
        self._in_flight -= count
        if self.backlog:
            self._net.loop.call_soon(self._push, context=self.process.context)
