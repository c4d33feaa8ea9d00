"""The device memory of staging, taken before vLLM measures how much is left for the KV cache.

vLLM makes a connector after it has measured, and asks none before how much it needs. So the plugin
has the initialization of a worker's device end with the allocation. (design: device-memory)
"""

from __future__ import annotations

import functools
from typing import Any

from kvpool import reserve_device_memory
from kvpool_connector.memory.block_memory import stage_of
from kvpool_connector.settings import given_settings
from kvpool_connector.vllm_engine.interface import WorkerWrapperBase


@functools.cache
def reserve_when_started() -> None:
    """From now on a worker that uses this connector has its staging memory when its device is
    ready: before the weights are loaded. Called again, this does nothing.
    """
    WorkerWrapperBase.init_device = _then_reserve(WorkerWrapperBase.init_device)


def _then_reserve(init_device: Any) -> Any:
    @functools.wraps(init_device)
    def started(wrapper: Any) -> None:
        init_device(wrapper)
        device, transfer = wrapper.worker.device, wrapper.vllm_config.kv_transfer_config
        if device is None or device.type == "cpu" or transfer is None:
            return
        for given in given_settings(transfer):
            # Of the connector, or of its client, which takes the blocks where they lie.
            if given.get("device_path") == "direct":
                reserve_device_memory(device)
            else:
                stage_of(device)

    return started
