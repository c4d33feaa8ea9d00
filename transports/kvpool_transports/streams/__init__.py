"""For transports over byte streams: what their authors may use.

A transport that moves frames over some kind of byte stream brings two things of its own, how to
listen and how to dial. Everything else is here; `examples/write_a_transport.py` is a whole one.

    Stream          one connection, either end: an asyncio protocol for `create_connection`
    StreamPool      a client's streams to one server, dialled by your function
    handshake       what a client says first on a stream
    StreamChannel   the client's half: a `Channel` whose frames carry the bytes
    MappedChannel   the same where the client maps the server's memory, and copies by itself
    Sessions        the server's half: serves each stream that you accept
    StreamSession   one of them, for a transport that has more to do when a client arrives
    os_errors       turns what sockets raise into the errors that a caller may get

Only the names in `__all__` are promised to stay.
"""

from kvpool_transports.streams.mapped_channel import MappedChannel
from kvpool_transports.streams.pool import StreamPool, os_errors
from kvpool_transports.streams.requests import StreamChannel, handshake
from kvpool_transports.streams.server import Sessions, StreamSession
from kvpool_transports.streams.stream import Stream

__all__ = [
    "MappedChannel",
    "Sessions",
    "Stream",
    "StreamChannel",
    "StreamPool",
    "StreamSession",
    "handshake",
    "os_errors",
]
