"""`kvpool config`: where settings come from, and what an editor is told about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner, Result

from kvpool.cli.app import app
from kvpool.cli.config import json_schema
from kvpool.cli.settings import load
from kvpool.errors import ConfigError

FILE = """
cluster: from-file
master: {insecure: false}
server: {capacity: 1GiB, heartbeat_s: 250ms, masters: [a:1, b:2]}
"""


def config(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, ["config", *map(str, arguments)], env=environment)


def rows(shown: str) -> dict[str, list[str]]:
    found = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in shown.split("\n")
    ]
    return {row[0]: row[1:] for row in found if row}


def test_it_shows_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(FILE)
    given = {
        "KVPOOL_SERVER_CAPACITY": "2GiB",
        "KVPOOL_SERVER_ID": "env",
        "KVPOOL_SERVER_BALANCE": "false",
        "KVPOOL_CONFIG": str(file),
    }
    done = config("--show", "server.id=gpu-1", "client.verify=no", **given)
    assert done.exit_code == 0, done.output
    shown = rows(done.stdout)
    assert shown["cluster"] == ["from-file", f"file {file}"]
    assert shown["server.capacity"] == ["2 GiB", "environment KVPOOL_SERVER_CAPACITY"]
    assert shown["server.id"] == ["gpu-1", "argument"]
    assert shown["server.balance"] == ["no", "environment KVPOOL_SERVER_BALANCE"]
    assert shown["client.verify"] == ["no", "argument"]
    assert shown["server.heartbeat_s"] == ["0.25 s", f"file {file}"]
    assert shown["server.masters"] == ["a:1, b:2", f"file {file}"]
    assert shown["client.masters"] == ["127.0.0.1:7450", "default"]
    assert shown["master.insecure"] == ["no", f"file {file}"]  # the default, and yet chosen
    assert shown["client.hedge_s"] == ["0.1 s", "default"]
    told = {one["setting"]: one for one in json.loads(config("--json", **given).stdout)}
    assert told["server.capacity"]["value"] == 2 << 30
    assert told["server.id"]["source"] == "environment KVPOOL_SERVER_ID"
    assert len(told) == len(shown) - 1  # the heading
    assert "34 settings are valid, 1 are not the default" in config("server.id=x").stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "why"),
    [
        (["server.capacty=1GiB"], {}, "did you mean 'server.capacity'?"),
        (["server.capacity=1GB"], {}, "unit 'GB' is not one of"),
        (["server.capacity"], {}, "expected setting=value"),
        (["--config", "/there/is/none.yaml"], {}, "none.yaml: No such file"),
        ([], {"KVPOOL_CLIENT_TIMEOUT_S": "soon"}, "KVPOOL_CLIENT_TIMEOUT_S: setting"),
        (["--schema", "server.id=x"], {}, "give it alone"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], environment: dict[str, str], why: str) -> None:
    done = config(*arguments, **environment)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in " ".join(done.stderr.split())


def test_the_schema_is_one_and_says_what_a_setting_is_for() -> None:
    made = json.loads(config("--schema").stdout)
    jsonschema.Draft202012Validator.check_schema(made)
    for section in ("Config", "MasterConfig", "ServerConfig", "ClientConfig"):
        for name, field in made["$defs"][section]["properties"].items():
            assert ("default" in field) is ("$ref" not in field), name
            assert "$ref" in field or field["description"]
    assert (
        "unique in the cluster" in made["$defs"]["ServerConfig"]["properties"]["id"]["description"]
    )


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (FILE, True),
        ("server: {capacity: 4096, flush_s: 0.5, drain_s: 5m, listen: 'tcp://a:1,shm://'}", True),
        ("server: {capacity: 1.5TiB, balance: false}", True),
        ("server: {capacity: 64GB}", False),
        ("server: {capacity: -1}", False),
        ("server: {capacty: 1GiB}", False),
        ("server: {heartbeat_s: 3 days}", False),
        ("client: {timeout_s: 0}", False),
        ("master: 127.0.0.1:7450", False),
        ("severs: {}", False),
    ],
)
def test_a_file_fits_the_schema_where_it_can_be_loaded(
    tmp_path: Path, text: str, valid: bool
) -> None:
    content: Any = yaml.safe_load(text)
    assert jsonschema.Draft202012Validator(json_schema()).is_valid(content) is valid
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    if valid:
        load(file)
        return
    with pytest.raises(ConfigError):
        load(file)
