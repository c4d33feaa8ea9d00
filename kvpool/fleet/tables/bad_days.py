"""Bad days: slow links, and what is lost in mid-run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvpool.fleet.cases import Case, with_memory
from kvpool.fleet.options import FleetOptions, Incident, Scope


def links(base: FleetOptions) -> list[Case]:
    """Slow links and fast ones: loading wherever it hits, and where the planner finds it faster."""
    cases = [Case("no pool", replace(base, scope=Scope.NONE))]
    for rate in (0.05, 0.25, 1.0, 4.6, 25.0):
        constants = base.constants.changed({"pool_load_bytes_s": rate * 1e9})
        for planner in ("always", "auto"):
            options = replace(base, constants=constants, planner=planner)
            cases.append(Case(f"{rate:g} GB/s, {planner}", options))
    return cases


def failures(base: FleetOptions) -> list[Case]:
    """What is lost at half of the time, with a pool and with the host memory of each engine; one
    and a half working sets."""
    base = replace(with_memory(base, 1.5), router="least-loaded")
    local = replace(base, scope=Scope.LOCAL, router="sticky")
    last, third = base.instances - 1, range(max(1, base.instances // 3))
    nothing = [Incident(_HALF_S, "masters", 0)]
    masters = [Incident(_HALF_S, "masters", 30)]
    servers = [Incident(_HALF_S, "server", number) for number in third]
    engines = [Incident(_HALF_S, "engine", number) for number in third]
    rolling = [Incident(_HALF_S + 60 * n, "engine", n) for n in range(base.instances)]
    return [
        Case("nothing", replace(base, incidents=nothing)),
        Case("a server", replace(base, incidents=[Incident(_HALF_S, "server", last)])),
        Case("a third of the servers", replace(base, incidents=servers)),
        Case("a third of the engines", replace(base, incidents=engines)),
        Case("each engine in turn", replace(base, incidents=rolling)),
        Case("all masters for 30 s", replace(base, incidents=masters)),
        Case("local, sticky: nothing", replace(local, incidents=nothing)),
        Case("local, sticky: a host", replace(local, incidents=_hosts([last]))),
        Case("local, sticky: a third of the hosts", replace(local, incidents=_hosts(third))),
        Case("local, sticky: each host in turn", replace(local, incidents=_rolled(base))),
    ]


def _hosts(numbers: Sequence[int], at_s: float | None = None) -> list[Incident]:
    at_s = _HALF_S if at_s is None else at_s
    return [Incident(at_s, kind, number) for number in numbers for kind in ("server", "engine")]


def _rolled(base: FleetOptions) -> list[Incident]:
    return [one for n in range(base.instances) for one in _hosts([n], _HALF_S + 60 * n)]


_HALF_S: Final = 1200.0
