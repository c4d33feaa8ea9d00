"""The messages of the control plane: an envelope each, and each behind its size on a stream.

A message on a stream of bytes:   size u32 | "kM" | version u8 | type u8 | cluster u32 | id u64

The body is one msgspec message of the type the envelope names. All integers are little-endian. The
reader is pure: it is fed what arrives, in pieces of any size, and never keeps more than one message
that is not complete. (design: control-plane)
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from kvpool.errors import BadFrame, VersionMismatch
from kvpool.wire.frames import BODY_SIZE_MAX, HEADER_SIZE, PROTOCOL_VERSION, wrong_version

MESSAGE_SIZE_MAX: Final = HEADER_SIZE + BODY_SIZE_MAX

_SIZE: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<2sBBIQ")
_MAGIC: Final = b"kM"


class Envelope(NamedTuple):
    """A control-plane message, still encoded."""

    type: int
    id: int
    body: bytes


def cluster_id(cluster: str) -> int:
    """32 bits that distinguish the messages of different clusters. Not a secret."""
    return xxhash.xxh3_64_intdigest(cluster.encode()) & 0xFFFFFFFF


def encode_envelope(type: int, cluster: int, id: int, body: bytes) -> bytes:
    """One control-plane message."""
    if len(body) > BODY_SIZE_MAX:
        raise BadFrame(f"body of {len(body)} bytes, limit {BODY_SIZE_MAX}")
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, type, cluster, id) + body


def decode_envelope(message: bytes, cluster: int) -> Envelope:
    """A control-plane message of this cluster. Raises PeerError for anything else."""
    if not HEADER_SIZE <= len(message) <= HEADER_SIZE + BODY_SIZE_MAX:
        raise BadFrame(f"message of {len(message)} bytes")
    magic, version, type, theirs, id = _HEADER.unpack_from(message)
    if magic != _MAGIC:
        raise BadFrame(f"message starts with {message[:4]!r}, expected {_MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise wrong_version(version)
    if theirs != cluster:
        raise VersionMismatch("peer belongs to another cluster (setting `cluster`)")
    return Envelope(type, id, message[HEADER_SIZE:])


def envelope_id(message: bytes) -> int | None:
    """The request id of a message that may not decode, so that it can be refused by name."""
    if len(message) >= HEADER_SIZE and message[:2] == _MAGIC:
        id: int = _HEADER.unpack_from(message)[4]
        return id
    return None


def with_size(message: bytes) -> bytes:
    """One message as it travels."""
    return _SIZE.pack(len(message)) + message


class MessageReader:
    """Cuts one stream into its messages. `size_max` may change between two calls of `feed`."""

    def __init__(self, size_max: int = MESSAGE_SIZE_MAX) -> None:
        self.size_max = size_max
        #: Of a message that is not complete.
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order.

        Raises BadFrame for one that is longer than `size_max`; nothing more can be read then.
        """
        rest = self.rest
        if rest:
            rest += data
        source: bytes | bytearray = rest or data
        at, end = 0, len(source)
        messages = []
        while at + _SIZE.size <= end:
            (size,) = _SIZE.unpack_from(source, at)
            if size > self.size_max:
                raise BadFrame(f"message of {size} bytes, limit {self.size_max}")
            begin = at + _SIZE.size
            if begin + size > end:
                break
            at = begin + size
            messages.append(bytes(source[begin:at]))
        if source is rest:
            del rest[:at]
        else:
            rest += data[at:]
        return messages
