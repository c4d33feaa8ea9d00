"""Heaps of which most is out of date become small again, and no call does much at once for it."""

from __future__ import annotations

import random
from collections import OrderedDict
from heapq import nsmallest
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpool.server.eviction.density import Density
from kvpool.server.eviction.lazy_heap import LazyHeap
from kvpool.server.eviction.lru import LRU
from kvpool.server.state.write_back import WriteBack


class Block:
    """What a policy sees of a block; it counts how often it is looked at."""

    looks = 0

    def __init__(self, name: int) -> None:
        self.digest = name.to_bytes(16, "big")
        self.last_used = 0
        self.policy_data = 0
        self._candidate = False

    @property
    def is_candidate(self) -> bool:
        Block.looks += 1
        return self._candidate

    @is_candidate.setter
    def is_candidate(self, value: bool) -> None:
        self._candidate = value


def filled(count: int) -> tuple[LRU[Any], list[Block]]:
    policy: LRU[Any] = LRU()
    blocks = [Block(number) for number in range(count)]
    for number, block in enumerate(blocks):
        policy.touch(block, float(number))
        policy.add_candidate(block)
    return policy, blocks


def test_no_removal_looks_at_many_blocks() -> None:
    policy, blocks = filled(20_000)
    gone = random.Random(1).sample(blocks, 19_000)
    most = 0
    for block in gone:
        Block.looks = 0
        policy.remove(block)
        most = max(most, Block.looks)
    assert most < 20
    assert len(policy._heap) + len(policy._rest) < 6_000
    left = sorted(set(blocks) - set(gone), key=lambda block: block.last_used)
    assert victims(policy) == left


def victims(policy: LRU[Any]) -> list[Block]:
    found = []
    while (victim := policy.victim(Block(0), lambda block: True, 1e9)) is not None:
        if isinstance(victim, Block):  # else: not yet
            found.append(victim)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_oldest_goes_first_whatever_is_tidied(seed: int) -> None:
    rng = random.Random(seed)
    policy, blocks = filled(3_000)
    here = dict.fromkeys(blocks)
    now = 3_000.0
    for _ in range(5_000):
        now += 1
        block = rng.choice(blocks)
        if block not in here:
            policy.touch(block, now)
            policy.add_candidate(block)
            here[block] = None
        elif rng.random() < 0.2:
            policy.touch(block, now)
        elif rng.random() < 0.9:
            policy.remove(block)
            del here[block]
        else:
            victim = policy.victim(block, lambda block: True, now)
            if isinstance(victim, Block):
                assert victim is nsmallest(1, here, key=lambda one: one.last_used)[0]
                del here[victim]
        assert policy.victim_age(now) >= 0
    assert victims(policy) == sorted(here, key=lambda block: block.last_used)


def test_what_is_current_stays_in_order_and_the_rest_goes() -> None:
    rng = random.Random(3)
    times: dict[int, float] = {}
    looks = 0

    def is_current(entry: tuple[float, int]) -> bool:
        nonlocal looks
        looks += 1
        return times.get(entry[1]) == entry[0]

    heap: LazyHeap[tuple[float, int]] = LazyHeap(is_current)
    for _ in range(30_000):
        name, time = rng.randrange(500), rng.random()
        times[name] = time
        looks = 0
        heap.push((time, name), len(times))
        assert looks < 20
        assert len(heap) < 4 * len(times) + 4096
    found = []
    while (entry := heap.first()) is not None:
        if is_current(entry):
            found.append(entry)
        heap.pop()
    assert found == sorted((time, name) for name, time in times.items())


def test_dirty_blocks_are_in_order_whatever_comes_back_and_goes() -> None:
    rng = random.Random(5)
    queue: OrderedDict[Any, None] = OrderedDict()
    front = SimpleNamespace(allocator=SimpleNamespace(capacity=1 << 20), drops_useless=False)
    waiting = WriteBack(cast(Any, front), queue)
    blocks = [Block(number) for number in range(300)]
    for now in range(20_000):
        block = rng.choice(blocks)
        if block not in queue:
            block.last_used = now
            queue[block] = None
            waiting.queued(cast(Any, block))
        elif rng.random() < 0.2:
            block.last_used = now
        elif rng.random() < 0.9:
            del queue[block]
        else:
            assert waiting.least_recently_used() is min(queue, key=lambda one: one.last_used)
        assert len(waiting._by_use) < 2000
    while queue:
        first = cast(Block, waiting.least_recently_used())
        assert first is min(queue, key=lambda one: one.last_used)
        del queue[first]


def test_density_asks_again_for_a_block_of_which_a_later_use_is_found() -> None:
    policy: Density[Any] = Density(1)
    blocks = [Block(number) for number in (1, 2)]
    for block in blocks:
        policy.touch(block, 1.0)
        policy.touch(block, 1.0)
        policy.add_candidate(block)
    found = []

    def evictable(block: Any) -> bool:
        if block is blocks[0] and not found:
            found.append(block)
            block.last_used += 1_000_000  # another part of it was used then
            return False
        return True

    assert [policy.victim(Block(3), evictable, 9.0) for _ in range(3)] == [*blocks[::-1], None]
