"""Two `vllm serve` behind one pool, and a conversation whose turns alternate between them.

    make demo-vllm

For each turn: which instance answered, how long the prompt was, how much of it came from that
instance's own memory and from the pool, and the time to the first token. Then the same conversation
between two instances that have no pool, and share nothing. A tiny model on a CPU: real vLLM, real
HTTP, toy answers.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from examples import tiny_model

TURNS = 8
FIRST_TOKENS = 1500
TURN_TOKENS = 250
ANSWER_TOKENS = 40
_START_S = 300.0
_ANSWER_S = 120.0
_WHY = re.compile(r'^vllm:kvpool_\w+_total{.*(?:decision|reason)="(\w+)".*} (\S+)$', re.M)


class Turn(NamedTuple):
    """One answer. Times in seconds, the rest in tokens."""

    instance: str
    prompt: int
    own: int
    pool: int
    first_token_s: float
    answer: tuple[int, ...]
    why: str  # the connector's decision, and why the pool had no more blocks


class Instance:
    """A `vllm serve` in a process group of its own."""

    def __init__(self, name: str, model: Path, log: Path, transfer: dict[str, Any] | None) -> None:
        self.name = name
        self.port = free_port()
        self._log = log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)),
            # float32: in bf16 a tiny model gives other tokens when sums are made in another order.
            *("--dtype", "float32", "--max-model-len", "8192", "--enforce-eager"),
            *("--block-size", "32", "--kv-cache-memory-bytes", str(256 << 20)),
            *("--max-num-seqs", "8", "--enable-prompt-tokens-details"),
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
        raise SystemExit(f"{self.name} did not start:\n{self._log.read_text()[-3000:]}")

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


@contextmanager
def pool(capacity: str = "512MiB") -> Iterator[str]:
    """A master and a block server in a process of their own; the master's address."""
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool", "dev", "--capacity", capacity, "--bind", address],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


def transfer(master: str, **settings: Any) -> dict[str, Any]:
    """The engine's settings: the value of --kv-transfer-config."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"masters": [master], **settings},
    }


def conversation(instances: Sequence[Instance]) -> list[Turn]:
    """Each turn goes to the next instance, with the whole conversation so far."""
    rng = random.Random(7)
    history: list[int] = []
    turns = []
    for number in range(TURNS):
        new_tokens = TURN_TOKENS if history else FIRST_TOKENS
        history += [rng.randrange(10, 1000) for _ in range(new_tokens)]
        turn = instances[number % len(instances)].answer(history, ANSWER_TOKENS)
        history += turn.answer
        turns.append(turn)
        time.sleep(0.3)  # the user reads and types
    return turns


def played(model: Path, logs: Path, config: dict[str, Any] | None) -> list[Turn]:
    """The conversation between two instances of that configuration."""
    with ExitStack() as stack:
        instances = []
        for name in "AB":
            log = logs / f"{name}-{'pool' if config else 'alone'}.log"
            instances.append(Instance(name, model, log, config))
            stack.callback(instances[-1].close)
        for instance in instances:
            instance.ready()
            instance.answer(range(20, 120), 2)  # the first request of a process is slow
        return conversation(instances)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        model = tiny_model.make(logs / "model", layers=8, hidden=256)
        print("two vllm serve with one pool; starting takes a minute or two ...", flush=True)
        with pool() as master:
            # All processes may share two cores, so a slow lookup must not count as a miss.
            shared = played(model, logs, transfer(master, lookup_timeout_s=0.5))
        print("the same without a pool ...", flush=True)
        alone = played(model, logs, None)
    print("\nturn instance  prompt |  own  pool   TTFT | without a pool:  own   TTFT  same   why")
    for number, (one, other) in enumerate(zip(shared, alone, strict=True), 1):
        print(
            f"{number:4} {one.instance:>8} {one.prompt:7} | {one.own:4} {one.pool:5} "
            f"{one.first_token_s * 1e3:4.0f} ms |"
            f" {other.own:20} {other.first_token_s * 1e3:4.0f} ms"
            f"  {'yes' if one.answer == other.answer else 'NO':4}  {one.why}"
        )
    if any(one.answer != other.answer for one, other in zip(shared, alone, strict=True)):
        raise SystemExit("the answers differ")
    late = range(1, TURNS)
    with_pool = sum(shared[i].first_token_s for i in late)
    without = sum(alone[i].first_token_s for i in late)
    gain = without / with_pool
    print(f"\ntime to first token, turns 2 to {TURNS}: {gain:.1f} x faster with the pool")


if __name__ == "__main__":
    main()
