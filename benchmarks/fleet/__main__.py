"""`python -m benchmarks.fleet`: a whole fleet of engines over a pool in virtual time.

What is wrong, in an option or in the run, is one line on stderr and an exit code, as the command
`kvpool` has it.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.shared import Json, console, fail, stderr
from kvpool.errors import ConfigError, KvpoolError
from kvpool.ops import process

if TYPE_CHECKING:
    from benchmarks.fleet.cases import FleetStudy
    from benchmarks.fleet.constants import Constants
    from benchmarks.fleet.options import FleetOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Which = Annotated[
    list[str] | None,
    typer.Argument(
        help="headline, scaling, memory, grid, hints, affinity, admission, ways, links, links-70b, "
        "disks, placements, failures, fan-out, hog, thousand, loads, mixed, trace, sensitivity, "
        "masters, or one: a fleet of the options below."
    ),
]
Gpus = Annotated[
    int | None, typer.Option(min=12, help="GPUs: 4 that prefill and 8 that decode, or more.")
]
LoadName = Annotated[
    str, typer.Option(help="codex, scaling, fan-out, front-loaded, pipeline or reasoning.")
]
Sessions = Annotated[int | None, typer.Option(min=1, help="Sessions in all.")]
Concurrent = Annotated[int | None, typer.Option(min=1, help="Sessions at the same time.")]
ScopeName = Annotated[str, typer.Option(help="Below device memory: none, local or pool.")]
RouterName = Annotated[
    str,
    typer.Option("--router", help="round-robin, least-loaded, sticky, fewest, spill or precise."),
]
EventsLate = Annotated[
    float, typer.Option(help="Seconds until a precise router knows what an engine holds.")
]
PolicyName = Annotated[str, typer.Option(help="Eviction policy of the pool.")]
Planner = Annotated[
    str, typer.Option(help="Whether engines load: auto (where it is faster), always or never.")
]
HintNames = Annotated[
    str,
    typer.Option("--hints", help="What the pool learns of sessions: end, arrival, resume, or all."),
]
ResumeError = Annotated[float, typer.Option(help="Relative error of the announced pauses.")]
Admit = Annotated[
    bool, typer.Option("--admit", help="Serve as many sessions as fit into memory; others wait.")
]
Hog = Annotated[
    float, typer.Option("--hog", help="Prompts a second of a client that repeats none of them.")
]
Guaranteed = Annotated[
    float, typer.Option(help="Share of the memory that is the sessions' own beside that client.")
]
Incidents = Annotated[
    list[str] | None,
    typer.Option(
        "--incident",
        help="SECONDS:server:NUMBER, SECONDS:engine:NUMBER, SECONDS:restart:NUMBER (a server), "
        "SECONDS:drain:NUMBER (a server), "
        "SECONDS:masters:SECONDS.",
    ),
]
MemoryTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens that fit into the memory of all servers together.")
]
DiskTokens = Annotated[
    int, typer.Option(min=0, help="Tokens that fit on the disks below the servers; 0: no disks.")
]
WriteMode = Annotated[
    str, typer.Option(help="When disks are written: write_through or write_back.")
]
DiskTurns = Annotated[
    bool, typer.Option("--disk-turns", help="Disks read and write in turns, each at full speed.")
]
PlacingName = Annotated[
    str,
    typer.Option("--placing", help="Where the pool puts blocks: chains (ours), striped or near."),
]
Direct = Annotated[
    bool, typer.Option("--direct", help="Engines read their own host's server without a link.")
]
Spread = Annotated[
    bool,
    typer.Option("--spread", help="Contexts of agents with children are brought to all hosts."),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        "--block-tokens", help="Tokens in a block. Default: what the trace's format says, or 512."
    ),
]
Engines = Annotated[
    str, typer.Option(help="split: some prefill and others decode; mixed: each does both.")
]
Trace = Annotated[
    str | None, typer.Option(help="Prompts of this file at their times. See --format.")
]
TraceFormat = Annotated[
    str,
    typer.Option(
        "--format",
        help="Format of the trace: auto, mooncake, qwen-bailian, multi-turn or sharegpt.",
    ),
]
TimeUnit = Annotated[
    str | None, typer.Option(help="Of the trace's times: s or ms. Default: what the format says.")
]
TraceRate = Annotated[float, typer.Option(help="How many times as fast as the file says.")]
Values = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value of a constant, e.g. pool_load_bytes_s=1e9."),
]
Seed = Annotated[int, typer.Option(help="Seed of the sessions.")]
Jobs = Annotated[int, typer.Option(min=1, max=256, help="Cases that run at the same time.")]
ShowConstants = Annotated[
    bool, typer.Option("--constants", help="Only list the numbers of the model and their sources.")
]
DemoResults = Annotated[
    Path | None,
    typer.Option(
        help="Only compare the model with a run on real engines: a file of "
        "`make demo-fleet ARGS='--results FILE'`."
    ),
]
Page = Annotated[
    Path | None, typer.Option(help="Write all tables and their pictures to this HTML file.")
]
Pictures = Annotated[
    Path | None, typer.Option(help="Write each picture as an SVG into this folder.")
]


@app.command()
def fleet(
    which: Which = None,
    gpus: Gpus = None,
    load: LoadName = "codex",
    sessions: Sessions = None,
    concurrent: Concurrent = None,
    scope: ScopeName = "pool",
    router: RouterName = "round-robin",
    policy: PolicyName = "lru",
    planner: Planner = "auto",
    events_late_s: EventsLate = 0.5,
    hints: HintNames = "",
    resume_error: ResumeError = 0.25,
    admit: Admit = False,
    hog_prompts_s: Hog = 0.0,
    guaranteed: Guaranteed = 0.0,
    incidents: Incidents = None,
    memory_tokens: MemoryTokens = None,
    disk_tokens: DiskTokens = 0,
    write_mode: WriteMode = "write_through",
    disk_turns: DiskTurns = False,
    placing: PlacingName = "chains",
    direct: Direct = False,
    spread: Spread = False,
    block: BlockTokens = None,
    engines: Engines = "split",
    trace: Trace = None,
    trace_format: TraceFormat = "auto",
    time_unit: TimeUnit = None,
    trace_rate: TraceRate = 1.0,
    values: Values = None,
    seed: Seed = 1,
    jobs: Jobs = 2,
    list_constants: ShowConstants = False,
    page: Page = None,
    pictures: Pictures = None,
    demo_results: DemoResults = None,
    as_json: Json = False,
) -> None:
    """Model a fleet of engines over a pool in virtual time: the pool is real, engines are a model.

    headline is a published case on 12 GPUs, scaling the same on up to 60.

    Each table has a fleet of its own size, unless --gpus, --sessions or --concurrent say otherwise.
    """
    given = dict(locals())  # every option by its name
    try:
        _play(given)
    except KvpoolError as error:
        fail(error)
    except OSError as error:
        fail(ConfigError(str(error)))


def _play(given: dict[str, Any]) -> None:
    """Raises KvpoolError and OSError."""
    from benchmarks.fleet import tables

    changed = _options(given)
    known, as_json, page = changed["constants"], given["as_json"], given["page"]
    which = given["which"] or tables.DEFAULT
    fleets = {name: tables.table(name).options(changed) for name in which}
    _check_outputs(page, given["pictures"])
    if given["demo_results"] is not None:
        return _print_demo(given["demo_results"], as_json)
    if given["list_constants"]:
        return _print_constants(known, as_json)
    if "masters" in fleets:
        _print_masters(fleets.pop("masters"), as_json)
    process.freeze_gc()  # a collection would visit millions of blocks
    studies = tables.studies(fleets, given["jobs"], _say)
    if given["pictures"] is not None:
        _write_pictures(studies, given["pictures"])
    if page is not None:
        _write_page(studies, known, page)
    if studies:
        _print_tables(studies, known, as_json)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of `FleetOptions` that have a value. Raises ConfigError."""
    from benchmarks.fleet.constants import Constants
    from benchmarks.fleet.options import FleetOptions, Hints, Incident, Scope
    from kvpool.tools import traces
    from kvpool.tools.dry_pool import Placing

    names = {one.name for one in fields(FleetOptions)}
    changed = {name: v for name, v in given.items() if name in names and v is not None}
    if (trace := given["trace"]) is not None:
        if trace == "-":
            raise ConfigError("--trace -: each case reads the trace; expected a file")
        read = traces.load(
            trace, given["trace_format"], block=given["block"], unit=given["time_unit"]
        )
        changed["block"] = read.block
    changed.update(
        scope=Scope.parsed(given["scope"]),
        hints=Hints.parsed(given["hints"]),
        placing=Placing.parsed(given["placing"]),
        incidents=[Incident.parsed(one) for one in given["incidents"] or []],
        constants=Constants().changed(_parsed(given["values"] or [])),
    )
    return changed


def _print_tables(studies: list[FleetStudy], known: Constants, as_json: bool) -> None:
    from benchmarks.fleet import report

    if as_json:
        print(json.dumps(report.as_dict(studies, known)))
        return
    for study in studies:
        console.print(report.table(study))
        if study.name == "headline":
            console.print(report.ratios(study.rows[0][1], study.rows[1][1]))


def _check_outputs(page: Path | None, pictures: Path | None) -> None:
    """Before a run of minutes. Raises ConfigError."""
    if page is not None and not page.parent.is_dir():
        raise ConfigError(f"--page {page}: no such directory")
    if pictures is not None and not pictures.is_dir():
        raise ConfigError(f"--pictures {pictures}: no such directory")


def _write_page(studies: list[FleetStudy], known: Constants, page: Path) -> None:
    from benchmarks.fleet.page import page as drawn

    command = shlex.join(["python", "-m", "benchmarks.fleet", *sys.argv[1:]])
    page.write_text(drawn(studies, known, command))


def _write_pictures(studies: list[FleetStudy], folder: Path) -> None:
    from benchmarks.fleet.pictures import pictures

    for study in studies:
        for name, drawn in pictures(study):
            (folder / f"{name}.svg").write_text(drawn + "\n")


def _print_masters(base: FleetOptions, as_json: bool) -> None:
    from benchmarks.fleet.master_report import masters_report

    shown, document = masters_report(base)
    if as_json:
        print(json.dumps(document))
        return
    for one in shown:
        console.print(one)


def _print_demo(results: Path, as_json: bool) -> None:
    from benchmarks.fleet import demo, demo_report, demo_results

    found = demo.predictions(demo_results.read(results))
    if as_json:
        print(json.dumps(demo_report.as_dict(found)))
        return
    console.print(demo_report.table(found))
    console.print(demo_report.conclusion(found))


def _say(line: str) -> None:
    stderr.print(line, highlight=False)


def _print_constants(known: Constants, as_json: bool) -> None:
    from benchmarks.fleet import report

    if as_json:
        print(json.dumps(report.as_dict([], known)))
    else:
        console.print(report.constants_table(known))


def _parsed(values: list[str]) -> dict[str, float]:
    """`name=value`, each. Raises ConfigError."""
    parsed = {}
    for one in values:
        name, _, value = one.partition("=")
        try:
            parsed[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--set {one!r}: expected name=number, e.g. kv_bytes=38000") from None
    return parsed


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.fleet")
