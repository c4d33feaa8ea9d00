"""One vLLM engine in a process of its own, told what to do in lines of JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from typing import Any

#: What makes a run of the real engine short and repeatable on a CPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "seed": 0,
    "prefix_caching_hash_algo": "sha256_cbor",
    "disable_log_stats": False,
}


def main() -> None:
    # The engine logs to stdout: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    given: dict[str, Any] = json.loads(sys.argv[1])
    ranks = given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1)
    if ranks == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        given.setdefault("distributed_executor_backend", "uni")

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = given.pop("kv_transfer_config", None)
    if transfer is not None:
        given["kv_transfer_config"] = KVTransferConfig(**transfer)
    llm = LLM(**{**DEFAULTS, **given})

    def generate(told: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=told.get("max_tokens", 8),
            ignore_eos=True,
            extra_args={"kv_transfer_params": told["params"]} if "params" in told else None,
        )
        prompts: Any = [{"prompt_token_ids": tokens} for tokens in told["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
            "seconds": time.perf_counter() - began,
        }

    def metrics(told: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            labels = [v for k, v in metric.labels.items() if k not in ("engine", "model_name")]
            found[" ".join([metric.name, *labels])] = getattr(metric, "value", 0.0)
        return found

    def forget(told: dict[str, Any]) -> bool:
        # It refuses while blocks are being saved, and hears of their end only when it steps.
        until = time.monotonic() + 20
        while not llm.reset_prefix_cache(reset_connector=told.get("connector", False)):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1), use_tqdm=False)
        return True

    def held(told: dict[str, Any]) -> dict[str, int]:
        """What must not grow: bytes of memory, file descriptors, asyncio tasks, threads."""
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
        return {
            "memory": pages * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "tasks": sum(not task.done() for task in tasks),
            "threads": threading.active_count(),
        }

    def threads(told: dict[str, Any]) -> list[tuple[str, float]]:
        """Each thread of Python's, and the CPU seconds that it has used."""
        return [
            (thread.name, time.clock_gettime(time.pthread_getcpuclockid(thread.ident)))
            for thread in threading.enumerate()
            if thread.ident is not None
        ]

    commands: dict[str, Any] = {
        "generate": generate,
        "metrics": metrics,
        "forget": forget,
        "held": held,
        "threads": threads,
    }
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps(commands[told.pop("do")](told)), file=answers)


if __name__ == "__main__":
    main()
