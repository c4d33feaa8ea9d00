"""Shared set-up: a pool of real parts in this process, over each transport."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence

import pytest

from kvpool import ClientConfig, Namespace, Pool, dev

NAMESPACE = Namespace("test/model")
TRANSPORTS = ["inproc", "shm", "tcp"]


def key(name: object) -> bytes:
    """A 32-byte key for anything that prints."""
    return hashlib.sha256(str(name).encode()).digest()


def keys(prefix: str, count: int) -> list[bytes]:
    return [key(f"{prefix}/{number}") for number in range(count)]


def value(digest: bytes, size: int = 8192) -> bytes:
    """The bytes of a block, derived from its key: any reader can check any byte."""
    return (hashlib.shake_128(digest).digest(4096) * (-(-size // 4096)))[:size]


def values(digests: Sequence[bytes], size: int = 8192) -> list[bytes]:
    return [value(digest, size) for digest in digests]


def buffers(count: int, size: int = 8192) -> list[bytearray]:
    return [bytearray(size) for _ in range(count)]


@pytest.fixture
async def pool_dev() -> AsyncIterator[dev.Dev]:
    """One master and one server of 16 MiB, whose books are checked at the end."""
    async with dev.serve("16MiB") as running:
        yield running
        _check(running)


@pytest.fixture
async def two_servers() -> AsyncIterator[dev.Dev]:
    """One master and two servers of 16 MiB each."""
    async with dev.serve("16MiB", servers=2) as running:
        yield running
        _check(running)


@pytest.fixture(params=TRANSPORTS)
async def pool(request: pytest.FixtureRequest, pool_dev: dev.Dev) -> AsyncIterator[Pool]:
    """A client of `pool_dev`, over each transport in turn."""
    config = ClientConfig(masters=[pool_dev.address], transports=[request.param])
    async with pool_dev.pool(config) as client:
        yield client


def _check(running: dev.Dev) -> None:
    for server in running.servers:
        server.store.check()
    running.master.directory.check()
