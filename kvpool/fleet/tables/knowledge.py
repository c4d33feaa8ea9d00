"""What it is worth to know of sessions."""

from __future__ import annotations

from dataclasses import replace

from kvpool.fleet.cases import Case, with_memory
from kvpool.fleet.options import FleetOptions, Hints


def hints(base: FleetOptions) -> list[Case]:
    """What it is worth to know of sessions, by memory in working sets."""
    lease = replace(base, policy="lease")
    cases = []
    for share in (0.5, 0.75, 0.9, 1.1):
        memory_tokens = with_memory(base, share).memory_tokens
        for name, options in (
            ("lru", base),
            ("lease", lease),
            ("end", replace(lease, hints=Hints.END)),
            ("end, arrival", replace(lease, hints=Hints.END | Hints.ARRIVAL)),
            ("end, arrival, resume", replace(lease, hints=Hints.ALL)),
            ("admitted, end", replace(lease, hints=Hints.END, admit_tokens=memory_tokens)),
        ):
            shown = replace(options, memory_tokens=memory_tokens)
            cases.append(Case(f"{share:g} ws, {name}", shown))
    return cases


def returns(base: FleetOptions) -> list[Case]:
    """What is on disks comes up before its session returns: a quarter of a working set of memory
    over disks of four, fast ones and slow ones."""
    disk_tokens = with_memory(base, 4.0).memory_tokens or 0
    base = replace(with_memory(base, 0.25), disk_tokens=disk_tokens)
    returning = Hints.END | Hints.RESUME
    cases = []
    for rate in (4.0, 12.0):
        values = {"disk_read_bytes_s": rate * 1e9, "disk_write_bytes_s": rate * 1e9 / 2}
        disk = replace(base, constants=base.constants.changed(values))
        for name, options in (
            ("end", replace(disk, hints=Hints.END)),
            ("end, resume, nothing comes up early", replace(disk, hints=returning, prefetch=False)),
            ("end, resume", replace(disk, hints=returning)),
        ):
            cases.append(Case(f"{rate:g} GB/s, {name}", options))
    return cases


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
