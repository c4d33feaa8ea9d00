"""One engine's blocks, and where the pool has them, as one stream of KV events: pure.

An engine's own stream has tokens and hashes, and knows nothing of what the pool evicts. The pool
has no tokens. Here the two meet by their hashes: a block that the engine has told of is announced
wherever the pool has it, also after the engine itself has evicted it, until the pool has lost it,
too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from kvpool.client.pool_events import PoolEvent, PoolEventKind
from kvpool.kv_events import (
    EVENT_BLOCKS_MAX,
    OWNERSHIP,
    ClearedEvent,
    EventForm,
    EventHash,
    KVEvent,
    RemovedEvent,
    Residency,
    StoredEvent,
    announced,
    joined,
    removals,
    residency,
    short_hash,
)
from kvpool.ops.pool_stream import COPIES_MAX, PoolStream
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.types import Namespace

#: Blocks of the engine that are known, each some 500 bytes; beyond it the one that the engine
#: stored first is forgotten, and with it where the pool has it.
KNOWN_MAX: Final = 262_144
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(StoredEvent).decode


@dataclass(slots=True)
class _Known:
    """A block that the engine has told of: its event, encoded, alone and without a place; the
    places that the engine itself has told; and where the pool has it, as it was announced."""

    event: bytes
    own: tuple[Residency, ...] = ()
    pool: Residency | None = None


class EngineStream:
    """What is published about one engine, beside its own batches, which pass as they are.

    A block, named by the last 64 bits of its hash, is in one of these states:

    | state     | the engine has told | the pool has it | routers know of a copy in the pool |
    |-----------|---------------------|-----------------|------------------------------------|
    | unknown   | no                  | yes or no       | no                                 |
    | known     | its tokens          | no              | no                                 |
    | announced | its tokens          | yes             | yes, of the nearest one            |

    Of the copies of a block that one counts which an engine on `host` loads fastest. Blocks of
    other groups than `group`, and of requests with a LoRA adapter, have other keys in the pool.
    `known_max` and `copies_max` bound what is held; `left_out` counts copies beyond.
    """

    def __init__(
        self,
        namespace: Namespace,
        form: EventForm,
        host: str,
        *,
        group: int = 0,
        known_max: int = KNOWN_MAX,
        copies_max: int = COPIES_MAX,
    ) -> None:
        self._form = form
        self._host = host
        self._group = group
        self._known_max = known_max
        self._copies = PoolStream(namespace, "short", copies_max)
        self._known: OrderedDict[EventHash, _Known] = OrderedDict()
        self._hosts: dict[str, str] = {}  # by server
        #: By hash: a bit for each server and medium.
        self._places: PiecewiseDict[EventHash, int] = PiecewiseDict()
        self._bits: dict[tuple[str, str], int] = {}
        self._masks: dict[Residency, int] = {}  # best first
        self._reading = False  # the map is read anew, and what is missing may still come

    def __len__(self) -> int:
        return len(self._known)

    @property
    def left_out(self) -> int:
        return self._copies.left_out

    # --- the engine -------------------------------------------------------------------------

    def on_engine(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """Take a batch of the engine, which has been published; returns what to publish next."""
        touched: dict[EventHash, None] = {}
        gone: list[tuple[EventHash, int | None, Residency]] = []
        for event in events:
            if isinstance(event, ClearedEvent):
                # Routers have forgotten all of it. Its weights may be others now, so that what the
                # pool has is no longer of use: what is, the engine tells anew.
                self._known.clear()
                touched.clear()
                gone.clear()
            elif isinstance(event, RemovedEvent):
                self._removed(event)
            else:
                self._stored(event, touched)
        while len(self._known) > self._known_max:
            hash, known = self._known.popitem(last=False)
            touched.pop(hash, None)
            if known.pool is not None:
                gone.append(self._row(known, known.pool))
        return [*removals(gone), *self._changes(touched)]

    def on_engine_lost(self) -> Iterator[list[KVEvent]]:
        """Batches of the engine are missing, or it has been started again: routers forget it, and
        learn again what the pool has of it. Take all batches before the next event."""
        for known in self._known.values():
            known.own, known.pool = (), None
        yield [ClearedEvent()]
        yield from self._all_changes()

    # --- the pool ---------------------------------------------------------------------------

    def on_pool(self, event: PoolEvent) -> Iterator[list[KVEvent]]:
        """What to publish after a change of the pool, empty batches for pauses among them. Take all
        of them before the next event."""
        if event.kind is PoolEventKind.BACK and self._hosts.get(event.server) != event.host:
            self._hosts[event.server] = event.host
            self._masks.clear()
        if event.kind is PoolEventKind.RESET:
            # Most of it is still there, and told again: nothing is taken back before LIVE.
            self._reading = True
            for _ in self._copies.apply(event):
                yield []
            for piece in self._places.pieces():
                self._places.changed(-len(piece))
                piece.clear()
                yield []
            return
        if event.kind is PoolEventKind.LIVE:
            self._reading = False
            yield from self._all_changes()
            return
        for batch in self._copies.apply(event):
            touched: dict[EventHash, None] = {}
            for change in batch:
                self._move(change, touched)
            if changes := self._changes(touched):
                yield changes

    def snapshot(self) -> Iterator[list[KVEvent]]:
        """All that the engine and the pool have of the blocks that are known, in parts."""
        names = list(self._known)
        for first in range(0, len(names), EVENT_BLOCKS_MAX):
            by_place: dict[Residency, list[StoredEvent]] = {}
            for hash in names[first : first + EVENT_BLOCKS_MAX]:
                known = self._known.get(hash)
                if known is None:
                    continue
                places = (*known.own, known.pool) if known.pool is not None else known.own
                for where in places:
                    by_place.setdefault(where, []).append(_at(known, where))
            if part := [one for stored in by_place.values() for one in joined(stored)]:
                yield list(part)

    # --- inside -----------------------------------------------------------------------------

    def _stored(self, event: StoredEvent, touched: dict[EventHash, None]) -> None:
        count, size = len(event.block_hashes), event.block_size
        if event.ownership == OWNERSHIP or event.group_idx not in (None, self._group):
            return
        if size <= 0 or len(event.token_ids) != count * size:
            return
        where = Residency(event.medium, event.locality, event.ownership)  # type: ignore[arg-type]
        parent = event.parent_block_hash
        for number, hash in enumerate(event.block_hashes):
            name = _name(hash)
            known = self._known.get(name)
            if known is None:
                keys = event.extra_keys
                alone = msgspec.structs.replace(
                    event,
                    block_hashes=[hash],
                    parent_block_hash=parent,
                    token_ids=event.token_ids[number * size : (number + 1) * size],
                    extra_keys=[keys[number]] if keys and number < len(keys) else None,
                    medium=None,
                    locality=None,
                    ownership=None,
                )
                known = self._known[name] = _Known(_ENCODE(alone))
            if where not in known.own:
                known.own += (where,)
            self._known.move_to_end(name)
            touched[name] = None
            parent = hash

    def _removed(self, event: RemovedEvent) -> None:
        where = Residency(event.medium, event.locality, event.ownership)  # type: ignore[arg-type]
        for hash in event.block_hashes:
            known = self._known.get(_name(hash))
            if known is not None and event.group_idx in (None, self._group):
                known.own = tuple(one for one in known.own if one != where)

    def _move(self, change: KVEvent, touched: dict[EventHash, None]) -> None:
        """One server has these blocks in one medium, or has them no more."""
        assert not isinstance(change, ClearedEvent)
        server = (change.ownership or "").removeprefix(f"{OWNERSHIP}/")
        place = (server, change.medium or "")
        if place not in self._bits:
            self._bits[place] = 1 << len(self._bits)
            self._masks.clear()
        bit = self._bits[place]
        for hash in change.block_hashes:
            before = self._places.get(hash) or 0
            after = before | bit if isinstance(change, StoredEvent) else before & ~bit
            if after:
                self._places[hash] = after
            elif before:
                del self._places[hash]
            if hash in self._known:
                touched[hash] = None

    def _changes(self, names: Iterable[EventHash]) -> list[KVEvent]:
        """Announce these blocks where the pool has them now."""
        gone: list[tuple[EventHash, int | None, Residency]] = []
        come: list[StoredEvent] = []
        for name in names:
            known = self._known[name]
            where = self._nearest(name)
            if where == known.pool or (where is None and self._reading):
                continue
            if where is not None and not announced(self._form, _DECODE(known.event)):
                continue
            if known.pool is not None:
                gone.append(self._row(known, known.pool))
            known.pool = where
            if where is not None:
                come.append(_at(known, where))
        # In this order: a block that has moved is here again at the end.
        return [*removals(gone), *joined(come)]

    def _all_changes(self) -> Iterator[list[KVEvent]]:
        names = list(self._known)
        for first in range(0, len(names), EVENT_BLOCKS_MAX):
            part = [name for name in names[first : first + EVENT_BLOCKS_MAX] if name in self._known]
            if changes := self._changes(part):
                yield changes

    def _nearest(self, name: EventHash) -> Residency | None:
        places = self._places.get(name)
        if not places:
            return None
        if not self._masks:
            self._make_masks()
        return next(where for where, mask in self._masks.items() if places & mask)

    def _make_masks(self) -> None:
        """For each description of a copy, best first, the copies that have it."""
        for near in (True, False):
            for medium, tier in (("CPU", "dram"), ("STORAGE", "nvme")):
                where = residency(self._form, near=near, tier=tier)
                self._masks.setdefault(where, 0)
                for (server, held), bit in self._bits.items():
                    if held == medium and (self._hosts.get(server) == self._host) is near:
                        self._masks[where] |= bit

    def _row(self, known: _Known, where: Residency) -> tuple[EventHash, int | None, Residency]:
        event = _DECODE(known.event)
        return event.block_hashes[0], event.group_idx, where


def _name(hash: EventHash) -> EventHash:
    return short_hash(hash) if isinstance(hash, bytes) else hash


def _at(known: _Known, where: Residency) -> StoredEvent:
    return msgspec.structs.replace(_DECODE(known.event), **where._asdict())
