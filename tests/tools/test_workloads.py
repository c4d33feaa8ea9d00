"""The generator, and the yardsticks that a replay is held against."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvpool.tools.cache_bounds import LruCache, ideal, isolated, lru
from kvpool.tools.traces import Request
from kvpool.tools.workloads import Payload, blocks, codex, hit_rate


def test_the_generator_reproduces_its_check_values() -> None:
    """Published with the calibration: 610 sessions, 64 at a time, seed 1."""
    requests = codex(610, 64, seed=1)
    assert (len(requests), blocks(requests)) == (20_594, 2_090_804)
    assert lru(requests, 5_000) == pytest.approx(0.7384, abs=5e-5)
    assert ideal(requests) == pytest.approx(0.9306, abs=5e-5)
    assert isolated(requests, 5_000, 8) == pytest.approx(0.104, abs=5e-4)


def test_prompts_without_a_block_have_no_hits() -> None:
    assert hit_rate(0, [Request(0, ())]) == 0.0
    assert ideal([Request(0, ())]) == lru([Request(0, ())], 10) == 0.0


def test_the_offline_cache_is_least_recently_used_tail_first() -> None:
    rng = random.Random(1)
    cache, order = LruCache(10), list[int]()
    for _ in range(500):
        chain = [0, *(rng.randrange(1, 4) * 100 + depth for depth in range(rng.randrange(1, 9)))]
        hits = 0
        while hits < len(chain) and chain[hits] in order:
            hits += 1
        assert cache.play(chain) == hits
        order = [id for id in order if id not in chain] + list(reversed(chain))
        order = order[-10:]


def test_every_wrong_byte_is_counted() -> None:
    payload = Payload(4096)
    digest = payload.digest(7)
    block = np.zeros(4096, np.uint8)
    payload.write(digest, block)
    assert payload.wrong(digest, block) == 0
    assert payload.wrong(payload.digest(8), block) > 3500
    for position in (0, 31, 32, 4095):
        block[position] ^= 1
        assert payload.wrong(digest, block) == 1
        block[position] ^= 1


def test_a_byte_that_never_comes_is_wrong() -> None:
    """Memory that already holds the right bytes must not pass for a read."""
    payload = Payload(4096)
    digest = payload.digest(7)
    block = np.zeros(4096, np.uint8)
    payload.write(digest, block)
    payload.spoil(digest, block)
    assert payload.wrong(digest, block) == 4096
