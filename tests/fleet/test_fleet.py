"""A small fleet, whole: the same every time, and decided by the pool's real code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.fleet.constants import Constants
from kvpool.fleet.fleet import Fleet, FleetOptions, Scope
from kvpool.fleet.results import FleetResult
from kvpool.server.eviction.lru import LRU

#: Three engines whose device memory has room for two sessions of twelve; blocks are coarse.
SMALL = FleetOptions(
    gpus=36,
    sessions=72,
    concurrent=54,
    router="least-loaded",
    block=2048,
    constants=Constants().changed({"hbm_tokens": 100_000, "warm_s": 100}),
)


def run(**changed: Any) -> FleetResult:
    constants = SMALL.constants.changed(changed.pop("constants", {}))
    return Fleet(replace(SMALL, constants=constants, **changed)).run()


def test_the_same_seed_gives_the_same_fleet_in_another_process() -> None:
    program = (
        "import json, dataclasses, tests.fleet.test_fleet as t;"
        "print(json.dumps(dataclasses.asdict(t.run())))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout) == asdict(run())
    assert asdict(run(seed=2)) != asdict(run())


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


@pytest.mark.parametrize("bytes_s", [2e7, 2e8, 1e9])
def test_a_slow_link_never_makes_the_fleet_slower(bytes_s: float) -> None:
    """G10. Loading always would, by far."""
    alone = run(scope=Scope.NONE)
    constants = {"pool_load_bytes_s": bytes_s}
    assert run(constants=constants).tokens_s > 0.97 * alone.tokens_s
    if bytes_s == 2e7:
        assert run(constants=constants, planner="always").tokens_s < 0.8 * alone.tokens_s


def test_the_products_policy_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in it shows in the fleet's figures."""
    scarce = {"memory_tokens": 1_500_000, "router": "sticky"}
    right = run(**scarce)
    touch = LRU.touch
    monkeypatch.setattr(LRU, "touch", lambda self, entry, *rest: None)
    wrong = run(**scarce)
    assert touch is not LRU.touch
    assert wrong.hit_rate != right.hit_rate


def test_sessions_that_say_when_they_end_leave_room() -> None:
    scarce = {"memory_tokens": 2_000_000, "policy": "lease"}
    assert run(end_hints=True, **scarce).hit_rate > run(**scarce).hit_rate


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpus": 13}, "gpus: 13"),
        ({"concurrent": 0}, "concurrent: 0"),
        ({"concurrent": 73}, "concurrent: 73"),
        ({"load": "x"}, "load 'x'"),
        ({"router": "x"}, "router 'x'"),
        ({"planner": "x"}, "planner 'x'"),
        ({"policy": "x"}, "policy 'x'"),
        ({"block": 8}, "block: 8"),
    ],
)
def test_a_fleet_that_cannot_be(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **changed)
