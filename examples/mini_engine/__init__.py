"""A teaching engine on a CPU, behind a kvpool: `python -m examples.mini_engine`.

model.py is a small transformer, cache.py its paged memory and the books of its blocks, engine.py
the scheduler, connector.py the pool: docs/write-a-connector.md explains that one step by step.
"""
