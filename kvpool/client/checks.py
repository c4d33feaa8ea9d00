"""What a caller passes besides memory, checked before the call does anything.

Numbers and texts come back as the wire has them. Most are so already, and are not converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpool.arguments import as_float, as_int, as_text
from kvpool.errors import BadKey, UsageError
from kvpool.types import DIGEST_SIZE_MAX, DIGEST_SIZE_MIN, ROOT, SESSION_NAME_MAX, Namespace


def check_namespace(namespace: Namespace) -> None:
    """Raises UsageError for another type."""
    given: object = namespace
    if not isinstance(given, Namespace):
        raise UsageError(f"namespace is {given!r:.40}, expected a kvpool.Namespace")


def check_part(namespace: Namespace, part: int) -> int:
    """One of the namespace's parts. Raises BadKey."""
    number = part if type(part) is int else as_int(part)
    if number is None or not 0 <= number < namespace.parts:
        raise BadKey(f"part {part!r:.40} of a namespace with {namespace.parts} part(s)")
    return number


def check_whole(what: str, value: int, most: int) -> int:
    """A number from 1 on. Raises UsageError."""
    number = value if type(value) is int else as_int(value)
    if number is None or not 1 <= number <= most:
        raise UsageError(f"{what} is {value!r:.40}, expected 1 to {most}")
    return number


def check_session(session: str) -> str:
    """The name of a session. Raises UsageError unless it is 1 to SESSION_NAME_MAX printable
    characters."""
    name = as_text(session)
    if name is None or not 1 <= len(name) <= SESSION_NAME_MAX or not name.isprintable():
        raise UsageError(
            f"session {session!r:.40}: expected 1 to {SESSION_NAME_MAX} printable characters"
        )
    return name


def check_resume_in(resume_in: float) -> float:
    """Seconds. Raises UsageError unless `resume_in` is 0 to 1e9 of them."""
    seconds = as_float(resume_in)
    if seconds is None or not 0 <= seconds <= 1e9:
        raise UsageError(f"resume_in is {resume_in!r:.40}, expected seconds, 0 or more")
    return seconds


def check_digest_size(digests: Sequence[bytes]) -> int:
    """The length of the first digest, in bytes. Raises BadKey unless it is 16 to 32, and of bytes:
    whoever has strings, has all of them so."""
    if not isinstance(digests, Sequence):
        raise BadKey(f"keys are a {type(digests).__name__}, expected a list of bytes")
    if not digests:
        raise BadKey("empty batch: expected at least one key")
    first: object = digests[0]
    if not isinstance(first, bytes):
        expected = "bytes, as of bytes.fromhex(key)" if isinstance(first, str) else "bytes"
        raise BadKey(f"keys begin with {first!r:.40}, expected a list of {expected}")
    size = len(first)
    if not DIGEST_SIZE_MIN <= size <= DIGEST_SIZE_MAX:
        raise BadKey(
            f"key {first[:16].hex()!r} has {size} bytes, "
            f"expected {DIGEST_SIZE_MIN} to {DIGEST_SIZE_MAX}: use a hash of the prefix"
        )
    return size


def check_digests(digests: Sequence[bytes]) -> int:
    """The common length of all `digests`, in bytes.

    Raises BadKey for lengths that differ or are not 16 to 32, and for a digest that occurs twice.
    """
    size = check_digest_size(digests)
    check_digest_types(digests)
    if len(set(map(len, digests))) != 1:
        index = next(i for i, digest in enumerate(digests) if len(digest) != size)
        raise BadKey(
            f"key {index} has {len(digests[index])} bytes, key 0 has {size}: expected equal"
        )
    if len(set(digests)) != len(digests):
        seen: set[bytes] = set()
        for index, digest in enumerate(digests):
            if digest in seen:
                raise BadKey(f"key {digest.hex()[:12]} (index {index}) is twice in one batch")
            seen.add(digest)
    return size


def check_digest_types(digests: Sequence[bytes]) -> None:
    """Raises BadKey unless all are bytes."""
    if set(map(type, digests)) == {bytes}:
        return
    for index, digest in enumerate(digests):
        if not isinstance(digest, bytes):
            raise BadKey(f"key {index} is {digest!r:.40}, expected bytes")


def check_parents(parents: Sequence[bytes], digests: Sequence[bytes], size: int) -> None:
    """Raises BadKey unless there is one for each digest, and each chain has a beginning."""
    if not isinstance(parents, Sequence):
        raise BadKey(f"parents are a {type(parents).__name__}, expected a list of bytes")
    if len(parents) != len(digests):
        raise BadKey(f"{len(parents)} parents for {len(digests)} keys")
    for index, (parent, digest) in enumerate(zip(parents, digests, strict=True)):
        if not isinstance(parent, bytes):
            raise BadKey(f"parent {index} is {parent!r:.40}, expected bytes")
        if parent != ROOT and len(parent) != size:
            raise BadKey(f"parent {index} has {len(parent)} bytes, the keys have {size}")
        if parent == digest:
            raise BadKey(f"key {index} ({digest.hex()[:12]}) names itself as its parent")
    _check_no_circle(dict(zip(digests, parents, strict=True)))


def _check_no_circle(parent_of: Mapping[bytes, bytes]) -> None:
    """Raises BadKey for blocks that are their own ancestors: no prompt begins with itself."""
    checked: set[bytes] = set()  # blocks whose ancestors end, in the batch or outside of it
    for first in parent_of:
        digest, walked = first, set[bytes]()
        while digest in parent_of and digest not in checked:
            if digest in walked:
                raise BadKey(
                    f"key {digest.hex()[:12]} is its own ancestor: expected parents that form "
                    "chains, where each block's parent is the block before it"
                )
            walked.add(digest)
            digest = parent_of[digest]
        checked |= walked
