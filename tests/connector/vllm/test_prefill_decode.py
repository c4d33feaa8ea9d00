"""Prefill on one engine and decode on another, which meet in the pool only: promises between them.

The proxy is the test, or the real vllm-router. NIXL and the router are wheels that
`make test WITH=vllm` installs; where there are none for this machine, their tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_two_instances import Instance
from tests.conftest import patient, soon
from tests.connector.vllm.helpers import Engine, Logs, Models, closing, transfer
from tests.support.local_pool import LocalPool
from tests.support.programs import free_port

pytestmark = pytest.mark.timeout(400)

#: What a proxy asks of the engine that prefills, as vllm-router does it.
ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: A proxy's own promise: it asks both engines at once.
AT_ONCE = {"kvpool": {"promise": {"version": 1}}}
ROUTER = shutil.which("vllm-router", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def prompts(count: int, length: int = 700, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(5, 1000) for _ in range(length)] for _ in range(count)]


def role(pool: LocalPool, kv_role: str, **settings: Any) -> dict[str, Any]:
    return {**transfer(pool.master, verify_rate=0, **settings), "kv_role": kv_role}


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    local = LocalPool()
    yield local
    local.close()


@pytest.fixture(scope="module")
def pair(model: Models, logs: Logs, pool: LocalPool) -> Iterator[tuple[Engine, Engine]]:
    """One that prefills and one that decodes."""
    prefills = Engine(model(), logs("prefills"), kv_transfer_config=role(pool, "kv_producer"))
    config = role(pool, "kv_consumer")
    decodes = Engine(model(), logs("decodes"), kv_transfer_config=config)
    with closing(prefills, decodes):
        yield prefills, decodes


def promises(engine: Engine) -> dict[str, float]:
    head = "vllm:kvpool_promises "
    found = engine.metrics().items()
    return {name.removeprefix(head): value for name, value in found if name.startswith(head)}


def gained(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    after = promises(engine)
    return {
        name: after[name] - before.get(name, 0)
        for name in after
        if after[name] != before.get(name, 0)
    }


def test_every_prompt_is_handed_over(plain: Engine, pair: tuple[Engine, Engine]) -> None:
    """The second engine is asked as soon as the first has answered."""
    prefills, decodes = pair
    before = promises(decodes)
    for tokens in prompts(10):
        first = prefills.generate([tokens], max_tokens=1, params=ASK_PREFILL)
        (params,) = first["transfer_params"]
        assert list(params) == ["kvpool"]
        assert len(json.dumps(params)) < 300
        answer = decodes.generate([tokens], params=params)
        assert answer["cached"] == [672]
        assert answer["tokens"] == plain.generate([tokens])["tokens"]
        assert answer["tokens"][0][0] == first["tokens"][0][0]
    outcomes = gained(decodes, before)
    assert outcomes.keys() <= {"kept", "found"}
    assert sum(outcomes.values()) == 10


def test_nothing_is_promised_unless_a_proxy_asks(pair: tuple[Engine, Engine]) -> None:
    prefills, _ = pair
    (tokens,) = prompts(1, seed=2)
    for params in ({}, {"do_remote_decode": False}, {"do_remote_decode": "yes"}):
        answer = prefills.generate([tokens], max_tokens=1, params=params)
        assert answer["transfer_params"] == [None]
    short = prefills.generate([tokens[:31]], max_tokens=1, params=ASK_PREFILL)
    assert short["transfer_params"] == [None]


def test_blocks_are_loaded_while_the_prompt_is_computed(
    plain: Engine, pair: tuple[Engine, Engine]
) -> None:
    """A proxy asks both engines at once."""
    prefills, decodes = pair
    before = promises(decodes)
    for tokens in prompts(4, 3000, seed=3):
        prefills.begin("generate", prompts=[tokens], max_tokens=1)
        answer = decodes.generate([tokens], params=AT_ONCE)
        prefills.answer()
        assert answer["cached"] == [2976]
        assert answer["tokens"] == plain.generate([tokens])["tokens"]
    assert gained(decodes, before) == {"kept": 4}


def test_an_engine_that_is_killed_while_it_prefills_costs_a_recompute(
    model: Models, logs: Logs, plain: Engine, pool: LocalPool, pair: tuple[Engine, Engine]
) -> None:
    """With -9, between two steps of one prompt; the other engine was asked at the same time."""
    _, decodes = pair
    before = promises(decodes)
    small = {"max_num_batched_tokens": 32, "max_num_seqs": 1}
    config = role(pool, "kv_producer")
    with Engine(model(), logs("killed"), kv_transfer_config=config, **small) as prefills:
        prefills.ready().generate(prompts(1, seed=4), max_tokens=1)
        pool.settled()
        (tokens,) = prompts(1, 4000, seed=5)
        had = _blocks(pool)
        decodes.begin("generate", prompts=[tokens], params=AT_ONCE)
        prefills.begin("generate", prompts=[tokens], max_tokens=1)
        soon(lambda: _blocks(pool) >= had + 8)
        prefills.close()
    stored = _blocks(pool) - had
    assert stored < 4000 // 32, "it was killed too late"
    answer = decodes.answer()
    assert answer["tokens"] == plain.generate([tokens])["tokens"]
    assert answer["seconds"] < patient(15.0)
    assert gained(decodes, before) == {"broken": 1}


def _blocks(pool: LocalPool) -> int:
    async def count() -> int:
        return sum(len(list(server.store.index.inventory())) for server in pool.dev.servers)

    return pool.run(count())


GOOD = {"version": 1, "name": "0123456789abcdef", "tokens": 672, "tail": "ab" * 32}


@pytest.mark.parametrize(
    "forged", [{**GOOD, "tail": "ab" * 10_000_000}, GOOD, {"version": 1, "computing_s": 3600}]
)
def test_what_a_client_makes_up_delays_its_own_request(
    plain: Engine, pair: tuple[Engine, Engine], forged: Any
) -> None:
    """At the most by the 10 s that a load waits for a promise, and its answer is the same."""
    _, decodes = pair
    (tokens,) = prompts(1, seed=6)
    tokens = [len(str(forged)) % 900 + 10, *tokens]
    answer = decodes.generate([tokens], params={"kvpool": {"promise": forged}})
    assert answer["tokens"] == plain.generate([tokens])["tokens"]
    assert answer["seconds"] < patient(10.0 + 5.0)


@pytest.mark.long  # what the second engine has generated is saved with its next step, or later
@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: make test WITH=vllm")
def test_beside_nixl_the_pool_brings_what_was_decoded(
    model: Models, logs: Logs, plain: Engine, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector: prompts go from engine to engine, and answers into the pool, from where the
    first engine loads them with the next turn."""
    monkeypatch.setenv("UCX_TLS", "tcp,shm,self")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    engines = []
    for name, kv_role in (("nixl-p", "kv_producer"), ("nixl-d", "kv_consumer")):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        base = {"kv_role": kv_role, "kv_load_failure_policy": "recompute"}
        children = [{"kv_connector": "NixlConnector", **base}, role(pool, "kv_both")]
        config = {"kv_connector": "MultiConnector", **base}
        config["kv_connector_extra_config"] = {"connectors": children}
        engines.append(Engine(model(), logs(name), kv_transfer_config=config))
    prefills, decodes = engines
    with closing(*engines):
        for tokens in prompts(3, seed=7):
            history = list(tokens)
            for turn in range(2):
                first = prefills.generate([history], max_tokens=1, params=ASK_PREFILL)
                if turn:
                    # It has computed 21 blocks itself. Of the two that the other engine has
                    # generated, the last is saved with that engine's next step, as always.
                    assert first["cached"][0] in (704, 736)
                (params,) = first["transfer_params"]
                assert params["do_remote_prefill"]
                assert params["kvpool"]["promise"]["tokens"] == len(history) // 32 * 32
                answer = decodes.generate([history], max_tokens=48, params=params)
                expected = plain.generate([history], max_tokens=48)
                assert answer["tokens"] == expected["tokens"]
                history += answer["tokens"][0]
                pool.settled()
        metrics = decodes.metrics()
    assert metrics["vllm:prompt_tokens_cached_by_source p2p"] > 3 * 600


@contextlib.contextmanager
def vllm_router(prefills: Instance, decodes: Instance, log: Path) -> Iterator[str]:
    """The real one, for prefill and decode; yields its address."""
    assert ROUTER is not None
    url = f"http://127.0.0.1:{free_port()}"
    command = [ROUTER, "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin"]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", f"http://127.0.0.1:{prefills.port}"]
    command += ["--decode", f"http://127.0.0.1:{decodes.port}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def healthy() -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{url}/health", timeout=2).status == 200)
        return False

    try:
        soon(healthy, 60)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed: make test WITH=vllm")
def test_vllm_router_hands_promises_on(model: Models, tmp_path: Path, pool: LocalPool) -> None:
    """Its mode for NIXL passes on what the first engine answers, as it is."""
    prefills, decodes = (
        Instance(kv_role, model(), tmp_path / kv_role, role(pool, kv_role, tenant="router"))
        for kv_role in ("kv_producer", "kv_consumer")
    )
    try:
        for instance in (prefills, decodes):
            instance.ready()
        with vllm_router(prefills, decodes, tmp_path / "router.log") as url:
            for tokens in prompts(10, seed=8):
                body = {"model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0}
                body |= {"ignore_eos": True, "return_token_ids": True}
                request = urllib.request.Request(
                    f"{url}/v1/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=60) as response:
                    answer = json.load(response)
                # The first engine has the prompt itself: it computes as one without a pool.
                alone = prefills.answer(tokens, 8)
                assert tuple(answer["choices"][0]["token_ids"]) == alone.answer
            metrics = decodes.metrics()
            # A machine that stands still for a second makes a lookup a miss, never a wrong answer.
            assert metrics["vllm:external_prefix_cache_hits_total"] >= 8 * 672
            assert metrics["vllm:kvpool_promises_total"] == 10
    finally:
        for instance in (prefills, decodes):
            instance.close()
