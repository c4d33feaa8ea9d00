"""Any bytes either parse or raise PeerError, nothing else (G11)."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.errors import BadFrame, BadMessage, PeerError, VersionMismatch
from kvpool.wire import frames, messages
from tests.conftest import keys

FUZZ = settings(max_examples=300, derandomize=True, deadline=None)
KEYS = {"namespace": "n", "parts": 1, "digest_size": 32, "digests": b"".join(keys("k", 2))}
#: A valid instance of each message; `hypothesis` mutates their encodings.
SAMPLES: list[messages.Message] = [
    messages.Error("BadMessage", "why"),
    messages.Hello("default", "client"),
    messages.Welcome("server", 1 << 30),
    messages.Reserve(**KEYS, part=0, parents=bytes(64), sizes=[1, 2], wait_s=0.5),
    messages.Reserved(b"\x04\x01", [7], [4096]),
    messages.Seal([7], [2**64 - 1], True, 1.0),
    messages.Sealed(b"\x00"),
    messages.Read(**KEYS, part=0, room=[1, 2]),
    messages.Data(b"\x00", [10], [20]),
    messages.Pinned(b"\x00", [0], [10], [20]),
    messages.Unpin(),
    messages.Remove(**KEYS),
    messages.Suspect(**KEYS, part=0),
    messages.Removed(b"\x01"),
    messages.Register("s", 1, "h", ["tcp://x:1"], ["dram"], 1 << 30),
    messages.Registered(True, "m"),
    messages.Heartbeat("s", 1, 2, 3, 4, 5, 6, 7, 0.5, {"a": 1}),
    messages.Known(True),
    messages.Leave("s", 1),
    messages.Announce("s", 1, 2, [messages.BlockChanges(**KEYS, part=0, tier=0, status=0)]),
    messages.Inventory("s", 1, 2, 0, True, []),
    messages.Announced(True),
    messages.Find(**KEYS, prefix=True),
    messages.Found([(0, 1, [("s", "dram", 0)])], b"\x01"),
    messages.Place(**KEYS, parent=b"", size=10, host="h", copies=1),
    messages.Placed(["s"], b"\x00"),
    messages.Members(),
    messages.MembersAre("m", 1.0, 2, []),
    messages.Explain(**KEYS),
    messages.Explained([(0, "text", [])]),
]
EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=lambda m: type(m).__name__)


def parses_or_is_refused(expected: type[messages.Message], body: bytes) -> None:
    try:
        decoded = messages.decode(expected, messages.TYPES[expected], body)
    except PeerError:
        return
    assert isinstance(decoded, expected)


def test_every_message_has_a_sample_and_a_number_of_its_own() -> None:
    assert {type(sample) for sample in SAMPLES} == set(messages.TYPES)
    numbers = [*messages.TYPES.values(), messages.PAYLOAD]
    assert len(set(numbers)) == len(numbers)


@EVERY
def test_round_trip(sample: messages.Message) -> None:
    number, body = messages.encode(sample)
    assert messages.decode(type(sample), number, body) == sample
    with pytest.raises(BadMessage, match="expected"):
        messages.decode(type(sample), 250, body)


@EVERY
@FUZZ
@given(data=st.data())
def test_mutated_messages(sample: messages.Message, data: st.DataObject) -> None:
    _, body = messages.encode(sample)
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated)))
        kind = data.draw(st.integers(0, 3))
        if kind == 0:
            del mutated[at:]
        elif kind == 1:
            mutated[at:at] = data.draw(st.binary(max_size=20))
        elif kind == 2 and at < len(mutated):
            mutated[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            mutated[at : at + 2] = data.draw(st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xc3"]))
    parses_or_is_refused(type(sample), bytes(mutated))


@EVERY
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91" * 100_000,
        b"\x81\xa1x" * 50_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xa4\xff\xfe\xfd\xfc",
        b"\x81\xa9namespace\xa2\xff\xff",
    ],
    ids=["empty", "nested", "nested maps", "map32", "array32", "bin32", "utf8", "utf8 field"],
)
def test_hostile_bodies(sample: messages.Message, body: bytes) -> None:
    if not body and not msgspec.structs.fields(type(sample)):
        body = b"\xc0"
    with pytest.raises(BadMessage):
        messages.decode(type(sample), messages.TYPES[type(sample)], body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("part", -1),
        ("part", 1 << 16),
        ("part", True),
        ("parts", 0),
        ("namespace", ""),
        ("namespace", "x" * 513),
        ("digest_size", 15),
        ("digest_size", 33),
        ("wait_s", float("nan")),
        ("wait_s", -1.0),
        ("wait_s", float("inf")),
        ("sizes", [0]),
        ("sizes", [-1]),
        ("sizes", [1 << 33]),
        ("sizes", [1] * 1025),
        ("digests", "text"),
        ("extra", 1),
    ],
)
def test_values_out_of_bounds(field: str, value: Any) -> None:
    fields: dict[str, Any] = {
        **KEYS,
        "part": 0,
        "parents": bytes(64),
        "sizes": [1, 1],
        "wait_s": 1.0,
    }
    body = msgspec.msgpack.encode({**fields, field: value})
    with pytest.raises(BadMessage):
        messages.decode(messages.Reserve, 4, body)


@settings(max_examples=2000, derandomize=True, deadline=None)
@given(st.binary(max_size=64))
@example(b"GET / HTTP/1.1\r\n")
def test_any_header_parses_or_is_refused(header: bytes) -> None:
    if len(header) >= frames.HEADER_SIZE:
        try:
            frames.decode_header(header)
        except PeerError:
            pass
    try:
        frames.decode_envelope(header, 7)
    except PeerError:
        pass
    frames.envelope_id(header)


@FUZZ
@given(st.integers(0, 255), st.binary(max_size=100), st.integers(0, 2**40))
def test_frames_round_trip(type: int, body: bytes, payload: int) -> None:
    encoded = frames.encode_frame(type, body, payload)
    assert frames.decode_header(encoded) == (type, len(body), payload)
    envelope = frames.encode_envelope(type, 7, payload, body)
    assert frames.decode_envelope(envelope, 7) == (type, payload, body)


def test_limits_and_versions_are_named() -> None:
    with pytest.raises(BadFrame, match="limit"):
        frames.encode_frame(1, bytes(frames.BODY_SIZE_MAX + 1))
    with pytest.raises(BadFrame, match="limit"):
        frames.decode_header(struct.pack("<2sBBIQ", b"kv", 1, 1, 1 << 30, 0))
    with pytest.raises(BadFrame, match="limit"):
        frames.decode_header(struct.pack("<2sBBIQ", b"kv", 1, 1, 0, 2**63))
    with pytest.raises(VersionMismatch, match="protocol 9"):
        frames.decode_header(struct.pack("<2sBBIQ", b"kv", 9, 1, 0, 0))
    with pytest.raises(VersionMismatch, match="another cluster"):
        frames.decode_envelope(frames.encode_envelope(1, 7, 1, b""), 8)


@pytest.mark.parametrize("count", [1, 640, 3000])
@pytest.mark.parametrize("size", [16, 32])
def test_digests_travel_packed(count: int, size: int) -> None:
    digests = tuple(digest[:size] for digest in keys("packed", count))
    assert messages.unpack_digests(b"".join(digests), size) == digests
    parents = [b"", *digests[1:]]
    assert messages.unpack_parents(messages.pack_parents(parents, size), size) == parents
    with pytest.raises(BadMessage, match="no multiple"):
        messages.unpack_digests(bytes(size + 1), size)
    with pytest.raises(BadMessage, match="limit"):
        messages.unpack_digests(bytes(size * (messages.DIGESTS_MAX + 1)), size)
