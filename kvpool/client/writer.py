"""How a client writes: a master names servers, and they are tried in that order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from msgspec.structs import replace

from kvpool.client.attempts import batches
from kvpool.client.block_transfers import BlockTransfers
from kvpool.client.buffers import Buffers, HostRows
from kvpool.client.extension import OnApart
from kvpool.client.location_cache import CachedLocation, LocationCache
from kvpool.client.masters import Masters
from kvpool.client.servers import Servers, gather_errors
from kvpool.client.versions import SourceBlock, Versions, WrittenBlock, rounds
from kvpool.errors import DeadlineExceeded, KvpoolError, Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, DeviceWriteBlock, WriteOptions
from kvpool.shares import Recent
from kvpool.supervision import stop
from kvpool.types import BATCH_BLOCKS_MAX, ROOT, WriteBlock, WriteStatus, row_of
from kvpool.wire import messages as wire

_BLOCK: Final = row_of(WriteBlock)
#: A block with one of these is not stored on that server: the next one is tried.
RETRY_ELSEWHERE: Final = (
    WriteStatus.NO_SPACE,
    WriteStatus.SERVER_LOST,
    WriteStatus.REFUSED,
    WriteStatus.TOO_LARGE,
    WriteStatus.DEADLINE,
)
#: Answers of several servers for one block, the one that is the result first. A server that answers
#: tells more than one that does not; only if every server has refused it, a block is too large.
_BEST_FIRST: Final = (
    WriteStatus.STORED,
    WriteStatus.ALREADY_STORED,
    WriteStatus.IN_PROGRESS,
    WriteStatus.BYPASSED,
    WriteStatus.NO_SPACE,
    WriteStatus.REFUSED,
    WriteStatus.DEADLINE,
    WriteStatus.SERVER_LOST,
    WriteStatus.TOO_LARGE,
    # No answers of a server for a block. One that sends them all the same must not end the call.
    WriteStatus.NO_MASTER,
    WriteStatus.NOT_YET,
    WriteStatus.RESERVED,
)
#: `WriteStatus.present` as a tuple: a property would be called for each block.
_PRESENT: Final = (WriteStatus.STORED, WriteStatus.ALREADY_STORED)
#: Ends of chains whose server is remembered.
_ENDS_KEPT: Final = 1024
#: A master's last answer is believed for so long: whoever joins gets new chains after that.
_FRESH_S: Final = 1.0
#: Masters hear of a write so much later. Where so many messages wait for slow ones, writes ask.
_TELL_AFTER_S, _UNTOLD_MAX = 0.1, 256
#: A write whose server is known asks a master only when it is not done after so long.
_ASK_AFTER_S: Final = 0.02
_UNASKED: Final = wire.PlaceReply([], b"")
#: By value; numbers are hashed without a call of Python, members of an enum are not.
_STATUSES: Final = tuple(WriteStatus)
_STORED, _NOT_YET = WriteStatus.STORED, WriteStatus.NOT_YET


@dataclass(slots=True)
class BatchState:
    """One batch of a write while it runs; lists run parallel to its blocks.

    `holders` are the servers that have the block, as far as this call knows; `stored_on` those of
    them that have the bytes of this call, or bytes that it copied from another holder. `alone`: of
    each answer of a server that has stored blocks whether all masters say that no other has them.
    """

    options: WriteOptions
    blocks: Sequence[SourceBlock]
    copies: int
    deadline: float
    #: Servers to try, best first.
    servers: Sequence[str]
    statuses: list[WriteStatus | None] = field(init=False)
    holders: list[set[str]] = field(init=False)
    stored_on: list[set[str]] = field(init=False)
    tried: list[set[str]] = field(init=False)
    alone: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        count = range(len(self.blocks))
        self.statuses = [None for _ in count]
        self.holders, self.stored_on, self.tried = ([set[str]() for _ in count] for _ in range(3))

    def next_batches(self, needed: dict[int, int]) -> dict[str, list[int]]:
        """For each block that needs copies as many servers that were not tried, as batches."""
        batches: dict[str, list[int]] = {}
        for position, missing in needed.items():
            tried = self.tried[position]
            for server in self.servers:
                if not missing:
                    break
                if server not in tried:
                    tried.add(server)
                    batches.setdefault(server, []).append(position)
                    missing -= 1
        return batches

    def answered(
        self,
        server: str,
        positions: Sequence[int],
        answer: Sequence[WriteStatus],
        needed: dict[int, int],
    ) -> None:
        """Keep a server's answer for these blocks; `needed` keeps those that need copies."""
        for position, status in zip(positions, answer, strict=True):
            before = self.statuses[position]
            self.statuses[position] = status if before is None else best_status(before, status)
            if status in _PRESENT:
                self.holders[position].add(server)
                if status is _STORED:
                    self.stored_on[position].add(server)
            elif status in RETRY_ELSEWHERE:
                continue
            if needed[position] > 1:
                needed[position] -= 1
            else:
                del needed[position]

    def results(self, now: float) -> list[WriteStatus]:
        """One status per block; where no server was asked, there is none, or no time was left."""
        # Without a server there is no space: none was lost on the way.
        unasked = WriteStatus.SERVER_LOST if self.servers else WriteStatus.NO_SPACE
        unasked = WriteStatus.DEADLINE if now >= self.deadline else unasked
        return [unasked if status is None else status for status in self.statuses]


class Places:
    """Where the writes of one client go, on the host with this id: as a master says, or where it is
    known already.

    Masters spread blocks by what writers ask. A write that knows its server does not wait for that:
    they hear of it a moment later, in one message for all writes of a chain (design: placement).
    """

    def __init__(self, host: str, masters: Masters) -> None:
        self._host = host
        self._masters = masters
        self._loop = asyncio.get_running_loop()
        #: Where this client wrote the last block of a chain, by namespace and digest.
        self._ends: Recent[bytes, str] = Recent(_ENDS_KEPT)
        self._only_server = ""  # that a master named for the last write, alone
        self._answered_at = 0.0
        #: By namespace, session, part and last block.
        self._untold: dict[tuple[str, str, int, bytes], wire.Place] = {}
        self._telling: asyncio.Task[None] | None = None

    @property
    def is_fresh(self) -> bool:
        """A write may go where it is known to belong, and `tell` masters afterwards."""
        heard = len(self._untold) < _UNTOLD_MAX
        return heard and self._loop.time() < self._answered_at + _FRESH_S

    def question(
        self, options: WriteOptions, blocks: Sequence[SourceBlock], copies: int
    ) -> wire.Place:
        """Where to write these blocks."""
        namespace, first, hint = options.namespace, blocks[0], options.session_hint
        digests = b"".join([block.digest for block in blocks])
        size, session = sum([block.size for block in blocks]), hint.session if hint else ""
        keys = namespace.name, namespace.parts, len(first.digest), digests
        return wire.Place(*keys, first.parent, size, self._host, copies, session)

    def known(self, question: wire.Place, *, visible: bool) -> Sequence[str]:
        """The server that a master will name first, if that is known: the only one that there is,
        or where this client has written the parent, from which no other chain goes on yet.

        Only of visible writes: two versions of a block may come of it (design: versions).
        """
        if question.copies > 1 or not visible:
            return ()
        end = self._only_server or self._ends.pop(question.namespace, question.parent)
        return [end] if end else ()

    def ended(self, question: wire.Place, servers: set[str]) -> None:
        """The last of these blocks was written to these servers."""
        if servers and not self._only_server:
            last = question.digests[-question.digest_size :]
            self._ends.put(question.namespace, last, min(servers))

    async def ask(self, question: wire.Place, deadline: float) -> wire.PlaceReply | WriteStatus:
        """What a master says, or what the lack of an answer means for every block."""
        try:
            placed = await self._masters.ask(question, wire.PlaceReply, deadline)
        except DeadlineExceeded:
            return WriteStatus.DEADLINE
        except Unavailable:
            return WriteStatus.NO_MASTER
        if len(placed.copies) * question.digest_size != len(question.digests):
            return WriteStatus.NO_MASTER
        self._only_server = placed.servers[0] if len(placed.servers) == 1 else ""
        self._answered_at = self._loop.time()
        return placed

    def tell(self, written: wire.Place, part: int) -> None:
        """These blocks were written, and no master was asked where. Of those on the only server
        masters need to hear how many, and not of which chain they are."""
        size, only = written.digest_size, bool(self._only_server)
        of = (written.namespace, "", 0) if only else (written.namespace, written.session, part)
        begin, end = (ROOT, ROOT) if only else (written.parent, written.digests[-size:])
        before = self._untold.pop((*of, begin), None)
        if before is not None:
            whole = before.digests + written.digests
            if before.digest_size == size and len(whole) <= BATCH_BLOCKS_MAX * size:
                written = replace(before, digests=whole, size=before.size + written.size)
            else:
                self._untold[(*of, before.digests[-before.digest_size :])] = before
        self._untold[(*of, end)] = written
        if self._telling is None or self._telling.done():
            self._telling = self._loop.create_task(self._tell())

    async def _tell(self) -> None:
        """Until all is told. Where no master answers, this is left out."""
        while self._untold:
            await asyncio.sleep(_TELL_AFTER_S)
            untold, self._untold = self._untold, {}
            for written in untold.values():
                answer = await self.ask(written, self._loop.time() + _FRESH_S)
                if isinstance(answer, WriteStatus):
                    break

    async def close(self) -> None:
        """End what is being told. Idempotent."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])


class Writer:
    """Writes of one client. `memory` writes what is not in memory of the host."""

    def __init__(
        self,
        places: Places,
        servers: Servers,
        locations: LocationCache,
        versions: Versions,
        on_apart: Sequence[OnApart],
        memory: BlockTransfers,
        counters: Counter[str],
    ) -> None:
        self._places = places
        self._servers = servers
        self._locations = locations
        self.versions = versions
        self._on_apart = on_apart
        self._memory = memory
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
            keys = [digests[i] for i in rows], [parents[i] for i in rows]
            columns = zip(*keys, rows.values(), [sizes[i] for i in rows], strict=True)
            blocks = list(map(_BLOCK, columns))
            written = await self._write_blocks(options, blocks, copies, deadline)
            return dict(zip(rows, written, strict=True))

        statuses = await send({i: views for i, views in enumerate(host) if i not in device})
        if device:
            names = {i: (digests[i], parents[i]) for i in device}
            write_blocks = functools.partial(
                self._write_blocks, options, copies=copies, deadline=deadline
            )
            statuses |= await self._memory.write(
                options, names, device, write_blocks, send, deadline
            )
        for value, count in Counter(map(int, statuses.values())).items():
            status = _STATUSES[value]
            self._counters[f"write_{status.name.lower()}"] += count
        return [statuses[position] for position in range(len(digests))]

    async def write_on(
        self, server: str, options: WriteOptions, blocks: Sequence[SourceBlock], deadline: float
    ) -> list[WriteStatus]:
        """`Channel.write` on the best path to that server, and again while blocks are NOT_YET.

        Then the server makes space: what was written before moves to a slower tier. Each step must
        be an answer for one more block, or the rest is NO_SPACE. Reads ask again in the same shape
        (`Reader._attempt`). Raises what `Servers.call` raises when the first of these calls fails.
        """
        statuses = await self._write_once(server, options, blocks, deadline)
        before = len(blocks)
        while waiting := [i for i, status in enumerate(statuses) if status is _NOT_YET]:
            rest = [blocks[i] for i in waiting]
            answer = [WriteStatus.NO_SPACE] * len(rest)
            if len(rest) < before:  # a server that takes nothing would be asked for ever
                try:
                    answer = await self._write_once(server, options, rest, deadline)
                # What was stored before stays stored.
                except (Unavailable, PeerError, Overloaded) as error:
                    answer = [status_of_error(error)] * len(rest)
            before = len(rest)
            for position, status in zip(waiting, answer, strict=True):
                statuses[position] = status
        return statuses

    async def _write_blocks(
        self, options: WriteOptions, blocks: Sequence[SourceBlock], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """As many as there are, in batches; what follows one that is late is late, too."""
        statuses = [WriteStatus.DEADLINE] * len(blocks)
        for group in batches(range(len(blocks)), [block.size for block in blocks]):
            written = await self._write_batch(options, [blocks[i] for i in group], copies, deadline)
            for position, status in zip(group, written, strict=True):
                statuses[position] = status
            if any(status is WriteStatus.DEADLINE for status in written):
                break
        return statuses

    async def _write_batch(
        self, options: WriteOptions, blocks: Sequence[SourceBlock], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """Place, then try the servers in that order until every block has its copies.

        A server that a master is known to name first is written to without asking. A block that the
        pool has gets further copies of what is stored, never of the caller's bytes: another engine
        may have computed it with other rounding (design: versions).
        """
        question = self._places.question(options, blocks, copies)
        known = self._places.known(question, visible=options.visible)
        batch = BatchState(options, blocks, copies, deadline, known)
        needed = dict.fromkeys(range(len(blocks)), copies)
        placed = await self._place(batch, needed, question)
        if isinstance(placed, WriteStatus):
            return [
                placed if status is None or i in needed else status
                for i, status in enumerate(batch.statuses)
            ]
        made = {i: count for i, count in enumerate(placed.copies) if count}
        for position in made:
            if needed.pop(position, 0):
                batch.statuses[position] = WriteStatus.ALREADY_STORED
        batch.servers = placed.servers
        await self._spread(batch, needed, {})
        if len({*placed.servers, *known}) > 1:
            self._tell_apart(batch)
        if placed is _UNASKED or len({*placed.servers, *known}) > 1:  # else there is one version
            await self._settle(batch, {})
            short = [
                i
                for i, status in enumerate(batch.statuses)
                if status is WriteStatus.ALREADY_STORED and made.get(i, 0) < copies > 1
            ]
            if short:
                await self._copy_stored(batch, short)
        if copies > 1:
            counts = [max(made.get(i, 0), len(held)) for i, held in enumerate(batch.holders)]
            self._counters["copies_missing"] += sum(max(0, copies - count) for count in counts)
        else:
            self._places.ended(question, batch.stored_on[-1])
        return batch.results(self._loop.time())

    async def _place(
        self, batch: BatchState, needed: dict[int, int], question: wire.Place
    ) -> wire.PlaceReply | WriteStatus:
        """Write to the servers that the batch has: `_UNASKED` if that was enough. Else, and where
        that takes long, what a master says. A server that it does not name is waited for no more.
        """
        places, early, fresh = self._places, asyncio.timeout(None), self._places.is_fresh
        asking: list[asyncio.Task[wire.PlaceReply | WriteStatus]] = []

        async def ask() -> wire.PlaceReply | WriteStatus:
            placed = await places.ask(question, batch.deadline)
            if isinstance(placed, WriteStatus) or batch.servers[0] not in placed.servers:
                with contextlib.suppress(RuntimeError):  # it is over
                    early.reschedule(self._loop.time())
            return placed

        def begin() -> None:
            if not asking:
                asking.append(self._loop.create_task(ask()))

        if not batch.servers:
            return await places.ask(question, batch.deadline)
        timer = self._loop.call_later(_ASK_AFTER_S if fresh else 0, begin)
        try:
            with contextlib.suppress(TimeoutError):
                async with early:  # in this task: most writes need no other one
                    await self._spread(batch, needed, {})
            if needed:
                begin()
            if asking:
                return await asking[0]
            places.tell(question, batch.options.part)
            return _UNASKED
        finally:
            timer.cancel()
            for task in asking:
                await stop(task)

    async def _spread(
        self, batch: BatchState, needed: dict[int, int], sources: Mapping[int, WriteBlock]
    ) -> None:
        """Write each of these blocks to as many more servers as it needs, or as there are.

        The bytes are those of `sources` where it has the block, else the caller's.
        """
        while needed and self._loop.time() < batch.deadline:
            batches = list(batch.next_batches(needed).items())
            if not batches:
                break
            # Side by side: together the copies take as long as the slowest.
            writes = [
                self.write_on(
                    server,
                    batch.options._replace(on_alone=batch.alone[server].append),
                    [sources.get(i, batch.blocks[i]) for i in positions],
                    batch.deadline,
                )
                for server, positions in batches
            ]
            answers: list[list[WriteStatus] | KvpoolError] = []
            if len(writes) > 1:
                answers = await gather_errors(writes)
            else:
                try:
                    answers.append(await writes[0])
                except (Unavailable, PeerError, Overloaded) as error:
                    answers.append(error)
            for (server, positions), written in zip(batches, answers, strict=True):
                if isinstance(written, KvpoolError):
                    written = [status_of_error(written)] * len(positions)
                batch.answered(server, positions, written, needed)
                present = [
                    batch.blocks[position].digest
                    for position, status in zip(positions, written, strict=True)
                    if status in _PRESENT
                ]
                location = CachedLocation(batch.options.namespace, server, batch.copies == 1)
                self._locations.put(location, present)

    def _tell_apart(self, batch: BatchState) -> None:
        """Say so where this chain begins on another server than its parent."""
        server, first = batch.servers[0], batch.blocks[0]
        if batch.options.visible and server in batch.stored_on[0]:
            known = self._locations.get(batch.options.namespace, [first.parent])
            if not known or known[0].server != server:
                last = batch.blocks[-1].digest
                for call in self._on_apart:
                    call(batch.options, first.parent, last, server)

    async def _settle(self, batch: BatchState, sources: Mapping[int, WriteBlock]) -> None:
        """Keep one version of the blocks that this call has stored (`Versions.settle`).

        There is one of those of which masters have said, when they listed them, that no other
        server has them: whoever stores another version later is not told so, and compares.
        """
        alone = {server for server, answers in batch.alone.items() if answers and all(answers)}
        written = {
            i: WrittenBlock(
                sources.get(i, batch.blocks[i]), set(servers), batch.holders[i] - servers
            )
            for i, servers in enumerate(batch.stored_on)
            if servers and (i in sources or not sources)
            if not servers <= alone or batch.holders[i] - servers
        }
        if not written:
            return
        lost = await self.versions.settle(batch.options, written, batch.deadline)
        for position, (block, servers, others) in written.items():
            batch.holders[position] = servers | others
            if position in lost:
                batch.statuses[position] = WriteStatus.ALREADY_STORED
                batch.holders[position] = others
                # They may get a copy of the other version.
                batch.tried[position] -= batch.stored_on[position]
                batch.stored_on[position] = set()
                self._locations.discard([block.digest])
            else:
                batch.stored_on[position] = servers

    async def _copy_stored(self, batch: BatchState, short: Sequence[int]) -> None:
        """Make further copies of blocks that the pool has, of the bytes that it has."""
        digests = [batch.blocks[i].digest for i in short]
        known = await self.versions.holders(batch.options, digests, batch.deadline)
        sources_of: dict[str, list[int]] = {}
        for position, holders in zip(short, known, strict=True):
            held = batch.holders[position]
            held.update(holders)
            batch.tried[position] |= held
            if held and len(held) < batch.copies:
                source = self._servers.rank(sorted(held))[0]
                sources_of.setdefault(source, []).append(position)
        for server, positions in sources_of.items():
            for group in rounds(positions, [batch.blocks[i].size for i in positions]):
                blocks = [batch.blocks[i] for i in group]
                found = await self.versions.stored(server, batch.options, blocks, batch.deadline)
                sources = {
                    position: stored.block
                    for position, stored in zip(group, found, strict=True)
                    if stored.block is not None
                }
                if sources:
                    needed = {i: batch.copies - len(batch.holders[i]) for i in sources}
                    await self._spread(batch, needed, sources)
                    await self._settle(batch, sources)
                    for position in sources:  # not what the caller wrote
                        batch.statuses[position] = WriteStatus.ALREADY_STORED

    async def _write_once(
        self, server: str, options: WriteOptions, blocks: Sequence[SourceBlock], deadline: float
    ) -> list[WriteStatus]:
        def from_host(on_host: Sequence[WriteBlock]) -> Awaitable[list[WriteStatus]]:
            def call(channel: Channel) -> Awaitable[list[WriteStatus]]:
                return channel.write(options, on_host, deadline=deadline)

            return self._servers.call(server, call, deadline, "write")

        # All of them or none: a batch is of the caller, or of what the pool has.
        if isinstance(blocks[0], DeviceWriteBlock):
            on_device = cast("Sequence[DeviceWriteBlock]", blocks)
            return await self._memory.write_to(server, options, on_device, from_host, deadline)
        return await from_host(cast("Sequence[WriteBlock]", blocks))


def status_of_error(error: KvpoolError) -> WriteStatus:
    """The status that an error means for a writer."""
    if isinstance(error, DeadlineExceeded):
        return WriteStatus.DEADLINE
    return WriteStatus.REFUSED if isinstance(error, Overloaded) else WriteStatus.SERVER_LOST


def best_status(one: WriteStatus, other: WriteStatus) -> WriteStatus:
    """Of two servers' answers for one block the one that counts: see `_BEST_FIRST`."""
    return min(one, other, key=_BEST_FIRST.index)
