"""A prefix cache for Hugging Face transformers that processes and hosts share.

with PooledCache("127.0.0.1:7450", model) as cache:
    past = cache.prefill(ids)
    output = model.generate(ids, past_key_values=past)
"""

from kvpool_transformers.pooled_cache import PooledCache, Prefilled

__all__ = ["PooledCache", "Prefilled"]
