"""Which blocks of memory stay for the sake of the tiers below, although they may go. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpool.server.eviction.order import JUST_NOW
from kvpool.server.state.entry import MOVER, Account, Entry, Owner
from kvpool.server.state.store import Store

#: A writer waits so long for the disk in order that a block stays that was used since.
_FLOOD_WAIT_S: Final = 1.0


class FrontVictims:
    """Asked by the front tier before it evicts. `older_waits` says whether an older block of such
    tenants will soon have a copy (design: tiers)."""

    def __init__(
        self, front: Store, older_waits: Callable[[Entry, Callable[[Account], bool]], bool]
    ) -> None:
        self._front = front
        self._older_waits = older_waits

    def stays(
        self, owner: int, victim: Entry, newcomer: Entry, last_used: int, now: float
    ) -> bool | None:
        """Whether a victim stays; None: that is not about the tiers below."""
        front = self._front
        if not front.demotes:
            return None
        if owner == MOVER and last_used != JUST_NOW:
            # A block that is prefetched: what it evicts has a copy below, and would be missed here.
            over = all(front.policy.is_over(part) for part in front._parts(victim))
            useless = over or self._is_due_before(newcomer, victim)
            return front._last_use(victim) >= last_used and not useless
        if self._should_wait(front.held.owner(owner), victim, newcomer, now):
            return True
        return None

    def _is_due_before(self, newcomer: Entry, victim: Entry) -> bool:
        """By the hints of all sessions the newcomer is needed first."""
        due = self._front.policy.due(newcomer)
        others = [self._front.policy.due(part) for part in self._front._parts(victim)]
        announced = [other for other in others if other is not None]
        return due is not None and bool(announced) and due < min(announced)

    def _should_wait(self, holder: Owner, victim: Entry, newcomer: Entry, now: float) -> bool:
        """Whether a writer waits for the disk, a second at most, so that this block stays: one that
        may go as well was used before it, and is still to be copied (design: tiers)."""
        front = self._front
        mine, size = newcomer.index.account, front.allocator.rounded(newcomer.size)
        owed = mine.owns(size)  # then it takes the place of others' blocks

        def may_go(other: Account) -> bool:
            return mine.may_take_from(other, size) and not (owed and other is mine)

        if not holder.limited or not victim.copies or not self._older_waits(victim, may_go):
            return False
        if front.policy.is_over(victim) or front.policy.due(victim) is not None:
            return False  # a hint has decided, and not the time of its use
        if holder.waits_for is None or holder.waits_for[0] != newcomer.digest:
            holder.waits_for = newcomer.digest, now
        return now - holder.waits_for[1] < _FLOOD_WAIT_S
