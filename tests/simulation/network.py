"""The network between simulated processes: byte streams, and the messages of the control plane.

Streams (`endpoint.py`) behave like TCP. Messages to masters (`control_plane.py`) are treated worse
than TCP would: each of them may be lost, duplicated or overtaken by another one.

Kernels keep running while processes are frozen. The kernel of a killed process closes its
connections.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvpool.net.requests import PendingRequests, answer
from kvpool.protocols import Caller, Handler
from tests.simulation.endpoint import Endpoint
from tests.simulation.loop import PROCESS, Process, SimLoop

#: The "host" of addresses that are Unix sockets: no network is in between.
LOCAL: Final = "shm"


@dataclass(slots=True)
class NetworkConditions:
    """The state of the network at the moment; the nemesis changes it."""

    delay_s: float = 0.0005  # mean one-way delay
    tail: float = 0.0  # share of deliveries that take up to `tail_s`
    tail_s: float = 0.2
    loss: float = 0.0  # of control messages
    double: float = 0.0  # of control messages
    piece_max: int = 1 << 16  # bytes of a stream that arrive at once
    window: int = 1 << 16  # bytes that a kernel takes before the receiver has read any

    def slow_s(self, size: int) -> float:
        """Upper limit, in seconds, for an exchange of `size` bytes without any fault.

        Bytes travel in pieces, one delay after the other. Chopped pieces have half of `piece_max`
        on average. With a small window, pieces also end where a write ends. The 8 counts dialling
        and the handshake; the 3 allows for random delays.
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
        """From now on no byte and no message gets from `sources` to `targets`."""
        self._cut.update(itertools.product(sources, targets))

    def heal(self) -> None:
        """End all partitions; what waited for that is delivered."""
        self._cut.clear()
        waiting, self._healed = self._healed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        stuck, self.stuck = self.stuck, []
        for endpoint in stuck:
            endpoint.resume_after_partition()

    def is_cut(self, source: Process, target: Process) -> bool:
        return (source.name, target.name) in self._cut

    def delay(self) -> float:
        conditions = self.conditions
        if conditions.tail and self._rng.random() < conditions.tail:
            self.faults["late"] += 1
            return self._rng.uniform(0, conditions.tail_s)
        return self._rng.expovariate(1 / conditions.delay_s)

    def piece(self, available: int) -> int:
        """How many of the next `available` bytes arrive together."""
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
        process.on_death.append(near.process_died)
        listener.process.on_death.append(far.process_died)
        self.loop.call_soon(far.start, listener.factory, context=listener.process.context)
        near.start(factory)
        return near, near.protocol

    def resettable(self) -> list[int]:
        """Connections over the network. (Only the end of a process ends a Unix socket.)"""
        return [number for number, (near, _) in self.connections.items() if not near.local]

    def reset(self, number: int) -> None:
        """Both ends lose the connection, with all bytes on the way."""
        for endpoint in self.connections.pop(number, ()):
            endpoint.lose(ConnectionResetError(104, "Connection reset by peer"))

    def unsent(self, process: Process, memory: memoryview) -> list[tuple[int, int]]:
        """The parts of `memory` that a process has yet to send, as (offset, size)."""
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
        """Send a request to the process that serves `address` at the time of its arrival."""

        def arrive() -> None:
            served = self._handlers.get(address)
            if served is not None and served[0].alive and not self.is_cut(source, served[0]):
                self.loop.call_soon(handle, *served, context=served[0].context)

        def handle(process: Process, handler: Handler, cluster: int) -> None:
            reply = answer(handler, cluster, message, Caller(source.host))
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
    """The part of `asyncio.Server` that the transports use."""

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
