"""A dry replay: the real store beside the bound, and the figures that were published for both."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from kvpool.server.eviction.lru import LRU
from kvpool.tools import policy_study as dry
from kvpool.tools.cache_bounds import belady, lru, working_set, working_set_peak
from kvpool.tools.dry_pool import DryPool
from kvpool.tools.traces import Request
from kvpool.tools.workloads import blocks, codex, fan_out, many_answers
from kvpool.types import Namespace
from tests.support.commands import Said, kvpool
from tests.support.dry_pools import check_pool


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
    requests = codex(10, 4)
    for capacity in (150, 400):
        pool = dry.play(requests, LRU, capacity)
        assert pool.played.hits / blocks(requests) == pytest.approx(
            lru(requests, capacity), abs=1e-12
        )
        check_pool(pool)


def test_hints_close_most_of_the_way_from_lru_to_the_bound() -> None:
    requests = codex(20, 10)[:400]
    capacity = 400
    least, most = lru(requests, capacity), belady(requests, capacity)
    pool = dry.play(requests, LRU, capacity, dry.noisy(0.25, 1))
    check_pool(pool)
    assert (pool.played.hits / blocks(requests) - least) / (most - least) >= 0.9


def test_several_servers_have_one_map_and_lose_no_block() -> None:
    requests = codex(12, 6)[:200]
    pool = dry.play(requests, LRU, 400, dry.noisy(0.25, 1), servers=4)
    check_pool(pool)
    assert sum(store.index.stored for store in pool.stores) == 400
    assert len(pool.played.losses) == 3
    ample = dry.play(requests, LRU, 100_000, servers=4)
    assert ample.played.hits == dry.play(requests, LRU, 100_000).played.hits


def test_what_the_loss_of_a_server_leaves() -> None:
    """Two prompts that share nothing, each on a server of its own; the third server is empty."""
    pool = DryPool(3, 30, lambda size: LRU())
    for number, chain in enumerate([(1, 2, 3), (4,)]):
        pool.play(Request(number, chain, float(number)))
    held = sorted(store.index.stored for store in pool.stores)
    assert held == [0, 1, 3]
    pool.lose_each([Request(0, (1, 2, 3)), Request(1, (4, 5)), Request(1, (4, 5, 6))])
    (loss,) = pool.played.losses
    assert loss.worst == pytest.approx(1 / 4)
    assert loss.mean == pytest.approx((1 / 4 + 3 / 4 + 1) / 3)


def test_the_answers_to_one_prompt_begin_with_it_and_go_on_apart() -> None:
    requests = many_answers(4, 2)
    assert requests == many_answers(4, 2)
    assert {request.session for request in requests} == set(range(4 * 8))
    for group in range(4):
        chains = [one.chain for one in requests if one.session // 8 == group]
        prompt = min(chains, key=len)
        assert all(chain[: len(prompt)] == prompt for chain in chains)
        assert len({*chains}) == len(chains) - 7, "at first it is the same for all eight"
        assert len(prompt) > 4
    assert sum(one.resumes_s is None for one in requests) == 4 * 8


def test_children_begin_with_the_whole_context_of_their_agent() -> None:
    requests = fan_out(3, 2)
    assert requests == fan_out(3, 2)
    sessions: dict[int, list[Request]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    assert len(sessions) == 3 * 18
    shared = requests[0].chain[:40]
    assert all(request.chain[:40] == shared for request in requests)
    for turns in sessions.values():
        for one, other in itertools.pairwise(turns):
            assert other.chain[: len(one.chain)] == one.chain
            assert other.time_s == pytest.approx(one.time_s + (one.resumes_s or 0), abs=0.01)
        assert turns[-1].resumes_s is None
    contexts = {request.chain for request in requests if len(sessions[request.session]) == 1}
    assert len(contexts) == 3
    children = [turns[0] for turns in sessions.values() if len(turns) > 1]
    assert all(any(one.chain[: len(c)] == c for c in contexts) for one in children)


def test_the_peak_of_the_working_set() -> None:
    turns = [Request(0, chain, float(n)) for n, chain in enumerate([(1, 2), (1, 3), (2, 3), (4,)])]
    assert working_set_peak(turns) == 3  # 1, 2 and 3 in the second request; 4 is never used again
    assert working_set_peak(turns[-1:]) == 0
    requests = codex(16, 8)[:220]
    assert working_set_peak(requests) >= working_set(requests)


def test_the_working_set_is_the_one_that_a_master_measures() -> None:
    """While the load is steady: of a workload in its middle."""
    from kvpool.master.state.demand import DemandMeter

    requests, meter, seen = codex(120, 12), DemandMeter(), []
    begin, end = requests[0].time_s, requests[-1].time_s
    for request in requests:
        digests = [id.to_bytes(16, "big") for id in request.chain]
        meter.asked(Namespace("m"), digests, request.time_s, 1)
        if begin + 0.4 * (end - begin) < request.time_s < begin + 0.6 * (end - begin):
            seen.append(meter.demand(request.time_s).size)
    assert statistics.median(seen) == pytest.approx(working_set(requests), rel=0.15)


def run(*arguments: str) -> Said:
    return kvpool("replay", "--dry", *arguments)


def without_times(study: dict[str, Any]) -> dict[str, Any]:
    times = ("seconds", "place_us")
    rows = [{key: row[key] for key in row if key not in times} for row in study["rows"]]
    return {**study, "rows": rows}


def test_the_command_prints_every_policy_beside_the_bound(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    small = ("--sessions", "4", "--concurrent", "4", "--capacity", "100blocks,300blocks")
    done = run(*small, "--policy", "lru", "--hints", "--plot", str(plot), "--json")
    assert done.code == 0, done.err
    study = json.loads(done.out)
    rows = {(row["policy"], row["capacity"]): row["hit_rate"] for row in study["rows"]}
    assert set(rows) == {(p, c) for p in ("lru", "lru+hints", "MIN") for c in (100, 300)}
    for capacity in (100, 300):
        assert rows["lru", capacity] <= rows["lru+hints", capacity] <= rows["MIN", capacity]
    assert plot.read_text().startswith("<svg")
    again = run(*small, "--policy", "lru", "--hints", "--json")
    assert without_times(json.loads(again.out)) == without_times(study)


def test_the_command_compares_numbers_of_servers() -> None:
    small = ("--sessions", "4", "--concurrent", "4", "--capacity", "0.5ws")
    small += ("--servers", "1", "--servers", "3")
    done = run(*small, "--policy", "lease+hints", "--json")
    assert done.code == 0, done.err
    study = json.loads(done.out)
    rows = {(row["policy"], row["servers"]): row for row in study["rows"]}
    assert set(rows) == {(p, n) for p in ("lru", "lease+hints") for n in (1, 3)} | {("MIN", 1)}
    assert rows["lru", 1]["capacity"] == round(study["working_set"] / 2)
    for policy in ("lru", "lease+hints"):
        alone, three = rows[policy, 1], rows[policy, 3]
        assert three["hit_rate"] <= rows["MIN", 1]["hit_rate"]
        assert three["usable_worst"] <= three["usable_mean"] < 1
        assert alone["servers_per_chain"] == 1 <= three["servers_per_chain"]
    shown = run(*small, "--workload", "fanout", "--sessions", "1", "--concurrent", "1")
    said = " ".join(shown.out.split())
    assert "ws, the working set:" in said, shown.err
    assert "fair: 1 - 1/servers" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--servers", "0"], "numbers from 1 to 1024"),
        (["--servers", "1,x"], "numbers from 1 to 1024"),
        (["--servers", "200", "--capacity", "100blocks"], "over 200 servers"),
        (["--capacity", "-1ws"], "part of the working set"),
        (["--workload", "copilot"], "codex, fanout, answers"),
        (["--policy", "clock"], "no policy 'clock'"),
        (["--capacity", "12"], "5000blocks"),
        (["--capacity", "0blocks"], "holds no block"),
        (["--capacity", "-5blocks"], "number of blocks"),
        (["--capacity", "1MiB", "--block-size", "2MiB"], "holds no block"),
    ],
)
def test_what_is_asked_the_wrong_way(arguments: list[str], says: str) -> None:
    done = run("--sessions", "3", "--concurrent", "2", *arguments)
    assert done.code == 2
    assert says in done.err.replace("\n", " ")


def test_hints_need_sessions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 5, "hash_ids": [1, 2]}\n')
    done = run(str(trace), "--hints", "--capacity", "10blocks")
    assert done.code == 2
    assert "sessions" in done.err
