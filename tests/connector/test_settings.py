"""The connector's settings: their defaults, their units, and the values that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import ConfigError
from kvpool.types import COPIES_MAX
from kvpool_connector.records.values import PlannerLimits
from kvpool_connector.settings import Settings, parse
from kvpool_engines.adapter_settings import AdapterSettings

DEFAULTS = {
    "masters": ["127.0.0.1:7450"],
    "cluster": "default",
    "secret_file": "",
    "transports": ["shm", "tcp"],
    "device_path": "staged",
    "tenant": "default",
    "revision": "",
    "kv_head_parts": 0,
    "load": "auto",
    "load_timeout_s": 10.0,
    "save_decode": True,
    "kv_events": "shared",
    "copies": 1,
    "codec": "",
    "verify_rate": 1 / 2000,
}
#: The smallest and the largest value; none: any.
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "kv_head_parts": (0, 256),
    "load_timeout_s": (0.001, 3600),
    "copies": (1, COPIES_MAX),
    "verify_rate": (0, 1),
}


def parsed(name: str, value: float) -> Any:
    return getattr(parse({name: value, "revision": "r"}), name)


def test_defaults_stay() -> None:
    """Users rely on them, and on their units."""
    found = parse({})
    assert {name: getattr(found, name) for name in Settings.__struct_fields__} == DEFAULTS


def test_a_planner_without_settings_has_their_defaults() -> None:
    limits = PlannerLimits()._asdict()
    shared = limits.keys() & DEFAULTS.keys()
    assert len(shared) == 3
    assert {name: limits[name] for name in shared} == {name: DEFAULTS[name] for name in shared}


def test_a_setting_that_is_gone_says_what_holds_instead() -> None:
    for name, holds in (
        ("transfers_max", "a process has four reads and two writes under way"),
        ("model", "revision names the weights, and .* by its kind, layers and width"),
        ("start_wait_s", "the start waits for the pool for 1 s; then the engine runs without it"),
        ("producer_loads", "an engine loads and saves with kv_role kv_both"),
        ("prefetch", "a request has skip_prefetch in its kv_transfer_params"),
    ):
        with pytest.raises(ConfigError, match=f"setting '{name}' is gone, remove it: {holds}$"):
            parse({name: 1})


@pytest.mark.parametrize("name", BOUNDS)
def test_the_smallest_and_the_largest_value(name: str) -> None:
    least, most = BOUNDS[name]
    for value in (least, most):
        if value is not None:
            assert parsed(name, value) == value
    with pytest.raises(ConfigError, match=f"{name} is"):
        parsed(name, 0 if least is None else least - 1 if isinstance(least, int) else least / 2)
    if most is not None:
        with pytest.raises(ConfigError, match=f"{name} is"):
            parsed(name, most + 1)


def test_every_number_has_bounds() -> None:
    numbers = {name for name, value in DEFAULTS.items() if type(value) in (int, float)}
    assert numbers == BOUNDS.keys()


@pytest.mark.parametrize(
    ("rate", "loads"),
    [(0, 0), (1, 1), (0.5, 2), (0.3, 4), (1 / 2000, 2000), (5e-324, 1_000_000_000)],
)
def test_one_of_so_many_loads_is_verified(rate: float, loads: int) -> None:
    assert parse({"verify_rate": rate}).loads_per_check == loads


@pytest.mark.parametrize(
    "master",
    ["a:1", "a:65535", "kv-0.pool.svc:7450", "10.0.0.7:7450", "[fd00::7]:7450", "[fe80::1%eth0]:1"],
)
def test_addresses_of_a_master(master: str) -> None:
    assert parse({"masters": [master]}).masters == [master]


@pytest.mark.parametrize(
    "master",
    [
        *("a:0", "a:65536", "a:-1", "a:", ":7450", "7450", "a:x", "a:²", "fd00::7:7450"),
        *("[a]:7450", "[fd00::7:7450", "a b:7450", " a:7450", "a/b:7450", "me@a:7450"),
        *("a,b:7450", "*:7450"),
    ],
)
def test_a_wrong_address_of_a_master_is_refused(master: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        parse({"masters": ["b:7450", master]})


def test_a_url_is_no_master_and_the_error_says_what_to_leave_out() -> None:
    with pytest.raises(ConfigError, match=r"expected host:port, .*; leave 'http://' out"):
        parse({"masters": ["http://a:7450"]})
    with pytest.raises(ConfigError, match="masters is 'a:7450', expected a list"):
        parse({"masters": "a:7450"})


@pytest.mark.parametrize("master", ["0.0.0.0:7450", "[::]:7450"])
def test_where_a_master_listens_is_not_where_engines_find_it(master: str) -> None:
    with pytest.raises(ConfigError, match="a master listens there"):
        parse({"masters": [master]})


@pytest.mark.parametrize("name", ["cluster", "tenant", "revision"])
def test_names_are_texts_that_operators_can_see(name: str) -> None:
    for value in (" ", " a", "a ", "a\n", "a\0b"):
        with pytest.raises(ConfigError, match=f"{name} is .*, expected a text"):
            parse({name: value})
    assert getattr(parse({name: "team é 7"}), name) == "team é 7"


def test_engines_have_a_cluster_and_a_tenant_but_may_have_no_revision() -> None:
    for name in ("cluster", "tenant"):
        with pytest.raises(ConfigError, match=f"{name} is '', expected a text without"):
            parse({name: ""})
    assert parse({"revision": ""}).revision == ""


def test_connectors_of_other_engines_ask_for_the_same_names_and_masters() -> None:
    for params, says in (
        ({"tenant": ""}, "extra-config: tenant is '', expected a text without blanks"),
        ({"masters": ["http://a:1"]}, "master 'http://a:1': expected host:port.* leave 'http://'"),
        ({"transports": ["tpc"]}, "extra-config: transports: .* 'tpc'; did you mean 'tcp'?"),
        ({"pause_s": True}, "pause_s is True, expected a number from 0 to 3600"),
        ({"pause": 1}, "unknown setting 'pause'; did you mean 'pause_s'?"),
        ({1: 2}, "unknown setting 1; known: masters"),
    ):
        with pytest.raises(ConfigError, match=says):
            AdapterSettings.parse(params, "extra-config")
    assert AdapterSettings.parse({"tenant": "a", "revision": ""}, "extra-config").tenant == "a"
