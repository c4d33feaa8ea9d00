"""Published policies in the stores of `kvpool replay --dry`, beside `density` and `programs`.

    python -m benchmarks.rivals conversation_trace.jsonl --capacity 5000

Each is what its paper proposes, over what the store asks of all: only blocks without children go,
so a queue is one of leaves, in the order in which they came or were used. What papers on serving
agents propose is here already: a lifetime that is learned from pauses is `lease`, and the steps
until a session goes on are `resume_in`.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Annotated, Any, Final

import typer

from kvpool import registry
from kvpool.errors import ConfigError
from kvpool.server.state.entry import Entry
from kvpool.tools import traces, workloads
from kvpool.tools.policy_study import play

#: `policy_data` of a block that is reserved.
_NEW: Final = -1
_Evictable = Callable[[Entry], bool]


class Rival:
    """Leaves in one heap, by `rank`; a use changes `policy_data`, the number of uses."""

    def __init__(self, capacity: int) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._stamp = 0
        self._stored = 0

    def touch(self, block: Entry, now: float) -> None:
        before = block.last_used
        self._stamp = block.last_used = max(self._stamp + 1, int(now * 1e6))
        if block.policy_data == _NEW:  # it was reserved, and is sealed
            block.policy_data = 1
        elif block.policy_data:
            block.policy_data += 1
            self.used(block, before)
        else:
            block.policy_data = _NEW
            self._stored += 1
            self.came(block)

    def add_candidate(self, block: Entry) -> None:
        if not block.is_candidate:
            block.is_candidate = True
            self.push(block)

    def remove(self, block: Entry) -> None:
        block.is_candidate = False
        self._stored -= block.policy_data != 0
        self.left(block)
        block.policy_data = 0

    def victim(self, newcomer: Entry, evictable: _Evictable, now: float) -> Entry | None:
        while (block := self.lowest()) is not None:
            block.is_candidate = False
            if evictable(block):
                return block
        return None

    def victim_age(self, now: float) -> float:
        return 0.0

    # What the policies differ in.

    def rank(self, block: Entry) -> int:
        return block.last_used

    def came(self, block: Entry) -> None: ...

    def used(self, block: Entry, before: int) -> None: ...

    def left(self, block: Entry) -> None: ...

    def push(self, block: Entry) -> None:
        heappush(self._heap, (self.rank(block), block.last_used, block))

    def lowest(self) -> Entry | None:
        return self.first_of(self._heap)

    def first_of(self, heap: list[tuple[int, int, Entry]]) -> Entry | None:
        """Remove the leaf of lowest rank; what has another one by now is sorted in again."""
        while heap:
            rank, _, block = heappop(heap)
            if block.is_candidate:
                if rank == self.rank(block):
                    return block
                self.push(block)
        return None


class LRU2(Rival):
    """O'Neil, 1993: the oldest last use but one goes; of those used once the least recent."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._before: dict[bytes, int] = {}
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()

    def rank(self, block: Entry) -> int:
        before = self._before.get(block.digest)
        return block.last_used if before is None else (1 << 60) + before

    def came(self, block: Entry) -> None:
        if (before := self._ghosts.pop(block.digest, None)) is not None:
            self._before[block.digest] = before

    def used(self, block: Entry, before: int) -> None:
        self._before[block.digest] = before

    def left(self, block: Entry) -> None:
        self._before.pop(block.digest, None)
        self._ghosts[block.digest] = block.last_used
        if len(self._ghosts) > 2 * self._stored:
            self._ghosts.popitem(last=False)


class Sieve(Rival):
    """Zhang, NSDI 2024: in order of arrival; who was used is spared once, and the hand goes on."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._arrived: dict[bytes, int] = {}
        self._visited: set[bytes] = set()
        self._hand = 0
        self._behind: list[tuple[int, int, Entry]] = []  # the hand, in its next round

    def rank(self, block: Entry) -> int:
        return self._arrived[block.digest]

    def came(self, block: Entry) -> None:
        self._arrived[block.digest] = self._stamp

    def used(self, block: Entry, before: int) -> None:
        self._visited.add(block.digest)

    def left(self, block: Entry) -> None:
        self._visited.discard(block.digest)
        self._arrived.pop(block.digest, None)

    def push(self, block: Entry) -> None:
        rank = self.rank(block)
        heappush(self._heap if rank >= self._hand else self._behind, (rank, rank, block))

    def lowest(self) -> Entry | None:
        for _ in range(3):
            while (block := self.first_of(self._heap)) is not None:
                rank = self._hand = self.rank(block)
                if block.digest not in self._visited:
                    return block
                self._visited.remove(block.digest)
                heappush(self._behind, (rank, rank, block))
            self._heap, self._behind, self._hand = self._behind, [], 0
        return None


class S3FIFO(Rival):
    """Yang, SOSP 2023: a small queue for what comes, a main one for what was used there, and names
    of what has left the small one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._main: list[tuple[int, int, Entry]] = []
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._order: dict[bytes, int] = {}
        self._hits: Counter[bytes] = Counter()  # at most 3
        self._small: set[bytes] = set()

    def rank(self, block: Entry) -> int:
        return self._order[block.digest]

    def came(self, block: Entry) -> None:
        self._order[block.digest] = self._stamp
        if self._ghosts.pop(block.digest, 0) is not None:
            self._small.add(block.digest)

    def used(self, block: Entry, before: int) -> None:
        self._hits[block.digest] = min(3, self._hits[block.digest] + 1)

    def left(self, block: Entry) -> None:
        digest = block.digest
        if digest in self._small:
            self._small.remove(digest)
            self._ghosts[digest] = None
            if len(self._ghosts) > 0.9 * self._stored:
                self._ghosts.popitem(last=False)
        self._order.pop(digest, None)
        self._hits.pop(digest, None)

    def push(self, block: Entry) -> None:
        is_small = block.digest in self._small
        rank = self.rank(block)
        heappush(self._heap if is_small else self._main, (rank, rank, block))

    def lowest(self) -> Entry | None:
        while True:
            if len(self._small) > 0.1 * self._stored:
                while (block := self.first_of(self._heap)) is not None:
                    if self._hits[block.digest] <= 1:
                        return block
                    self._small.discard(block.digest)
                    self._again(block)
                    if len(self._small) <= 0.1 * self._stored:
                        break
            while (block := self.first_of(self._main)) is not None:
                if not self._hits[block.digest]:
                    return block
                self._again(block)
            if (block := self.first_of(self._heap)) is not None or not self._main:
                return block

    def _again(self, block: Entry) -> None:
        """To the end of the main queue."""
        self._hits[block.digest] = max(0, self._hits[block.digest] - 1)
        self._stamp += 1
        self._order[block.digest] = self._stamp
        self.push(block)


class TinyLFU(Rival):
    """Einziger, 2017: what leaves a window of 1 % stays only if it was asked for more often than
    what would go for it. Frequencies are exact, and halved after ten uses of each block."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._main: list[tuple[int, int, Entry]] = []
        self._window: set[bytes] = set()
        self._protected: set[bytes] = set()
        self._asked: Counter[bytes] = Counter()
        self._counted = 0

    def rank(self, block: Entry) -> int:
        return block.last_used + ((1 << 60) if block.digest in self._protected else 0)

    def came(self, block: Entry) -> None:
        self._window.add(block.digest)
        self._count(block)

    def used(self, block: Entry, before: int) -> None:
        self._count(block)
        if block.digest not in self._window and len(self._protected) < 0.8 * self._stored:
            self._protected.add(block.digest)

    def left(self, block: Entry) -> None:
        self._window.discard(block.digest)
        self._protected.discard(block.digest)

    def push(self, block: Entry) -> None:
        heap = self._heap if block.digest in self._window else self._main
        heappush(heap, (self.rank(block), block.last_used, block))

    def lowest(self) -> Entry | None:
        new = self.first_of(self._heap) if len(self._window) > 0.01 * self._stored else None
        old = self.first_of(self._main)
        if new is None or old is None:
            return new or old or self.first_of(self._heap)
        stays, goes = (
            (new, old) if self._asked[new.digest] > self._asked[old.digest] else (old, new)
        )
        self._window.discard(stays.digest)
        self.push(stays)
        return goes

    def _count(self, block: Entry) -> None:
        self._asked[block.digest] += 1
        self._counted += 1
        if self._counted > 10 * max(1000, self._stored):
            self._counted = 0
            self._asked = Counter({d: n // 2 for d, n in self._asked.items() if n > 1})


class LHD(Rival):
    """Beckmann, NSDI 2018: of 32 leaves that are drawn the one with the lowest hit density by age
    and number of uses, measured of what was stored."""

    _CLASSES, _BINS, _DRAWN = 4, 20, 32

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        shape = range(self._CLASSES), range(self._BINS)
        self._hits, self._ends, self._density = (
            [[0.0 for _ in shape[1]] for _ in shape[0]] for _ in range(3)
        )
        self._leaves: list[Entry] = []
        self._at: dict[Entry, int] = {}
        self._rng, self._events = random.Random(1), 0

    def used(self, block: Entry, before: int) -> None:
        number, place = self._where(block.policy_data - 1, before)
        self._hits[number][place] += 1
        self._event()

    def left(self, block: Entry) -> None:
        self._drop(block)
        if block.policy_data > 0:
            number, place = self._where(block.policy_data, block.last_used)
            self._ends[number][place] += 1
            self._event()

    def push(self, block: Entry) -> None:
        self._at[block] = len(self._leaves)
        self._leaves.append(block)

    def lowest(self) -> Entry | None:
        if not self._leaves:
            return None
        drawn = self._rng.choices(self._leaves, k=self._DRAWN)
        return self._drop(min(drawn, key=self._worth))

    def _drop(self, block: Entry) -> Entry:
        if (place := self._at.pop(block, None)) is not None:
            last = self._leaves.pop()
            if last is not block:
                self._leaves[place], self._at[last] = last, place
        return block

    def _worth(self, block: Entry) -> tuple[float, int]:
        number, place = self._where(block.policy_data, block.last_used)
        return self._density[number][place], block.last_used

    def _where(self, uses: int, since: int) -> tuple[int, int]:
        quarters = max(0, self._stamp - since) // 250_000
        place = min(self._BINS - 1, quarters.bit_length())
        return min(self._CLASSES, max(1, uses)) - 1, place

    def _event(self) -> None:
        self._events += 1
        if self._events % 5_000:
            return
        for hits, ends, density in zip(self._hits, self._ends, self._density, strict=True):
            later = going = lived = 0.0
            for place in reversed(range(self._BINS)):
                lived += going * 0.25 * 2.0**place
                later += hits[place]
                going += hits[place] + ends[place]
                lived += (hits[place] + ends[place]) * 0.125 * 2.0**place
                density[place] = later / lived if lived else 0.0
            hits[:] = [0.9 * count for count in hits]
            ends[:] = [0.9 * count for count in ends]


RIVALS: Final[dict[str, Callable[[int], Any]]] = {
    "LRU-2": LRU2,
    "SIEVE": Sieve,
    "S3-FIFO": S3FIFO,
    "W-TinyLFU": TinyLFU,
    "LHD": LHD,
}


def _ends(request: traces.Request) -> float | None:
    """What nobody guesses better: the last prompt of a session. When the others go on is not told,
    only learned, as by all."""
    return None if request.resumes_s is None else math.inf


def main(
    trace: Annotated[str, typer.Argument(help="A recorded trace, or `codex`: agents.")] = "codex",
    capacity: Annotated[int, typer.Option(min=1, help="Blocks.")] = 5_000,
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block of agents.")] = 512,
) -> None:
    """Hit rates of policies that are published, and of ours; of agents, also if ends are told."""
    if trace == "codex":
        requests = workloads.codex(concurrent=256, block=block)
    else:
        try:
            requests = traces.load(trace, quiet=True).requests
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
    for name in ("lru", *RIVALS, "density", "programs"):
        make = RIVALS.get(name, partial(registry.policy, name))
        played = play(requests, make, capacity).played
        print(f"{name:10} {workloads.hit_rate(played.hits, requests):.2%}", flush=True)
    if trace == "codex":
        make = partial(registry.policy, "density")
        played = play(requests, make, capacity, _ends).played
        print(f"and ends   {workloads.hit_rate(played.hits, requests):.2%}", flush=True)


if __name__ == "__main__":
    typer.run(main)
