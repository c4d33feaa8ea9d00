"""Whether a pool without processes is right about itself."""

from __future__ import annotations

from kvpool.testing.invariants import check_invariants, inventory
from kvpool.tools.dry_pool import DryPool


def check_pool(pool: DryPool) -> None:
    """Every invariant, and the map. Raises AssertionError or InvariantViolated."""
    check_invariants(pool.directory)
    for server in pool.servers.values():
        check_invariants(server.store)
        assert pool.directory.servers.records[server.name].inventories.latest.blocks == len(
            inventory(server.store)
        )
