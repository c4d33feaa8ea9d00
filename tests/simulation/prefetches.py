"""Blocks that come up from disks before they are read: clients ask for it, and what must hold then.

The oracles of the tiers look at the bytes and at where masters find a block. Here is what they
cannot see: what a prefetch evicts, how much it may bring, when, and what becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvpool.server.eviction.session import Session
from kvpool.server.state.entry import Entry
from kvpool.types import MoveStatus
from tests.simulation.moves import WatchedBudget
from tests.support.moves import prefetcher_of

if TYPE_CHECKING:
    from tests.simulation.nodes import ServerNode
    from tests.simulation.oracles import Victim, WatchedFront, WatchedStore
    from tests.simulation.world import World

#: The part of the memory that may be prefetched and unread.
_SHARE: Final = 8


class Prefetches:
    """What clients do with `Prefetch`, and the watch over every server's memory."""

    def __init__(self, world: World) -> None:
        self._world = world

    def asked(self, statuses: Sequence[MoveStatus]) -> None:
        """A prompt has arrived: its blocks are read soon, perhaps."""
        self._world.note(f"prefetch {[int(status) for status in statuses]}")
        if MoveStatus.IN_PROGRESS in statuses:
            self._world.truth.probes.add("a prefetch was asked for")

    def watch(self, node: ServerNode) -> None:
        """A server's process has begun."""
        assert node.server is not None
        budget = WatchedBudget(self._world.plan.prefetch_rate)
        budget.fail = self._world.loop.fail
        prefetcher_of(node.server).budget = budget
        node.store.prefetches = self

    # --- what must hold -----------------------------------------------------------------------

    def evicted(self, now: float, victim: Victim, newcomer: Session | None) -> None:
        """A block has left memory for one that is prefetched for this session, if any."""
        fail, entry = self._world.truth.fail, victim.entry
        if victim.unread:
            fail(f"advice: {entry!r} is prefetched and unread, and was evicted for another")
        if victim.over:
            return
        age_s = now - entry.last_used / 1e6
        if age_s < self._world.plan.fresh_s:
            fail(f"G9: {entry!r}, used {age_s:.3f} s ago, was evicted for a prefetched block")
        due = newcomer.due if newcomer is not None else None
        if victim.due is not None and (due is None or due >= victim.due):
            fail(f"advice: {entry!r} of an announced session was evicted for a prefetch")

    def came(self, store: WatchedStore, entry: Entry, now: float) -> None:
        """A prefetched block has been sealed in memory: it is unread."""
        self._world.truth.probes.add("a block was prefetched")
        rounded = store.allocator.rounded
        sizes = [rounded(one.size) for one, until in store.unread.items() if now < until]
        share = max(1, store.memory.capacity // _SHARE)
        if sum(sizes) - max(sizes) >= share:  # a block more, where little was left
            self._world.truth.fail(f"G9: {sum(sizes)} bytes are prefetched, {share} may be")

    def check(self, store: WatchedFront) -> None:
        """The account of what came up, by a list that is kept independently."""
        blocks = store.extents.prefetched
        if set(blocks) - store.unread.keys():
            self._world.truth.fail("a block counts as prefetched and unread, but was read or left")
        if blocks.came != blocks.used + blocks.wasted + blocks.bytes:
            self._world.truth.fail("what was prefetched is not what was used, wasted and unread")
        if blocks.used != store.prefetch_reads:
            self._world.truth.fail(
                f"{blocks.used} prefetched bytes count as used, {store.prefetch_reads} were read"
            )
