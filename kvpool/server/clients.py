"""The clients of a server: what each connection holds of its memory, and which of them must end.

No I/O, and no clock: `context.py` says when somebody waits.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvpool import logs
from kvpool.errors import Overloaded
from kvpool.protocols import Peer
from kvpool.server.state.blocks import Blocks
from kvpool.tenant_names import marker_of
from kvpool.types import ClientUsage

log = logs.get("kvpool.server")

#: While a call waits for space, connections are looked at so often.
SAMPLE_S: Final = 0.25
#: A client that moves no byte for so long is cut off while others wait for what it holds.
STALLED_S: Final = 2.0
#: A client needs a second connection for a moment when it first writes into shared memory.
SHARE_MIN: Final = 2


class ConnectionShares:
    """How many connections each client may have, so that none is kept out by the others.

    A client takes several to work in parallel, and could take all. So it has a *share*: while half
    of the connections are free it may have more, after that it may not, and works with those that
    it has. Where none is left, an idle connection ends for the new one. (design: bounds)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._of: Counter[str] = Counter()

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


class HeldByClient:
    """What one connection holds; `id` is its owner in the store."""

    def __init__(self, store: Blocks, id: int, peer: Peer) -> None:
        self.id = id
        self.peer = peer
        #: Once it is closed: the bytes into which its client may still write.
        self.quarantined_bytes: int | None = None
        self._store = store
        #: What `peer.link` and the store showed when they were last looked at, and since when.
        self._sample: object = None
        self._sampled_at = 0.0

    @property
    def sharer(self) -> str:
        """Who shares connections with the others: a client, or a tenant with all of its clients,
        which could have as many names as they like."""
        return marker_of(self.peer.tenant) or self.peer.name

    def usage(self, now: float) -> ClientUsage | None:
        """What it holds at the moment; None if that is nothing."""
        name, transport = self.peer.name, self.peer.transport
        if self.quarantined_bytes is not None:
            return ClientUsage(name, transport, quarantined_bytes=self.quarantined_bytes)
        held = self._store.holders(self.id)
        pinned, reserved = sum(h.pinned_bytes for h in held), sum(h.reserved_bytes for h in held)
        if not (pinned or reserved):
            return None
        return ClientUsage(
            name,
            transport,
            pinned_bytes=pinned,
            oldest_pin_s=max([0.0, *(now - h.pinned_at for h in held if h.pins)]),
            reserved_bytes=reserved,
        )

    def cut_if_stalled(self, now: float) -> bool:
        """End the connection if it holds memory that may be taken back and moved no byte for
        STALLED_S. Called while others wait (design: budgets)."""
        held, link = self._store.holders(self.id), self.peer.link
        if link is None or not held:
            return False
        holds_pins = any(h.pinned_bytes and not h.views for h in held)
        reserved = sum(h.reserved_bytes for h in held)
        sample = (link.progress(), *((h.pinned_at, h.sealed_bytes) for h in held))
        if not (holds_pins or reserved) or sample != self._sample:
            self._sample, self._sampled_at = sample, now
            return False
        if now - self._sampled_at < STALLED_S:
            return False
        self._sampled_at = now
        log.warning(
            "client is cut off",
            why="it moves no bytes, and others wait for the memory that it holds",
            client=self.peer.name,
            transport=self.peer.transport,
            pinned_bytes=sum(h.pinned_bytes for h in held),
            reserved_bytes=reserved,
            stalled_s=STALLED_S,
        )
        link.hang_up(
            Overloaded(
                f"no byte moved for {STALLED_S:g} s, and others waited for the memory that "
                "this connection held"
            )
        )
        return True


class ConnectedClients:
    """All connections of a server. `counters` are the server's."""

    def __init__(self, limit: int, counters: Counter[str]) -> None:
        #: In the order in which they came: that of a set of objects differs from run to run.
        self.connections: dict[HeldByClient, None] = {}
        self.shares = ConnectionShares(limit)
        self._counters = counters
        self._sampled_at = 0.0

    def admit(self, newcomer: HeldByClient, now: float) -> None:
        """One more connection; raises Overloaded if its client may not have it.

        An idle one may end for it: of the client that has most, the one that is idle for the
        longest time (design: bounds).
        """
        if problem := self.shares.problem(newcomer.sharer):
            self._counters["refused_connections"] += 1
            raise Overloaded(problem)
        if self.shares.full:
            idle = []
            for one in self.connections:
                link = one.peer.link
                since = link.idle_since() if link is not None else None
                if link is not None and since is not None:
                    idle.append((self.shares.held(one.sharer), now - since, link))
            if not idle:
                self._counters["refused_connections"] += 1
                raise Overloaded(
                    f"all {self.shares.limit} connections are at work (server.connections_max)"
                )
            max(idle, key=lambda one: one[:2])[2].retire()
            self._counters["retired_connections"] += 1
        self.connections[newcomer] = None
        self.shares.opened(newcomer.sharer)

    def disconnected(self, one: HeldByClient) -> None:
        """Idempotent."""
        if one in self.connections:
            del self.connections[one]
            self.shares.closed(one.sharer)

    def usage(self, now: float) -> list[ClientUsage]:
        """What each client holds at the moment, over all of its connections; the largest first."""
        clients: dict[tuple[str, str], ClientUsage] = {}
        for connection in self.connections:
            one = connection.usage(now)
            if one is not None:
                other = clients.get((one.name, one.transport))
                clients[one.name, one.transport] = one if other is None else _sum(one, other)

        def held(client: ClientUsage) -> int:
            return client.pinned_bytes + client.reserved_bytes + client.quarantined_bytes

        return sorted(clients.values(), key=held, reverse=True)

    def cut_stalled(self, now: float) -> None:
        """Others wait: end connections that hold memory and do nothing (design: budgets)."""
        if now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            for one in list(self.connections):
                if one.cut_if_stalled(now):
                    self._counters["cut_connections"] += 1


def _sum(one: ClientUsage, other: ClientUsage) -> ClientUsage:
    return ClientUsage(
        one.name,
        one.transport,
        one.connections + other.connections,
        one.pinned_bytes + other.pinned_bytes,
        max(one.oldest_pin_s, other.oldest_pin_s),
        one.reserved_bytes + other.reserved_bytes,
        one.quarantined_bytes + other.quarantined_bytes,
    )
