"""What the checks stand on: a real server behind a recorder, and words for what went wrong.

The recorder is a `BlockStore` around the real one. It hears what the transport asks for, answers
late or not at all where a check wants that, and writes garbage over memory at every moment from
which on a correct transport does not look at it, or does not write there, any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from kvpool import registry
from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.config import ServerConfig, TierSpec
from kvpool.errors import KvpoolError
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import (
    Addressable,
    Channel,
    Connection,
    DeviceAddressable,
    Listener,
    Peer,
    ReadOptions,
    ReserveRequest,
    Tier,
    Transport,
    WriteOptions,
)
from kvpool.server.block_server import BlockServer
from kvpool.server.state.budget import Limits
from kvpool.testing.invariants import check_invariants
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    ROOT,
    Cluster,
    DrainOrder,
    DrainReport,
    Extent,
    HoldingsPage,
    MoveStatus,
    Namespace,
    Offer,
    Pin,
    ReadBlock,
    ReadResult,
    ReadStatus,
    Removal,
    RemovalCursor,
    Reservation,
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
_GARBAGE: Final = 0xDB


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


# --- the server's side ---------------------------------------------------------------------


class Recorder:
    """A `BlockStore`: the real server, watched, and made slow or unwilling where a check asks."""

    def __init__(self, server: BlockServer) -> None:
        self._server = server
        self.cluster = server.cluster
        self.guard = server.guard
        self.peers: list[Peer] = []
        #: Each `reserve`, with its deadline; each `reserve_now`, which has none.
        self.asked: list[tuple[ReserveRequest, float | None]] = []
        #: Of so many blocks `reserve_now` takes those that it can; each other one is NOT_YET.
        self.at_once_max = BATCH_BLOCKS_MAX
        self.visible: list[bool] = []
        self.faults: list[str] = []
        self.open: set[_Watched] = set()
        #: Extents that were given back unsealed; full of garbage, and to stay so.
        self.freed: set[Extent] = set()
        #: While it is clear, `reserve`, `remove` and `report_corruption` work and do not answer.
        self.answering = asyncio.Event()
        self.answering.set()
        #: Raised by `connect`.
        self.refuse_clients: KvpoolError | None = None
        #: Raised by `reserve`.
        self.refuse_writes: KvpoolError | None = None
        #: Raised by `pin`, `remove` and `report_corruption`; the names of those that raised it.
        self.refuse_others: KvpoolError | None = None
        self.refused: list[str] = []
        #: Each request about blocks that move: its name, and then its arguments.
        self.moves: list[tuple[Any, ...]] = []
        #: What is answered to these instead of what the real server would do, by their names; an
        #: exception is raised.
        self.laid_down: dict[str, Any] = {}
        #: Fetches on which the server works now.
        self.fetches = 0
        #: Remove each block, and write garbage over it, as soon as its last pin is released.
        self.burn_after_reading = False
        #: Whether clients may write into memory that they have mapped.
        self.lends = True
        # Also what the server allocates for itself: it moves blocks to make room.
        allocator = server.store.allocator
        for name in ("allocate", "take_fenced"):
            setattr(allocator, name, functools.partial(self._allocated, getattr(allocator, name)))

    @property
    def server(self) -> str:
        return self._server.server

    @property
    def tier(self) -> Tier:
        return self._server.tier

    def connect(self, peer: Peer) -> Connection:
        if self.refuse_clients is not None:
            raise self.refuse_clients
        watched = _Watched(self, self._server.connect(peer))
        self.open.add(watched)
        self.peers.append(peer)
        return watched

    def count(self, event: str) -> None:
        self._server.count(event)

    def forbidden(self, peer: Peer, message: str, why: str) -> None:
        self._server.forbidden(peer, message, why)

    def refuse(self, name: str) -> None:
        """Raises `refuse_others`, if it is set."""
        if self.refuse_others is not None:
            self.refused.append(name)
            raise self.refuse_others

    def answer(self, name: str, *arguments: Any) -> Any:
        """Record a request about moves. What is laid down for it; None if nothing is."""
        self.moves.append((name, *arguments))
        answer = self.laid_down.get(name)
        if isinstance(answer, KvpoolError):
            raise answer
        return answer

    def memory(self, extent: Extent) -> memoryview:
        """The pool's memory of an extent, also of a free one."""
        assert isinstance(self._server.tier, Addressable)
        return self._server.tier.view(extent.offset, extent.size)

    def spoil(self, extent: Extent) -> None:
        """Write garbage over an extent that no client may read any more."""
        self.memory(extent)[:] = bytes([_GARBAGE]) * extent.size

    def _allocated(self, allocate: Callable[[int], int | None], size: int) -> int | None:
        """Memory is in use again: from now on its writer, or the server, may write to it."""
        offset = allocate(size)
        if offset is not None:
            end = offset + size
            reused = {e for e in self.freed if e.offset < end and offset < e.offset + e.size}
            self.freed -= reused
            if any(map(self._is_written, reused)):
                self.faults.append("memory was written into after it had been given back")
        return offset

    def was_freed(self, extents: Iterable[Extent]) -> None:
        """No client may write to these extents any more, until they are reserved again."""
        for extent in extents:
            self.spoil(extent)
            self.freed.add(extent)

    def burn(self, namespace: Namespace, part: int, key: bytes, extent: Extent) -> None:
        """After the last unpin: remove the block and overwrite its bytes."""
        store = self._server.store
        entry = store.index.peek(namespace, part, key)
        if entry is not None and not entry.pins:
            store.remove(namespace, [key], part=part)
            self.spoil(extent)

    def overwritten(self) -> int:
        """The number of freed extents into which a client has written."""
        return sum(map(self._is_written, self.freed))

    def _is_written(self, extent: Extent) -> bool:
        return self.memory(extent) != bytes([_GARBAGE]) * extent.size


class _Watched:
    """A `Connection` of the real server, under observation."""

    def __init__(self, recorder: Recorder, inner: Connection) -> None:
        self._recorder = recorder
        self._inner = inner
        self._unsealed: dict[int, tuple[Extent, int]] = {}
        self._pinned: dict[int, tuple[Namespace, int, bytes, Extent]] = {}

    async def reserve(self, request: ReserveRequest, *, deadline: float) -> list[Reservation]:
        asked = request.subset(range(len(request.digests)))  # lists, whatever the sequences are
        self._recorder.asked.append((asked, deadline))
        if self._recorder.refuse_writes is not None:
            raise self._recorder.refuse_writes
        answers = await self._inner.reserve(request, deadline=deadline)
        self._reserved(request, answers)
        await self._recorder.answering.wait()
        return answers

    def reserve_now(self, request: ReserveRequest) -> list[Reservation]:
        recorder, count = self._recorder, len(request.digests)
        taken = min(count, recorder.at_once_max) if recorder.answering.is_set() else 0
        answers = [Reservation(WriteStatus.NOT_YET)] * count
        if taken:
            asked = request.subset(range(taken))
            recorder.asked.append((asked, None))
            if recorder.refuse_writes is not None:
                raise recorder.refuse_writes
            answers[:taken] = self._inner.reserve_now(asked)
            self._reserved(request, answers)
        return answers

    def _reserved(self, request: ReserveRequest, answers: Sequence[Reservation]) -> None:
        half = namespace_seed(request.namespace, request.part)
        for key, answer in zip(request.digests, answers, strict=True):
            if answer.extent is not None:
                self._recorder.spoil(answer.extent)
                self._unsealed[answer.id] = (answer.extent, block_seed(half, key))

    def lend(self) -> bool:
        return self._recorder.lends and self._inner.lend()

    async def seal(
        self, ids: Sequence[int], checksums: Sequence[int], *, visible: bool, deadline: float
    ) -> list[WriteStatus]:
        self._recorder.visible.append(visible)
        for id, claimed in zip(ids, checksums, strict=True):
            extent, seed = self._unsealed.pop(id, (None, 0))
            if extent is not None and checksum(self._recorder.memory(extent), seed) != claimed:
                self._recorder.faults.append(
                    "a block was sealed before its bytes were there, or with a wrong checksum"
                )
        statuses = await self._inner.seal(ids, checksums, visible=visible, deadline=deadline)
        self._give_back()
        return statuses

    async def pin(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        buffer_sizes: Sequence[int],
        *,
        view: bool = False,
        in_place_above: int | None = None,
    ) -> list[Pin]:
        self._recorder.refuse("pin")
        pins = await self._inner.pin(
            namespace, part, digests, buffer_sizes, view=view, in_place_above=in_place_above
        )
        for key, pin in zip(digests, pins, strict=True):
            if pin.extent is not None and pin.tier is None:
                self._pinned[pin.id] = (namespace, part, key, pin.extent)
        return pins

    def unpin(self, pins: Sequence[Pin]) -> None:
        self._inner.unpin(pins)
        self._let_go([p.id for p in pins if p.status is ReadStatus.HIT and p.tier is None])

    async def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        part: int | None = None,
        checksums: Sequence[int] = (),
    ) -> list[bool]:
        self._recorder.refuse("remove")
        removed = await self._inner.remove(namespace, digests, part, checksums)
        await self._recorder.answering.wait()
        return removed

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> list[bool]:
        self._recorder.refuse("report_corruption")
        dropped = await self._inner.report_corruption(namespace, part, digests)
        await self._recorder.answering.wait()
        return dropped

    def offer(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], receiver: str
    ) -> list[Offer]:
        offers = self._recorder.answer("offer", namespace, part, list(digests), receiver)
        return offers or self._inner.offer(namespace, part, digests, receiver)

    async def fetch(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        source: str,
        *,
        extra: bool = False,
        deadline: float,
    ) -> list[MoveStatus]:
        recorder, left_s = self._recorder, deadline - asyncio.get_running_loop().time()
        asked = namespace, part, list(digests), source, extra
        statuses: list[MoveStatus] | None = recorder.answer("fetch", *asked, left_s)
        recorder.fetches += 1
        try:
            if statuses is None:
                statuses = await self._inner.fetch(
                    namespace, part, digests, source, extra=extra, deadline=deadline
                )
            await recorder.answering.wait()
        finally:
            recorder.fetches -= 1
        return statuses

    def prefetch(
        self, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> list[MoveStatus]:
        statuses = self._recorder.answer("prefetch", namespace, part, list(digests))
        return statuses or self._inner.prefetch(namespace, part, digests)

    async def holdings(self, after: tuple[str, int]) -> HoldingsPage:
        found: HoldingsPage | None = self._recorder.answer("holdings", after)
        return found if found is not None else await self._inner.holdings(after)

    async def remove_all(self, namespace: Namespace, at: RemovalCursor) -> Removal:
        done: Removal | None = self._recorder.answer("remove_all", namespace, at)
        return done if done is not None else await self._inner.remove_all(namespace, at)

    async def drain(self, order: DrainOrder) -> DrainReport:
        report: DrainReport | None = self._recorder.answer("drain", order)
        return report if report is not None else await self._inner.drain(order)

    def device_tier(self, tier: int) -> DeviceAddressable:
        return self._inner.device_tier(tier)

    def views(self, extents: Sequence[Extent]) -> list[memoryview]:
        held = {extent for extent, _ in self._unsealed.values()}
        held.update(extent for *_, extent in self._pinned.values())
        if not held.issuperset(extents):
            self._recorder.faults.append("memory was looked at that the connection does not hold")
        return self._inner.views(extents)

    def close(self, *, writer_may_be_alive: bool = False) -> bool:
        quarantined = self._inner.close(writer_may_be_alive=writer_may_be_alive)
        self._recorder.open.discard(self)
        if writer_may_be_alive:
            self._unsealed.clear()
        self._give_back()
        self._let_go(list(self._pinned))
        return quarantined

    def writer_exited(self) -> None:
        self._inner.writer_exited()

    def _give_back(self) -> None:
        extents = [extent for extent, _ in self._unsealed.values()]
        self._unsealed.clear()
        self._recorder.was_freed(extents)

    def _let_go(self, ids: Sequence[int]) -> None:
        for id in ids:
            held = self._pinned.pop(id, None)
            if held is not None and self._recorder.burn_after_reading:
                self._recorder.burn(*held)


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
