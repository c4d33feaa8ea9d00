"""Hands over chains to servers that have room, while this one is full (design: movers)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvpool import logs
from kvpool.errors import Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, SupportsFetch
from kvpool.server.context import ServerContext
from kvpool.server.moves.peer_servers import REFRESH_S, PeerServers
from kvpool.server.moves.state.drain_plan import BlockName, in_stretches, name_of
from kvpool.server.moves.state.share_plan import ChainOwners, SharePlan
from kvpool.server.state.entry import Entry
from kvpool.server.state.tier_stores import cold_store
from kvpool.server.state.tiered_store import TieredStore
from kvpool.types import FULL_SHARE, ROOM_SHARE, FetchStatus, ReadStatus
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: One request to another server.
_REQUEST_S: Final = 5.0
#: A server that fetches nothing for so long is left alone until the next plan.
_STALLED_S: Final = 10.0
_ASK_AGAIN_S: Final = 0.05
#: A plan looks at every block: it is made again after this time at the earliest, after so many
#: times the time that it took, and less often while nothing comes of it.
_PLAN_GAP_S: Final = 10.0
_PLAN_GAP_MAX_S: Final = 640.0
_PLAN_SHARE: Final = 50
#: Blocks that are looked at in one turn of the loop.
_STEP: Final = 512
#: Of a server: a larger chain stays. It would leave and come back with little use between.
CHAIN_SHARE: Final = 1 / 8

_FAILURES: Final = (Unavailable, PeerError, Overloaded)
_AGAIN: Final = (FetchStatus.NOT_YET, FetchStatus.IN_PROGRESS)


class Balancer:
    """Makes room here by giving other servers, which have room, their share of the chains.

    | state   | means                                            | next state                     |
    |---------|--------------------------------------------------|--------------------------------|
    | idle    | this server is not full, or all others are, too  | moving: a master says that one |
    |         |                                                  | has room, and this one is full |
    | moving  | chains are fetched from here, and forgotten      | idle: it is not full any more, |
    |         |                                                  | or no chain belongs elsewhere  |

    So as much is moved as clients write here, and not faster than the receivers' budgets allow.
    Without `enabled` it stays idle.
    """

    def __init__(self, context: ServerContext, peers: PeerServers, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._context = context
        self._store = context.store
        self._peers = peers
        self._wake = asyncio.Event()
        self._plan = SharePlan(self._store, ChainOwners({}), ())
        self._chains = self._plan.chains()
        self._steps = 0
        self._gap_s = _PLAN_GAP_S
        self._plan_not_before = float("-inf")
        self._room = RoomOfOthers()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that hands over, if it is enabled."""
        if self._enabled:
            self._task = self._context.tasks.forever("balance", self._balance)

    async def close(self) -> None:
        """End the task. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def others_have_room(self) -> None:
        """A master says that this server is full, and another one is not."""
        self._wake.set()

    # --- inside ----------------------------------------------------------------------------------

    async def _balance(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        try:
            await self._make_room()
        except _FAILURES as error:  # a master, or a server: the next heartbeat tries again
            log.info("chains are not handed over", why=str(error))
        except Exception:
            self._plan_again_in(_PLAN_GAP_MAX_S)
            raise

    @property
    def _is_needed(self) -> bool:
        return not self._context.draining and is_full(self._store)

    async def _make_room(self) -> None:
        moved = 0
        while self._is_needed:
            found = next(self._chains, None)
            if found is None:
                if _now() < self._plan_not_before or not await self._make_plan():
                    break
                continue
            target, end = found
            chain = await self._chain(end)
            # Blocks above it may have come or gone since: then it begins, and belongs, elsewhere.
            if chain and self._plan.target(chain[0]) == target:
                moved += await self._hand_over(target, chain)
            await asyncio.sleep(0)
        if moved:
            self._gap_s = _PLAN_GAP_S
            log.info("chains were handed over", blocks=moved)

    async def _make_plan(self) -> bool:
        """Look which chains belong to servers with room; False when there is no such server."""
        began = _now()
        members = await self._peers.members(began + _REQUEST_S)
        staying = {
            name: info
            for name, info in members.items()
            if name == self._peers.server or (info.alive and not info.stats.draining)
        }
        targets = {
            name
            for name, info in staying.items()
            if name != self._peers.server and info.stats.used < ROOM_SHARE * info.capacity
        }
        if not targets:  # a master knew it before this list was made
            self._plan_again_in(REFRESH_S)
            return False
        shares = ChainOwners({name: info.capacity for name, info in staying.items()})
        plan = self._plan = SharePlan(self._store, shares, targets)
        for step in self._store.inventory_steps():
            for stretch in step:
                is_cold = self._store.stores[stretch.tier] is cold_store(self._store.stores)
                for digest in () if is_cold else stretch.digests:
                    await self._breathe()
                    entry = self._store.peek(stretch.namespace, stretch.part, digest)
                    if entry is not None and plan.is_end(entry):
                        chain = await self._chain(entry)
                        plan.add(entry, chain[0])
        self._plan_again_in(max(self._gap_s, _PLAN_SHARE * (_now() - began)))
        self._gap_s = min(_PLAN_GAP_MAX_S, 2 * self._gap_s)  # until a chain has moved
        self._chains = plan.chains()
        log.debug("chains belong to servers with room", chains=len(plan), to=sorted(targets))
        return len(plan) > 0

    def _plan_again_in(self, seconds: float) -> None:
        self._plan_not_before = _now() + seconds

    async def _chain(self, end: Entry) -> list[Entry]:
        """The chain that ends here, head first."""
        chain = []
        for entry in self._plan.climb(end):
            chain.append(entry)
            await self._breathe()
        return chain[::-1]

    async def _breathe(self) -> None:
        """Let others run after some steps."""
        self._steps += 1
        if self._steps % _STEP == 0:
            await asyncio.sleep(0)

    async def _hand_over(self, target: str, chain: Sequence[Entry]) -> int:
        """Have `target` fetch what only this server has of a chain, and forget it; the blocks.

        Nothing of a chain so large that `target` would evict for it, or be the fuller one then.
        """
        members = await self._peers.members(_now() + _REQUEST_S)
        size = sum(entry.size for entry in chain)
        if target not in members or not self._room.fits(members[target], size, self._store):
            return 0
        moved = 0
        for stretch in in_stretches(chain):
            members = await self._peers.members(_now() + _REQUEST_S)
            info = members.get(target)
            if info is None or not _takes(info):
                break
            names = [name_of(entry) for entry in stretch if self._is_here(entry)]
            if not names:
                continue
            living = {one.server for one in members.values() if one.alive} - {self._peers.server}
            copies = await self._peers.holders(names, living, _now() + _REQUEST_S)
            wanted = [name for name in names if name not in copies]
            fetched = await self._offer(target, wanted) if wanted else 0
            moved += fetched
            self._room.sent(target, sum(entry.size for entry in stretch[:fetched]))
            if fetched < len(wanted):  # the rest of the chain stays
                break
        return moved

    def _is_here(self, entry: Entry) -> bool:
        return self._store.place(entry) is not None

    async def _offer(self, target: str, wanted: Sequence[BlockName]) -> int:
        """Have `target` fetch these blocks, again while it makes progress; how many it has fetched.

        Each is forgotten here when masters know that it is there, and not before.
        """
        moved, left, progress_at = 0, list(wanted), _now()
        while left and _now() - progress_at < _STALLED_S:
            namespace, part, _ = left[0]
            until = _now() + _REQUEST_S
            channel: Channel | None = None
            before = {name: self._store.peek(*name) for name in left}
            try:
                channel = await self._peers.channel(target, until)
                if not isinstance(channel, SupportsFetch):
                    break
                digests = [name.digest for name in left]
                statuses = await channel.fetch(
                    namespace, part, digests, self._peers.server, deadline=until
                )
            except _FAILURES:
                self._peers.failed(target, channel)
                raise
            fetched = [n for n, s in zip(left, statuses, strict=True) if s is FetchStatus.FETCHED]
            await self._forget([entry for name in fetched if (entry := before[name])])
            moved += len(fetched)
            if fetched:
                progress_at = _now()
            if any(status not in (FetchStatus.FETCHED, *_AGAIN) for status in statuses):
                break  # it has no room, or has the block already: the rest of the chain stays
            left = [n for n, s in zip(left, statuses, strict=True) if s in _AGAIN]
            await asyncio.sleep(_ASK_AGAIN_S if left else 0)
        return moved

    async def _forget(self, entries: Sequence[Entry]) -> None:
        """Another server has these blocks: readers are sent there from now on.

        What a writer has stored meanwhile under the same name is another version, and stays.
        """
        if not entries:
            return
        namespace, part, _ = name_of(entries[0])
        digests = [entry.digest for entry in entries]
        versions = [entry.checksum for entry in entries]
        self._store.remove(namespace, digests, ReadStatus.EVICTED, part, versions)
        self._context.counters["handed_over_blocks"] += len(entries)
        self._context.counters["handed_over_bytes"] += sum(entry.size for entry in entries)
        self._context.on_change()
        await self._context.mover.erase()


class RoomOfOthers:
    """How much other servers can take: what masters know of them, and what was sent since."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, int, int]] = {}  # epoch and use as known, bytes since

    def fits(self, info: wire.MemberInfo, size: int, store: TieredStore) -> bool:
        """Whether so many bytes are a small share of this server, and make it neither full, nor
        fuller than the `store` that they come from is without them."""
        if size > CHAIN_SHARE * info.capacity:
            return False
        known = info.epoch, info.stats.used
        *before, sent = self._sent.get(info.server, (*known, 0))
        if tuple(before) != known:  # a heartbeat has come since
            sent = 0
        self._sent[info.server] = (*known, sent)
        here = store.backing.allocator.capacity
        fill = (info.stats.used + sent + size) / max(1, info.capacity)
        return fill <= min(FULL_SHARE, (store.used_bytes - size) / here)

    def sent(self, server: str, size: int) -> None:
        """So many bytes were sent there, after a call of `fits`."""
        epoch, used, sent = self._sent[server]
        self._sent[server] = epoch, used, sent + size


def _takes(info: wire.MemberInfo) -> bool:
    """Whether a server lives, stays, and is not full."""
    return info.alive and not info.stats.draining and info.stats.used < FULL_SHARE * info.capacity


def is_full(store: TieredStore) -> bool:
    """Whether a server is to hand over chains, if others have room."""
    return store.used_bytes >= FULL_SHARE * store.backing.allocator.capacity


def _now() -> float:
    return asyncio.get_running_loop().time()
