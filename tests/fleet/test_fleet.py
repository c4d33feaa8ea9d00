"""A small fleet, whole: the same every time, and decided by the pool's real code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.options import FleetOptions, Hints, Incident, Scope
from benchmarks.fleet.results import FleetResult
from benchmarks.fleet.routers import PreciseRouter
from kvpool.errors import ConfigError
from kvpool.server.eviction.lru import LRU

#: Three engines whose device memory has room for two sessions of twelve; blocks are coarse.
SMALL = FleetOptions(
    gpus=36,
    sessions=72,
    concurrent=54,
    router="least-loaded",
    block=4096,
    constants=Constants().changed({"hbm_tokens": 100_000, "warm_s": 100}),
)
#: A third of it.
ONE_ENGINE = {"gpus": 12, "concurrent": 18, "sessions": 40, "block": 4096}
TINY = {"gpus": 12, "concurrent": 6, "sessions": 12}


_ran: dict[str, FleetResult] = {}


def run(**changed: Any) -> FleetResult:
    """A fleet's result, which is the same each time: it runs once."""
    name = repr(sorted(changed.items()))
    if name not in _ran:
        _ran[name] = run_anew(**changed)
    return _ran[name]


def run_anew(**changed: Any) -> FleetResult:
    constants = SMALL.constants.changed(changed.pop("constants", {}))
    return Fleet(replace(SMALL, constants=constants, **changed)).run()


def test_the_same_seed_gives_the_same_fleet_in_another_process() -> None:
    program = (
        "import json, dataclasses, tests.fleet.test_fleet as t;"
        "print(json.dumps(dataclasses.asdict(t.run(**t.TINY))))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(asdict(run_anew(**TINY))))
    assert asdict(run_anew(seed=2, **TINY)) != asdict(run_anew(**TINY))


def test_a_pool_saves_what_device_memory_cannot_hold() -> None:
    alone, pooled = run(scope=Scope.NONE), run()
    assert alone.hit_rate < 0.3
    assert pooled.hit_rate > 0.8
    assert pooled.pool_rate > 0.5
    assert pooled.first_token.p50 < alone.first_token.p50 / 2
    assert pooled.tokens_s > alone.tokens_s


def test_local_memory_needs_a_router_that_remembers() -> None:
    anywhere = run(scope=Scope.LOCAL, router="round-robin")
    at_home = run(scope=Scope.LOCAL, router="sticky")
    assert at_home.hit_rate > anywhere.hit_rate + 0.1
    assert run(router="round-robin").hit_rate > anywhere.hit_rate + 0.1


@pytest.mark.parametrize("bytes_s", [2e7, 1e9])
def test_a_slow_link_never_makes_the_fleet_slower(bytes_s: float) -> None:
    """G10. Loading always would, by far."""
    alone = run(scope=Scope.NONE)
    constants = {"pool_load_bytes_s": bytes_s}
    assert run(constants=constants).tokens_s > 0.97 * alone.tokens_s
    if bytes_s == 2e7:
        assert run(constants=constants, planner="always").tokens_s < 0.8 * alone.tokens_s


def test_the_products_policy_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in it shows in the fleet's figures."""
    scarce = {"memory_tokens": 500_000, "router": "sticky", **ONE_ENGINE}
    right = run_anew(**scarce)
    touch = LRU.touch
    monkeypatch.setattr(LRU, "touch", lambda self, entry, *rest: None)
    wrong = run_anew(**scarce)
    assert touch is not LRU.touch
    assert wrong.hit_rate != right.hit_rate


def test_sessions_that_say_when_they_end_leave_room() -> None:
    scarce = {"memory_tokens": 2_000_000, "policy": "lease"}
    assert run(hints=Hints.END, **scarce).hit_rate > run(**scarce).hit_rate


def test_a_router_that_sees_what_engines_hold_needs_fewer_loads() -> None:
    """Precise: where the blocks are, unless another engine is through with the prompt sooner."""
    large = {"hbm_tokens": 1e6}
    anywhere, precise = run(constants=large), run(router="precise", constants=large)
    assert precise.hit_rate >= anywhere.hit_rate - 0.01
    assert precise.loaded_bytes < 0.3 * anywhere.loaded_bytes
    late = run(router="precise", events_late_s=30.0, constants=large)
    assert late.loaded_bytes > 1.2 * precise.loaded_bytes


def test_a_precise_router_knows_in_the_end_what_engines_hold() -> None:
    fleet = Fleet(replace(SMALL, router="precise"))
    fleet.run()
    router = fleet._choose
    assert isinstance(router, PreciseRouter)
    for engine, held in router._held.items():
        assert held == set(engine.cache._blocks)


def test_a_lost_server_costs_its_share_and_no_more() -> None:
    lost = run(incidents=[Incident(600.0, "server", 1)])
    assert lost.after is not None
    assert 0.2 < lost.after.worst < lost.after.before  # two of three servers are left
    assert lost.after.back_s is not None
    assert lost.after.back_s < 300
    assert lost.prompts > 0.95 * run().prompts


def test_an_engine_that_is_lost_takes_its_queue_to_the_others() -> None:
    incidents = [Incident(600.0 + number, "engine", number % 3) for number in range(30)]
    fleet = Fleet(replace(SMALL, router="precise", incidents=incidents))
    fleet.run()
    assert not fleet._running  # each prompt was answered
    lost = run(incidents=[Incident(600.0, "engine", 0)])
    assert lost.after is not None
    assert lost.after.worst > 0.5  # its blocks are in the pool
    local = run(
        scope=Scope.LOCAL,
        router="sticky",
        incidents=[Incident(600.0, "engine", 0), Incident(600.0, "server", 0)],
    )
    assert local.after is not None
    assert local.after.worst < lost.after.worst


def test_masters_that_are_away_cost_hits_while_they_are() -> None:
    lost = run(incidents=[Incident(600.0, "masters", 30)])
    assert lost.after is not None
    assert lost.after.worst < lost.after.before - 0.1
    assert lost.after.back_s is not None
    assert 30 <= lost.after.back_s < 200


def test_with_little_memory_sessions_are_better_served_in_turn() -> None:
    """Nobody has said anything of them, and engines cannot compute what all miss."""
    scarce = {"memory_tokens": 470_000, "constants": {"prefill_flop_s": 1e15}, **ONE_ENGINE}
    together, in_turn = run(**scarce), run(admit=True, **scarce)
    assert in_turn.tokens_s > 1.1 * together.tokens_s
    assert in_turn.session_waited.p99 < together.session_waited.p99


def test_children_find_what_their_parent_has_read() -> None:
    fan_out = {"load": "fan-out", "sessions": 8, "concurrent": 4, "memory_tokens": 4_000_000}
    alone = run(scope=Scope.NONE, router="round-robin", **fan_out)
    assert run(router="round-robin", **fan_out).hit_rate > alone.hit_rate + 0.1
    # One family after the other: what waits for admission is no child of one that is admitted.
    assert run(hints=Hints.END, admit=True, **fan_out).prompts > 400


def test_prompts_of_a_hog_are_no_result_and_push_others_out() -> None:
    scarce, hog = {"memory_tokens": 1_000_000, **ONE_ENGINE}, {"hog_prompts_s": 0.07}
    alone, beside = run(**scarce), run(**hog, **scarce)
    assert beside.prompts <= alone.prompts
    assert beside.hit_rate < alone.hit_rate
    # It is another tenant: sessions may have memory, and hints, for themselves.
    ours = run(guaranteed=0.9, **hog, **scarce)
    assert ours.hit_rate > beside.hit_rate + 0.02
    known = {"policy": "lease", "hints": Hints.ALL}
    hinted = run(guaranteed=0.9, **hog, **scarce, **known)
    assert hinted.hit_rate > ours.hit_rate + 0.015


def test_mixed_engines_decode_slower_while_they_compute() -> None:
    mixed = run(engines="mixed", gpus=12)
    split = run()  # as many engines that prefill, and other GPUs that decode
    assert mixed.prompts > 0.5 * split.prompts
    assert mixed.token_s > split.token_s
    alone = run(engines="mixed", gpus=12, sessions=3, concurrent=1)
    assert alone.token_s == pytest.approx(0.0357 + 0.043e-3, rel=0.01)


def test_a_recorded_trace_comes_at_its_times(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 4000 * n, "input_length": 5000, "output_length": 10, "hash_ids": ids}
        for n, ids in enumerate([[*range(9), n + 100] for n in range(40)])
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    recorded = {"trace": str(file), "block": 512, "gpus": 12, "constants": {"warm_s": 0}}
    result = run_anew(**recorded)
    assert result.seconds == pytest.approx(4.0 * 39)
    assert result.prompts == 39  # the last one ends after the last has begun
    assert result.hit_rate == pytest.approx(38 / 39 * 9 * 512 / 5000, abs=1e-6)
    assert run_anew(trace_rate=4.0, **recorded).seconds == pytest.approx(39.0)
    file.write_text('{"timestamp": 0, "hash_ids": [1]}')
    with pytest.raises(ConfigError, match="expected input_length"):
        run_anew(**recorded)
    short = [{"timestamp": n, "input_length": 100, "output_length": 9} for n in range(5)]
    file.write_text("\n".join(map(json.dumps, short)))
    assert run_anew(**recorded).hit_rate == 0.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"incidents": [Incident(1.0, "server", 3)]}, "there is no server 3, the fleet has 3"),
        ({"incidents": [Incident(1.0, "drain", 3)]}, "there is no server 3, the fleet has 3"),
        ({"disk_turns": True}, "there are no disks"),
        (
            {"incidents": [Incident(1.0, "drain", 0)], "disk_tokens": 1},
            "a drain of servers with disks is not modelled",
        ),
        ({"events_late_s": -1.0}, "events_late_s: -1"),
        ({"hog_prompts_s": float("nan")}, "hog_prompts_s: nan"),
        ({"guaranteed": 1.1}, "guaranteed: 1.1 is not a share"),
        ({"gpus": 13}, "gpus: 13"),
        ({"concurrent": 0}, "concurrent: 0"),
        ({"concurrent": 73}, "concurrent: 73"),
        ({"load": "x"}, "load 'x'"),
        ({"router": "x"}, "router 'x'"),
        ({"planner": "x"}, "planner 'x'"),
        ({"policy": "x"}, "policy 'x'"),
        ({"block": 8}, "block: 8"),
        ({"engines": "x"}, "engines 'x'"),
        ({"trace_rate": 0.0}, "trace_rate: 0"),
    ],
)
def test_a_fleet_that_cannot_be(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **changed)
