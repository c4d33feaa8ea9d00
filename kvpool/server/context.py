"""What the connections of one server share."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

from kvpool import logs
from kvpool.guard import Guard, Who, make_guard
from kvpool.protocols import Addressable, Peer, ReserveRequest, Tier
from kvpool.server import clients
from kvpool.server.announcer import Announcer
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.server.state.extents import MAKING_ROOM
from kvpool.server.tiers import mover_for
from kvpool.supervision import Supervisor
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace, Reservation, WriteStatus

log = logs.get("kvpool.server")

#: What a write evicts waits so long for what it stores, if the bytes of that are on their way: one
#: message to each master instead of two.
_PUBLISH_SOON_S: Final = 0.002
#: Callers that look at changed space in one turn of the loop: blocks that they need, and 16 more
#: for each of them, as it costs as much. And the pause before the next ones.
_WOKEN_BLOCKS: Final = 80
_WAKE_S: Final = 0.001


class Visibility(enum.IntEnum):
    """Whether masters know of a change; ALONE: all say that no other server has its blocks."""

    LATE, VISIBLE, ALONE = range(3)


class RoomMaker:
    """What a `reserve` does that answered MAKING_ROOM. Here blocks only leave, and none moves."""

    async def make_room(self, owner: int, deadline: float) -> bool:
        """One step; then call `reserve` again. False: wait until the space has changed."""
        await asyncio.sleep(0)  # `reserve` has worked long enough: others have their turn
        return True

    def stop(self, owner: int) -> None:
        """This owner needs no more room."""


class ServerContext:
    """The index of the blocks, their memory, and the two things that a call may wait for.

    Connections change `store` and then call `on_change`, `publish` or `publish_evicted`, without an
    `await` between the two. They wait for masters (`wait_until_announced`) and for memory
    (`wait_for_space`), both with a deadline.
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
        store.front.extents.in_steps = True
        self.room_maker = RoomMaker()
        self.announcers: list[Announcer] = []
        self.counters: Counter[str] = Counter()
        self.clients = clients.ConnectedClients(connections_max, self.counters)
        for one in store.stores:
            one.extents.on_rejected_victim = self._policy_is_wrong
        #: This server will leave: it takes no blocks any more (design: movers).
        self.draining = False
        self.guard = guard or make_guard()
        #: Until when, for how many blocks, of which tenant; in `_to_wake` by it.
        self._waiting_for_space: dict[asyncio.Future[None], tuple[float, int, str]] = {}
        self._to_wake: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    def _policy_is_wrong(self, victim: Entry) -> None:
        """Count it, and log it once: such a policy may be wrong in every reservation."""
        if not self.counters["rejected_victims"]:
            log.error("policy chose a block that may not go", block=victim.digest.hex()[:12])
        self.counters["rejected_victims"] += 1

    def audit_removed(self, peer: Peer, blocks: int, request: str) -> None:
        """This client has removed so many blocks."""
        who = Who(peer.tenant, peer.name, peer.address)
        self.guard.removed(asyncio.get_running_loop().time(), who, request, blocks)

    def publish(self) -> None:
        """Queue the store's changes for every master, and wake the mover."""
        log = self.store.change_log
        changes, missed = log.take(), log.missed.take() if log.missed.blocks else None
        held = self.store.fingerprint if self.announcers else None
        for announcer in self.announcers:
            announcer.enqueue(changes, held)
            if missed:
                announcer.correct(missed)
        if self.mover.moves:
            self.mover.wake()

    def publish_evicted(self, answers: Sequence[Reservation]) -> bool:
        """Publish what made room for these; whether one of them is granted. Then it waits for what
        is sealed when the bytes are there, `_PUBLISH_SOON_S` at most."""

        def publish_rest() -> None:
            if self.store.change_log.changes:
                self.publish()

        granted = any(answer.extent for answer in answers)
        if not granted:
            self.publish()
            return False
        if self.mover.moves:
            self.mover.wake()
        if self.store.change_log.changes:
            asyncio.get_running_loop().call_later(_PUBLISH_SOON_S, publish_rest)
        return True

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
                if not await self.room_maker.make_room(owner, wait_until):
                    await self.wait_for_space(wait_until, request.namespace, len(rest))
                retried = [Reservation(WriteStatus.NO_SPACE)] * len(rest)
                if is_open() and now() < wait_until:
                    retried = self.store.reserve(owner, request.subset(rest), now())
                for position, answer in zip(rest, retried, strict=True):
                    answers[position] = answer
        finally:
            self.room_maker.stop(owner)
        return answers

    async def wait_until_announced(self, deadline: float) -> Visibility:
        """Return when every registered master has applied what was published, or at `deadline`."""
        waits = [announcer.flushed() for announcer in self.announcers if announcer.registered]
        if not waits:
            return Visibility.VISIBLE
        timeout = max(0.0, deadline - asyncio.get_running_loop().time())
        done, late = await asyncio.wait(waits, timeout=timeout)
        if late:
            return Visibility.LATE
        alone = len(done) == len(self.announcers) and all(one.result() for one in done)
        return Visibility.ALONE if alone else Visibility.VISIBLE

    def space_changed(self) -> None:
        """An extent was freed or became evictable: end every `wait_for_space`, tenants in turns.

        Who must give up first is first (design: budgets). Where many wait, most try again in vain:
        some at a time, and all once before any twice.
        """
        waiting, self._waiting_for_space = self._waiting_for_space, {}
        idle = not self._to_wake
        for future, (_, blocks, tenant) in sorted(waiting.items(), key=itemgetter(1)):
            self._to_wake.setdefault(tenant, deque()).append((future, blocks))
        if idle:
            self._wake_some()

    def _wake_some(self) -> None:
        left = _WOKEN_BLOCKS
        while self._to_wake and left > 0:
            line = self._to_wake.pop(tenant := next(iter(self._to_wake)))
            future, blocks = line.popleft()
            self._to_wake |= {tenant: line} if line else {}  # the others first
            if not future.done():
                future.set_result(None)
                left -= 16 + blocks
        if self._to_wake:
            asyncio.get_running_loop().call_later(_WAKE_S, self._wake_some)

    async def wait_for_space(self, deadline: float, namespace: Namespace, blocks: int = 1) -> None:
        """Return at the next `space_changed`, at `deadline`, or after about SAMPLE_S.

        A caller that needs more space or pins calls it again; each call looks for connections that
        hold some and are stalled (design: budgets).
        """
        loop = asyncio.get_running_loop()
        self.clients.cut_stalled(now := loop.time())
        future: asyncio.Future[None] = loop.create_future()
        leads = not self._waiting_for_space  # when its pause ends, so does that of all, in turns
        left = min(deadline - now, clients.SAMPLE_S) if leads else deadline - now
        self._waiting_for_space[future] = deadline, blocks, tenant_of(namespace.name)
        try:
            await asyncio.wait([future], timeout=left)
        finally:
            future.cancel()  # the deadline came first, or the writer has gone
            if self._waiting_for_space.pop(future, None) and leads and self._waiting_for_space:
                loop.call_at(now + clients.SAMPLE_S, self.space_changed)  # as if it still waited
