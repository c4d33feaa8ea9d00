"""A reader of one engine's KV events that misses nothing without noticing it.

vLLM numbers the messages of a stream from 0 in each life of an engine, and sends the last ones
again on request (`event_publisher.py` has the format). `Sequence` decides from the numbers alone.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import zmq
import zmq.asyncio

from kvpool import logs
from kvpool.errors import BadMessage, ConfigError
from kvpool.kv_events import BATCH_BYTES_MAX, EventBatch, decode_batch
from kvpool.net.event_address import answers_on_ipv6, is_ipv6, is_named

log = logs.get("kvpool.events")

#: Messages that wait here while earlier ones are published; what is more is a gap, and is noticed.
_QUEUED_MAX: Final = 1000
#: A replay that sends nothing for so long has ended without its end.
_REPLAY_TIMEOUT_S: Final = 5.0
_NUMBER: Final = struct.Struct(">Q")
_END: Final = struct.pack(">q", -1)


class Arrival(enum.Enum):
    """What the number of a message says."""

    NEXT = "next"
    KNOWN = "known"  # a replay has brought it already
    GAP = "gap"  # messages before it are missing
    RESTART = "restart"  # the engine was started again, and counts anew


class Sequence:
    """The numbers of one stream. Pure.

    | a live message has | and               | it is                                             |
    |--------------------|-------------------|---------------------------------------------------|
    | the next number    |                   | NEXT; the first one of all is, too                |
    | a higher one       |                   | GAP: ask for those from `next` on                 |
    | a lower one        | above the last    | KNOWN: it waited while a replay brought it        |
    |                    | live one          |                                                   |
    | a lower one        | not above that    | RESTART: within one life numbers only grow        |
    """

    def __init__(self) -> None:
        #: The number that is expected; None before the first message.
        self.next: int | None = None
        self._last_live = -1

    def on_live(self, number: int) -> Arrival:
        """A message came from the stream. NEXT takes it; in the other cases `skip` does."""
        before, self._last_live = self._last_live, number
        if self.next is None or number == self.next:
            self.next = number + 1
            return Arrival.NEXT
        if number > self.next:
            return Arrival.GAP
        return Arrival.KNOWN if number > before else Arrival.RESTART

    def begin_again(self) -> None:
        """After a RESTART: a replay may bring the messages before the one that came."""
        self.next = None

    def on_replayed(self, number: int) -> bool:
        """A message came from a replay; whether it is the next one, and is taken."""
        if self.next is not None and number != self.next:
            return False
        self.next = number + 1
        return True

    def skip(self, number: int) -> None:
        """What is missing before this message does not come."""
        self.next = number + 1


class EngineBatch(NamedTuple):
    """A message of the engine: as it was sent, and decoded, if it is one.

    `lost` says why all that the engine has said before it is of no use any more.
    """

    payload: bytes
    batch: EventBatch | None
    lost: str = ""


class EventSubscriber:
    """Reads the stream at `endpoint`; what it misses it asks for at `replay_endpoint`, if any."""

    def __init__(self, endpoint: str, replay_endpoint: str = "") -> None:
        self._replay_endpoint = replay_endpoint
        self._sequence = Sequence()
        self._context = zmq.asyncio.Context()
        self._endpoint = endpoint
        self._ipv6 = is_ipv6(endpoint)
        self._sub = self._open()

    def _open(self) -> zmq.asyncio.Socket:
        """Raises ConfigError."""
        try:
            socket = self._context.socket(zmq.SUB)
            for socket_option, value in (
                (zmq.SUBSCRIBE, b""),
                (zmq.RCVHWM, _QUEUED_MAX),
                (zmq.LINGER, 0),
                (zmq.IPV6, self._ipv6),
                (zmq.MAXMSGSIZE, BATCH_BYTES_MAX),
                (zmq.HEARTBEAT_IVL, 1000),
                (zmq.HEARTBEAT_TIMEOUT, 5000),
            ):
                socket.setsockopt(socket_option, value)
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot read {self._endpoint}: {zmq.strerror(error.errno or 0)}; expected an "
                "address such as tcp://127.0.0.1:5557"
            ) from None
        return socket

    async def batches(self) -> AsyncIterator[EngineBatch]:
        """Each message once, in order. It waits for an engine that is not there."""
        if is_named(self._endpoint) and await answers_on_ipv6(self._endpoint):
            self._sub.close(0)
            self._ipv6 = True
            self._sub = self._open()
        if self._replay_endpoint:
            async for one in self._replay(None):  # what the engine has sent before
                yield one
        while True:
            frames = await self._sub.recv_multipart()
            number = _number_of(frames)
            if number is None:
                log.warning("a message that is none of KV events was left out")
                continue
            arrival = self._sequence.on_live(number)
            if arrival is Arrival.KNOWN:
                continue
            if arrival is Arrival.RESTART:
                yield EngineBatch(b"", None, "the engine was started again")
                self._sequence.begin_again()
            lost = ""
            if arrival is not Arrival.NEXT:
                if self._replay_endpoint:
                    async for one in self._replay(number):
                        yield one
                if self._sequence.next not in (None, number):
                    lost = f"messages before number {number} of the engine are missing"
                self._sequence.skip(number)
            yield _decoded(frames[2], lost)

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)

    async def _replay(self, before: int | None) -> AsyncIterator[EngineBatch]:
        """Messages from the next one on, up to `before`, as far as the engine has kept them."""
        first = self._sequence.next or 0
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            log.warning("cannot ask for a replay", why=zmq.strerror(error.errno or 0))
            return
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, self._ipv6 or is_ipv6(self._replay_endpoint))
        socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", _NUMBER.pack(first)])
            while True:
                async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) != 4 or frames[2] == _END:
                    return
                number = _number_of(frames[1:])
                if number is None or (before is not None and number >= before):
                    return
                if self._sequence.on_replayed(number):
                    yield _decoded(frames[3], "")
        except (TimeoutError, zmq.ZMQError):
            log.warning("the engine's replay address does not answer", first=first)
        finally:
            socket.close(0)


def _number_of(frames: list[bytes]) -> int | None:
    if len(frames) != 3 or len(frames[1]) != _NUMBER.size:
        return None
    number: int = _NUMBER.unpack(frames[1])[0]
    return number


def _decoded(payload: bytes, lost: str) -> EngineBatch:
    """What cannot be read does not pass: routers would forget the engine."""
    try:
        return EngineBatch(payload, decode_batch(payload), lost)
    except BadMessage as error:
        return EngineBatch(b"", None, str(error))
