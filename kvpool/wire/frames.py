"""The frames of the data plane, in both directions, without any I/O.

A frame on a stream of bytes:   "kv" | version u8 | type u8 | body u32 | payload u64

The body is one msgspec message of the type the header names; the payload is raw block bytes, which
are received straight into their destination. All integers are little-endian.

`FrameReader` is fed bytes, and gives frames or raises PeerError. The owner of a connection asks for
one frame at a time, and gets it from the step that completes it. Header and body collect in the
reader's own buffer. As soon as they are complete, the owner is asked where the payload goes, and
from then on `memory` is that memory itself, so payload bytes are not copied (but for those of small
pieces, and those that came in one piece with their header). What arrives before a frame is asked
for stays in the buffer, at most READ_AHEAD bytes of it. (The shape, a table of states that only
`_move` follows, is h11's.)
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import xxhash

from kvpool.errors import BadFrame, InvariantViolated, KvpoolError, VersionMismatch
from kvpool.protocols import IdleTimeout
from kvpool.types import BATCH_BLOCKS_MAX, BLOCK_SIZE_MAX
from kvpool.wire import messages
from kvpool.wire.messages import PAYLOAD, TYPES, Error, Message

#: All processes of a pool speak the same (design: streams).
PROTOCOL_VERSION: Final = 8
BODY_SIZE_MAX: Final = 1 << 20
PAYLOAD_SIZE_MAX: Final = BATCH_BLOCKS_MAX * BLOCK_SIZE_MAX
HEADER_SIZE: Final = 16

#: Received ahead of the frame that is asked for; what is more waits in the kernel.
READ_AHEAD: Final = 64 << 10

#: Received at most this much at once: it is then hashed while it is in the cache.
STEP: Final = 256 << 10
#: Pieces below this size are filled through the buffer, many at once: a system call and a turn of
#: the loop for each of them cost more than the copy.
SMALL: Final = READ_AHEAD // 2

_HEADER = struct.Struct("<2sBBIQ")
_MAGIC: Final = b"kv"
_ERROR: Final = TYPES[Error]

#: The memory of one block: its pieces, one after the other.
Pieces: TypeAlias = Sequence[memoryview]


class Frame(NamedTuple):
    """A data-plane frame without its payload."""

    type: int
    body: bytes
    payload_size: int


def encode_frame(type: int, body: bytes, payload_size: int = 0) -> bytes:
    """Header and body of a frame; the payload follows it on the stream."""
    if len(body) > BODY_SIZE_MAX:
        raise BadFrame(f"body of {len(body)} bytes, limit {BODY_SIZE_MAX}")
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, type, len(body), payload_size) + body


def encode_message(message: Message | None, payload_size: int = 0) -> bytes:
    """The frame of a message; of none the payload frame."""
    if message is None:
        return encode_frame(PAYLOAD, b"", payload_size)
    return encode_frame(TYPES[type(message)], messages.ENCODER.encode(message), payload_size)


def decode_header(
    header: bytes | bytearray | memoryview, body_max: int = BODY_SIZE_MAX
) -> tuple[int, int, int]:
    """The type of a frame, and the sizes of its body and payload. Raises PeerError."""
    magic, version, type, body_size, payload_size = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        raise BadFrame(f"frame starts with {bytes(header[:4])!r}, expected {_MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise wrong_version(version)
    if body_size > body_max:
        raise BadFrame(f"body of {body_size} bytes, limit {body_max}")
    if payload_size > PAYLOAD_SIZE_MAX:
        raise BadFrame(f"payload of {payload_size} bytes, limit {PAYLOAD_SIZE_MAX}")
    return type, body_size, payload_size


def wrong_version(version: int) -> VersionMismatch:
    """The error for a peer of another version."""
    return VersionMismatch(
        f"peer speaks protocol {version}, this process {PROTOCOL_VERSION}: run the same release of "
        "kvpool in all processes of a pool"
    )


class PayloadTarget(Protocol):
    """Where the bytes of one payload go."""

    #: Bytes that have not arrived yet.
    missing: int
    #: The memory for the next bytes; not empty while some are missing.
    memory: memoryview

    def received(self, count: int) -> None:
        """The first `count` bytes of `memory` have arrived."""


#: Gets a frame (header and body), returns where its payload goes; None: it must have none. May
#: raise a KvpoolError.
ChooseTarget: TypeAlias = Callable[[Frame], PayloadTarget | None]


# IntEnum, because the members of an Enum are hashed in Python, and each frame looks up four.
class ReaderState(enum.IntEnum):
    """Where a reader is in its stream."""

    #: Nobody has asked for the next frame yet.
    IDLE = enum.auto()
    #: Header or body of the frame that was asked for are incomplete.
    HEAD = enum.auto()
    #: Some of its payload is missing.
    PAYLOAD = enum.auto()
    #: After an error or `close`: the start of the next frame is unknown, bytes are dropped.
    CLOSED = enum.auto()


class ReaderEvent(enum.IntEnum):
    """What moves a reader from one state to another."""

    ASK = enum.auto()
    HEAD_COMPLETE = enum.auto()
    FRAME_COMPLETE = enum.auto()
    CLOSE = enum.auto()


#: Every step that there is. Anything else is a mistake of the owner.
TRANSITIONS: Final[Mapping[ReaderState, Mapping[ReaderEvent, ReaderState]]] = {
    ReaderState.IDLE: {ReaderEvent.ASK: ReaderState.HEAD, ReaderEvent.CLOSE: ReaderState.CLOSED},
    ReaderState.HEAD: {
        ReaderEvent.HEAD_COMPLETE: ReaderState.PAYLOAD,
        # The frame has no payload, or the payload came together with the head.
        ReaderEvent.FRAME_COMPLETE: ReaderState.IDLE,
        ReaderEvent.CLOSE: ReaderState.CLOSED,
    },
    ReaderState.PAYLOAD: {
        ReaderEvent.FRAME_COMPLETE: ReaderState.IDLE,
        ReaderEvent.CLOSE: ReaderState.CLOSED,
    },
    ReaderState.CLOSED: {ReaderEvent.CLOSE: ReaderState.CLOSED},
}


class FrameReader:
    """The receiving half of one stream. See `TRANSITIONS` for its states."""

    def __init__(self) -> None:
        self.state = ReaderState.IDLE
        #: There is no room for more before a frame is asked for: stop receiving.
        self.full = False
        #: Some of a frame has arrived, and not all of it.
        self.begun = False
        #: A longer body is refused.
        self.body_max = BODY_SIZE_MAX
        self._buffer = memoryview(bytearray(READ_AHEAD))
        self._filled = 0
        #: Where the next bytes go.
        self.memory = self._buffer
        self._choose: ChooseTarget | None = None
        self._target: PayloadTarget | None = None
        self._small = False  # its first piece, and so probably all of them
        self._copies = False  # the next bytes for it come through the buffer
        self._frame: Frame | None = None

    # --- for the owner ---------------------------------------------------------------------

    def ask(self, choose: ChooseTarget) -> Frame | None:
        """Ask for the next frame; returns it if it is complete already. Raises as `received`."""
        self._move(ReaderEvent.ASK)
        self._choose = choose
        return self._parse()

    def close(self) -> None:
        """Drop everything that arrives from now on. Idempotent.

        After a frame that was given up half way: its target must not be written into any more.
        """
        self._move(ReaderEvent.CLOSE)
        self._choose = self._target = self._frame = None
        self._hold(0)

    @property
    def position(self) -> tuple[int, int]:
        """Differs from an earlier value if bytes of this frame have arrived since then."""
        return self._filled, self._target.missing if self._target is not None else 0

    # --- for the code that receives the bytes ------------------------------------------------

    def received(self, count: int) -> Frame | None:
        """The first `count` bytes of `memory` have arrived; returns the frame that they complete.

        Raises PeerError for what is no frame, or what `choose` raises; then the reader is closed.
        """
        target = self._target
        if target is not None:
            if self._copies:
                self._deliver(0, count, target)
            else:
                target.received(count)
            if target.missing:
                if self._small:
                    self._aim(target)
                else:  # as `_aim`, for each of many chunks
                    self.memory = target.memory
                return None
            self._hold(0)
            return self._complete()
        if self.state is ReaderState.CLOSED:
            return None
        self._hold(self._filled + count)
        return self._parse() if self.state is ReaderState.HEAD else None

    # --- inside ------------------------------------------------------------------------------

    def _parse(self) -> Frame | None:
        """Make a frame of what is in the buffer, and hand the rest of it to its target."""
        if self._filled < HEADER_SIZE or self._choose is None:
            return None
        try:
            type, body_size, payload_size = decode_header(self._buffer, self.body_max)
            head_size = HEADER_SIZE + body_size
            if self._filled < head_size:
                if self._filled == len(self._buffer):
                    self._grow(head_size)
                return None
            frame = Frame(type, bytes(self._buffer[HEADER_SIZE:head_size]), payload_size)
            target = self._choose(frame)
            expected = target.missing if target is not None else 0
            if expected != payload_size and type != _ERROR:
                raise BadFrame(f"payload of {payload_size} bytes, expected {expected}")
        except KvpoolError:
            self.close()
            raise
        self._frame = frame
        if target is None or not payload_size:
            self._drop(head_size)
            return self._complete()
        self._small = len(target.memory) < SMALL
        self._drop(self._deliver(head_size, self._filled, target))
        if not target.missing:
            return self._complete()
        self._move(ReaderEvent.HEAD_COMPLETE)
        self._target, self.begun = target, True
        self._aim(target)
        return None

    def _aim(self, target: PayloadTarget) -> None:
        """Choose where the next bytes of a payload go; never more than are missing."""
        memory = target.memory
        self._copies = self._small and len(memory) < SMALL and len(memory) < target.missing
        self.memory = self._buffer[: target.missing] if self._copies else memory

    def _deliver(self, start: int, end: int, target: PayloadTarget) -> int:
        """Copy payload bytes of the buffer to their target; returns where they end."""
        while start < end and target.missing:
            memory = target.memory
            count = min(len(memory), end - start)
            memory[:count] = self._buffer[start : start + count]
            target.received(count)
            start += count
        return start

    def _drop(self, count: int) -> None:
        """Forget the first bytes of the buffer, and what it has grown by."""
        rest = bytes(self._buffer[count : self._filled])
        if len(self._buffer) > READ_AHEAD:
            self._buffer = memoryview(bytearray(READ_AHEAD))
        self._buffer[: len(rest)] = rest
        self._hold(len(rest))

    def _hold(self, filled: int) -> None:
        """So many bytes are in the buffer; the next ones come behind them."""
        self._filled = filled
        self.begun = filled > 0
        self.full = filled == len(self._buffer)
        self.memory = self._buffer[filled:]

    def _grow(self, head_size: int) -> None:
        """For one body: twice what has arrived, not what its header claims (design: bounds).

        A peer must send bytes to make us allocate some.
        """
        larger = memoryview(bytearray(min(head_size, 2 * self._filled)))
        larger[: self._filled] = self._buffer[: self._filled]
        self._buffer = larger
        self._hold(self._filled)

    def _complete(self) -> Frame | None:
        self._move(ReaderEvent.FRAME_COMPLETE)
        frame = self._frame
        self._choose = self._target = self._frame = None
        return frame

    def _move(self, event: ReaderEvent) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise InvariantViolated(f"{event.name} while the reader is {self.state.name}") from None


class PayloadReceiver:
    """Where a payload goes: into blocks, each hashed across its pieces if there are seeds.

    No block is empty. `checksums` grows by one for each block that is full; `idle_timeout` is
    touched by every step.
    """

    __slots__ = (
        "_at",
        "_hasher",
        "_idle_timeout",
        "_left",
        "_number",
        "_piece",
        "_pieces",
        "_seeds",
        "blocks",
        "checksums",
        "memory",
        "missing",
    )

    def __init__(
        self,
        blocks: Sequence[Pieces],
        seeds: Sequence[int] | None = None,
        idle_timeout: IdleTimeout | None = None,
    ) -> None:
        self.blocks = blocks
        self._seeds = seeds
        self._idle_timeout = idle_timeout
        self._number = -1  # of the block that is being filled
        self._left = 0  # bytes that it still needs
        self._pieces: Iterator[memoryview] = iter(())
        self._piece = memoryview(b"")
        self._at = 0  # in that piece
        #: Where the next bytes go; empty when none are missing.
        self.memory = self._piece
        self._hasher: xxhash.xxh3_64 | None = None
        self.missing = sum([len(piece) for pieces in blocks for piece in pieces])
        self.checksums: list[int] = []
        if self.missing:
            self._next_block()
            self.memory = self._piece[:STEP]

    def received(self, count: int) -> None:
        """The first `count` bytes of `memory` have arrived."""
        first = self._at
        self._at += count
        self._left -= count
        self.missing -= count
        if self._hasher is not None:
            self._hasher.update(self._piece[first : self._at])
        if not self._left:
            if self._hasher is not None:
                self.checksums.append(self._hasher.intdigest())
            if self.missing:
                self._next_block()
        elif self._at == len(self._piece):
            self._next_piece()
        self.memory = self._piece[self._at : self._at + STEP]
        if self._idle_timeout is not None:
            self._idle_timeout.touch()

    def filled(self, count: int) -> None:
        """The next `count` bytes are in place, however they came there."""
        while count:
            step = min(count, len(self.memory))
            self.received(step)
            count -= step

    def _next_block(self) -> None:
        self._number += 1
        pieces = self.blocks[self._number]
        self._left = sum(map(len, pieces))
        self._pieces = iter(pieces)
        if self._seeds is not None:
            self._hasher = xxhash.xxh3_64(seed=self._seeds[self._number])
        self._next_piece()

    def _next_piece(self) -> None:
        self._at = 0
        self._piece = next(self._pieces)
        while not self._piece:
            self._piece = next(self._pieces)


def no_payload(frame: Frame) -> None:
    """The target of an exchange that expects none."""
