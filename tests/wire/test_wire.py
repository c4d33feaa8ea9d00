"""Any bytes either parse or raise PeerError, nothing else (G11)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import BadFrame, BadMessage, VersionMismatch
from kvpool.net import requests
from kvpool.wire import frames, messages
from tests.conftest import keys
from tests.wire.samples import SAMPLES

FUZZ = settings(max_examples=300, derandomize=True, deadline=None)
EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=lambda m: type(m).__name__)


def test_every_message_has_a_sample_and_a_number_of_its_own() -> None:
    assert {type(sample) for sample in SAMPLES} == set(messages.TYPES)
    numbers = [*messages.TYPES.values(), messages.PAYLOAD]
    assert len(set(numbers)) == len(numbers)


@EVERY
def test_round_trip(sample: messages.Message) -> None:
    number, body = messages.encode(sample)
    assert messages.decode(type(sample), number, body) == sample
    assert messages.message_type(number) is type(sample)
    with pytest.raises(BadMessage, match="expected"):
        messages.decode(type(sample), 250, body)


@EVERY
def test_hostile_bodies(sample: messages.Message) -> None:
    empty = b"" if msgspec.structs.fields(type(sample)) else b"\xc0"
    nested = b"\x91" * 100_000, b"\x81\xa1x" * 50_000
    longer = [kind + b"\xff\xff\xff\xff" for kind in (b"\xdf", b"\xdd", b"\xc6")]
    no_text = b"\xa4\xff\xfe\xfd\xfc", b"\x81\xa9namespace\xa2\xff\xff"
    for body in (empty, *nested, *longer, *no_text):
        with pytest.raises(BadMessage):
            messages.decode(type(sample), messages.TYPES[type(sample)], body)


@pytest.mark.parametrize("kind", messages.TYPES, ids=lambda kind: kind.__name__)
def test_a_message_does_not_change_and_what_it_leaves_out_is_empty(
    kind: type[messages.Message],
) -> None:
    """It may be kept, shared and compared; and a peer that lacks a field says nothing by it."""
    sample = next(sample for sample in SAMPLES if type(sample) is kind)
    for field in msgspec.structs.fields(kind):
        with pytest.raises(AttributeError):
            setattr(sample, field.name, getattr(sample, field.name))
        if not field.required:
            assert not msgspec.structs.asdict(kind(**required(sample)))[field.name]


def required(sample: messages.Message) -> dict[str, Any]:
    """The fields that a message must have."""
    fields = msgspec.structs.fields(type(sample))
    return {field.name: getattr(sample, field.name) for field in fields if field.required}


@FUZZ
@given(st.integers(0, 255), st.binary(max_size=100), st.integers(0, 2**40))
def test_frames_round_trip(type: int, body: bytes, payload: int) -> None:
    encoded = frames.encode_frame(type, body, payload)
    assert frames.decode_header(encoded) == (type, len(body), payload)
    envelope = requests.encode_envelope(type, 7, payload, body)
    assert requests.decode_envelope(envelope, 7) == (type, payload, body)


def test_limits_and_versions_are_named() -> None:
    with pytest.raises(BadFrame, match="limit"):
        frames.encode_frame(1, bytes(frames.BODY_SIZE_MAX + 1))
    with pytest.raises(BadFrame, match="limit"):
        frames.decode_header(struct.pack("<2sBBIQ", b"kv", frames.PROTOCOL_VERSION, 1, 1 << 30, 0))
    with pytest.raises(BadFrame, match="limit"):
        frames.decode_header(struct.pack("<2sBBIQ", b"kv", frames.PROTOCOL_VERSION, 1, 0, 2**63))
    for version in (frames.PROTOCOL_VERSION - 1, frames.PROTOCOL_VERSION + 1):
        with pytest.raises(
            VersionMismatch, match=f"protocol {version}, this process {frames.PROTOCOL_VERSION}"
        ):
            frames.decode_header(struct.pack("<2sBBIQ", b"kv", version, 1, 0, 0))
    with pytest.raises(VersionMismatch, match="another cluster"):
        requests.decode_envelope(requests.encode_envelope(1, 7, 1, b""), 8)


@pytest.mark.parametrize("count", [1, 640, messages.DIGESTS_MAX])
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


@pytest.mark.parametrize(
    "unpack",
    [
        lambda where: messages.unpack_question(messages.Find(*where, False)),
        lambda where: messages.unpack_question(messages.Explain(*where)),
        lambda where: messages.unpack_question(messages.Place(*where, b"", 1, "", 1)),
        lambda where: messages.unpack_chain(messages.Find(*where, True)),
        lambda where: messages.unpack_chain(messages.Find(*where, True, before=bytes(8))),
    ],
)
def test_a_question_has_as_many_keys_as_one_turn_of_a_master_bears(
    unpack: Callable[[tuple[str, int, int, bytes]], object],
) -> None:
    most = messages.QUESTION_KEYS_MAX
    unpack(("model", 1, 16, bytes(16 * most)))
    with pytest.raises(BadMessage, match=f"{most + 1} keys in one question, limit {most}"):
        unpack(("model", 1, 16, bytes(16 * (most + 1))))
