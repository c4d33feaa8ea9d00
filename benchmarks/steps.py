"""What the connector costs the engine's scheduler in a step, with vLLM's own classes.

    .venv-vllm/bin/python -m benchmarks.steps [--requests 256] [--context 131072]

No model runs: vLLM's real scheduler, block tables and connector, and a worker that this program
plays. Every request decodes one token a step; some complete a block, which is then saved and
acknowledged. vLLM makes a request's table of block ids only for the connector that asks for it, and
with a long context that takes longer than all else here. (design: pool-thread)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

from kvpool.tools.bench import Row, table

ROOT: Final = Path(__file__).parents[1]
REQUESTS: Final = 256
CONTEXT: Final = 128 << 10
BLOCK: Final = 16
#: Each request is looked at once in so many steps: about one in each.
STEPS: Final = 16 * BLOCK
#: The hooks that are called in a step; a lookup is started when vLLM first asks for a prompt.
HOOKS: Final = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
)
#: Prompts, one after the other, each computed in one step.
PROMPTS: Final = 8
_TARGET_S: Final = 0.2e-3
_LIMIT_S: Final = 300.0


class StepTimes(NamedTuple):
    """Seconds of each decode step: in the connector's hooks, and in all of `schedule`.

    `hooks_cpu` is without what the hooks waited for a core.
    """

    hooks: list[float]
    hooks_cpu: list[float]
    schedule: list[float]


def measure(quick: bool = False) -> list[Row]:
    """In a process of its own, with the interpreter of `.venv-vllm` if this one has no vLLM.

    Without vLLM there is one row, which says what is missing.
    """
    requests = REQUESTS // 8 if quick else REQUESTS
    what = _what(requests, CONTEXT)
    interpreter = ROOT / ".venv-vllm/bin/python"
    if find_spec("vllm") is not None:
        interpreter = Path(sys.executable)
    elif not interpreter.exists():
        return [Row(what, "not measured: no vLLM", "make test WITH=vllm has it", None, "", None)]
    command = [str(interpreter), "-m", "benchmarks.steps", "--json", "--requests", str(requests)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=_LIMIT_S, check=True
        )
    except subprocess.SubprocessError as error:
        return [Row(what, "failed", str(error)[-60:], None, "", None)]
    return [Row(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def decode(requests: int, context: int) -> StepTimes:
    """Decode steps of so many requests with so much context each, which they share."""
    scheduler, prompts = _scheduler(requests, context), _Prompts(requests)
    worker = _PlayedWorker(scheduler)
    names = [f"r{number}" for number in range(requests)]
    for number, name in enumerate(names):
        # One begins with each step, and each 16 of them elsewhere in a block, so that the steps
        # complete blocks evenly.
        scheduler.add_request(prompts.request(name, context - number // BLOCK % BLOCK))
        while name not in worker.decoding:
            worker.step()
    for _ in range(BLOCK):
        worker.step()
    gc.collect()
    gc.freeze()
    worker.times = StepTimes([], [], [])
    for _ in range(STEPS):
        worker.step()
    assert len(scheduler.running) == requests
    assert worker.saved >= requests * (STEPS // BLOCK)
    scheduler.connector.shutdown()
    return worker.times


def whole_prompts(context: int) -> StepTimes:
    """Steps that compute a prompt of so many tokens at once, of which the pool has nothing.

    All of its blocks are to be saved; a quarter of the engine's may be at a time, others wait.
    """
    from vllm.v1.request import RequestStatus

    scheduler, prompts = _scheduler(1, context), _Prompts(1)
    worker = _PlayedWorker(scheduler)
    times = StepTimes([], [], [])
    for number in range(PROMPTS):
        name = f"p{number}"
        scheduler.add_request(prompts.request(name, context, own=True))
        gc.collect()
        while name not in worker.decoding:
            worker.step()
        for column, of_all in zip(times, worker.times, strict=True):
            column.append(of_all[-1])
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        for _ in range(BLOCK):
            worker.step()
    scheduler.connector.shutdown()
    return times


class _PlayedWorker:
    """Runs the scheduler's steps, samples one token for each, and acknowledges every save."""

    def __init__(self, scheduler: Any) -> None:
        self.times = StepTimes([], [], [])
        self.decoding: set[str] = set()
        self.saved = 0
        self._scheduler = scheduler
        self._acknowledged: list[Any] = []
        self._steps = 0
        self._hook_s = self._hook_cpu_s = 0.0
        for name in HOOKS:
            self._time_hook(name)

    def step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvpool_connector.records.messages import (
            ModelInfo,
            SaveResult,
            WorkerInfo,
            WorkerReport,
        )
        from kvpool_connector.vllm import ReportMetadata

        self._hook_s = self._hook_cpu_s = 0.0
        began = time.perf_counter()
        step = self._scheduler.schedule()
        took_s = time.perf_counter() - began
        work = step.kv_connector_metadata.work
        report = WorkerReport(work.step, saves=self._acknowledged)
        if not self._steps:
            report.worker_infos.append(WorkerInfo(0, ModelInfo(), (1 << 20,), 1))
        self._acknowledged = [SaveResult(save.job, 0, ()) for save in work.saves]
        ids = list(step.num_scheduled_tokens)
        self._steps += 1
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: number for number, name in enumerate(ids)},
            # Each generates something of its own: of equal blocks one is saved.
            sampled_token_ids=[[int(name[1:])] for name in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=ReportMetadata(report)),
        )
        self._scheduler.update_from_output(step, output)
        self.decoding.update(ids)
        self.saved += sum(len(blocks.digests) for save in work.saves for blocks in save.blocks)
        self.times.hooks.append(self._hook_s)
        self.times.hooks_cpu.append(self._hook_cpu_s)
        self.times.schedule.append(took_s)

    def _time_hook(self, name: str) -> None:
        hook = getattr(self._scheduler.connector, name)

        def timed(*arguments: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return hook(*arguments)
            finally:
                self._hook_s += time.perf_counter() - began
                self._hook_cpu_s += time.thread_time() - cpu_began

        setattr(self._scheduler.connector, name, timed)


def _scheduler(requests: int, context: int) -> Any:
    """vLLM's scheduler with the connector, whose pool does not answer."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    blocks = context // BLOCK + requests * _generated(requests) // BLOCK
    config = _config(requests, context, blocks)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        log_stats=True,
        block_size=BLOCK,
        hash_block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )


def _config(requests: int, context: int, blocks: int) -> Any:
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    from examples import tiny_model

    longest = context + _generated(requests)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.kv_cache_layout, cache.num_gpu_blocks = "LBHNC", blocks
    # Nothing listens there: lookups and saves go nowhere, and the worker is played.
    extra = {"masters": ["127.0.0.1:9"], "revision": "bench"}
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(tiny_model.make(Path(tempfile.gettempdir()) / "kvpool-bench-steps")),
            dtype="bfloat16",
            seed=0,
            hf_overrides={"max_position_embeddings": longest},
            max_model_len=longest,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVPoolConnector",
            kv_connector_module_path="kvpool_connector.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=2 * context,
            max_model_len=longest,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    cache.block_size = BLOCK  # VllmConfig may have changed it
    return config


class _Prompts:
    """Requests that share their context, and the hashes of it: to make those takes longest."""

    def __init__(self, requests: int) -> None:
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256_cbor)
        self._hash_blocks = get_request_block_hasher(BLOCK, sha256_cbor)
        self._known: list[Any] = []
        self._generated = _generated(requests)

    def request(self, name: str, tokens: int, *, own: bool = False) -> Any:
        """`own`: it shares nothing with the others."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=self._generated, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        return Request(
            request_id=name,
            prompt_token_ids=[token % 1000 + 10 for token in range(tokens)],
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hash_blocks if own else self._hash,
            cache_salt=name if own else None,
        )

    def _hash(self, request: Any) -> list[Any]:
        if request.block_hashes:
            return list(self._hash_blocks(request))
        if not self._known:
            self._known = list(self._hash_blocks(request))
        return self._known[: request.num_tokens // BLOCK]


def _generated(requests: int) -> int:
    """Tokens that the first of so many requests may generate: the others begin beside it."""
    return 2 * (requests + STEPS)


def _what(requests: int, context: int) -> str:
    return f"connector in a decode step, {requests} x {context >> 10}K tokens"


def _rows(times: StepTimes, requests: int, context: int) -> list[Row]:
    hooks, hooks_cpu, schedule = (statistics.median(column) for column in times)
    return [
        Row(
            _what(requests, context),
            f"{hooks_cpu * 1e3:.3f} ms of CPU, {hooks * 1e3:.3f} ms",
            f"all of schedule {schedule * 1e3:.2f} ms",
            hooks / schedule,
            f"<= {_TARGET_S * 1e3:g} ms of CPU",
            hooks_cpu <= _TARGET_S,
        )
    ]


def _prompt_rows(times: StepTimes, context: int) -> list[Row]:
    _, hooks_cpu, schedule = (statistics.median(column) for column in times)
    blocks = context / BLOCK
    return [
        Row(
            f"connector in the step of a whole prompt, {context >> 10}K tokens",
            f"{hooks_cpu * 1e3:.1f} ms of CPU, {hooks_cpu / blocks * 1e6:.2f} us a block",
            f"all of schedule {schedule * 1e3:.1f} ms",
            hooks_cpu / schedule,
            "",
            None,
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--json", action="store_true", help="one line, for other programs")
    chosen = parser.parse_args()
    rows = _rows(decode(chosen.requests, chosen.context), chosen.requests, chosen.context)
    rows += _prompt_rows(whole_prompts(chosen.context), chosen.context)
    if chosen.json:
        print(json.dumps(rows))
    else:
        Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
