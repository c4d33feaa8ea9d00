"""What it is worth to know of sessions."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fleet.cases import Case, with_memory
from benchmarks.fleet.options import FleetOptions, Hints, Scope


def hints(base: FleetOptions) -> list[Case]:
    """What it is worth to know of sessions, by memory in working sets."""
    lease = replace(base, policy="lease")
    cases = []
    for share in (0.5, 0.75, 0.9, 1.1):
        memory_tokens = with_memory(base, share).memory_tokens
        for name, options in (
            ("lru", base),
            ("density", replace(base, policy="density")),
            ("programs", replace(base, policy="programs")),
            ("end", replace(lease, hints=Hints.END)),
            ("end, arrival", replace(lease, hints=Hints.END | Hints.ARRIVAL)),
            ("end, arrival, resume", replace(lease, hints=Hints.ALL)),
        ):
            shown = replace(options, memory_tokens=memory_tokens)
            cases.append(Case(f"{share:g} ws, {name}", shown))
    return cases


def affinity(base: FleetOptions) -> list[Case]:
    """A pool whose engines read their own host first, and the host memory of each engine alone:
    sessions stay at their engine, with the same policy and hints, by memory in working sets."""
    base = replace(base, router="fewest", block=2048)
    told = (("nothing", "density", Hints.NONE), ("all", "lease", Hints.ALL))
    return [
        Case(
            f"{share:g} ws, {name}, {scope.value}, seed {seed}",
            replace(
                with_memory(base, share),
                policy=policy,
                hints=hints,
                scope=scope,
                direct=scope is Scope.POOL,
                seed=seed,
            ),
        )
        for share in (0.5, 0.6, 0.75, 0.9)
        for name, policy, hints in (*told, ("inferred", "programs", Hints.NONE))
        for scope in (Scope.LOCAL, Scope.POOL)
        for seed in range(base.seed, base.seed + 5)
    ]


def admission(base: FleetOptions) -> list[Case]:
    """Sessions that wait until there is room, of which nobody says anything."""
    return [
        Case(
            f"{share:g} ws, {policy}{', admitted' if admit else ''}, seed {seed}",
            replace(with_memory(base, share), policy=policy, admit=admit, seed=seed),
        )
        for share, seeds in ((0.5, 5), (0.75, 2), (1.0, 2), (1.5, 2))
        for policy in ("lru", "density")
        for admit in (False, True)
        for seed in range(base.seed, base.seed + seeds)
    ]


def hog(base: FleetOptions) -> list[Case]:
    """Agents beside a client that sends long prompts, each of them once; 1.1 working sets."""
    base = replace(with_memory(base, 1.1), router="least-loaded")
    cases = [Case("nobody beside them", base)]
    for rate in (0.5, 1.0, 1.5):
        hogged = replace(base, hog_prompts_s=rate)
        for name, options in (
            ("nothing guaranteed", hogged),
            ("lease, end", replace(hogged, policy="lease", hints=Hints.END)),
            ("guaranteed 90 %", replace(hogged, guaranteed=0.9)),
        ):
            cases.append(Case(f"{rate:g} prompts/s, {name}", options))
    return cases
