"""The tables of `python -m benchmarks.fleet`: of each the size of its fleet, and its cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from benchmarks.fleet.cases import Case, FleetStudy, results
from benchmarks.fleet.options import FleetOptions
from benchmarks.fleet.tables import bad_days, knowledge, published, sharing
from kvpool.errors import ConfigError

#: What is run unless tables are named.
DEFAULT: Final = ("headline", "scaling", "memory")


class FleetTable(NamedTuple):
    """A table, and the fleet that it is about unless another one is asked for."""

    title: str
    cases: Callable[[FleetOptions], list[Case]]
    gpus: int = 12
    sessions: int = 610
    concurrent: int = 50
    x: str = ""  # what its cases differ in, if they are points of lines

    def options(self, changed: dict[str, Any]) -> FleetOptions:
        """The table's fleet with other options. Another number of GPUs alone changes the sessions
        in proportion. Raises ConfigError."""
        times = changed.get("gpus", self.gpus) / self.gpus
        size = {
            "gpus": self.gpus,
            "sessions": max(1, round(self.sessions * times)),
            "concurrent": max(1, round(self.concurrent * times)),
        }
        return FleetOptions(**{**size, **changed})


TABLES: Final = {
    "headline": FleetTable("one instance of 12 GPUs, agents that code", published.headline),
    "scaling": FleetTable("75 sessions for every 12 GPUs", published.scaling, x="GPUs"),
    "memory": FleetTable(
        "a pool and local memory, by memory in working sets",
        sharing.memory,
        *(24, 150, 100),
        x="memory in working sets",
    ),
    "one": FleetTable("the fleet of the options", sharing.one),
    "grid": FleetTable(
        "who shares, who routes, how much memory",
        sharing.grid,
        *(36, 225, 150),
        x="memory in working sets",
    ),
    "hints": FleetTable("what the pool knows of sessions", knowledge.hints, sessions=200),
    "admission": FleetTable("sessions that wait for room", knowledge.admission, sessions=200),
    "affinity": FleetTable(
        "a pool, and the memory of each host, if sessions stay at their engine",
        knowledge.affinity,
        *(24, 150, 100),
    ),
    "ways": FleetTable("several ways from the pool to an engine", bad_days.ways),
    "links": FleetTable("from slow links to fast ones", bad_days.links, sessions=150),
    "links-70b": FleetTable(
        "from slow links to fast ones, 328 KB of KV per token", bad_days.links_dense, sessions=150
    ),
    "disks": FleetTable("little memory over disks", bad_days.disks, sessions=100),
    "placements": FleetTable(
        "where blocks lie, when a server is lost",
        bad_days.placements,
        72,
        sessions=500,
        concurrent=200,
    ),
    "failures": FleetTable(
        "what is lost in mid-run", bad_days.failures, 72, sessions=600, concurrent=200
    ),
    "fan-out": FleetTable(
        "agents with sixteen children", sharing.fan_out, 36, sessions=60, concurrent=18
    ),
    "loads": FleetTable(
        "other loads than that of the published case", sharing.loads, *(36, 225, 150)
    ),
    "mixed": FleetTable("engines that do both", sharing.mixed, *(36, 225, 150)),
    "trace": FleetTable(
        "a recorded trace", sharing.trace, *(60, 20_000, 1), x="times the recorded speed"
    ),
    "hog": FleetTable("beside long prompts that nobody repeats", knowledge.hog, *(60, 500, 250)),
    "thousand": FleetTable(
        "a thousand GPUs", sharing.thousand, 996, sessions=6_000, concurrent=4_150
    ),
    # Not of fleets: what a master's messages cost, for the prompts of this one.
    "masters": FleetTable("when one master has enough to do", sharing.one, sessions=150),
    "sensitivity": FleetTable(
        "each constant at half and at twice its value", published.sensitivity, sessions=150
    ),
}


def table(name: str) -> FleetTable:
    """Raises ConfigError for a name that is no table's."""
    if name not in TABLES:
        raise ConfigError(f"case {name!r}: expected one of {', '.join(TABLES)}")
    return TABLES[name]


def studies(
    fleets: Mapping[str, FleetOptions], jobs: int, done: Callable[[str], None]
) -> list[FleetStudy]:
    """Run every case of these tables, `jobs` at a time, and call `done` with the name of each."""
    cases = {name: TABLES[name].cases(base) for name, base in fleets.items()}
    named = [(name, case) for name, table_cases in cases.items() for case in table_cases]

    def ended(number: int) -> None:
        name, case = named[number]
        done(f"{name}: {case.name}")

    found = iter(results([case for _, case in named], jobs, ended))
    return [
        FleetStudy(name, TABLES[name].title, [(case, next(found)) for case in one], TABLES[name].x)
        for name, one in cases.items()
    ]
