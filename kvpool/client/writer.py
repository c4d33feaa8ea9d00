"""How a client writes: a master says where, and the servers are tried in that order."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvpool.client import buffers as pieces
from kvpool.client.buffers import Buffers, Rows
from kvpool.client.device_staging import Staging
from kvpool.client.location_cache import Sighting, Sightings
from kvpool.client.masters import Masters
from kvpool.client.servers import Servers, together
from kvpool.errors import DeadlineExceeded, KvpoolError, Unavailable
from kvpool.protocols import WriteOptions
from kvpool.types import Namespace, WriteBlock, WriteStatus
from kvpool.wire import messages as wire

#: A block with one of these has found no home yet: the next server is asked.
_HOMELESS: Final = (
    WriteStatus.NO_SPACE,
    WriteStatus.SERVER_LOST,
    WriteStatus.TOO_LARGE,
    WriteStatus.DEADLINE,
)


class Writer:
    """Writes of one client, which runs on the host with this id."""

    def __init__(
        self,
        host: str,
        masters: Masters,
        servers: Servers,
        sightings: Sightings,
        staging: Staging,
        counters: Counter[str],
    ) -> None:
        self._host = host
        self._masters = masters
        self._servers = servers
        self._sightings = sightings
        self._staging = staging
        self._counters = counters
        self._loop = asyncio.get_running_loop()

    async def write(
        self,
        writing: WriteOptions,
        digests: Sequence[bytes],
        parents: Sequence[bytes],
        buffers: Buffers,
        copies: int,
        deadline: float,
    ) -> list[WriteStatus]:
        """As `Pool.write`, except that a block that is too large is one of the results."""
        memory, device, sizes = buffers

        async def send(rows: Rows) -> dict[int, WriteStatus]:
            blocks = [WriteBlock(digests[i], parents[i], rows[i], sizes[i]) for i in rows]
            written = await self._write_blocks(writing, blocks, copies, deadline)
            return dict(zip(rows, written, strict=True))

        statuses = await send({i: views for i, views in enumerate(memory) if i not in device})
        if device:
            statuses |= await self._staging.write(device, send, deadline)
        for status, count in Counter(statuses.values()).items():
            self._counters[f"write_{status.name.lower()}"] += count
        return [statuses[position] for position in range(len(digests))]

    # --- inside --------------------------------------------------------------------------

    async def _write_blocks(
        self, writing: WriteOptions, blocks: Sequence[WriteBlock], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """As many as there are, in batches; what follows one that is late is late, too."""
        statuses = [WriteStatus.DEADLINE] * len(blocks)
        for group in pieces.batches(range(len(blocks)), [block.size for block in blocks]):
            written = await self._write_batch(writing, [blocks[i] for i in group], copies, deadline)
            for position, status in zip(group, written, strict=True):
                statuses[position] = status
            if any(status is WriteStatus.DEADLINE for status in written):
                break
        return statuses

    async def _write_batch(
        self, writing: WriteOptions, blocks: Sequence[WriteBlock], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """Place, then try the servers in that order until every block has its copies."""
        try:
            placed = await self._place(writing.namespace, blocks, copies, deadline)
        except DeadlineExceeded:
            return [WriteStatus.DEADLINE] * len(blocks)
        except Unavailable:
            return [WriteStatus.NO_MASTER] * len(blocks)
        statuses = [WriteStatus.SERVER_LOST] * len(blocks)
        needed = [copies] * len(blocks)
        made = [0] * len(blocks)
        for position, already in enumerate(placed.copies):
            # The pool has a whole block only if every part is there; ours may be the one that
            # has to be written again.
            if already >= copies and writing.namespace.parts == 1:
                statuses[position] = WriteStatus.ALREADY_STORED
                needed[position] = 0
                made[position] = copies
        servers = iter(placed.servers)
        while any(needed) and self._loop.time() < deadline:
            batches = [
                (server, [i for i, missing in enumerate(needed) if missing > turn])
                for turn, server in enumerate(itertools.islice(servers, max(needed)))
            ]
            if not batches:
                break
            answers = await together(
                [
                    self._servers.write(server, writing, [blocks[i] for i in batch], deadline)
                    for server, batch in batches
                ]
            )
            for (server, batch), answer in zip(batches, answers, strict=True):
                seen = []
                for index, position in enumerate(batch):
                    status = answer[index] if not isinstance(answer, KvpoolError) else _lost(answer)
                    statuses[position] = _better(statuses[position], status)
                    needed[position] -= status not in _HOMELESS
                    if status.present:
                        made[position] += 1
                        seen.append(blocks[position].digest)
                self._sightings.saw(Sighting(writing.namespace, server, copies == 1), seen)
        if copies > 1:
            self._counters["copies_missing"] += sum(max(0, copies - count) for count in made)
        return statuses

    async def _place(
        self, namespace: Namespace, blocks: Sequence[WriteBlock], copies: int, deadline: float
    ) -> wire.PlaceReply:
        request = wire.Place(
            namespace.name,
            namespace.parts,
            len(blocks[0].digest),
            b"".join([block.digest for block in blocks]),
            blocks[0].parent,
            sum(block.size for block in blocks),
            self._host,
            copies,
        )
        placed = await self._masters.ask(request, wire.PlaceReply, deadline)
        if len(placed.copies) != len(blocks):
            raise Unavailable(f"a master answered for {len(placed.copies)} of {len(blocks)}")
        return placed


def _lost(error: KvpoolError) -> WriteStatus:
    late = isinstance(error, DeadlineExceeded)
    return WriteStatus.DEADLINE if late else WriteStatus.SERVER_LOST


def _better(one: WriteStatus, other: WriteStatus) -> WriteStatus:
    """Of two servers' answers for one block: stored beats being stored beats neither."""
    for status in (WriteStatus.STORED, WriteStatus.ALREADY_STORED, WriteStatus.IN_PROGRESS):
        if status in (one, other):
            return status
    return other
