"""Whose transfer is next: so many run at a time, of each peer and of each tenant its share.

A peer that is frozen keeps each place that it has until its time is over. So it may have no more of
them than `Shares` gives it, and those that wait for another peer are not behind it. Nor are tenants
behind one that fetches from many peers.
"""

from __future__ import annotations

import asyncio

from kvpool.shares import Shares


class Turns:
    """`places` transfers at a time. One peer alone has half of them, and at least one; one tenant
    alone three of four. Of the pool itself, the tenant "", they may be all."""

    def __init__(self, places: int) -> None:
        self._shares = Shares(places)
        self._tenants = Shares(places + places // 2)  # one alone has half of that
        #: Peer and tenant of those that wait, in the order in which they came.
        self._waiting: dict[asyncio.Future[None], tuple[str, str]] = {}

    def __repr__(self) -> str:
        return f"<Turns {self._shares!r}, {len(self._waiting)} wait>"

    async def acquire(self, peer: str, tenant: str = "") -> None:
        """Wait for a place; whoever is cancelled meanwhile has none."""
        if self._take(peer, tenant):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = peer, tenant
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # it had come in the same moment
                self.release(peer, tenant)
            raise

    def release(self, peer: str, tenant: str = "") -> None:
        """Give back a place of these: to the first that waits and may have one."""
        self._shares.give_back(peer)
        self._tenants.give_back(tenant)
        for turn, waits_for in list(self._waiting.items()):
            # One that was cancelled in this turn of the loop does not know it yet.
            if not turn.done() and self._take(*waits_for):
                del self._waiting[turn]
                turn.set_result(None)

    def _take(self, peer: str, tenant: str) -> bool:
        """Take a place if this peer and this tenant may have one now."""
        if not (self._shares.room(peer) and self._tenants.room(tenant)):
            return False
        self._shares.hold(peer)
        self._tenants.hold(tenant)
        return True
