"""Engine connectors: adapters between an inference engine's KV cache and the pool."""
