"""The bytes of an object. Pure.

An object holds some blocks, one after the other, then an index of them, then a tail of fixed size
that says where the index begins::

    block, block, ..., index, tail

The tail has a MAC over the name of the object and its index: under the cluster's key, if that has a
secret. So an object that somebody else has made, cut, changed or renamed is a `Damaged` one, and a
reader looks at nothing in it before he knows. The blocks have their own checksums, in the index.
With encryption each block and the index are one message of AES-256-GCM; the key is made for this
object alone, and the nonce is the place of the message in it.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from kvpool.errors import BadKey
from kvpool.types import BLOCK_SIZE_MAX, COPIES_MAX, DIGEST_SIZE_MAX, DIGEST_SIZE_MIN, Namespace

#: Blocks of one object, and bytes of its index: more is refused before it is looked at.
BLOCKS_MAX: Final = 16_384
INDEX_MAX: Final = 4 << 20
SALT_SIZE: Final = 32
#: What encryption adds to a message.
TAG_SIZE: Final = 16
#: Magic, flags, salt, where the index begins, its bytes, MAC.
TAIL: Final = struct.Struct(f"<8sI{SALT_SIZE}sQI32s")
_MAGIC: Final = b"kvpcold1"
_ENCRYPTED: Final = 1

#: Namespace (its number in the index), part, digest, parent, position, size, checksum, copies.
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Row = tuple[_Number, int, bytes, bytes, int, int, int, int]


class Damaged(Exception):
    """Not an object of this cluster, or not any more. The text says why."""


class ColdBlock(NamedTuple):
    """One block of an object: `size` bytes from `position` on."""

    namespace: Namespace
    part: int
    digest: bytes
    parent: bytes
    position: int
    size: int
    checksum: int
    copies: int


class Tail(NamedTuple):
    """The end of an object, not verified yet."""

    encrypted: bool
    salt: bytes
    start: int  # of the index
    size: int
    mac: bytes


class _Index(msgspec.Struct, array_like=True):
    names: list[tuple[str, int]]
    rows: list[_Row]


class ObjectKeys:
    """What is derived from the cluster's key, or, without one, what anybody can derive."""

    def __init__(self, key: bytes) -> None:
        self._key = key or bytes(32)

    def mac(self, *parts: bytes) -> bytes:
        sized = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        key = hmac.digest(self._key, b"kvpool objects mac 1", "sha256")
        return hmac.digest(key, sized, "sha256")

    def cipher(self, salt: bytes) -> Cipher:
        """Of one object."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # a package of its own

        extracted = hmac.digest(salt, self._key, "sha256")
        return Cipher(AESGCM(hmac.digest(extracted, b"kvpool objects 1\x01", "sha256")))


class Cipher:
    """Encrypts what lies at one place of one object; an object is written once."""

    def __init__(self, aead: object) -> None:
        self._aead = aead

    def encrypt(self, position: int, text: bytes | memoryview) -> bytes:
        hidden: bytes = self._aead.encrypt(position.to_bytes(12, "little"), text, None)  # type: ignore[attr-defined]
        return hidden

    def decrypt(self, position: int, hidden: bytes | memoryview) -> bytes:
        """Raises Damaged."""
        from cryptography.exceptions import InvalidTag

        try:
            text: bytes = self._aead.decrypt(position.to_bytes(12, "little"), hidden, None)  # type: ignore[attr-defined]
        except InvalidTag:
            raise Damaged("it does not decrypt") from None
        return text


def pack_end(
    name: str, blocks: Sequence[ColdBlock], start: int, keys: ObjectKeys, salt: bytes, cipher: bool
) -> bytes:
    """Index and tail of an object of this name, whose blocks end at `start`."""
    numbers = {one: n for n, one in enumerate(dict.fromkeys(b.namespace for b in blocks))}
    rows: list[_Row] = [(numbers[one.namespace], *one[1:]) for one in blocks]
    index = msgspec.msgpack.encode(_Index([(n.name, n.parts) for n in numbers], rows))
    if cipher:
        index = keys.cipher(salt).encrypt(start, index)
    head = _MAGIC, cipher * _ENCRYPTED, salt, start, len(index)
    mac = keys.mac(name.encode(), TAIL.pack(*head, b""), index)
    return index + TAIL.pack(*head, mac)


def parse_tail(data: bytes, object_size: int) -> Tail:
    """The last TAIL.size bytes of an object. Raises Damaged."""
    if len(data) != TAIL.size:
        raise Damaged("it is cut off")
    magic, flags, salt, start, size, mac = TAIL.unpack(data)
    if magic != _MAGIC or flags & ~_ENCRYPTED:
        raise Damaged("it is none of kvpool, or of another version")
    if size > INDEX_MAX or start + size + TAIL.size != object_size:
        raise Damaged("it is cut off")
    return Tail(bool(flags), salt, start, size, mac)


def parse_index(name: str, tail: Tail, index: bytes, keys: ObjectKeys) -> list[ColdBlock]:
    """The blocks of an object, each within its payload. Raises Damaged."""
    head = _MAGIC, tail.encrypted * _ENCRYPTED, tail.salt, tail.start, tail.size
    expected = keys.mac(name.encode(), TAIL.pack(*head, b""), index)
    if not hmac.compare_digest(expected, tail.mac):
        raise Damaged("its index is not that which one of our servers has written")
    if tail.encrypted:
        index = keys.cipher(tail.salt).decrypt(tail.start, index)
    try:
        found = msgspec.msgpack.decode(index, type=_Index)
        names = [Namespace(*one) for one in found.names[:BLOCKS_MAX]]
        if len(found.rows) > BLOCKS_MAX:
            raise Damaged(f"it has {len(found.rows)} blocks")
        blocks = [ColdBlock(names[row[0]], *row[1:]) for row in found.rows]
    except (msgspec.DecodeError, BadKey, IndexError) as error:
        raise Damaged(f"its index: {error}") from None
    _check(blocks, tail.start, TAG_SIZE * tail.encrypted)
    return blocks


def _check(blocks: Iterable[ColdBlock], end: int, added: int) -> None:
    """In the order of their places, none overlapping, each as the types of the pool allow."""
    position = 0
    for one in blocks:
        good = (
            0 <= one.part < one.namespace.parts
            and DIGEST_SIZE_MIN <= len(one.digest) <= DIGEST_SIZE_MAX
            and len(one.parent) <= DIGEST_SIZE_MAX
            and position <= one.position
            and 0 < one.size <= BLOCK_SIZE_MAX
            and one.position + one.size + added <= end
            and 0 <= one.checksum < 1 << 64
            and 0 <= one.copies <= COPIES_MAX
        )
        if not good:
            raise Damaged("its index describes no block that could be there")
        position = one.position + one.size + added


def pack_removed(name: str, positions: Iterable[int], keys: ObjectKeys) -> bytes:
    """What was removed of an object, by place: an object beside it."""
    body = msgspec.msgpack.encode(sorted(positions))
    return keys.mac(b"removed", name.encode(), body) + body


def parse_removed(name: str, data: bytes, keys: ObjectKeys) -> set[int]:
    """Raises Damaged."""
    mac, body = data[:32], data[32:]
    if not hmac.compare_digest(keys.mac(b"removed", name.encode(), body), mac):
        raise Damaged("what was removed of it is not readable")
    try:
        return set(msgspec.msgpack.decode(body, type=list[int])[:BLOCKS_MAX])
    except msgspec.DecodeError as error:
        raise Damaged(f"what was removed of it: {error}") from None
