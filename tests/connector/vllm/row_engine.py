"""A real engine for CPUs each of whose blocks is one row, as the connector wants them on a GPU.

The kernels for CPUs take such blocks; only vLLM's backend does not say so.
"""

from __future__ import annotations

import os

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.connector.vllm.engine import main

if __name__ == "__main__":
    CPUAttentionBackend.supported_kv_cache_layouts = lambda: (KVCacheLayout.BLHNC,)
    os.environ["VLLM_KV_CACHE_LAYOUT"] = KVCacheLayout.BLHNC.name
    main()
