"""The cases that are worth a table: the published one, how it scales, and what a sceptic asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from kvpool.fleet.fleet import GPUS_PER_INSTANCE, Fleet, FleetOptions, Scope
from kvpool.fleet.results import FleetResult


@dataclass(frozen=True, slots=True)
class Published:
    """What the post gives for the same case; None: it does not say."""

    tokens_s: float | None = None  # of all GPUs
    first_token_s: float | None = None  # P50
    end_to_end_s: float | None = None  # P50
    hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a fleet, and what was published of it. `calibrated` names the figure that a constant
    was fitted to, which is no prediction."""

    name: str
    options: FleetOptions
    published: Published = Published()
    calibrated: str = ""


@dataclass(frozen=True, slots=True)
class FleetStudy:
    """The rows of one table, each with its result."""

    name: str
    title: str
    rows: Sequence[tuple[Case, FleetResult]]


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
        Case("pool, and sessions say when they end", replace(base, end_hints=True)),
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
        cases.append(Case(f"{gpus} GPUs", options, published))
    return cases


#: GPUs, tokens a second in all, TTFT P50; hits were above 95 %.
_FIGURE_5: Final = (
    (12, 136_600, 2.38),
    (24, 270_900, 2.20),
    (36, 400_500, 2.08),
    (48, 534_800, 2.08),
    (60, 655_300, 2.19),
)


def one(base: FleetOptions) -> list[Case]:
    """The fleet that was asked for."""
    return [Case(f"{base.gpus} GPUs, {base.scope.value}, {base.router}", base)]


def grid(base: FleetOptions) -> list[Case]:
    """Who shares and who routes, by memory in working sets of the sessions that live at a time."""
    cases = []
    living = base.concurrent * _CONTEXT_TOKENS
    for share in (0.5, 1.0, 1.5):
        for scope, router in (
            (Scope.LOCAL, "sticky"),
            (Scope.LOCAL, "spill"),
            (Scope.POOL, "round-robin"),
            (Scope.POOL, "least-loaded"),
            (Scope.POOL, "sticky"),
        ):
            options = replace(base, scope=scope, router=router, memory_tokens=int(living * share))
            cases.append(Case(f"{share:g} ws, {scope.value}, {router}", options))
    return cases


#: Mean length of a prompt of the codex load.
_CONTEXT_TOKENS: Final = 52_800

CASES: Final[dict[str, tuple[str, Callable[[FleetOptions], list[Case]]]]] = {
    "headline": ("one instance of 12 GPUs, agents that code", headline),
    "scaling": ("75 sessions for every 12 GPUs", scaling),
    "one": ("the fleet of the options", one),
    "grid": ("who shares, who routes, how much memory", grid),
}


def study(name: str, base: FleetOptions, jobs: int, done: Callable[[str], None]) -> FleetStudy:
    """Run every case of a table, `jobs` at a time, and call `done` with the name of each.

    The result does not depend on `jobs`.
    """
    title, make = CASES[name]
    cases = make(base)
    rows = []
    for case, result in zip(cases, _results(cases, jobs), strict=True):
        rows.append((case, result))
        done(f"{name}: {case.name}")
    return FleetStudy(name, title, rows)


def _results(cases: Sequence[Case], jobs: int) -> Iterator[FleetResult]:
    if jobs <= 1:
        yield from map(_run, cases)
        return
    with ProcessPoolExecutor(jobs) as workers:
        yield from workers.map(_run, cases)


def _run(case: Case) -> FleetResult:
    return Fleet(case.options).run()
