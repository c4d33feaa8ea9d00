"""Runs in `kvpool server`."""

from kvpool.server.block_server import BlockServer

__all__ = ["BlockServer"]
