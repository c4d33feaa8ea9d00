"""Runs in your program: the pool as a client sees it."""

from kvpool.client.pool import Pool, connect

__all__ = ["Pool", "connect"]
