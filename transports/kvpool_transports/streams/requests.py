"""The client's half of transports over byte streams: the requests that all of them send in the
same way, and the channel of those whose frames carry the payload (tcp and similar ones).

Payload bytes are sent directly from the caller's pieces of memory, and received directly into them,
but for small ones (`wire.frames.SMALL`). They are hashed in steps while they are in the CPU's cache
(design: streams).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from kvpool.checksum import block_seeds, checksums
from kvpool.errors import BadMessage, VersionMismatch
from kvpool.guard import of_secrets
from kvpool.protocols import DeviceReadBlock, DeviceWriteBlock, ReadOptions, View, WriteOptions
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    Cluster,
    ReadBlock,
    ReadResult,
    ReadStatus,
    SessionHint,
    WriteBlock,
    WriteStatus,
)
from kvpool.wire.frames import Frame, PayloadReceiver
from kvpool.wire.messages import (
    Data,
    Hello,
    M,
    Message,
    Read,
    Reserve,
    Reserved,
    Seal,
    StatusReply,
    Welcome,
    decode_answer,
    pack_parents,
)
from kvpool_transports.copy_pool import CopyJob, CopyPool, first_bytes
from kvpool_transports.streams.pool import StreamPool
from kvpool_transports.streams.stream import Stream

#: By value; calling an enum takes ten times as long.
_READ = tuple(ReadStatus)
_WRITE = tuple(WriteStatus)
#: What no server answers: a client gives itself the first two, and a block whose bytes have not
#: been sent is not stored, one that is sealed is not reserved, nor refused.
_NOT_OF_SERVERS = (WriteStatus.SERVER_LOST, WriteStatus.NO_MASTER)
_NOT_OF_RESERVE = (*_NOT_OF_SERVERS, WriteStatus.STORED)
_NOT_OF_WRITE = (*_NOT_OF_SERVERS, WriteStatus.RESERVED)
_NOT_OF_SEAL = (*_NOT_OF_SERVERS, WriteStatus.REFUSED, WriteStatus.RESERVED, WriteStatus.NOT_YET)


class Exchange(Protocol):
    """What a handshake needs of a stream."""

    async def send(self, message: Message, *, deadline: float) -> object: ...

    async def receive(self, *, deadline: float) -> Frame: ...

    async def expect(self, type: type[M], *, deadline: float) -> M: ...


#: A write of at most so many bytes is one request; a larger one reserves before it sends. The
#: figures are in docs/benchmarks.md.
ONE_REQUEST_MAX = 1 << 20
#: The same, where the client could copy the bytes itself.
ONE_REQUEST_MAPPED_MAX = 256 << 10


async def handshake(
    stream: Exchange,
    *,
    cluster: Cluster,
    client: str,
    server: str,
    deadline: float,
    writer: bool = False,
    binding: bytes = b"",
) -> Welcome:
    """The first exchange on a new stream: versions, cluster, secret (design: authentication).

    A `writer` asks for writable memory, where the transport passes memory. With a secret, both
    sides prove that they know it, on the connection that `binding` names. Raises
    VersionMismatch for another protocol version, another cluster, or another server than `server`
    (if that is not empty), and Unauthenticated when a proof is missing or wrong.
    """
    hello = Hello(cluster.name, client, writer=writer)
    if cluster.secret:
        await of_secrets("prove")(stream, hello, cluster, binding, deadline)
    else:
        await stream.send(hello, deadline=deadline)
    welcome = await stream.expect(Welcome, deadline=deadline)
    if server and welcome.server != server:
        raise VersionMismatch(f"this is server {welcome.server!r}, expected {server!r}")
    return welcome


async def write_at_once(
    stream: Stream, options: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
) -> list[WriteStatus]:
    """Store blocks with one `Reserve`: request, checksums and bytes in one frame, and one answer.

    NOT_YET where the server would have to wait. Raises BadMessage for an answer that does not fit.
    """
    pieces = [block.pieces for block in blocks]
    digests = [block.digest for block in blocks]
    sums = checksums(options.namespace, options.part, digests, pieces)
    await stream.send(_reserve(options, blocks, deadline, sums), pieces, deadline=deadline)
    written = await stream.expect(StatusReply, deadline=deadline)
    return _stored(options, written, len(blocks), _NOT_OF_WRITE)


async def reserve(
    stream: Stream,
    options: WriteOptions,
    blocks: Sequence[WriteBlock] | Sequence[DeviceWriteBlock],
    deadline: float,
) -> tuple[list[WriteStatus], list[int], Reserved]:
    """Reserve space for blocks: one status each, the positions of those that were granted, and the
    answer with their ids, and with offsets where the client may write itself.

    Raises BadMessage for an answer that does not fit the request.
    """
    await stream.send(_reserve(options, blocks, deadline, []), deadline=deadline)
    reserved = await stream.expect(Reserved, deadline=deadline)
    statuses = write_statuses(reserved.statuses, len(blocks), _NOT_OF_RESERVE)
    granted = [i for i, status in enumerate(statuses) if status is WriteStatus.RESERVED]
    if len(reserved.ids) != len(granted) or len(reserved.offsets) not in (0, len(granted)):
        raise BadMessage(
            f"{len(granted)} blocks granted, {len(reserved.ids)} ids, "
            f"{len(reserved.offsets)} offsets"
        )
    return statuses, granted, reserved


def _reserve(
    options: WriteOptions,
    blocks: Sequence[WriteBlock] | Sequence[DeviceWriteBlock],
    deadline: float,
    checksums: list[int],
) -> Reserve:
    """The request for room; with checksums the blocks' bytes come with it, and are sealed."""
    digest_size = len(blocks[0].digest)
    session_hint = options.session_hint or SessionHint("")
    return Reserve(
        namespace=options.namespace.name,
        parts=options.namespace.parts,
        digest_size=digest_size,
        digests=b"".join([block.digest for block in blocks]),
        part=options.part,
        sizes=[block.size for block in blocks],
        parents=pack_parents([block.parent for block in blocks], digest_size),
        wait_s=max(0.0, deadline - asyncio.get_running_loop().time()),
        session=session_hint.session,
        resume_s=session_hint.resume_in,
        copies=options.copies if options.copies > 1 else 0,
        checksums=checksums,
        visible=options.visible and bool(checksums),
    )


async def seal(
    stream: Stream, options: WriteOptions, ids: list[int], checksums: list[int], deadline: float
) -> list[WriteStatus]:
    """Make the written blocks readable, and visible to other clients if the options ask for it.

    One status for each of `ids`. Raises BadMessage for an answer that does not fit.
    """
    wait_s = max(0.0, deadline - asyncio.get_running_loop().time())
    await stream.send(Seal(ids, checksums, options.visible, wait_s), deadline=deadline)
    sealed = await stream.expect(StatusReply, deadline=deadline)
    return _stored(options, sealed, len(ids), _NOT_OF_SEAL)


def _stored(
    options: WriteOptions, reply: StatusReply, count: int, excluded: Collection[WriteStatus]
) -> list[WriteStatus]:
    statuses = write_statuses(reply.statuses, count, excluded)
    if options.on_alone is not None and WriteStatus.STORED in statuses:
        options.on_alone(reply.alone)
    return statuses


def read_request(
    options: ReadOptions,
    blocks: Sequence[ReadBlock] | Sequence[DeviceReadBlock],
    *,
    view: bool,
    to_device: bool = False,
) -> Read:
    """The request for these blocks; the server refuses those larger than their memory."""
    return Read(
        namespace=options.namespace.name,
        parts=options.namespace.parts,
        digest_size=len(blocks[0].digest),
        digests=b"".join([block.digest for block in blocks]),
        part=options.part,
        buffer_sizes=[block.size for block in blocks],
        view=view,
        to_device=to_device,
    )


class Answered(NamedTuple):
    """The answer to a read: a status for each block, the positions of the hits, the message."""

    statuses: list[ReadStatus]
    hits: list[int]
    data: Data

    def results(self, got: Sequence[int]) -> list[ReadResult]:
        """One for each block, when the bytes of the hits have come, with these checksums."""
        arrived = verified(self.data.sizes, self.data.checksums, got)
        if len(arrived) == len(self.statuses):
            return arrived
        results = [ReadResult(status) for status in self.statuses]
        for position, result in zip(self.hits, arrived, strict=True):
            results[position] = result
        return results


def answered(data: Data, blocks: Sequence[ReadBlock] | Sequence[DeviceReadBlock]) -> Answered:
    """`Data` as the answer to a read of these blocks. Raises BadMessage for one that does not fit:
    every size is checked against the caller's memory before one byte goes there."""
    statuses = read_statuses(data.statuses, len(blocks))
    hits = [i for i, status in enumerate(statuses) if status is ReadStatus.HIT]
    if not len(hits) == len(data.sizes) == len(data.checksums):
        raise BadMessage(f"{len(hits)} hits, {len(data.sizes)} sizes")
    if any(not 0 < size <= blocks[i].size for i, size in zip(hits, data.sizes, strict=True)):
        raise BadMessage("a block larger than the memory for it")
    return Answered(statuses, hits, data)


class ReadAnswer:
    """The answer to one read, with the blocks as its payload."""

    def __init__(self, options: ReadOptions, blocks: Sequence[ReadBlock]) -> None:
        self._options = options
        self._blocks = blocks
        self._answered = Answered([], [], Data(b"", [], []))
        self._checksums: list[int] = []  # of the blocks that have arrived, if they are verified

    def payload_target(self, frame: Frame) -> PayloadReceiver:
        """The receiver of the payload. Raises BadMessage for an answer that does not fit."""
        options, blocks = self._options, self._blocks
        data = decode_answer(Data, frame.type, frame.body)
        self._answered = answered(data, blocks)
        hits = self._answered.hits
        memory = [
            blocks[i].pieces if blocks[i].size == size else first_bytes(blocks[i].pieces, size)
            for i, size in zip(hits, data.sizes, strict=True)
        ]
        seeds = None
        if options.verify:
            digests = [blocks[i].digest for i in hits]
            seeds = block_seeds(options.namespace, options.part, digests)
        receiver = PayloadReceiver(memory, seeds, options.idle_timeout)
        self._checksums = receiver.checksums
        return receiver

    def results(self) -> list[ReadResult]:
        """One result for each block, after the whole payload was received."""
        sent = self._answered.data.checksums
        return self._answered.results(self._checksums if self._options.verify else sent)


def verified(sizes: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> list[ReadResult]:
    """One result per block: HIT where the checksums are equal, else CORRUPT."""
    # One result for all blocks of a size: most batches have one size.
    hits = {size: ReadResult(ReadStatus.HIT, size) for size in set(sizes)}
    results = [hits[size] for size in sizes]
    if expected != got:
        for position, (one, other) in enumerate(zip(expected, got, strict=True)):
            if one != other:
                results[position] = ReadResult(ReadStatus.CORRUPT)
    return results


def read_statuses(packed: bytes, count: int) -> list[ReadStatus]:
    """One status for each of `count` blocks. Raises BadMessage."""
    check_count(packed, count)
    try:
        return [_READ[value] for value in packed]
    except IndexError:
        raise BadMessage(f"{max(packed)} is not a valid ReadStatus") from None


def write_statuses(
    packed: bytes, count: int, excluded: Collection[WriteStatus] = ()
) -> list[WriteStatus]:
    """One status for each of `count` blocks, none of the excluded ones. Raises BadMessage."""
    check_count(packed, count)
    try:
        statuses = [_WRITE[value] for value in packed]
    except IndexError:
        raise BadMessage(f"{max(packed)} is not a valid WriteStatus") from None
    if wrong := set(excluded).intersection(_WRITE[value] for value in set(packed)):
        raise BadMessage(f"{min(wrong).label} is no answer to this request")
    return statuses


def check_count(packed: bytes, count: int) -> None:
    if len(packed) != count or count > BATCH_BLOCKS_MAX:
        raise BadMessage(f"{len(packed)} statuses for {count} blocks")


async def verify_views(
    copies: CopyPool,
    options: ReadOptions,
    digests: Sequence[bytes],
    views: list[View],
    checksums: Sequence[int],
    deadline: float,
) -> list[View]:
    """Hash pinned memory in place; a view with a wrong checksum becomes a CORRUPT miss."""
    hits = [i for i, view in enumerate(views) if view.data is not None]
    jobs = [
        CopyJob((data,), (), seed)
        for i, seed in zip(
            hits,
            block_seeds(options.namespace, options.part, [digests[i] for i in hits]),
            strict=True,
        )
        if (data := views[i].data) is not None
    ]
    try:
        got = await copies.run(jobs, deadline=deadline)
    finally:
        jobs.clear()  # an exception may keep this frame, and must not keep the memory
    for position, checksum in zip(hits, got, strict=True):
        if checksum != checksums[position]:
            views[position] = View(ReadStatus.CORRUPT)
    return views


class StreamChannel:
    """A `Channel` over a pool of streams, one exchange at a time on each.

    `address` is for logs. Its methods keep the contract of `kvpool.protocols.Channel`.
    """

    def __init__(self, address: str, streams: StreamPool) -> None:
        self._address = address
        self._streams = streams

    @property
    def one_request_max(self) -> int:
        """A write of at most so many bytes is one request."""
        return ONE_REQUEST_MAX

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address} {self._streams!r}>"

    async def write(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], *, deadline: float
    ) -> list[WriteStatus]:
        """In one request where they have at most `one_request_max` bytes together, else in steps,
        and so those that the server cannot take at once."""
        if sum([block.size for block in blocks]) > self.one_request_max:
            return await self._write_in_steps(options, blocks, deadline)
        async with self._streams.stream(deadline) as stream:
            statuses = await write_at_once(stream, options, blocks, deadline)
        if WriteStatus.NOT_YET in statuses:
            later = [i for i, status in enumerate(statuses) if status is WriteStatus.NOT_YET]
            rest = [blocks[i] for i in later]
            answer = await self._write_in_steps(options, rest, deadline)
            for position, status in zip(later, answer, strict=True):
                statuses[position] = status
        return statuses

    async def _write_in_steps(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[WriteStatus]:
        """`Reserve`, then the bytes of the granted blocks, then `Seal`."""
        async with self._streams.stream(deadline) as stream:
            statuses, granted, reserved = await reserve(stream, options, blocks, deadline)
            if not granted:
                return statuses
            chosen = [blocks[i] for i in granted]
            digests = [block.digest for block in chosen]
            seeds = block_seeds(options.namespace, options.part, digests)
            checksums = await self._send_blocks(stream, reserved, chosen, seeds, deadline)
            sealed = await seal(stream, options, reserved.ids, checksums, deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses

    async def _send_blocks(
        self,
        stream: Stream,
        reserved: Reserved,
        blocks: Sequence[WriteBlock],
        seeds: Sequence[int],
        deadline: float,
    ) -> list[int]:
        """All of them in one frame; their checksums."""
        payload = [block.pieces for block in blocks]
        return await stream.send(None, payload, seeds=seeds, deadline=deadline)

    async def read(
        self, options: ReadOptions, blocks: Sequence[ReadBlock], *, deadline: float
    ) -> list[ReadResult]:
        """`Read`, then one `Data` frame whose payload fills the blocks' memory."""
        message, answer = read_request(options, blocks, view=False), ReadAnswer(options, blocks)
        async with self._streams.stream(deadline, options.idle_timeout) as stream:
            await stream.send(message, deadline=deadline)
            await stream.receive(answer.payload_target, deadline=deadline)
        return answer.results()

    async def request(self, message: Message, answer: type[M], *, deadline: float) -> M:
        """What moves no block: one message, one answer, on a stream of its own meanwhile."""
        async with self._streams.stream(deadline) as stream:
            await stream.send(message, deadline=deadline)
            return await stream.expect(answer, deadline=deadline)

    async def close(self) -> None:
        """As `abort`: the channel has no copies of its own to wait for."""
        self._streams.abort()

    def abort(self) -> None:
        """Close every stream at once; running and later calls end with Unavailable. Idempotent."""
        self._streams.abort()
