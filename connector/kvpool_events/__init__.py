"""KV events about blocks of the pool, for routers: what was announced is taken back when it goes.

The engine reports its own blocks by itself. Without this, routers do not see those in the pool. It
knows no connector.
"""
