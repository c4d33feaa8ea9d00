"""The cases that are worth a table: the published one, how it scales, and what a sceptic asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from kvpool.errors import ConfigError
from kvpool.fleet.constants import Kind
from kvpool.fleet.fleet import Fleet
from kvpool.fleet.options import GPUS_PER_INSTANCE, FleetOptions, Hints, Incident, Scope
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
        Case("pool, and sessions say when they end", replace(base, hints=Hints.END)),
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
    for share in (0.5, 1.0, 1.5):
        for scope, router in (
            (Scope.LOCAL, "sticky"),
            (Scope.LOCAL, "spill"),
            (Scope.LOCAL, "precise"),
            (Scope.POOL, "round-robin"),
            (Scope.POOL, "least-loaded"),
            (Scope.POOL, "sticky"),
            (Scope.POOL, "precise"),
        ):
            options = replace(_with_memory(base, share), scope=scope, router=router)
            cases.append(Case(f"{share:g} ws, {scope.value}, {router}", options))
    return cases


def hints(base: FleetOptions) -> list[Case]:
    """What it is worth to know of sessions, by memory in working sets."""
    lease = replace(base, policy="lease")
    cases = []
    for share in (0.5, 0.75, 0.9, 1.1):
        memory_tokens = _with_memory(base, share).memory_tokens
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
    """What is lost at half of the time, with a pool and with the host memory of each engine."""
    at_s, last = _HALF_S, base.instances - 1
    rack = [Incident(at_s, "server", number) for number in range(max(1, base.instances // 3))]
    engines = [Incident(at_s, "engine", number) for number in range(max(1, base.instances // 3))]
    rolling = [Incident(at_s + 60 * n, "engine", n) for n in range(base.instances)]
    local = replace(base, scope=Scope.LOCAL, router="sticky")
    return [
        Case("a server", replace(base, incidents=[Incident(at_s, "server", last)])),
        Case("a third of the servers", replace(base, incidents=rack)),
        Case("a third of the engines", replace(base, incidents=engines)),
        Case("each engine in turn", replace(base, incidents=rolling)),
        Case("all masters for 30 s", replace(base, incidents=[Incident(at_s, "masters", 30)])),
        Case("local, sticky: a host", replace(local, incidents=_hosts([last], at_s))),
        Case("local, sticky: each host in turn", replace(local, incidents=_rolled(base, at_s))),
    ]


def _hosts(numbers: Sequence[int], at_s: float) -> list[Incident]:
    return [Incident(at_s, kind, number) for number in numbers for kind in ("server", "engine")]


def _rolled(base: FleetOptions, at_s: float) -> list[Incident]:
    return [one for n in range(base.instances) for one in _hosts([n], at_s + 60 * n)]


_HALF_S: Final = 1200.0


def fan_out(base: FleetOptions) -> list[Case]:
    """Agents with sixteen children each, which read the agent's context at once."""
    parents = replace(base, load="fan-out", sessions=max(1, base.sessions // 16))
    parents = replace(parents, concurrent=min(parents.sessions, max(1, base.concurrent // 8)))
    return [
        Case(f"{scope.value}, {router}", replace(parents, scope=scope, router=router))
        for scope, router in (
            (Scope.NONE, "sticky"),
            (Scope.LOCAL, "sticky"),
            (Scope.LOCAL, "precise"),
            (Scope.POOL, "round-robin"),
            (Scope.POOL, "least-loaded"),
            (Scope.POOL, "precise"),
        )
    ]


def hog(base: FleetOptions) -> list[Case]:
    """Agents beside a client that sends long prompts, each of them once."""
    cases = []
    for rate in (0.0, 0.5, 1.0):
        hogged = replace(_with_memory(base, 1.1), hog_prompts_s=rate)
        for name, options in (
            ("lru", hogged),
            ("lease, end", replace(hogged, policy="lease", hints=Hints.END)),
        ):
            cases.append(Case(f"{rate:g} prompts/s, {name}", options))
    return cases


def thousand(base: FleetOptions) -> list[Case]:
    """A thousand GPUs, in coarse blocks."""
    gpus = 1000 // GPUS_PER_INSTANCE * GPUS_PER_INSTANCE
    instances = gpus // GPUS_PER_INSTANCE
    options = replace(
        base, gpus=gpus, sessions=100 * instances, concurrent=50 * instances, block=2048
    )
    options = _with_memory(options, 1.1)
    return [
        Case("pool, least-loaded", replace(options, router="least-loaded")),
        Case("local, sticky", replace(options, scope=Scope.LOCAL, router="sticky")),
    ]


def sensitivity(base: FleetOptions) -> list[Case]:
    """The headline with each constant that was not published at half and at twice its value."""
    cases = []
    for name, value, _, kind, _ in base.constants.rows():
        if kind == Kind.PUBLISHED.value or name == "warm_s":
            continue
        for factor in (0.5, 2.0):
            changed = replace(base, constants=base.constants.changed({name: value * factor}))
            cases += [
                Case(f"{factor:g} x {name}: {case.name}", case.options)
                for case in headline(changed)[:2]
            ]
    return cases


def _with_memory(base: FleetOptions, working_sets: float) -> FleetOptions:
    """With memory for so many times the contexts of the sessions that live at a time."""
    return replace(base, memory_tokens=int(base.concurrent * _CONTEXT_TOKENS * working_sets))


#: Mean length of a prompt of the codex load.
_CONTEXT_TOKENS: Final = 52_800

CASES: Final[dict[str, tuple[str, Callable[[FleetOptions], list[Case]]]]] = {
    "headline": ("one instance of 12 GPUs, agents that code", headline),
    "scaling": ("75 sessions for every 12 GPUs", scaling),
    "one": ("the fleet of the options", one),
    "grid": ("who shares, who routes, how much memory", grid),
    "hints": ("what the pool knows of sessions", hints),
    "links": ("from slow links to fast ones", links),
    "failures": ("what is lost in mid-run", failures),
    "fan-out": ("agents with sixteen children", fan_out),
    "hog": ("beside long prompts that nobody repeats", hog),
    "thousand": ("a thousand GPUs", thousand),
    "sensitivity": ("each constant at half and at twice its value", sensitivity),
}


def check(names: Sequence[str]) -> None:
    """Raises ConfigError for the first one that is no table."""
    for name in names:
        if name not in CASES:
            raise ConfigError(f"case {name!r}: expected one of {', '.join(CASES)}")


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
