"""Commands that run processes: dev, master, server."""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvpool.addresses import is_loopback, split
from kvpool.cli.other_users import say_who_may_use_it
from kvpool.cli.progress import progress
from kvpool.cli.shared import (
    ClusterName,
    ConfigFile,
    DieWithParent,
    Http,
    Insecure,
    LocalOnly,
    LogLevel,
    Masters,
    SecretFile,
    TenantsPath,
    console,
    fail,
    run,
    settings_of,
    stderr,
)
from kvpool.config import (
    Config,
    MasterConfig,
    ServerConfig,
    check_bind,
    cluster_of,
    parse_tier,
)
from kvpool.errors import ConfigError, Unavailable
from kvpool.ops import process
from kvpool.units import human

if TYPE_CHECKING:
    from kvpool.master.service import Master
    from kvpool.net.http_server import Routes
    from kvpool.net.tenants_file import TenantsFile
    from kvpool.protocols import Transport
    from kvpool.server.block_server import BlockServer

#: Files that a process may open, where the system lets it.
_FILES = 65_536
#: How often a server that leaves shows how far it is.
_SHOW_S = 0.25

ServerId = Annotated[
    str | None, typer.Option(help="Id of this server, unique in the cluster, e.g. gpu-17.")
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        help="Where others reach this server, if not where it listens: a host, e.g. "
        "203.0.113.7, or for one transport tcp://203.0.113.7:17460."
    ),
]


def dev(
    capacity: Annotated[str, typer.Option(help="Memory of each server, e.g. 1GiB.")] = "1GiB",
    servers: Annotated[int, typer.Option(min=1, max=64, help="Number of servers.")] = 1,
    bind: Annotated[
        str, typer.Option(help="Address of the master, e.g. 127.0.0.1:7450.")
    ] = "127.0.0.1:7450",
    http: Http = None,
    local_only: LocalOnly = False,
    log_level: LogLevel = "warning",
) -> None:
    """Run a whole pool in this process, to try it on one machine."""
    from kvpool.dev import serve

    flags: dict[str, object] = {
        "local_only": local_only or None,
        "master.bind": bind,
        "master.http": http,
        "server.capacity": capacity,
    }
    settings = settings_of(None, flags)
    _check_this_host(bind, settings.master.http)
    say_who_may_use_it(settings)

    async def main() -> None:
        cluster = cluster_of(settings)
        async with (
            serve(capacity, servers=servers, bind=bind, prefault=True, cluster=cluster) as pool,
            _master_pages(pool.master, settings),
        ):
            console.print(f"[bold]kvpool[/] is up: master at [cyan]{pool.address}[/]")
            for server in pool.servers:
                size = human(server.store.allocator.capacity)
                paths = ", ".join(server.addresses[1:])
                line = f"  server {server.server}, {size}: {paths}"
                console.print(line, soft_wrap=True, markup=False)
            named = f'"{settings.cluster}"'
            known = f", cluster={named}" if settings.cluster != "default" else ""
            if settings.secret_file:
                known += f', secret_file="{settings.secret_file}"'
            if settings.local_only:
                known = f", cluster=kvpool.Cluster({named}, kvpool.local_secret())"
            console.print(
                f'\n  pool = await kvpool.connect("{pool.address}"{known})',
                soft_wrap=True,
                markup=False,
            )
            console.print("\nPress Ctrl-C to stop.")
            await process.wait_for_signal()

    run(main(), log_level)


def _check_this_host(*addresses: str) -> None:
    """Ends the command for an address that others reach."""
    for address in addresses:
        parts = split(address)  # None: who listens there explains it
        if parts is not None and not is_loopback(parts[1]):
            fail(
                ConfigError(
                    f"address {address} is reachable from other machines, and `kvpool dev` is for "
                    "this one: choose one on 127.0.0.1; `kvpool master` and `kvpool server` serve "
                    "others"
                )
            )


def master(
    config: ConfigFile = None,
    bind: Annotated[
        str | None, typer.Option(help="Address to listen on, e.g. 127.0.0.1:7450.")
    ] = None,
    http: Http = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    tenants: TenantsPath = None,
    local_only: LocalOnly = False,
    insecure: Insecure = False,
    log_level: LogLevel = "info",
    die_with_parent: DieWithParent = False,
) -> None:
    """Run a master, the directory of blocks. Several may run at the same time."""
    from kvpool.master.service import Master
    from kvpool.net.control_network import TcpNetwork

    _prepare(die_with_parent)
    settings = settings_of(
        config,
        {
            "master.bind": bind,
            "master.http": http,
            "master.insecure": insecure or None,
            "cluster": cluster,
            "secret_file": secret_file,
            "tenants_file": tenants,
            "local_only": local_only or None,
        },
    )

    _check_http("master", settings.master, settings)
    say_who_may_use_it(settings, insecure=settings.master.insecure, quiet=die_with_parent)

    async def main() -> None:
        tenants = _tenants_of(settings)
        keys = tenants.keys if tenants is not None else None
        network = TcpNetwork(cluster_of(settings), keys)
        running = Master(settings.master, network)
        try:
            process.freeze_gc()
            await running.start()
            watching = tenants.watched(running.tasks) if tenants else nullcontext()
            async with watching, _master_pages(running, settings):
                console.print(f"master at {running.address}", markup=False)
                await process.wait_for_signal()
        finally:
            await running.close()
            network.close()

    run(main(), log_level)


def _prepare(die_with_parent: bool) -> None:
    if die_with_parent:
        process.die_with_parent()
    _raise_file_limit()


WriteMode = Annotated[
    str | None,
    typer.Option(
        help="When blocks go to the last tier: write_through (at once), or write_back (when "
        "memory would drop them)."
    ),
]


def server(
    config: ConfigFile = None,
    masters: Masters = None,
    capacity: Annotated[str | None, typer.Option(help="Memory for blocks, e.g. 64GiB.")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="Tier instead of --capacity, e.g. dram:8GiB or nvme:/data/kvpool:100GiB. "
            "Repeat it for several, fastest first; several nvme files are one level."
        ),
    ] = None,
    write_mode: WriteMode = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Eviction policy: lru, arc, lease, density, programs or other."),
    ] = None,
    id: ServerId = None,
    identity_file: Annotated[
        str | None,
        typer.Option(
            help="File with the secret that proves the --id; made at the first start. "
            "Keep it where it outlives the machine or container."
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="One address per transport, comma-separated, e.g. tcp://10.0.0.1:7500,shm://. "
            "Settings of a transport follow a question mark: ucx://10.0.0.1:7501?tls=rc."
        ),
    ] = None,
    announce: Announce = None,
    http: Http = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    tenants: TenantsPath = None,
    local_only: LocalOnly = False,
    insecure: Insecure = False,
    drain: Annotated[
        str | None, typer.Option(help="On SIGTERM hand over the blocks first, for e.g. 5m at most.")
    ] = None,
    log_level: LogLevel = "info",
    die_with_parent: DieWithParent = False,
) -> None:
    """Run a block server, which stores the bytes."""
    _prepare(die_with_parent)
    settings = settings_of(
        config,
        {
            "server.masters": masters,
            "server.capacity": capacity,
            "server.tiers": tier,
            "server.write_mode": write_mode,
            "server.policy": policy,
            "server.id": id,
            "server.identity_file": identity_file,
            "server.listen": listen,
            "server.announce": announce,
            "server.http": http,
            "server.insecure": insecure or None,
            "server.drain_s": drain,
            "cluster": cluster,
            "secret_file": secret_file,
            "tenants_file": tenants,
            "local_only": local_only or None,
        },
    )
    _check_server(settings, capacity)
    say_who_may_use_it(settings, insecure=settings.server.insecure, quiet=die_with_parent)
    run(_serve(settings), log_level)


def _raise_file_limit() -> None:
    """Let this process open as many files as it may, up to 65,536.

    Shells give 1,024 by default, as many as a server accepts connections (`connections_max`).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_server(settings: Config, capacity: str | None) -> None:
    """Ends the command for a wrong address, and for a capacity that would not be looked at."""
    _check_http("server", settings.server, settings)
    if capacity is not None and (tiers := settings.server.tiers):
        fail(ConfigError(f"--capacity and tiers ({', '.join(tiers)}): expected one of them"))


async def _serve(settings: Config) -> None:
    if not settings.server.id:  # another one at each start
        await _serve_as(settings, b"", kept=False)
        return
    try:
        from kvpool.server.identity_file import IdentityFile
    except ModuleNotFoundError:
        raise ConfigError("this program proves no id of a server (setting server.id)") from None
    with IdentityFile(settings.server, settings.cluster) as identity:
        if identity.has_run:
            _say_which_files_are_gone(settings.server)
        await _serve_as(settings, identity.secret, kept=identity.kept)


def _say_which_files_are_gone(config: ServerConfig) -> None:
    """A tier makes its file where there is none; a disk that is not mounted looks like that."""
    from kvpool import logs

    for spec in map(parse_tier, config.tiers):
        is_path = "/" in spec.place and "//" not in spec.place
        if is_path and not os.path.lexists(spec.place):
            logs.get("kvpool.server").warning(
                "the file of a tier is not there: a new one is made, without blocks",
                why="this server has run before: is its disk mounted, was the file removed?",
                tier=spec.name,
                file=spec.place,
            )


def _tenants_of(settings: Config) -> TenantsFile | None:
    """Raises ConfigError for a file that is wrong, and where this program runs without tenants."""
    if not settings.tenants_file:
        return None
    try:
        from kvpool.net.tenants_file import TenantsFile
    except ModuleNotFoundError:
        raise ConfigError("this program runs without tenants (setting tenants_file)") from None
    return TenantsFile.of_process(settings.tenants_file, cluster_of(settings))


async def _serve_as(settings: Config, secret: bytes, *, kept: bool) -> None:
    import asyncio

    from kvpool import registry
    from kvpool.net.control_network import TcpNetwork
    from kvpool.ops import metrics
    from kvpool.ops.why import why_page
    from kvpool.server.block_server import BlockServer

    wanted = settings.server
    tenants = _tenants_of(settings)
    network = TcpNetwork(cluster_of(settings))
    running: BlockServer | None = None
    try:
        registry.check_transports(wanted.listen)
        transports = registry.transports(wanted.listen, strict=True)
        if settings.local_only:
            _check_authenticated(transports)
        tiers = registry.tiers(wanted)
        running = BlockServer(
            wanted,
            cluster=cluster_of(settings),
            network=network,
            transports=transports,
            tiers=tiers,
            policy=registry.policy(wanted.policy, registry.pool_tier(tiers).capacity),
            secret=secret,
            keeps_secret=kept,
            tenants=tenants.keys if tenants is not None else None,
        )
        if tenants is not None:
            from kvpool.server.tenancy import Tenancy

            tenants.on_change(Tenancy.of(running).tenants_changed)
        process.freeze_gc()  # before the start, which adds all blocks of a file
        await running.start()
        served: Routes = {
            **metrics.pages_of_server(running),
            **why_page(running, cluster_of(settings)),
        }
        pages = _pages(served, wanted, settings)
        async with pages, tenants.watched(running.tasks) if tenants else nullcontext():
            registering = asyncio.create_task(_registered(running, settings))
            stopped = asyncio.create_task(process.wait_for_signal())
            # An id that is taken ends the server; a master that is not reachable yet does not.
            await asyncio.wait([registering, stopped], return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                registering.result()
                # Only now: who waits for this line writes next, and needs a server that is known.
                _say_what_it_offers(running)
                await stopped
            registering.cancel()
            if wanted.drain_s and stopped.done():
                await _drain(running, wanted)
    finally:
        if running is not None:
            await running.close()
        network.close()


def _say_what_it_offers(running: BlockServer) -> None:
    size = ", ".join(f"{tier.name} {human(tier.capacity)}" for tier in running.tiers)
    console.print(
        f"server {running.server}, {size}: {', '.join(running.addresses)}",
        soft_wrap=True,
        markup=False,
    )


async def _drain(running: BlockServer, config: ServerConfig) -> None:
    """Hand over the blocks, with `server.back_in_s` not those in its file; a second signal ends
    it."""
    import asyncio

    from kvpool.client.drains import report_of
    from kvpool.protocols import Peer
    from kvpool.wire.moves import Drain

    order = Drain(begin=True, within_s=config.drain_s, back_in_s=config.back_in_s)
    drain, me = running.extensions.handler(Drain), Peer(running.server)
    draining = asyncio.create_task(drain(me, order, wait=True))
    stopped = asyncio.create_task(process.wait_for_signal())
    with progress(f"draining {running.server}", quiet=False) as show:
        while not draining.done() and not stopped.done():
            await asyncio.wait(
                [draining, stopped], timeout=_SHOW_S, return_when=asyncio.FIRST_COMPLETED
            )
            report = report_of(await drain(me, Drain()))
            show(report.moved_bytes, report.moved_bytes + report.left_bytes)
    for task in (draining, stopped):
        task.cancel()
    await asyncio.wait([draining, stopped])


def _check_authenticated(transports: Mapping[str, Transport]) -> None:
    """Raises ConfigError for a transport that would serve other users."""
    for scheme, transport in transports.items():
        if not transport.authenticated:
            raise ConfigError(
                f"transport {scheme!r} does not ask its peers for a secret: with --local-only "
                "leave it out of --listen"
            )


@asynccontextmanager
async def _master_pages(
    running: Master, settings: Config, more: Routes | None = None
) -> AsyncIterator[None]:
    """The status page, metrics and health of a master, where `--http` says."""
    wanted = settings.master
    if not wanted.http:
        yield
        return
    from kvpool.ops import metrics
    from kvpool.ops.status_page import status_page

    tenants = bool(settings.tenants_file)
    async with status_page(running, wanted.timeout_s / 2, tenants=tenants) as views:
        served = {**metrics.pages_of_master(running), **views}
        async with _pages(served, wanted, settings):
            yield


def _http_is_public(wanted: MasterConfig | ServerConfig, settings: Config) -> bool:
    """The pages may be for other machines. They ask for no secret: a scraper or a browser need not
    have it."""
    return wanted.insecure or bool(settings.secret_file)


def _check_http(section: str, wanted: MasterConfig | ServerConfig, settings: Config) -> None:
    """A wrong address for the pages ends the command before it starts anything."""
    try:
        if wanted.http:
            check_bind(wanted.http, _http_is_public(wanted, settings))
    except ConfigError as error:
        fail(ConfigError(f"--http (setting {section}.http): {error}"))


@asynccontextmanager
async def _pages(
    served: Routes,
    wanted: MasterConfig | ServerConfig,
    settings: Config,
) -> AsyncIterator[None]:
    from kvpool.net.announced import reachable
    from kvpool.net.http_server import pages

    async with pages(served, wanted.http, _http_is_public(wanted, settings)) as serving:
        if serving is not None:
            what = "status page, metrics" if "/" in served else "metrics"
            shown = await reachable(serving.address)
            console.print(f"{what}, health, ready at http://{shown}", markup=False)
        yield


async def _registered(running: BlockServer, settings: Config) -> None:
    """Wait for a master. Raises ConfigError if the id is still taken after a timeout."""
    import asyncio

    from kvpool.ops.unreachable_master import refusal_of

    loop = asyncio.get_running_loop()
    longest_s = settings.master.timeout_s + 2 * settings.server.heartbeat_s
    try:
        await running.wait_until_registered(loop.time() + longest_s)
    except Unavailable as error:
        cluster = cluster_of(settings)
        refused = [(one, await refusal_of(one, cluster)) for one in settings.server.masters]
        hint = "".join(f"; {master}: {why}" for master, why in refused if why is not None)
        stderr.print(
            f"[yellow]no master yet:[/] {escape(str(error) + hint)}; still trying", soft_wrap=True
        )
