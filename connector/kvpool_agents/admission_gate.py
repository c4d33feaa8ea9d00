"""Prompts wait here until their session has a place; what a server puts before its answers.

It belongs to the loop that made it. Who asks for a prompt also says when its first byte is out, and
when the answer is.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any, Final

from kvpool_agents.admission import Admission, Seat

#: A prompt waits no longer: common clients and proxies give up after 300 to 600 s. Its session
#: keeps its turn, and the time that it has waited.
HOLD_S: Final = 240.0
#: Prompts that wait at once; one tenant's are no more than what it leaves free.
LINE_MAX: Final = 512
#: The header of an answer that had to wait: seconds, `1.2s`.
WAITED: Final = "x-kvpool-waited"
_ASK_S: Final = 10.0
_LOOK_S: Final = 1.0

logger = logging.getLogger("kvpool.admission")


class LineFull(Exception):
    """So many prompts wait already that no more may."""


class Ticket:
    """One prompt that was let in, after `waited_s`. `began` and `ended` may be called again."""

    def __init__(self, gate: AdmissionGate, seat: Seat, waited_s: float) -> None:
        self.waited_s = waited_s
        self._gate, self._seat = gate, seat
        self._computes = self._open = True

    def began(self) -> None:
        """Its first byte is there."""
        if self._computes:
            self._computes = False
            self._gate.admission.computes(-1, self._gate.now())

    def ended(self, *, session_ends: bool = False) -> None:
        """Its answer is out, or there will be none."""
        self.began()
        if self._open:
            self._open = False
            self._gate.left(self._seat, session_ends=session_ends)


class AdmissionGate:
    """`ask` has the pool asked for its room, and calls `measured` on this loop: once in 10 s, while
    prompts come. Without an answer what was known stays, for ten times as long."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.admission = Admission()
        self.now = asyncio.get_running_loop().time
        self._ask = ask
        self._asked_at = self._answered_at = -math.inf
        self._share: float | None = None
        self._waiting: dict[Seat, asyncio.Event] = {}
        self._looking: asyncio.Task[None] | None = None

    def measured(self, share: float | None, engines: int = 1) -> None:
        """The pool has said it, as `Room.share`."""
        self._answered_at = self.now()
        self._share = share
        self.admission.measured(share, engines)

    async def enter(self, tenant: str, session: str) -> Ticket:
        """Wait for the place of this session. Raises TimeoutError after `HOLD_S`, and LineFull."""
        began = self.now()
        self._ask_again(began)
        seat = self.admission.asks(tenant, session, began)
        try:
            self._look()
            if not seat.placed:
                self._check_line(tenant)
                event = self._waiting.setdefault(seat, asyncio.Event())
                if self._looking is None or self._looking.done():
                    logger.warning("sessions wait: %s", self.why())
                    self._looking = asyncio.create_task(self._keep_looking())
                async with asyncio.timeout(HOLD_S):
                    await event.wait()
        except BaseException:
            self.left(seat)
            raise
        now = self.now()
        self.admission.computes(1, now)
        return Ticket(self, seat, now - began)

    def left(self, seat: Seat, *, session_ends: bool = False) -> None:
        """A prompt of it waits, or runs, no more."""
        self.admission.leaves(seat, self.now(), ends=session_ends)
        if not seat.prompts:
            self._waiting.pop(seat, None)
        self._look_again()

    def close(self) -> None:
        """Nobody is let in any more."""
        if self._looking is not None:
            self._looking.cancel()

    def shown(self) -> dict[str, Any]:
        """For operators: who is served, who waits and why."""
        places = self.admission.places(self.now())
        return {
            "served": self.admission.served,
            "waiting": self.admission.waiting,
            "places": None if places == math.inf else places,
            "why": self.why() if self.admission.waiting else "",
        }

    def why(self) -> str:
        """Why sessions wait."""
        share = f"{self._share:.0%}" if self._share is not None else "an unknown part"
        return (
            f"memory holds {share} of the live working set and engines are busy: "
            f"{self.admission.served} sessions are served; more memory serves more"
        )

    def _check_line(self, tenant: str) -> None:
        """Raises LineFull."""
        prompts = sum(seat.prompts for seat in self._waiting)
        own = sum(seat.prompts for seat in self._waiting if seat.tenant == tenant)
        if prompts + own >= LINE_MAX:
            raise LineFull(f"{prompts} prompts wait, {own} of them yours")

    def _ask_again(self, now: float) -> None:
        if now - self._asked_at >= _ASK_S:
            self._asked_at = now
            if now - self._answered_at >= 10 * _ASK_S:
                self.admission.measured(None)
            try:
                self._ask()
            except Exception:  # no answer: what was known stays, and no prompt fails for it
                logger.exception("the pool is not asked for its room")

    def _look(self) -> None:
        for seat in self.admission.admit(self.now()):
            if (event := self._waiting.pop(seat, None)) is not None:
                event.set()

    def _look_again(self) -> None:
        try:
            self._look()
        except Exception:  # it may stay, and nobody is to wait for `HOLD_S` then
            logger.exception("all who wait are let in")
            while self._waiting:
                self._waiting.popitem()[1].set()

    async def _keep_looking(self) -> None:
        while self._waiting:
            await asyncio.sleep(_LOOK_S)
            self._ask_again(self.now())
            self._look_again()
