"""An engine's KV cache as memory of blocks: where their bytes lie, how they are moved, how they
stand in the pool, and how different two of them are. It knows no engine's classes.
"""
