"""Whose transfer is next: so many run at a time, of each peer its share.

A peer that is frozen keeps each place that it has until its time is over. So it may have no more of
them than `Shares` gives it, and those that wait for another peer are not behind it.
"""

from __future__ import annotations

import asyncio

from kvpool.shares import Shares


class Turns:
    """`places` transfers at a time. One peer alone has half of them, and at least one."""

    def __init__(self, places: int) -> None:
        self._shares = Shares(places)
        self._waiting: dict[asyncio.Future[None], str] = {}  # in the order in which they came

    def __repr__(self) -> str:
        return f"<Turns {self._shares!r}, {len(self._waiting)} wait>"

    async def acquire(self, peer: str) -> None:
        """Wait for a place; whoever is cancelled meanwhile has none."""
        if self._shares.room(peer):
            self._shares.hold(peer)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = peer
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # it had come in the same moment
                self.release(peer)
            raise

    def release(self, peer: str) -> None:
        """Give back a place of this peer: to the first that waits and may have one."""
        self._shares.give_back(peer)
        for turn, waits_for in list(self._waiting.items()):
            # One that was cancelled in this turn of the loop does not know it yet.
            if not turn.done() and self._shares.room(waits_for):
                del self._waiting[turn]
                self._shares.hold(waits_for)
                turn.set_result(None)
