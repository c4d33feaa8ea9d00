"""What a transport may do with one client's connection: reserve, seal, pin, unpin, remove.

Nothing here decides where a block lies: `state/store.py` does. This file waits (for space,
for a slow tier, for the masters) and counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from kvpool import logs
from kvpool.checksum import block_seed, checksum_in_steps, namespace_seed
from kvpool.protocols import DeviceAddressable, ReserveRequest
from kvpool.server.clients import HeldByClient
from kvpool.server.context import ServerContext, Visibility
from kvpool.server.extension import Extensions
from kvpool.server.state.entry import Entry
from kvpool.server.state.extents import MAKING_ROOM
from kvpool.types import Namespace, Pin, ReadStatus, Reservation, WriteStatus
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: A removal waits this long until the masters have applied it, then it is answered anyway.
_REMOVE_VISIBLE_S: Final = 1.0
#: A reader that gets no block now is answered after this long: a server must not look dead because
#: its disk is slow, or other readers have pinned all they may (design: hedging).
_PIN_WAIT_S: Final = 0.05
_NO_ROOM: Final = Pin(ReadStatus.REFUSED)
_ASK_AGAIN: Final = Reservation(WriteStatus.NOT_YET)


class ServerConnection:
    """One client's connection: all that it has reserved and pinned is freed when it closes."""

    def __init__(self, context: ServerContext, extensions: Extensions, held: HeldByClient) -> None:
        self.peer = peer = held.peer
        self._held = held
        self._context = context
        self._extensions = extensions
        self._store = context.store
        self._id = held.id
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.alone = False
        #: Asked before the blocks of a tenant's client are reserved.
        self._writes = extensions.tenant_writes if peer.tenant else None
        if peer.tenant:
            self._store.front.held.join_tenant(held.id, peer.tenant)

    async def reserve(self, request: ReserveRequest, *, deadline: float) -> list[Reservation]:
        now = self._loop.time()
        # Half of the caller's time at most: a refusal must still reach it.
        wait_until = now + (deadline - now) / 2
        if self._writes is None:
            return await self._reserve_all(request, wait_until)
        return await self._writes.reserve(self.peer, request, wait_until, self._reserve_all)

    def reserve_now(self, request: ReserveRequest) -> list[Reservation]:
        now = self._loop.time()
        if self._writes is None:
            return self._reserve_what_fits(request, now)
        return self._writes.reserve_now(self.peer, request, now, self._reserve_what_fits)

    def _reserve_what_fits(self, request: ReserveRequest, now: float) -> list[Reservation]:
        context, store = self._context, self._store
        if context.draining:
            answers = self._already_stored(request)
        else:
            answers = store.reserve(self._id, request, now)
            if MAKING_ROOM in answers:  # that is for callers who wait for it
                context.room_maker.stop(self._id)
        granted = context.publish_evicted(answers)
        full = [i for i, a in enumerate(answers) if a.status is WriteStatus.NO_SPACE]
        if full and (granted or (store.is_held and not context.draining)):
            for position in full:
                answers[position] = _ASK_AGAIN
            full = []
        self._count_refused(request, answers, full)
        return [_ASK_AGAIN if answer is MAKING_ROOM else answer for answer in answers]

    async def _reserve_all(self, request: ReserveRequest, wait_until: float) -> list[Reservation]:
        reserve = partial(self._context.reserve, self._id, is_open=lambda: self._open)
        if self._context.draining:
            answers = self._already_stored(request)
        else:
            answers = await reserve(request, wait_until)
        while True:
            granted = self._context.publish_evicted(answers)
            full = [i for i, a in enumerate(answers) if a.status is WriteStatus.NO_SPACE]
            if full and granted:
                # Nobody waits for memory while it holds some: two of such writers would wait for
                # each other, and one that never sends would not be cut off.
                for position in full:
                    answers[position] = _ASK_AGAIN
                break
            over = self._context.draining or self._loop.time() >= wait_until
            if not full or over or not self._store.is_held:
                break
            await self._context.wait_for_space(wait_until, request.namespace, len(full))
            if not self._open:  # closed meanwhile: nothing would free what is reserved now
                break
            retried = await reserve(request.subset(full), wait_until)
            for position, answer in zip(full, retried, strict=True):
                answers[position] = answer
        self._count_refused(request, answers, full)
        if any(answer.status is WriteStatus.ALREADY_STORED for answer in answers):
            # The other writer may still wait until the masters have the block. Wait too, or this
            # call would acknowledge a block that no reader can find (design: announcements).
            await self._context.wait_until_announced(wait_until)
        return answers

    def _count_refused(
        self, request: ReserveRequest, answers: Sequence[Reservation], full: Sequence[int]
    ) -> None:
        """Count the blocks that are not stored; `full` are those for which there is no space."""
        self._context.counters["refused_blocks"] += len(full)
        if full and self._writes is not None:
            self._writes.no_space(self.peer, min(request.sizes[at] for at in full), len(full))
        bypassed = sum([answer.status is WriteStatus.BYPASSED for answer in answers])
        self._context.counters["bypassed_blocks"] += bypassed

    def _already_stored(self, request: ReserveRequest) -> list[Reservation]:
        """Answers of a server that will leave: writers go elsewhere at once (design: movers)."""
        namespace, part, digests, *_ = request
        here = [self._store.peek(namespace, part, digest) for digest in digests]
        stored, full = WriteStatus.ALREADY_STORED, WriteStatus.NO_SPACE
        return [Reservation(full if one is None else stored) for one in here]

    def lend(self) -> bool:
        lent = self._store.front.held.lend(self._id)
        self._context.counters["carried_writes"] += not lent
        return lent

    async def seal(
        self, ids: Sequence[int], checksums: Sequence[int], *, visible: bool, deadline: float
    ) -> list[WriteStatus]:
        now = self._loop.time()
        index = self._store.front.index
        sealed_before = index.sealed_bytes
        statuses = self._store.seal_all(self._id, ids, checksums, now)
        self._store.front.cancel_rest(self._id)
        self._context.counters["written_blocks"] += len(statuses)
        self._context.counters["written_bytes"] += index.sealed_bytes - sealed_before
        self._context.on_change()
        self.alone = False
        if visible:
            self.alone = await self._context.wait_until_announced(deadline) is Visibility.ALONE
        return statuses

    async def pin(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        buffer_sizes: Sequence[int],
        *,
        view: bool = False,
        in_place_above: int | None = None,
    ) -> list[Pin]:
        asked = namespace, part, digests, buffer_sizes, view, in_place_above
        pins = self._pin(*asked)
        for on_read in self._extensions.on_read:
            on_read(namespace, part, digests, self.peer.name)
        slow = ReadStatus.NOT_YET
        later = [digest for digest, pin in zip(digests, pins, strict=True) if pin.status is slow]
        mover = self._context.mover
        if later and any(pin.extent is not None for pin in pins):
            mover.promote(namespace, part, later)  # while the reader is busy with the others
        elif later:
            until = self._loop.time() + _PIN_WAIT_S
            has_room = True
            if self._store.front.index.peek(namespace, part, later[0]) is not None:
                await self._context.wait_for_space(until, namespace)  # others have pinned all
            else:
                has_room = await mover.promote_and_wait(namespace, part, later, until)
            if self._open:
                pins = self._pin(*asked)
            if not has_room:
                pins = [_NO_ROOM if pin.status is ReadStatus.NOT_YET else pin for pin in pins]
        return pins

    def _pin(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        buffer_sizes: Sequence[int],
        view: bool = False,
        above: int | None = None,
    ) -> list[Pin]:
        """What is in reach now. Between this and the answer nothing is awaited."""
        now = self._loop.time()
        pins = self._store.pin(
            self._id, namespace, part, digests, now, buffer_sizes, view=view, in_place_above=above
        )
        hits = [pin.extent.size for pin in pins if pin.extent is not None]
        size, missed, counters = sum(hits), 0, self._context.counters
        counters["read_blocks"] += len(hits)
        counters["read_bytes"] += size
        if len(hits) < len(pins):
            later = sum(pin.status is ReadStatus.NOT_YET for pin in pins)
            missed = len(pins) - len(hits) - later
            counters["missed_blocks"] += missed
            self._context.publish()
        if hits or missed:
            last = next((pin for pin in reversed(pins) if pin.extent is not None), None)
            for on_served in self._extensions.on_served:
                on_served(namespace, last, len(hits), size, missed)
        return pins

    def unpin(self, pins: Sequence[Pin]) -> None:
        if self._open:
            self._store.unpin(self._id, pins)
            self._context.space_changed()

    async def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        part: int | None = None,
        checksums: Sequence[int] = (),
    ) -> list[bool]:
        removed = self._store.remove(namespace, digests, part=part, checksums=checksums)
        if any(removed):
            self._context.audit_removed(self.peer, sum(removed), "Remove")
        self._extensions.removed(namespace, digests, part)
        self._context.on_change()
        await self._context.mover.erase()  # it must not be back after a restart
        for pass_on in self._extensions.pass_on:
            await pass_on(namespace, digests, part, checksums)
        await self._context.wait_until_announced(self._loop.time() + _REMOVE_VISIBLE_S)
        return removed

    async def answer(self, request: wire.Message) -> wire.Message:
        if isinstance(request, wire.Remove):
            namespace, digests = wire.unpack_removal(request)
            if request.corrupt and request.part is not None:
                removed = await self.report_corruption(namespace, request.part, digests)
            else:
                removed = await self.remove(namespace, digests, request.part, request.checksums)
            return wire.StatusReply(bytes(removed))
        answered: wire.Message = await self._extensions.handler(type(request))(self.peer, request)
        return answered

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> list[bool]:
        half = namespace_seed(namespace, part)
        corrupt = [False] * len(digests)
        bad: dict[int, dict[bytes, Entry | None]] = {}  # by tier
        for position, digest in enumerate(digests):
            # One at a time: a batch could pin more than a connection may.
            pins = self._pin(namespace, part, [digest], [1 << 62], above=-1)
            try:
                for pin in pins:
                    tier = self._store.front_tier if pin.tier is None else pin.tier
                    entry = self._store.stores[tier].index.blocks(namespace, part).get(digest)
                    seed = block_seed(half, digest)
                    if await _is_corrupt(self._context, pin, seed):
                        corrupt[position] = True
                        bad.setdefault(tier, {})[digest] = entry
            finally:
                self.unpin(pins)
        if bad:
            log.error("blocks are corrupt", server=self._context.server, blocks=sum(corrupt))
            self._context.counters["corrupt_blocks"] += sum(corrupt)
            # Where they were read from only: what another tier has is checked when it is read.
            for tier, found in bad.items():
                store = self._store.stores[tier]
                here = store.index.blocks(namespace, part)
                # Not what a writer has stored anew meanwhile, under the same name.
                gone = [digest for digest, entry in found.items() if here.get(digest) is entry]
                store.remove(namespace, gone, ReadStatus.CORRUPT, part)
            self._context.on_change()
            await self._context.wait_until_announced(self._loop.time() + _REMOVE_VISIBLE_S)
        return corrupt

    def device_tier(self, tier: int) -> DeviceAddressable:
        return cast(DeviceAddressable, self._context.tiers[tier])

    def views(self, held: Sequence[Reservation | Pin]) -> list[memoryview]:
        view = self._context.memory.view
        return [view(of.offset, of.size) for one in held if (of := one.extent) is not None]

    def close(self, *, writer_may_be_alive: bool = False) -> bool:
        if not self._open:
            return False
        self._open = False
        front = self._store.front
        before = front.held.quarantined_bytes
        quarantined = self._store.drop_owner(self._id, writer_may_be_alive=writer_may_be_alive)
        self._held.quarantined_bytes = front.held.quarantined_bytes - before
        if not quarantined:  # else it counts as connected, until its client has disconnected
            self._context.clients.disconnected(self._held)
        else:
            log.warning(
                "memory is in quarantine",
                why="its writer was given up and may still write into it, until it disconnects",
                client=self.peer.name,
                transport=self.peer.transport,
                quarantined_bytes=front.held.quarantined_bytes,
                limit=front.held.limits.lent.total,
            )
        self._context.on_change()
        return quarantined

    def writer_exited(self) -> None:
        self._context.clients.disconnected(self._held)
        self._store.front.writer_exited(self._id)
        self._context.on_change()


async def _is_corrupt(context: ServerContext, pin: Pin, seed: int) -> bool:
    """Whether a pinned block has other bytes than its writer had. False where its tier cannot be
    read, and of what is not there."""
    if (extent := pin.extent) is None:
        return False
    if pin.tier is None:
        data = context.memory.view(extent.offset, extent.size)
        return await checksum_in_steps([data], seed) != pin.checksum
    got = await context.mover.checksum_in(pin.tier, extent, seed)
    return got is not None and got != pin.checksum
