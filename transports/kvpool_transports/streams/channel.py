"""The client's half of a transport whose frames carry the payload: tcp and similar ones.

Payload bytes are sent directly from the caller's pieces of memory, and received directly into them,
but for small ones (`wire.frames.SMALL`). They are hashed in steps while they are in the CPU's cache
(design: streams).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvpool.checksum import block_seeds
from kvpool.errors import BadMessage
from kvpool.protocols import DeviceReadBlock, ReadOptions, WriteOptions
from kvpool.types import (
    ReadBlock,
    ReadResult,
    ReadStatus,
    WriteBlock,
    WriteStatus,
)
from kvpool.wire.frames import Frame, PayloadReceiver
from kvpool.wire.messages import Data, decode_answer
from kvpool_transports.streams import requests
from kvpool_transports.streams.payload import first_bytes
from kvpool_transports.streams.pool import StreamPool
from kvpool_transports.streams.side_requests import SideRequests


class StreamChannel(SideRequests):
    """A `Channel` over a pool of streams, one exchange at a time on each.

    `address` is for logs. Its methods keep the contract of `kvpool.protocols.Channel`.
    """

    def __init__(self, address: str, streams: StreamPool) -> None:
        self._address = address
        self._streams = streams

    @property
    def one_request_max(self) -> int:
        """A write of at most so many bytes is one request."""
        return requests.ONE_REQUEST_MAX

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address} {self._streams!r}>"

    async def write(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], *, deadline: float
    ) -> list[WriteStatus]:
        """A small one in one request, `Write`; else in steps."""
        in_steps = partial(self._write_in_steps, options, deadline)
        return await requests.write(
            self._streams, options, blocks, deadline, in_steps, self.one_request_max
        )

    async def _write_in_steps(
        self, options: WriteOptions, deadline: float, blocks: Sequence[WriteBlock]
    ) -> list[WriteStatus]:
        """`Reserve`, then the payload of the granted blocks in one frame, then `Seal`."""
        async with self._streams.stream(deadline) as stream:
            statuses, granted, reserved = await requests.reserve(stream, options, blocks, deadline)
            if not granted:
                return statuses
            digests = [blocks[i].digest for i in granted]
            seeds = block_seeds(options.namespace, options.part, digests)
            payload = [blocks[i].pieces for i in granted]
            checksums = await stream.send(None, payload, seeds=seeds, deadline=deadline)
            sealed = await requests.seal(stream, options, reserved.ids, checksums, deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses

    async def read(
        self, options: ReadOptions, blocks: Sequence[ReadBlock], *, deadline: float
    ) -> list[ReadResult]:
        """`Read`, then one `Data` frame whose payload fills the blocks' memory."""
        answer = _ReadAnswer(options, blocks)
        async with self._streams.stream(deadline, options.idle_timeout) as stream:
            await stream.send(requests.read_request(options, blocks, view=False), deadline=deadline)
            await stream.receive(answer.payload_target, deadline=deadline)
        return answer.results()

    async def close(self) -> None:
        """As `abort`: the channel has no copies of its own to wait for."""
        self._streams.abort()

    def abort(self) -> None:
        """Close every stream at once; running and later calls end with Unavailable. Idempotent."""
        self._streams.abort()


def read_answer(
    frame: Frame, blocks: Sequence[ReadBlock] | Sequence[DeviceReadBlock]
) -> tuple[list[ReadStatus], list[int], Data]:
    """The answer to a read of these blocks: a status for each, the positions of the hits, and the
    message. Raises BadMessage for one that does not fit, before one byte of it is received."""
    data = decode_answer(Data, frame.type, frame.body)
    statuses = requests.read_statuses(data.statuses, len(blocks))
    hits = [i for i, status in enumerate(statuses) if status is ReadStatus.HIT]
    if not len(hits) == len(data.sizes) == len(data.checksums):
        raise BadMessage(f"{len(hits)} hits, {len(data.sizes)} sizes")
    if any(not 0 < size <= blocks[i].size for i, size in zip(hits, data.sizes, strict=True)):
        raise BadMessage("a block larger than the memory for it")
    return statuses, hits, data


class _ReadAnswer:
    """The answer to one read: `Data`, which lists the blocks of its payload and their sizes."""

    def __init__(self, options: ReadOptions, blocks: Sequence[ReadBlock]) -> None:
        self._options = options
        self._blocks = blocks
        self._statuses: list[ReadStatus] = []
        self._hits: list[int] = []
        self._data = Data(b"", [], [])
        self._checksums: list[int] = []  # of the blocks that have arrived, if they are verified

    def payload_target(self, frame: Frame) -> PayloadReceiver:
        """The receiver of the payload. Raises BadMessage for an answer that does not fit this read.

        Every size was checked against the caller's memory before one byte is received.
        """
        options, blocks = self._options, self._blocks
        self._statuses, self._hits, self._data = read_answer(frame, blocks)
        hits, data = self._hits, self._data
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
        data = self._data
        got = self._checksums if self._options.verify else data.checksums
        arrived = requests.verified(data.sizes, data.checksums, got)
        if len(arrived) == len(self._blocks):
            return arrived
        results = [ReadResult(status) for status in self._statuses]
        for position, result in zip(self._hits, arrived, strict=True):
            results[position] = result
        return results
