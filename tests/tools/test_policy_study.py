"""A dry replay: the real store beside the bound, and the figures that were published for both."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.server.eviction.lease import Lease
from kvpool.server.eviction.lru import LRU
from kvpool.tools import policy_study as dry
from kvpool.tools.cache_bounds import belady, lru
from kvpool.tools.workloads import Request, blocks, codex


def best(requests: list[Request], capacity: int) -> int:
    """The most hits that any choice of what to keep can have, by trying all of them."""
    kept: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in kept.items():
            prefix = next((n for n, id in enumerate(request.chain) if id not in held), None)
            hits += len(request.chain) if prefix is None else prefix
            choice = held | set(request.chain)
            size = min(capacity, len(choice))
            for subset in itertools.combinations(sorted(choice), size):
                key = frozenset(subset)
                after[key] = max(after.get(key, 0), hits)
        kept = after
    return max(kept.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_exact(seed: int) -> None:
    """Small trees, every possible history of the cache."""
    rng = random.Random(seed)
    chains = [(0, 1, 2), (0, 1, 3), (0, 4), (5, 6), (5, 7)]
    requests = [
        Request(n, chain[: rng.randint(1, len(chain))])
        for n, chain in enumerate(rng.choices(chains, k=8))
    ]
    for capacity in (1, 2, 3, 4):
        assert belady(requests, capacity) * blocks(requests) == pytest.approx(
            best(requests, capacity)
        )


def test_the_store_is_least_recently_used_to_the_block() -> None:
    requests = codex(20, 6)
    for capacity in (150, 600):
        hits, store = dry.play(requests, LRU(), capacity)
        assert hits / blocks(requests) == pytest.approx(lru(requests, capacity), abs=1e-12)
        store.check()


def test_hints_close_most_of_the_way_from_lru_to_the_bound() -> None:
    requests = codex(20, 10)[:400]
    capacity = 400
    least, most = lru(requests, capacity), belady(requests, capacity)
    hits, store = dry.play(requests, LRU(), capacity, dry.noisy(0.25, 1))
    store.check()
    assert (hits / blocks(requests) - least) / (most - least) >= 0.9


def test_a_lease_helps_where_lru_throws_out_what_is_needed_next() -> None:
    """A third of the working set."""
    requests = codex(16, 8)[:220]
    hits, store = dry.play(requests, Lease(0), 200)
    store.check()
    assert hits / blocks(requests) > lru(requests, 200) + 0.05


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpool", "replay", "--dry", *arguments],
        capture_output=True,
        text=True,
        timeout=55,
    )


def test_the_command_prints_every_policy_beside_the_bound(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    small = ("--sessions", "8", "--concurrent", "4", "--capacity", "100blocks,300blocks")
    done = run(*small, "--policy", "lru", "--hints", "--plot", str(plot), "--json")
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout)
    rows = {(row["policy"], row["capacity"]): row["hit_rate"] for row in study["rows"]}
    assert set(rows) == {(p, c) for p in ("lru", "lru+hints", "MIN") for c in (100, 300)}
    for capacity in (100, 300):
        assert rows["lru", capacity] <= rows["lru+hints", capacity] <= rows["MIN", capacity]
    assert plot.read_text().startswith("<svg")
    again = run(*small, "--policy", "lru", "--hints", "--json")
    rows_again = json.loads(again.stdout)["rows"]
    assert [row["hit_rate"] for row in rows_again] == [row["hit_rate"] for row in study["rows"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "clock"], "no policy 'clock'"),
        (["--capacity", "12"], "5000blocks"),
        (["--capacity", "0blocks"], "holds no block"),
        (["--capacity", "-5blocks"], "number of blocks"),
        (["--capacity", "1MiB", "--block-size", "2MiB"], "holds no block"),
    ],
)
def test_what_is_asked_the_wrong_way(arguments: list[str], says: str) -> None:
    done = run("--sessions", "3", "--concurrent", "2", *arguments)
    assert done.returncode == 2
    assert says in done.stderr.replace("\n", " ")


def test_hints_need_sessions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 5, "hash_ids": [1, 2]}\n')
    done = run(str(trace), "--hints", "--capacity", "10blocks")
    assert done.returncode == 2
    assert "sessions" in done.stderr
