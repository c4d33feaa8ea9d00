"""What the pool has, as a stream of KV events in vLLM's format: pure.

An event of the pool has no tokens, because the pool knows none: a router relates it to an engine's
blocks by their hashes. `ownership` names the server, since the same block may be on several, and
each of them loses it alone. (design: pool-events)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

from kvpool.client.pool_events import PoolEvent, PoolEventKind
from kvpool.kv_events import (
    EVENT_BLOCKS_MAX,
    OWNERSHIP,
    ClearedEvent,
    EventHash,
    KVEvent,
    RemovedEvent,
    Residency,
    StoredEvent,
    residency,
    short_hash,
)
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.types import Namespace

#: Copies of blocks that a stream knows, each some 150 bytes; further ones are left out.
COPIES_MAX: Final = 20_000_000
#: `short`: the last 64 bits, as engines publish them by default; `full`: the key in the pool.
HashForm: TypeAlias = Literal["short", "full"]


class _Copies:
    """What one server has: for each block the tiers of its parts, empty for one that it lacks."""

    def __init__(self) -> None:
        self.tiers: PiecewiseDict[bytes, tuple[str, ...]] = PiecewiseDict()
        self.lost = False


class PoolStream:
    """One namespace of the pool. `apply` takes events, and gives batches of what they mean.

    A block counts as stored at a server that has all of its parts. The state changes with each
    batch that `apply` gives, so `snapshot` is right for what was published until then.
    """

    def __init__(
        self, namespace: Namespace, hashes: HashForm = "short", copies_max: int = COPIES_MAX
    ) -> None:
        self._namespace = namespace
        self._hashes = hashes
        self._copies_max = copies_max
        self._servers: dict[str, _Copies] = {}
        self._count = 0
        #: Copies that were left out, because there are too many.
        self.left_out = 0

    def __len__(self) -> int:
        return self._count

    def apply(self, event: PoolEvent) -> Iterator[list[KVEvent]]:
        """Batches of about 512 blocks. Take all of them before the next event."""
        match event.kind:
            case PoolEventKind.RESET:
                for copies in self._servers.values():
                    copies.lost = True  # a snapshot that is under way leaves them out
                yield [ClearedEvent()]
                for server in list(self._servers):
                    yield from self._forget(server)
            case PoolEventKind.STORED | PoolEventKind.REMOVED:
                if event.namespace == self._namespace and event.part < self._namespace.parts:
                    tier = event.tier if event.kind is PoolEventKind.STORED else ""
                    for first in range(0, len(event.digests), EVENT_BLOCKS_MAX):
                        digests = event.digests[first : first + EVENT_BLOCKS_MAX]
                        if batch := self._change(event.server, event.part, tier, digests):
                            yield batch
            case PoolEventKind.CLEARED:
                yield from self._forget(event.server)
            case PoolEventKind.LOST | PoolEventKind.LEFT | PoolEventKind.BACK:
                lost = event.kind is not PoolEventKind.BACK
                copies = self._servers.setdefault(event.server, _Copies())
                if copies.lost is not lost:
                    yield from self._show(event.server, copies, lost=lost)
            case PoolEventKind.LIVE:
                pass

    def snapshot(self) -> Iterator[list[KVEvent]]:
        """All that is there, in parts; others may change it between them."""
        for server in list(self._servers):
            copies = self._servers.get(server)
            if copies is None or copies.lost:
                continue
            for piece in copies.tiers.pieces():
                if copies.lost:
                    break
                if batch := self._stored(server, piece):
                    yield batch

    # --- inside -----------------------------------------------------------------------------

    def _change(self, server: str, part: int, tier: str, digests: Sequence[bytes]) -> list[KVEvent]:
        """One part of these blocks is in this tier now; empty: it has gone."""
        copies = self._servers.setdefault(server, _Copies())
        gone: dict[Residency, list[EventHash]] = {}
        come: dict[Residency, list[EventHash]] = {}
        nothing = ("",) * self._namespace.parts
        for digest in digests:
            before = copies.tiers.get(digest) or nothing
            after = (*before[:part], tier, *before[part + 1 :])
            if after == before:
                continue
            if before == nothing and self._count >= self._copies_max:
                self.left_out += 1
                continue
            if after == nothing:
                del copies.tiers[digest]
            else:
                copies.tiers[digest] = after
            self._count += (before == nothing) - (after == nothing)
            was, now = self._where(server, before), self._where(server, after)
            if was != now and not copies.lost:
                if was is not None:
                    gone.setdefault(was, []).append(self._hash(digest))
                if now is not None:
                    come.setdefault(now, []).append(self._hash(digest))
        return [
            *(_removed(where, hashes) for where, hashes in gone.items()),
            *(_stored(where, hashes) for where, hashes in come.items()),
        ]

    def _show(self, server: str, copies: _Copies, *, lost: bool) -> Iterator[list[KVEvent]]:
        """All copies of a server cannot be read any more, or again."""
        batches = self._removed if lost else self._stored
        copies.lost = lost
        for piece in copies.tiers.pieces():
            if batch := batches(server, piece):
                yield batch

    def _forget(self, server: str) -> Iterator[list[KVEvent]]:
        copies = self._servers.get(server)
        if copies is None:
            return
        for piece in copies.tiers.pieces():
            batch = [] if copies.lost else self._removed(server, piece)
            copies.tiers.changed(-len(piece))
            self._count -= len(piece)
            piece.clear()
            yield batch
        del self._servers[server]

    def _stored(self, server: str, piece: dict[bytes, tuple[str, ...]]) -> list[KVEvent]:
        return [_stored(*one) for one in self._grouped(server, piece)]

    def _removed(self, server: str, piece: dict[bytes, tuple[str, ...]]) -> list[KVEvent]:
        return [_removed(*one) for one in self._grouped(server, piece)]

    def _grouped(
        self, server: str, piece: dict[bytes, tuple[str, ...]]
    ) -> Iterator[tuple[Residency, list[EventHash]]]:
        found: dict[Residency, list[EventHash]] = {}
        for digest, tiers in piece.items():
            where = self._where(server, tiers)
            if where is not None:
                found.setdefault(where, []).append(self._hash(digest))
        for where, hashes in found.items():
            for first in range(0, len(hashes), EVENT_BLOCKS_MAX):
                yield where, hashes[first : first + EVENT_BLOCKS_MAX]

    def _where(self, server: str, tiers: tuple[str, ...]) -> Residency | None:
        if "" in tiers:
            return None
        found = {residency("shared", near=False, tier=tier).medium for tier in tiers}
        medium = "STORAGE" if "STORAGE" in found else "CPU"
        return Residency(medium, "REMOTE", f"{OWNERSHIP}/{server}")

    def _hash(self, digest: bytes) -> EventHash:
        return short_hash(digest) if self._hashes == "short" else digest


def _stored(where: Residency, hashes: list[EventHash]) -> StoredEvent:
    return StoredEvent(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        lora_name=None,
        **where._asdict(),
    )


def _removed(where: Residency, hashes: list[EventHash]) -> RemovedEvent:
    return RemovedEvent(block_hashes=hashes, **where._asdict())
