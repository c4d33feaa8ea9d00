"""`kvpool replay --dry`: the same requests through the real store, without processes or bytes.

The store and its policy are those of a server; time is the trace's. So a policy is measured in
seconds, beside LRU and the bound that no policy can exceed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.core.eviction import Policy
from kvpool.core.store import Entry, Store
from kvpool.types import ROOT, Namespace, ReadStatus, Tag, WriteStatus
from kvpool.workload import Request

_NAMESPACE = Namespace("dry")
_OWNER = 1
#: Every block has this size; only the number of blocks matters.
_SIZE = 4096


@dataclass(slots=True)
class Tally:
    """What came of one policy at one capacity."""

    blocks: int = 0
    hits: int = 0
    evicted: int = 0
    bypassed: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def play(
    requests: Sequence[Request],
    policy: Policy[Entry],
    capacity: int,
    hints: Callable[[Request], float] | None = None,
) -> Tally:
    store = Store(capacity * _SIZE, alignment=_SIZE, policy=policy)
    tally = Tally()
    for request in requests:
        tally.blocks += len(request.chain)
        tally.hits += _play_one(store, request, capacity, hints)
    tally.evicted = store.evicted
    tally.bypassed = store.bypassed
    tally.counters = dict(store.policy.counters)
    return tally


def _play_one(
    store: Store,
    request: Request,
    capacity: int,
    hints: Callable[[Request], float] | None,
) -> int:
    now = request.time_s
    chain = [id.to_bytes(16, "little") for id in request.chain]
    # Leaves go first, so what is here of a chain is a prefix: its length is found by bisection.
    held = bisect_left(chain, True, key=lambda digest: store.peek(_NAMESPACE, 0, digest) is None)
    pins = store.pin(_OWNER, _NAMESPACE, 0, chain[:held], now)
    assert all(pin.status is ReadStatus.HIT for pin in pins)
    tag = None
    if hints is not None:
        known = request.resumes_s is not None
        tag = Tag(str(request.session), hints(request) if known else None)
    fresh = chain[held:capacity]
    if fresh:
        parents = [chain[held - 1] if held else ROOT, *fresh[:-1]]
        sizes = [_SIZE] * len(fresh)
        for answer in store.reserve(_OWNER, _NAMESPACE, 0, fresh, parents, sizes, now, tag):
            if answer.status is WriteStatus.RESERVED:
                store.seal(_OWNER, answer.id, 0, now)
    elif tag is not None and tag.resume_in is not None:
        store.resume(tag.session, tag.resume_in, now)
    if tag is not None and tag.resume_in is None:
        store.end(tag.session, now)
    for pin in pins:
        store.unpin(_OWNER, pin.id)
    store.take_changes()
    return held
