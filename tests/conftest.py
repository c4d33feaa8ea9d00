"""Shared set-up: a pool of real parts in this process, over each transport."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from inspect import isawaitable

import pytest

from kvpool import ClientConfig, Namespace, Pool, ReadStatus, ServerConfig, WriteStatus, dev
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Link
from kvpool.testing.invariants import check_invariants

# Where these are set, pytest explains `assert blocks == data` by a diff of all their bytes, which
# takes minutes.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)
# A script that runs the suite in its background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

NAMESPACE = Namespace("test/model")
UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("ucxx") is None, reason="needs ucxx: pip install kvpool[ucx]"
    ),
)
TRANSPORTS = ["inproc", "shm", "tcp", UCX]


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs in this process configures the logs of later tests, too."""
    logger = logging.getLogger("kvpool")
    before = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture(autouse=True, scope="session")
def _quick_heartbeats() -> Iterator[None]:
    """What a pool in this process tells by its next heartbeat, a test need not await for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dev, "ServerConfig", partial(ServerConfig, heartbeat_s=0.1))
        yield


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


async def read_back(pool: Pool, digests: Sequence[bytes], size: int = 8192) -> list[ReadStatus]:
    """What became of each block of `values`; those that came have the right bytes."""
    got = buffers(len(digests), size)
    results = await pool.read(NAMESPACE, digests, got)
    for result, buffer, right in zip(results, got, values(digests, size), strict=True):
        assert not result.status.hit or buffer == right
    return [result.status for result in results]


#: What a witness has written.
CHAIN = keys("witness", 3)


def patient(seconds: float) -> float:
    """So many seconds of an idle machine, here and now: others may be busy on its cores, too."""
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.02:
        pass
    return seconds * max(1.0, (time.perf_counter() - wall) / 0.02)


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], within_s: float = 5.0
) -> None:
    """Wait for a condition, which may have to be asked for; fails when it does not come true in
    time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while not (await now if isawaitable(now := condition()) else now):
        assert loop.time() < until, "the condition did not come true"
        await asyncio.sleep(0.01)


def soon(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """As `eventually`, for callers that are no coroutines."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        time.sleep(0.02)


def listening(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Where a server listens: for ucx, too, in tests that have it as a parameter."""
    listen: tuple[str, ...] = ("inproc://", "shm://", "tcp://127.0.0.1:0")
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "ucx" in callspec.params.values():
        listen += ("ucx://127.0.0.1:0",)
    return listen


@pytest.fixture
async def pool_dev(request: pytest.FixtureRequest) -> AsyncIterator[dev.Dev]:
    """One master and one server of 16 MiB, whose books are checked at the end."""
    async with dev.serve("16MiB", listen=listening(request)) as running:
        yield running
        check_books(running)


@pytest.fixture
def dev_in_thread() -> Iterator[dev.Dev]:
    """A pool of 64 MiB in a thread of its own, for callers that are no coroutines."""
    found: list[dev.Dev] = []
    up, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def main() -> None:
        async with dev.serve("64MiB") as running:
            found.append(running)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert up.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture
async def two_servers(request: pytest.FixtureRequest) -> AsyncIterator[dev.Dev]:
    """One master and two servers of 16 MiB each."""
    async with dev.serve("16MiB", servers=2, listen=listening(request)) as running:
        yield running
        check_books(running)


@pytest.fixture(params=TRANSPORTS)
async def pool(request: pytest.FixtureRequest, pool_dev: dev.Dev) -> AsyncIterator[Pool]:
    """A client of `pool_dev`, over each transport in turn."""
    config = ClientConfig(masters=[pool_dev.address], transports=[request.param])
    async with pool_dev.pool(config) as client:
        yield client


@contextlib.asynccontextmanager
async def witness_of(running: dev.Dev) -> AsyncIterator[Pool]:
    """Another client of a pool, who has written, and must not notice anything."""
    config = ClientConfig(masters=[running.address], transports=["tcp"], attempt_s=10)
    async with running.pool(config) as witness:
        stored = await witness.write(NAMESPACE, CHAIN, values(CHAIN), timeout=30)
        assert stored == [WriteStatus.STORED] * 3
        yield witness


@pytest.fixture
async def watched(pool_dev: dev.Dev) -> AsyncIterator[dev.Dev]:
    """A pool with a witness."""
    (server,) = pool_dev.servers
    async with witness_of(pool_dev) as witness:
        yield pool_dev
        await has_noticed_nothing(witness)
    await eventually(lambda: (server.store.held.pins, server.store.held.reservations) == (0, 0))


async def has_noticed_nothing(witness: Pool) -> None:
    """It reads what it wrote, and writes more."""
    got = buffers(3)
    results = await witness.read(NAMESPACE, CHAIN, got)
    assert [result.status.label for result in results] == ["hit"] * 3
    assert got == values(CHAIN)
    assert witness.counters["failed_tcp"] == 0
    fresh = [secrets.token_bytes(32)]
    assert await witness.write(NAMESPACE, fresh, [b"x"]) == [WriteStatus.STORED]


@pytest.fixture
async def link(watched: dev.Dev) -> AsyncIterator[Link]:
    """Requests to the master of a watched pool."""
    network = TcpNetwork()
    yield network.connect(watched.address)
    network.close()
    check_invariants(watched.master.directory)


def check_books(running: dev.Dev) -> None:
    for server in running.servers:
        check_invariants(server.store)
    check_invariants(running.master.directory)
