"""A vLLM engine in a process of its own, told what to do in lines of JSON.

`start` ends the engine and makes another one in the same process: importing vLLM takes most of the
time of a first start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import sys
import threading
import time
from typing import Any

import msgspec
import torch

from kvpool_connector.settings import Settings

# With the tile kernels of some CPUs a token depends on how many are computed beside it, and tests
# compare tokens. Their MLA has another block size, too. Here, not in `main`: the processes of the
# workers import this module, and do not run it.
torch.cpu._is_amx_tile_supported = lambda: False
# Two engines on two cores leave a master or a server no turn for a second. Loads have their own
# limit, which tests of pools that are silent choose.
_client = Settings.client
Settings.client = lambda self: msgspec.structs.replace(  # type: ignore[method-assign]
    _client(self), attempt_s=20.0, timeout_s=30.0
)

#: What makes a run of the real engine short and repeatable on a CPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # What vLLM compiles ahead of time it cannot load again on a CPU: each start would compile anew,
    # for 15 seconds. So PyTorch compiles, and has a cache.
    "VLLM_USE_AOT_COMPILE": "0",
}
DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "seed": 0,
    "prefix_caching_hash_algo": "sha256_cbor",
    "disable_log_stats": False,
}


def _memory() -> tuple[int, int]:
    """Bytes of this process's own, and of what it shares with others."""
    with open("/proc/self/statm") as file:
        resident, shared = map(int, file.read().split()[1:3])
    page = os.sysconf("SC_PAGE_SIZE")
    return (resident - shared) * page, shared * page


def main() -> None:
    # The engine logs to stdout: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first: dict[str, Any] = json.loads(sys.argv[1])
    ranks = first.get("tensor_parallel_size", 1) * first.get("pipeline_parallel_size", 1)
    if ranks == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        DEFAULTS["distributed_executor_backend"] = "uni"

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest
    from vllm.v1.metrics.reader import Histogram

    llm: Any = None

    def stop(told: dict[str, Any]) -> bool:
        nonlocal llm
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            llm = None
            gc.collect()
            cleanup_dist_env_and_memory()
        return True

    def start(given: dict[str, Any]) -> bool:
        nonlocal llm
        stop({})
        os.environ.update(given.pop("environment", {}))
        # A start looks into all modules, and fails at an object of this one. A second start has it;
        # behind LMCache, which imports numba, a first one, too.
        with contextlib.suppress(ImportError):
            importlib.import_module("llvmlite.binding")
        sys.modules.pop("llvmlite.binding.ffi", None)
        arguments = {**DEFAULTS, **given}
        if (transfer := arguments.pop("kv_transfer_config", None)) is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        llm = LLM(**arguments)
        return True

    def generate(told: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=told.get("temperature", 0),
            seed=0,
            n=told.get("n", 1),
            max_tokens=told.get("max_tokens", 8),
            ignore_eos=True,
            extra_args={"kv_transfer_params": told["params"]} if "params" in told else None,
        )
        prompts: Any = [{"prompt_token_ids": tokens} for tokens in told["prompts"]]
        if weights := told.get("as_embeddings"):  # a file with the embedding of every token
            table = torch.load(weights)
            prompts = [{"prompt_embeds": table[torch.tensor(one)]} for one in told["prompts"]]
        adapter = told.get("adapter")  # a number and a directory
        began = time.perf_counter()
        outputs = llm.generate(
            prompts,
            sampling,
            use_tqdm=False,
            lora_request=LoRARequest(f"adapter {adapter[0]}", *adapter) if adapter else None,
        )
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "samples": [[list(one.token_ids) for one in output.outputs] for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
            "transfer_params": [output.kv_transfer_params for output in outputs],
            "seconds": time.perf_counter() - began,
        }

    def metrics(told: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            labels = [v for k, v in metric.labels.items() if k not in ("engine", "model_name")]
            name = " ".join([metric.name, *labels])
            if isinstance(metric, Histogram):
                found[f"{name}_count"], found[f"{name}_sum"] = metric.count, metric.sum
            else:
                found[name] = getattr(metric, "value", 0.0)
        return found

    def clear(told: dict[str, Any]) -> dict[str, Any]:
        """At once after prompts, all that needs a cache without pinned blocks."""

        def run(first: int, tokens: int) -> None:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            prompts: Any = {"prompt_token_ids": [first, *range(tokens, tokens + 400)]}
            llm.generate(prompts, sampling, use_tqdm=False)

        resets = []
        for tokens in told["lengths"]:
            run(1, tokens)
            resets.append(llm.reset_prefix_cache())
        answer = generate(told)
        for tokens in told["lengths"]:
            run(2, tokens)
            llm.sleep(1)  # raises where it cannot clear it
            llm.wake_up()
        return {"resets": resets, **answer}

    def forget(told: dict[str, Any]) -> bool:
        # It refuses while blocks are being saved, and hears of their end only when it steps.
        until = time.monotonic() + 20
        while not llm.reset_prefix_cache(reset_connector=told.get("connector", False)):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1), use_tqdm=False)
        return True

    def sleep(told: dict[str, Any]) -> None:
        """And wake up again, with the weights of another directory where one is given."""
        llm.sleep(1)
        if "weights" in told:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": told["weights"]})
        llm.wake_up()

    def update(told: dict[str, Any]) -> None:
        """Weights are loaded while the engine serves, and nothing is reset."""
        if told["by"] == "vLLM":
            llm.collective_rpc("reload_weights")
        else:
            llm.collective_rpc(lambda worker: worker.model_runner.get_model().load_weights([]))

    def held(told: dict[str, Any]) -> dict[str, int]:
        """What must not grow: bytes of memory, file descriptors, asyncio tasks, threads.

        And what does until all of the pool was used: bytes of shared memory and of files. Memory in
        use is without what was freed, and the allocator keeps.
        """
        memory, shared = _memory()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
        return {
            "memory": memory,
            "memory in use": _memory()[0],
            "Python's blocks of memory": sys.getallocatedblocks(),
            "shared memory": shared,
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

    def sources(told: dict[str, Any]) -> list[str]:
        """Where the connector and the pool's client come from."""
        return [str(sys.modules[name].__file__) for name in ("kvpool", "kvpool_connector.vllm")]

    commands: dict[str, Any] = {
        "sources": sources,
        "start": start,
        "stop": stop,
        "sleep": sleep,
        "update": update,
        "generate": generate,
        "metrics": metrics,
        "clear": clear,
        "forget": forget,
        "held": held,
        "threads": threads,
    }
    start(first)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps(commands[told.pop("do")](told)), file=answers)


if __name__ == "__main__":
    main()
