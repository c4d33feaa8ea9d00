"""What fits exactly is accepted, one more is refused; keys and refusals are told apart."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import xxhash

from kvpool import types
from kvpool.errors import (
    BadFrame,
    BadMessage,
    InvariantViolated,
    KvpoolError,
    Overloaded,
    Unauthenticated,
    VersionMismatch,
)
from kvpool.net import requests
from kvpool.types import BATCH_BLOCKS_MAX, Cluster
from kvpool.wire import auth, frames
from kvpool.wire import messages as wire
from kvpool.wire.frames import STEP, PayloadReceiver
from tests.conftest import keys
from tests.support import messages
from tests.wire.samples import KEYS, SAMPLES


def naming(digests: list[bytes]) -> messages.Keys:
    return messages.Keys("test", 1, 16, b"".join(digest[:16] for digest in digests))


@pytest.mark.parametrize(("name", "number"), [("Read", 999), ("New", 2), ("New", frames.PAYLOAD)])
def test_a_ring_takes_no_name_and_no_number_that_is_taken(name: str, number: int) -> None:
    """Tenants may send what its name says: another `Read` would be theirs, too."""
    with pytest.raises(InvariantViolated, match=f"{name}.*{number} is taken"):
        wire.register({msgspec.defstruct(name, [], bases=(wire.Message,), frozen=True): number})
    assert name not in {one.__name__ for one in wire.TYPES} - {"Read"}


def test_a_batch_has_at_most_so_many_blocks_and_none_twice() -> None:
    chain = keys("batch", BATCH_BLOCKS_MAX + 1)
    _, digests = messages.unpack_batch(naming(chain[:-1]))
    assert len(digests) == BATCH_BLOCKS_MAX
    with pytest.raises(BadMessage, match="limit"):
        messages.unpack_batch(naming(chain))
    with pytest.raises(BadMessage, match="twice"):
        messages.unpack_batch(naming([*chain[:3], chain[1]]))
    with pytest.raises(BadMessage, match="no digests"):
        messages.unpack_batch(naming([]))


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


#: Numbers: the field of a message, the smallest and the largest value.
NUMBERS: list[tuple[type[messages.Message], str, float, float]] = [
    (messages.Reserve, "parts", 1, 256),
    (messages.Reserve, "digest_size", 16, 32),
    (messages.Reserve, "part", 0, 2**16 - 1),
    (messages.Reserve, "wait_s", 0.0, 1e9),
    (messages.Welcome, "segment_size", 0, 2**48 - 1),
    (messages.Register, "epoch", 0, 2**64 - 1),
    (messages.Register, "capacity", 1, 2**48 - 1),
    (messages.Register, "sequence", 0, 2**62),
    (messages.Registered, "sequence", 0, 2**62),
    (messages.HeartbeatReply, "sequence", 0, 2**63 - 1),
    (messages.Announce, "sequence", 0, 2**63 - 1),
    (messages.Inventory, "sequence", 0, 2**63 - 1),
    (messages.Place, "copies", 1, 16),
    (messages.Namespaces, "parts", 0, 256),
]
NAME, SECONDS, REPLICA, CHANGES = "n" * 256, 0.5, ("s", "dram", 0), {**KEYS, "part": 0, "tier": 0}
#: Collections: what one of its elements is, the smallest and the largest number of them.
SIZES: list[tuple[type[messages.Message], str, object, int, int]] = [
    (messages.Hello, "nonce", b"x", 0, 32),
    (messages.Hello, "client", "x", 0, 256),
    (messages.Hello, "tenant", "x", 0, 32),
    (messages.Hello, "key", b"x", 0, 8),
    (messages.Challenge, "nonce", b"x", 32, 32),
    (messages.Challenge, "proof", b"x", 32, 32),
    (messages.Register, "token", b"x", 16, 16),
    (messages.Register, "addresses", [NAME], 0, 64),
    (messages.Reserve, "namespace", "x", 1, 512),
    (messages.Reserve, "sizes", [2**32], 0, 1024),
    (messages.Reserve, "session", "x", 0, 128),
    (messages.Reserve, "digests", b"x", 0, 16_384 * 32),
    (messages.Reserved, "statuses", b"x", 0, 1024),
    (messages.Reserved, "ids", [2**63 - 1], 0, 1024),
    (messages.Reserved, "offsets", [2**48 - 1], 0, 1024),
    (messages.Seal, "checksums", [0], 0, 1024),
    (messages.Heartbeat, "fingerprint", b"x", 0, 16),
    (messages.HeartbeatReply, "hints", [("s", SECONDS, None)], 0, 1024),
    (messages.Announce, "changes", [{**CHANGES, "status": 2**16 - 1}], 0, 1024),
    (messages.Inventory, "changes", [{**CHANGES, "status": 0}], 0, 1024),
    (messages.FindReply, "runs", [(0, 0, [REPLICA])], 0, 16_384),
    (messages.FindReply, "misses", b"x", 0, 16_384),
    (messages.PlaceReply, "servers", ["s"], 0, 4096),
    (messages.PlaceReply, "copies", b"x", 0, 16_384),
    (messages.Place, "parent", b"x", 0, 32),
    (messages.Hint, "session", "x", 1, 128),
    (messages.Explained, "blocks", [(0, "text", [REPLICA])], 0, 16_384),
    (messages.NamespacesReply, "namespaces", [("n" * 512, 256, 0)], 0, 256),
    (messages.Find, "session", "x", 0, 128),
    (messages.DemandsReply, "working_sets", [("n" * 512, 256, 2**63 - 1, 2**48 - 1)], 0, 256),
    (messages.Error, "text", "x", 0, 2048),
]


def is_accepted(kind: type[messages.Message], field: str, value: object) -> bool:
    sample = next(sample for sample in SAMPLES if type(sample) is kind)
    body = msgspec.msgpack.encode({**msgspec.structs.asdict(sample), field: value})
    try:
        messages.decode(kind, messages.TYPES[kind], body)
    except BadMessage:
        return False
    return True


@pytest.mark.parametrize(("kind", "field", "least", "most"), NUMBERS)
def test_the_smallest_and_the_largest_number_of_a_field(
    kind: type[messages.Message], field: str, least: float, most: float
) -> None:
    assert is_accepted(kind, field, least)
    assert is_accepted(kind, field, most)
    assert not is_accepted(kind, field, least - 1)
    if most < 2**64 - 1:  # msgpack has no larger ones
        assert not is_accepted(kind, field, most + 1)


@pytest.mark.parametrize(("kind", "field", "one", "least", "most"), SIZES)
def test_the_fewest_and_the_most_elements_of_a_field(
    kind: type[messages.Message], field: str, one: Any, least: int, most: int
) -> None:
    assert is_accepted(kind, field, one * least)
    assert is_accepted(kind, field, one * most)
    assert not is_accepted(kind, field, one * (most + 1))
    assert not least or not is_accepted(kind, field, one * (least - 1))


def test_limits_that_peers_rely_on_stay() -> None:
    """A client splits its calls by them, and engines and other builds name them."""
    assert (types.BATCH_BLOCKS_MAX, types.COPIES_MAX, types.SESSION_NAME_MAX) == (1024, 16, 128)
    assert (types.DIGEST_SIZE_MIN, types.DIGEST_SIZE_MAX) == (16, 32)
    assert types.BLOCK_SIZE_MAX == 1 << 32
    assert (messages.DIGESTS_MAX, messages.NAMESPACES_MAX) == (16_384, 256)
    assert (messages.ANNOUNCED_BLOCKS_MAX, messages.HINTS_MAX) == (1024, 1024)


def test_a_body_and_a_payload_have_their_limits() -> None:
    body = bytes(frames.BODY_SIZE_MAX)
    frame = frames.encode_frame(1, body, frames.PAYLOAD_SIZE_MAX)
    assert frames.decode_header(frame)[:3] == (1, len(body), frames.PAYLOAD_SIZE_MAX)
    envelope = requests.encode_envelope(1, 7, 5, body)
    assert requests.decode_envelope(envelope, 7)[:3] == (1, 5, body)
    with pytest.raises(BadFrame, match="bytes"):
        requests.decode_envelope(envelope + b"x", 7)
    with pytest.raises(BadFrame, match="limit"):
        requests.encode_envelope(1, 7, 5, body + b"x")
    with pytest.raises(BadFrame, match="limit"):
        frames.encode_frame(1, body + b"x")
    for sizes in ((len(body) + 1, 0), (0, frames.PAYLOAD_SIZE_MAX + 1)):
        head = struct.pack("<2sBBIQ", b"kv", frames.PROTOCOL_VERSION, 1, *sizes)
        with pytest.raises(BadFrame, match="limit"):
            frames.decode_header(head)


def test_versions_and_clusters_are_named() -> None:
    for version in (frames.PROTOCOL_VERSION - 1, frames.PROTOCOL_VERSION + 1):
        named = f"protocol {version}, this process {frames.PROTOCOL_VERSION}"
        with pytest.raises(VersionMismatch, match=named):
            frames.decode_header(struct.pack("<2sBBIQ", b"kv", version, 1, 0, 0))
    with pytest.raises(VersionMismatch, match="another cluster"):
        requests.decode_envelope(requests.encode_envelope(1, 7, 1, b""), 8)


def test_a_message_that_is_only_a_header_has_an_id() -> None:
    """So it can be refused by its id, whatever else is wrong with it."""
    header = requests.encode_envelope(1, 7, 2**40 + 1, b"")
    assert len(header) == frames.HEADER_SIZE
    assert requests.envelope_id(header) == 2**40 + 1
    assert requests.envelope_id(header[:-1]) is None
    assert requests.envelope_id(b"??" + header[2:]) is None


def test_clusters_are_told_apart_by_32_bits_of_their_names() -> None:
    assert requests.cluster_id("default") == xxhash.xxh3_64_intdigest(b"default") & 0xFFFFFFFF


OWN = {one.__name__: one for one in (Overloaded, VersionMismatch, Unauthenticated)}
OTHER = dict.fromkeys(("BadFrame", "KvpoolError", "SystemExit"), BadMessage)


@pytest.mark.parametrize(("code", "error"), [*OWN.items(), *OTHER.items()])
def test_a_refusal_is_raised_as_what_it_is(code: str, error: type[KvpoolError]) -> None:
    """A peer names the error; only some names stand for a class of their own."""
    refusal = messages.encode(messages.Error(code, "no"))
    with pytest.raises(error, match=f"the peer refused: no \\({code}\\)") as raised:
        messages.decode_answer(messages.Welcome, *refusal)
    assert type(raised.value) is error


def test_proofs_and_keys_belong_to_one_side_of_one_cluster() -> None:
    """Also where two clusters have one secret."""
    one, other = Cluster("one", b"secret" * 4), Cluster("other", b"secret" * 4)
    proofs = [
        side(cluster, first, second)
        for side in (auth.client_proof, auth.server_proof)
        for cluster in (one, other)
        for first, second in ((b"a" * 32, b"b" * 32), (b"b" * 32, b"a" * 32))
    ]
    assert len(set(proofs)) == len(proofs)
    assert {len(proof) for proof in proofs} == {messages.PROOF_SIZE}


def test_no_more_than_a_step_is_received_at_once() -> None:
    """It is hashed while it is in the cache: at the start, later on, and in the next block."""
    blocks = [bytearray(2 * STEP + 5), bytearray(STEP + 1)]
    receiver = PayloadReceiver([(memoryview(block),) for block in blocks], [1, 2])
    sizes = []
    while receiver.missing:
        sizes.append(len(receiver.memory))
        receiver.received(len(receiver.memory))
    assert sizes == [STEP, STEP, 5, STEP, 1]
    assert STEP <= 1 << 20  # or the cache of a core does not hold it


def test_bytes_that_came_another_way_are_hashed_up_to_where_they_are() -> None:
    """A transport may fill the memory itself, in portions that end anywhere."""
    blocks = [bytearray(b"a" * (STEP + 100)), bytearray(b"b" * 50)]
    receiver = PayloadReceiver([(memoryview(block),) for block in blocks], [1, 2])
    receiver.filled(10)
    assert receiver.missing == STEP + 140
    assert receiver.checksums == []
    receiver.filled(STEP + 100)
    assert receiver.missing == 40
    receiver.filled(40)
    assert receiver.checksums == [
        xxhash.xxh3_64_intdigest(block, seed) for block, seed in zip(blocks, (1, 2), strict=True)
    ]
