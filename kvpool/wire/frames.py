"""Frames: the 16 bytes in front of everything, and the bounds on what may follow.

Data plane (a byte stream):   "kv" | version u8 | type u8 | body u32 | payload u64
Control plane (a message):     "kM" | version u8 | type u8 | cluster u32 | id u64

The body is one msgspec message of the type the header names; the payload is raw block bytes, which
are received straight into their destination. All integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from kvpool.errors import BadFrame, VersionMismatch
from kvpool.types import BATCH_BLOCKS_MAX, BLOCK_SIZE_MAX

#: All processes of a pool speak the same (design: streams).
PROTOCOL_VERSION: Final = 6
BODY_SIZE_MAX: Final = 1 << 20
PAYLOAD_SIZE_MAX: Final = BATCH_BLOCKS_MAX * BLOCK_SIZE_MAX
HEADER_SIZE: Final = 16

_DATA = struct.Struct("<2sBBIQ")
_CONTROL = struct.Struct("<2sBBIQ")
_DATA_MAGIC: Final = b"kv"
_CONTROL_MAGIC: Final = b"kM"


class Frame(NamedTuple):
    """A data-plane frame without its payload."""

    type: int
    body: bytes
    payload_size: int


class Header(NamedTuple):
    """What stands in front of a data-plane frame."""

    type: int
    body_size: int
    payload_size: int


class Envelope(NamedTuple):
    """A control-plane message, still encoded."""

    type: int
    id: int
    body: bytes


def cluster_id(cluster: str) -> int:
    """32 bits that distinguish the messages of different clusters. Not a secret."""
    return xxhash.xxh3_64_intdigest(cluster.encode()) & 0xFFFFFFFF


def encode_frame(type: int, body: bytes, payload_size: int = 0) -> bytes:
    """Header and body of a frame; the payload follows it on the stream."""
    if len(body) > BODY_SIZE_MAX:
        raise BadFrame(f"body of {len(body)} bytes, limit {BODY_SIZE_MAX}")
    return _DATA.pack(_DATA_MAGIC, PROTOCOL_VERSION, type, len(body), payload_size) + body


def decode_header(header: bytes | bytearray | memoryview, body_max: int = BODY_SIZE_MAX) -> Header:
    """The header of a data-plane frame. Raises PeerError."""
    magic, version, type, body_size, payload_size = _DATA.unpack_from(header)
    if magic != _DATA_MAGIC:
        raise BadFrame(f"frame starts with {bytes(header[:4])!r}, expected {_DATA_MAGIC!r}")
    _check_version(version)
    if body_size > body_max:
        raise BadFrame(f"body of {body_size} bytes, limit {body_max}")
    if payload_size > PAYLOAD_SIZE_MAX:
        raise BadFrame(f"payload of {payload_size} bytes, limit {PAYLOAD_SIZE_MAX}")
    return Header(type, body_size, payload_size)


def encode_envelope(type: int, cluster: int, id: int, body: bytes) -> bytes:
    """One control-plane message."""
    if len(body) > BODY_SIZE_MAX:
        raise BadFrame(f"body of {len(body)} bytes, limit {BODY_SIZE_MAX}")
    return _CONTROL.pack(_CONTROL_MAGIC, PROTOCOL_VERSION, type, cluster, id) + body


def decode_envelope(message: bytes, cluster: int) -> Envelope:
    """A control-plane message of this cluster. Raises PeerError for anything else."""
    if not HEADER_SIZE <= len(message) <= HEADER_SIZE + BODY_SIZE_MAX:
        raise BadFrame(f"message of {len(message)} bytes")
    magic, version, type, theirs, id = _CONTROL.unpack_from(message)
    if magic != _CONTROL_MAGIC:
        raise BadFrame(f"message starts with {message[:4]!r}, expected {_CONTROL_MAGIC!r}")
    _check_version(version)
    if theirs != cluster:
        raise VersionMismatch("peer belongs to another cluster (setting `cluster`)")
    return Envelope(type, id, message[HEADER_SIZE:])


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"peer speaks protocol {version}, this process {PROTOCOL_VERSION}: run the same "
            "release of kvpool in all processes of a pool"
        )


def envelope_id(message: bytes) -> int | None:
    """The request id of a message that may not decode, so that it can be refused by name."""
    if len(message) >= HEADER_SIZE and message[:2] == _CONTROL_MAGIC:
        id: int = _CONTROL.unpack_from(message)[4]
        return id
    return None
