"""What it is worth to know of sessions."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fleet.cases import Case, with_memory
from benchmarks.fleet.options import FleetOptions, Hints


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
