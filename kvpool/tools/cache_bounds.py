"""Offline bounds: what a cache of some size would have hit in the same requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

from kvpool.tools.traces import Request
from kvpool.tools.workloads import hit_rate

_NEVER = 1 << 60


class LruCache:
    """Least recently used, tail-first: the yardstick, written apart from the pool's own policy.

    A hit is the longest resident prefix. Then every block of the request is stored, the head as
    the most recent; of a chain longer than the cache only what fits is offered.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def play(self, chain: Sequence[int]) -> int:
        """The hits of one request."""
        blocks = self._blocks
        hits = 0
        for id in chain:
            if id not in blocks:
                break
            hits += 1
        for id in reversed(chain[: self.capacity]):
            blocks[id] = None
            blocks.move_to_end(id)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
        return hits


def lru(requests: Sequence[Request], capacity: int) -> float:
    """Block hit rate of one cache of `capacity` blocks."""
    return isolated(requests, capacity, 1)


def belady(requests: Sequence[Request], capacity: int) -> float:
    """Block hit rate that no policy can exceed, exactly: MIN, free to refuse what comes.

    It keeps what is used soonest. A parent is never used later than its child, so with the
    deepest going first on ties what is kept is always prefixes: the bound is attained.
    """
    ends: list[list[int]] = []  # for each request, when each of its blocks is used next
    seen: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        chain = requests[number].chain
        ends.append([seen.get(id, _NEVER) for id in chain])
        seen.update(dict.fromkeys(chain, number))
    kept: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits = 0
    for request, following in zip(requests, reversed(ends), strict=True):
        hits += next((n for n, id in enumerate(request.chain) if id not in kept), len(following))
        for depth, (id, end) in enumerate(zip(request.chain, following, strict=True)):
            if end != _NEVER:
                kept[id] = end
                heappush(furthest, (-end, -depth, id))
            else:
                kept.pop(id, None)
        while len(kept) > capacity:
            end, _, id = heappop(furthest)
            if kept.get(id) == -end:
                del kept[id]
    return hit_rate(hits, requests)


def isolated(requests: Sequence[Request], capacity: int, count: int) -> float:
    """Block hit rate of `count` caches that share `capacity` and take turns."""
    caches = [LruCache(capacity // count) for _ in range(count)]
    hits = sum(
        caches[number % count].play(request.chain) for number, request in enumerate(requests)
    )
    return hit_rate(hits, requests)


def ideal(requests: Sequence[Request]) -> float:
    """Block hit rate of a cache that never runs full."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        for id in request.chain:
            if id not in seen:
                break
            hits += 1
        seen.update(request.chain)
    return hit_rate(hits, requests)


def working_set(requests: Sequence[Request]) -> int:
    """Blocks that were used and will be used again: the mean over the middle half of the time.

    What a master measures as the live working set, over its last minutes: the two are equal while
    the load is steady. A cache of the size of the peak could hold every block between its uses.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for request in requests:
        for id in request.chain:
            first.setdefault(id, request.time_s)
            last[id] = request.time_s
    begin, end = requests[0].time_s, requests[-1].time_s
    quarter_s = (end - begin) / 4
    begin, end = begin + quarter_s, end - quarter_s
    if end <= begin:
        return len(first)
    held_s = sum(max(0.0, min(last[id], end) - max(first[id], begin)) for id in first)
    return round(held_s / (end - begin))


def working_set_peak(requests: Sequence[Request]) -> int:
    """The most blocks at any time that were used and will be used again."""
    uses = Counter(id for request in requests for id in request.chain)
    left, live, peak = dict(uses), 0, 0
    for request in requests:
        for id in request.chain:
            left[id] -= 1
            if uses[id] > 1 and left[id] == uses[id] - 1:
                live += 1
        peak = max(peak, live)  # of all that this request uses
        live -= sum(left[id] == 0 and uses[id] > 1 for id in request.chain)
    return peak
