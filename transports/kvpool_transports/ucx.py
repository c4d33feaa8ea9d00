"""UCX: blocks move directly between the caller's buffer and the server's segment, on any fabric.

A TCP connection carries requests and answers, and its end shows that the peer's process has ended.
UCX carries all but small payloads, by rendezvous, one tagged message for each piece:

    sender    the frame that announces the payload      (tcp)
    receiver  posts a receive for every piece, "ready"  (tcp)
    sender    sends the pieces                          (UCX)
    sender    "done", when all its sends have completed (tcp)

So no message is unexpected, and UCX buffers nothing. The bytes are valid only after "done": a
sender that gave up, whose memory may belong to another block by then, never sends it. The TCP
connection ends with the process at its other end, on every fabric, so a dead peer is noticed at
once; a frozen peer costs a deadline. Each stream has its own UCX endpoint, and any error in a
transfer closes it, because only that makes UCX release buffers (see `ucx_worker`). Before the first
request a token goes through UCX, so a lane that is blocked or missing is noticed while there is
time to use another transport. (design: ucx)

UCX does not validate what peers send: a peer that can reach a UCX worker is trusted with its
process. On loopback these are the processes of this host; elsewhere it is the whole network, so
`--insecure` is required there (design: authentication).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import struct
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import xxhash

from kvpool import logs
from kvpool.addresses import is_loopback, parse
from kvpool.errors import BadFrame, ConfigError, KvpoolError, LinkBroken, PeerError, VersionMismatch
from kvpool.memory_limits import MemoryLimits, tightest
from kvpool.protocols import (
    BlockStore,
    Channel,
    Connection,
    DeviceMemory,
    DeviceReadBlock,
    DeviceToken,
    DeviceWriteBlock,
    IdleTimeout,
    Listener,
    ReadOptions,
    WriteOptions,
)
from kvpool.protocols.device_transport import BlocksToHost, DeviceArrival
from kvpool.threads import in_thread
from kvpool.types import Cluster, Pin, ReadStatus, WriteStatus
from kvpool.units import human
from kvpool.wire.frames import (
    ChooseTarget,
    Frame,
    PayloadReceiver,
    PayloadTarget,
    Pieces,
    no_payload,
)
from kvpool.wire.messages import (
    PAYLOAD,
    TYPES,
    Data,
    Error,
    Message,
    Welcome,
    decode,
    decode_answer,
)
from kvpool_transports.copy_pool import CopyJob, CopyPool
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool, os_errors
from kvpool_transports.streams.requests import StreamChannel
from kvpool_transports.streams.server import HELLO_S, Sessions, StreamSession
from kvpool_transports.streams.stream import Stream
from kvpool_transports.tcp import TcpListener, tune
from kvpool_transports.ucx_context import (
    device_lack,
    fabric_text,
    has_fabric,
    load,
    make_context,
    version,
    version_text,
)
from kvpool_transports.ucx_token import SendToken
from kvpool_transports.ucx_worker import Transfer, UcxPath, Worker, Workers, cut

if TYPE_CHECKING:
    from ucxx._lib.libucxx import UCXContext

log = logs.get("kvpool.ucx")

#: Payloads up to this many bytes are sent with their frame, over TCP: a rendezvous costs more.
SMALL: Final = 128 << 10
#: Bytes of one UCX message (a 1,024th of the payload, if that is more).
PIECE: Final = 1 << 20
_PIECES_MAX: Final = 1024
#: Messages that a sender has under way at once.
WINDOW: Final = 16
HINT: Final = "UCX is not installed: pip install 'kvpool[ucx]'"
_INTRODUCTION = struct.Struct("<4sHHHQQ")
_MAGIC: Final = b"kvux"
_TOKEN = struct.Struct("<Q")
#: A reader waits this long for the token of a server's device; later a way is silent.
_TOKEN_S: Final = 0.05
_ADDRESS_SIZE_MAX: Final = 16 << 10
#: UCX's own limit of `UCX_MAX_RNDV_RAILS`.
_RAILS_MAX: Final = 16


class UcxTransport:
    """`ucx://host:port`, the port of the TCP connection. UCX chooses the lanes from `UCX_TLS`.

    Settings: `tls` and `net_devices` as in UCX_TLS and UCX_NET_DEVICES, `rails` as in
    UCX_MAX_RNDV_RAILS (how many network cards one block may use at once), `rndv_scheme` as in
    UCX_RNDV_SCHEME. If one is empty or 0, UCX's environment variable counts, then our default.

    Raises ConfigError when ucxx is not installed, or for a setting out of range.
    """

    scheme = "ucx"
    same_host = False
    authenticated = False

    def __init__(
        self, *, tls: str = "", net_devices: str = "", rails: int = 0, rndv_scheme: str = ""
    ) -> None:
        if importlib.util.find_spec("ucxx") is None:
            raise ConfigError(HINT)
        if not 0 <= rails <= _RAILS_MAX:
            raise ConfigError(f"transport 'ucx': rails is {rails}, expected 0 to {_RAILS_MAX}")
        named = {
            "TLS": tls,
            "NET_DEVICES": net_devices,
            "MAX_RNDV_RAILS": str(rails or ""),
            "RNDV_SCHEME": rndv_scheme,
        }
        self._settings = {name: value for name, value in named.items() if value}
        self._contexts: dict[bool, UCXContext] = {}

    async def listen(self, address: str, store: BlockStore) -> Listener:
        host, _ = parse(address or "ucx://127.0.0.1:0", "ucx")
        if self.has_fabric:
            _check_lockable(store.tier.capacity, MemoryLimits())
        workers = await self._workers(host)
        session = _Session if self.device_lack else _DeviceSession
        sessions = Sessions(store, mapped=False, scheme="ucx", session=session)
        listener = TcpListener(
            sessions,
            "ucx",
            lambda: sessions.accept(UcxStream(workers.current(), workers.copies)),
        )
        try:
            await listener.start(address)
        except BaseException:
            workers.close()
            raise
        return _UcxListener(listener, workers)

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        host, port = parse(address, "ucx")
        workers = await self._workers(host)

        def make() -> UcxStream:
            return UcxStream(workers.current(), workers.copies)

        async def dial(deadline: float) -> Stream:
            loop = asyncio.get_running_loop()
            with os_errors(f"server at {address}"):
                async with asyncio.timeout_at(deadline), workers.pairing:
                    _, stream = await loop.create_connection(make, host, port)
                    try:
                        await requests.handshake(
                            stream,
                            cluster=cluster,
                            client=client,
                            server="",
                            deadline=deadline,
                        )
                        await _exchange_addresses(stream, workers, deadline)
                        await stream.handshake_token(deadline)
                    except BaseException:
                        stream.abort()
                        raise
            return stream

        streams = StreamPool(dial)
        try:
            async with streams.stream(deadline):
                pass  # the server is there and speaks our protocol; the stream stays for later
        except BaseException:
            workers.close()
            raise
        make_channel = UcxChannel if self.device_lack else UcxDeviceChannel
        return make_channel(address, streams, workers)

    @property
    def status_text(self) -> str:
        """UCX's version, lanes, devices and rendezvous scheme on this machine, and its RDMA
        devices. Raises ConfigError when UCX cannot be used."""
        load()
        context = make_context(local=False, settings=self._settings)
        config = context.config
        return (
            f"UCX {version_text()}, lanes {config['TLS']}, devices "
            f"{config['NET_DEVICES']}, up to {config['MAX_RNDV_RAILS']} rails, rendezvous "
            f"{config['RNDV_SCHEME']}; {fabric_text()}"
        )

    @property
    def device_lack(self) -> str:
        """Empty where a lane to devices is named and this UCX has it. Of these lanes it is not
        known here whether the machine has what they need (design: device-memory)."""
        return device_lack(self._lanes)

    @property
    def has_fabric(self) -> bool:
        """Whether a lane of a fabric is set and usable: over tcp UCX is not faster than tcp."""
        return has_fabric(self._lanes)

    @property
    def _lanes(self) -> str:
        return self._settings.get("TLS") or os.environ.get("UCX_TLS", "")

    async def _workers(self, host: str) -> Workers:
        if not self._contexts:  # only the first call takes long, and a thread
            await in_thread(load)
        local = is_loopback(host)
        context = self._contexts.get(local)
        if context is None:
            context = self._contexts[local] = make_context(local=local, settings=self._settings)
        return Workers(context)


class UcxChannel(StreamChannel):
    """A channel over streams whose payloads go by UCX."""

    def __init__(self, address: str, streams: StreamPool, workers: Workers) -> None:
        super().__init__(address, streams)
        self._workers = workers

    @property
    def one_request_max(self) -> int:
        """More bytes would not come with their request."""
        return min(SMALL, super().one_request_max)

    async def close(self) -> None:
        self.abort()
        self._workers.copies.close()

    def abort(self) -> None:
        self._workers.copies.stop()
        super().abort()
        self._workers.close()


class UcxDeviceChannel(UcxChannel):
    """One whose UCX has lanes to devices: it registers a buffer there, and receives into it or
    sends from it."""

    #: The server may send from memory of its devices (design: device-memory).
    _takes_from_devices = True

    async def read_to_device(
        self, options: ReadOptions, blocks: Sequence[DeviceReadBlock], *, deadline: float
    ) -> list[DeviceArrival]:
        """As `SupportsDeviceRead.read_to_device`. The server may send from a device, too; where its
        token does not come, this channel asks for blocks of the host's memory from then on."""
        stream: UcxStream | None = None
        try:
            async with self._streams.stream(deadline, options.idle_timeout) as taken:
                stream = cast(UcxStream, taken)
                return await self._read_to_device(stream, options, blocks, deadline)
        except (LinkBroken, PeerError) as error:
            if stream is None or not stream.waits_for_token:
                raise
            self._no_sources(error)
        async with self._streams.stream(deadline, options.idle_timeout) as taken:
            return await self._read_to_device(cast(UcxStream, taken), options, blocks, deadline)

    async def _read_to_device(
        self,
        stream: UcxStream,
        options: ReadOptions,
        blocks: Sequence[DeviceReadBlock],
        deadline: float,
    ) -> list[DeviceArrival]:
        answer = _DeviceAnswer(options, blocks)
        request = requests.read_request(
            options, blocks, view=False, to_device=self._takes_from_devices
        )
        await stream.send(request, deadline=deadline)
        while True:
            frame = await stream.receive(answer.payload_target, deadline=deadline)
            if frame.type != TYPES[SendToken]:
                return answer.arrivals()
            token = decode(SendToken, frame.type, frame.body)
            began = asyncio.get_running_loop().time()
            stream.waits_for_token = True
            try:
                await stream.take_device_token(token.content, deadline)
            except BaseException:  # also of a reader who does not wait for it any longer
                if asyncio.get_running_loop().time() - began >= _TOKEN_S:
                    self._no_sources("its token does not come")
                raise
            stream.waits_for_token = False

    def _no_sources(self, why: object) -> None:
        if self._takes_from_devices:
            self._takes_from_devices = False
            log.warning(
                "blocks on the server's device come through its memory",
                server=self._address,
                why=str(why),
            )

    async def write_from_device(
        self,
        options: WriteOptions,
        blocks: Sequence[DeviceWriteBlock],
        token: DeviceToken,
        to_host: BlocksToHost,
        *,
        deadline: float,
    ) -> list[WriteStatus]:
        """As `SupportsDeviceWrite.write_from_device`."""
        async with self._streams.stream(deadline) as stream:
            if sum([block.size for block in blocks]) > SMALL:
                await cast(UcxStream, stream).send_device_token(token, deadline)
            statuses, granted, reserved = await requests.reserve(stream, options, blocks, deadline)
            if not granted:
                return statuses
            chosen = [blocks[i] for i in granted]
            if sum([block.size for block in chosen]) > SMALL:
                # Memory on a device is cut like any other: its parts are the same memory.
                payload = cast("list[Pieces]", [(block.memory,) for block in chosen])
            else:  # it goes with its frame
                payload = [(view,) for view in await to_host(chosen)]
            await stream.send(None, payload, deadline=deadline)
            checksums = [block.checksum for block in chosen]
            sealed = await requests.seal(stream, options, reserved.ids, checksums, deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses


class _DeviceAnswer:
    """The answer to one read for a device: a small payload comes with its frame, to the host."""

    def __init__(self, options: ReadOptions, blocks: Sequence[DeviceReadBlock]) -> None:
        self._idle_timeout = options.idle_timeout
        self._blocks = blocks
        self._answered = requests.Answered([], [], Data(b"", [], []))
        self._on_host: list[memoryview] = []

    def payload_target(self, frame: Frame) -> PayloadTarget | None:
        """As `requests.ReadAnswer`'s; a payload that UCX carries goes to the device itself."""
        if frame.type == TYPES[SendToken]:
            return None
        data = decode_answer(Data, frame.type, frame.body)
        self._answered = _, hits, _ = requests.answered(data, self._blocks)
        if sum(data.sizes) <= SMALL:
            self._on_host = [memoryview(bytearray(size)) for size in data.sizes]
            on_host = [(memory,) for memory in self._on_host]
            return PayloadReceiver(on_host, None, self._idle_timeout)
        memory = [self._blocks[i].memory[:size] for i, size in zip(hits, data.sizes, strict=True)]
        return DevicePayload(memory, self._idle_timeout)

    def arrivals(self) -> list[DeviceArrival]:
        """One for each block, after the whole payload was received."""
        statuses, hits, data = self._answered
        arrivals = [DeviceArrival(status) for status in statuses]
        for number, position in enumerate(hits):
            arrivals[position] = DeviceArrival(
                ReadStatus.HIT,
                data.sizes[number],
                data.checksums[number],
                self._on_host[number] if self._on_host else None,
            )
        return arrivals


class DevicePayload:
    """Where a payload goes on a device: each block is one piece. UCX alone can fill it."""

    memory = memoryview(b"")  # no byte of it may come over TCP

    def __init__(self, blocks: Sequence[DeviceMemory], idle_timeout: IdleTimeout | None) -> None:
        self.blocks = [(memory,) for memory in blocks]
        self.missing = sum(map(len, blocks))
        self._idle_timeout = idle_timeout

    def received(self, count: int) -> None:
        """The next `count` bytes are in place."""
        self.missing -= count
        if self._idle_timeout is not None:
            self._idle_timeout.touch()

    filled = received


class _UcxListener:
    def __init__(self, listener: TcpListener, workers: Workers) -> None:
        self._listener = listener
        self._workers = workers

    @property
    def address(self) -> str:
        return self._listener.address

    async def close(self) -> None:
        await self._listener.close()
        self._workers.close()
        self._workers.copies.close()


class _Session(StreamSession):
    """A session that exchanges UCX addresses after its handshake, so only with admitted clients."""

    write_bytes_max = SMALL  # more would go by UCX, for which a request has no deadline
    serves_tenants = False  # who has a worker's address can send to it (design: ucx)

    async def handshake(self) -> Connection:
        connection = await super().handshake()
        try:
            await cast(UcxStream, self.stream).meet(asyncio.get_running_loop().time() + HELLO_S)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _answer(self, frame: Frame, connection: Connection) -> None:
        if frame.type != TYPES[SendToken]:
            await super()._answer(frame, connection)
            return
        token = decode(SendToken, frame.type, frame.body)
        until = asyncio.get_running_loop().time() + HELLO_S
        await cast(UcxStream, self.stream).take_device_token(token.content, until)


class _DeviceSession(_Session):
    """One whose UCX has lanes to devices: it sends blocks of a tier on a device from there."""

    @property
    def in_place_above(self) -> int | None:
        return SMALL  # less goes with its frame, from the host's memory

    async def _payload_of(self, hits: list[Pin], connection: Connection) -> list[Pieces]:
        """Also of blocks on devices, when the lanes are proved for these."""
        devices = {
            pin.tier: connection.device_tier(pin.tier) for pin in hits if pin.tier is not None
        }
        if not devices:
            return await super()._payload_of(hits, connection)
        until = asyncio.get_running_loop().time() + HELLO_S
        for tier in devices.values():
            await cast(UcxStream, self.stream).send_device_token(tier.device_token, until)
        payload: list[Pieces] = []
        for pin in hits:
            assert pin.extent is not None
            if pin.tier is None:
                payload.append(tuple(connection.views([pin])))
            else:  # memory on a device is cut like any other: its parts are the same memory
                memory = devices[pin.tier].device_view(pin.extent.offset, pin.extent.size)
                payload.append(cast(Pieces, (memory,)))
        return payload


async def _exchange_addresses(stream: UcxStream, workers: Workers, deadline: float) -> None:
    """Send our UCX address and receive the server's; then each side makes its end of an endpoint.

    UCX joins the ends that two workers make for each other in the order in which they are made. So
    a client's streams do this one after the other (`Workers.pairing`). If it fails half way, it is
    unknown which ends exist, and the next stream uses a new worker.
    """
    try:
        await stream.send_address(deadline)
        await stream.receive_address(deadline)
    except BaseException:
        workers.renew()
        raise


class UcxStream(Stream):
    """A stream whose payloads above SMALL go by UCX beside it (design: ucx)."""

    def __init__(self, worker: Worker, copies: CopyPool) -> None:
        super().__init__()
        self._worker = worker
        self._copies = copies
        self._path: UcxPath | None = None
        self._transfer: Transfer | None = None
        self._proved_devices: set[str] = set()
        #: The peer is about to prove its lanes for memory of a device.
        self.waits_for_token = False

    async def send_address(self, deadline: float) -> None:
        """Send the address of our worker, and the number in the tags of our receives."""
        address, path = self._worker.address, self._ucx_path()
        head = _INTRODUCTION.pack(
            _MAGIC, *version(), len(address), path.number, xxhash.xxh3_64_intdigest(address)
        )
        await super().send(None, [(memoryview(head + address),)], deadline=deadline)

    async def receive_address(self, deadline: float) -> None:
        """Receive the peer's address and number. Raises PeerError."""
        received = bytearray()

        def target(frame: Frame) -> PayloadReceiver:
            _expect_payload(frame)
            if not _INTRODUCTION.size < frame.payload_size <= _ADDRESS_SIZE_MAX:
                raise BadFrame(f"an introduction of {frame.payload_size} bytes")
            received.extend(bytes(frame.payload_size))
            return PayloadReceiver([(memoryview(received),)])

        await super().receive(target, deadline=deadline)
        magic, major, minor, size, number, check = _INTRODUCTION.unpack_from(received)
        address = bytes(received[_INTRODUCTION.size :])
        if magic != _MAGIC or size != len(address) or check != xxhash.xxh3_64_intdigest(address):
            raise BadFrame("that is no introduction")
        if (major, minor) != version():
            raise VersionMismatch(f"the peer has UCX {major}.{minor}, this is {version_text()}")
        self._ucx_path().meet(address, number)

    async def meet(self, deadline: float) -> None:
        """The server's half of `_exchange_addresses` and of `handshake_token`."""
        await self.receive_address(deadline)
        tokens = [bytearray(_TOKEN.size) for _ in range(2)]
        async with self._moving() as transfer:
            for token in tokens:
                transfer.receive(memoryview(token))
            await self.send_address(deadline)
            await transfer.until(0, deadline)
            self._send_token(transfer)
            await transfer.until(0, deadline)
        if any(token != _TOKEN.pack(self._ucx_path().number) for token in tokens):
            raise BadFrame("that is not the token")
        await super().send(None, deadline=deadline)  # ready for requests

    async def handshake_token(self, deadline: float) -> None:
        """Send the token twice and receive one, which proves that the lanes work by rendezvous.

        The first message also sets up the lanes; only the second shows how UCX sends over them.
        """
        token = bytearray(_TOKEN.size)
        async with self._moving() as transfer:
            transfer.send(memoryview(_TOKEN.pack(self._ucx_path().theirs)))
            await transfer.until(0, deadline)
            transfer.receive(memoryview(token))
            self._send_token(transfer)
            await transfer.until(0, deadline)
        if token != _TOKEN.pack(self._ucx_path().number):
            raise BadFrame("that is not the token")
        await self._ack(deadline)

    async def send_device_token(self, token: DeviceToken, deadline: float) -> None:
        """Prove the lanes for memory of that device, unless they are proved: how UCX sends depends
        on the memory, and not on the lanes alone. Raises LinkBroken as `_send_token` does."""
        if token.device in self._proved_devices:
            return
        await super().send(SendToken(token.content), deadline=deadline)
        await self._ack(deadline)  # ready
        async with self._moving() as transfer:
            self._send_token(transfer, cast(memoryview, token.memory))
            await transfer.until(0, deadline)
        await self._ack(deadline)  # the peer has it, and it is right
        self._proved_devices.add(token.device)

    async def take_device_token(self, content: bytes, deadline: float) -> None:
        """The receiver's half. Raises BadFrame when other bytes arrive."""
        token = bytearray(len(content))
        async with self._moving() as transfer:
            transfer.receive(memoryview(token))
            await super().send(None, deadline=deadline)  # ready
            await transfer.until(0, deadline)
        if token != content:
            raise BadFrame("that is not the token: bytes of a device arrive as others")
        await super().send(None, deadline=deadline)

    def _send_token(self, transfer: Transfer, token: memoryview | None = None) -> None:
        """Raises LinkBroken if UCX sends over these lanes without a rendezvous."""
        if token is None:
            token = memoryview(_TOKEN.pack(self._ucx_path().theirs))
        if transfer.send(token):
            why = (
                "UCX sends without a rendezvous over these lanes, and what has begun to arrive "
                "could not be stopped: leave UCX_RNDV_SCHEME to kvpool, or name other lanes"
            )
            log.error("link refused", why=why)  # the peer only sees that the connection ends
            raise LinkBroken(why)

    # --- payloads --------------------------------------------------------------------------

    async def send(
        self,
        message: Message | None,
        payload: Sequence[Pieces] = (),
        *,
        deadline: float,
        seeds: Sequence[int] | None = None,
    ) -> list[int]:
        """As `Stream.send`. When it returns or raises, UCX does not use the buffers any more."""
        total = sum([len(piece) for pieces in payload for piece in pieces])
        if total <= SMALL:
            return await super().send(message, payload, deadline=deadline, seeds=seeds)
        await super().send(message, deadline=deadline)
        await self._ack(deadline)  # ready
        checksums: list[int] = []
        async with self._moving() as transfer:
            for index, pieces in enumerate(payload):
                hasher = xxhash.xxh3_64(seed=seeds[index]) if seeds else None
                for segment in cut(pieces, _piece_size(total)):
                    buffer = await self._contiguous(segment, deadline)
                    if hasher is not None:
                        hasher.update(buffer)
                    transfer.send(buffer)
                    await transfer.until(WINDOW - 1, deadline)
                    await asyncio.sleep(0)  # let other tasks run between two pieces
                if hasher is not None:
                    checksums.append(hasher.intdigest())
            await transfer.until(0, deadline)
        await super().send(None, deadline=deadline)  # done
        return checksums

    async def receive(
        self, payload_target: ChooseTarget = no_payload, *, deadline: float | None
    ) -> Frame:
        """As `Stream.receive`. When it returns or raises, nothing writes into the memory that
        `payload_target` has returned."""
        apart: PayloadReceiver | DevicePayload | None = None

        def aside(frame: Frame) -> PayloadTarget | None:
            nonlocal apart
            target = payload_target(frame)
            if target is None or target.missing <= SMALL or frame.type == TYPES[Error]:
                return target
            apart = cast("PayloadReceiver | DevicePayload", target)
            return None  # no payload bytes follow the frame over TCP

        frame = await super().receive(aside, deadline=deadline)
        if apart is not None:
            await self._fetch(apart, deadline)
        return frame

    async def _fetch(
        self, payload: PayloadReceiver | DevicePayload, deadline: float | None
    ) -> None:
        size = _piece_size(payload.missing)
        # Memory on a device is cut like any other: its parts are the same memory.
        blocks = cast("Sequence[Pieces]", payload.blocks)
        segments = [segment for pieces in blocks for segment in cut(pieces, size)]
        # UCX fills contiguous memory only: a segment of several pieces is received into scratch
        # memory and copied to the pieces.
        buffers = deque(
            segment[0] if len(segment) == 1 else _scratch(segment) for segment in segments
        )
        until = deadline if deadline is not None else self._loop.time() + HELLO_S
        async with self._moving() as transfer:
            for buffer in buffers:
                transfer.receive(buffer)
            await super().send(None, deadline=until)  # ready
            for segment in segments:
                buffer = buffers.popleft()
                await transfer.until(len(buffers), deadline)
                if len(segment) > 1:
                    await self._copy([buffer], segment, until)
                payload.filled(len(buffer))
        await self._ack(deadline)  # done: the sender's memory held this block until all was sent

    async def _contiguous(self, segment: Pieces, deadline: float) -> memoryview:
        """The bytes as one contiguous piece, because UCX sends no other."""
        if len(segment) == 1:
            return segment[0]
        joined = _scratch(segment)
        await self._copy(segment, [joined], deadline)
        return joined

    async def _copy(self, source: Pieces, target: Pieces, deadline: float) -> None:
        """Copy in a thread, so that the loop's other calls go on (design: turns)."""
        job = CopyJob(tuple(source), tuple(target), None)
        await self._copies.run([job], deadline=deadline)

    async def _ack(self, deadline: float | None) -> None:
        """Wait for the peer's "ready" or "done": an empty payload frame."""
        _expect_payload(await super().receive(deadline=deadline))

    @asynccontextmanager
    async def _moving(self) -> AsyncIterator[Transfer]:
        """A transfer. After the `with`, however it ends, UCX uses none of the buffers."""
        transfer = self._transfer = self._ucx_path().transfer()
        try:
            yield transfer
            transfer.end()
        except BaseException:
            super().abort()
            await transfer.stop()
            raise
        finally:
            self._transfer = None

    # --- ends ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        tune(transport)

    def progress(self) -> object:
        return super().progress() if self._transfer is None else self._transfer.completed

    def _ucx_path(self) -> UcxPath:
        if self._path is None:
            if self.lost:  # `_fail` has run already: a path made now would never be closed
                raise self._error()
            self._path = self._worker.path()
        return self._path

    def _fail(self, error: KvpoolError) -> None:
        super()._fail(error)
        if self._transfer is not None:
            self._transfer.fail(self._why or error)  # its owner closes the path, and waits for it
        elif self._path is not None:
            self._path.close()


def _check_lockable(capacity: int, limits: MemoryLimits) -> None:
    """Raises ConfigError where a network card may not have the whole segment."""
    bound = tightest(limits.locked())
    if capacity > bound.free:
        more = f"{human(capacity - max(0, bound.free))} more than {bound.name} has available"
        raise ConfigError(f"capacity is {more}; RDMA locks all: lower it or raise {bound.advice}")


def _scratch(pieces: Pieces) -> memoryview:
    """Memory for the bytes of `pieces`; not cleared, because all of it is filled next."""
    return np.empty(sum(map(len, pieces)), np.uint8).data


def _piece_size(total: int) -> int:
    """Bytes of one message: both sides must compute the same; at most `_PIECES_MAX` messages."""
    return max(PIECE, -(-total // _PIECES_MAX))


def _expect_payload(frame: Frame) -> None:
    if frame.type != PAYLOAD:
        decode_answer(Welcome, frame.type, frame.body)  # raises what an Error stands for
        raise BadFrame(f"got type {frame.type}, expected the payload frame of a ready or done")
