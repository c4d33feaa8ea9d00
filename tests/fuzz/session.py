"""Any bytes of a client: at most its own link ends, and no pin or reservation of it remains.

An input is what arrives on one connection. An even length means tcp, an odd one shm.
"""

from __future__ import annotations

import logging

import atheris

with atheris.instrument_imports(include=["kvpool", "kvpool_transports"]):
    from kvpool.wire import frames, messages
    from tests.wire import offline

from kvpool.testing.invariants import check_invariants
from tests.fuzz.driver import Record, fuzz
from tests.wire.samples import KEYS, SAMPLES

DIGEST = {**KEYS, "digests": bytes(range(32))}


class Loud(logging.Handler):
    """A session logs unexpected exceptions as errors; here each of them is a finding."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and record.exc_info:
            raise AssertionError(record.getMessage()) from record.exc_info[1]


def target(data: bytes) -> None:
    loop.run_until_complete(one_client(data))


async def one_client(data: bytes) -> None:
    server = offline.server()
    await offline.converse(server, [data], mapped=bool(len(data) % 2))
    held = (
        server.store.held.pins,
        server.store.held.reservations,
        server.store.held.quarantined,
    )
    assert held == (0, 0, 0), held
    check_invariants(server.store)
    await server.close()


def frame(message: messages.Message) -> bytes:
    return frames.encode_frame(*messages.encode(message))


def seeds() -> list[bytes]:
    hello = frame(messages.Hello("default", "fuzz"))
    reserve = messages.Reserve(**DIGEST, part=0, parents=bytes(32), sizes=[64], wait_s=0.5)
    write = frame(reserve) + frames.encode_frame(messages.PAYLOAD, b"", 64) + bytes(64)
    sealed = write + frame(messages.Seal([2], [1], True, 0.1))
    read = frame(messages.Read(**DIGEST, part=0, buffer_sizes=[64]))
    requests = [frame(sample) for sample in SAMPLES if messages.TYPES[type(sample)] < 32]
    lives = [write, sealed, sealed + read, sealed + read * 3, frame(reserve) + sealed, *requests]
    return [hello + life for life in lives] + [hello + life + hello for life in lives]


def split(data: bytes) -> list[Record]:
    """Split into frames; for a payload frame the block's bytes take the place of the body."""
    parts = []
    while len(data) >= frames.HEADER_SIZE:
        body_size = int.from_bytes(data[4:8], "little") + int.from_bytes(data[8:16], "little")
        end = frames.HEADER_SIZE + body_size
        parts.append((data[3], data[frames.HEADER_SIZE : end]))
        data = data[end:]
    return parts


def join(parts: list[Record]) -> bytes:
    return b"".join(
        frames.encode_frame(number, b"", len(body)) + body
        if number == messages.PAYLOAD
        else frames.encode_frame(number, body)
        for number, body in parts
    )


if __name__ == "__main__":
    logging.getLogger("kvpool").addHandler(Loud())
    loop = offline.Loop()
    fuzz("session", target, seeds(), split, join)
