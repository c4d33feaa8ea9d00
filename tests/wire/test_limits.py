"""What fits exactly is accepted, one more is refused; keys and refusals are told apart."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvpool.errors import (
    BadFrame,
    BadMessage,
    KvpoolError,
    Overloaded,
    Unauthenticated,
    VersionMismatch,
)
from kvpool.types import BATCH_BLOCKS_MAX, Cluster
from kvpool.wire import auth, frames, messages
from kvpool.wire.frame_reader import STEP, PayloadReceiver
from tests.conftest import keys


def naming(digests: list[bytes]) -> messages.Keys:
    return messages.Keys("test", 1, 16, b"".join(digest[:16] for digest in digests))


def test_a_message_has_at_most_so_many_digests() -> None:
    most = messages.DIGESTS_MAX
    assert len(messages.unpack_digests(bytes(16 * most), 16)) == most
    with pytest.raises(BadMessage, match="limit"):
        messages.unpack_digests(bytes(16 * (most + 1)), 16)


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


def test_a_body_and_a_payload_have_their_limits() -> None:
    body = bytes(frames.BODY_SIZE_MAX)
    frame = frames.encode_frame(1, body, frames.PAYLOAD_SIZE_MAX)
    assert frames.decode_header(frame) == (1, len(body), frames.PAYLOAD_SIZE_MAX)
    envelope = frames.encode_envelope(1, 7, 5, body)
    assert frames.decode_envelope(envelope, 7) == (1, 5, body)
    with pytest.raises(BadFrame, match="bytes"):
        frames.decode_envelope(envelope + b"x", 7)
    with pytest.raises(BadFrame, match="limit"):
        frames.encode_envelope(1, 7, 5, body + b"x")
    head = struct.pack("<2sBBIQ", b"kv", frames.PROTOCOL_VERSION, 1, 0, frames.PAYLOAD_SIZE_MAX + 1)
    with pytest.raises(BadFrame, match="limit"):
        frames.decode_header(head)


def test_a_message_that_is_only_a_header_has_an_id() -> None:
    """So it can be refused by its id, whatever else is wrong with it."""
    header = frames.encode_envelope(1, 7, 2**40 + 1, b"")
    assert len(header) == frames.HEADER_SIZE
    assert frames.envelope_id(header) == 2**40 + 1
    assert frames.envelope_id(header[:-1]) is None
    assert frames.envelope_id(b"??" + header[2:]) is None


def test_clusters_are_told_apart_by_32_bits_of_their_names() -> None:
    names = [f"cluster-{number}" for number in range(2000)]
    ids = {frames.cluster_id(name) for name in names}
    assert len(ids) == len(names)
    assert max(ids) < 2**32
    assert frames.cluster_id("default") == xxhash.xxh3_64_intdigest(b"default") & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("Overloaded", Overloaded),
        ("VersionMismatch", VersionMismatch),
        ("Unauthenticated", Unauthenticated),
        ("BadFrame", BadMessage),
        ("KvpoolError", BadMessage),
        ("SystemExit", BadMessage),
    ],
)
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
    assert {len(proof) for proof in proofs} == {auth.PROOF_SIZE}
    assert auth.master_key(one) != auth.master_key(other)
    assert auth.master_key(one) != auth.master_key(one._replace(secret=b"another" * 4))


def test_no_more_than_a_step_is_received_at_once() -> None:
    """It is hashed while it is in the cache: at the start, later on, and in the next block."""
    blocks = [bytearray(2 * STEP + 5), bytearray(STEP + 1)]
    receiver = PayloadReceiver([(memoryview(block),) for block in blocks], [1, 2])
    sizes = []
    while receiver.missing:
        sizes.append(len(receiver.memory))
        receiver.received(len(receiver.memory))
    assert sizes == [STEP, STEP, 5, STEP, 1]


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
