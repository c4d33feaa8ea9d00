"""Engines and pools for tests: real ones, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.connector.vllm.engine import ENVIRONMENT
from tests.support.programs import free_port

T = TypeVar("T")
#: What fixtures are: the directory of a model of a kind, the file of a log, an engine's context.
Models = Callable[..., Path]
Logs = Callable[[str], Path]
Running = Callable[..., contextlib.AbstractContextManager["Engine"]]

ROOT = Path(__file__).parents[3]
_START_S = 240.0
_ANSWER_S = 120.0


def transfer(master: str, **settings: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of an engine on a pool.

    Unless asked for, loads are neither weighed nor compared, and lookups have time: a busy machine
    changes nothing.
    """
    patient = {"load": "always", "verify_rate": 0}
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool_connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"masters": [master], **patient, **settings},
    }


def prompt(number: int, length: int = 500, shared: int = 375) -> list[int]:
    """Tokens of prompt `number`: the first `shared` are those of every other."""
    common = [(7 * i) % 900 + 10 for i in range(shared)]
    return common + [(13 * i + 31 * number) % 900 + 10 for i in range(length - shared)]


class Engine:
    """A vLLM engine in a process of its own; one question at a time."""

    module = "tests.connector.vllm.engine"

    def __init__(
        self, model: Path, log: Path, installed: Path | None = None, **arguments: Any
    ) -> None:
        """With `installed` it runs with the packages of that directory, not with the sources.

        `environment` has variables of its process; those of a later `start` are set in it.
        """
        environment = {**os.environ, **ENVIRONMENT, **arguments.get("environment", {})}
        environment.pop("PYTHONHASHSEED", None)
        program = ["-m", self.module]
        if installed is not None:
            program = [str(ROOT / "tests/connector/vllm/engine.py")]
            environment["PYTHONPATH"] = str(installed)
        self.log = log
        self._began = 0
        self._process = subprocess.Popen(
            [sys.executable, *program, json.dumps({"model": str(model), **arguments})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            cwd=installed or ROOT,
            env=environment,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self, model: Path, **arguments: Any) -> Engine:
        """End this engine and start another one, in the same process."""
        self._began = len(self.log.read_text())
        self.begin("start", model=str(model), **arguments)
        assert self._answer(_START_S)
        return self

    def ready(self) -> Engine:
        """Wait until it serves."""
        assert self._answer(_START_S) == "ready"
        return self

    def generate(self, prompts: Sequence[list[int]], **told: Any) -> dict[str, Any]:
        """Greedy tokens, cached tokens and reasons of the end for each prompt; seconds in all."""
        answer: dict[str, Any] = self.ask("generate", prompts=list(prompts), **told)
        return answer

    def metrics(self) -> dict[str, float]:
        answer: dict[str, float] = self.ask("metrics")
        return answer

    def forget(self, **told: Any) -> None:
        """Drop the engine's own prefix cache, so that only the pool can help."""
        assert self.ask("forget", **told)

    @property
    def said(self) -> str:
        """What the engine that runs now has logged."""
        return self.log.read_text()[self._began :]

    def begin(self, do: str, **told: Any) -> None:
        """Ask without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **told}) + "\n")
        self._process.stdin.flush()

    def ask(self, do: str, **told: Any) -> Any:
        self.begin(do, **told)
        return self._answer(_ANSWER_S)

    def answer(self) -> Any:
        """Of what was begun."""
        return self._answer(_ANSWER_S)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, within_s: float) -> Any:
        try:
            line = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise AssertionError(f"no answer in {within_s} s; {self._tail()}") from None
        assert line, f"the engine ended; {self._tail()}"
        return json.loads(line)

    def _tail(self) -> str:
        return f"{self.log}:\n{self.log.read_text()[-4000:]}"


class Processes:
    """Processes in which one engine runs after the other: only the first start imports vLLM."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._all: list[Engine] = []
        self._idle: list[Engine] = []

    @contextmanager
    def run(self, model: Path, **arguments: Any) -> Iterator[Engine]:
        """An engine that serves; it has ended afterwards, as if its process had."""
        if self._idle:
            engine = self._idle.pop().start(model, **arguments)
        else:
            engine = Engine(model, self._logs(f"shared-{len(self._all)}"), **arguments)
            self._all.append(engine)
            engine.ready()
        yield engine  # after a test that failed nobody knows what state it is in
        assert engine.ask("stop")
        self._idle.append(engine)

    def close(self) -> None:
        for engine in self._all:
            engine.close()


class PoolProcess:
    """`kvpool dev` in a process of its own; its address stays the same when it comes again."""

    def __init__(self) -> None:
        self.master = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvpool", "dev", "--capacity", "128MiB", "--bind", self.master],
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
        )
        host, port = self.master.split(":")
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                return
            time.sleep(0.05)
        raise AssertionError("the pool did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class SlowServer:
    """A block server in a process of its own, whose link can be made slow."""

    def __init__(self, master: str) -> None:
        self.moved = 0  # bytes, in both directions
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.connector.vllm.slow_server", master],
            stdin=pipe,
            stdout=pipe,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is up
        threading.Thread(target=self._listen, daemon=True).start()

    def slow(self, rate: float) -> None:
        """Bytes per second from here on."""
        assert self._process.stdin is not None
        print(rate, file=self._process.stdin, flush=True)

    def kill(self) -> None:
        """With -9."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.moved = int(line)


@contextmanager
def closing(*engines: Engine) -> Iterator[None]:
    """Wait until all of them serve; end them all afterwards."""
    try:
        for engine in engines:
            engine.ready()
        yield
    finally:
        for engine in engines:
            engine.close()
