"""kvpool as LMCache's second level, for every engine that LMCache serves.

lmcache server --l2-adapter '{"type": "plugin", "module_path": "kvpool_lmcache",
    "class_name": "KVPoolL2Adapter", "adapter_params": {"masters": ["127.0.0.1:7450"]}}'
"""

from kvpool_lmcache.adapter import KVPoolL2Adapter

__all__ = ["KVPoolL2Adapter"]
