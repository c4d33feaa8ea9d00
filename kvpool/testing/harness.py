"""What the checks stand on: a real server behind a recorder, and words for what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from kvpool import registry
from kvpool.config import ServerConfig, TierSpec
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Channel, Listener, ReadOptions, Transport, WriteOptions
from kvpool.server.block_server import BlockServer
from kvpool.server.state.holdings import Limits
from kvpool.testing.invariants import check_invariants
from kvpool.testing.recorder import Recorder
from kvpool.types import (
    ROOT,
    Cluster,
    Namespace,
    ReadBlock,
    ReadResult,
    ReadStatus,
    WriteBlock,
    WriteStatus,
)

CLUSTER: Final = Cluster("conformance")
NAMESPACE: Final = Namespace("conformance/model")
CAPACITY: Final = 24 << 20
#: A block so large that no transport moves it in one go.
LARGE: Final = 700_001
#: Time for what should happen at once; generous, because machines are busy.
PROMPT_S: Final = 2.0
#: A call that is to succeed has this long.
CALL_S: Final = 10.0
#: No check may take longer, whatever the implementation does.
LIMIT_S: Final = 30.0
_BLANK: Final = 0xA5


class ConformanceError(AssertionError):
    """A check failed: `check` is its name; the text has what was expected and what happened."""

    def __init__(self, check: str, expected: str, happened: str) -> None:
        super().__init__(f"{check}: expected {expected}; {happened}")
        self.check = check


class NotDeclared(Exception):
    """The check is about a capability that this implementation does not declare."""


class Scene:
    """One check in progress: it compares what happens with what the contract promises."""

    def __init__(self, check: str) -> None:
        self.check = check
        self._loop = asyncio.get_running_loop()

    def expect(self, condition: bool, expected: str, happened: object = "it is not so") -> None:
        """Raises ConformanceError unless the condition holds."""
        if not condition:
            raise ConformanceError(self.check, expected, str(happened))

    async def eventually(
        self, condition: Callable[[], bool], expected: str, happened: Callable[[], object]
    ) -> None:
        """Wait until a condition holds, at most PROMPT_S."""
        until = self._loop.time() + PROMPT_S
        while not condition():
            within = f"{expected}, within {PROMPT_S:g} s"
            self.expect(self._loop.time() < until, within, happened())
            await asyncio.sleep(0.002)

    async def raises(
        self, kind: type[BaseException], call: Awaitable[object], during: str
    ) -> BaseException:
        """The error that the call ends with, which must be of this kind."""
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        self.expect(isinstance(outcome, kind), f"{kind.__name__} from {during}", describe(outcome))
        assert isinstance(outcome, BaseException)
        return outcome

    async def promptly(self, calls: Sequence[asyncio.Task[Any]], during: str) -> list[Any]:
        """What the calls end with, results and errors alike; they must end within PROMPT_S."""
        _, late = await asyncio.wait(calls, timeout=PROMPT_S)
        for call in late:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        self.expect(not late, f"every call to end {during}", f"{len(late)} went on")
        return outcomes


def describe(outcome: object) -> str:
    """The outcome of a call as text: its result or its error."""
    if isinstance(outcome, BaseException):
        return f"got {type(outcome).__name__}: {outcome}"
    return f"got {str(outcome)[:200]}"


def digest(name: object) -> bytes:
    """A key for anything that prints."""
    return hashlib.sha256(str(name).encode()).digest()


def content(key: bytes, size: int) -> bytes:
    """The bytes of a block, derived from its key."""
    return (hashlib.shake_128(key).digest(4099) * (size // 4099 + 1))[:size]


def blank(size: int) -> bytearray:
    """A buffer in which every byte that is written shows."""
    return bytearray([_BLANK]) * size


def blocks(name: str, count: int, size: int) -> dict[bytes, bytes]:
    """Keys and their bytes."""
    keys = [digest(f"{name}/{number}") for number in range(count)]
    return {key: content(key, size) for key in keys}


def in_pieces(memory: bytes | bytearray, *sizes: int) -> tuple[memoryview, ...]:
    """The same memory in pieces of these sizes; what is left over is the last one."""
    view, start, pieces = memoryview(memory), 0, []
    for size in sizes:
        pieces.append(view[start : start + size])
        start += size
    pieces.append(view[start:])
    return tuple(piece for piece in pieces if len(piece))


def write_blocks(data: Mapping[bytes, bytes | bytearray]) -> list[WriteBlock]:
    """Blocks to be written, each without a parent."""
    return [WriteBlock(key, ROOT, (memoryview(value),), len(value)) for key, value in data.items()]


# --- a check's surroundings ------------------------------------------------------------------


class Stage(Scene):
    """A server that listens with the transport under test, and clients that reach it so."""

    def __init__(
        self,
        check: str,
        transport: Transport,
        client_transport: Transport,
        server: BlockServer,
        address: str,
    ) -> None:
        super().__init__(check)
        self.transport = transport
        self.client_transport = client_transport
        self.recorder = Recorder(server)
        self.store = server.store
        self._address = address
        self._channels: list[Channel] = []
        self._listeners: list[Listener] = []

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self._listeners[0].address

    def within(self, seconds: float = CALL_S) -> float:
        """A deadline."""
        return self._loop.time() + seconds

    async def listen(self, address: str = "") -> Listener:
        """One more listener for the same server."""
        listener = await self.transport.listen(address or self._address, self.recorder)
        self._listeners.append(listener)
        return listener

    async def connect(
        self,
        address: str = "",
        *,
        cluster: Cluster = CLUSTER,
        client: str = "a client",
        within_s: float = CALL_S,
    ) -> Channel:
        """One more client."""
        channel = await self.client_transport.connect(
            address or self.address, cluster=cluster, client=client, deadline=self.within(within_s)
        )
        self._channels.append(channel)
        return channel

    # --- calls ---

    async def write(
        self,
        channel: Channel,
        data: Mapping[bytes, bytes | bytearray],
        *,
        namespace: Namespace = NAMESPACE,
        part: int = 0,
        within_s: float = CALL_S,
    ) -> list[WriteStatus]:
        """Write blocks, whatever comes of it."""
        writing = WriteOptions(namespace, part, True)
        return await channel.write(writing, write_blocks(data), deadline=self.within(within_s))

    async def stored_in_pieces(
        self, channel: Channel, data: Mapping[bytes, tuple[memoryview, ...]]
    ) -> None:
        """Write blocks that lie in pieces; every one must be STORED."""
        blocks = [
            WriteBlock(key, ROOT, pieces, sum(map(len, pieces))) for key, pieces in data.items()
        ]
        options = WriteOptions(NAMESPACE, 0, True)
        statuses = await channel.write(options, blocks, deadline=self.within())
        wanted = [WriteStatus.STORED] * len(data)
        self.expect(statuses == wanted, "STORED for every block in pieces", describe(statuses))

    async def read_in_pieces(
        self,
        channel: Channel,
        keys: Sequence[bytes],
        memory: Sequence[tuple[memoryview, ...]],
    ) -> list[ReadResult]:
        """Read blocks into pieces of memory, whatever comes of it."""
        blocks = [
            ReadBlock(key, pieces, sum(map(len, pieces)))
            for key, pieces in zip(keys, memory, strict=True)
        ]
        return await channel.read(ReadOptions(NAMESPACE, 0), blocks, deadline=self.within())

    async def stored(
        self,
        channel: Channel,
        data: Mapping[bytes, bytes],
        *,
        namespace: Namespace = NAMESPACE,
        part: int = 0,
    ) -> None:
        """Write blocks; every one must be STORED."""
        statuses = await self.write(channel, data, namespace=namespace, part=part)
        wanted = [WriteStatus.STORED] * len(data)
        self.expect(statuses == wanted, "STORED for every block written", describe(statuses))

    async def read(
        self,
        channel: Channel,
        keys: Sequence[bytes],
        buffers: Sequence[bytearray],
        *,
        namespace: Namespace = NAMESPACE,
        part: int = 0,
        verify: bool = True,
    ) -> list[ReadResult]:
        """Read blocks, whatever comes of it."""
        wanted = [
            ReadBlock(k, (memoryview(b),), len(b)) for k, b in zip(keys, buffers, strict=True)
        ]
        reading = ReadOptions(namespace, part, verify)
        return await channel.read(reading, wanted, deadline=self.within())

    async def holds(
        self,
        channel: Channel,
        data: Mapping[bytes, bytes],
        *,
        namespace: Namespace = NAMESPACE,
        part: int = 0,
    ) -> None:
        """Read blocks; every one must be there, with exactly these bytes."""
        buffers = [bytearray(len(value)) for value in data.values()]
        results = await self.read(channel, list(data), buffers, namespace=namespace, part=part)
        wanted = [ReadResult(ReadStatus.HIT, len(value)) for value in data.values()]
        self.expect(results == wanted, "a HIT of the right size for every block", describe(results))
        wrong = [
            len(value)
            for value, buffer in zip(data.values(), buffers, strict=True)
            if value != buffer
        ]
        self.expect(not wrong, "the bytes that were written", f"blocks of {wrong} bytes are wrong")

    # --- the server's memory and books ---

    def memory_of(self, key: bytes, part: int = 0) -> memoryview:
        """The bytes of a stored block, in the pool's own memory."""
        entry = self.store.index.peek(NAMESPACE, part, key)
        self.expect(entry is not None, "the block to be stored")
        assert entry is not None
        return self.recorder.memory(entry.extent)

    async def nothing_held(self, when: str) -> None:
        """No pin and no reservation: at once, or as soon as the news has travelled."""
        await self.eventually(
            lambda: (self.store.held.pins, self.store.held.reservations) == (0, 0),
            f"no pin and no reservation {when}",
            lambda: f"there are {self.store.held!r}",
        )

    async def finish(self) -> None:
        """The end of every check: both sides close, and no pin or reservation is left."""
        self.recorder.answering.set()
        for channel in self._channels:
            await channel.close()
        await self.nothing_held("after the clients have closed")
        await self.eventually(
            lambda: not self.recorder.open,
            "`close` on the connection of every client that has gone",
            lambda: f"{len(self.recorder.open)} connections are open",
        )
        for listener in self._listeners:
            await listener.close()
        check_invariants(self.store)
        self.expect(not self.recorder.faults, "a correct server's side", self.recorder.faults)
        self.expect(
            not self.recorder.overwritten(),
            "no write into memory that was released",
            f"{self.recorder.overwritten()} extents were written into",
        )

    async def abandon(self) -> None:
        """Close everything that is open, after a failed check too."""
        self.recorder.answering.set()
        for channel in self._channels:
            with contextlib.suppress(Exception):
                channel.abort()
                await channel.close()
        for listener in self._listeners:
            with contextlib.suppress(Exception):
                await listener.close()


class TransportCheck:
    """One check of a transport, on a stage of its own. Its name is that of the function."""

    def __init__(self, body: Callable[[Stage], Awaitable[None]]) -> None:
        functools.update_wrapper(self, body)
        self.name = getattr(body, "__name__", "")
        self._body = body

    async def __call__(self, make: Callable[[], Transport], *, address: str = "") -> None:
        """See `check_transport` for `make` and `address`."""
        async with named(self.name), staged(self.name, make, address) as stage:
            await self._body(stage)


@asynccontextmanager
async def staged(check: str, make: Callable[[], Transport], address: str) -> AsyncIterator[Stage]:
    """A stage for one check of a transport, and its end."""
    tier = registry.tier(TierSpec("dram", "", CAPACITY, {}), prefault=False)
    config = ServerConfig(id="conformance", masters=[], listen=[])
    network = TcpNetwork(CLUSTER)
    server = BlockServer(config, cluster=CLUSTER, network=network, transports={}, tiers=[tier])
    # Without budgets: a channel passes on NOT_YET, and a client asks again (design: budgets).
    server.store.held.limits = Limits.of(1 << 40, 1 << 40)
    stage = Stage(check, make(), make(), server, address)
    try:
        await stage.listen()
        yield stage
        await stage.finish()
    finally:
        await stage.abandon()
        await server.close()
        network.close()


@asynccontextmanager
async def named(check: str) -> AsyncIterator[None]:
    """Any error inside fails this check, and so does an exception of a task that no code caught."""
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    uncaught: list[str] = []
    handler = loop.get_exception_handler()
    loop.set_exception_handler(
        lambda _, context: uncaught.append(f"{context['message']}: {context.get('exception')!r}")
    )
    try:
        async with asyncio.timeout(LIMIT_S) as limit:
            yield
            scene = Scene(check)
            await scene.eventually(
                lambda: not asyncio.all_tasks() - before,
                "no task to be left",
                lambda: f"{asyncio.all_tasks() - before} are running",
            )
            scene.expect(not uncaught, "no error left to the loop's exception handler", uncaught)
    except (ConformanceError, NotDeclared):
        raise
    except Exception as error:
        late = limit.expired()
        happened = f"it went on for {LIMIT_S:g} s" if late else describe(error)
        raise ConformanceError(check, "a check that ends without an error", happened) from error
    finally:
        loop.set_exception_handler(handler)
