"""The block server: one store, the transports that serve it, and the masters that are told.

Everything that decides is in `core.store`; this file waits for space, watches connections, and
carries the store's changes to every master in order and without a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from kvpool import logs
from kvpool.checksum import block_seed, hasher, namespace_seed
from kvpool.config import ServerConfig, check_bind
from kvpool.errors import ConfigError, KvpoolError, Overloaded, Unavailable
from kvpool.protocols import (
    Addressable,
    Connection,
    Link,
    Listener,
    Network,
    Peer,
    ReserveRequest,
    Tier,
    Transport,
)
from kvpool.protocols.policy import Policy
from kvpool.runtime import Host, this_host
from kvpool.server.state.entry import Change, Entry
from kvpool.server.state.store import Store
from kvpool.server.state.tiered_store import Stack
from kvpool.server.tier_mover import Mover
from kvpool.types import (
    Cluster,
    Extent,
    Namespace,
    Pin,
    ReadStatus,
    Reservation,
    WriteStatus,
)
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: Changes that may wait for one master; beyond it, an inventory is cheaper and bounded.
_PENDING_MAX = 100_000
#: News of blocks that have moved or come, for which nobody waits, go to a master at most so often,
#: and so together: a message costs both of us more than what it says.
_NEWS_GAP_S = 0.005
#: Hashed at once when a reader suspects a block.
_HASH_STEP = 1 << 20
#: A removal waits this long for the masters to hear of it, then it is answered anyway.
_REMOVE_VISIBLE_S = 1.0
#: A reader of blocks in a slow tier hears of the server after this long, whatever has come: it
#: must never look dead, however slow its disk is.
_STAGE_S = 0.05


class BlockServer:
    """One block server. `start`, then `close`; it is a `BlockStore` to its transports."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        cluster: Cluster,
        network: Network,
        transports: Mapping[str, Transport],
        tiers: Sequence[Tier],
        stores: Sequence[Store] = (),
        policy: Policy[Entry] | None = None,
        host: Host | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._config = config
        self.host = host or this_host()
        self._network = network
        self._transports = transports
        self._chance = chance or random.SystemRandom()
        self.cluster = cluster
        self.server = config.id or f"{self.host.name}-{self._chance.getrandbits(24):06x}"
        self.epoch = self._chance.getrandbits(63)
        self.tiers = list(tiers)
        self.stack = Stack(
            stores or _books(tiers, config.alignment, policy),
            reached=_reached(tiers),
            promote_after=config.promote_after,
        )
        memory = self.tiers[self.stack.reached]
        assert isinstance(memory, Addressable)
        self.memory: Addressable = memory  # the same as `tier`, asked once: it is in the hot path
        self.counters: Counter[str] = Counter()
        self._listeners: list[Listener] = []
        self._announcers: list[_Announcer] = []
        self._space: list[asyncio.Future[None]] = []
        self._connections = 0
        self._next_owner = 0
        self.mover = Mover(self.stack, self.tiers, self.changed)

    def __repr__(self) -> str:
        return f"<BlockServer {self.server} {self.stack!r}>"

    @property
    def tier(self) -> Tier:
        """The memory that clients write into and read out of."""
        return self.tiers[self.stack.reached]

    @property
    def store(self) -> Store:
        """The books of that memory."""
        return self.stack.top

    @property
    def addresses(self) -> list[str]:
        """Where clients reach this server, one for each transport."""
        return [listener.address for listener in self._listeners]

    @property
    def known(self) -> bool:
        """Whether a master knows this server and all that it has announced."""
        return any(announcer.synced for announcer in self._announcers)

    async def start(self) -> None:
        """Find what the tiers still hold, listen, and begin to tell the masters.

        Raises ConfigError, or Unavailable for a tier that cannot be read; then nothing is left
        open.
        """
        for address in self._config.listen:
            check_scheme(address, self._transports)
            transport = self._transports[address.partition("://")[0]]
            if not transport.same_host:
                asked = bool(self.cluster.secret) and transport.authenticated
                check_bind(address, self._config.insecure or asked)
        try:
            await self.mover.recover()
            self.mover.start()
            for address in self._config.listen:
                scheme, _, rest = address.partition("://")
                listener = await self._transports[scheme].listen(address if rest else "", self)
                self._listeners.append(listener)
            loop = asyncio.get_running_loop()
            for master in self._config.masters:
                announcer = _Announcer(self, self._network.connect(master), self._config)
                announcer.task = loop.create_task(announcer.run(), name=f"announce to {master}")
                self._announcers.append(announcer)
        except BaseException:
            await self.close()
            raise
        log.info("server is up", server=self.server, addresses=self.addresses)

    async def registered(self, deadline: float) -> None:
        """Wait until one master knows this server. Raises what stands in the way.

        ConfigError when another living server has this id, MasterLost's cause when none answers.
        """
        while not self.known:
            if asyncio.get_running_loop().time() >= deadline:
                raise self._announcers[0].problem or Unavailable("no master has answered yet")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Say goodbye, end every connection, free the memory. Idempotent."""
        announcers, self._announcers = self._announcers, []
        for announcer in announcers:
            await announcer.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()
        await self.mover.close()
        for tier in self.tiers:
            tier.close()

    # --- for the transports -------------------------------------------------------------

    def connect(self, peer: Peer) -> Connection:
        if self._connections >= self._config.connections_max:
            raise Overloaded(f"{self._connections} clients are connected, the limit")
        self._connections += 1
        self._next_owner += 1
        return _Connection(self, self._next_owner)

    # --- for its connections --------------------------------------------------------------

    def publish(self) -> int:
        """Hand the store's news to the announcers; returns their position in the stream."""
        changes = self.stack.take_changes()
        for announcer in self._announcers:
            announcer.add(changes)
        self.mover.wake()
        return len(changes)

    def changed(self) -> None:
        """The books have changed: the masters must know, and whoever waits for room."""
        self.publish()
        self.space_changed()

    async def visible(self, deadline: float) -> None:
        """Wait until every master that is there has heard all that was published."""
        waits = [a.heard_all() for a in self._announcers if a.synced]
        if waits:
            await asyncio.wait(
                waits, timeout=max(0.0, deadline - asyncio.get_running_loop().time())
            )

    def space_changed(self) -> None:
        """Something was freed or became evictable: whoever waits for space may try again."""
        waiting, self._space = self._space, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def space(self, deadline: float) -> None:
        """Wait for `space_changed`, at most until `deadline`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._space.append(future)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await future
        if future in self._space:  # nobody told us in time
            self._space.remove(future)

    def hinted(self, hints: Sequence[wire.WireHint]) -> None:
        """What clients say of their sessions."""
        now = asyncio.get_running_loop().time()
        for session, age_s, resume_in in hints:
            if resume_in is None:
                self.stack.end(session, now)
            else:
                self.stack.resume(session, resume_in, now, age_s=age_s)

    def disconnected(self) -> None:
        self._connections -= 1

    def heartbeat(self, now: float, hints_heard: int = 0, sequence: int = 0) -> wire.Heartbeat:
        top, base = self.stack.top, self.stack.bottom
        return wire.Heartbeat(
            server=self.server,
            epoch=self.epoch,
            free=base.allocator.free,
            used=base.allocator.allocated,
            blocks=self.stack.stored,
            pins=top.pins,
            reservations=top.reservations,
            rss=self.host.resident(),
            victim_age_s=base.policy.victim_age(now),
            counters={
                **self.counters,
                "connections": self._connections,
                "evicted_blocks": self.stack.evicted,
                "evicted_bytes": self.stack.evicted_bytes,
                "quarantined": top.quarantined,
                **base.hint_counters,
            },
            tiers=self.mover.usage(now),
            hints_heard=hints_heard,
            sequence=sequence,
        )


class _Connection:
    """One client connection in the server's books."""

    def __init__(self, server: BlockServer, owner: int) -> None:
        self._server = server
        self._stack = server.stack
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._open = True

    async def reserve(self, request: ReserveRequest, *, deadline: float) -> list[Reservation]:
        now = self._loop.time()
        # Half of the caller's time at most: a refusal must still reach it.
        patience = now + (deadline - now) / 2
        answers = self._stack.reserve(self._owner, request, now)
        while True:
            self._server.publish()
            full = [i for i, a in enumerate(answers) if a.status is WriteStatus.NO_SPACE]
            if full and self._stack.has_room_below and any(a.extent for a in answers):
                # It waits for itself: what it has reserved must be sealed before it can go down.
                for position in full:
                    answers[position] = Reservation(WriteStatus.NOT_YET)
                break
            if not full or self._loop.time() >= patience or not self._open:
                break
            await self._server.space(patience)
            retried = self._stack.reserve(self._owner, request.subset(full), self._loop.time())
            for position, answer in zip(full, retried, strict=True):
                answers[position] = answer
        self._server.counters["refused_blocks"] += len(full)
        bypassed = sum(answer.status is WriteStatus.BYPASSED for answer in answers)
        self._server.counters["bypassed_blocks"] += bypassed
        if any(answer.status is WriteStatus.ALREADY_STORED for answer in answers):
            # It may be so new that no master has heard of it: then its writer still waits, and
            # so must we, or we would acknowledge what cannot be found.
            await self._server.visible(patience)
        return answers

    async def seal(
        self, ids: Sequence[int], checksums: Sequence[int], *, visible: bool, deadline: float
    ) -> list[WriteStatus]:
        now = self._loop.time()
        statuses = [
            self._stack.seal(self._owner, id, sum_, now)
            for id, sum_ in zip(ids, checksums, strict=True)
        ]
        self._stack.top.cancel_rest(self._owner)
        self._server.counters["written_blocks"] += len(statuses)
        self._server.changed()
        if visible:
            await self._server.visible(deadline)
        return statuses

    async def pin(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], buffer_sizes: Sequence[int]
    ) -> list[Pin]:
        pins = self._pin(namespace, part, digests, buffer_sizes)
        later = [
            digest
            for digest, pin in zip(digests, pins, strict=True)
            if pin.status is ReadStatus.NOT_YET
        ]
        mover = self._server.mover
        if later and any(pin.extent is not None for pin in pins):
            mover.begin(namespace, part, later)  # while the reader is busy with the others
        elif later:
            await mover.stage(namespace, part, later, self._loop.time() + _STAGE_S)
            if self._open:
                pins = self._pin(namespace, part, digests, buffer_sizes)
        return pins

    def _pin(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], buffer_sizes: Sequence[int]
    ) -> list[Pin]:
        """What is in reach now. Between this and the answer nothing is awaited."""
        pins = self._stack.pin(
            self._owner, namespace, part, digests, self._loop.time(), buffer_sizes
        )
        hits = [pin.extent.size for pin in pins if pin.extent is not None]
        counters = self._server.counters
        counters["read_blocks"] += len(hits)
        counters["read_bytes"] += sum(hits)
        if len(hits) < len(pins):
            later = sum(pin.status is ReadStatus.NOT_YET for pin in pins)
            counters["missed_blocks"] += len(pins) - len(hits) - later
            self._server.publish()
        return pins

    def unpin(self, pins: Sequence[Pin]) -> None:
        if self._open:
            for pin in pins:
                if pin.status is ReadStatus.HIT:
                    self._stack.top.unpin(self._owner, pin.id)
            self._server.space_changed()

    async def remove(self, namespace: Namespace, digests: Sequence[bytes]) -> list[bool]:
        removed = self._stack.remove(namespace, digests)
        self._server.changed()
        await self._server.mover.erase()  # it must not be back after a restart
        await self._server.visible(self._loop.time() + _REMOVE_VISIBLE_S)
        return removed

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> list[bool]:
        pins = self._pin(namespace, part, digests, [1 << 62] * len(digests))
        half = namespace_seed(namespace, part)
        rotten = [False] * len(digests)
        try:
            for position, pin in enumerate(pins):
                if pin.extent is not None:
                    seed = block_seed(half, digests[position])
                    rotten[position] = pin.checksum != await _hashed(self.view(pin.extent), seed)
        finally:
            self.unpin(pins)
        bad = [digest for digest, is_bad in zip(digests, rotten, strict=True) if is_bad]
        if bad:
            log.error("blocks are corrupt", server=self._server.server, blocks=len(bad))
            self._server.counters["corrupt_blocks"] += len(bad)
            # In this memory only: what another tier has is checked when it is read from there.
            self._stack.top.remove(namespace, bad, ReadStatus.CORRUPT, part)
            self._server.changed()
            await self._server.visible(self._loop.time() + _REMOVE_VISIBLE_S)
        return rotten

    def view(self, extent: Extent) -> memoryview:
        return self._server.memory.view(extent.offset, extent.size)

    def close(self, *, writer_may_be_alive: bool = False) -> bool:
        if not self._open:
            return False
        self._open = False
        self._server.disconnected()
        quarantined = self._stack.top.drop_owner(
            self._owner, writer_may_be_alive=writer_may_be_alive
        )
        self._server.changed()
        return quarantined

    def writer_exited(self) -> None:
        self._stack.top.writer_exited(self._owner)
        self._server.changed()


class _Announcer:
    """Tells one master what this server has: in order, numbered, resynchronised on a gap.

    One request is in flight at a time; what happens meanwhile makes the next batch. While the
    master is away nothing is kept: it gets the inventory when it is back.
    """

    def __init__(self, server: BlockServer, link: Link, config: ServerConfig) -> None:
        self._server = server
        self._link = link
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Change] = deque()
        self._wake = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._urgent = asyncio.Event()  # somebody waits, or a block is gone
        self._told = 0.0  # when news were last sent
        self._added = 0  # changes ever taken in
        self._heard = 0  # of these, how many the master has acknowledged
        self._sequence = 0
        self._next_heartbeat = 0.0
        self._hints_heard = 0
        self.synced = False
        self.problem: KvpoolError | None = None
        self.task: asyncio.Task[None] | None = None

    def add(self, changes: Sequence[Change]) -> None:
        """Queue news, unless an inventory is due anyway."""
        if not self.synced or not changes:
            return
        self._added += len(changes)
        self._pending.extend(changes)
        if not all(change.status.hit for change in changes):
            self._urgent.set()
        if len(self._pending) > _PENDING_MAX:
            self._lose_sync()
        self._wake.set()

    def heard_all(self) -> asyncio.Future[None]:
        """Done when the master has acknowledged everything added so far, or is lost."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._heard >= self._added or not self.synced:
            future.set_result(None)
        else:
            self._waiting.append((self._added, future))
            self._urgent.set()
        return future

    async def run(self) -> None:
        """Register, send the inventory, then news and heartbeats, for ever."""
        while True:
            try:
                if not self.synced:
                    await self._register()
                    await self._send_inventory()
                await self._send_news()
                if self._loop.time() >= self._next_heartbeat:
                    await self._send_heartbeat()
                self.problem = None
                await self._wait()
            except Unavailable as error:
                self._failed(error)
                await asyncio.sleep(self._config.heartbeat_s / 10)
            except KvpoolError as error:
                self._failed(error)
                await asyncio.sleep(self._config.heartbeat_s)

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        with contextlib.suppress(KvpoolError):
            leave = wire.Leave(self._server.server, self._server.epoch)
            await self._ask(leave, wire.HeartbeatReply, within_s=0.2)
        self._link.close()
        self._lose_sync()

    async def _ask(
        self, message: wire.Message, answer: type[wire.M], within_s: float | None = None
    ) -> wire.M:
        deadline = self._loop.time() + (within_s or self._config.heartbeat_s)
        type, body = await self._link.request(*wire.encode(message), deadline=deadline)
        return wire.decode_answer(answer, type, body)

    async def _register(self) -> None:
        server = self._server
        registered = await self._ask(
            wire.Register(
                server.server,
                server.epoch,
                server.host.id,
                server.addresses,
                [tier.name for tier in server.tiers],
                server.stack.bottom.allocator.capacity,
            ),
            wire.Registered,
        )
        if not registered.accepted:
            raise ConfigError(
                f"server id {server.server!r} belongs to another living server; "
                "choose another with --id"
            )
        self._hints_heard = registered.hints_heard

    async def _send_inventory(self) -> None:
        """All there is, in pieces; what changes meanwhile follows as news."""
        self._pending.clear()
        self._added = self._heard = 0
        self.synced = True
        self._sequence += 1
        stack = self._server.stack
        entries: list[Entry | Change] = [*stack.inventory()]
        # And why others are gone: the master may still have them from before it lost touch.
        entries += stack.departures()
        step = wire.ANNOUNCED_BLOCKS_MAX
        starts = range(0, max(1, len(entries)), step)
        for piece, start in enumerate(starts):
            changes = [
                change
                for entry in entries[start : start + step]
                if (change := _as_change(stack, entry)) is not None
            ]
            last = start == starts[-1]
            applied = await self._ask(
                wire.Inventory(
                    self._server.server,
                    self._server.epoch,
                    self._sequence,
                    piece,
                    last,
                    _grouped(changes),
                ),
                wire.Announced,
            )
            if not applied.applied:
                raise Unavailable("the master does not know this server any more")
            if self._loop.time() >= self._next_heartbeat:
                await self._send_heartbeat()
        await self._send_heartbeat()
        log.info("master knows all blocks", master=self._link.address, blocks=len(entries))

    async def _send_news(self) -> None:
        while await self._more_news():
            count = min(len(self._pending), wire.ANNOUNCED_BLOCKS_MAX)
            batch = [self._pending.popleft() for _ in range(count)]
            self._sequence += 1
            announced = await self._ask(
                wire.Announce(
                    self._server.server, self._server.epoch, self._sequence, _grouped(batch)
                ),
                wire.Announced,
            )
            if not announced.applied:
                raise Unavailable("the master missed an announcement")
            self._heard += count
            self._release(self._heard)
            if self._loop.time() >= self._next_heartbeat:
                await self._send_heartbeat()

    async def _more_news(self) -> bool:
        """Whether there are any, when it is time for them."""
        if self._pending and self._loop.time() < self._told + _NEWS_GAP_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._told + _NEWS_GAP_S):
                    await self._urgent.wait()
        self._told = self._loop.time()
        return bool(self._pending)

    async def _send_heartbeat(self) -> None:
        now = self._loop.time()
        self._next_heartbeat = now + self._config.heartbeat_s
        heartbeat = self._server.heartbeat(now, self._hints_heard, self._sequence)
        known = await self._ask(heartbeat, wire.HeartbeatReply)
        if not known.known:
            raise Unavailable("the master has restarted")
        self._hints_heard = known.hints_heard
        self._server.hinted(known.hints)
        if len(known.hints) == wire.HINTS_MAX:  # there may be more
            self._next_heartbeat = now

    async def _wait(self) -> None:
        """Until there is news or a heartbeat is due."""
        self._wake.clear()
        if self._pending or not self.synced:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_heartbeat):
                await self._wake.wait()

    def _failed(self, error: KvpoolError) -> None:
        if str(error) != str(self.problem):
            log.warning("master cannot be told", master=self._link.address, why=str(error))
        self.problem = error
        self._lose_sync()

    def _lose_sync(self) -> None:
        self.synced = False
        self._pending.clear()
        self._release(self._added)

    def _release(self, heard: int) -> None:
        waiting, self._waiting = self._waiting, []
        for position, future in waiting:
            if position > heard:
                self._waiting.append((position, future))
            elif not future.done():
                future.set_result(None)
        if not self._waiting and not self._pending:
            self._urgent.clear()


async def _hashed(data: memoryview, seed: int) -> int:
    """The checksum of a block, in steps that leave the loop to others in between."""
    digest = hasher(seed)
    for start in range(0, len(data), _HASH_STEP):
        digest.update(data[start : start + _HASH_STEP])
        await asyncio.sleep(0)
    return digest.intdigest()


def _as_change(stack: Stack, entry: Entry | Change) -> Change | None:
    """How an inventory tells of a block; not at all if it has left since the inventory began."""
    if isinstance(entry, Change):
        return entry
    tier = stack.place(entry)
    if tier is None:
        return None
    return Change(entry.index.namespace, entry.index.part, entry.digest, ReadStatus.HIT, tier)


def _grouped(changes: Sequence[Change]) -> list[wire.BlockChanges]:
    """Consecutive changes of one kind become one message; the order is kept."""
    groups: list[wire.BlockChanges] = []
    first = 0
    for position in range(1, len(changes) + 1):
        head = changes[first]
        if position < len(changes):
            change = changes[position]
            if (
                change.status is head.status
                and change.part == head.part
                and change.tier == head.tier
                and change.namespace == head.namespace
                and len(change.digest) == len(head.digest)
            ):
                continue
        packed = b"".join([change.digest for change in changes[first:position]])
        namespace, part, digest, status, tier = head
        groups.append(
            wire.BlockChanges(
                namespace.name, namespace.parts, len(digest), packed, part, tier, status
            )
        )
        first = position
    return groups


def check_scheme(address: str, transports: Mapping[str, Transport]) -> None:
    """Raises ConfigError for an address of a transport that is not there."""
    scheme, found, _ = address.partition("://")
    if not found or scheme not in transports:
        raise ConfigError(
            f"address {address!r}: expected one of {', '.join(f'{s}://' for s in transports)}"
        )


def _reached(tiers: Sequence[Tier]) -> int:
    """Which tier clients write into and read out of: the first whose memory can be looked at."""
    return next(n for n, tier in enumerate(tiers) if isinstance(tier, Addressable))


def _books(tiers: Sequence[Tier], alignment: int, policy: Policy[Entry] | None) -> list[Store]:
    """A store for each tier, their extents rounded alike; the lowest follows the policy."""
    alignment = max(alignment, *(tier.alignment for tier in tiers))
    stores = [Store(tier.capacity, alignment=alignment) for tier in tiers[:-1]]
    return [*stores, Store(tiers[-1].capacity, alignment=alignment, policy=policy)]
