"""How a client writes: a master names servers, and they are tried in that order."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvpool.client import buffers as memory
from kvpool.client.buffers import Buffers, HostRows
from kvpool.client.location_cache import CachedLocation, LocationCache
from kvpool.client.masters import Masters
from kvpool.client.servers import Servers
from kvpool.errors import DeadlineExceeded, KvpoolError, Overloaded, PeerError, Unavailable
from kvpool.protocols import WriteOptions
from kvpool.types import Namespace, WriteBlock, WriteStatus
from kvpool.wire import messages as wire

if TYPE_CHECKING:
    from kvpool.client.device_staging import Staging

T = TypeVar("T")

#: A block with one of these is not stored on that server: the next one is tried.
RETRY_ELSEWHERE: Final = (
    WriteStatus.NO_SPACE,
    WriteStatus.SERVER_LOST,
    WriteStatus.TOO_LARGE,
    WriteStatus.DEADLINE,
)
#: The better answers of two servers for one block, best first.
_BEST_FIRST: Final = (WriteStatus.STORED, WriteStatus.ALREADY_STORED, WriteStatus.IN_PROGRESS)
#: `WriteStatus.present` as a tuple: a property would be called for each block.
_PRESENT: Final = (WriteStatus.STORED, WriteStatus.ALREADY_STORED)
_STORED, _NOT_YET = WriteStatus.STORED, WriteStatus.NOT_YET


class Writer:
    """Writes of one client, which runs on the host with this id.

    `staging` makes the pinned memory when a write first needs it.
    """

    def __init__(
        self,
        host: str,
        masters: Masters,
        servers: Servers,
        locations: LocationCache,
        staging: Callable[[], Staging],
        counters: Counter[str],
    ) -> None:
        self._host = host
        self._masters = masters
        self._servers = servers
        self._locations = locations
        self._staging = staging
        self._counters = counters
        self._loop = asyncio.get_running_loop()

    async def write(
        self,
        options: WriteOptions,
        digests: Sequence[bytes],
        parents: Sequence[bytes],
        buffers: Buffers,
        copies: int,
        deadline: float,
    ) -> list[WriteStatus]:
        """As `Pool.write`, except that a block that is too large is one of the results."""
        host, device, sizes = buffers

        async def send(rows: HostRows) -> dict[int, WriteStatus]:
            blocks = [WriteBlock(digests[i], parents[i], rows[i], sizes[i]) for i in rows]
            written = await self._write_blocks(options, blocks, copies, deadline)
            return dict(zip(rows, written, strict=True))

        statuses = await send({i: views for i, views in enumerate(host) if i not in device})
        if device:
            statuses |= await self._staging().write(device, send, deadline)
        for status, count in Counter(statuses.values()).items():
            self._counters[f"write_{status.name.lower()}"] += count
        return [statuses[position] for position in range(len(digests))]

    async def write_to(
        self, server: str, options: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[WriteStatus]:
        """`Channel.write` on the best path to that server, and again while blocks are NOT_YET.

        Then the server makes space: what was written before moves to a slower tier. Reads ask
        again in the same shape (`Reader._attempt`). Raises what `Servers.call` raises when the
        first of these calls fails.
        """
        statuses = await self._write_once(server, options, blocks, deadline)
        while waiting := [i for i, status in enumerate(statuses) if status is _NOT_YET]:
            rest = [blocks[i] for i in waiting]
            try:
                answer = await self._write_once(server, options, rest, deadline)
            except Unavailable:  # what was stored before stays stored
                answer = [WriteStatus.NO_SPACE] * len(rest)
            for position, status in zip(waiting, answer, strict=True):
                statuses[position] = status
        return statuses

    # --- inside --------------------------------------------------------------------------

    async def _write_blocks(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """As many as there are, in batches; what follows one that is late is late, too."""
        statuses = [WriteStatus.DEADLINE] * len(blocks)
        for group in memory.batches(range(len(blocks)), [block.size for block in blocks]):
            written = await self._write_batch(options, [blocks[i] for i in group], copies, deadline)
            for position, status in zip(group, written, strict=True):
                statuses[position] = status
            if any(status is WriteStatus.DEADLINE for status in written):
                break
        return statuses

    async def _write_batch(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """Place, then try the servers in that order until every block has its copies."""
        try:
            placed = await self._place(options.namespace, blocks, copies, deadline)
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
            if already >= copies and options.namespace.parts == 1:
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
            # Side by side: together the copies take as long as the slowest.
            writes = [
                self._try_write(server, options, [blocks[i] for i in batch], deadline)
                for server, batch in batches
            ]
            answers = [await writes[0]] if len(writes) == 1 else await _run_all(writes)
            for (server, batch), answer in zip(batches, answers, strict=True):
                present = []
                for position, status in zip(batch, answer, strict=True):
                    statuses[position] = best_status(statuses[position], status)
                    needed[position] -= status not in RETRY_ELSEWHERE
                    if status in _PRESENT:
                        made[position] += 1
                        present.append(blocks[position].digest)
                location = CachedLocation(options.namespace, server, copies == 1)
                self._locations.put(location, present)
        if copies > 1:
            self._counters["copies_missing"] += sum(max(0, copies - count) for count in made)
        return statuses

    async def _try_write(
        self, server: str, options: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[WriteStatus]:
        """`write_to`, with a failure as the status of every block."""
        try:
            return await self.write_to(server, options, blocks, deadline)
        except (Unavailable, PeerError, Overloaded) as error:
            return [status_of_error(error)] * len(blocks)

    async def _write_once(
        self, server: str, options: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[WriteStatus]:
        return await self._servers.call(
            server,
            lambda channel: channel.write(options, blocks, deadline=deadline),
            deadline,
            sum([block.size for block in blocks]),
            lambda answer: sum(
                [b.size for b, status in zip(blocks, answer, strict=True) if status is _STORED]
            ),
        )

    async def _place(
        self, namespace: Namespace, blocks: Sequence[WriteBlock], copies: int, deadline: float
    ) -> wire.PlaceReply:
        request = wire.Place(
            namespace.name,
            namespace.parts,
            len(blocks[0].digest),
            b"".join([block.digest for block in blocks]),
            blocks[0].parent,
            sum([block.size for block in blocks]),
            self._host,
            copies,
        )
        placed = await self._masters.ask(request, wire.PlaceReply, deadline)
        if len(placed.copies) != len(blocks):
            raise Unavailable(f"a master answered for {len(placed.copies)} of {len(blocks)}")
        return placed


async def _run_all(writes: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """If this is cancelled, it waits until each has stopped: they use the caller's buffers."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(write) for write in writes]
    return [task.result() for task in tasks]


def status_of_error(error: KvpoolError) -> WriteStatus:
    """The status that an error means for a writer."""
    late = isinstance(error, DeadlineExceeded)
    return WriteStatus.DEADLINE if late else WriteStatus.SERVER_LOST


def best_status(one: WriteStatus, other: WriteStatus) -> WriteStatus:
    """Of two servers' answers for one block: stored, else being stored, else the later one."""
    return next((status for status in _BEST_FIRST if status in (one, other)), other)
