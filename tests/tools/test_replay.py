"""The main job, small: real processes, every byte checked, the hit rate of the offline policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import patient, soon
from tests.support.commands import kvpool


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpool", "replay", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_replay_has_the_hit_rate_of_its_policy(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    done = replay(
        *("--sessions", "6", "--concurrent", "3", "--clients", "2", "--servers", "1"),
        *("--in-flight", "1", "--capacity", "1600KiB", "--block-size", "4KiB", "--limit", "80"),
        *("--picture", str(picture), "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_bytes"] == 0
    assert report["hits"] > 0
    assert abs(report["hit_rate"] - report["offline_lru"]) < 0.002
    assert report["offline_isolated"] < report["offline_lru"] <= report["offline_ideal"]
    assert picture.read_text().startswith("<svg")


def test_a_replay_with_four_servers_is_what_the_dry_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # The dry replay hands no chains over: its seconds are those of the trace.
    monkeypatch.setenv("KVPOOL_SERVER_BALANCE", "false")
    done = replay(
        *("--sessions", "12", "--concurrent", "6", "--clients", "2", "--servers", "4"),
        *("--in-flight", "1", "--capacity", "400blocks", "--block-size", "4KiB"),
        *("--limit", "90", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_bytes"] == 0
    assert 0.3 < report["hit_rate"] < report["offline_ideal"]
    assert report["hit_rate"] == pytest.approx(report["offline_policy"], abs=0.02)
    assert all(one["counters"]["handed_over_blocks"] == 0 for one in report["members"])


def test_a_replay_leaves_the_pool_of_this_shell_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, secret, config = tmp_path / "blocks", tmp_path / "secret", tmp_path / "pool.yaml"
    secret.write_text("0123456789abcdef")
    config.write_text(f"cluster: theirs\nserver: {{id: gpu-17, tiers: [nvme:{blocks}:8MiB]}}\n")
    tiers = f"dram:8MiB,nvme:{blocks}:16MiB"
    for name, value in ("CONFIG", config), ("SECRET_FILE", secret), ("SERVER_TIERS", tiers):
        monkeypatch.setenv(f"KVPOOL_{name}", str(value))
    done = replay(
        *("--sessions", "1", "--limit", "5", "--servers", "2", "--clients", "1"),
        *("--capacity", "16MiB", "--block-size", "4KiB", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["wrong_bytes"]) == (5, 0)
    assert not blocks.exists()


def test_a_replay_goes_on_warm_when_every_server_was_killed(tmp_path: Path) -> None:
    """More than fits in memory, and after kill -9 the file has what the pool had (G8)."""
    done = replay(
        *("--sessions", "6", "--concurrent", "3", "--clients", "2", "--servers", "2"),
        *("--in-flight", "1", "--block-size", "4KiB", "--limit", "80", "--kill-at", "0.5"),
        *("--tier", "dram:800KiB", "--tier", f"nvme:{tmp_path}/{{server}}:16MiB", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_bytes"] == 0
    # Nothing is ever evicted, so what is missing was on its way to the file.
    assert report["offline_ideal"] - report["hit_rate"] < 0.1
    usage = [tier for member in report["members"] for tier in member["usage"]]
    assert sum(tier["hits"] for tier in usage if tier["name"] == "nvme") > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_replay_takes_its_processes_with_it(number: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "kvpool", "replay", "--clients", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    soon(lambda: len(children(parent.pid)) >= 5, patient(20))
    started = children(parent.pid)
    parent.send_signal(number)
    parent.wait(patient(10))
    soon(lambda: not any(os.path.exists(f"/proc/{child}") for child in started), patient(3))


@pytest.mark.parametrize("victim", ["kvpool.tools.replay_engine", "kvpool master"])
def test_a_replay_without_its_master_or_an_engine_ends_in_a_sentence(victim: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "kvpool", "replay", "--clients", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.kill(playing(parent.pid, victim), signal.SIGKILL)
    _, errors = parent.communicate(timeout=patient(15))
    assert parent.returncode == 1
    assert "ended with code -9" in errors
    assert "Traceback" not in errors


def test_a_replay_outlives_a_server() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "kvpool", "replay", "--clients", "2", "--limit", "250", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    os.kill(playing(parent.pid, "kvpool server"), signal.SIGKILL)
    out, _ = parent.communicate(timeout=patient(50))
    report = json.loads(out)
    assert parent.returncode == 0
    assert report["wrong_bytes"] == 0
    assert report["requests"] == 250


def playing(parent: int, name: str) -> int:
    """The process of a running replay whose command line holds `name`, once requests are played."""
    until = time.monotonic() + patient(20)
    while time.monotonic() < until:
        processes = children(parent)
        engines = [child for child in processes if "replay_engine" in command_of(child)]
        if any(shared_kib(engine) > 2048 for engine in engines):
            return next(child for child in processes if name in command_of(child))
        time.sleep(0.05)
    raise AssertionError("the replay did not start")


def shared_kib(process: int) -> int:
    """The pages of shared memory that a process has touched: of an engine, blocks of a server."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0])


def command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


def children(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(name))
    return found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("/nowhere/trace.jsonl",), "No such file"),
        (("--workload", "poetry"), "expected codex"),
        (("--block-size", "4KB"), "did you mean 4KiB"),
        (("--capacity", "1KiB"), "holds no block"),
        (("--transports", "shm,bogus"), "no transport 'bogus'"),
    ],
)
def test_a_wrong_replay_is_a_sentence_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    done = kvpool("replay", *arguments)
    assert done.code == 2
    assert says in done.err


def test_a_replay_with_a_join_a_drain_and_a_kill_has_the_hits_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """Nothing has to be lost: there is room, and the server that is killed has a file."""
    done = replay(
        *("--sessions", "10", "--concurrent", "5", "--clients", "2", "--servers", "2"),
        *("--in-flight", "1", "--block-size", "4KiB", "--limit", "150"),
        *("--tier", "dram:2MiB", "--tier", f"nvme:{tmp_path}/{{server}}:8MiB"),
        *("--events", "0.3:join,0.5:drain,0.75:kill", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_bytes"] == 0
    assert report["hit_rate"] == pytest.approx(report["offline_ideal"], abs=0.01)
    assert report["hits"] > 1000
    alive = [member["server"] for member in report["members"] if member["alive"]]
    assert sorted(alive) == ["server-1", "server-2"]


@pytest.mark.parametrize("events", ["join", "1.5:join", "0.5:leave", "x:join", "0.5:join,"])
def test_what_happens_in_a_replay_is_spelled_right(events: str) -> None:
    done = kvpool("replay", "--events", events)
    assert done.code == 2
    assert "expected a share of the requests and one of join, drain, kill" in done.err
