"""Settings: where they come from, and that nothing wrong goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.config import load
from kvpool.errors import ConfigError
from kvpool.units import parse_duration, parse_size


def test_defaults_are_loopback() -> None:
    config = load()
    assert config.master.bind == "127.0.0.1:7450"
    assert config.client.masters == ["127.0.0.1:7450"]


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.yaml"
    file.write_text(
        "cluster: file\nserver: {capacity: 1GiB, heartbeat_s: 250ms, id: file}\n"
        "client: {masters: [a:1, b:2]}\n"
    )
    environment = {"KVPOOL_SERVER_CAPACITY": "2GiB", "KVPOOL_SERVER_ID": "env", "HOME": "/x"}
    config = load(file, environment, {"server.id": "flag", "server.listen": None})
    assert config.cluster == "file"
    assert config.server.capacity == 2 << 30
    assert config.server.heartbeat_s == 0.25
    assert config.server.id == "flag"
    assert config.client.masters == ["a:1", "b:2"]


def test_lists_and_booleans_from_the_environment() -> None:
    config = load(
        environment={"KVPOOL_CLIENT_MASTERS": "a:1, b:2", "KVPOOL_SERVER_PREFAULT": "false"}
    )
    assert config.client.masters == ["a:1", "b:2"]
    assert config.server.prefault is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64GiB", 64 << 30), ("1.5MiB", 3 << 19), ("4096", 4096), (7, 7), (" 2 KiB ", 2048)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64GB", "did you mean 64GiB"),
        ("-1", "negative"),
        ("1e3", "1e3"),
        ("lots", "lots"),
        ("", "expected"),
        ("1..2GiB", "no number"),
        ("1" * 400, "1111"),
    ],
)
def test_wrong_sizes(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_size(text)


def test_durations() -> None:
    assert [parse_duration(text) for text in ("250ms", "2s", "5m", "0.5", 3)] == [
        0.25,
        2.0,
        300.0,
        0.5,
        3.0,
    ]
    with pytest.raises(ConfigError, match="fortnight"):
        parse_duration("1 fortnight")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("server: {capcity: 1GiB}", "did you mean 'server.capacity'"),
        ("sever: {}", "did you mean 'server'"),
        ("server: {capacity: 64GB}", "setting 'server.capacity'.*did you mean 64GiB"),
        ("server: {heartbeat_s: 0}", "heartbeat_s"),
        ("server: {connections_max: many}", "connections_max"),
        ("server: [1, 2]", "expected a section"),
        ("server: {alignment: 3000}", "power of two"),
        ("client: {masters: []}", "masters"),
        ("- a\n- b", "expected settings"),
        ("a: [", "config file"),
        ("server: {prefault: perhaps}", "neither true nor false"),
        ("server: {capacity: 0}", "'server.capacity' is 0"),
        ("server: {capacity: .inf}", "inf"),
        (f"server: {{capacity: {'1' * 400}}}", "1152921504606846976"),
        ("server: {heartbeat_s: .nan}", "heartbeat_s"),
        ("server: {connections_max: true}", "connections_max"),
        ('server: {id: "a\\nb"}', "printable"),
        ("server: null", "expected a section"),
        ("1: 2", "unknown setting '1'"),
        ("[" * 5000, "config file"),
        ("cluster: 2020-13-45", "month"),
        ("cluster: !!timestamp x", "config file"),
        ("cluster: !!python/object:os.system x", "config file"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "kvpool.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")
    assert load(environment={"KVPOOL_CONFIG": "it names the file"}) == load()
    with pytest.raises(ConfigError, match="unknown setting 'nonsense'"):
        load(environment={"KVPOOL_NONSENSE": "1"})
