"""The command that shows who has what of a pool."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from kvpool.cli.shared import (
    FOR_OPERATORS,
    NO_SERVER,
    QUERY_S,
    ClusterName,
    ConfigFile,
    Json,
    LocalOnly,
    Masters,
    SecretFile,
    console,
    open_pool,
    query_settings,
    run,
)
from kvpool.config import cluster_of
from kvpool.types import Member


class By(StrEnum):
    """What is a consumer."""

    TENANT = "tenant"
    NAMESPACE = "namespace"
    PROGRAM = "program"


def usage(
    by: Annotated[By, typer.Option(help="One line for each of these.")] = By.TENANT,
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    as_json: Json = False,
) -> None:
    """Show who has what of a pool: bytes by tier, hits, bytes that readers were saved, misses, and
    for whom blocks of a tenant were evicted.

    Counts are since each server began. Exit code 1 if no server is up.
    """
    from kvpool.ops.folding import Fitted
    from kvpool.ops.usage import as_json_object, usage_by, usage_table

    settings = query_settings(config, masters, cluster, secret_file, local_only)

    async def main() -> list[Member]:
        async with await open_pool(settings) as pool:
            return await pool.members(timeout=QUERY_S)

    members = run(main())
    found = usage_by(by.value, members)
    if as_json:
        print(json.dumps([as_json_object(one) for one in found]))
    elif not members:
        console.print(NO_SERVER, soft_wrap=True)
    else:
        console.print(Fitted(usage_table(by.value, found)))
        if cluster_of(settings).tenant:
            console.print(FOR_OPERATORS)
        elif not found:
            console.print("nobody yet")
    raise typer.Exit(0 if any(member.alive for member in members) else 1)
