"""`kvpool up`: a pool with what this host has, and the reasons."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvpool.cli.app import app
from kvpool.cli.settings import load
from kvpool.config import Config
from kvpool.errors import ConfigError
from kvpool.memory_limits import Limit
from kvpool.ops.host_plan import DiskSpace, HostPlan, look_at, planned, unit
from tests.support.commands import kvpool

MIB, GIB = 1 << 20, 1 << 30
FREE = Limit("cgroup /pool", 10 * GIB + 5, "MemoryMax=")


def plan(
    memory: Limit = FREE,
    disks: tuple[DiskSpace, ...] = (),
    capacity: int = 0,
    host: str = "127.0.0.1",
    secret: str = "",
) -> HostPlan:
    return planned(memory, disks, capacity, host, 7450, Config(secret_file=secret))


def why(chosen: HostPlan, what: str) -> list[str]:
    return [f"{one.chosen}: {one.why}" for one in chosen.choices if one.what == what]


def test_a_host_gives_half_of_the_memory_that_is_left() -> None:
    chosen = plan()
    assert chosen.server[-4:-2] == ("--tier", "dram:5GiB")
    assert why(chosen, "memory")[0].startswith("5 GiB: half of what cgroup /pool has left, 10 GiB")
    assert plan(capacity=5000).server[-4:-2] == ("--tier", "dram:5000")
    assert plan(capacity=FREE.free).server[-3] == f"dram:{FREE.free}"
    with pytest.raises(ConfigError, match=r"--capacity 11GiB: .* cgroup /pool has left, 10 GiB"):
        plan(capacity=11 * GIB)
    assert plan(Limit("x", 32 * MIB, "")).server[-3] == "dram:16MiB"
    for little in (32 * MIB - 1, -7):
        with pytest.raises(ConfigError, match="give --capacity"):
            plan(Limit("x", little, ""))


def test_a_disk_gives_most_of_what_is_free_and_a_file_stays_as_it_is() -> None:
    disks = (DiskSpace(Path("/a"), 10 * GIB, 0), DiskSpace(Path("/b"), GIB, 7 * GIB))
    words = plan(disks=disks).server
    tiers = [word for before, word in pairwise(words) if before == "--tier"]
    assert tiers == ["dram:5GiB", "nvme:/a/kvpool:8GiB", "nvme:/b/kvpool:7GiB"]
    assert why(plan(disks=disks), "disk")[1] == "/b/kvpool, 7 GiB: as its file has"
    load(flags={"server.tiers": tiers})


def test_what_cannot_hold_a_file_of_blocks_is_refused(tmp_path: Path) -> None:
    full = DiskSpace(Path("/full"), MIB, 0)
    with pytest.raises(ConfigError, match=r"--disk /full: 1 MiB are free there, too few"):
        plan(disks=(full,))
    with pytest.raises(ConfigError, match=r"--disk /a is given twice"):
        plan(disks=(DiskSpace(Path("/a"), GIB, 0),) * 2)
    (tmp_path / "kvpool").mkdir()
    with pytest.raises(ConfigError, match=rf"{tmp_path}/kvpool is in the way"):
        look_at(tmp_path)


def test_other_hosts_need_a_secret() -> None:
    for host in ("10.0.0.1", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="secret"):
            plan(host=host)
    with pytest.raises(ConfigError, match="an address of this host"):
        plan(host="0.0.0.0", secret="/s")
    chosen = plan(host="fd00::1", secret="/s")
    known = "--bind [fd00::1]:7450 --cluster default --secret-file /s"
    assert " ".join(chosen.master[1:]) == known
    assert "tcp://[fd00::1]:0,shm://" in chosen.server
    extra = json.loads(shlex.split(chosen.vllm)[-1])["kv_connector_extra_config"]
    assert extra == {"masters": ["[fd00::1]:7450"], "secret_file": "/s"}
    assert why(chosen, "lanes")


def test_a_unit_runs_exactly_this_command() -> None:
    parsed = configparser.RawConfigParser()
    parsed.optionxform = str  # type: ignore[assignment]
    parsed.read_string(
        unit("server", ["/a b/python", "--tier", 'nvme:/100%/$x"y:1GiB'], "m.service")
    )
    service = parsed["Service"]
    assert service["ExecStart"] == r'"/a b/python" "--tier" "nvme:/100%%/$$x\"y:1GiB"'
    assert service["Restart"] == "always"
    assert parsed["Unit"]["After"] == "network-online.target m.service"


def up(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["up", *map(str, arguments)])


def test_units_are_written_and_none_is_replaced(tmp_path: Path) -> None:
    done = up("--capacity", "64MiB", "--disk", tmp_path, "--systemd", tmp_path)
    assert done.exit_code == 0, done.output
    server = (tmp_path / "kvpool-server.service").read_text()
    assert f'"{sys.executable}" "-m" "kvpool" "server"' in server
    assert f'"nvme:{tmp_path}/kvpool:' in server
    assert "vllm serve MODEL" in done.stdout
    (tmp_path / "kvpool-master.service").unlink()
    again = up("--capacity", "64MiB", "--systemd", tmp_path)
    assert again.exit_code == 2
    assert "kvpool-server.service is there already" in " ".join(again.stderr.split())
    assert not (tmp_path / "kvpool-master.service").exists()


def test_what_the_environment_says_is_in_what_is_shown_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text("cluster: a bank\nsecret_file: secret\n")
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "all.yaml").touch()
    variables = {"CONFIG": "pool.yaml", "TENANTS_FILE": "all.yaml", "SERVER_POLICY": "lru"}
    for name, one in variables.items():
        monkeypatch.setenv(f"KVPOOL_{name}", one)
    done = up("--capacity", "16MiB", "--systemd", tmp_path)
    assert done.exit_code == 0, done.output
    assert f'"cluster": "a bank", "secret_file": "{tmp_path}/secret"' in done.output
    who = f"--cluster 'a bank' --secret-file {tmp_path}/secret --tenants {tmp_path}/all.yaml"
    assert done.output.count(who) == 2
    who = who.replace("'", "")
    for file in tmp_path.glob("*.service"):
        lines = file.read_text().replace('"', "").splitlines()
        assert any(line.startswith("ExecStart=") and line.endswith(who) for line in lines)
        assert f"Environment=KVPOOL_CONFIG={tmp_path}/pool.yaml" in lines
        assert "Environment=KVPOOL_SERVER_POLICY=lru" in lines
    monkeypatch.setenv("KVPOOL_TENANTS_FILE", "nowhere")
    assert up("--dry").exit_code == 2
    # What overrides the file does so in the units, too.
    (tmp_path / "pool.yaml").write_text("cluster: bank\nlocal_only: true\n")
    for name, one in (("LOCAL_ONLY", "no"), ("TENANTS_FILE", ""), ("CLUSTER", "shop")):
        monkeypatch.setenv(f"KVPOOL_{name}", one)
    dry = ("--capacity", "16MiB", "--cluster", "default", "--systemd", tmp_path / "units", "--dry")
    (tmp_path / "units").mkdir()
    shown = up(*dry).stdout
    assert shown.count(" --cluster default") == shown.count('"--cluster" "default"') == 2
    assert shown.count('"KVPOOL_LOCAL_ONLY=no"') == shown.count('"KVPOOL_TENANTS_FILE="') == 2
    assert "local-only" not in shown
    monkeypatch.setenv("KVPOOL_CONFIG", "")
    assert '"KVPOOL_CONFIG="' in up(*dry).stdout


def test_dry_shows_units_and_writes_none_and_a_pool_of_this_user_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (folder := tmp_path / "[a]").mkdir()
    monkeypatch.setenv("KVPOOL_LOCAL_ONLY", "yes")
    done = up("--capacity", "64MiB", "--systemd", folder, "--dry")
    assert (done.exit_code, list(folder.iterdir())) == (0, []), done.output
    assert f"{folder}/kvpool-server.service would have:" in done.stdout
    assert '"--tier" "dram:64MiB"' in done.stdout
    assert done.stdout.count('"--local-only"') == 2
    assert f'"secret_file": "{tmp_path}/kvpool/secret"' in done.stdout
    assert done.stdout.count(f'"XDG_STATE_HOME={tmp_path}"') == 2
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)  # it has no account
    assert "add User=4000000, whose" in up("--capacity", "64MiB", "--systemd", folder).output
    monkeypatch.undo()
    assert up("--capacity", "16MiB", "--local-only", "--dry").output.count(" --local-only") == 2


def test_who_says_that_it_is_insecure_is_not_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.cli.other_users.has_other_users", lambda: True)
    monkeypatch.setattr("kvpool.cli.up.run", lambda started: started.close())
    for part, told in (("MASTER", True), ("SERVER", False)):
        monkeypatch.setenv(f"KVPOOL_{part}_INSECURE", "yes")
        assert ("no secret" in up("--capacity", "16MiB").stderr) is told


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    up("--capacity", "64MiB", "--systemd", tmp_path)
    command = ["systemd-analyze", "verify", *map(str, tmp_path.glob("kvpool-*.service"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert len(command) == 4
    said = [one for one in done.stderr.splitlines() if "kvpool" in one]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--disk", "/there/is/none"], "expected a directory"),
        (["--secret-file", "/there/is/none"], "`kvpool secret FILE` makes it"),
        (["--address", "10.0.0.1"], "--secret-file"),
        (["--address", "a b"], "expected an address of this host"),
        (["--capacity", "64GB"], "did you mean 64GiB"),
        (["--capacity", "0"], "--capacity '0': expected a size"),
        (["--systemd", "/there/is/none"], "expected a directory that this user may write"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments: list[str], said: str) -> None:
    done = up(*arguments, "--dry")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())


def test_an_address_of_another_host_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    kvpool("secret", str(secret))
    done = up("--address", "203.0.113.9", "--secret-file", secret, "--dry")
    assert done.exit_code == 2
    assert "--address 203.0.113.9: Cannot assign" in " ".join(done.stderr.split())


def test_it_runs_a_pool_until_it_is_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        start = [sys.executable, "-m", "kvpool", "up", "--capacity", "16MiB", "--port", str(port)]
        taken = subprocess.run(start, capture_output=True, text=True, timeout=60)
        assert taken.returncode == 1  # and no server is left behind
    # Settings of this shell are for it, but not those that the command decides.
    shell = os.environ | {"KVPOOL_SERVER_ID": "gpu-17", "KVPOOL_SERVER_TIERS": "dram:64MiB"}
    running = subprocess.Popen(
        start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=shell
    )
    try:
        assert running.stdout is not None
        assert running.stderr is not None
        while "Press Ctrl-C" not in (line := running.stdout.readline()):
            assert line, "it has ended"
        status = ("status", "--masters", f"127.0.0.1:{port}", "--json")
        (server,) = json.loads(kvpool(*status).out)
        assert (server["server"], server["capacity"]) == ("gpu-17", 16 * MIB)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        assert '"info"' not in running.stderr.read()  # lines for people are not lost among others
        assert kvpool(*status).code == 1
    finally:
        running.kill()
