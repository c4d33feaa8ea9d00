"""One stream of KV events, as vLLM's engines publish theirs: a PUB socket, and a ROUTER for replay.

A subscriber that reads too slowly loses batches, and nothing here grows for its sake (zmq drops
them and counts none); it sees the gap in the numbers, and asks for what it has missed:
`[b"", first number, u64 big endian]` to the replay socket. The answer is `[b"", topic, number,
batch]` for each batch that is kept, in order, and `[b"", b"", -1, b""]` at the end.

A stream that can tell all that is there answers `[b"", b"snapshot"]`, too: the same frames, where
the number of each batch is that of the last one that was sent before it was made. A subscriber
first applies the stream up to that number, then the batch. (design: pool-events)
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import zmq

from kvpool import logs
from kvpool.addresses import network_of
from kvpool.errors import ConfigError
from kvpool.kv_events import EventBatch, KVEvent, batches, encode_batch
from kvpool.net.event_address import bind
from kvpool.shares import Recent
from kvpool.supervision import Supervisor

log = logs.get("kvpool.events")

#: Batches that are kept for replay, and their bytes.
KEPT_MAX: Final = 10_000
KEPT_BYTES_MAX: Final = 64 << 20
#: Batches that wait for one subscriber, or for one reader of a replay; beyond it they are lost.
_QUEUED_MAX: Final = 1000
_REPLAY_QUEUED_MAX: Final = 64
#: Readers of a replay at the same time; beyond it the one that asked first is given up, of a peer
#: that has more than its part of them.
_READERS_MAX: Final = 64
#: Batches that one turn of the loop sends to a reader, and the pause when it takes no more.
_REPLAY_BURST: Final = 32
_PAUSE_S: Final = 0.01
#: Parts of a snapshot that one turn of the loop makes: each takes up to a millisecond.
_SNAPSHOT_BURST: Final = 2
#: A reader of a replay that takes nothing for so long is given up.
_READER_TIMEOUT_S: Final = 5.0
#: Bytes of a request; a longer one ends its connection.
_REQUEST_BYTES_MAX: Final = 256
#: Messages that one turn of the loop takes from the replay socket.
_REQUESTS_BURST: Final = 64
#: The request for all that is there.
SNAPSHOT: Final = b"snapshot"
_NUMBER: Final = struct.Struct(">Q")
_END: Final = struct.pack(">q", -1)
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class KeptBatch(NamedTuple):
    """One batch as it was sent."""

    number: int
    payload: bytes


class ReplayBuffer:
    """The last batches of a stream, bounded in number and bytes. Pure.

    Numbers begin at `first`, have no gap, and are kept in order.
    """

    def __init__(
        self, first: int = 0, kept_max: int = KEPT_MAX, bytes_max: int = KEPT_BYTES_MAX
    ) -> None:
        self._kept: deque[KeptBatch] = deque()
        self._kept_max = kept_max
        self._bytes_max = bytes_max
        self.bytes = 0
        #: Number of the next batch.
        self.next = first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that is kept; of the next one if there is none."""
        return self._kept[0].number if self._kept else self.next

    def add(self, payload: bytes) -> int:
        """Number a batch and keep it; the oldest ones go. The last one is always kept."""
        number = self.next
        self.next += 1
        self._kept.append(KeptBatch(number, payload))
        self.bytes += len(payload)
        while len(self._kept) > 1 and (
            len(self._kept) > self._kept_max or self.bytes > self._bytes_max
        ):
            self.bytes -= len(self._kept.popleft().payload)
        return number

    def since(self, number: int, count: int) -> Iterator[KeptBatch]:
        """At most `count` kept batches from `number` on; none for a number of the future."""
        if not self._kept:
            return
        start = max(number, self.oldest) - self.oldest
        for index in range(start, min(start + count, len(self._kept))):
            yield self._kept[index]


@dataclass(slots=True)
class PublisherCounts:
    """What a publisher has done so far."""

    batches: int = 0  # that were sent
    bytes: int = 0  # of them
    replays: int = 0  # that were answered to their end
    snapshots: int = 0  # the same
    too_late: int = 0  # replays from a batch on that is not kept any more
    given_up: int = 0  # readers of a replay that took nothing, or had gone
    refused: int = 0  # messages to the replay socket that were no requests


@dataclass(slots=True)
class _Reader:
    """Somebody who reads a replay, or a snapshot: the next number, or the parts that are left and
    one that could not be sent yet. It is given up at `until`."""

    next: int
    until: float
    parts: Iterator[list[KVEvent]] | None = None
    held: tuple[bytes, bytes] | None = None
    peer: str = ""
    name: bytes = b""


class EventPublisher:
    """A stream at `endpoint`, with replay at `replay_endpoint`, if there is one.

    It belongs to the event loop in which it was started. Endpoints are as zmq writes them
    (`tcp://127.0.0.1:5600`); port 0 takes a free one.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        rank: int | None = 0,
        buffer: ReplayBuffer | None = None,
        snapshot: Callable[[], Iterator[list[KVEvent]]] | None = None,
    ) -> None:
        self.buffer = ReplayBuffer() if buffer is None else buffer  # one that is empty is false
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.counts = PublisherCounts()
        self._topic = topic.encode()
        self._rank = rank
        self._snapshot = snapshot
        #: By peer, so that none keeps the others out.
        self._readers: Recent[bytes, _Reader] = Recent(_READERS_MAX)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        #: The long-lived tasks of this publisher.
        self.tasks = Supervisor()
        self._pump: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bind the sockets. Raises ConfigError when an endpoint is taken or is none."""
        try:
            self._pub, self.endpoint = self._bound(zmq.PUB, _QUEUED_MAX, self.endpoint)
            if self.replay_endpoint:
                self._router, self.replay_endpoint = self._bound(
                    zmq.ROUTER, _REPLAY_QUEUED_MAX, self.replay_endpoint
                )
                self._descriptor = int(self._router.getsockopt(zmq.FD))
                asyncio.get_running_loop().add_reader(self._descriptor, self._take_requests)
        except BaseException:
            self.close()
            raise

    def publish(self, events: list[KVEvent], seconds: float) -> None:
        """Send these events, which happened at `seconds` since 1970. It never waits."""
        assert self._pub is not None, "publish before start"
        for batch in batches(events):
            self.publish_encoded(encode_batch(EventBatch(seconds, batch, self._rank)))

    def publish_encoded(self, payload: bytes) -> None:
        """Send one batch as it is. It never waits."""
        assert self._pub is not None, "publish before start"
        number = self.buffer.add(payload)
        self._pub.send_multipart((self._topic, _NUMBER.pack(number), payload), _NOBLOCK)
        self.counts.batches += 1
        self.counts.bytes += len(payload)
        if self._router is not None:
            self._take_requests()  # its descriptor tells of changes only

    @property
    def readers(self) -> int:
        """How many replays and snapshots are being sent."""
        return len(self._readers)

    def close(self) -> None:
        """End the stream. Idempotent."""
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = -1
        self._readers = Recent(_READERS_MAX)
        self._context.destroy(linger=0)

    def _bound(self, kind: int, queued_max: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        """A socket, and where it is bound."""
        try:
            socket = self._context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, queued_max)
            socket.setsockopt(zmq.RCVHWM, _REQUESTS_BURST)
            socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
            socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
            if kind == zmq.ROUTER:
                # Else batches beyond the limit would vanish from the middle of a replay.
                socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            bind(socket, endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot publish at {endpoint}: {zmq.strerror(error.errno or 0)}; expected an "
                "address such as tcp://127.0.0.1:5600"
            ) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _take_requests(self) -> None:
        router = self._router
        assert router is not None
        taken = 0
        while taken < _REQUESTS_BURST and int(router.get(_EVENTS)) & _POLLIN:
            taken += 1
            frames = router.recv_multipart(_NOBLOCK, copy=False)
            try:
                reader = self._reader(frames)
            except Exception:  # the others go on: nobody says again that their requests are here
                log.exception("a replay has failed before it began")
                reader = None
            if reader is None:
                self.counts.refused += 1
                continue  # nobody waits for an answer to what is no request
            if self._readers.put(reader.peer, reader.name, reader) is not None:
                self.counts.given_up += 1
        if taken == _REQUESTS_BURST:
            asyncio.get_running_loop().call_soon(self._take_if_open)
        if len(self._readers) and (self._pump is None or self._pump.done()):
            self._pump = self.tasks.until_done("replays", self._serve_readers)

    def _reader(self, frames: list[zmq.Frame]) -> _Reader | None:
        until = asyncio.get_running_loop().time() + _READER_TIMEOUT_S
        if len(frames) != 3 or len(frames[1]):
            return None
        reader, asked = _Reader(0, until, peer=_peer_of(frames[0]), name=frames[0].bytes), frames[2]
        if asked.bytes == SNAPSHOT:  # it is as long as a number
            reader.parts = None if self._snapshot is None else self._snapshot()
            return reader if reader.parts is not None else None
        if len(asked) != _NUMBER.size:
            return None
        reader.next = _NUMBER.unpack(asked.bytes)[0]
        self.counts.too_late += reader.next < self.buffer.oldest
        return reader

    def _take_if_open(self) -> None:
        if self._descriptor >= 0:
            self._take_requests()

    async def _serve_readers(self) -> None:
        """Send to all readers in turn until none is left."""
        loop = asyncio.get_running_loop()
        while len(self._readers):
            progress = False
            for reader in list(self._readers.values()):
                if self._readers.get(reader.peer, reader.name) is reader:
                    progress |= self._send_some(reader, loop.time())
                await asyncio.sleep(0)
            self._take_if_open()
            if not progress:
                await asyncio.sleep(_PAUSE_S)

    def _send_some(self, reader: _Reader, now: float) -> bool:
        """Send a reader its next batches, and the end; whether it took any."""
        name = reader.name
        sent = 0
        try:
            for number, payload in self._next_of(reader):
                self._send(name, (self._topic, number, payload))
                reader.held = None
                sent += 1
                if reader.parts is None:
                    (last,) = _NUMBER.unpack(number)
                    reader.next = last + 1
                if sent == (_REPLAY_BURST if reader.parts is None else _SNAPSHOT_BURST):
                    break
            else:
                self._send(name, (b"", _END, b""))
                self._readers.pop(reader.peer, name)
                if reader.parts is None:
                    self.counts.replays += 1
                else:
                    self.counts.snapshots += 1
                return True
        except zmq.Again:
            if not sent and now >= reader.until:
                self._readers.pop(reader.peer, name)
                self.counts.given_up += 1
                log.warning("a reader of a replay was given up", read_to=reader.next)
        except zmq.ZMQError:  # it has gone
            self._readers.pop(reader.peer, name)
            self.counts.given_up += 1
        if sent:
            reader.until = now + _READER_TIMEOUT_S
        return bool(sent)

    def _next_of(self, reader: _Reader) -> Iterator[tuple[bytes, bytes]]:
        """Numbers and batches that a reader has not got yet."""
        if reader.parts is None:
            for number, payload in self.buffer.since(reader.next, _REPLAY_BURST + 1):
                yield _NUMBER.pack(number), payload
            return
        if reader.held is not None:
            yield reader.held
        for part in reader.parts:
            # As of now: what is published meanwhile comes after it.
            batch = EventBatch(0.0, part, self._rank)
            reader.held = (_NUMBER.pack(self.buffer.next - 1), encode_batch(batch))
            yield reader.held

    def _send(self, name: bytes, frames: tuple[bytes, bytes, bytes]) -> None:
        assert self._router is not None
        self._router.send_multipart((name, b"", *frames), _NOBLOCK)


def _peer_of(frame: zmq.Frame) -> str:
    """Whose message it is, as far as the transport tells."""
    try:
        return network_of(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""
