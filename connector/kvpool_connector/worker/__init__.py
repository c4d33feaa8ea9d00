"""The worker half: moves blocks between an engine's memory and the pool, and compares them.

One in each of the engine's processes with KV. It does what the scheduler half has planned.
"""
