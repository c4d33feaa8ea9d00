"""Runs in `kvpool master`."""

from kvpool.master.service import Master

__all__ = ["Master"]
