"""kvpool as the storage of SGLang's HiCache, below its memory of the host.

--enable-hierarchical-cache --hicache-storage-backend dynamic
--hicache-storage-backend-extra-config '{"backend_name": "kvpool", "interface_v1": 1,
    "module_path": "kvpool_sglang", "class_name": "KVPoolStorage",
    "masters": ["127.0.0.1:7450"]}'
"""

from kvpool_sglang.storage import KVPoolStorage

__all__ = ["KVPoolStorage"]
