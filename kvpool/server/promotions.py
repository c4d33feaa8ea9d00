"""What comes up from a slower tier for readers, and who waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace

#: A reader is answered when so many bytes have been promoted for it, or all of its blocks.
PROMOTED_BYTES_MIN: Final = 8 << 20
#: While readers wait for a slow tier, what nobody waits for yields to them, at most this long.
_YIELD_S: Final = 0.05

_Key = tuple[Namespace, int, bytes]


class PromotionWaiter:
    """A reader that waits until enough of its blocks have been promoted."""

    __slots__ = ("ready", "remaining", "size")

    def __init__(self, ready: asyncio.Future[None]) -> None:
        self.ready = ready
        self.remaining = 0
        self.size = 0

    def arrived(self, size: int) -> None:
        """One promotion has ended, well or not: the reader looks again by itself."""
        self.remaining -= 1
        self.size += size
        if (self.remaining <= 0 or self.size >= PROMOTED_BYTES_MIN) and not self.ready.done():
            self.ready.set_result(None)


class Promotions:
    """The promotions under way: those that readers asked for take up to `size_max` bytes, of each
    tenant its share. One with many readers would keep those of all others from the disk."""

    def __init__(self, size_max: int) -> None:
        self._shares = Shares(size_max)
        #: By block: the transfer, and the readers that wait for it.
        self._under_way: dict[_Key, tuple[TierTransfer, list[PromotionWaiter]]] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __repr__(self) -> str:
        return f"<Promotions of {len(self._under_way)} blocks>"

    @property
    def size(self) -> int:
        """Bytes of those that readers asked for."""
        return self._shares.used

    def left(self, namespace: Namespace) -> int:
        """Bytes of a namespace that may come up for readers besides."""
        return self._shares.room(tenant_of(namespace.name))

    def missing(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> list[bytes]:
        """Those that are not under way."""
        under_way = self._under_way
        return [digest for digest in digests if (namespace, part, digest) not in under_way]

    def begin(self, copy: TierTransfer) -> None:
        self._under_way[_key(copy)] = copy, []
        if not copy.prefetch:
            self._shares.hold(_tenant(copy), copy.entry.size)
            self._none.clear()

    def end(self, copy: TierTransfer) -> None:
        """Let its readers look again, once."""
        key = _key(copy)
        found = self._under_way.get(key)
        if found is None or found[0] is not copy:
            return  # of a place that was lost meanwhile
        del self._under_way[key]
        if not copy.prefetch:
            self._shares.give_back(_tenant(copy), copy.entry.size)
        if not self.size:
            self._none.set()
        for waiter in found[1]:
            waiter.arrived(copy.entry.size)

    def of(self, is_there: Callable[[TierTransfer], bool]) -> list[TierTransfer]:
        """Those under way for which this holds."""
        return [copy for copy, _ in self._under_way.values() if is_there(copy)]

    def waiter(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> PromotionWaiter:
        """For a reader of these blocks, of which some are under way."""
        waiter = PromotionWaiter(asyncio.get_running_loop().create_future())
        for digest in digests:
            found = self._under_way.get((namespace, part, digest))
            if found is not None:
                found[1].append(waiter)
                waiter.remaining += 1
        return waiter

    async def wait_for_readers(self) -> None:
        """Return when no reader waits for a slow tier, or after a moment: readers come first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_YIELD_S):
                await self._none.wait()


def _key(copy: TierTransfer) -> _Key:
    index = copy.entry.index
    return index.namespace, index.part, copy.entry.digest


def _tenant(copy: TierTransfer) -> str:
    return tenant_of(copy.entry.index.namespace.name)
