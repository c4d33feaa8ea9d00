"""Fetches blocks from other servers: reads them as a client does, and stores them as a writer does.

A call goes in steps of some MiB. Each waits for the budget, reserves, reads into what it has
reserved, compares the checksums, and seals. What is left when the time is over is NOT_YET: the
caller asks again, so nothing here survives a call (design: moves).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool import logs, moves, removals
from kvpool.checksum import block_seeds, checksum
from kvpool.errors import LinkBroken, Overloaded, PeerError, Unavailable
from kvpool.moves import Offer
from kvpool.protocols import Channel, ReadOptions, ReserveRequest
from kvpool.server.context import ServerContext
from kvpool.server.moves.peer_servers import PeerServers
from kvpool.server.moves.state.fetches import FetchBudget, Fetches, Receivers
from kvpool.server.moves.turns import Turns
from kvpool.threads import in_thread, wait_for_all
from kvpool.types import (
    Extent,
    MoveStatus,
    Namespace,
    ReadBlock,
    ReadStatus,
    Reservation,
    SessionHint,
    WriteStatus,
)

log = logs.get("kvpool.server")

#: Bytes of one step, or one block if that is larger.
_STEP_BYTES: Final = 4 << 20
_STEP_BLOCKS: Final = 64
#: Steps at a time, half of them from one server: more of them take the processor from clients.
_TRANSFERS_MAX: Final = 4
#: A step that takes longer than this is given up: the source is frozen, or cut off.
_STEP_S: Final = 5.0
#: A wait for the budget is a difference of times, and may be next to nothing.
_TURN_MIN_S: Final = 1e-4
#: While the source reads blocks from a slow tier, it is asked for them so often.
_ASK_AGAIN_S: Final = 0.01
#: Of the time of a call, the parts in which blocks are fetched, and until when masters know of
#: them; then its answer must still arrive.
_FETCH_SHARE: Final = 0.7
_ANNOUNCE_SHARE: Final = 0.9
#: A removal that is passed on waits for the other server for so long.
_PASS_ON_S: Final = 1.0
#: Smaller blocks are hashed on the loop: waking up a thread costs more.
_INLINE_MAX: Final = 128 << 10
#: Owners of reservations in the store; connections count from 1, and never get so far.
_FIRST_OWNER: Final = 1 << 48

_FAILURES: Final = (Unavailable, PeerError, Overloaded)
_REFUSED: Final = {
    WriteStatus.ALREADY_STORED: MoveStatus.HERE,
    WriteStatus.IN_PROGRESS: MoveStatus.IN_PROGRESS,
}
#: After one of these for a block, the blocks behind it in its chain wait, too: heads come first.
_HEAD_IS_MISSING: Final = (MoveStatus.NO_ROOM, MoveStatus.NOT_YET, MoveStatus.LOST)


@dataclass(slots=True)
class FetchCall:
    """One call while it runs; the lists run parallel to its blocks. Its reservations belong to
    `owner`. A `tenant` that has asked pays for what arrives, as for what it writes; without one the
    pool moves blocks for its own reasons."""

    owner: int
    namespace: Namespace
    part: int
    digests: Sequence[bytes]
    source: str
    until: float
    extra: bool = False
    tenant: str = ""
    statuses: list[MoveStatus] = field(init=False)
    offers: dict[int, Offer] = field(default_factory=dict)
    #: When the source was asked for each offer. Its times count from then: a step may wait for its
    #: turn for minutes, and a block must not become younger on its way.
    asked_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.statuses = [MoveStatus.NOT_YET] * len(self.digests)

    def next_step(self, waiting: list[int]) -> list[int]:
        """Take the next blocks of one session, in their order, some MiB of them; at least one."""
        size = 0
        session = self.session(waiting[0])
        for count, position in enumerate(waiting):
            size += self.offers[position].size
            if count and (
                size > _STEP_BYTES or count == _STEP_BLOCKS or self.session(position) != session
            ):
                break
        else:
            count = len(waiting)
        step = waiting[:count]
        del waiting[:count]
        return step

    def session(self, position: int) -> str:
        """The session that alone uses the block; empty if there is none."""
        hint = self.offers[position].session_hint
        return hint.session if hint is not None else ""

    def last_used(self, position: int) -> int:
        """When the block was used last, in microseconds of this loop's clock; rather too early."""
        return max(0, int((self.asked_at[position] - self.offers[position].age_s) * 1e6))

    def session_hint(self, position: int, now: float) -> SessionHint | None:
        """The hint about the block's session, as it is to be said now."""
        hint = self.offers[position].session_hint
        if hint is None or hint.resume_in is None:
            return hint
        return hint._replace(resume_in=max(0.0, hint.resume_in - (now - self.asked_at[position])))

    def stop_behind(self, positions: Iterable[int], waiting: list[int]) -> None:
        """The blocks of `waiting` below one of `positions` that did not arrive stay away, too."""
        digests, statuses = self.digests, self.statuses
        missing = {digests[i]: statuses[i] for i in positions if statuses[i] in _HEAD_IS_MISSING}
        for later in sorted(waiting) if missing else ():
            if (status := missing.get(self.offers[later].parent)) is not None:
                missing[digests[later]] = statuses[later] = status
                waiting.remove(later)


class Fetcher:
    """All that a server does with other servers' blocks. At most `_TRANSFERS_MAX` steps run at a
    time, half of them from one server, three for one tenant."""

    def __init__(self, context: ServerContext, peers: PeerServers) -> None:
        self._context = context
        self._store = context.store
        self._peers = peers
        self.fetches = Fetches()
        self.receivers = Receivers()
        self.budget = FetchBudget()
        self._transfers = Turns(_TRANSFERS_MAX)
        self._owners = itertools.count(_FIRST_OWNER)

    # --- the receiver's half ---------------------------------------------------------------------

    async def fetch(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        source: str,
        *,
        extra: bool = False,
        deadline: float,
        tenant: str = "",
    ) -> list[MoveStatus]:
        """As `moves.fetch`, for a client of this tenant: it gets what its rate of writing
        and its share of reservations allow."""
        now = _now()
        until = now + (deadline - now) * _FETCH_SHARE
        announced_by = now + (deadline - now) * _ANNOUNCE_SHARE
        owner = next(self._owners)
        call = FetchCall(owner, namespace, part, digests, source, until, extra, tenant)
        if tenant:
            self._store.front.held.join_tenant(owner, tenant)
        begun: list[int] = []
        try:
            for position, digest in enumerate(digests):
                if self._store.peek(namespace, part, digest) is not None:
                    call.statuses[position] = MoveStatus.HERE
                elif self._context.draining:
                    call.statuses[position] = MoveStatus.REFUSED
                elif self.fetches.begin(namespace, part, digest):
                    begun.append(position)
                else:
                    call.statuses[position] = MoveStatus.IN_PROGRESS
            if begun:
                await self._fetch_all(call, begun)
        finally:
            self._store.front.drop_owner(call.owner)
            for position in begun:
                self.fetches.end(namespace, part, digests[position])
        # A caller may forget its own copy now: masters must know of this one (design: moves).
        present = any(status.present for status in call.statuses)
        if present and not await self._context.wait_until_announced(announced_by):
            call.statuses = [
                MoveStatus.NOT_YET if status.present else status for status in call.statuses
            ]
        self._count(call)
        return call.statuses

    async def _fetch_all(self, call: FetchCall, waiting: Sequence[int]) -> None:
        channel: Channel | None = None
        for first in (True, False):
            try:
                until = min(call.until, _now() + _STEP_S)
                channel = await self._peers.channel(call.source, until)
                with self._peers.in_use(channel):
                    return await self._fetch_over(channel, call, waiting)
            except _FAILURES as error:
                if _now() >= call.until:
                    return
                self._peers.failed(call.source, channel)
                waiting = [i for i in waiting if call.statuses[i] is MoveStatus.NOT_YET]
                if first and waiting and isinstance(error, LinkBroken):
                    continue  # closed while it was idle, or with another call, or in a restart
                log.info("source does not answer", source=call.source, why=str(error))
                for position in waiting:
                    call.statuses[position] = MoveStatus.LOST
                return

    async def _fetch_over(self, channel: Channel, call: FetchCall, wanted: Sequence[int]) -> None:
        await self._offers(call, wanted, channel)
        waiting = [i for i in wanted if i in call.offers]
        while waiting:
            step = call.next_step(waiting)
            price_s = await self._turn(call, step)
            if price_s is None:
                return
            try:
                again = await self._step(call, step, channel, price_s)
            finally:
                self._transfers.release(call.source, call.tenant)
            waiting[:0] = again
            if len(again) == len(step):  # a pause, because two such calls wake each other
                await self._context.wait_for_space(call.until, call.namespace)
                await asyncio.sleep(_ASK_AGAIN_S)
            call.stop_behind([i for i in step if i not in again], waiting)

    async def _offers(self, call: FetchCall, wanted: Sequence[int], channel: Channel) -> None:
        """Ask the source what the blocks are. From now on it passes removals on to this server."""
        until = min(call.until, _now() + _STEP_S)
        asked_at = _now()
        offers = await moves.offer(
            channel,
            call.namespace,
            call.part,
            [call.digests[i] for i in wanted],
            self._peers.server,
            deadline=until,
        )
        for position, offer in zip(wanted, offers, strict=True):
            if offer.status.hit:
                call.offers[position] = offer
                call.asked_at[position] = asked_at
            else:
                call.offers.pop(position, None)  # of a connection that has broken
                call.statuses[position] = MoveStatus.GONE

    async def _turn(self, call: FetchCall, step: Sequence[int]) -> float | None:
        """Wait until the tenant may write, for a place among the transfers, and for the budget: the
        price of the step, in seconds; None when the time is over."""
        guard, tenant = self._context.guard, call.tenant
        size = sum(call.offers[i].size for i in step)
        while True:
            while (wait_s := guard.wait_s(tenant, _now())) > 0:  # in nobody's way
                if _now() + wait_s >= call.until:
                    self._context.counters["over_rate_writes"] += 1
                    return None
                await asyncio.sleep(max(wait_s, _TURN_MIN_S))
            if not await self._place_and_budget(call):
                return None
            if not guard.wait_s(tenant, _now()):
                guard.begin(tenant, size, _now())
                return self.budget.begin(size, _now())
            self._transfers.release(call.source, call.tenant)  # another of its calls was first

    async def _place_and_budget(self, call: FetchCall) -> bool:
        """Whether the call has a place among the transfers now, while the budget allows one more;
        not if its time is over."""
        try:
            async with asyncio.timeout_at(call.until):
                await self._transfers.acquire(call.source, call.tenant)
        except TimeoutError:
            return False
        try:
            while (wait_s := self.budget.wait_s(_now())) > 0:
                if _now() + wait_s >= call.until:
                    self._transfers.release(call.source, call.tenant)
                    return False
                await asyncio.sleep(max(wait_s, _TURN_MIN_S))
        except BaseException:
            self._transfers.release(call.source, call.tenant)
            raise
        return True

    async def _step(
        self, call: FetchCall, step: Sequence[int], channel: Channel, price_s: float
    ) -> list[int]:
        """Reserve, read, verify, seal. Whatever happens, no reservation remains.

        Returns the blocks for which the server makes room only when others are sealed.
        """
        planned, moved, seconds = sum(call.offers[i].size for i in step), 0, 0.0
        try:
            granted, again = await self._reserve(call, step)
            if granted:
                began = _now()
                arrived = await self._read(call, granted, channel)
                moved, seconds = sum(call.offers[i].size for i in arrived), _now() - began
                good = [i for i in arrived if await self._is_right(call, i, granted[i])]
                call.stop_behind([i for i in step if i not in arrived], good)
                self._seal(call, {i: granted[i].id for i in good})
                await self._report_corrupt(call, step, channel)
            return again
        finally:
            self.budget.end(price_s, planned, moved, seconds)
            self._context.guard.give_back(call.tenant, planned - moved)
            self._store.front.cancel_rest(call.owner)
            self._context.on_change()

    def _seal(self, call: FetchCall, reservations: dict[int, int]) -> None:
        """Make the blocks visible. Nothing is awaited: a removal comes before it, or after it."""
        now = _now()
        for position, id in sorted(reservations.items()):  # heads first
            digest, offer = call.digests[position], call.offers[position]
            if self.fetches.may_seal(call.namespace, call.part, digest):
                last_used = call.last_used(position)
                self._store.seal(call.owner, id, offer.checksum, now, last_used=last_used)
                call.statuses[position] = MoveStatus.DONE
            else:
                call.statuses[position] = MoveStatus.GONE

    async def _report_corrupt(self, call: FetchCall, step: Sequence[int], channel: Channel) -> None:
        """The source verifies its copies, and drops those that are corrupt (design: checksums)."""
        digests = [call.digests[i] for i in step if call.statuses[i] is MoveStatus.CORRUPT]
        if digests:
            until = min(call.until, _now() + _STEP_S)
            await removals.report_corruption(
                channel, call.namespace, call.part, digests, deadline=until
            )

    async def _reserve(
        self, call: FetchCall, step: Sequence[int]
    ) -> tuple[dict[int, Reservation], list[int]]:
        """Space for the blocks of a step, by position, and the blocks to try again when those are
        sealed; the others have their status."""
        offers, now = [call.offers[i] for i in step], _now()
        request = ReserveRequest(
            call.namespace,
            call.part,
            [call.digests[i] for i in step],
            [offer.parent for offer in offers],
            [offer.size for offer in offers],
            None if call.extra else call.session_hint(step[0], now),
            last_used=[call.last_used(i) for i in step],
            copies=[0 if call.extra else max(1, offer.copies) for offer in offers],
        )
        until = min(call.until, now + _STEP_S)
        answers = await self._context.reserve(call.owner, request, until)
        self._context.publish()  # what was evicted for it
        granted, again = {}, []
        for position, answer in zip(step, answers, strict=True):
            if answer.extent is not None:
                granted[position] = answer
            elif answer.status is WriteStatus.NOT_YET or (
                answer.status is WriteStatus.NO_SPACE and self._store.is_writing_back
            ):  # it has evicted enough until it seals; or memory waits for the disk
                again.append(position)
            else:
                call.statuses[position] = _REFUSED.get(answer.status, MoveStatus.NO_ROOM)
        return granted, again

    async def _read(
        self, call: FetchCall, granted: dict[int, Reservation], channel: Channel
    ) -> list[int]:
        """Read into the reserved memory; the positions of the blocks that arrived."""
        # The bytes are verified where they lie then, and against what the source has named.
        options = ReadOptions(call.namespace, call.part, verify=False)
        until = min(call.until, _now() + _STEP_S)
        waiting, arrived = list(granted), []
        while waiting:
            blocks = []
            for position in waiting:
                extent = granted[position].extent
                assert extent is not None
                view = self._context.memory.view(extent.offset, extent.size)
                blocks.append(ReadBlock(call.digests[position], (view,), extent.size))
            results = await channel.read(options, blocks, deadline=until)
            later = []
            for position, result in zip(waiting, results, strict=True):
                if result.status is ReadStatus.NOT_YET:
                    later.append(position)
                elif result.status.hit and result.size == call.offers[position].size:
                    arrived.append(position)
                elif result.status is not ReadStatus.REFUSED:  # for now: NOT_YET
                    call.statuses[position] = MoveStatus.GONE
            if len(later) == len(waiting):
                if _now() + _ASK_AGAIN_S >= until:
                    break
                await asyncio.sleep(_ASK_AGAIN_S)
            waiting = later
        return arrived

    async def _is_right(self, call: FetchCall, position: int, reservation: Reservation) -> bool:
        """Whether the bytes in memory have the checksum that the source has named."""
        extent, digest = reservation.extent, call.digests[position]
        assert extent is not None
        (seed,) = block_seeds(call.namespace, call.part, [digest])
        if await self._checksum(extent, seed) == call.offers[position].checksum:
            return True
        call.statuses[position] = MoveStatus.CORRUPT
        return False

    async def _checksum(self, extent: Extent, seed: int) -> int:
        view = self._context.memory.view(extent.offset, extent.size)
        if extent.size <= _INLINE_MAX:
            return checksum(view, seed)
        return await in_thread(checksum, view, seed)

    def _count(self, call: FetchCall) -> None:
        counters = self._context.counters
        corrupt = [i for i, one in enumerate(call.statuses) if one is MoveStatus.CORRUPT]
        if corrupt:
            first = call.digests[corrupt[0]]
            log.error(
                "fetched blocks are corrupt", source=call.source, first=first, count=len(corrupt)
            )
        for position, status in enumerate(call.statuses):
            counters[f"fetch_{status.name.lower()}"] += 1
            if status is MoveStatus.DONE:
                counters["fetched_bytes"] += call.offers[position].size

    # --- the source's half -----------------------------------------------------------------------

    def offer(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], receiver: str
    ) -> list[Offer]:
        """As `moves.offer`."""
        now = _now()
        offers = []
        hints: dict[object, SessionHint | None] = {None: None}
        for digest in digests:
            entry = self._store.peek(namespace, part, digest)
            if entry is None:
                offers.append(
                    Offer(self._store.front.index.change_log.tombstones.reason(namespace, digest))
                )
                continue
            self.receivers.add(namespace, part, digest, receiver)
            session = entry.session
            if session not in hints:
                hints[session] = self._store.front.extents.policy.hint_of(session, now)
            age_s = min(1e9, max(0.0, now - entry.last_used / 1e6))
            offers.append(
                Offer(
                    ReadStatus.HIT,
                    entry.size,
                    entry.checksum,
                    entry.parent,
                    age_s,
                    hints[session],
                    entry.copies,
                )
            )
        self._context.counters["dropped_receivers"] = self.receivers.dropped
        return offers

    def revoke(self, namespace: Namespace, digests: Sequence[bytes], part: int | None) -> None:
        """Blocks are removed here: those that are on their way to this server stay away, too."""
        self.fetches.revoke(namespace, digests, part)

    async def pass_on(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        part: int | None,
        checksums: Sequence[int] = (),
    ) -> None:
        """Blocks were removed here: remove them from the servers that have fetched them.

        Waits a moment for each of them, as for the masters. After a removal of one version, given
        by `checksums`, that of another version is still to be passed on.
        """
        known = self.receivers
        receivers = (known.of if checksums else known.take)(namespace, digests, part)
        if receivers:
            sums = dict(zip(digests, checksums, strict=True)) if checksums else {}
            removals = (
                self._remove_from(server, namespace, blocks, part, [sums[one] for one in blocks])
                if sums
                else self._remove_from(server, namespace, blocks, part)
                for server, blocks in receivers.items()
            )
            await wait_for_all(removals)

    async def _remove_from(
        self,
        server: str,
        namespace: Namespace,
        digests: Sequence[bytes],
        part: int | None,
        checksums: Sequence[int] = (),
    ) -> None:
        deadline = _now() + _PASS_ON_S
        self._context.counters["passed_on_removals"] += len(digests)
        why = ""
        for _ in range(2):  # the first connection may be to the process before a restart
            channel: Channel | None = None
            try:
                channel = await self._peers.channel(server, deadline)
                await removals.remove(
                    channel, namespace, digests, part=part, checksums=checksums, deadline=deadline
                )
                return
            except Exception as error:  # whatever it is: it is here already, and elsewhere
                self._peers.failed(server, channel)
                why = str(error)  # and not the error, which refers to this frame
        log.info("a removal was not passed on", receiver=server, why=why)


def _now() -> float:
    return asyncio.get_running_loop().time()
