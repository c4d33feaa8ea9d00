"""The index of memory that has other tiers beside it: what must be copied, and what stays. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvpool.server.eviction.order import JUST_NOW
from kvpool.server.state.entry import MOVER, Account, Entry
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.extents import Extents
from kvpool.server.state.holdings import Owner
from kvpool.server.state.prefetches import PrefetchedBlocks
from kvpool.server.state.store import Store
from kvpool.types import ReadStatus

#: A writer waits so long for the disk in order that a block stays that was used since.
_FLOOD_WAIT_S: Final = 1.0


class FrontExtents(Extents):
    """The extents of the memory that clients write into and read out of, above other tiers.

    A block that was sealed here and that no other tier has is *dirty*. It is not evicted before it
    is clean, nor is one that came up for a reader who has yet to come (design: tiers).
    """

    serves_readers = True

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """As `Extents`."""
        super().__init__(*arguments, **settings)
        #: Dirty blocks of sessions that have ended may go, too.
        self.drops_useless = False
        self.dirty_bytes = 0  # whole extents
        self.spared = 0  # dirty blocks that were evicted
        self.spared_bytes = 0
        #: Blocks that came up for a reader who has yet to come (design: promotion).
        self.prefetched = PrefetchedBlocks()
        #: Whether another tier has a sealed block, too, so that the server keeps it.
        self.has_copy: Callable[[Entry], bool] = lambda entry: False
        #: Whether a block of such tenants that was used before this one will soon have a copy.
        self.older_waits: Callable[[Entry, Callable[[Account], bool]], bool] = lambda *_: False

    # --- what is dirty -------------------------------------------------------------------

    def mark_clean(self, entry: Entry) -> None:
        """The block was written back, or cannot be: it may be evicted here (design: tiers)."""
        if not entry.clean:
            entry.clean = True
            if entry.state is State.STORED:
                self._count_dirty(entry, -1)
                self.add_candidate(entry)

    def mark_dirty(self, entry: Entry) -> None:
        """No other tier has this sealed block: it must be written before it may be evicted."""
        if entry.clean:
            entry.clean = False
            self._count_dirty(entry, 1)

    def _count_dirty(self, entry: Entry, sign: int) -> None:
        self.dirty += sign
        self.dirty_bytes += sign * self.allocator.rounded(entry.size)

    def _may_drop(self, entry: Entry) -> bool:
        """Whether a dirty block need not be written."""
        return self.drops_useless and self.policy.is_over(entry)

    def remove(self, entry: Entry, event: Event, reason: ReadStatus, *, free: bool = True) -> None:
        self.prefetched.drop(entry)
        if not entry.clean:
            self._count_dirty(entry, -1)
            if event is Event.EVICT:
                self.spared += 1
                self.spared_bytes += entry.size
        super().remove(entry, event, reason, free=free)

    # --- what is prefetched --------------------------------------------------------------

    def drop_lapsed(self, now: float) -> None:
        """Prefetched blocks that nobody has read in time: they are evicted next."""
        for entry in self.prefetched.lapsed(now):
            self.add_candidate(entry)

    def _finds_more(self, account: Account, size: int) -> bool:
        """Let some prefetched blocks go; False if none of those that came last may make room for
        `size` bytes of this tenant."""
        given_up = self.prefetched.give_up(
            lambda entry: account.may_take_from(entry.index.account, size)
        )
        for entry in given_up:
            self.add_candidate(entry)
        return bool(given_up)

    # --- what stays ----------------------------------------------------------------------

    def evictable(self, entry: Entry) -> bool:
        if not super().evictable(entry):
            return False
        return all(
            (part.clean or self._may_drop(part)) and part not in self.prefetched
            for part in self.index.parts(entry)
        )

    def _is_spared(
        self, victim: Entry, newcomer: Entry, owner: int, last_used: int, now: float
    ) -> bool:
        """What another tier has is not lost. (That may have refused it, or take no writes.)"""
        if self._is_parent(victim, newcomer) and not self.has_copy(victim):
            return True
        if self.demotes and owner == MOVER and last_used != JUST_NOW:
            # A block that is prefetched: what it evicts has a copy below, and would be missed here.
            over = all(self.policy.is_over(part) for part in self.index.parts(victim))
            useless = over or self._is_due_before(newcomer, victim)
            return self._last_use(victim) >= last_used and not useless
        if self.demotes and self._should_wait(self.held.owner(owner), victim, newcomer, now):
            return True
        spared = super()._is_spared(victim, newcomer, owner, last_used, now)
        return spared and not self.has_copy(victim)

    def _is_due_before(self, newcomer: Entry, victim: Entry) -> bool:
        """By the hints of all sessions the newcomer is needed first."""
        due = self.policy.due(newcomer)
        others = [self.policy.due(part) for part in self.index.parts(victim)]
        announced = [other for other in others if other is not None]
        return due is not None and bool(announced) and due < min(announced)

    def _should_wait(self, holder: Owner, victim: Entry, newcomer: Entry, now: float) -> bool:
        """Whether a writer waits for the disk, a second at most, so that this block stays: one that
        may go as well was used before it, and is still to be copied (design: tiers)."""
        mine, size = newcomer.index.account, self.allocator.rounded(newcomer.size)
        owed = mine.owns(size)  # then it takes the place of others' blocks

        def may_go(other: Account) -> bool:
            return mine.may_take_from(other, size) and not (owed and other is mine)

        if not holder.limited or not victim.copies or not self.older_waits(victim, may_go):
            return False
        if self.policy.is_over(victim) or self.policy.due(victim) is not None:
            return False  # a hint has decided, and not the time of its use
        if holder.waits_for is None or holder.waits_for[0] != newcomer.digest:
            holder.waits_for = newcomer.digest, now
        return now - holder.waits_for[1] < _FLOOD_WAIT_S


class FrontStore(Store):
    """The store that clients write into and read out of, on a server with several tiers."""

    extents: FrontExtents
    extents_type = FrontExtents
