"""The `kvpool` command: dev, master, server, status, top, explain, doctor, replay, bench.

Thin: it reads settings, calls the library and prints. Exit codes: 0; 1, it failed; 2, it was
asked the wrong way. With --json the result is one JSON document on stdout, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvpool import logs, registry
from kvpool import runtime as process
from kvpool.client.pool import Pool, connect
from kvpool.config import (
    ClientConfig,
    Config,
    MasterConfig,
    ServerConfig,
    cluster_of,
    load,
    transport_settings,
)
from kvpool.errors import ConfigError, KvpoolError, Unavailable, UsageError
from kvpool.master.service import Master
from kvpool.net.diagnose import diagnose_unreachable
from kvpool.net.http_server import Page, pages
from kvpool.net.zmq_rpc import ZmqNetwork
from kvpool.ops import metrics
from kvpool.ops.tables import as_json_object, human, members_table, tiers_table
from kvpool.server.block_server import BlockServer
from kvpool.types import Explanation, Member, Namespace, check_digests
from kvpool.units import parse_duration, parse_size

if TYPE_CHECKING:
    from kvpool.tools.replay import ReplayOptions
    from kvpool.tools.workloads import Request

app = typer.Typer(
    name="kvpool",
    help="The distributed KV-cache pool for LLM inference that people can read.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
#: Piped output is for grep: one line a row, not wrapped at 80 columns.
console = Console(width=None if sys.stdout.isatty() else 200)
complaints = Console(stderr=True)
T = TypeVar("T")

#: A command that only asks gives up after this long.
_ASK_S = 1.5

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with settings.", envvar="KVPOOL_CONFIG")
]
Masters = Annotated[
    str | None, typer.Option("--masters", help="host:port of the masters, comma-separated.")
]
Cluster = Annotated[str | None, typer.Option(help="Name of the cluster; others are refused.")]
SecretFile = Annotated[
    str | None, typer.Option(help="A file with the secret that all of the cluster know.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow binding beyond loopback.")]
DieWithParent = Annotated[bool, typer.Option("--die-with-parent", hidden=True)]
Http = Annotated[
    str | None, typer.Option(help="host:port for metrics, health, readiness: 127.0.0.1:7452.")
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


# --- running ---------------------------------------------------------------------------


@app.command()
def dev(
    capacity: Annotated[str, typer.Option(help="Memory of each server.")] = "1GiB",
    servers: Annotated[int, typer.Option(min=1, max=64)] = 1,
    bind: Annotated[str, typer.Option(help="The master's host:port.")] = "127.0.0.1:7450",
    log_level: LogLevel = "warning",
) -> None:
    """Run a whole pool in this process: for a laptop, a notebook, a first look."""
    from kvpool.dev import serve

    async def main() -> None:
        async with serve(capacity, servers=servers, bind=bind, prefault=True) as pool:
            console.print(f"[bold]kvpool[/] is up: master at [cyan]{pool.address}[/]")
            for server in pool.servers:
                size = human(server.store.allocator.capacity)
                paths = ", ".join(server.addresses[1:])
                line = f"  server {server.server}, {size}: {paths}"
                console.print(line, soft_wrap=True, markup=False)
            console.print(f'\n  pool = await kvpool.connect("{pool.address}")')
            console.print("\nCtrl-C ends it.")
            await process.wait_for_signal()

    _run(main(), log_level)


@app.command()
def master(
    config: ConfigFile = None,
    bind: Annotated[str | None, typer.Option(help="host:port to listen on.")] = None,
    http: Http = None,
    cluster: Cluster = None,
    secret_file: SecretFile = None,
    insecure: Insecure = False,
    log_level: LogLevel = "info",
    die_with_parent: DieWithParent = False,
) -> None:
    """Run a master: it knows where blocks are. Run as many as you like, side by side."""
    if die_with_parent:
        process.die_with_parent()
    settings = _settings(
        config,
        {
            "master.bind": bind,
            "master.http": http,
            "master.insecure": insecure or None,
            "cluster": cluster,
            "secret_file": secret_file,
        },
    )

    async def main() -> None:
        network = ZmqNetwork(cluster_of(settings))
        running = Master(settings.master, network)
        try:
            await running.start()
            process.freeze_gc()
            console.print(f"master at {running.address}")
            wanted = settings.master
            async with _pages(metrics.pages_of_master(running), wanted, settings):
                await process.wait_for_signal()
        finally:
            await running.close()
            network.close()

    _run(main(), log_level)


@app.command()
def server(
    config: ConfigFile = None,
    masters: Masters = None,
    capacity: Annotated[str | None, typer.Option(help="Memory for blocks, like 64GiB.")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of a capacity: dram:8GiB, nvme:/path/to/file:100GiB, fastest first."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Which block goes next when memory is full.")
    ] = None,
    id: Annotated[str | None, typer.Option(help="Unique in the cluster.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="One address for each transport, comma-separated.")
    ] = None,
    http: Http = None,
    cluster: Cluster = None,
    secret_file: SecretFile = None,
    insecure: Insecure = False,
    log_level: LogLevel = "info",
    die_with_parent: DieWithParent = False,
) -> None:
    """Run a block server: it owns the bytes."""
    if die_with_parent:
        process.die_with_parent()
    settings = _settings(
        config,
        {
            "server.masters": masters,
            "server.capacity": capacity,
            "server.tiers": tier,
            "server.policy": policy,
            "server.id": id,
            "server.listen": listen,
            "server.http": http,
            "server.insecure": insecure or None,
            "cluster": cluster,
            "secret_file": secret_file,
        },
    )
    _run(_serve(settings), log_level)


async def _serve(settings: Config) -> None:
    wanted = settings.server
    network = ZmqNetwork(cluster_of(settings))
    schemes = [address.partition("://")[0] for address in wanted.listen]
    running: BlockServer | None = None
    try:
        settings_of = transport_settings(wanted)
        transports = registry.transports(schemes, strict=True, settings=settings_of)
        tiers = registry.tiers(wanted)
        running = BlockServer(
            wanted,
            cluster=cluster_of(settings),
            network=network,
            transports=transports,
            tiers=tiers,
            policy=registry.policy(wanted.policy, tiers[-1].capacity),
        )
        await running.start()
        process.freeze_gc()
        size = ", ".join(f"{tier.name} {human(tier.capacity)}" for tier in running.tiers)
        console.print(
            f"server {running.server}, {size}: {', '.join(running.addresses)}",
            soft_wrap=True,
            markup=False,
        )
        async with _pages(metrics.pages_of_server(running), wanted, settings):
            registering = asyncio.create_task(_registered(running, settings))
            stopped = asyncio.create_task(process.wait_for_signal())
            # A refused id ends the server; a master that is not there yet does not.
            await asyncio.wait([registering, stopped], return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                registering.result()
                await stopped
            registering.cancel()
    finally:
        if running is not None:
            await running.close()
        network.close()


@asynccontextmanager
async def _pages(
    served: Mapping[str, Callable[[], Page]],
    wanted: MasterConfig | ServerConfig,
    settings: Config,
) -> AsyncIterator[None]:
    # Figures are no secret of a cluster that has one: who scrapes them need not know it.
    open_ = wanted.insecure or bool(settings.secret_file)
    async with pages(served, wanted.http, open_) as serving:
        if serving is not None:
            console.print(f"metrics, health, ready at http://{serving.address}", markup=False)
        yield


async def _registered(running: BlockServer, settings: Config) -> None:
    """Wait for a master. Raises ConfigError when our id is still taken after a timeout."""
    loop = asyncio.get_running_loop()
    patience = settings.master.timeout_s + 2 * settings.server.heartbeat_s
    try:
        await running.wait_until_registered(loop.time() + patience)
    except Unavailable as error:
        hint = await diagnose_unreachable(settings.server.masters, cluster_of(settings))
        complaints.print(f"[yellow]no master yet:[/] {escape(str(error))}{hint}; trying on")


# --- asking ----------------------------------------------------------------------------


@app.command()
def status(
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: Cluster = None,
    secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Show the servers of a pool: memory, blocks, health."""
    settings = _asking(config, masters, cluster, secret_file)

    async def main() -> list[Member]:
        async with await _open(settings) as pool:
            return await pool.members(timeout=_ASK_S)

    members = _run(main())
    if as_json:
        print(json.dumps([as_json_object(member) for member in members]))
    else:
        console.print(members_table(members))
        console.print()
        console.print(tiers_table(members))
    raise typer.Exit(0 if any(member.alive for member in members) else 1)


@app.command()
def top(
    config: ConfigFile = None,
    masters: Masters = None,
    every: Annotated[str, typer.Option(help="Between two looks, like 500ms.")] = "1s",
    looks: Annotated[int, typer.Option(min=0, help="How many; 0: until Ctrl-C.")] = 0,
    cluster: Cluster = None,
    secret_file: SecretFile = None,
) -> None:
    """Watch a pool: `status` again and again."""
    settings = _asking(config, masters, cluster, secret_file)

    async def watch() -> None:
        pause_s = parse_duration(every)
        async with await _open(settings) as pool:
            with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
                for look in itertools.count(1):
                    try:
                        members = await pool.members(timeout=_ASK_S)
                        view = Group(members_table(members), "", tiers_table(members))
                    except Unavailable as error:  # a master that restarts is soon back
                        view = Group(escape(str(error)))
                    live.update(view, refresh=True)
                    if look == looks:
                        return
                    await asyncio.sleep(pause_s)

    async def main() -> None:
        watching = asyncio.create_task(watch())
        stopped = asyncio.create_task(process.wait_for_signal())
        await asyncio.wait([watching, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, stopped):
            task.cancel()
        await asyncio.wait([watching, stopped])
        if not watching.cancelled():
            watching.result()

    _run(main())


@app.command()
def explain(
    keys: Annotated[list[str], typer.Argument(help="Block keys, in hex.")],
    namespace: Annotated[str, typer.Option(help="The namespace they are in.")],
    parts: Annotated[int, typer.Option(min=1, max=256)] = 1,
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: Cluster = None,
    secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Say where blocks are, or why they are not."""
    settings = _asking(config, masters, cluster, secret_file)

    async def main() -> list[Explanation]:
        try:
            digests = [bytes.fromhex(key) for key in keys]
        except ValueError:
            raise ConfigError(f"keys {keys}: expected hex digits") from None
        check_digests(digests)
        wanted = Namespace(namespace, parts)
        async with await _open(settings) as pool:
            return await pool.explain(wanted, digests, timeout=_ASK_S)

    answers = _run(main())
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "key": answer.key.digest.hex(),
                        "status": answer.status.label,
                        "text": answer.text,
                        "replicas": [replica._asdict() for replica in answer.replicas],
                    }
                    for answer in answers
                ]
            )
        )
        return
    for answer in answers:
        colour = "green" if answer.status.hit else "yellow"
        text = escape(answer.text)
        console.print(f"{answer.key}  [{colour}]{answer.status.label}[/]: {text}")


@app.command()
def doctor(
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: Cluster = None,
    secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Look for what keeps a pool from working, or from being fast, and say what to do."""
    from kvpool.ops.doctor import examine

    settings = _asking(config, masters, cluster, secret_file)
    findings = _run(examine(settings))
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        table = Table("check", "", "finding", "what to do", box=None, pad_edge=False)
        marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
        for finding in findings:
            text, advice = escape(finding.text), escape(finding.advice)
            table.add_row(finding.check, marks[finding.verdict], text, advice)
        console.print(table)
    raise typer.Exit(1 if any(finding.verdict == "fail" for finding in findings) else 0)


# --- measuring -------------------------------------------------------------------------


ReplayTiers = Annotated[
    list[str] | None,
    typer.Option(help="Of each server: dram:1GiB, nvme:/data/{server}:9GiB; no capacity then."),
]
KillAt = Annotated[
    float | None,
    typer.Option(help="Kill -9 all servers after this share of the requests, and restart."),
]
Picture = Annotated[
    Path | None, typer.Option("--picture", "--plot", help="Draw the result as SVG.")
]
InFlight = Annotated[
    int | None, typer.Option(help="Requests at a time; default 1 for a file, else clients.")
]


@app.command()
def replay(
    trace: Annotated[
        Path | None, typer.Argument(help="Trace file in the Mooncake format (JSON lines).")
    ] = None,
    workload: Annotated[str, typer.Option(help="Without a file: codex.")] = "codex",
    servers: Annotated[int, typer.Option(min=1, max=64)] = 2,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Engine instances.")] = 4,
    capacity: Annotated[
        str | None, typer.Option(help="Memory of all servers together; default by workload.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(help="Bytes of each block; default by workload.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="codex: sessions in all.")] = 200,
    concurrent: Annotated[int, typer.Option(min=1, help="codex: sessions at a time.")] = 24,
    in_flight: InFlight = None,
    transports: Annotated[
        str, typer.Option(help="Taken in turn by the clients, comma-separated.")
    ] = "shm,tcp",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
    seed: Annotated[int, typer.Option()] = 1,
    policy: Annotated[str, typer.Option(help="Which block goes next; --dry: several.")] = "lru",
    tier: ReplayTiers = None,
    kill_at: KillAt = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="The real store without bytes, beside the exact bound.")
    ] = False,
    hints: Annotated[
        bool, typer.Option("--hints", help="--dry: with sessions that end and resume, too.")
    ] = False,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Play a workload through a pool of real processes and check every byte.

    A capacity is a size, or a number of blocks: 5000blocks. With --dry, several, comma-separated.
    """
    from kvpool.tools import replay as replays

    if dry:
        try:
            name, requests = replays.requests_of(trace, workload, sessions, concurrent, seed)
            blocks = replays.capacities_in_blocks(capacity or "5000blocks", block_size)
        except KvpoolError as error:
            _fail(error)
        _dry(name, requests[:limit], policy, blocks, hints, seed, picture, as_json)
        return
    try:
        if hints:
            raise ConfigError("--hints needs --dry: only there does time pass as in the trace")
        options = replays.options(
            trace=trace,
            workload=workload,
            servers=servers,
            clients=clients,
            capacity=capacity,
            block_size=block_size,
            sessions=sessions,
            concurrent=concurrent,
            in_flight=in_flight,
            transports=[name.strip() for name in transports.split(",") if name.strip()],
            limit=limit,
            seed=seed,
            policy=policy,
            tiers=tier or (),
            kill_at=kill_at,
        )
    except KvpoolError as error:
        _fail(error)
    _play(options, picture, as_json)


def _play(options: ReplayOptions, picture: Path | None, as_json: bool) -> None:
    from kvpool.tools import replay as replays

    report = _run(replays.replay(options, complaints if as_json else console))
    if picture is not None:
        from kvpool.tools.charts import draw

        picture.write_text(draw(report))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        from kvpool.tools.replay_report import tables

        for table in tables(report):
            console.print(table)
        if picture is not None:
            console.print(f"picture: {picture.resolve()}")
    raise typer.Exit(0 if report.wrong_bytes == 0 else 1)


def _dry(
    name: str,
    requests: list[Request],
    policies: str,
    capacities: list[int],
    hints: bool,
    seed: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    from kvpool.tools import policy_study as dries

    try:
        options = dries.options(
            name=name,
            requests=requests,
            policies=policies,
            capacities=capacities,
            hints=hints,
            seed=seed,
        )
    except KvpoolError as error:
        _fail(error)
    process.freeze_gc()  # it would look at millions of block ids again and again
    done = dries.study(options, lambda line: complaints.print(line, highlight=False))
    if picture is not None:
        from kvpool.tools.charts import curves

        picture.write_text(curves(done))
    if as_json:
        print(json.dumps(done.as_dict()))
    else:
        console.print(dries.table(done))


@app.command()
def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 9,
    block_size: Annotated[str, typer.Option(help="Bytes of each block.")] = "2MiB",
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Blocks in a batch.")] = 64,
    as_json: Json = False,
) -> None:
    """Measure reads, writes and matches, beside the limits of this machine."""
    from kvpool.tools import bench as benches

    try:
        options = benches.BenchOptions(rounds, parse_size(block_size), batch)
    except KvpoolError as error:
        _fail(error)
    report = _run(benches.bench(options, complaints))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console.print(benches.table(report.rows))


# --- inside ----------------------------------------------------------------------------


def _settings(config: Path | None, flags: dict[str, object]) -> Config:
    try:
        return load(config, os.environ, flags)
    except ConfigError as error:
        _fail(error)


def _asking(
    config: Path | None, masters: str | None, cluster: str | None, secret_file: str | None
) -> Config:
    """Settings of a command that asks the pool."""
    flags: dict[str, object] = {
        "client.masters": masters,
        "cluster": cluster,
        "secret_file": secret_file,
    }
    return _settings(config, flags)


async def _open(settings: Config) -> Pool:
    client = settings.client
    asking = ClientConfig(
        masters=client.masters,
        transports=client.transports,
        timeout_s=_ASK_S,
        attempt_s=min(client.attempt_s, _ASK_S / 2),
        verify=client.verify,
    )
    return await connect(config=asking, cluster=cluster_of(settings))


def _run(main: Coroutine[Any, Any, T], log_level: str = "warning") -> T:
    """Run to the end; errors of ours become a sentence and an exit code."""
    if log_level not in ("debug", "info", "warning", "error"):
        main.close()
        _fail(ConfigError(f"log level {log_level!r}: expected debug, info, warning or error"))
    logs.configure(log_level)
    try:
        return process.run(main)
    except KvpoolError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fail(error: KvpoolError) -> NoReturn:
    complaints.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(2 if isinstance(error, UsageError) else 1)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
