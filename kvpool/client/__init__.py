"""Runs in your program: the pool as a client sees it."""

from kvpool.client.opening import connect
from kvpool.client.pool import Pool

__all__ = ["Pool", "connect"]
