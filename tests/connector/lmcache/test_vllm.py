"""The whole way: vLLM -> LMCache -> kvpool, and a second engine behind a fresh LMCache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache 0.5.6: make test WITH=lmcache-long")
pytest.importorskip("vllm", reason="needs vLLM: make test WITH=lmcache-long")

from examples import tiny_model
from kvpool.testing.connector_checks import ProcessPool, prompt
from tests.conftest import soon
from tests.connector.vllm.helpers import Engine
from tests.support.programs import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CHUNK = 256  # tokens of an object in the pool
TOKENS = 1100  # of a prompt: four whole chunks, and a rest
LOADED = TOKENS // CHUNK * CHUNK


class LMCacheServer:
    """`lmcache server` in a process of its own, with kvpool as its second level."""

    def __init__(self, master: str, log: Path) -> None:
        self.port, self._http, metrics = (free_port() for _ in range(3))
        self._log = log
        plugin = {
            "type": "plugin",
            "module_path": "kvpool_lmcache",
            "class_name": "KVPoolL2Adapter",
            # Patient, so that a busy machine changes nothing.
            "adapter_params": {"masters": [master], "lookup_timeout_s": 5.0, "pause_s": 1.0},
        }
        command = [str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--http-host", "127.0.0.1"]
        command += ["--http-port", str(self._http), "--prometheus-port", str(metrics)]
        command += ["--l1-size-gb", "1", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        # By default LMCache itself copies from a GPU: an engine on a CPU would wait for ever.
        command += ["--supported-transfer-mode", "auto"]
        command += ["--chunk-size", str(CHUNK), "--l2-adapter", json.dumps(plugin)]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def ready(self) -> LMCacheServer:
        """Wait until it serves."""
        until = time.monotonic() + 240
        while True:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < until, self._log.read_text()[-3000:]
            try:
                self._ask("healthcheck")
            except OSError:
                time.sleep(0.3)
            else:
                return self

    def pool(self) -> dict[str, Any]:
        """What `lmcache describe` says of the adapter."""
        (adapter,) = self._ask("status")["storage_manager"]["l2_adapters"]
        assert isinstance(adapter, dict)
        return adapter

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/{what}", timeout=10) as answer:
            return json.load(answer)


@contextmanager
def serving(master: str, log: Path) -> Iterator[LMCacheServer]:
    server = LMCacheServer(master, log)
    try:
        yield server.ready()
    finally:
        server.close()


def behind(server: LMCacheServer) -> dict[str, Any]:
    """Arguments of an engine."""
    return {
        "dtype": "float32",
        "kv_transfer_config": {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": server.port,
            },
        },
    }


def test_a_second_engine_behind_a_fresh_lmcache(tmp_path: Path) -> None:
    """Nothing but the pool remembers the prompts; a pool that is killed costs hits only."""
    model = tiny_model.make(tmp_path / "model")
    prompts = [prompt(number, TOKENS) for number in range(4)]
    with ProcessPool("256MiB") as pool:
        with Engine(model, tmp_path / "first.log", dtype="float32") as engine:
            engine.ready()
            right = [engine.generate([one])["tokens"][0] for one in prompts]
            with serving(pool.address, tmp_path / "lmcache-1.log") as server:
                engine.start(model, **behind(server))
                first = engine.generate(prompts[:2])
                soon(lambda: pool.blocks() == 2 * LOADED // CHUNK, 60)
                assert server.pool()["objects_found"] == 0
        assert first["cached"] == [0, 0]
        assert first["tokens"] == right[:2]

        with (
            serving(pool.address, tmp_path / "lmcache-2.log") as server,
            Engine(model, tmp_path / "second.log", **behind(server)) as engine,
        ):
            second = engine.ready().generate(prompts[:1])
            assert second["tokens"] == right[:1]
            assert second["cached"] == [LOADED]
            told = server.pool()
            assert told["objects_loaded"] == LOADED // CHUNK
            assert told["loads_failed"] == 0

            pool.kill()
            for number in (1, 2):  # one that was in the pool, and one that nobody has seen
                lost = engine.generate([prompts[number]])
                assert lost["tokens"] == [right[number]]
                assert lost["cached"] == [0]
            assert server.pool()["objects_loaded"] == LOADED // CHUNK

            pool.start()
            soon(lambda: bool(server.pool()["is_healthy"]), 60)
            assert engine.generate([prompts[3]])["tokens"] == [right[3]]
            soon(lambda: pool.blocks() >= LOADED // CHUNK, 60)
