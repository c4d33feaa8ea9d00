"""The command that has a chain copied to where it will be read: spread."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvpool.cli.progress import blocks, progress
from kvpool.cli.shared import (
    ClusterName,
    ConfigFile,
    Json,
    LocalOnly,
    Masters,
    SecretFile,
    TransportNames,
    console,
    digests_of,
    fail,
    no_such_name,
    open_pool,
    parsed,
    query_settings,
    run,
    stderr,
)
from kvpool.errors import ConfigError, UsageError
from kvpool.types import Namespace
from kvpool.units import parse_duration

if TYPE_CHECKING:
    from kvpool.client.spread import SpreadReport

#: Of so many wrong names a line of its own says which ones there are.
_WRONG_NAMES_MAX = 4


def spread(
    keys: Annotated[
        list[str],
        typer.Argument(help="Keys of the chain's blocks in hex, the first one first; - for stdin."),
    ],
    namespace: Annotated[str, typer.Option(help="Namespace of the blocks, e.g. llama-3.")],
    to: Annotated[
        list[str],
        typer.Option(
            help="How many servers are to have it, or which: ids of servers or of hosts, "
            "comma-separated, e.g. 8 or gpu-1,gpu-2."
        ),
    ],
    parts: Annotated[
        int, typer.Option(min=1, max=256, help="Number of parts of a block in the namespace.")
    ] = 1,
    deadline: Annotated[str, typer.Option(help="Time for it, e.g. 2m.")] = "2m",
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    transports: TransportNames = None,
    as_json: Json = False,
) -> None:
    """Have servers fetch a chain, also from each other, before its readers come.

    Exit code 0 only if the pool has the whole chain, and each of the servers has it, too.
    """
    settings = query_settings(config, masters, cluster, secret_file, local_only, transports)
    try:
        chain = digests_of(keys)
        within_s = parsed("--deadline", parse_duration, deadline)
        wanted = Namespace(namespace, parts)
    except UsageError as error:
        fail(error)
    named = [name for name in ",".join(to).split(",") if name]
    receivers = int(named[0]) if len(named) == 1 and named[0].isdecimal() else named

    async def main() -> SpreadReport:
        from kvpool.client.admin import admin

        async with await open_pool(settings) as pool:
            try:
                with progress("spreading", quiet=as_json, amount=blocks) as show:
                    report = await admin(pool).spread(
                        wanted, chain, to=receivers, timeout=within_s, report=show
                    )
            except UsageError as error:
                raise ConfigError(f"--to {','.join(to)}: {error}") from None
            from kvpool.client.spread_plan import NO_SUCH_NAME

            wrong = [one.server for one in report.servers if one.problem == NO_SUCH_NAME]
            for name in wrong[:_WRONG_NAMES_MAX]:
                line = no_such_name(name, await pool.members(), hosts=True)
                stderr.print(line, markup=False, highlight=False, soft_wrap=True)
            return report

    report = run(main())
    whole = report.complete and report.length == len(chain)
    if as_json:
        servers = [one._asdict() for one in report.servers]
        found = {"length": report.length, "stopped": report.stopped.label, "servers": servers}
        print(json.dumps({"complete": whole, "blocks": len(chain), **found}))
    else:
        _print(report, len(chain))
    raise typer.Exit(0 if whole else 1)


def _print(report: SpreadReport, length: int) -> None:
    from rich.table import Table

    from kvpool.ops.folding import Fitted

    if report.length < length:
        line = f"the pool has {report.length:,} of {length:,} blocks: {report.stopped.label}"
        console.print(line, markup=False)
    if not report.servers and report.complete:
        console.print("nothing is to be copied: so many servers have it")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("server")
    for name in ("blocks", "fetched"):
        table.add_column(name, justify="right")
    table.add_column("problem")
    for one in report.servers:
        table.add_row(escape(one.server), f"{one.blocks:,}", f"{one.fetched:,}", one.problem)
    console.print(Fitted(table))
