"""The server's half of tcp, ucx and shm: one loop per connection, one exchange at a time.

They differ in one thing only: with tcp and ucx the stream moves the bytes (*carried*), with shm
the client moves them itself, in memory that it has mapped (*mapped*). While much memory is in
quarantine, the bytes of writes are carried with shm, too (design: budgets).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from operator import eq
from typing import Any, Final

from kvpool import logs
from kvpool.errors import BadMessage, Forbidden, KvpoolError, LinkBroken, VersionMismatch
from kvpool.guard import of_secrets
from kvpool.protocols import BlockStore, Connection, Peer, ReserveRequest
from kvpool.strangers import Strangers
from kvpool.types import Pin, ReadStatus, Reservation, SessionHint, WriteStatus
from kvpool.wire.frames import STEP, Frame, PayloadReceiver, Pieces
from kvpool.wire.messages import (
    ASIDE,
    PAYLOAD,
    TYPES,
    WRITE_BYTES_MAX,
    Data,
    Hello,
    Message,
    Read,
    Reserve,
    Reserved,
    Seal,
    StatusReply,
    Unpin,
    Welcome,
    check_part,
    decode,
    message_type,
    refusal,
    unpack_batch,
    unpack_parents,
)
from kvpool_transports.streams.stream import Stream

#: A handshake must be complete after this time.
HELLO_S = 5.0
#: What a client may ask us to wait for.
WAIT_S_MAX = 60.0
#: Bytes of a message of a handshake, and of a request for as many blocks as there may be.
_HELLO_MAX: Final = 4 << 10
_REQUEST_MAX: Final = 128 << 10
#: How long after its deadline a writer that has not sealed is taken for frozen.
GRACE_S = 5.0
#: An answer that the client does not read within this time ends the connection.
ANSWER_S = 60.0

#: Bytes of blocks that are not stored go here, of all connections; nobody reads them.
_NOWHERE: Final = memoryview(bytearray(STEP))
_RESERVE: Final = TYPES[Reserve]

log = logs.get("kvpool.transport")


class Sessions:
    """The connections of one listener, each with a task of its own."""

    def __init__(
        self,
        store: BlockStore,
        *,
        mapped: bool,
        scheme: str,
        session: type[StreamSession] | None = None,
    ) -> None:
        self._store = store
        self._mapped = mapped
        self._scheme = scheme
        self._session = session or StreamSession
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.strangers = Strangers(log, scheme)
        self._closed = False

    def accept(self, stream: Stream, binding: bytes = b"") -> Stream:
        """Serve the client of a new stream in a task; returns the stream.

        `binding`: the hash of the certificate that was shown to it (design: authentication).
        """
        if self._closed:  # the kernel accepted the connection before `close`
            stream.abort()
            return stream
        session = self._session(
            stream,
            self._store,
            mapped=self._mapped,
            scheme=self._scheme,
            strangers=self.strangers,
        )
        session.binding = binding
        task = self.start(session.run())
        # Also when it is cancelled before its first step, and so never comes to its `finally`.
        task.add_done_callback(lambda _: stream.abort())
        return stream

    def start(self, serving: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """The same for a listener that has more to do for a connection than to serve it."""
        task = self._loop.create_task(serving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def count(self, what: str) -> None:
        """Count what happened to a connection before it had a session."""
        self._store.count(what)

    def admits(self, address: str) -> bool:
        """Whether a connection from there may begin; if not, it is counted as refused."""
        try:
            self.strangers.check(address, self._loop.time())
        except KvpoolError as error:
            self.refused(address, error)
            return False
        return True

    def refused(self, address: str, error: KvpoolError, *, costly: bool = False) -> None:
        """Count and report a connection that was refused before it had a session.

        `costly`: it counts like a wrong proof, whatever the error.
        """
        self._store.count("refused_handshakes")
        self.strangers.refused(address, error, self._loop.time(), costly=costly)

    async def close(self) -> None:
        """End them all. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class StreamSession:
    """The server's side of one stream: handshake, then one answer to each request."""

    #: Whether clients of tenants may use it. Never where the client maps the server's memory.
    serves_tenants = True
    #: Bytes that may come with a `Reserve`.
    write_bytes_max = WRITE_BYTES_MAX

    @property
    def in_place_above(self) -> int | None:
        """As `Connection.pin` has it, for a client that reads to a device."""
        return None

    #: The hash of the certificate that this client was shown; proofs cover it.
    binding = b""

    def __init__(
        self,
        stream: Stream,
        store: BlockStore,
        *,
        mapped: bool,
        scheme: str,
        strangers: Strangers | None = None,
    ) -> None:
        self.stream = stream
        self._store = store
        self._strangers = strangers if strangers is not None else Strangers(log, scheme)
        self._mapped = mapped
        self._scheme = scheme
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._peer = Peer("")
        self._pins: list[Pin] = []
        #: The write whose bytes are arriving or have arrived, and what was reserved for it.
        self._write_request: Reserve | None = None
        self._incoming: list[Reservation] = []
        #: Between two exchanges: since when.
        self._idle_since: float | None = None
        self._lent = False  # the client writes what it has reserved last, and may write it late

    async def run(self) -> None:
        """Serve until the client disconnects. Any error ends this connection only.

        A writer whose connection *we* close may still be alive and, with mapped memory, still
        write. Its extents are then quarantined until it hangs up: it does that after its copies
        have stopped, and its kernel does it when it dies (design: quarantine).
        """
        if self._strangers.arrived(self.stream, self.stream.peer_address):
            self._store.count("displaced_handshakes")
        try:
            quarantined = await self._serve()
            if quarantined is not None:
                await self.stream.close_gracefully()
                quarantined.writer_exited()
        finally:
            self._strangers.left(self.stream)
            self.stream.abort()
            # Both refer to this session (design: turns).
            self._connection, self._peer = None, Peer("")

    async def _serve(self) -> Connection | None:
        """Serve until the connection ends. Returns it if its client may still write to our
        memory."""
        ours = quarantined = False
        try:
            self.stream.reader.body_max = _HELLO_MAX
            self._connection = await self.handshake()
            self._strangers.left(self.stream)
            self.stream.reader.body_max = _REQUEST_MAX
            while True:
                self._idle_since = self._loop.time()
                frame = await self.stream.receive(self._payload_of_request, deadline=None)
                self._idle_since = None
                if self._pins:
                    self._unpin_previous(self._connection)
                    if frame.type == TYPES[Unpin]:
                        if decode(Unpin, frame.type, frame.body).confirm:
                            await self._send(StatusReply(b""))
                        continue
                # Work for a client that has hung up must end: it may wait for space for seconds.
                await self.stream.while_connected(self._answer(frame, self._connection))
        except LinkBroken:
            pass
        except KvpoolError as error:
            ours = True
            self._refuse(error)
        except asyncio.CancelledError:
            ours = True
            raise
        except Exception:
            ours = True
            log.exception("connection failed", transport=self._scheme)
        finally:
            may_write = ours and self._lent
            if not may_write:
                # Before the pins go, and the reservations: what is queued must not be sent, and
                # what arrives must not be stored.
                self.stream.abort()
            if self._connection is not None:
                quarantined = self._connection.close(writer_may_be_alive=may_write)
        return self._connection if quarantined else None

    async def handshake(self) -> Connection:
        """Receive `Hello`, check versions, cluster and secret, and open a `Connection`."""
        deadline = self._loop.time() + HELLO_S
        hello = await self.stream.expect(Hello, deadline=deadline)
        cluster, proved = self._store.cluster, None
        if hello.cluster != cluster.name:
            raise VersionMismatch(
                f"client belongs to cluster {hello.cluster!r}, this server to another one"
            )
        if cluster.secret:
            self._strangers.check(self.stream.peer_address, self._loop.time())
            if hello.tenant and (self._mapped or not self.serves_tenants):
                raise Forbidden(
                    f"{self._scheme} is not for clients of tenants, who could see the memory of "
                    "others there: use tcp"
                )
            ask = of_secrets("ask_for_proof")
            proved = await ask(self.stream, self._store, hello, self.binding, deadline)
        self._peer = Peer(hello.client, self._scheme, self, self.stream.peer_address, proved)
        connection = self._store.connect(self._peer)
        size = self._store.tier.capacity if self._mapped else 0
        try:
            await self.welcome(hello, Welcome(self._store.server, size))
        except BaseException:
            connection.close()
            raise
        return connection

    async def welcome(self, hello: Hello, welcome: Welcome) -> None:
        """Send `welcome` to a client that may use the pool. For a transport that passes more."""
        await self._send(welcome)

    def progress(self) -> object:
        """As `ClientLink.progress`."""
        return self.stream.progress()

    def hang_up(self, why: KvpoolError) -> None:
        """As `ClientLink.hang_up`; the task that serves the stream ends, and closes what it has."""
        if self._mapped:  # the client may still write, so its stream must end by its own side
            self.stream.interrupt(why)
        else:
            self.stream.abort()

    def idle_since(self) -> float | None:
        """As `ClientLink.idle_since`."""
        return None if self._pins or self._lent else self._idle_since

    def retire(self) -> None:
        """As `ClientLink.retire`."""
        self.stream.abort()

    def _refuse(self, error: KvpoolError) -> None:
        admitted = self._connection is not None
        if not admitted:
            self._store.count("refused_handshakes")
        if not (admitted and isinstance(error, Forbidden)):  # which the store's audit has
            self._strangers.refused(self.stream.peer_address, error, self._loop.time())
        with contextlib.suppress(KvpoolError):
            self.stream.send_now(refusal(error))

    async def _send(self, message: Message) -> None:
        await self.stream.send(message, deadline=self._loop.time() + ANSWER_S)

    async def _answer(self, frame: Frame, connection: Connection) -> None:
        write, self._write_request = self._write_request, None
        if write is not None:  # it was checked before its bytes came
            await self._seal_written(write, connection)
            return
        kind = message_type(frame.type)
        if kind is None or not (kind in _TRANSFERS or kind in ASIDE):
            name = kind.__name__ if kind is not None else f"type {frame.type}"
            raise BadMessage(f"{name} is no request")
        request = decode(kind, frame.type, frame.body)
        if self._peer.proved is not None:  # a tenant's
            try:
                self._store.guard.check(self._peer.tenant, request)
            except Forbidden as error:
                self._store.forbidden(self._peer, kind.__name__, str(error))
                raise
        if kind in _TRANSFERS:
            await _TRANSFERS[kind](self, request, connection)
        else:
            await self._send(await connection.answer(request))

    def _payload_of_request(self, frame: Frame) -> PayloadReceiver | None:
        """Where the bytes of a request go, of which only `Reserve` may have some.

        Its blocks are reserved here, in the step in which the request is complete: so each byte
        goes where it stays, and nothing of a stranger's is held beside his reservations.
        """
        connection = self._connection
        if frame.type != _RESERVE or not frame.payload_size or connection is None:
            return None
        self._idle_since = None
        self._unpin_previous(connection)
        self._lent = False
        if frame.payload_size > self.write_bytes_max:
            raise BadMessage(
                f"a write of {frame.payload_size} bytes, limit {self.write_bytes_max}: reserve"
            )
        write = decode(Reserve, frame.type, frame.body)
        request = _reserve_request(write)
        if len(write.checksums) != len(write.sizes):
            raise BadMessage(f"{len(write.sizes)} sizes, {len(write.checksums)} checksums")
        try:
            if self._peer.proved is not None:
                self._store.guard.check(self._peer.tenant, write)
        except Forbidden:  # `_answer` refuses it when its bytes are out of the way
            return PayloadReceiver([_nowhere(frame.payload_size)])
        if sum(write.sizes) != frame.payload_size:
            raise BadMessage(f"blocks of {sum(write.sizes)} bytes with {frame.payload_size} bytes")
        reservations = self._incoming = connection.reserve_now(request)
        self._write_request = write
        views = iter(connection.views(reservations))
        return PayloadReceiver(
            [
                (next(views),) if reservation.extent is not None else _nowhere(size)
                for reservation, size in zip(reservations, write.sizes, strict=True)
            ]
        )

    async def _seal_written(self, write: Reserve, connection: Connection) -> None:
        """Its bytes have arrived: seal the blocks that were reserved for it."""
        reservations, self._incoming = self._incoming, []
        granted = [i for i, r in enumerate(reservations) if r.extent is not None]
        statuses = bytearray([r.status for r in reservations])
        # The other writer may still wait until the masters have the block: as in `reserve`.
        is_here = WriteStatus.ALREADY_STORED in statuses
        if granted or is_here:
            sealed = await connection.seal(
                [reservations[i].id for i in granted],
                [write.checksums[i] for i in granted],
                visible=write.visible or is_here,
                deadline=self._loop.time() + min(write.wait_s, WAIT_S_MAX),
            )
            for position, status in zip(granted, sealed, strict=True):
                statuses[position] = status
        await self._send(StatusReply(bytes(statuses), connection.alone))

    async def _write(self, reserve: Reserve, connection: Connection) -> None:
        """Reserve, let the bytes arrive, seal."""
        request = _reserve_request(reserve)
        if reserve.checksums:
            raise BadMessage("checksums of bytes that have not come")
        deadline = self._loop.time() + min(reserve.wait_s, WAIT_S_MAX)
        self._lent = False
        reservations = await connection.reserve(request, deadline=deadline)
        granted = [r for r in reservations if r.status is WriteStatus.RESERVED]
        # Before the client gets an offset: from then on its extents must not be reused without it.
        self._lent = self._mapped and bool(granted) and connection.lend()
        offsets = [r.extent.offset for r in granted if r.extent is not None] if self._lent else []
        statuses = bytes([r.status for r in reservations])
        await self._send(Reserved(statuses, [r.id for r in granted], offsets))
        if not granted:
            return
        if not self._lent:
            await self._take_payload(granted, connection, deadline + GRACE_S)
        seal = await self.stream.expect(Seal, deadline=deadline + GRACE_S)
        if len(seal.ids) != len(seal.checksums):
            raise BadMessage(f"{len(seal.ids)} ids, {len(seal.checksums)} checksums")
        sealed = await connection.seal(
            seal.ids,
            seal.checksums,
            visible=seal.visible,
            deadline=self._loop.time() + min(seal.wait_s, WAIT_S_MAX),
        )
        if {r.id for r in granted} <= set(seal.ids):
            self._lent = False  # a client seals what it has written: it writes no more into these
        await self._send(StatusReply(bytes(sealed), connection.alone))

    async def _take_payload(
        self, granted: list[Reservation], connection: Connection, deadline: float
    ) -> None:
        views = connection.views(granted)

        def target(frame: Frame) -> PayloadReceiver:
            if frame.type != PAYLOAD:
                raise BadMessage(f"got type {frame.type}, expected the blocks' bytes")
            return PayloadReceiver([(view,) for view in views])

        await self.stream.receive(target, deadline=deadline)

    async def _read(self, read: Read, connection: Connection) -> None:
        """Pin, then send, or show."""
        namespace, digests = unpack_batch(read)
        check_part(namespace, read.part)
        if len(read.buffer_sizes) != len(digests):
            raise BadMessage(f"{len(digests)} digests, {len(read.buffer_sizes)} sizes")
        view = read.view and self._mapped
        pins = await connection.pin(
            namespace,
            read.part,
            digests,
            read.buffer_sizes,
            view=view,
            in_place_above=self.in_place_above if read.to_device else None,
        )
        self._pins = [pin for pin in pins if pin.extent is not None]
        if self._mapped:
            await self._send_offsets(pins)
        else:
            await self._send_payload(pins, connection)
            self._unpin_previous(connection)

    def _unpin_previous(self, connection: Connection) -> None:
        """Unpin what the last request has pinned, if it has."""
        if not self._pins:
            return
        connection.unpin(self._pins)
        self._pins = []

    async def _send_payload(self, pins: list[Pin], connection: Connection) -> None:
        hits = [pin for pin in pins if pin.extent is not None]
        answer = Data(
            bytes([pin.status for pin in pins]),
            [pin.extent.size for pin in hits if pin.extent is not None],
            [pin.checksum for pin in hits],
        )
        try:
            payload = await self._payload_of(hits, connection)
            # It returns when the kernel has every byte, so unpinning after it is safe.
            await self.stream.send(answer, payload, deadline=self._loop.time() + ANSWER_S)
        except BaseException:
            self.stream.abort()  # before the pins go: what is queued must not be sent from there
            raise

    async def _payload_of(self, hits: list[Pin], connection: Connection) -> list[Pieces]:
        """The memory of pinned blocks. For a transport that sends from other memory, too."""
        return list(zip(connection.views(hits)))  # each block is one piece

    async def _send_offsets(self, pins: list[Pin]) -> None:
        """Say where they lie. The pins stay until the client sends something else, or goes; never
        until some time has passed (G4)."""
        extents = [pin.extent for pin in pins if pin.extent is not None]
        statuses, sizes = bytes([pin.status for pin in pins]), [extent.size for extent in extents]
        checksums = [pin.checksum for pin in pins if pin.status is ReadStatus.HIT]
        await self._send(Data(statuses, sizes, checksums, [extent.offset for extent in extents]))


#: What begins an exchange that moves the bytes of blocks, and who answers it.
_TRANSFERS: Final[
    dict[type[Message], Callable[[StreamSession, Any, Connection], Awaitable[None]]]
] = {
    Read: StreamSession._read,
    Reserve: StreamSession._write,
}


def _reserve_request(message: Reserve) -> ReserveRequest:
    """The blocks that a client wants to write. Raises BadMessage."""
    namespace, digests = unpack_batch(message)
    parents = unpack_parents(message.parents, message.digest_size)
    check_part(namespace, message.part)
    sizes = message.sizes
    if not len(digests) == len(parents) == len(sizes):
        raise BadMessage(f"{len(digests)} digests, {len(parents)} parents, {len(sizes)} sizes")
    if any(map(eq, parents, digests)):
        raise BadMessage("a block names itself as its parent")
    hint = None
    if message.session:
        if not message.session.isprintable():
            raise BadMessage(f"session {message.session[:40]!r} is not printable")
        hint = SessionHint(message.session, message.resume_s)
    elif message.resume_s is not None:
        raise BadMessage("a time to resume without a session")
    copies = [message.copies] * len(digests) if message.copies > 1 else None
    return ReserveRequest(namespace, message.part, digests, parents, sizes, hint, copies=copies)


def _nowhere(size: int) -> Pieces:
    """Room for bytes that are thrown away."""
    whole, rest = divmod(size, len(_NOWHERE))
    return (*[_NOWHERE] * whole, *([_NOWHERE[:rest]] if rest else []))
