"""One version of each block: what a writer does where another writer stored other bytes.

A server keeps the bytes that were sealed first. Only two servers can have different bytes under one
key, so the rule is kept by who can see both: the writer of the second copy (design: versions).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from kvpool import logs, removals
from kvpool.checksum import block_seeds, checksum_in_steps
from kvpool.client.buffers import Buffers
from kvpool.client.lookup import Lookup
from kvpool.client.reader import Reader
from kvpool.client.servers import Servers, gather_errors
from kvpool.errors import KvpoolError, Unavailable
from kvpool.protocols import DeviceWriteBlock, WriteOptions
from kvpool.types import ReadStatus, WriteBlock

log = logs.get("kvpool.client")

#: Memory of this client for stored bytes, at a time: so much, or one block.
_ROUND_BYTES: Final = 16 << 20
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


#: A block of the caller, in memory of the host or on a device.
SourceBlock: TypeAlias = WriteBlock | DeviceWriteBlock

#: The version of a block that is longer than ours, so that it was not read; checksums count from 0.
_UNREAD: Final = -1


class WrittenBlock(NamedTuple):
    """A block whose bytes one call has stored on `servers`; `others` answered that they had it."""

    block: SourceBlock
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
        self, server: str, options: WriteOptions, blocks: Sequence[SourceBlock], deadline: float
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
                WriteBlock(block.digest, block.parent, (view[: result.size],), result.size)
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
        is removed (design: versions). A server that cannot be read decides nothing. `servers` and
        `others` of each block are then those that still have our version, or another copy.
        """
        suspects = await self._suspects(options, written, deadline)
        contested = await self._compare(options, written, suspects, deadline)
        if not contested:
            return set()
        # Another writer may have removed a copy of ours and stored its own in that place. Where our
        # version has lost all the same, this changes nothing.
        wins = {
            position: written[position].servers
            for position, theirs in contested.items()
            if min(written[position].servers) < min(theirs)
        }
        own = _by_server(wins)
        for position, found in (await self._compare(options, written, own, deadline)).items():
            contested[position].update(found)
        lost: set[int] = set()
        beaten: dict[str, list[tuple[bytes, int]]] = {}
        for position, theirs in contested.items():
            block, servers, others = written[position]
            others.update(theirs)
            if not servers or min(theirs) < min(servers):
                lost.add(position)
                # Of a version that has lost only its own copies go: it may not judge others.
                ours = await version_of(options, block)
                theirs = dict.fromkeys(servers, ours)
            for server, version in theirs.items():
                beaten.setdefault(server, []).append((block.digest, version))
                others.discard(server)
        for server, versions in sorted(beaten.items()):
            await self._remove(server, options, versions, deadline)
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
        return _by_server({position: one.others for position, one in written.items()})

    async def _compare(
        self,
        options: WriteOptions,
        written: Mapping[int, WrittenBlock],
        where: Mapping[str, Sequence[int]],
        deadline: float,
    ) -> dict[int, dict[str, int]]:
        """Read blocks from servers: where they differ from ours, and which version is there.

        A server that has another version, or none any more, leaves the `servers` of that block.
        """
        differ: dict[int, dict[str, int]] = {}
        for server, positions in where.items():
            for group in rounds(positions, [written[i].block.size for i in positions]):
                blocks = [written[i].block for i in group]
                found = await self.stored(server, options, blocks, deadline)
                for position, stored in zip(group, found, strict=True):
                    block, servers, _ = written[position]
                    version = await differing(options, block, stored)
                    if version is not None:
                        differ.setdefault(position, {})[server] = version
                    if version is not None or stored.has_left:
                        servers.discard(server)
        return differ

    async def _remove(
        self,
        server: str,
        options: WriteOptions,
        versions: Sequence[tuple[bytes, int]],
        deadline: float,
    ) -> None:
        """Remove these versions of blocks: by now the server may have another one in their place.

        Where the version is not known (`_UNREAD`), whatever is there is removed.
        """
        log.warning(
            "two versions", server=server, namespace=options.namespace.name, removed=len(versions)
        )
        self._counters["versions_removed"] += len(versions)
        known = [one for one in versions if one[1] != _UNREAD]
        unread = [digest for digest, version in versions if version == _UNREAD]
        remove = functools.partial(
            removals.remove, namespace=options.namespace, part=options.part, deadline=deadline
        )
        calls = []
        if known:
            digests, checksums = zip(*known, strict=True)
            remove_known = functools.partial(remove, digests=digests, checksums=checksums)
            calls.append(self._servers.call(server, remove_known, deadline))
        if unread:
            remove_unread = functools.partial(remove, digests=unread)
            calls.append(self._servers.call(server, remove_unread, deadline))
        for answer in await gather_errors(calls):
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


async def differing(options: WriteOptions, ours: SourceBlock, theirs: StoredVersion) -> int | None:
    """The version that a server has, if its bytes are others than ours; None if they are equal.

    What could not be read counts as equal; of a block that is longer than ours it is `_UNREAD`.
    """
    if theirs.block is None:
        return _UNREAD if theirs.status is ReadStatus.BUFFER_TOO_SMALL else None
    version = await version_of(options, theirs.block)
    if theirs.block.size == ours.size and version == await version_of(options, ours):
        return None
    return version


async def version_of(options: WriteOptions, block: SourceBlock) -> int:
    """What tells one version of a block from another one: the checksum of its bytes, as every
    server that has them keeps it."""
    if isinstance(block, DeviceWriteBlock):
        return block.checksum
    (seed,) = block_seeds(options.namespace, options.part, [block.digest])
    return await checksum_in_steps(block.pieces, seed)


def _by_server(servers_of: Mapping[int, Iterable[str]]) -> dict[str, list[int]]:
    """For each server the positions of its blocks."""
    positions: dict[str, list[int]] = {}
    for position, servers in servers_of.items():
        for server in sorted(servers):
            positions.setdefault(server, []).append(position)
    return positions
