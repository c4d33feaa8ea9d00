"""The client's half of shared memory: it copies by itself, in memory that the server has shown it.

How that memory came to be mapped is somebody else's business (shm.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from kvpool.checksum import block_seeds
from kvpool.errors import BadMessage, LinkBroken
from kvpool.protocols import ReadOptions, View, WriteOptions
from kvpool.types import (
    BLOCK_SIZE_MAX,
    Namespace,
    ReadBlock,
    ReadResult,
    ReadStatus,
    WriteBlock,
    WriteStatus,
)
from kvpool.wire.messages import Pinned, Unpin
from kvpool_transports.copy_pool import CopyJob, CopyPool
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool
from kvpool_transports.streams.stream import Stream


class Memory(Protocol):
    """A server's segment, as this process sees it."""

    def view(self, offset: int, size: int) -> memoryview:
        """Raises BadMessage for memory that the segment has not got."""


class Segment(Protocol):
    """A server's memory, mapped by the first connection to it. Raises LinkBroken once closed."""

    def readable(self) -> Memory: ...

    def writable(self) -> Memory: ...

    def close(self) -> None: ...


class MappedChannel:
    """A channel whose streams carry words only; the bytes are copied in place."""

    def __init__(
        self, address: str, streams: StreamPool, segment: Segment, copies: CopyPool
    ) -> None:
        self._address = address
        self._streams = streams
        self._segment = segment
        self._copies = copies

    def __repr__(self) -> str:
        return f"<MappedChannel {self._address} {self._streams!r}>"

    async def write(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], *, deadline: float
    ) -> list[WriteStatus]:
        async with self._streams.stream(deadline) as stream:
            statuses, granted, reserved = await requests.reserve(stream, options, blocks, deadline)
            if not granted:
                return statuses
            memory = self._segment.writable()
            seeds = block_seeds(
                options.namespace, options.part, [blocks[i].digest for i in granted]
            )
            targets = [
                memory.view(offset, blocks[i].size)
                for i, offset in zip(granted, reserved.offsets, strict=True)
            ]
            jobs = [
                CopyJob(blocks[i].pieces, (target,), seed, hash_source=True)
                for i, target, seed in zip(granted, targets, seeds, strict=True)
            ]
            # If this is cancelled, the copies have stopped before the stream is aborted: the
            # server may then reuse the extents at once.
            with _borrowed(targets, jobs):
                checksums = await self._copies.run(jobs, deadline=deadline)
            sealed = await requests.seal(stream, options, reserved.ids, checksums, deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses

    async def read(
        self, options: ReadOptions, blocks: Sequence[ReadBlock], *, deadline: float
    ) -> list[ReadResult]:
        async with self._streams.stream(deadline) as stream:
            statuses, pinned, hits, sources = await self._pin(stream, options, blocks, deadline)
            if hits:
                seeds: list[int | None] = [None] * len(hits)
                if options.verify:
                    seeds[:] = block_seeds(
                        options.namespace, options.part, [blocks[i].digest for i in hits]
                    )
                jobs = [
                    CopyJob((source,), blocks[i].pieces, seed)
                    for i, source, seed in zip(hits, sources, seeds, strict=True)
                ]
                with _borrowed(sources, jobs):
                    got = await self._copies.run(jobs, deadline=deadline)
                if not stream.lost:
                    stream.send_deferred(Unpin())
                elif not options.verify:
                    raise LinkBroken("the pins were lost while their bytes were copied")
        if not hits:
            return [ReadResult(status) for status in statuses]
        expected = pinned.checksums if options.verify else [0] * len(hits)
        arrived = requests.verified(pinned.sizes, expected, got)
        if len(hits) == len(blocks):
            return arrived
        results = [ReadResult(status) for status in statuses]
        for position, result in zip(hits, arrived, strict=True):
            results[position] = result
        return results

    @asynccontextmanager
    async def read_view(
        self, options: ReadOptions, digests: Sequence[bytes], *, deadline: float
    ) -> AsyncIterator[list[View]]:
        blocks = [ReadBlock(digest, (), BLOCK_SIZE_MAX) for digest in digests]
        async with self._streams.stream(deadline) as stream:
            statuses, pinned, hits, sources = await self._pin(stream, options, blocks, deadline)
            views = [View(status) for status in statuses]
            checksums = [0] * len(digests)
            for index, position in enumerate(hits):
                views[position] = View(ReadStatus.HIT, sources[index])
                checksums[position] = pinned.checksums[index]
            with _borrowed(sources):
                if options.verify:
                    views = await requests.verify_views(
                        self._copies, options, digests, views, checksums, deadline
                    )
                yield views
            if hits and not stream.lost:
                stream.send_deferred(Unpin())

    async def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        return await requests.remove(self._streams, namespace, digests, deadline)

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        return await requests.report_corruption(self._streams, namespace, part, digests, deadline)

    async def close(self) -> None:
        self.abort()
        self._copies.close()
        self._segment.close()

    def abort(self) -> None:
        # In this order: to the server, the end of a stream means that nobody writes any more.
        self._copies.stop()
        self._streams.abort()

    async def _pin(
        self,
        stream: Stream,
        options: ReadOptions,
        blocks: Sequence[ReadBlock],
        deadline: float,
    ) -> tuple[list[ReadStatus], Pinned, list[int], list[memoryview]]:
        await stream.send(requests.read_request(options, blocks), deadline=deadline)
        pinned = await stream.expect(Pinned, deadline=deadline)
        if options.idle_timeout is not None:
            options.idle_timeout.disarm()
        statuses = requests.read_statuses(pinned.statuses, len(blocks))
        hits = [i for i, status in enumerate(statuses) if status is ReadStatus.HIT]
        if not len(hits) == len(pinned.offsets) == len(pinned.sizes) == len(pinned.checksums):
            raise BadMessage(f"{len(hits)} hits, {len(pinned.offsets)} offsets")
        if any(not 0 < size <= blocks[i].size for i, size in zip(hits, pinned.sizes, strict=True)):
            raise BadMessage("a block larger than the buffer for it")
        memory = self._segment.readable()
        sources = [
            memory.view(offset, size)
            for offset, size in zip(pinned.offsets, pinned.sizes, strict=True)
        ]
        return statuses, pinned, hits, sources


@contextlib.contextmanager
def _borrowed(memory: list[memoryview], jobs: list[CopyJob] | None = None) -> Iterator[None]:
    """Let go of mapped memory at the end, also where a frame stays.

    An exception keeps the frames that it went through, often until the next full garbage
    collection; and as long as anything there leads to it, a segment stays mapped, even one whose
    server is dead.
    """
    try:
        yield
    finally:
        for view in memory:
            try:
                view.release()
            except BufferError:  # somebody still looks
                pass
        memory.clear()
        if jobs is not None:
            jobs.clear()
