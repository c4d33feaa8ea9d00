"""How many connections each client may have, so that none is kept out by the others.

A server has `connections_max` connections. A client takes several to work in parallel, and could
take all; then a client without any could neither read nor write. So a client has a *share*: while
half of the connections are free it may have more, after that it may not, and works with those that
it has. Where none is left, an idle connection ends for the new one. (design: bounds)
"""

from __future__ import annotations

from collections import Counter
from typing import Final

#: A client needs a second connection for a moment when it first writes into shared memory.
SHARE_MIN: Final = 2


class ConnectionShares:
    """The connections of one server, counted by the name of their client."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._of: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<ConnectionShares {self.total} of {self.limit}, {len(self._of)} clients>"

    def share(self, newcomers: int = 0) -> int:
        """What each client may have when connections are scarce."""
        return max(SHARE_MIN, self.limit // max(1, len(self._of) + newcomers))

    def problem(self, client: str) -> str:
        """Why this client may not have one more; empty: it may, if there is one left."""
        held = self.held(client)
        share = self.share(newcomers=held == 0)
        if held >= share and self.total >= self.limit // 2:
            return (
                f"this client has {held} of {self.limit} connections (server.connections_max), "
                f"and {len(self._of)} clients share them"
            )
        return ""

    @property
    def full(self) -> bool:
        return self.total >= self.limit

    def held(self, client: str) -> int:
        """The connections that this client has."""
        return self._of.get(client, 0)

    def opened(self, client: str) -> None:
        self.total += 1
        self._of[client] += 1

    def closed(self, client: str) -> None:
        self.total -= 1
        self._of[client] -= 1
        if not self._of[client]:
            del self._of[client]
