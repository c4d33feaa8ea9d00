"""The quick starts of the README, run as they are written, on loopback and with less memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.programs import free_port

README = (Path(__file__).parents[2] / "README.md").read_text()
LINES_MAX = 10


def block(heading: str) -> list[str]:
    """The first block of code under a heading."""
    code = rf"^### {heading}\n.*?```(?:python)?\n(.*?)```"
    found = re.search(code, README, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1].splitlines()


def here(lines: list[str]) -> str:
    """The same commands on this host: other ports, loopback, and memory that a test may have."""
    text = "\n".join(lines)
    text = re.sub(r"\b10\.0\.0\.(\d)\b", r"127.0.0.\1", text).replace("64GiB", "16MiB")
    for port in set(re.findall(r":(7\d{3})\b", text)):
        text = text.replace(f":{port}", f":{free_port()}")
    return text


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Runs commands in a folder of their own, and ends what they leave running."""
    running: list[subprocess.Popen[str]] = []
    commands = tmp_path / "bin"
    commands.mkdir()
    kvpool = commands / "kvpool"
    kvpool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvpool "$@"\n')
    vllm = commands / "vllm"  # stands in for the engine: what it is given is what is checked
    vllm.write_text('#!/bin/sh\nfor one; do printf "%s\\n" "$one"; done > "vllm-$4"\n')
    for one in (kvpool, vllm):
        one.chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}

    def run(script: str) -> str:
        process = subprocess.Popen(
            ["bash", "-ec", f"trap 'echo done' EXIT\n{script}"],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:  # it ends when "done" is written: servers keep it open
            if line == "done\n":
                break
            lines.append(line)
        return "".join(lines)

    yield run
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("heading", ["In Python", "Two vLLM engines on one host", "Three hosts"])
def test_a_quick_start_has_ten_lines(heading: str) -> None:
    assert len(block(heading)) <= LINES_MAX


def test_in_python(tmp_path: Path) -> None:
    script = "\n".join(block("In Python"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "8 True", done.stderr


def test_three_hosts(shell: Callable[[str], str]) -> None:
    *start, status = here(block("Three hosts")).splitlines()
    assert status == "kvpool status $POOL"
    # On one host they would have one name; and here the last line may come before the servers.
    named = [
        line.replace("kvpool server", f"KVPOOL_SERVER_ID=host-{number} kvpool server")
        for number, line in enumerate(start)
    ]
    up = f"{status} > said 2> why && test $(grep -c '^host-.  up' said) -eq 3"
    said = shell("\n".join([*named, f"until {up}; do sleep 0.5; done", "cat said"]))
    assert len(re.findall(r"^host-\d  up .* 16 MiB", said, re.MULTILINE)) == 3, said


def test_two_engines_on_one_host(shell: Callable[[str], str], tmp_path: Path) -> None:
    """The pool is real; the engines are not, so what is started for them is checked."""
    lines = here(block("Two vLLM engines on one host")).splitlines()
    address = re.findall(r"127\.0\.0\.1:\d+", lines[0])[-1]
    lines[0] = lines[0].replace("--http", f"--bind 127.0.0.1:{free_port()} --http")
    up = f"until curl -sf --noproxy '*' http://{address}/ready; do sleep 0.2; done"
    said = shell(
        "\n".join([*lines[:-1], up, "until test -s vllm-8000 -a -s vllm-8001; do sleep 0.1; done"])
    )
    assert "ready" in said
    for port in ("8000", "8001"):
        _, model, *options = (tmp_path / f"vllm-{port}").read_text().splitlines()
        assert (model, options[:3]) == ("MODEL", ["--port", port, "--kv-transfer-config"])
        config = json.loads(options[3])
        assert config["kv_connector"] == "KVPoolConnector"
        assert config["kv_load_failure_policy"] == "recompute"
    assert re.findall(r"--engine http://127\.0\.0\.1:(\d+)", lines[-1]) == ["8000", "8001"]
