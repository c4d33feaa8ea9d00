"""What a listener keeps of peers that have not shown yet that they belong to the cluster.

Every process that reaches the port may connect, be silent, and send wrong proofs. So there is a
bound on each thing here, and all of it is given back (design: bounds).
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.errors import KvpoolError, LinkBroken, Overloaded, Unauthenticated
from kvpool.logs import Logger

#: Connections of one listener before the end of their handshake; fewer where the process may open
#: fewer than four times as many files.
HANDSHAKES_MAX: Final = 1024
#: Wrong proofs that one address may send at once, and how many more each second.
WRONG_PROOFS_MAX: Final = 64
WRONG_PROOFS_PER_S: Final = 8.0
#: Addresses that are remembered at the same time.
ADDRESSES_MAX: Final = 1024
#: One log line in this time for each address, with the number of refusals that it stands for; and
#: so many of all addresses: who has a network has many.
LOG_EVERY_S: Final = 60.0
LINES_MAX: Final = 64


@dataclass(slots=True)
class _Address:
    """What one address has done lately."""

    #: Wrong proofs at the time `at`; they become fewer with time.
    wrong: float
    at: float
    #: Refusals that no log line has reported yet.
    unreported: int = 0
    report_at: float = 0.0

    def wrong_now(self, now: float) -> float:
        return max(0.0, self.wrong - (now - self.at) * WRONG_PROOFS_PER_S)

    def is_over(self, now: float) -> bool:
        """Nothing of it matters any more."""
        return self.wrong_now(now) == 0.0 and now >= self.report_at


class Unproved(Protocol):
    """A connection whose handshake is not complete."""

    def abort(self) -> None: ...


class Strangers:
    """The peers of one listener before the end of their handshake. `now` is loop time."""

    def __init__(self, log: Logger, transport: str) -> None:
        self._log, self._transport = log, transport
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = files == resource.RLIM_INFINITY
        self._limit = HANDSHAKES_MAX if unlimited else max(1, min(HANDSHAKES_MAX, files // 4))
        self._handshakes: dict[Unproved, str] = {}  # oldest first, with their addresses
        self._of: Counter[str] = Counter()  # of each address
        self._addresses: dict[str, _Address] = {}
        self._lines, self._lines_until = 0, 0.0  # that may still be written until then

    def __len__(self) -> int:
        return len(self._handshakes)

    def arrived(self, stream: Unproved, address: str) -> bool:
        """A handshake begins; True when the oldest one, a silent one, was ended to make room for
        it: of all, or of its own address if that has more than its part."""
        self._handshakes[stream] = address
        self._of[address] += 1
        if full := len(self._handshakes) > self._limit:
            greedy = self._of[address] > max(1, self._limit // len(self._of))
            ends = (one for one, its in self._handshakes.items() if its == address or not greedy)
            self.left(oldest := next(ends))
            oldest.abort()
        return full

    def left(self, stream: Unproved) -> None:
        """Its handshake is complete, or has failed. Idempotent."""
        address = self._handshakes.pop(stream, None)
        if address is not None:
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]

    def check(self, address: str, now: float) -> None:
        """Raises Overloaded for an address that has sent too many wrong proofs."""
        known = self._addresses.get(address)
        if known is not None and known.wrong_now(now) > WRONG_PROOFS_MAX - 1:
            raise Overloaded("too many wrong secrets from this address: try again in a moment")

    def refused(
        self, address: str, error: KvpoolError, now: float, *, costly: bool = False
    ) -> None:
        """A connection was refused, or ended from here: count that, and log it if a line is due.

        It counts as a wrong proof if it was one, or cost as much (`costly`).
        """
        known = self._addresses.get(address)
        if known is None:
            self._make_room(now)
            known = self._addresses[address] = _Address(0.0, now)
        wrong = address != "" and (costly or isinstance(error, Unauthenticated))
        known.wrong, known.at = known.wrong_now(now) + wrong, now
        known.unreported += 1
        if now >= self._lines_until:
            self._lines, self._lines_until = LINES_MAX, now + LOG_EVERY_S
        if now < known.report_at or not self._lines:
            return
        self._lines -= 1
        report = self._log.info if isinstance(error, LinkBroken) else self._log.warning
        fields = {"transport": self._transport, "error": type(error).__name__, "why": str(error)}
        report("connection closed", **fields, peer=address, count=known.unreported)
        known.unreported, known.report_at = 0, now + LOG_EVERY_S

    def _make_room(self, now: float) -> None:
        """For one more address: those without meaning go, or else the most harmless one."""
        if len(self._addresses) < ADDRESSES_MAX:
            return
        for address in [a for a, known in self._addresses.items() if known.is_over(now)]:
            del self._addresses[address]
        if len(self._addresses) >= ADDRESSES_MAX:
            harmless = min(self._addresses, key=lambda a: self._addresses[a].wrong_now(now))
            del self._addresses[harmless]
