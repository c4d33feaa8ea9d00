"""The client's half of a transport whose frames carry the bytes: tcp, and whatever is like it.

A frame's header comes apart from its payload; the payload is received into its destination
(`BufferedProtocol`, no copy in Python) and hashed piece by piece while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.errors import BadMessage
from kvpool.protocols import ReadOptions, WriteOptions
from kvpool.types import (
    Namespace,
    Outgoing,
    ReadResult,
    ReadStatus,
    Wanted,
    WriteStatus,
)
from kvpool.wire.frames import Frame
from kvpool.wire.messages import Data, decode_answer
from kvpool_transports.streams import requests as exchanges
from kvpool_transports.streams.stream import Landing, StreamPool


class CarriedChannel:
    """A channel over a pool of streams, one exchange at a time on each."""

    def __init__(self, address: str, streams: StreamPool) -> None:
        self._address = address
        self._streams = streams

    def __repr__(self) -> str:
        return f"<CarriedChannel {self._address} {self._streams!r}>"

    async def write(
        self, writing: WriteOptions, blocks: Sequence[Outgoing], *, deadline: float
    ) -> list[WriteStatus]:
        async with self._streams.stream(deadline) as stream:
            sizes = [len(block.buffer) for block in blocks]
            statuses, granted, reserved = await exchanges.reserve(
                stream, writing, blocks, sizes, deadline
            )
            if not granted:
                return statuses
            seeds = exchanges.seeds(
                writing.namespace, writing.part, [blocks[i].digest for i in granted]
            )
            payload = [blocks[i].buffer for i in granted]
            checksums = await stream.send(None, payload, seeds=seeds, deadline=deadline)
            sealed = await exchanges.seal(stream, writing, reserved.ids, checksums, deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses

    async def read(
        self, reading: ReadOptions, blocks: Sequence[Wanted], *, deadline: float
    ) -> list[ReadResult]:
        data: Data | None = None
        landing: Landing | None = None
        hits: list[int] = []
        buffer_sizes = [len(block.buffer) for block in blocks]

        def sink(frame: Frame) -> Landing:
            """Where the bytes go, as soon as the answer says which blocks they are of."""
            nonlocal data, landing
            data = decode_answer(Data, frame.type, frame.body)
            statuses = exchanges.read_statuses(data.statuses, len(blocks))
            hits.extend(i for i, status in enumerate(statuses) if status is ReadStatus.HIT)
            if not len(hits) == len(data.sizes) == len(data.checksums):
                raise BadMessage(f"{len(hits)} hits, {len(data.sizes)} sizes")
            if any(
                not 0 < size <= buffer_sizes[i] for i, size in zip(hits, data.sizes, strict=True)
            ):
                raise BadMessage("a block larger than the buffer for it")
            buffers = [blocks[i].buffer[:size] for i, size in zip(hits, data.sizes, strict=True)]
            seeds = None
            if reading.verify:
                digests = [blocks[i].digest for i in hits]
                seeds = exchanges.seeds(reading.namespace, reading.part, digests)
            landing = Landing(buffers, seeds, reading.idle_timeout)
            return landing

        async with self._streams.stream(deadline) as stream:
            await stream.send(
                exchanges.read_request(reading, blocks, buffer_sizes), deadline=deadline
            )
            await stream.receive(sink, deadline=deadline)
        assert data is not None
        assert landing is not None
        results = [ReadResult(s) for s in exchanges.read_statuses(data.statuses, len(blocks))]
        got = landing.checksums if reading.verify else data.checksums
        arrived = exchanges.verified(data.sizes, data.checksums, got)
        for position, result in zip(hits, arrived, strict=True):
            results[position] = result
        return results

    async def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        return await exchanges.remove(self._streams, namespace, digests, deadline)

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        return await exchanges.report_corruption(self._streams, namespace, part, digests, deadline)

    async def close(self) -> None:
        self._streams.abort()

    def abort(self) -> None:
        self._streams.abort()
