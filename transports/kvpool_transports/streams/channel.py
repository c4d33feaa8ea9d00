"""The client's half of a transport whose frames carry the payload: tcp and similar ones.

Payload bytes are sent directly from the caller's pieces of memory, and received directly into them,
but for small ones (`wire.frames.SMALL`). They are hashed in steps while they are in the CPU's cache
(design: streams).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvpool.checksum import block_seeds
from kvpool.protocols import ReadOptions, WriteOptions
from kvpool.types import (
    ReadBlock,
    ReadResult,
    WriteBlock,
    WriteStatus,
)
from kvpool.wire.messages import M, Message
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool


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
        answer = requests.ReadAnswer(options, blocks)
        async with self._streams.stream(deadline, options.idle_timeout) as stream:
            await stream.send(requests.read_request(options, blocks, view=False), deadline=deadline)
            await stream.receive(answer.payload_target, deadline=deadline)
        return answer.results()

    async def request(self, message: Message, answer: type[M], *, deadline: float) -> M:
        return await requests.request(self._streams, message, answer, deadline)

    async def close(self) -> None:
        """As `abort`: the channel has no copies of its own to wait for."""
        self._streams.abort()

    def abort(self) -> None:
        """Close every stream at once; running and later calls end with Unavailable. Idempotent."""
        self._streams.abort()
