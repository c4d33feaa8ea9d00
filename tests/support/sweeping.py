"""What a master does in small steps between requests, at once."""

from __future__ import annotations

from kvpool.master.state.directory import Directory
from kvpool.master.state.sweeper import Sweeper


def sweep_all(directory: Directory) -> None:
    """Until nothing that is gone is left in the map."""
    sweeper = Sweeper(directory)
    while sweeper.step():
        pass
