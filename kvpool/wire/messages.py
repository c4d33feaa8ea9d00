"""The messages of a pool without options, and the one place that decodes all messages.

Each type has its own bounded decoder; nothing is decoded untyped, nothing by union, nothing by
name. Structs are maps, and forbid unknown fields in all that an older peer must not misunderstand;
see `Tolerant`. `decode` maps everything that can come out of msgspec to `BadMessage`, so that any
bytes either parse or raise `PeerError`.

Digests travel packed: one bytes object of `digest_size` each. A list of 640 bytes objects costs
msgspec, both ends and the allocator more than the lookup itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from kvpool.errors import (
    BadMessage,
    Forbidden,
    InvariantViolated,
    KvpoolError,
    Overloaded,
    Unauthenticated,
    VersionMismatch,
)
from kvpool.fingerprint import FINGERPRINT_SIZE
from kvpool.spans import MARK_SIZE, MarkedChain, unpack_marks
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    BLOCK_SIZE_MAX,
    COPIES_MAX,
    DIGEST_SIZE_MAX,
    DIGEST_SIZE_MIN,
    NAME_MAX,
    ROOT,
    SESSION_NAME_MAX,
    TEXT_MAX,
    ChainEnd,
    Count,
    Member,
    Name,
    Namespace,
    Seconds,
    ServerStats,
    Text,
)

#: Bytes of what proves that an end knows a secret (`kvpool.wire.auth`), and of a server's token.
NONCE_SIZE: Final = 32
KEY_ID_SIZE: Final = 8
TOKEN_SIZE: Final = 16
#: Digests in one control-plane message.
DIGESTS_MAX: Final = 16_384
#: In one question to a master, which answers it in one turn of its loop.
QUESTION_KEYS_MAX: Final = 4096
#: Spans before the keys of one question, or behind them.
SPANS_MAX: Final = 2048
#: Blocks that one announcement carries, so that applying it never stalls a master's loop.
ANNOUNCED_BLOCKS_MAX: Final = 1024
#: Hints in one answer to a heartbeat.
HINTS_MAX: Final = 1024
#: Bytes of blocks that may come with a `Reserve`.
WRITE_BYTES_MAX: Final = 16 << 20
#: Answers to hints in one heartbeat; there is no second one for the rest: they are for people.
HINT_ANSWERS_MAX: Final = 256

Small = Annotated[int, Meta(ge=0, lt=2**16)]
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Hash64 = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
Marks = Annotated[bytes, Meta(max_length=SPANS_MAX * MARK_SIZE)]
SessionName = Annotated[str, Meta(max_length=SESSION_NAME_MAX)]
#: A session, the age of the hint, and when it resumes after it was given; None: it has ended.
WireHint = tuple[SessionName | ChainEnd, Seconds, Seconds | None]
#: A session, and whether a server follows the last hint about it as it was given.
WireHintAnswer = tuple[SessionName, bool]
NamespaceName = Annotated[str, Meta(max_length=512)]
DigestSize = Annotated[int, Meta(ge=DIGEST_SIZE_MIN, le=DIGEST_SIZE_MAX)]
Packed = Annotated[bytes, Meta(max_length=DIGESTS_MAX * DIGEST_SIZE_MAX)]
BlockSizes = Annotated[
    list[Annotated[int, Meta(ge=1, le=BLOCK_SIZE_MAX)]], Meta(max_length=BATCH_BLOCKS_MAX)
]
Ids = Annotated[list[Id], Meta(max_length=BATCH_BLOCKS_MAX)]
Hashes = Annotated[list[Hash64], Meta(max_length=BATCH_BLOCKS_MAX)]
Counts = Annotated[list[Count], Meta(max_length=BATCH_BLOCKS_MAX)]
Statuses = Annotated[bytes, Meta(max_length=BATCH_BLOCKS_MAX)]
Names = Annotated[list[Name], Meta(max_length=64)]
#: What only a server and one master know; see `ServerMessage`.
Token = Annotated[bytes, Meta(min_length=TOKEN_SIZE, max_length=TOKEN_SIZE)]
#: Far from the end of `Id`, so that there always is a next number.
SequenceNumber = Annotated[int, Meta(ge=0, le=2**62)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Tolerant(Message, frozen=True, forbid_unknown_fields=False):
    """Base of answers and figures, in which a newer peer may say more than the receiver knows; not
    of those that say where bytes lie. What changes the meaning of other fields is no such field: a
    request has to ask for it."""


class Keys(Message, frozen=True):
    """Blocks of one namespace; base of the messages that name some."""

    namespace: Annotated[str, Meta(min_length=1, max_length=512)]
    parts: Annotated[int, Meta(ge=1, le=256)]
    digest_size: DigestSize
    digests: Packed


# --- data plane: client to server -----------------------------------------------------


class Hello(Message, frozen=True, omit_defaults=True):
    """First message on a connection. With a nonce, the other side must prove that it knows the
    secret; a master answers with one of its own.

    With shm, a `writer` asks for a writable descriptor. A client of a `tenant` asks for a proof
    with that tenant's secret; `key` says which of its secrets, see `kvpool.wire.auth`.
    """

    cluster: Name
    client: Name
    nonce: Annotated[bytes, Meta(max_length=NONCE_SIZE)] = b""
    writer: bool = False
    tenant: Annotated[str, Meta(max_length=32)] = ""
    key: Annotated[bytes, Meta(max_length=KEY_ID_SIZE)] = b""


class Welcome(Tolerant, frozen=True):
    """The server is who it says; with shm, the size of the segment whose descriptors come along."""

    server: Name
    segment_size: Count = 0


class Reserve(Keys, frozen=True, omit_defaults=True):
    """Room for blocks. `parents` are packed like the digests, zeros standing for ROOT.

    With a `session`, these blocks are part of its chain; `resume_s` says when it resumes. Each
    block is written to `copies` servers; 0: to this one.

    With `checksums` it is a whole write in one request: the blocks' bytes are the payload, and are
    sealed as by a `Seal`. Bytes of blocks that are not stored are thrown away.
    """

    part: Small
    parents: Packed
    sizes: BlockSizes
    wait_s: Seconds
    session: SessionName = ""
    resume_s: Seconds | None = None
    copies: Annotated[int, Meta(ge=0, le=COPIES_MAX)] = 0
    checksums: Hashes = []
    visible: bool = False


class Reserved(Message, frozen=True):
    """One status byte per block; ids and offsets of those that are RESERVED, in order.

    Without offsets the client sends the bytes; with them it has mapped the memory and writes there.
    """

    statuses: Statuses
    ids: Ids
    offsets: Counts


class Seal(Message, frozen=True):
    """The bytes are there. Reservations of this stream that are not named are given back."""

    ids: Ids
    checksums: Hashes
    visible: bool
    wait_s: Seconds


class StatusReply(Tolerant, frozen=True, omit_defaults=True):
    """One byte per block or id: a `WriteStatus` (`Seal`, `Reserve` with bytes), a `MoveStatus`
    (`Fetch`, `Prefetch`), or 1 where one was removed (`Remove`). To a `Hint` one byte: 1 where
    this master passes it on.

    NOT_YET for a `Reserve` with bytes: the server cannot take them at once; without, it waits.
    `alone`: all masters say that no other server has any of the blocks that are stored.
    """

    statuses: Statuses
    alone: bool = False


class Read(Keys, frozen=True, omit_defaults=True):
    """Blocks to be sent, or with shm to be pinned.

    With `view` the client uses the pinned memory itself, not a copy of it. A client that reads
    `to_device` can receive from memory of a device, and answers a `SendToken` before the `Data`.
    """

    part: Small
    buffer_sizes: Counts
    view: bool = False
    to_device: bool = False


class Data(Message, frozen=True, omit_defaults=True):
    """A status byte per block; sizes and checksums of the hits, whose bytes are the payload.

    With shm there is none: the hits lie at `offsets`, and stay pinned until `Unpin` or EOF.
    """

    statuses: Statuses
    sizes: Counts
    checksums: Hashes
    offsets: Counts = []


class Unpin(Message, frozen=True, omit_defaults=True):
    """The reader has finished with every block pinned on this stream.

    Answered only if it asks, by a `StatusReply` of no blocks: they were pinned until this came
    (design: budgets).
    """

    confirm: bool = False


class Remove(Keys, frozen=True, omit_defaults=True):
    """Forget these blocks, every part, or only that `part`.

    With `checksums`, one per block, of that `part` only what has this checksum (design: versions).
    With `corrupt`, of that `part` only what the server finds to have another one than it was stored
    with: a reader has.
    """

    part: Small | None = None
    checksums: Hashes = []
    corrupt: bool = False


class Error(Tolerant, frozen=True):
    """The request was refused; the name of the error and a sentence. Both planes."""

    code: Name
    text: Text


# --- control plane: server to master ---------------------------------------------------


class ServerMessage(Message, frozen=True):
    """What a server says of itself. `token` proves that it is the server that registered the id:
    its epoch is public, its token is not (design: server-identity)."""

    server: Name
    epoch: Hash64
    token: Token


class Register(ServerMessage, frozen=True, omit_defaults=True):
    """With `sequence`, the number of the last announcement that this process has sent.

    `kept` says that the next process of this server will have the same token. `blocks_max` is the
    number of blocks that its memory can hold; 0: as many of 4 KiB as `capacity` has room for.
    """

    host: Name
    addresses: Names
    tiers: Names
    capacity: Annotated[int, Meta(ge=1, lt=2**48)]
    sequence: SequenceNumber = 0
    kept: bool = False
    blocks_max: Count = 0


class Registered(Tolerant, frozen=True, omit_defaults=True):
    """`hints_heard` is the number of the last hint so far: the server receives only later ones.
    Announcements go on from `sequence`.

    When not `accepted`: `problem` is the reason, `heard_s` the age of the last message of the
    server that has the id, and `lasting` is True when it does not help to wait.
    """

    accepted: bool
    master: Name
    hints_heard: Count = 0
    sequence: SequenceNumber = 0
    problem: Text = ""
    heard_s: Seconds = 0.0
    lasting: bool = False


class Heartbeat(ServerMessage, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """Sent regularly: the server is alive. With its statistics, the number of the last hint that it
    received (`hints_heard`), and that of its last announcement (`sequence`). `hint_answers` are of
    sessions that have blocks here.

    `blocks` and `fingerprint` are of what the server held after that announcement. Without a
    fingerprint there is nothing to compare now."""

    stats: ServerStats
    hints_heard: Count = 0
    sequence: Count = 0
    blocks: Count = 0
    fingerprint: Annotated[bytes, Meta(max_length=FINGERPRINT_SIZE)] = b""
    hint_answers: Annotated[list[WireHintAnswer], Meta(max_length=HINT_ANSWERS_MAX)] = []


class HeartbeatReply(Tolerant, frozen=True, omit_defaults=True):
    """False asks the server to register and send its inventory.

    The reply to a heartbeat has the hints after `hints_heard`, and the number of the last one; the
    number of the server's last message that was applied (`sequence`), and how many blocks the
    master lists for it. With `differs` these are not the blocks that the server holds. With
    `others_have_room` the server is full, and another one is not (design: movers).
    """

    known: bool
    hints: Annotated[list[WireHint], Meta(max_length=HINTS_MAX)] = []
    hints_heard: Count = 0
    sequence: Id = 0
    blocks: Count = 0
    differs: bool = False
    others_have_room: bool = False


class Leave(ServerMessage, frozen=True):
    """The server shuts down. Answered with `HeartbeatReply`."""


class BlockChanges(Keys, frozen=True):
    """A stretch of consecutive changes of one kind. `status` is what a reader sees now."""

    part: Small
    tier: Small
    status: Small


class Announce(ServerMessage, frozen=True):
    """Changes number `sequence` of this server, to be applied in order and without a gap."""

    sequence: Id
    changes: Annotated[list[BlockChanges], Meta(max_length=ANNOUNCED_BLOCKS_MAX)]


class Inventory(ServerMessage, frozen=True):
    """All blocks of a server, in pieces; announcements go on from `sequence`."""

    sequence: Id
    piece: Count
    last: bool
    changes: Annotated[list[BlockChanges], Meta(max_length=ANNOUNCED_BLOCKS_MAX)]


class Announced(Tolerant, frozen=True, omit_defaults=True):
    """False: there is a gap, send the inventory.

    For `unlisted` blocks of this message the map has no room; `problem` is the limit. `alone`: no
    other server is known to have any of the blocks that came.
    """

    applied: bool
    unlisted: Count = 0
    problem: Text = ""
    alone: bool = False


# --- control plane: client to master ---------------------------------------------------

WireReplica = tuple[Name, Name, Small]
WireRun = tuple[Count, Count, Annotated[list[WireReplica], Meta(max_length=4096)]]


class Find(Keys, frozen=True, omit_defaults=True):
    """Where blocks are. With `prefix` the answer ends at the first miss: a match.

    With a `session`, a prompt of it has arrived, as `Hint` with a `resume_s` of 0; None: of no
    known session. Who only `observes` does not want the blocks: the question is no demand.

    Of a match not all keys need be sent (design: match): `before` are marks of spans in front of
    the keys, 8 bytes each, `behind` those of the spans that follow the keys: these are not looked
    up, and count as asked for.
    """

    prefix: bool
    session: SessionName | None = ""
    observes: bool = False
    before: Marks = b""
    behind: Marks = b""


class FindReply(Tolerant, frozen=True, omit_defaults=True):
    """Runs of blocks, and a status byte for each position that is in none (with `prefix`, one).

    With `more` it is about the first blocks only, as many as fit well into a message: runs and
    bytes tell how many. Ask again for the others. A miss is `partial` of a master that was just
    started and does not have all inventories: another one may know the block.

    An answer that has no such byte, and ends inside of the spans of `before`: the master does not
    know the next one, and has to be asked for the keys of its blocks.
    """

    runs: Annotated[list[WireRun], Meta(max_length=DIGESTS_MAX)]
    misses: Annotated[bytes, Meta(max_length=DIGESTS_MAX)]
    more: bool = False
    partial: bool = False


class Place(Keys, frozen=True, omit_defaults=True):
    """Where to write `copies` copies of blocks of `size` bytes in all, of this `session`."""

    parent: Annotated[bytes, Meta(max_length=DIGEST_SIZE_MAX)]
    size: Count
    host: Name
    copies: Annotated[int, Meta(ge=1, le=COPIES_MAX)]
    session: SessionName = ""


class PlaceReply(Tolerant, frozen=True):
    """Servers, best first; a byte per block: how many copies the pool has."""

    servers: Annotated[list[Name], Meta(max_length=4096)]
    copies: Annotated[bytes, Meta(max_length=DIGESTS_MAX)]


class Members(Message, frozen=True):
    """The servers whose names come after `after`, in order."""

    after: Name = ""


class MembersReply(Tolerant, frozen=True):
    """As many as fit well into one message; with `more`, ask again after the last one."""

    master: Name
    uptime_s: Seconds
    blocks: Count
    members: Annotated[list[Member], Meta(max_length=4096)]
    more: bool


class Explain(Keys, frozen=True):
    pass


class Explained(Tolerant, frozen=True, omit_defaults=True):
    """Per block: status, sentence, replicas. With `more` of the first ones only, as many as fit
    well: ask again for the others."""

    blocks: Annotated[
        list[tuple[Small, Text, Annotated[list[WireReplica], Meta(max_length=4096)]]],
        Meta(max_length=DIGESTS_MAX),
    ]
    more: bool = False


#: The type byte in the frame header. Numbers are for ever; new messages get new ones. Those of a
#: ring are in its file, which registers them.
TYPES: Final[dict[type[Message], int]] = {
    Error: 1,
    Hello: 2,
    Welcome: 3,
    Reserve: 4,
    Reserved: 5,
    # 6 is PAYLOAD, the frame that has no message
    Seal: 7,
    StatusReply: 8,
    Read: 9,
    Data: 10,
    Unpin: 12,
    Remove: 13,
    Register: 32,
    Registered: 33,
    Heartbeat: 34,
    HeartbeatReply: 35,
    Leave: 36,
    Announce: 37,
    Inventory: 38,
    Announced: 39,
    Find: 40,
    FindReply: 41,
    Place: 42,
    PlaceReply: 43,
    Members: 44,
    MembersReply: 45,
    Explain: 46,
    Explained: 47,
}
PAYLOAD: Final = 6
#: All that move no block between a server and a client.
ASIDE: Final[set[type[Message]]] = {Remove}

ENCODER = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[type[Message], msgspec.msgpack.Decoder[Any]]] = {
    type: msgspec.msgpack.Decoder(type) for type in TYPES
}
_BY_NUMBER: Final = {number: type for type, number in TYPES.items()}


def register(numbers: Mapping[type[Message], int], requests: Iterable[type[Message]] = ()) -> None:
    """The messages of a ring, as its file is imported; extensions of servers answer `requests`.

    No peer adds one. Raises InvariantViolated if its number is taken, or its name (see `access`).
    """
    for kind, number in numbers.items():
        if number in {PAYLOAD, *_BY_NUMBER} or kind.__name__ in {one.__name__ for one in TYPES}:
            raise InvariantViolated(f"{kind.__name__}: that name or number {number} is taken")
        TYPES[kind], _BY_NUMBER[number] = number, kind
        _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    ASIDE.update(requests)


M = TypeVar("M", bound=Message)


def encode(message: Message) -> tuple[int, bytes]:
    """(type number, body)."""
    return TYPES[type(message)], ENCODER.encode(message)


def decode(expected: type[M], number: int, body: bytes) -> M:
    """The message, if it is an `expected` one. Raises BadMessage."""
    if number != TYPES[expected]:
        name = _BY_NUMBER[number].__name__ if number in _BY_NUMBER else f"type {number}"
        raise BadMessage(f"got {name}, expected {expected.__name__}")
    try:
        message = _DECODERS[expected].decode(body)
    # RecursionError and UnicodeDecodeError are no msgspec errors: see the module docstring.
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise BadMessage(f"{expected.__name__}: {str(error)[:200]}") from None
    assert isinstance(message, expected)
    return message


_REFUSALS: Final[dict[str, type[KvpoolError]]] = {
    kind.__name__: kind for kind in (VersionMismatch, Unauthenticated, Forbidden, Overloaded)
}


def decode_answer(expected: type[M], number: int, body: bytes) -> M:
    """The same for an answer: the peer's `Error` raises what it stands for."""
    if number != TYPES[Error]:
        return decode(expected, number, body)
    error = decode(Error, number, body)
    kind = _REFUSALS.get(error.code, BadMessage)
    raise kind(f"the peer refused: {error.text} ({error.code})")


def refusal(error: Exception) -> Error:
    """What a peer is told of an error. Of a bug only that it is one: its text may name others."""
    known = isinstance(error, KvpoolError) and not isinstance(error, InvariantViolated)
    text = str(error) if known else "a bug there, which its log describes"
    return Error(type(error).__name__[:NAME_MAX], text[:TEXT_MAX])


def message_type(number: int) -> type[Message] | None:
    """The message that a type number stands for; None for PAYLOAD and unknown numbers."""
    return _BY_NUMBER.get(number)


# --- digests ---------------------------------------------------------------------------


@lru_cache(maxsize=BATCH_BLOCKS_MAX)
def _splitter(count: int, size: int) -> struct.Struct:
    return struct.Struct(f"{size}s" * count)


def unpack_digests(packed: bytes, size: int) -> tuple[bytes, ...]:
    """The digests again. Raises BadMessage when the length does not fit."""
    count, rest = divmod(len(packed), size)
    if rest:
        raise BadMessage(f"{len(packed)} bytes of digests are no multiple of {size}")
    if count > DIGESTS_MAX:
        raise BadMessage(f"{count} digests, limit {DIGESTS_MAX}")
    if count > BATCH_BLOCKS_MAX:  # do not let a peer fill the cache with large formats
        return tuple([packed[at : at + size] for at in range(0, len(packed), size)])
    return _splitter(count, size).unpack(packed)


def keys_of(namespace: Namespace, digests: Sequence[bytes]) -> tuple[str, int, int, bytes]:
    """The fields of `Keys`, with which every message begins that names blocks."""
    return namespace.name, namespace.parts, len(digests[0]), b"".join(digests)


def unpack_keys(keys: Keys) -> tuple[Namespace, tuple[bytes, ...]]:
    """Namespace and digests of a message, at least one. Raises BadMessage."""
    digests = unpack_digests(keys.digests, keys.digest_size)
    if not digests:
        raise BadMessage("no digests")
    return checked_namespace(keys.namespace, keys.parts), digests


def unpack_question(keys: Find | Place | Explain) -> tuple[Namespace, tuple[bytes, ...]]:
    """As `unpack_keys`, of a question to a master. Raises BadMessage, also for too many keys."""
    count = len(keys.digests) // keys.digest_size
    if count > QUESTION_KEYS_MAX:
        raise BadMessage(f"{count} keys in one question, limit {QUESTION_KEYS_MAX}")
    return unpack_keys(keys)


def unpack_chain(keys: Find) -> tuple[Namespace, MarkedChain]:
    """Namespace and blocks of a chain, of which at least one has a key. Raises BadMessage."""
    count, rest = divmod(len(keys.digests), keys.digest_size)
    if rest or not 0 < count <= QUESTION_KEYS_MAX:
        unpack_question(keys)  # says what is wrong
    chain = MarkedChain(keys.digest_size, keys.digests, unpacked_marks(keys.before))
    return checked_namespace(keys.namespace, keys.parts), chain


def unpacked_marks(packed: bytes) -> tuple[int, ...]:
    """The marks of spans. Raises BadMessage."""
    try:
        return unpack_marks(packed)
    except ValueError as error:
        raise BadMessage(str(error)) from None


def unpack_batch(keys: Keys) -> tuple[Namespace, tuple[bytes, ...]]:
    """As `unpack_keys`, of a data-plane batch: none twice, no more than one batch may hold."""
    namespace, digests = unpack_keys(keys)
    if len(digests) > BATCH_BLOCKS_MAX:
        raise BadMessage(f"{len(digests)} blocks in one batch, limit {BATCH_BLOCKS_MAX}")
    if len(set(digests)) != len(digests):
        raise BadMessage("a digest is twice in one batch")
    return namespace, digests


def unpack_removal(remove: Remove) -> tuple[Namespace, tuple[bytes, ...]]:
    """Namespace and digests of a `Remove`. Raises BadMessage."""
    namespace, digests = unpack_batch(remove)
    if remove.part is not None:
        check_part(namespace, remove.part)
    if remove.checksums and (remove.part is None or len(remove.checksums) != len(digests)):
        raise BadMessage("Remove: one checksum per block, of one part")
    if remove.corrupt and (remove.part is None or remove.checksums):
        raise BadMessage("Remove: corrupt blocks of one part, whatever their checksums")
    return namespace, digests


def check_part(namespace: Namespace, part: int) -> None:
    """Raises BadMessage for a part that the namespace does not have."""
    if part >= namespace.parts:
        raise BadMessage(f"part {part} of a namespace with {namespace.parts} parts")


@lru_cache(maxsize=1024)
def checked_namespace(name: str, parts: int) -> Namespace:
    try:
        return Namespace(name, parts)
    except ValueError as error:
        raise BadMessage(str(error)) from None


def pack_parents(parents: Sequence[bytes], size: int) -> bytes:
    zeros = bytes(size)
    return b"".join([parent or zeros for parent in parents])


def unpack_parents(packed: bytes, size: int) -> list[bytes]:
    zeros = bytes(size)
    return [ROOT if parent == zeros else parent for parent in unpack_digests(packed, size)]
