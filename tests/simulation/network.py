"""The network between simulated processes: byte streams, and the messages of the control plane.

Streams behave like TCP: bytes arrive in order, in pieces of any size, late, or not at all once the
connection is reset. What a sender has not handed to its kernel yet stays in the sender's own memory
(nothing is copied before that), as with a real socket. Messages to masters are treated worse than
zmq ever would: each may be lost, doubled or overtaken.

Kernels go on when processes are frozen; a killed process's kernel closes its connections, and a
host that lost power just falls silent.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvpool.net.requests import PendingRequests, answer
from kvpool.protocols import Handler, Link, Listener
from kvpool.wire.frames import cluster_id
from tests.simulation.loop import PROCESS, Process, SimLoop

#: The "host" of addresses that are Unix sockets: no network is in between.
LOCAL: Final = "shm"


@dataclass(slots=True)
class NetworkConditions:
    """How bad it is at the moment; the nemesis changes it."""

    delay_s: float = 0.0005  # mean one-way delay
    tail: float = 0.0  # share of deliveries that take up to `tail_s`
    tail_s: float = 0.2
    loss: float = 0.0  # of control messages
    double: float = 0.0  # of control messages
    piece_max: int = 1 << 16  # bytes of a stream that arrive at once
    window: int = 1 << 16  # bytes that a kernel takes before the receiver has read any

    def slow_s(self, size: int) -> float:
        """What an exchange of `size` bytes may take without any fault.

        They go in pieces, one delay after the other: chopped ones have half of `piece_max` on
        average, and those of a narrow window fall apart at the ends of what is written. The 8 are
        for dialling and greeting; the 3 is for chance.
        """
        piece = min(self.piece_max / 2, self.window / 3)
        return 3 * (8 + size / piece) * self.delay_s


class Net:
    """Everything that connects processes."""

    def __init__(self, loop: SimLoop, rng: random.Random, faults: Counter[str]) -> None:
        self.loop = loop
        self.conditions = NetworkConditions()
        self.faults = faults
        self.note: Callable[[str], None] = lambda event: None
        self.connections: dict[int, tuple[Endpoint, Endpoint]] = {}
        self.segments: dict[str, memoryview] = {}  # address -> memory that may be mapped there
        self._rng = rng
        self._listeners: dict[str, _Listener] = {}
        self._handlers: dict[str, tuple[Process, Handler, int]] = {}
        self._cut: set[tuple[str, str]] = set()  # one-way partitions, by process name
        self._healed: list[asyncio.Future[None]] = []  # dials that wait for the end of a cut
        self.stuck: list[Endpoint] = []  # streams that do
        self._numbers = itertools.count(1)

    # --- partitions ----------------------------------------------------------------------

    def cut(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """Nothing gets from `sources` to `targets` any more."""
        self._cut.update(itertools.product(sources, targets))

    def heal(self) -> None:
        """All partitions end; what waited on the way arrives."""
        self._cut.clear()
        waiting, self._healed = self._healed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        stuck, self.stuck = self.stuck, []
        for endpoint in stuck:
            endpoint.carry_on()

    def is_cut(self, source: Process, target: Process) -> bool:
        return (source.name, target.name) in self._cut

    def delay(self) -> float:
        conditions = self.conditions
        if conditions.tail and self._rng.random() < conditions.tail:
            self.faults["late"] += 1
            return self._rng.uniform(0, conditions.tail_s)
        return self._rng.expovariate(1 / conditions.delay_s)

    def piece(self, available: int) -> int:
        """How many of the next bytes arrive together."""
        if available <= self.conditions.piece_max:
            return available
        return self._rng.randint(1, self.conditions.piece_max)

    # --- streams -------------------------------------------------------------------------

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> _Listener:
        process = PROCESS.get()
        port = port or 10_000 + next(self._numbers)
        listener = _Listener(self, process, factory, host, port)
        if listener.key in self._listeners:
            raise OSError(98, "Address already in use")
        self._listeners[listener.key] = listener
        process.on_death.append(listener.close)
        return listener

    def forget(self, listener: _Listener) -> None:
        if self._listeners.get(listener.key) is listener:
            del self._listeners[listener.key]

    async def dial(self, factory: Callable[[], Any], host: str, port: int) -> Any:
        process = PROCESS.get()
        await asyncio.sleep(self.delay() + self.delay())
        listener = self._listeners.get(f"{host}:{port}")
        local = host == LOCAL
        while (
            not local
            and listener is not None
            and (self.is_cut(process, listener.process) or self.is_cut(listener.process, process))
        ):
            healed: asyncio.Future[None] = self.loop.create_future()
            self._healed.append(healed)
            await healed
            listener = self._listeners.get(f"{host}:{port}")
        if listener is None or not listener.process.alive:
            raise ConnectionRefusedError(111, "Connection refused")
        number = next(self._numbers)
        near = Endpoint(self, process, number, local=local)
        far = Endpoint(self, listener.process, number, local=local)
        near.peer, far.peer = far, near
        self.connections[number] = near, far
        process.on_death.append(near.orphaned)
        listener.process.on_death.append(far.orphaned)
        self.loop.call_soon(far.start, listener.factory, context=listener.process.context)
        near.start(factory)
        return near, near.protocol

    def resettable(self) -> list[int]:
        """The connections that cross a network: a Unix socket ends with its processes only."""
        return [number for number, (near, _) in self.connections.items() if not near.local]

    def reset(self, number: int) -> None:
        """Both ends lose the connection; what is on the way is lost."""
        for endpoint in self.connections.pop(number, ()):
            endpoint.lose(ConnectionResetError(104, "Connection reset by peer"))

    def unsent(self, process: Process, memory: memoryview) -> list[tuple[int, int]]:
        """What of `memory` waits to be sent by a process: (offset, size)."""
        base = np.frombuffer(memory, np.uint8).ctypes.data
        found = []
        for near, far in self.connections.values():
            for endpoint in (near, far):
                if endpoint.process is process:
                    for data in endpoint.backlog:
                        at = np.frombuffer(data, np.uint8).ctypes.data - base
                        if 0 <= at < len(memory):
                            found.append((at, len(data)))
        return found

    # --- messages ------------------------------------------------------------------------

    def serve(self, address: str, handler: Handler, cluster: int) -> None:
        self._handlers[address] = PROCESS.get(), handler, cluster

    def stop_serving(self, address: str, process: Process) -> None:
        if address in self._handlers and self._handlers[address][0] is process:
            del self._handlers[address]

    def request(
        self, source: Process, address: str, message: bytes, requests: PendingRequests
    ) -> None:
        """Send a request to whoever serves `address` when it gets there."""

        def arrive() -> None:
            served = self._handlers.get(address)
            if served is not None and served[0].alive and not self.is_cut(source, served[0]):
                self.loop.call_soon(handle, *served, context=served[0].context)

        def handle(process: Process, handler: Handler, cluster: int) -> None:
            reply = answer(handler, cluster, message)
            if reply is not None:
                self._send(lambda: come_back(process, reply))

        def come_back(process: Process, reply: bytes) -> None:
            if source.alive and not self.is_cut(process, source):
                self.note(f"{process.name}>{source.name} {len(reply)}")
                self.loop.call_soon(requests.on_reply, reply, context=source.context)

        self.note(f"{source.name}>{address} {len(message)}")
        self._send(arrive)

    def _send(self, arrive: Callable[[], None]) -> None:
        if self.conditions.loss and self._rng.random() < self.conditions.loss:
            self.faults["lost message"] += 1
            return
        self.loop.at(self.loop.now + self.delay(), arrive)
        if self.conditions.double and self._rng.random() < self.conditions.double:
            self.faults["doubled message"] += 1
            self.loop.at(self.loop.now + self.delay() + self._rng.uniform(0, 3), arrive)


class _Listener:
    """Looks like `asyncio.Server`, as far as the transports look."""

    def __init__(
        self, net: Net, process: Process, factory: Callable[[], Any], host: str, port: int
    ) -> None:
        self.process = process
        self.factory = factory
        self.key = f"{host}:{port}"
        self.sockets = [self]
        self._net = net
        self._name = host, port

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        self._net.forget(self)


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
        self.backlog: deque[memoryview] = deque()  # the sender's own memory, not copied yet
        self._flight: deque[bytes] = deque()  # in kernels and on the wire, towards the peer
        self._in_flight = 0
        self._inbox: deque[memoryview] = deque()
        self._due = 0.0
        self._travelling = False
        self._pumping = False
        self._paused = False
        self._protocol_paused = False
        self._closing = False  # our side has closed
        self._ended = False  # the peer sees EOF after the last byte
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
        """Send no more; what comes is still read."""
        if not self.is_closing():
            self._ended = True
            self._travel()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._pump_soon()

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Close: what the kernel has taken still arrives, the rest does not."""
        if not self.is_closing():
            self._closing = True
            self.backlog.clear()
            self._net.loop.call_soon(self._say_lost, None, context=self.process.context)
            self._hang_up()

    # --- the kernel's side -------------------------------------------------------------------

    def orphaned(self) -> None:
        """The process died: its kernel closes for it."""
        if not self.is_closing():
            self._closing = True
            self._hang_up()

    def lose(self, error: Exception | None) -> None:
        """The connection is gone; the process hears of it when it runs."""
        if not self._lost:
            self._lost = True
            self.backlog.clear()
            self._flight.clear()
            self._net.loop.call_soon(self._say_lost, error, context=self.process.context)

    def carry_on(self) -> None:
        """A partition ended: send what waited."""
        self._travelling = False
        self._travel()

    def _say_lost(self, error: Exception | None) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    def _push(self) -> None:
        """Hand bytes to the kernel, as many as it takes."""
        while self.backlog and self._in_flight < self._net.conditions.window:
            data = self.backlog[0]
            count = min(len(data), self._net.conditions.window - self._in_flight)
            self._flight.append(bytes(data[:count]))
            self._in_flight += count
            if count == len(data):
                self.backlog.popleft()
            else:
                self.backlog[0] = data[count:]
        self._travel()
        if self.protocol is not None and bool(self.backlog) is not self._protocol_paused:
            self._protocol_paused = bool(self.backlog)
            if self._protocol_paused:
                self.protocol.pause_writing()
            else:
                self.protocol.resume_writing()

    def _travel(self) -> None:
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
            self._travel()
        elif self._ended and not self.backlog:
            self.peer._end()

    def _cut(self) -> bool:
        return not self.local and self._net.is_cut(self.process, self.peer.process)

    def _receive(self, data: bytes) -> None:
        if not self._lost and not self._closing:
            self._inbox.append(memoryview(data))
            self._pump_soon()
        else:
            self.peer._taken(len(data))

    def _end(self) -> None:
        self._eof = True
        self._pump_soon()

    def _hang_up(self) -> None:
        self._ended = True
        self._net.connections.pop(self.number, None)
        self._travel()

    def _pump_soon(self) -> None:
        if not self._pumping and not self._paused and (self._inbox or self._eof):
            self._pumping = True
            self._net.loop.call_soon(self._pump, context=self.process.context)

    def _pump(self) -> None:
        """Hand what has arrived to the protocol."""
        self._pumping = False
        while self._inbox and not self._paused and self.protocol is not None:
            data = self._inbox.popleft()
            buffer = self.protocol.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            if count < len(data):
                self._inbox.appendleft(data[count:])
            self.peer._taken(count)
            self.protocol.buffer_updated(count)
        if self._eof and not self._inbox and self.protocol is not None and not self._lost:
            self._eof = False  # it is told once
            if not self.protocol.eof_received():
                self.abort()

    def _taken(self, count: int) -> None:
        """The peer has read: there is room in the kernels again."""
        self._in_flight -= count
        if self.backlog:
            self._net.loop.call_soon(self._push, context=self.process.context)


class SimNetwork:
    """The control plane of one process (`protocols.Network`)."""

    def __init__(self, net: Net, cluster: str = "default") -> None:
        self._net = net
        self._process = PROCESS.get()
        self._cluster = cluster_id(cluster)
        self.authenticated = False

    def connect(self, address: str) -> Link:
        return _SimLink(self._net, self._process, address, self._cluster)

    async def serve(self, address: str, handler: Handler) -> Listener:
        self._net.serve(address, handler, self._cluster)
        return _SimListener(self._net, self._process, address)

    def close(self) -> None:
        pass


class _SimLink:
    def __init__(self, net: Net, process: Process, address: str, cluster: int) -> None:
        self.address = address
        self._net = net
        self._process = process
        self._requests = PendingRequests(address, cluster)

    async def request(self, type: int, body: bytes, *, deadline: float) -> tuple[int, bytes]:
        return await self._requests.send(type, body, self._send, deadline)

    def close(self) -> None:
        self._requests.close()

    def _send(self, id: int, message: bytes) -> None:
        self._net.request(self._process, self.address, message, self._requests)


class _SimListener:
    def __init__(self, net: Net, process: Process, address: str) -> None:
        self.address = address
        self._net = net
        self._process = process

    async def close(self) -> None:
        self._net.stop_serving(self.address, self._process)
