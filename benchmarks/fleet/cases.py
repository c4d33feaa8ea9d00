"""A case is one row of a table: a fleet, and what was published of it. A study has all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.options import FleetOptions
from benchmarks.fleet.results import FleetResult

#: Mean length of a prompt of the codex load.
CONTEXT_TOKENS = 52_800


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
    was fitted to, which is no prediction. In a picture the row is a point of the line `series`, at
    `x`."""

    name: str
    options: FleetOptions
    published: Published = Published()
    calibrated: str = ""
    series: str = ""
    x: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetStudy:
    """The rows of one table, each with its result. `x` is what they differ in, if they are points
    of lines."""

    name: str
    title: str
    rows: Sequence[tuple[Case, FleetResult]]
    x: str = ""


def with_memory(base: FleetOptions, working_sets: float) -> FleetOptions:
    """With memory for so many times the contexts of the sessions that live at a time."""
    return replace(base, memory_tokens=int(base.concurrent * CONTEXT_TOKENS * working_sets))


def results(cases: Sequence[Case], jobs: int, done: Callable[[int], None]) -> list[FleetResult]:
    """Of each case, `jobs` at a time; `done` receives the number of each that has ended.

    Those with most sessions begin first, so that no long one is left to run alone at the end. The
    results do not depend on `jobs`.
    """
    by_size = sorted(range(len(cases)), key=lambda number: -cases[number].options.sessions)
    found: dict[int, FleetResult] = {}
    with ProcessPoolExecutor(jobs) as workers:
        running = {workers.submit(_run, cases[number]): number for number in by_size}
        try:
            for ended in as_completed(running):
                number = running[ended]
                found[number] = ended.result()
                done(number)
        finally:
            workers.shutdown(cancel_futures=True)
    return [found[number] for number in range(len(cases))]


def _run(case: Case) -> FleetResult:
    return Fleet(case.options).run()
