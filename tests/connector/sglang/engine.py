"""An SGLang engine on a CPU, in a process of its own, told what to do in lines of JSON.

Speaks as `tests.connector.vllm.engine` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.connector.sglang import stand_ins  # noqa: F401  before sglang

DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_custom_all_reduce": True,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "max_total_tokens": 8192,
    "max_running_requests": 4,
    "page_size": 32,
    "chunked_prefill_size": 512,
    "context_length": 4096,
    "random_seed": 1,
    "log_level": "info",
}
HICACHE: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_prefetch_policy": "wait_complete",
}
STORAGE: dict[str, Any] = {
    "backend_name": "kvpool",
    "module_path": "kvpool_sglang",
    "class_name": "KVPoolStorage",
    "interface_v1": 1,
    "lookup_timeout_s": 3.0,
    "load_timeout_s": 5.0,
    "pause_s": 2.0,
}


def _import_only(*models: str) -> None:
    """Importing all models of SGLang takes 15 s of CPU in each process."""
    found = importlib.util.find_spec("sglang")
    assert found.origin is not None
    files = (Path(found.origin).parent / "srt/models").glob("*.py")
    needed = {*models, "__init__", "registry", "utils"}
    names = sorted(path.stem for path in files if path.stem not in needed)
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(names)


def main() -> None:
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _import_only("qwen3", "qwen2")
    import sglang

    given: dict[str, Any] = json.loads(sys.argv[1])
    storage = given.pop("storage", None)
    arguments = {**DEFAULTS, "model_path": given.pop("model")}
    if storage is not None:
        extra = json.dumps({**STORAGE, **storage})
        arguments |= {**HICACHE, "hicache_storage_backend_extra_config": extra}
    engine = sglang.Engine(**{**arguments, **given})
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        told = json.loads(line)
        match told.pop("do"):
            case "forget":
                answer: Any = engine.flush_cache().success
            case "update_weights":
                answer = engine.update_weights_from_disk(told["path"])[0]
            case "generate":
                salt = {"cache_salt": told["salt"]} if told.get("salt") else {}
                outputs = [
                    engine.generate(
                        input_ids=prompt,
                        sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
                        **salt,
                    )
                    for prompt in told["prompts"]
                ]
                answer = {
                    "tokens": [output["output_ids"] for output in outputs],
                    "cached": [output["meta_info"].get("cached_tokens") for output in outputs],
                }
            case other:
                raise ValueError(f"{other!r}: expected generate, forget or update_weights")
        print(json.dumps(answer), file=answers)
    engine.shutdown()


if __name__ == "__main__":
    main()
