"""The command with which a server leaves: drain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvpool.cli.progress import progress
from kvpool.cli.shared import (
    ClusterName,
    ConfigFile,
    Json,
    LocalOnly,
    Masters,
    SecretFile,
    TransportNames,
    check_server,
    console,
    fail,
    open_pool,
    parsed,
    query_settings,
    run,
)
from kvpool.errors import ConfigError, Unavailable, UsageError
from kvpool.types import MoveStatus
from kvpool.units import human, parse_duration

if TYPE_CHECKING:
    from kvpool.client.admin import Admin
    from kvpool.operators import DrainReport

#: How often the server is asked how far it is.
_POLL_S = 0.25
#: A server that does not answer for so long is given up by the command; its drain goes on.
_SILENT_S = 30.0
#: As `--json` shows them.
_STATES: dict[MoveStatus | None, str] = {
    None: "off",
    MoveStatus.IN_PROGRESS: "running",
    MoveStatus.DONE: "done",
    MoveStatus.NOT_YET: "incomplete",
}


def drain(
    server: Annotated[str, typer.Argument(help="Id of the server that will leave, e.g. gpu-17.")],
    deadline: Annotated[str, typer.Option(help="Time for it, e.g. 10m.")] = "10m",
    back_in: Annotated[
        str | None,
        typer.Option(
            help="The server will be back so soon, with its NVMe file: blocks in it stay there."
        ),
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="The server stays, and takes blocks again.")
    ] = False,
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    transports: TransportNames = None,
    as_json: Json = False,
) -> None:
    """Have the other servers take over the blocks of one that will leave.

    Exit code 0 only if nothing is left behind; then the server can be stopped.
    """
    if cancel and back_in is not None:
        fail(ConfigError("--cancel and --back-in: choose one"))
    settings = query_settings(config, masters, cluster, secret_file, local_only, transports)
    try:
        within_s = parsed("--deadline", parse_duration, deadline)
        back_in_s = parsed("--back-in", parse_duration, back_in) if back_in is not None else 0.0
    except UsageError as error:
        fail(error)

    async def main() -> DrainReport:
        from kvpool.client.admin import admin

        async with await open_pool(settings) as pool:
            await check_server(pool, server)
            operator = admin(pool)
            if cancel:
                return await operator.cancel_drain(server)
            await operator.drain(server, within_s=within_s, back_in_s=back_in_s)
            return await _follow(operator, server, quiet=as_json)

    report = run(main())
    if as_json:
        print(_as_json(report))
    elif cancel:
        console.print(f"server {server} stays", markup=False)
    else:
        _print(server, report)
    raise typer.Exit(0 if cancel or report.state is MoveStatus.DONE else 1)


async def _follow(operator: Admin, server: str, *, quiet: bool) -> DrainReport:
    """Until it is over."""
    import asyncio

    loop = asyncio.get_running_loop()
    answered_at = loop.time()
    with progress(f"draining {server}", quiet=quiet) as show:
        while True:
            try:
                report = await operator.drain_report(server)
                answered_at = loop.time()
            except Unavailable:
                if loop.time() - answered_at >= _SILENT_S:
                    raise
                await asyncio.sleep(_POLL_S)
                continue
            show(report.moved_bytes, report.moved_bytes + report.left_bytes)
            if report.state is not MoveStatus.IN_PROGRESS:
                return report
            await asyncio.sleep(_POLL_S)


def _as_json(report: DrainReport) -> str:
    lines = [line._asdict() for line in report.left]
    state = _STATES.get(report.state, "unknown")
    return json.dumps({**report._asdict(), "state": state, "left": lines})


def _print(server: str, report: DrainReport) -> None:
    from rich.table import Table

    from kvpool.ops.folding import Fitted

    moved = f"moved {report.moved_blocks:,} blocks, {human(report.moved_bytes)}"
    if report.state is MoveStatus.DONE:
        console.print(f"{moved}; nothing is left: {server} can be stopped", markup=False)
        return
    if report.state is None:
        console.print(f"{moved}; the drain was cancelled, and {server} stays", markup=False)
        return
    left = f"left {report.left_blocks:,} blocks, {human(report.left_bytes)}"
    console.print(f"{moved}; {left}:", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("namespace", "why"):
        table.add_column(name)
    for name in ("blocks", "size"):
        table.add_column(name, justify="right")
    for line in report.left:
        table.add_row(escape(line.namespace), line.reason, f"{line.blocks:,}", human(line.bytes))
    console.print(Fitted(table))
