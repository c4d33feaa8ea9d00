"""What servers are asked about blocks that are to go: one message, one answer, over a channel."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.errors import BadMessage
from kvpool.protocols import Channel
from kvpool.types import Namespace
from kvpool.wire.messages import Remove, StatusReply, keys_of


async def remove(
    channel: Channel,
    namespace: Namespace,
    digests: Sequence[bytes],
    *,
    part: int | None = None,
    checksums: Sequence[int] = (),
    corrupt: bool = False,
    deadline: float,
) -> list[bool]:
    """Remove blocks, every part or only `part`; True where the server had one.

    With `checksums`, one per block, and `part`: only blocks whose bytes have that checksum, so that
    a writer removes the version that it means (design: versions).
    """
    message = Remove(*keys_of(namespace, digests), part, list(checksums), corrupt)
    statuses = (await channel.request(message, StatusReply, deadline=deadline)).statuses
    if len(statuses) != len(digests):
        raise BadMessage(f"{len(statuses)} statuses for {len(digests)} blocks")
    return [flag == 1 for flag in statuses]


async def report_corruption(
    channel: Channel, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
) -> list[bool]:
    """Report wrong checksums; True where the server verified it and removed the block."""
    return await remove(channel, namespace, digests, part=part, corrupt=True, deadline=deadline)
