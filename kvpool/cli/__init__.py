"""The `kvpool` command."""

from kvpool.cli.app import main

__all__ = ["main"]
