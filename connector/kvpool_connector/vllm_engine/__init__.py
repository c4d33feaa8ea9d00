"""What the connector knows of vLLM: the names that it uses, the engine's configuration and model,
its hooks, its metrics and log. Other parts know none of vLLM's classes.
"""
