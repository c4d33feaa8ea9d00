"""The client's half of shared memory: the client copies from and to the server's mapped segment.

`shm.py` maps the segment (design: shared-memory).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from kvpool.checksum import block_seeds
from kvpool.errors import BadMessage
from kvpool.protocols import ReadOptions, View, WriteOptions
from kvpool.types import (
    BLOCK_SIZE_MAX,
    ReadBlock,
    ReadResult,
    ReadStatus,
    WriteBlock,
    WriteStatus,
    row_of,
)
from kvpool.wire.messages import Data, Reserved, StatusReply, Unpin
from kvpool_transports.copy_pool import CopyJob, CopyPool
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool
from kvpool_transports.streams.requests import StreamChannel
from kvpool_transports.streams.stream import Stream

_JOB: Final = row_of(CopyJob)


class Segment(Protocol):
    """A server's memory, mapped by the first connection to it. Raises LinkBroken once closed."""

    def readable(self) -> memoryview:
        """All of it, for reads and views."""

    async def writable(self, deadline: float) -> memoryview:
        """The same to write to, since the first write: a client that only reads cannot write.

        Raises Unavailable, PeerError.
        """

    def close(self) -> None:
        """Unmap it. Idempotent. Views that are still in use keep their mapping."""


class MappedChannel(StreamChannel):
    """A `Channel` whose streams carry only messages; the client copies the payload itself.

    It keeps the contracts of `kvpool.protocols.Channel` and `SupportsZeroCopyView`.
    """

    def __init__(
        self, address: str, streams: StreamPool, segment: Segment, copies: CopyPool
    ) -> None:
        super().__init__(address, streams)
        self._segment = segment
        self._copies = copies

    @property
    def one_request_max(self) -> int:
        """More bytes are copied faster than they are sent."""
        return requests.ONE_REQUEST_MAPPED_MAX

    async def _write_in_steps(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[WriteStatus]:
        # First: it may take time, in which this call holds no stream and no reservation.
        await self._segment.writable(deadline)
        return await super()._write_in_steps(options, blocks, deadline)

    async def _send_blocks(
        self,
        stream: Stream,
        reserved: Reserved,
        blocks: Sequence[WriteBlock],
        seeds: Sequence[int],
        deadline: float,
    ) -> list[int]:
        """Copy and hash them into their extents. A server that does not lend its memory now gets
        the bytes over the stream (design: budgets)."""
        if not reserved.offsets:
            return await super()._send_blocks(stream, reserved, blocks, seeds, deadline)
        memory = await self._segment.writable(deadline)
        targets = _extents(memory, reserved.offsets, [block.size for block in blocks])
        pieces = [block.pieces for block in blocks]
        columns = pieces, zip(targets), seeds, [True] * len(blocks)
        jobs = list(map(_JOB, zip(*columns, strict=True)))
        # If this is cancelled, the copies have stopped before the stream is aborted: the server may
        # then reuse the extents at once.
        with _borrowed(targets, jobs):
            return await self._copies.run(jobs, deadline=deadline)

    async def read(
        self, options: ReadOptions, blocks: Sequence[ReadBlock], *, deadline: float
    ) -> list[ReadResult]:
        """`Read`, which pins the blocks, copy and hash them, then a deferred `Unpin`."""
        async with self._streams.stream(deadline, options.idle_timeout) as stream:
            answer, sources = await self._pin(stream, options, blocks, deadline)
            hits, sent = answer.hits, answer.data.checksums
            got = sent
            if hits:
                seeds: list[int | None] = [None] * len(hits)
                if options.verify:
                    seeds[:] = block_seeds(
                        options.namespace, options.part, [blocks[i].digest for i in hits]
                    )
                pieces = [blocks[i].pieces for i in hits]
                columns = zip(sources), pieces, seeds, [False] * len(hits)
                jobs = list(map(_JOB, zip(*columns, strict=True)))
                with _borrowed(sources, jobs):
                    got = await self._copies.run(jobs, deadline=deadline)
                if options.verify and got == sent:
                    if not stream.lost:
                        stream.send_deferred(Unpin())
                else:
                    # Not verified, or not right: were the blocks pinned until now? A server takes
                    # the pins of a client back that was frozen for long (design: budgets).
                    await stream.send(Unpin(confirm=True), deadline=deadline)
                    await stream.expect(StatusReply, deadline=deadline)
        return answer.results(got if options.verify else sent)

    @asynccontextmanager
    async def read_view(
        self, options: ReadOptions, digests: Sequence[bytes], *, deadline: float
    ) -> AsyncIterator[list[View]]:
        """Views of the mapped segment, pinned until the `with` ends (design: pins)."""
        blocks = [ReadBlock(digest, (), BLOCK_SIZE_MAX) for digest in digests]
        async with self._streams.stream(deadline, options.idle_timeout) as stream:
            answer, sources = await self._pin(stream, options, blocks, deadline, view=True)
            hits = answer.hits
            views = [View(status) for status in answer.statuses]
            checksums = [0] * len(digests)
            for index, position in enumerate(hits):
                views[position] = View(ReadStatus.HIT, sources[index])
                checksums[position] = answer.data.checksums[index]
            with _borrowed(sources):
                if options.verify:
                    views = await requests.verify_views(
                        self._copies, options, digests, views, checksums, deadline
                    )
                self._streams.outlive(stream)
                yield views
            if hits and not stream.lost:
                stream.send_deferred(Unpin())

    async def close(self) -> None:
        """`abort`, then end the copy threads and unmap the segment. Idempotent."""
        self.abort()
        self._copies.close()
        self._segment.close()

    def abort(self) -> None:
        """End running and later calls with Unavailable. Idempotent."""
        # Stop the copies first: when a stream ends, the server reuses the reserved extents, because
        # it takes the end as the promise that this client writes no more (design: quarantine).
        self._copies.stop()
        super().abort()

    async def _pin(
        self,
        stream: Stream,
        options: ReadOptions,
        blocks: Sequence[ReadBlock],
        deadline: float,
        *,
        view: bool = False,
    ) -> tuple[requests.Answered, list[memoryview]]:
        await stream.send(requests.read_request(options, blocks, view=view), deadline=deadline)
        pinned = await stream.expect(Data, deadline=deadline)
        if options.idle_timeout is not None:
            options.idle_timeout.disarm()
        answer = requests.answered(pinned, blocks)
        if len(pinned.offsets) != len(answer.hits):
            raise BadMessage(f"{len(answer.hits)} hits, {len(pinned.offsets)} offsets")
        return answer, _extents(self._segment.readable(), pinned.offsets, pinned.sizes)


def _extents(memory: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """Raises BadMessage where the server names memory outside of its segment."""
    places = list(zip(offsets, sizes, strict=True))
    for offset, size in places:
        if offset + size > len(memory):
            raise BadMessage(f"extent {offset}+{size} in a segment of {len(memory)} bytes")
    return [memory[offset : offset + size] for offset, size in places]


@contextlib.contextmanager
def _borrowed(memory: list[memoryview], jobs: list[CopyJob] | None = None) -> Iterator[None]:
    """Release views of mapped memory at the end, also after an exception.

    An exception keeps the frames that it passed, often until the next full garbage collection, and
    as long as one refers to a view the segment stays mapped (design: turns).
    """
    try:
        yield
    finally:
        for view in memory:
            try:
                view.release()
            except BufferError:  # the caller of `read_view` still uses it
                pass
        memory.clear()
        if jobs is not None:
            jobs.clear()
