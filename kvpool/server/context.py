"""What the connections of one server share."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvpool import logs
from kvpool.errors import Overloaded
from kvpool.guard import Guard, Who, make_guard
from kvpool.protocols import Addressable, Peer, ReserveRequest, Tier
from kvpool.server.announcer import Announcer
from kvpool.server.compactor import Compactor
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.clearing import MAKING_ROOM
from kvpool.server.state.connection_shares import ConnectionShares
from kvpool.server.state.entry import Entry
from kvpool.server.tiers import mover_for
from kvpool.supervision import Supervisor
from kvpool.tenant_names import marker_of
from kvpool.types import ClientUsage, Reservation, WriteStatus

log = logs.get("kvpool.server")

#: While a call waits for space, connections are looked at so often.
SAMPLE_S: Final = 0.25
#: What a write evicts waits so long for what it stores, if the bytes of that are on their way: one
#: message to each master instead of two, and the caller waits for both.
_PUBLISH_SOON_S: Final = 0.002


class Holder(Protocol):
    """A connection, as far as the others on this server are concerned."""

    def cut_if_stalled(self, now: float) -> None:
        """Others wait: end it if it holds memory and does nothing."""

    def usage(self, now: float) -> ClientUsage | None:
        """The memory that it holds."""

    @property
    def peer(self) -> Peer:
        """Its client."""


class ServerContext:
    """The index of the blocks, their memory, and the two things that a call may wait for.

    Connections change `store` and then call `on_change`, `publish` or `publish_soon`, without an
    `await` between the two. They wait for masters (`wait_until_announced`) and for memory
    (`wait_for_space`), both with a deadline. The server itself only makes a context and fills
    `announcers`.
    """

    def __init__(
        self,
        server: str,
        store: Blocks,
        tiers: Sequence[Tier],
        connections_max: int,
        tasks: Supervisor,
        epoch: int = 0,
        guard: Guard | None = None,
    ) -> None:
        self.server = server
        self.epoch = epoch  # random for each start of the process
        self.store = store
        self.tiers = tiers
        memory = tiers[store.front_tier]
        assert isinstance(memory, Addressable)
        #: The memory that clients write into and read out of.
        self.memory: Addressable = memory
        #: The long-lived tasks of this server.
        self.tasks = tasks
        self.mover = mover_for(tiers)(store, tiers, self.on_change, self.tasks)
        self.compactor = Compactor(store.front, memory, self.on_change)
        self.announcers: list[Announcer] = []
        self.counters: Counter[str] = Counter()
        #: In the order in which they came: that of a set of objects differs from run to run.
        self.connections: dict[Holder, None] = {}
        self.shares = ConnectionShares(connections_max)
        for one in store.stores:
            one.extents.on_rejected_victim = self._policy_is_wrong
        #: This server will leave: it takes no blocks any more (design: movers).
        self.draining = False
        self.guard = guard or make_guard()
        self._waiting_for_space: dict[asyncio.Future[None], float] = {}  # until when
        self._sampled_at = 0.0

    def _policy_is_wrong(self, victim: Entry) -> None:
        """Count it, and log it once: such a policy may be wrong in every reservation."""
        if not self.counters["rejected_victims"]:
            key = victim.digest.hex()[:12]
            log.error("policy chose a block that may not be evicted", block=key)
        self.counters["rejected_victims"] += 1

    def audit_removed(self, peer: Peer, blocks: int, request: str) -> None:
        """This client has removed so many blocks."""
        who = Who(peer.tenant, peer.name, peer.address)
        self.guard.removed(asyncio.get_running_loop().time(), who, request, blocks)

    def admit(self, peer: Peer, now: float) -> None:
        """Make sure that this client may have one more connection; raises Overloaded if it may not.

        An idle one may end for it: of the client that has most, the one that is idle for the
        longest time (design: bounds).
        """
        if problem := self.shares.problem(_sharer(peer)):
            self.counters["refused_connections"] += 1
            raise Overloaded(problem)
        if not self.shares.full:
            return
        idle = []
        for connection in self.connections:
            link = connection.peer.link
            since = link.idle_since() if link is not None else None
            if link is not None and since is not None:
                idle.append((self.shares.held(_sharer(connection.peer)), now - since, link))
        if not idle:
            self.counters["refused_connections"] += 1
            raise Overloaded(
                f"all {self.shares.limit} connections are at work (server.connections_max)"
            )
        max(idle, key=lambda one: one[:2])[2].retire()
        self.counters["retired_connections"] += 1

    def connected(self, connection: Holder) -> None:
        self.connections[connection] = None
        self.shares.opened(_sharer(connection.peer))

    def disconnected(self, connection: Holder) -> None:
        """Idempotent."""
        if connection in self.connections:
            del self.connections[connection]
            self.shares.closed(_sharer(connection.peer))

    def publish(self) -> None:
        """Queue the store's changes for every master, and wake the mover."""
        changes = self.store.take_changes()
        log = self.store.change_log
        missed = log.missed.take() if log.missed.blocks else []
        held = self.store.fingerprint if self.announcers else None
        for announcer in self.announcers:
            announcer.enqueue(changes, held)
            announcer.correct(missed)
        self.mover.wake()

    def publish_soon(self) -> None:
        """`publish` after `_PUBLISH_SOON_S`, unless somebody does it before."""

        def publish_rest() -> None:
            if self.store.change_log.changes:
                self.publish()

        if self.store.change_log.changes:
            asyncio.get_running_loop().call_later(_PUBLISH_SOON_S, publish_rest)

    def on_change(self) -> None:
        """The store has changed: `publish`, and let writers try again that wait for space."""
        self.publish()
        self.space_changed()

    async def reserve(
        self,
        owner: int,
        request: ReserveRequest,
        wait_until: float,
        *,
        is_open: Callable[[], bool] = lambda: True,
    ) -> list[Reservation]:
        """As `Blocks.reserve`, in steps in which room is made; NO_SPACE at `wait_until`, and
        when the owner is not open any more: nothing would free what is reserved then."""
        now = asyncio.get_running_loop().time
        answers = self.store.reserve(owner, request, now())
        try:
            while rest := [i for i, answer in enumerate(answers) if answer is MAKING_ROOM]:
                self.publish()
                if not await self.compactor.make_room(owner, wait_until):
                    await self.wait_for_space(wait_until)
                retried = [Reservation(WriteStatus.NO_SPACE)] * len(rest)
                if is_open() and now() < wait_until:
                    retried = self.store.reserve(owner, request.subset(rest), now())
                for position, answer in zip(rest, retried, strict=True):
                    answers[position] = answer
        finally:
            self.compactor.stop(owner)
        return answers

    async def wait_until_announced(self, deadline: float) -> bool:
        """Return when every registered master has applied what was published (True), or at
        `deadline`."""
        waits = [announcer.flushed() for announcer in self.announcers if announcer.registered]
        if not waits:
            return True
        timeout = max(0.0, deadline - asyncio.get_running_loop().time())
        _, late = await asyncio.wait(waits, timeout=timeout)
        return not late

    def space_changed(self) -> None:
        """An extent was freed or became evictable: end every `wait_for_space`.

        In the order in which the callers must give up. They run in that order, too, so one that
        asks for everything and would wait for a minute comes after the others (design: budgets).
        """
        waiting, self._waiting_for_space = self._waiting_for_space, {}
        for future in sorted(waiting, key=waiting.__getitem__):
            if not future.done():
                future.set_result(None)

    def clients(self, now: float) -> list[ClientUsage]:
        """What each client holds at the moment, over all of its connections; the largest first."""
        clients: dict[tuple[str, str], ClientUsage] = {}
        for connection in self.connections:
            one = connection.usage(now)
            if one is not None:
                other = clients.get((one.name, one.transport))
                clients[one.name, one.transport] = one if other is None else _sum(one, other)

        def held(client: ClientUsage) -> int:
            return client.pinned_bytes + client.reserved_bytes + client.quarantined_bytes

        return sorted(clients.values(), key=held, reverse=True)

    def _cut_stalled(self, now: float) -> None:
        """Others wait: end connections that hold memory and do nothing (design: budgets)."""
        if now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            for connection in list(self.connections):
                connection.cut_if_stalled(now)

    async def wait_for_space(self, deadline: float) -> None:
        """Return at the next `space_changed`, at `deadline`, or after SAMPLE_S.

        A caller that needs more space or pins calls it again; each call looks for connections that
        hold some and are stalled (design: budgets).
        """
        loop = asyncio.get_running_loop()
        self._cut_stalled(loop.time())
        future: asyncio.Future[None] = loop.create_future()
        self._waiting_for_space[future] = deadline
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, loop.time() + SAMPLE_S)):
                    await future
        finally:  # the deadline came first, or the writer has gone
            self._waiting_for_space.pop(future, None)


def _sharer(peer: Peer) -> str:
    """Who shares connections with the others: a client, or a tenant with all of its clients, which
    could have as many names as they like."""
    return marker_of(peer.tenant) or peer.name


def _sum(one: ClientUsage, other: ClientUsage) -> ClientUsage:
    return ClientUsage(
        one.name,
        one.transport,
        one.connections + other.connections,
        one.pinned_bytes + other.pinned_bytes,
        max(one.oldest_pin_s, other.oldest_pin_s),
        one.reserved_bytes + other.reserved_bytes,
        one.quarantined_bytes + other.quarantined_bytes,
    )
