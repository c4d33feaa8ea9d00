"""Any bytes are a message, or a PeerError: headers, envelopes, every decoder, packed digests.

The first byte of an input selects the decoder of the rest.
"""

from __future__ import annotations

import atheris

with atheris.instrument_imports(include=["kvpool"]):
    from kvpool.errors import PeerError
    from kvpool.net import requests
    from kvpool.wire import frames, messages

from tests.fuzz.driver import Record, fuzz
from tests.wire.samples import SAMPLES
from tests.wire.test_frame_reader import received

CLUSTER = requests.cluster_id("default")


def target(data: bytes) -> None:
    number, rest = (data[0], data[1:]) if data else (0, b"")
    try:
        if number == 0 and len(rest) >= frames.HEADER_SIZE:
            frames.decode_header(rest)
            read_frames(rest)
        elif number == messages.PAYLOAD:
            requests.envelope_id(rest)
            requests.decode_envelope(rest, CLUSTER)
        else:
            decode(number, rest)
    except PeerError:
        pass


def read_frames(data: bytes) -> None:
    """Byte by byte and all at once, a frame reader finds the same."""
    outcomes = [
        received(chunks, 8) for chunks in ([data], [data[n : n + 1] for n in range(len(data))])
    ]
    whole, cut = [(outcome.frames, type(outcome.error)) for outcome in outcomes]
    assert whole == cut


def decode(number: int, body: bytes) -> None:
    expected = messages.message_type(number)
    if expected is None:
        return
    message = messages.decode_answer(expected, number, body)
    again = messages.decode(expected, *messages.encode(message))
    assert again == message
    if isinstance(message, messages.Keys):
        messages.unpack_keys(message)
        messages.unpack_batch(message)
    if isinstance(message, messages.Reserve):
        messages.unpack_parents(message.parents, message.digest_size)


def seeds() -> list[bytes]:
    bodies = [bytes([number]) + body for number, body in map(messages.encode, SAMPLES)]
    header = frames.encode_frame(2, b"body")
    envelope = requests.encode_envelope(40, CLUSTER, 1, b"body")
    return [*bodies, b"\0" + header, bytes([messages.PAYLOAD]) + envelope]


def split(data: bytes) -> list[Record]:
    return [(data[0], data[1:])] if data else []


def join(parts: list[Record]) -> bytes:
    return b"".join(bytes([number]) + body for number, body in parts)


if __name__ == "__main__":
    fuzz("wire", target, seeds(), split, join)
