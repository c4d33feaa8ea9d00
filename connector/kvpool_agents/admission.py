"""Which sessions are served now, and which wait until one of these ends. Pure; times in seconds.

With less memory than the live sessions need, every one of them misses, and where engines cannot
compute all that, prompts wait for each other. Then no more sessions are served than fit: the mean
number of those that have had a place, times the share of the live working set that the memory
holds. Both are means of the same minutes, so it does not matter that they are late; nor that others
serve sessions of the same pool, because each serves its own part. As long as few prompts wait for
their first tokens, misses cost nobody anything: one session after the other is let in.

A wrong figure costs time and no session: who has a place keeps it while prompts run, and who has
waited `WAIT_S` gets one, full or not. As long as nothing is known, all have one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

#: A session without a prompt for so long gives its place back, and is first in the line again.
IDLE_S: Final = 60.0
#: A session waits no longer.
WAIT_S: Final = 900.0
#: Sessions that are remembered: their names are made up by clients.
SESSIONS_MAX: Final = 4096
#: Prompts without a first token, for each engine, from which on sessions wait: a mean of this time.
_BUSY: Final = 3.0
_BUSY_S: Final = 60.0
#: With fewer of them, an engine gets one session more than fit in this time.
_STEP_S: Final = 10.0
#: As of the working set, which a master knows as a mean of this time.
_MEAN_S: Final = 600.0
#: Before that a mean says too little.
_KNOWN_S: Final = 120.0


@dataclass(slots=True, eq=False)
class Seat:
    """One session: `placed`, its prompts may run; else they wait, since `waits_since`."""

    tenant: str
    session: str
    came: float
    waits_since: float
    used_at: float
    placed: bool = False
    prompts: int = 0  # that run or wait


class Admission:
    """Gives places to sessions: first to those of the tenant that has the fewest, and of these to
    the one that came first."""

    def __init__(self) -> None:
        self._seats: dict[str, dict[str, Seat]] = {}  # by tenant; used longest ago first
        self._count = 0
        self._placed: dict[Seat, None] = {}
        self._line: dict[Seat, None] = {}
        self._share: float | None = None
        self._engines = 1
        self._computing = 0  # prompts at engines, without a first token
        self._busy = 0.0
        self._stepped_at = -math.inf
        self._swept_at = -math.inf
        self._began: float | None = None
        self._place_s = 0.0  # places x seconds, fading
        self._counted_at = 0.0

    @property
    def served(self) -> int:
        """Sessions that have a place."""
        return len(self._placed)

    @property
    def waiting(self) -> int:
        """Sessions in the line."""
        return len(self._line)

    def measured(self, share: float | None, engines: int = 1) -> None:
        """So much of the live working set fits, as `Room.share`; None: nobody knows."""
        self._share, self._engines = share, max(1, engines)

    def computes(self, prompts: int, now: float) -> None:
        """So many prompts more, or less, are at engines and have no first token."""
        self._pass(now)
        self._computing += prompts

    def places(self, now: float) -> float:
        """How many sessions are served at a time; inf: nothing is known yet."""
        self._pass(now)
        seen = now - self._began if self._began is not None else 0.0
        if self._share is None or seen < _KNOWN_S:
            return math.inf
        mean = self._place_s / (_MEAN_S * -math.expm1(-seen / _MEAN_S))
        return max(1.0, round(mean * self._share))

    def asks(self, tenant: str, session: str, now: float) -> Seat:
        """A prompt of this session has come."""
        self._pass(now)
        sessions = self._seats.setdefault(tenant, {})
        seat = sessions.pop(session, None)
        if seat is None:
            seat = Seat(tenant, session, now, now, now)
            self._count += 1
        sessions[session] = seat
        if not seat.placed and not seat.prompts and now - seat.used_at >= IDLE_S:
            seat.waits_since = now
        seat.prompts += 1
        seat.used_at = now
        if not seat.placed:
            self._line[seat] = None
        if self._count > SESSIONS_MAX:
            self._forget_one(now)
        return seat

    def leaves(self, seat: Seat, now: float, *, ends: bool = False) -> None:
        """A prompt of it runs, or waits, no more. `ends`: it was the session's last one."""
        seat.prompts -= 1
        seat.used_at = now
        if not seat.prompts:
            self._line.pop(seat, None)
            if ends:
                self._forget(seat, now)

    def admit(self, now: float) -> list[Seat]:
        """Those of the line that get their place now. Ask after every other call, and once a
        second while some wait."""
        if now - self._swept_at >= 1.0:
            self._swept_at = now
            self._sweep(now)
        admitted: list[Seat] = []
        places = self.places(now) if self._line else 0.0
        held = Counter(seat.tenant for seat in self._placed) if self._line else Counter()
        while self._line:
            seat = min(self._line, key=lambda one: (held[one.tenant], one.came))
            if len(self._placed) >= places and not self._steps(now):
                seat = min(self._line, key=lambda one: one.waits_since)
                if now - seat.waits_since < WAIT_S:
                    break
            del self._line[seat]
            seat.placed = True
            self._placed[seat] = None
            held[seat.tenant] += 1
            admitted.append(seat)
        return admitted

    def _steps(self, now: float) -> bool:
        """Whether engines have time for a session more than fit."""
        idle = self._busy < _BUSY * self._engines
        if not idle or now - self._stepped_at < _STEP_S / self._engines:
            return False
        self._stepped_at = now
        return True

    def _sweep(self, now: float) -> None:
        """Take places from those that are idle; who waits long enough is forgotten."""
        for seat in [one for of in self._seats.values() for one in of.values() if not one.prompts]:
            if now - seat.used_at >= WAIT_S:
                self._forget(seat, now)
            elif seat.placed and now - seat.used_at >= IDLE_S:
                self._give_back(seat, now)

    def _forget_one(self, now: float) -> None:
        """Of the tenant that has most, the one that was used longest ago and has no prompt."""
        sessions = max(self._seats.values(), key=len).values()
        if (seat := next((one for one in sessions if not one.prompts), None)) is not None:
            self._forget(seat, now)

    def _forget(self, seat: Seat, now: float) -> None:
        self._give_back(seat, now)
        sessions = self._seats.get(seat.tenant, {})
        if sessions.get(seat.session) is seat:
            del sessions[seat.session]
            self._count -= 1
        if not sessions:
            self._seats.pop(seat.tenant, None)

    def _give_back(self, seat: Seat, now: float) -> None:
        self._pass(now)
        seat.placed = False
        self._placed.pop(seat, None)

    def _pass(self, now: float) -> None:
        """Count the places until now, before their number changes."""
        if self._began is None:
            self._began = self._counted_at = now
        fade = math.exp((self._counted_at - now) / _MEAN_S)
        self._place_s = self._place_s * fade + len(self._placed) * _MEAN_S * (1 - fade)
        fade = math.exp((self._counted_at - now) / _BUSY_S)
        self._busy = self._busy * fade + self._computing * (1 - fade)
        self._counted_at = now
