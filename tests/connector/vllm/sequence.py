"""Several vLLM engines in one process, one after the other: importing vLLM takes most of a start.

Each line of stdin is one engine as JSON: its arguments, prompts, and perhaps a LoRA adapter. The
answer has the tokens and how many of each prompt's were cached. The engine lives until the next
line, so that its saves can end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from tests.connector.vllm.engine import DEFAULTS


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    llm: Any = None

    def end() -> None:
        nonlocal llm
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            llm = None
            gc.collect()
            cleanup_dist_env_and_memory()

    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        end()
        told = json.loads(line)
        given: dict[str, Any] = {**DEFAULTS, "distributed_executor_backend": "uni"}
        given.update(told["arguments"])
        if transfer := given.pop("kv_transfer_config", None):
            given["kv_transfer_config"] = KVTransferConfig(**transfer)
        adapter = LoRARequest("adapter", 1, told["adapter"]) if told.get("adapter") else None
        llm = LLM(**given)
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        rounds = []
        for prompts in told["rounds"]:
            outputs = llm.generate(
                [{"prompt_token_ids": tokens} for tokens in prompts],
                sampling,
                use_tqdm=False,
                lora_request=adapter,
            )
            rounds.append(
                {
                    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                    "cached": [output.num_cached_tokens for output in outputs],
                }
            )
        print(json.dumps(rounds), file=answers)
    end()


if __name__ == "__main__":
    main()
