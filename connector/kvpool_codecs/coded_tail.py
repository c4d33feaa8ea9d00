"""What stands behind a coded block: whether it is encoded, by which codec, and what it decodes to.

Pure. A block that the pool has under an engine's name is one that some engine has written there.
Whatever it is (cut, of another codec, of another size, random bytes), it is either decoded to the
bytes that its writer had, or it is a miss with a reason.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from kvpool_codecs.codec import BadEncoding, Flat

#: A magic word, whether it is encoded, the block's size, the codec, a hash of the decoded bytes.
_FORM: Final = struct.Struct("<4sB3xQ8s8s")
_MAGIC: Final = b"kvc1"
TAIL_BYTES: Final = _FORM.size


class CodedTail(NamedTuple):
    """Of one part of a block. Without `encoded` its bytes stand there as they are."""

    encoded: bool
    size: int
    codec: bytes
    content: bytes = bytes(8)

    def packed(self) -> bytes:
        return _FORM.pack(_MAGIC, self.encoded, self.size, self.codec, self.content)


def opened(data: Flat, size: int, codec: bytes) -> CodedTail:
    """The tail of a block of `size` bytes that `codec` can read.

    Raises BadEncoding, whose text is a reason of few words.
    """
    if len(data) != TAIL_BYTES:
        raise BadEncoding("not coded")
    magic, encoded, found_size, found_codec, content = _FORM.unpack(data)
    if magic != _MAGIC or encoded > 1:
        raise BadEncoding("not coded")
    if found_codec != codec:
        raise BadEncoding("other codec")
    if found_size != size:
        raise BadEncoding("wrong size")
    return CodedTail(bool(encoded), found_size, found_codec, content)


def content_of(block: Flat) -> bytes:
    """A hash that finds mistakes of a codec; the pool's own checks find those of the way."""
    return xxhash.xxh3_64_digest(block)
