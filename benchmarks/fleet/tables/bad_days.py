"""Bad days: slow links, and what is lost in mid-run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks.fleet.cases import Case, with_memory
from benchmarks.fleet.constants import DENSE_70B
from benchmarks.fleet.options import FleetOptions, Hints, Incident, Scope
from kvpool import config
from kvpool.tools.dry_pool import Placing


def links(base: FleetOptions) -> list[Case]:
    """Slow links and fast ones: loading wherever it hits, and where the planner finds it faster."""
    cases = [Case("no pool", replace(base, scope=Scope.NONE))]
    for rate in (0.05, 0.25, 1.0, 4.6, 25.0):
        constants = base.constants.changed({"pool_load_bytes_s": rate * 1e9})
        for planner in ("always", "auto"):
            options = replace(base, constants=constants, planner=planner)
            cases.append(Case(f"{rate:g} GB/s, {planner}", options))
    return cases


def links_dense(base: FleetOptions) -> list[Case]:
    """The same for a dense model of 70B, whose tokens have nine times the bytes of KV; four working
    sets of memory."""
    dense = base.constants.changed({one.name: one.value for one in DENSE_70B})
    return links(replace(with_memory(base, 4.0), constants=dense))


def ways(base: FleetOptions) -> list[Case]:
    """A load over one way, two and four, by how many times as many sessions as were published; two
    working sets of memory, four where there are no more."""
    base = replace(base, block=2048)
    rate = base.constants.pool_load_bytes_s
    return [
        Case(
            f"{times} times the load, {name}, seed {seed}",
            replace(
                with_memory(
                    replace(base, concurrent=times * base.concurrent),
                    4.0 if times == 1 else 2.0,
                ),
                sessions=max(3, 2 * times) * base.concurrent,
                constants=base.constants.changed({"pool_load_bytes_s": ways * rate}),
                seed=seed,
            ),
        )
        for times in (1, 2, 4)
        for ways, name in ((1, "one way"), (2, "two ways"), (4, "four ways"))
        for seed in range(base.seed, base.seed + 5)
    ]


def placements(base: FleetOptions) -> list[Case]:
    """Where the pool puts blocks, and a server that is lost at half of the time; one and a half
    working sets."""
    base = replace(with_memory(base, 1.5), router="least-loaded")
    lost = replace(base, incidents=[Incident(_HALF_S, "server", base.instances - 1)])
    ways: list[tuple[str, dict[str, Any]]] = [
        ("whole chains", {}),
        ("striped", {"placing": Placing.STRIPED}),
        ("near the writer", {"placing": Placing.NEAR}),
        ("near the writer, sticky", {"placing": Placing.NEAR, "router": "sticky"}),
        (
            "near the writer, sticky, own host read directly",
            {"placing": Placing.NEAR, "router": "sticky", "direct": True},
        ),
        ("whole chains, sticky", {"router": "sticky"}),
    ]
    return [Case(name, replace(lost, **changed)) for name, changed in ways]


def disks(base: FleetOptions) -> list[Case]:
    """Little memory over disks of four working sets, by memory in working sets; then slower disks,
    below a quarter of a working set, and a policy that refuses blocks."""
    base = replace(base, hints=Hints.END)
    below = replace(base, disk_tokens=with_memory(base, 4.0).memory_tokens or 0)
    back = replace(below, write_mode=config.WRITE_BACK)
    modes = [("no disk", base), ("write-through", below), ("write-back", back)]
    cases = [
        Case(f"{share:g} ws, {name}", with_memory(options, share))
        for share in (0.1, 0.25, 0.5, 1.0)
        for name, options in modes
    ]
    for rate in (0.5, 2.0):
        values = {"disk_read_bytes_s": rate * 1e9, "disk_write_bytes_s": rate * 1e9 / 2}
        slow = replace(with_memory(back, 0.25), constants=base.constants.changed(values))
        for planner in ("always", "auto"):
            name = f"0.25 ws, write-back, disk of {rate:g} GB/s, {planner}"
            cases.append(Case(name, replace(slow, planner=planner)))
    for name, options in modes[1:]:
        turns = replace(with_memory(options, 0.25), disk_turns=True)
        cases.append(Case(f"0.25 ws, {name}, reads and writes in turns", turns))
    lease = replace(with_memory(below, 0.5), policy="lease")
    return [*cases, Case("0.5 ws, write-through, lease", lease)]


def failures(base: FleetOptions) -> list[Case]:
    """What is lost at half of the time and runs again at once, with a pool and with the host memory
    of each engine; one and a half working sets. A server may also leave for good."""
    base = replace(with_memory(base, 1.5), router="least-loaded")
    local = replace(base, scope=Scope.LOCAL, router="sticky")
    last, third = base.instances - 1, range(max(1, base.instances // 3))
    nothing = [Incident(_HALF_S, "masters", 0)]
    masters = [Incident(_HALF_S, "masters", 30)]
    servers = [Incident(_HALF_S, "restart", number) for number in third]
    engines = [Incident(_HALF_S, "engine", number) for number in third]
    rolling = [Incident(_HALF_S + 60 * n, "engine", n) for n in range(base.instances)]
    return [
        Case("nothing", replace(base, incidents=nothing)),
        Case("a server", replace(base, incidents=[Incident(_HALF_S, "restart", last)])),
        Case("a server, for good", replace(base, incidents=[Incident(_HALF_S, "server", last)])),
        Case("the same, drained", replace(base, incidents=[Incident(_HALF_S, "drain", last)])),
        Case("a third of the servers", replace(base, incidents=servers)),
        Case("a third of the engines", replace(base, incidents=engines)),
        Case("each engine in turn", replace(base, incidents=rolling)),
        Case("each host in turn", replace(base, incidents=_rolled(base))),
        Case("all masters for 30 s", replace(base, incidents=masters)),
        Case("local, sticky: nothing", replace(local, incidents=nothing)),
        Case("local, sticky: a host", replace(local, incidents=_hosts([last]))),
        Case("local, sticky: a third of the hosts", replace(local, incidents=_hosts(third))),
        Case("local, sticky: each host in turn", replace(local, incidents=_rolled(base))),
    ]


def _hosts(numbers: Sequence[int], at_s: float | None = None) -> list[Incident]:
    at_s = _HALF_S if at_s is None else at_s
    return [Incident(at_s, kind, number) for number in numbers for kind in ("restart", "engine")]


def _rolled(base: FleetOptions) -> list[Incident]:
    return [one for n in range(base.instances) for one in _hosts([n], _HALF_S + 60 * n)]


_HALF_S: Final = 1200.0
