"""The whole way: vLLM -> LMCache -> kvpool, and a second engine behind a fresh LMCache."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache 0.5.6: make test-lmcache-long")
pytest.importorskip("vllm", reason="needs vLLM: make test-lmcache-long")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
TOKENS = 1100
ENV = {
    **os.environ,
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def engine(model: str, lmcache_port: str) -> None:
    """One engine in this process: two prompts, and how much of each came from LMCache."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="LMCacheMPConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": int(lmcache_port),
        },
    )
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=4096,
        kv_transfer_config=transfer,
        distributed_executor_backend="uni",
        disable_log_stats=False,
    )
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(5, 1000) for _ in range(TOKENS)]} for _ in "ab"]
    answers = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))  # type: ignore[arg-type]
    time.sleep(4)  # LMCache stores in the background
    told = {
        "cached": [one.num_cached_tokens for one in answers],
        "tokens": [list(one.outputs[0].token_ids) for one in answers],
    }
    print("TOLD", json.dumps(told))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def lmcache_server(master: str, log: Path) -> Iterator[int]:
    port, http, metrics = free_ports(3)
    plugin = {
        "type": "plugin",
        "module_path": "kvpool_lmcache",
        "class_name": "KVPoolL2Adapter",
        "adapter_params": {"masters": [master]},
    }
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http)]
    command += ["--prometheus-port", str(metrics), "--l1-size-gb", "1", "--eviction-policy", "LRU"]
    command += ["--chunk-size", "256", "--no-l1-use-lazy", "--l2-adapter", json.dumps(plugin)]
    with log.open("a") as out:
        process = subprocess.Popen(command, env=ENV, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=1):
                    break
            except OSError:
                time.sleep(0.3)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def answer(model: Path, port: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, str(model), str(port)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    told: dict[str, Any] = json.loads(lines[0][4:])
    return told


def test_a_second_engine_behind_a_fresh_lmcache(tmp_path: Path) -> None:
    """Nothing but the pool remembers the prompts; a pool that was killed costs hits only."""
    from examples import tiny_model

    model = tiny_model.make(tmp_path / "model")
    log = tmp_path / "lmcache.log"
    command = [sys.executable, "-m", "kvpool", "dev", "--capacity", "256MiB", "--bind"]
    with subprocess.Popen([*command, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as pool:
        try:
            assert pool.stdout is not None
            master = pool.stdout.readline().rpartition(" ")[2].strip()
            with lmcache_server(master, log) as port:
                first = answer(model, port)
            with lmcache_server(master, log) as port:
                second = answer(model, port)
                pool.kill()
            with lmcache_server(master, log) as port:
                third = answer(model, port)
        finally:
            pool.kill()
    assert first["cached"] == [0, 0]
    assert second["cached"] == [1024, 1024]  # whole chunks of 256 tokens
    assert third["cached"] == [0, 0]
    assert first["tokens"] == second["tokens"] == third["tokens"]


if __name__ == "__main__":
    engine(*sys.argv[1:])
