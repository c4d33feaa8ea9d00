"""The published case, and how it scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from benchmarks.fleet.cases import Case, Published
from benchmarks.fleet.constants import Kind
from benchmarks.fleet.options import GPUS_PER_INSTANCE, FleetOptions, Scope


def headline(base: FleetOptions) -> list[Case]:
    """Agents on one instance, with its device memory alone and with a pool."""
    always = replace(base, planner="always")
    same = base.gpus == GPUS_PER_INSTANCE and base.concurrent == _POST_CONCURRENT
    without, pooled = (_POST_WITHOUT, _POST_POOLED) if same else (Published(), Published())
    return [
        Case(
            "device memory only",
            replace(base, scope=Scope.NONE),
            without,
            "throughput" if same else "",
        ),
        Case(
            "pool, every hit is loaded",
            always,
            pooled,
            "first token" if same else "",
        ),
        Case("pool, loads where that is faster", base),
        Case("host memory of the engine, no pool", replace(base, scope=Scope.LOCAL)),
    ]


_POST_CONCURRENT: Final = 50
_POST_WITHOUT: Final = Published(2_012 * 12, 82.93, 93.3, 0.017)
_POST_POOLED: Final = Published(7_669 * 12, 1.80, 10.8, 0.922)


def scaling(base: FleetOptions) -> list[Case]:
    """75 sessions for every 12 GPUs, round robin over engines that share a pool."""
    cases = []
    for gpus, tokens_s, first_token_s in _FIGURE_5:
        instances = gpus // GPUS_PER_INSTANCE
        options = replace(
            base,
            gpus=gpus,
            load="scaling",
            sessions=150 * instances,
            concurrent=75 * instances,
            planner="always",
        )
        published = Published(tokens_s, first_token_s, None, 0.95)
        cases.append(Case(f"{gpus} GPUs", options, published, series="simulated", x=gpus))
    return cases


#: GPUs, tokens a second in all, TTFT P50; hits were above 95 %.
_FIGURE_5: Final = (
    (12, 136_600, 2.38),
    (24, 270_900, 2.20),
    (36, 400_500, 2.08),
    (48, 534_800, 2.08),
    (60, 655_300, 2.19),
)


def sensitivity(base: FleetOptions) -> list[Case]:
    """The headline with each constant that was not published at half and at twice its value."""
    cases = []
    for name, value, _, kind, _ in base.constants.rows():
        if kind == Kind.PUBLISHED.value or name in _ELSEWHERE:
            continue
        for factor in (0.5, 2.0):
            changed = replace(base, constants=base.constants.changed({name: value * factor}))
            cases += [
                Case(f"{factor:g} x {name}: {case.name}", case.options)
                for case in headline(changed)[:2]
            ]
    return cases


#: Constants that neither of the headline's first two rows has to do with.
_ELSEWHERE: Final = (
    "warm_s",
    "chunk_tokens",
    "local_load_bytes_s",
    "disk_read_bytes_s",
    "disk_write_bytes_s",
    "disk_first_byte_s",
)
