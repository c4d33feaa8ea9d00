"""The command that has a chain in memory before its readers come: prefetch."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from kvpool.cli.progress import blocks, progress
from kvpool.cli.shared import (
    QUERY_S,
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
    open_pool,
    parsed,
    query_settings,
    run,
)
from kvpool.errors import UsageError
from kvpool.types import MoveStatus, Namespace
from kvpool.units import parse_duration

#: Between two questions. A server keeps for 30 s what it has brought up.
_POLL_S = 0.5


def prefetch(
    keys: Annotated[
        list[str],
        typer.Argument(help="Keys of the chain's blocks in hex, the first one first; - for stdin."),
    ],
    namespace: Annotated[str, typer.Option(help="Namespace of the blocks, e.g. llama-3.")],
    parts: Annotated[
        int, typer.Option(min=1, max=256, help="Number of parts of a block in the namespace.")
    ] = 1,
    deadline: Annotated[str, typer.Option(help="Time for it, e.g. 1m.")] = "1m",
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    transports: TransportNames = None,
    as_json: Json = False,
) -> None:
    """Have servers bring a chain from their disks into memory before its readers come.

    Exit code 0 only if all of it is in memory.
    """
    import asyncio

    from kvpool.client.prefetch import WORDS

    settings = query_settings(config, masters, cluster, secret_file, local_only, transports)
    try:
        chain = digests_of(keys)
        within_s = parsed("--deadline", parse_duration, deadline)
        wanted = Namespace(namespace, parts)
    except UsageError as error:
        fail(error)

    async def main() -> Counter[MoveStatus]:
        until = asyncio.get_running_loop().time() + within_s
        async with await open_pool(settings) as pool:
            await pool.members()  # raises MasterLost
            with progress("prefetching", quiet=as_json, amount=blocks) as show:
                while True:
                    found = Counter(await pool.prefetch(wanted, chain, timeout=QUERY_S))
                    show(found[MoveStatus.HERE], len(chain))
                    moving = found[MoveStatus.IN_PROGRESS] + found[MoveStatus.REFUSED]
                    if not moving or asyncio.get_running_loop().time() + _POLL_S >= until:
                        return found
                    await asyncio.sleep(_POLL_S)

    found = run(main())
    whole = found[MoveStatus.HERE] == len(chain)
    counts = {word: found[status] for status, word in WORDS.items()}
    if as_json:
        print(json.dumps({"complete": whole, "blocks": len(chain), **counts}))
    else:
        line = ", ".join(f"{count:,} {label}" for label, count in counts.items() if count)
        console.print(f"{line}, of {len(chain):,} blocks", markup=False, highlight=False)
        if found[MoveStatus.GONE]:
            console.print("gone: `kvpool explain` says why")
        if found[MoveStatus.LOST]:
            console.print("lost: a server does not answer, `kvpool doctor` says which")
        if found[MoveStatus.IN_PROGRESS] + found[MoveStatus.REFUSED]:
            console.print("run it again, with a longer --deadline, to go on")
    raise typer.Exit(0 if whole else 1)
