"""One version of each block: what a writer does where another writer stored other bytes.

A server keeps the bytes that were sealed first. Only two servers can have different bytes under one
key, so the rule is kept by who can see both: the writer of the second copy (design: versions).
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kvpool import logs
from kvpool.checksum import hasher
from kvpool.client.buffers import Buffers
from kvpool.client.lookup import Lookup
from kvpool.client.reader import Reader
from kvpool.client.servers import Servers, gather_errors
from kvpool.errors import KvpoolError, Unavailable
from kvpool.protocols import Channel, WriteOptions
from kvpool.types import Namespace, ReadStatus, WriteBlock

log = logs.get("kvpool.client")

#: Memory of this client for stored bytes, at a time: so much, or one block.
_ROUND_BYTES: Final = 16 << 20
#: Hashed at once, so that no turn of the loop takes long.
_HASH_STEP: Final = 1 << 20
#: The server has no such block any more: there is nothing that could differ.
_LEFT: Final = frozenset(
    {
        ReadStatus.NEVER_WRITTEN,
        ReadStatus.EVICTED,
        ReadStatus.REMOVED,
        ReadStatus.CORRUPT,
        ReadStatus.TIER_LOST,
    }
)


class WrittenBlock(NamedTuple):
    """A block whose bytes one call has stored on `servers`; `others` answered that they had it."""

    block: WriteBlock
    servers: set[str]
    others: set[str]


class StoredVersion(NamedTuple):
    """A block as a server has it, or the reason why it could not be read from there."""

    status: ReadStatus
    block: WriteBlock | None = None

    @property
    def has_left(self) -> bool:
        return self.status in _LEFT


class Versions:
    """Reads what other writers stored, and removes all versions of a block but one."""

    def __init__(
        self, lookup: Lookup, reader: Reader, servers: Servers, counters: Counter[str]
    ) -> None:
        self._lookup = lookup
        self._reader = reader
        self._servers = servers
        self._counters = counters

    async def holders(
        self, options: WriteOptions, digests: Sequence[bytes], deadline: float
    ) -> list[list[str]]:
        """The servers that have each block, as a master knows it; none when no master answers."""
        try:
            return await self._lookup.holders(options.namespace, options.part, digests, deadline)
        except Unavailable:
            return [[] for _ in digests]

    async def stored(
        self, server: str, options: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[StoredVersion]:
        """These blocks as `server` has them, verified. Blocks larger than ours are not read.

        The caller bounds the bytes: it passes the blocks of one of `rounds`.
        """
        memory = [memoryview(bytearray(block.size)) for block in blocks]
        digests = [block.digest for block in blocks]
        sizes = [block.size for block in blocks]
        results = await self._reader.read_from(
            server,
            options.namespace,
            options.part,
            digests,
            Buffers([(view,) for view in memory], {}, sizes),
            deadline,
        )
        return [
            StoredVersion(
                result.status,
                block._replace(pieces=(view[: result.size],), size=result.size)
                if result.status is ReadStatus.HIT
                else None,
            )
            for block, view, result in zip(blocks, memory, results, strict=True)
        ]

    async def settle(
        self, options: WriteOptions, written: Mapping[int, WrittenBlock], deadline: float
    ) -> set[int]:
        """Keep one version of blocks that other servers have, too; those where it is not ours.

        To be called when masters know of the blocks. The version on the first of the servers, in
        the order of their names, stays, so that all writers who see both decide alike; the other
        is removed (design: versions). A server that cannot be read decides nothing.
        """
        suspects = await self._suspects(options, written, deadline)
        if not suspects:
            return set()
        lost: set[int] = set()
        beaten: dict[str, list[int]] = {}
        for server, positions in suspects.items():
            for group in rounds(positions, [written[i].block.size for i in positions]):
                blocks = [written[i].block for i in group]
                found = await self.stored(server, options, blocks, deadline)
                for position, stored in zip(group, found, strict=True):
                    block, servers, _ = written[position]
                    if not await differs(block, stored):
                        continue
                    if server < min(servers):
                        lost.add(position)
                    else:
                        beaten.setdefault(server, []).append(position)
        for position in lost:
            for server in written[position].servers:
                beaten.setdefault(server, []).append(position)
        for server, positions in beaten.items():
            # Of a version that has lost itself only its own copies go: it may not judge others.
            drop = [i for i in positions if i not in lost or server in written[i].servers]
            if drop:
                await self._remove(
                    server, options, [written[i].block.digest for i in drop], deadline
                )
                for position in drop:
                    written[position].others.discard(server)
        return lost

    # --- inside --------------------------------------------------------------------------

    async def _suspects(
        self, options: WriteOptions, written: Mapping[int, WrittenBlock], deadline: float
    ) -> dict[str, list[int]]:
        """Other servers that have some of the blocks, and which; usually none."""
        if options.visible:
            digests = [one.block.digest for one in written.values()]
            holders = await self.holders(options, digests, deadline)
            for one, servers in zip(written.values(), holders, strict=True):
                one.others.update(server for server in servers if server not in one.servers)
        suspects: dict[str, list[int]] = {}
        for position, one in written.items():
            for server in sorted(one.others):
                suspects.setdefault(server, []).append(position)
        return suspects

    async def _remove(
        self, server: str, options: WriteOptions, digests: Sequence[bytes], deadline: float
    ) -> None:
        log.warning(
            "two versions", server=server, namespace=options.namespace.name, removed=len(digests)
        )
        self._counters["versions_removed"] += len(digests)
        remove = functools.partial(_remove_part, options.namespace, options.part, digests, deadline)
        (answer,) = await gather_errors([self._servers.call(server, remove, deadline)])
        if isinstance(answer, KvpoolError):
            log.error("a second version stays", server=server, why=str(answer))


def rounds(positions: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive positions whose blocks together have at most `_ROUND_BYTES`, or one block."""
    groups: list[list[int]] = []
    held = 0
    for position, size in zip(positions, sizes, strict=True):
        if not groups or held + size > _ROUND_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(position)
        held += size
    return groups


async def differs(ours: WriteBlock, theirs: StoredVersion) -> bool:
    """Whether a server has other bytes than ours. What could not be read counts as equal."""
    if theirs.block is None:
        return theirs.status is ReadStatus.BUFFER_TOO_SMALL
    if theirs.block.size != ours.size:
        return True
    return await _hash(ours.pieces) != await _hash(theirs.block.pieces)


async def _hash(pieces: Iterable[memoryview]) -> int:
    digest = hasher(0)
    for piece in pieces:
        for start in range(0, len(piece), _HASH_STEP):
            digest.update(piece[start : start + _HASH_STEP])
            await asyncio.sleep(0)
    return digest.intdigest()


async def _remove_part(
    namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    return await channel.remove(namespace, digests, part=part, deadline=deadline)
