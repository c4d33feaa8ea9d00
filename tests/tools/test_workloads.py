"""The generator, the trace reader, and the yardsticks that a replay is held against."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.tools.cache_bounds import LruCache, ideal, isolated, lru
from kvpool.tools.workloads import Payload, Request, blocks, codex, mooncake


def test_the_generator_reproduces_its_check_values() -> None:
    """Published with the calibration: 610 sessions, 64 at a time, seed 1."""
    requests = codex(610, 64, seed=1)
    assert (len(requests), blocks(requests)) == (20_594, 2_090_804)
    assert lru(requests, 5_000) == pytest.approx(0.7384, abs=5e-5)
    assert ideal(requests) == pytest.approx(0.9306, abs=5e-5)
    assert isolated(requests, 5_000, 8) == pytest.approx(0.104, abs=5e-4)


def test_one_seed_is_one_workload() -> None:
    assert codex(5, 2, seed=3) == codex(5, 2, seed=3)
    assert codex(5, 2, seed=3) != codex(5, 2, seed=4)


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


def test_a_trace_is_read_in_order(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": [1, 3]}\n'
        '\n{"timestamp": 5, "hash_ids": [1, 2]}\n'
    )
    assert mooncake(trace) == [Request(0, (1, 2), 0.005), Request(1, (1, 3), 0.009)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("nonsense", "line 1.*nonsense"),
        ('{"timestamp": 1, "hash_ids": []}', "line 1: hash_ids"),
        ('{"timestamp": 1, "hash_ids": ["x"]}', "list of integers"),
        ('{"timestamp": 1, "hash_ids": [1, 1]}', "twice"),
        ('{"timestamp": 1, "hash_ids": [true]}', "list of integers"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "line 1: timestamp is nan"),
        ('{"timestamp": 1, "hash_ids": [1]}\n{"hash_ids": [1]}', "line 2"),
    ],
)
def test_a_bad_trace_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    with pytest.raises(ConfigError, match=says):
        mooncake(trace)
    with pytest.raises(ConfigError, match="No such file"):
        mooncake(tmp_path / "nowhere")


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
