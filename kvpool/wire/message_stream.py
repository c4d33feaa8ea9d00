"""Control messages on a stream of bytes: each one behind its size, u32, little-endian.

A pure reader: it is fed what arrives, in pieces of any size, and knows no socket. It never keeps
more than one message that is not complete. (design: control-plane)
"""

from __future__ import annotations

import struct
from typing import Final

from kvpool.errors import BadFrame
from kvpool.wire.frames import BODY_SIZE_MAX, HEADER_SIZE

MESSAGE_SIZE_MAX: Final = HEADER_SIZE + BODY_SIZE_MAX

_SIZE: Final = struct.Struct("<I")


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
