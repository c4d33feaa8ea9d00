"""What a server fetches from others, how fast, and who fetches from it (design: moves).

Pure, as the stores are: `now` is an argument. `fetcher.py` moves the bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from kvpool.errors import InvariantViolated
from kvpool.shares import Recent
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace

#: Of what was measured a server fetches this part: the rest of the time its network and memory are
#: free for clients.
_SHARE: Final = 0.25
#: Bytes per second that a transfer is assumed to reach before one was measured.
_ASSUMED_SPEED: Final = 256e6
#: Weight of the measurements before each new one.
_MEMORY: Final = 0.9
#: Servers that one record names: as many as have fetched one block at about the same time.
_RECEIVERS_MAX: Final = 16

_Key = tuple[Namespace, int, bytes]


class FetchBudget:
    """How many bytes per second a server fetches.

    A transfer may begin when those before it are paid for; each costs its size divided by the rate.
    So at most one transfer is ahead of the rate, whatever the size of a block. With `rate` 0 the
    rate is a quarter of the speed that transfers reach: of each byte that came, not of each second.
    So a peer that is nearly frozen, and takes most of the time for a few bytes, slows down nobody.
    """

    def __init__(self, rate: float = 0.0) -> None:
        self._fixed = rate
        self._paid_at = 0.0
        # Of the transfers that were measured, the last ones counting most.
        self._bytes = 0.0
        self._speeds = 0.0  # bytes per second, each transfer's as often as it had bytes

    def __repr__(self) -> str:
        return f"<FetchBudget {self.rate:.0f} bytes/s>"

    @property
    def rate(self) -> float:
        """Bytes per second."""
        if self._fixed:
            return self._fixed
        return _SHARE * (self._speeds / self._bytes if self._bytes else _ASSUMED_SPEED)

    def wait_s(self, now: float) -> float:
        """Seconds until the next transfer may begin."""
        return max(0.0, self._paid_at - now)

    def begin(self, size: int, now: float) -> float:
        """A transfer of `size` bytes begins; returns its price, in seconds.

        Raises InvariantViolated before its time.
        """
        if now < self._paid_at:
            raise InvariantViolated(f"a transfer begins {self._paid_at - now:.3f} s too early")
        price_s = size / self.rate
        self._paid_at = now + price_s
        return price_s

    def end(self, price_s: float, size: int, moved: int, seconds: float) -> None:
        """A transfer of `size` bytes for this price has ended: `moved` of them came, in `seconds`.
        The price of the others is given back."""
        self._paid_at -= price_s * (1 - moved / size)
        if moved and seconds > 0:
            self._bytes = self._bytes * _MEMORY + moved
            self._speeds = self._speeds * _MEMORY + moved * (moved / seconds)


class FetchState(enum.Enum):
    """What has become of a block since a call began to fetch it."""

    RUNNING = enum.auto()
    REVOKED = enum.auto()


class Fetches:
    """The blocks that calls are fetching now: each by one call, and none that was removed.

    | state   | means                                 | next, when                                |
    |---------|---------------------------------------|-------------------------------------------|
    | (none)  | no call fetches the block             | RUNNING: a call begins with it            |
    | RUNNING | the source is asked, or the bytes are | REVOKED: a removal of the block arrives;  |
    |         | on their way; it may be sealed        | (none): it is sealed, or the call ends    |
    | REVOKED | the same, but it must not be sealed   | (none): the call ends                     |
    """

    def __init__(self) -> None:
        self._states: dict[_Key, FetchState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, namespace: Namespace, part: int, digest: bytes) -> bool:
        """False when another call is fetching this block."""
        key = namespace, part, digest
        if key in self._states:
            return False
        self._states[key] = FetchState.RUNNING
        return True

    def revoke(self, namespace: Namespace, digests: Sequence[bytes], part: int | None) -> None:
        """Blocks are removed: what is on its way must not bring them back."""
        if not self._states:
            return
        for one in range(namespace.parts) if part is None else (part,):
            for digest in digests:
                if (namespace, one, digest) in self._states:
                    self._states[namespace, one, digest] = FetchState.REVOKED

    def may_seal(self, namespace: Namespace, part: int, digest: bytes) -> bool:
        """Whether the block may become visible: it was not removed since its call began."""
        return self._states.get((namespace, part, digest)) is FetchState.RUNNING

    def end(self, namespace: Namespace, part: int, digest: bytes) -> None:
        """The call has ended for this block."""
        del self._states[namespace, part, digest]


class Receivers:
    """Who has fetched a block from this server, so that its removal can follow it.

    A removal goes to all servers, each at its own time. One may get it before it fetches the block,
    from a server that has not got it yet; so that server passes it on. Removals take seconds at
    most, so the last `limit` records are enough, each tenant's among them (design: moves).
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._servers: Recent[_Key, tuple[str, ...]] = Recent(limit)

    def __len__(self) -> int:
        return len(self._servers)

    @property
    def dropped(self) -> int:
        """Records that were dropped at the limit: removals that nobody passes on any more."""
        return self._servers.dropped

    def add(self, namespace: Namespace, part: int, digest: bytes, server: str) -> None:
        """`server` is about to fetch the block. At the limit the oldest record is dropped, of a
        tenant that has more than its part."""
        key, tenant = (namespace, part, digest), tenant_of(namespace.name)
        others = [one for one in self._servers.get(tenant, key) or () if one != server]
        self._servers.put(tenant, key, (*others, server)[-_RECEIVERS_MAX:])

    def of(
        self, namespace: Namespace, digests: Sequence[bytes], part: int | None
    ) -> dict[str, list[bytes]]:
        """Which of the blocks each server has fetched, or is about to."""
        found: dict[str, dict[bytes, None]] = {}
        if len(self._servers):
            tenant = tenant_of(namespace.name)
            for one in range(namespace.parts) if part is None else (part,):
                for digest in digests:
                    for server in self._servers.get(tenant, (namespace, one, digest)) or ():
                        found.setdefault(server, {})[digest] = None
        return {server: list(blocks) for server, blocks in found.items()}

    def take(
        self, namespace: Namespace, digests: Sequence[bytes], part: int | None
    ) -> dict[str, list[bytes]]:
        """Blocks are removed: which of them to remove from which servers, each pair once."""
        found = self.of(namespace, digests, part)
        for one in range(namespace.parts) if found else ():
            if part is None or one == part:
                for digest in digests:
                    self._servers.pop(tenant_of(namespace.name), (namespace, one, digest))
        return found
