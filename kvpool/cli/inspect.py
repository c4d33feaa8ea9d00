"""Commands that look at a pool once: status, explain, doctor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.markup import escape

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
    TransportNames,
    console,
    digests_of,
    fail,
    open_pool,
    query_flags,
    query_settings,
    run,
    settings_of,
)
from kvpool.config import Config, cluster_of
from kvpool.errors import ConfigError
from kvpool.types import (
    OTHERS,
    Cluster,
    Demand,
    Explanation,
    Member,
    Namespace,
    ReadStatus,
    SessionReport,
)

if TYPE_CHECKING:
    from rich.table import Table

    from kvpool.ops.finding import Finding


#: Where the policy of a server may know more: evicted, or refused when it came.
_GONE = (ReadStatus.EVICTED, ReadStatus.NEVER_WRITTEN)


def status(
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    as_json: Json = False,
) -> None:
    """Show the servers of a pool: memory, blocks, health.

    Exit code 1 if no server is up.
    """
    from kvpool.client.admin import admin
    from kvpool.client.room import OBSERVED_S
    from kvpool.ops.demand import demand_table, demand_text
    from kvpool.ops.folding import Fitted
    from kvpool.ops.inferred import inferred_table
    from kvpool.ops.tables import (
        as_json_object,
        clients_table,
        members_table,
        tenants_table,
        tiers_table,
    )
    from kvpool.ops.usage import usage_by, usage_table

    settings = query_settings(config, masters, cluster, secret_file, local_only)

    async def main() -> tuple[list[Member], list[tuple[Namespace, int]], Demand]:
        async with await open_pool(settings) as pool:
            members, operator = await pool.members(timeout=QUERY_S), admin(pool)
            namespaces = await operator.namespaces(timeout=QUERY_S) if not as_json else []
            return members, namespaces, await operator.demand(timeout=QUERY_S)

    members, namespaces, demand = run(main())
    hidden = bool(cluster_of(settings).tenant)
    if as_json:
        print(json.dumps([as_json_object(member, hidden=hidden) for member in members]))
    elif not members:
        console.print(NO_SERVER, soft_wrap=True)
    else:
        console.print(Fitted(members_table(members, hidden=hidden), names=3))
        console.print()
        if hidden:
            console.print(FOR_OPERATORS)
        else:
            console.print(Fitted(tiers_table(members), names=2))
        if (inferred := inferred_table(members)) is not None:
            console.print()
            console.print(Fitted(inferred))
        if any(member.stats.clients for member in members):
            console.print()
            console.print(Fitted(clients_table(members), names=3))
        if (tenants := tenants_table(namespaces)) is not None:
            console.print()
            console.print(Fitted(tenants))
        used = usage_by("tenant", members)
        if any(one.name not in ("", OTHERS) for one in used):
            console.print()
            console.print(Fitted(usage_table("tenant", used)))
        if demand is not None and demand.working_sets:
            console.print()
            if demand.seconds >= OBSERVED_S and demand.size:
                console.print(Fitted(demand_table(demand)))
            console.print(demand_text(demand, members))
    raise typer.Exit(0 if any(member.alive for member in members) else 1)


def explain(
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Keys in hex, e.g. 9f86d081884c7d659a2feaa0c55ad015; - for stdin."),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the blocks, e.g. llama-3.")] = "",
    parts: Annotated[
        int, typer.Option(min=1, max=256, help="Number of parts of a block in the namespace.")
    ] = 1,
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    server_http: Annotated[
        str | None,
        typer.Option(
            help="Address that a server has for --http: its policy says why a block is gone, e.g. "
            "127.0.0.1:7453; from another host only with the cluster's secret."
        ),
    ] = None,
    session: Annotated[
        str, typer.Option(help="Instead: what came of the hints about this session.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show where blocks are, or why they are not in the pool; or what came of a session's hints."""
    settings = query_settings(config, masters, cluster, secret_file, local_only)
    if session:
        _explain_session(settings, session, as_json)
        return

    from kvpool.client.admin import admin
    from kvpool.ops.inferred import inferred_line, inferred_sum

    async def main() -> tuple[list[Explanation], str, dict[bytes, str]]:
        if not keys or not namespace:
            raise ConfigError("expected keys and their --namespace, or a --session")
        digests = digests_of(keys)
        wanted = Namespace(namespace, parts)
        async with await open_pool(settings) as pool:
            found = await admin(pool).explain(wanted, digests, timeout=QUERY_S)
            gone = [one.key.digest for one in found if one.status in _GONE]
            evicted = any(one.status is ReadStatus.EVICTED for one in found)
            members = await pool.members(timeout=QUERY_S) if evicted and not as_json else []
            why = await _ask_why(server_http, gone, cluster_of(settings)) if server_http else {}
            return found, inferred_line(inferred_sum(members)), why

    answers, inferred, why = run(main())
    if as_json:
        print(json.dumps([_as_json(answer, why) for answer in answers]))
        return
    for answer in answers:
        colour, label = "green" if answer.status.hit else "yellow", answer.status.label
        begins = answer.text.startswith(label)
        text = escape(answer.text.removeprefix(label) if begins else f": {answer.text}")
        if answer.key.digest in why:
            text += f"; {escape(why[answer.key.digest])}"
        console.print(f"{answer.key}  [{colour}]{label}[/]{text}")
    if inferred:
        console.print(f"what the policy infers: {inferred}")


def _as_json(answer: Explanation, why: dict[bytes, str]) -> dict[str, object]:
    digest = answer.key.digest
    return {
        "key": digest.hex(),
        "status": answer.status.label,
        "text": answer.text,
        "replicas": [replica._asdict() for replica in answer.replicas],
        **({"why": why[digest]} if digest in why else {}),
    }


async def _ask_why(server_http: str, gone: list[bytes], cluster: Cluster) -> dict[bytes, str]:
    from kvpool.ops.why import ask_why

    return dict(zip(gone, await ask_why(server_http, gone, QUERY_S, cluster), strict=True))


def _explain_session(settings: Config, session: str, as_json: bool) -> None:
    from kvpool.ops.sessions import lines_of

    async def main() -> SessionReport:
        async with await open_pool(settings) as pool:
            return await pool.session(session).explain(timeout=QUERY_S)

    report = run(main())
    if as_json:
        print(
            json.dumps(
                {
                    "hints": [{"age_s": age, "resume_in": after} for age, after in report.hints],
                    "servers": [
                        {"server": server, "followed": followed, "age_s": age}
                        for server, followed, age in report.servers
                    ],
                }
            )
        )
        return
    for line in lines_of(session, report):
        console.print(escape(line))


def doctor(
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    transports: TransportNames = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help="Address of a vLLM server, e.g. http://127.0.0.1:8000: instead of all else, show "
            "under which name it shares blocks. Repeat it, and their names are compared.",
        ),
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            help="What vLLM gets as --kv-transfer-config: check it, and the pool as such an engine "
            "sees it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine and a pool for problems, and show what to do about them.

    Exit code 1 if a check failed, 2 if an option is wrong.
    """
    from kvpool import registry
    from kvpool.ops.doctor import examine
    from kvpool.ops.engine_json import ExaminedJson, examine_json
    from kvpool.ops.engines import examine_engines, metrics_url

    if engines:
        if vllm is not None:
            fail(ConfigError("--engine and --vllm: give one of them, each asks something else"))
        try:
            for address in engines:
                metrics_url(address)
        except ConfigError as error:
            fail(error)
        _report(run(examine_engines(engines)), as_json=as_json)
    of_json = examine_json(vllm) if vllm is not None else ExaminedJson([], {})
    if of_json.settings is None:
        _report(of_json.findings, as_json=as_json)
    flags = query_flags(masters, cluster, secret_file, local_only, transports)
    settings = settings_of(
        config, of_json.settings | {name: one for name, one in flags.items() if one is not None}
    )
    try:
        registry.check_settings(settings.client.transports)
    except ConfigError as error:
        fail(ConfigError(f"--transport (setting client.transports): {error}"))
    _report(of_json.findings + run(examine(settings)), as_json=as_json)


def _report(findings: list[Finding], *, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        from kvpool.ops.folding import Fitted

        console.print(Fitted(_findings_table(findings), names=2))
    raise typer.Exit(1 if any(finding.verdict == "fail" for finding in findings) else 0)


def _findings_table(findings: list[Finding]) -> Table:
    from rich.table import Table

    table = Table("check", "", "", "what to do", box=None, pad_edge=False)
    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
    for finding in findings:
        check, text, advice = map(escape, (finding.check, finding.text, finding.advice))
        table.add_row(check, marks[finding.verdict], text, advice)
    return table
