"""What a channel asks a server beside reads and writes (client's half): one message, one answer."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.types import Namespace
from kvpool.wire.messages import M, Message, Remove, ReportCorruption, StatusReply, keys_of
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool


class SideRequests:
    """The part of a channel that is the same over all transports."""

    _streams: StreamPool

    async def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        *,
        part: int | None = None,
        checksums: Sequence[int] = (),
        deadline: float,
    ) -> list[bool]:
        """Remove every part of the blocks, or one `part`; True where the server had one."""
        message = Remove(*keys_of(namespace, digests), part, list(checksums))
        answer = await self.request(message, StatusReply, deadline=deadline)
        return requests.flags(answer, len(digests))

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        """Report wrong checksums; True where the server verified it and removed the block."""
        message = ReportCorruption(*keys_of(namespace, digests), part)
        answer = await self.request(message, StatusReply, deadline=deadline)
        return requests.flags(answer, len(digests))

    async def request(self, message: Message, answer: type[M], *, deadline: float) -> M:
        """On a stream of its own meanwhile; what has no streams does it in another way."""
        async with self._streams.stream(deadline) as stream:
            await stream.send(message, deadline=deadline)
            return await stream.expect(answer, deadline=deadline)
