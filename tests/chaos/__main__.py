"""`python -m tests.chaos`: exit code 0 success, 1 a promise was broken, 2 usage error."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

if __package__ != "tests.chaos":
    raise SystemExit("start this program from the repository root: python -m tests.chaos")

from kvpool.cli import log_lines
from tests.chaos.report import ChaosReport
from tests.chaos.run import Chaos, ChaosOptions


def main(
    seconds: Annotated[float, typer.Option(min=1, help="How long faults are injected.")] = 60.0,
    seed: Annotated[
        int | None, typer.Option(help="Repeats the same faults; random if absent.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 3,
    users: Annotated[int, typer.Option(min=1, max=64, help="Concurrent calls in each client.")] = 3,
    allowance_s: Annotated[
        float, typer.Option(min=0, help="Seconds that a busy machine may add to any limit.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Inject faults into real processes and check that the pool keeps its promises."""
    log_lines.configure("error")
    console = Console(stderr=as_json)
    chosen = random.SystemRandom().getrandbits(32) if seed is None else seed
    console.print(f"seed {chosen}")
    options = ChaosOptions(seconds, chosen, clients, users, allowance_s)

    async def play() -> ChaosReport:
        return await Chaos(options, console).run()

    try:
        report = asyncio.run(play())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console.print(report.table())
    for sentence in report.broken:
        console.print(f"[red]broken:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if report.broken else 0)


if __name__ == "__main__":
    typer.run(main)
