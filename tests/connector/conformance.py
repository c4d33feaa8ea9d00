"""What the tests of all connectors here have in common: the checks, and KV that is made up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest

from kvpool.testing import CONNECTOR_CHECKS, NotDeclared
from kvpool.testing.connector_checks import TestedEngine


def conformance(make: Callable[[str, str], TestedEngine]) -> Callable[..., None]:
    """The test of one connector: `test_conformance = conformance(Engine)`."""

    @pytest.mark.parametrize("check", CONNECTOR_CHECKS.values(), ids=CONNECTOR_CHECKS)
    def run(check: Callable[..., None]) -> None:
        try:
            check(make)
        except NotDeclared as why:
            pytest.skip(str(why))

    return run


def chain(tokens: Sequence[int], block: int, root: bytes = b"") -> list[bytes]:
    """Digests of the whole blocks of a prompt, each with all that comes before it."""
    digests, parent = [], root
    for first in range(0, len(tokens) - block + 1, block):
        text = repr(list(tokens[first : first + block])).encode()
        parent = hashlib.sha256(parent + text).digest()
        digests.append(parent)
    return digests


def computed(digest: bytes, size: int, *shaped_by: object) -> bytearray:
    """What a block's KV is, for an engine that has these properties: so many bytes."""
    seed = hashlib.sha256(repr(shaped_by).encode() + digest).digest()
    return bytearray(hashlib.shake_128(seed).digest(size))
