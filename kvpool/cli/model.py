"""Commands that play a whole fleet in virtual time: fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool import runtime
from kvpool.cli.shared import Json, console, fail, stderr
from kvpool.errors import ConfigError, KvpoolError

if TYPE_CHECKING:
    from kvpool.fleet.cases import FleetStudy
    from kvpool.fleet.constants import Constants

Which = Annotated[
    list[str] | None,
    typer.Argument(
        help="headline, scaling, grid, hints, links, failures, fan-out, hog, thousand, "
        "sensitivity, or one: a fleet of the options below."
    ),
]
Gpus = Annotated[int, typer.Option(min=12, help="GPUs: 4 that prefill and 8 that decode, or more.")]
LoadName = Annotated[str, typer.Option(help="What is asked: codex, scaling or fan-out.")]
Sessions = Annotated[int, typer.Option(min=1, help="Sessions in all.")]
Concurrent = Annotated[int, typer.Option(min=1, help="Sessions at the same time.")]
ScopeName = Annotated[str, typer.Option(help="Below device memory: none, local or pool.")]
RouterName = Annotated[
    str, typer.Option("--router", help="round-robin, least-loaded, sticky, spill or precise.")
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
AdmitTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Serve sessions with so many tokens together; others wait."),
]
Hog = Annotated[
    float, typer.Option("--hog", help="Prompts a second of a client that repeats none of them.")
]
Incidents = Annotated[
    list[str] | None,
    typer.Option(
        "--incident", help="SECONDS:server:NUMBER, SECONDS:engine:NUMBER, SECONDS:masters:SECONDS."
    ),
]
MemoryTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens that fit into the memory of all servers together.")
]
BlockTokens = Annotated[int, typer.Option(help="Tokens in a block.")]
Values = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value of a constant, e.g. pool_load_bytes_s=1e9."),
]
Seed = Annotated[int, typer.Option(help="Seed of the sessions.")]
Jobs = Annotated[int, typer.Option(min=1, max=256, help="Cases that run at the same time.")]
ShowConstants = Annotated[
    bool, typer.Option("--constants", help="Only list the numbers of the model and their sources.")
]
Picture = Annotated[
    Path | None, typer.Option(help="Write the first table's throughput as SVG to this file.")
]


def fleet(
    which: Which = None,
    gpus: Gpus = 12,
    load: LoadName = "codex",
    sessions: Sessions = 610,
    concurrent: Concurrent = 50,
    scope: ScopeName = "pool",
    router: RouterName = "round-robin",
    policy: PolicyName = "lru",
    planner: Planner = "auto",
    events_late_s: EventsLate = 0.5,
    hint_names: HintNames = "",
    resume_error: ResumeError = 0.25,
    admit_tokens: AdmitTokens = None,
    hog: Hog = 0.0,
    incidents: Incidents = None,
    memory_tokens: MemoryTokens = None,
    block_tokens: BlockTokens = 512,
    values: Values = None,
    seed: Seed = 1,
    jobs: Jobs = 2,
    constants: ShowConstants = False,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Model a fleet of engines over a pool in virtual time: the pool is real, engines are a model.

    headline is a published case on 12 GPUs, scaling the same on up to 60.
    """
    from kvpool.fleet import cases, report
    from kvpool.fleet.constants import Constants
    from kvpool.fleet.options import FleetOptions, Hints, Incident, Scope

    try:
        known = Constants().changed(_parsed(values or []))
        names = which or ["headline", "scaling"]
        cases.check(names)
        base = FleetOptions(
            gpus=gpus,
            load=load,
            sessions=sessions,
            concurrent=concurrent,
            scope=Scope.parsed(scope),
            router=router,
            policy=policy,
            planner=planner,
            events_late_s=events_late_s,
            hints=Hints.parsed(hint_names),
            resume_error=resume_error,
            admit_tokens=admit_tokens,
            hog_prompts_s=hog,
            incidents=[Incident.parsed(one) for one in incidents or []],
            memory_tokens=memory_tokens,
            block=block_tokens,
            seed=seed,
            constants=known,
        )
    except KvpoolError as error:
        fail(error)
    if constants:
        _print_constants(known, as_json)
        return
    runtime.freeze_gc()  # a collection would visit millions of blocks
    studies = [cases.study(name, base, jobs, _say) for name in names]
    if picture is not None:
        picture.write_text(report.picture(studies[0]))
    if as_json:
        print(json.dumps(report.as_dict(studies, known)))
    else:
        _print_tables(studies)


def _print_tables(studies: list[FleetStudy]) -> None:
    from kvpool.fleet import report

    for study in studies:
        console.print(report.table(study))
        if study.name == "headline":
            console.print(report.ratios(study.rows[0][1], study.rows[1][1]))


def _say(line: str) -> None:
    stderr.print(line, highlight=False)


def _print_constants(known: Constants, as_json: bool) -> None:
    from kvpool.fleet import report

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
