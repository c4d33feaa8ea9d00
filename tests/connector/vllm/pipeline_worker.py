"""A worker for CPUs whose pipeline stages run without compilation, which takes half a minute.

vLLM 0.32 makes the memory for what a stage receives only when it warms up for compilation.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):  # type: ignore[misc]
    def compile_or_warm_up_model(self) -> Any:
        self.model_runner.profile_run()
        return super().compile_or_warm_up_model()
