"""The pools under a fleet's engines, as its options describe them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.fleet.options import FleetOptions, Scope
from benchmarks.fleet.prompts import AGENTS
from kvpool import config, registry
from kvpool.tools.dry_pool import DryPool


def pools_of(options: FleetOptions) -> Sequence[DryPool]:
    """One pool that all engines share, with a server for each; or the same room, divided: each
    engine has its own and reads no other."""
    memory, disk = (tokens // options.block for tokens in (options.memory, options.disk_tokens))
    servers, count = options.instances, 1
    if options.scope is Scope.LOCAL:
        servers, count = 1, options.instances
    return [
        DryPool(
            servers,
            memory // count,
            partial(registry.policy, options.policy),
            guaranteed={AGENTS: options.guaranteed} if options.guaranteed else {},
            disk=disk // count,
            write_back=options.write_mode == config.WRITE_BACK,
            placing=options.placing,
        )
        for _ in range(count)
    ]
