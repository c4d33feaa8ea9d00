"""The command up: a master and a server with what this host has."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from kvpool.cli.other_users import say_who_may_use_it
from kvpool.cli.shared import (
    ClusterName,
    LocalOnly,
    SecretFile,
    TenantsPath,
    console,
    fail,
    parsed,
    run,
    settings_of,
)
from kvpool.config import Config
from kvpool.errors import ConfigError, KvpoolError, ServerLost
from kvpool.ops import process
from kvpool.units import parse_size

if TYPE_CHECKING:
    from kvpool.ops.host_plan import HostPlan


def up(
    capacity: Annotated[
        str | None,
        typer.Option(help="Memory for blocks, e.g. 64GiB. Default: half of what is left."),
    ] = None,
    disk: Annotated[
        list[Path] | None,
        typer.Option(help="Directory for a file of blocks, e.g. /data. Repeat it for several."),
    ] = None,
    address: Annotated[
        str, typer.Option(help="Where this host is reached, e.g. 10.0.0.1.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the master.")] = 7450,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    tenants: TenantsPath = None,
    local_only: LocalOnly = False,
    systemd: Annotated[
        Path | None, typer.Option(help="Write units into this directory instead of starting.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Only show what would be started or written.")
    ] = False,
) -> None:
    """Run a master and a server with what this host has, and say why they are as they are."""
    from kvpool.memory_limits import MemoryLimits, tightest
    from kvpool.ops.host_plan import look_at, planned

    file = os.environ.get("KVPOOL_CONFIG")  # the processes have this shell's settings, too
    flags = {"cluster": cluster, "secret_file": secret_file, "tenants_file": tenants}
    settings = settings_of(Path(file) if file else None, flags | {"local_only": local_only or None})
    try:
        who = _with_whole_paths(settings)
        disks = [look_at(one) for one in disk or []]
        memory = tightest(MemoryLimits().memory())
        size = _size_of(capacity)
        plan = planned(memory, disks, size, address, port, who)
        _check_address(address)
        if systemd is not None:
            _check_folder(systemd)
        _show(plan)
        if systemd is not None:
            _write_units(plan, systemd, who, dry=dry)
        elif not dry:
            insecure = who.master.insecure and who.server.insecure
            say_who_may_use_it(who, insecure=insecure)
            run(_started(plan))
    except KvpoolError as error:
        fail(error)


def _with_whole_paths(settings: Config) -> Config:
    """The same from every directory. Raises ConfigError for a file that is not there."""
    secret, tenants = (
        str(Path(one).resolve()) if one else ""
        for one in (settings.secret_file, settings.tenants_file)
    )
    if secret and not Path(secret).is_file():
        raise ConfigError(f"secret file {secret!r}: there is none; `kvpool secret FILE` makes it")
    if tenants and not Path(tenants).is_file():
        raise ConfigError(f"tenants file {tenants!r}: there is none")
    return replace(settings, secret_file=secret, tenants_file=tenants)


def _size_of(capacity: str | None) -> int:
    """Bytes; 0 where none are given. Raises ConfigError."""
    if capacity is None:
        return 0
    size = parsed("--capacity", parse_size, capacity)
    if not size:
        raise ConfigError(
            f"--capacity {capacity!r}: expected a size such as 64GiB; without it, it is half of "
            "the memory that is left"
        )
    return size


def _check_address(host: str) -> None:
    """Raises ConfigError for what no program of this host could listen on."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[:1]:
            with socket.socket(family, kind) as trial:
                trial.bind(where)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ConfigError(
            f"--address {host}: {why}; expected an address of this host, as `ip -brief address` "
            "lists them"
        ) from None


def _show(plan: HostPlan) -> None:
    for what, chosen, why in plan.choices:
        console.print(f"{what:<7} {escape(chosen)}[dim]: {escape(why)}[/]", soft_wrap=True)
    for words in (plan.master, plan.server):
        console.print(
            f"  kvpool {shlex.join(words)}", soft_wrap=True, markup=False, highlight=False
        )
    console.print(f"\n  {plan.vllm}\n", soft_wrap=True, markup=False, highlight=False)


_MASTER_UNIT, _SERVER_UNIT = "kvpool-master.service", "kvpool-server.service"


def _check_folder(folder: Path) -> None:
    """Both units or none. Raises ConfigError."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"--systemd {folder}: expected a directory that this user may write, such as "
            "/etc/systemd/system"
        )
    for name in (_MASTER_UNIT, _SERVER_UNIT):
        if (folder / name).exists():
            raise ConfigError(
                f"--systemd: {folder / name} is there already, and is not overwritten"
            )


#: Variables of the environment that name files and directories.
_PATHS = {
    *("KVPOOL_CONFIG", "KVPOOL_SERVER_IDENTITY_FILE", "XDG_STATE_HOME"),
    *("KVPOOL_SECRET_FILE", "KVPOOL_TENANTS_FILE"),
}


def _environment(who: Config) -> dict[str, str]:
    """The settings of this shell, for processes that start in another directory. One that is empty
    stays so: it may be instead of what the file says."""
    return {
        name: str(Path(value).resolve()) if value and name in _PATHS else value
        for name, value in os.environ.items()
        if name.startswith("KVPOOL_") or (name == "XDG_STATE_HOME" and who.local_only)
    }


def _user() -> str:
    """Of this process; its number, which systemd takes as well, if it has no account."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


def _write_units(plan: HostPlan, folder: Path, who: Config, *, dry: bool) -> None:
    """Those that are not there. `dry`: they are shown instead."""
    from kvpool.ops.host_plan import unit

    program, shell = (sys.executable, "-m", "kvpool"), _environment(who)
    units = {
        _MASTER_UNIT: unit("master", (*program, *plan.master), environment=shell),
        _SERVER_UNIT: unit("server", (*program, *plan.server), _MASTER_UNIT, shell),
    }
    if dry:
        for name, text in units.items():
            console.print(f"{folder / name} would have:\n", soft_wrap=True, markup=False)
            console.print(text, soft_wrap=True, markup=False, highlight=False)
        return
    made: list[Path] = []
    try:
        for name, text in units.items():
            with (folder / name).open("x") as file:
                made.append(folder / name)
                file.write(text)
    except OSError as error:
        for path in made:  # they would be in the way of the next attempt
            path.unlink(missing_ok=True)
        raise ConfigError(f"--systemd: {folder / name}: {error.strerror}") from None
    for path in made:
        console.print(f"written: {path}", soft_wrap=True, markup=False)
    user = f"{_user()}, whose secret it is," if who.local_only else ""
    console.print(f"add User={user} to them; then: systemctl daemon-reload, enable --now")


async def _started(plan: HostPlan) -> None:
    """Both processes until a signal. Raises ServerLost when one of them ends."""
    import asyncio

    from kvpool.tools.subprocesses import process_of

    # The settings of this shell are for this pool. Its terminal is for people: no log of each step.
    start = partial(process_of, environment=os.environ)
    quiet = ("--log-level", "warning")
    async with start("kvpool", *plan.master, *quiet) as master:
        console.print(await master.line(), markup=False)
        async with start("kvpool", *plan.server, *quiet) as server:
            console.print(await server.line(), soft_wrap=True, markup=False)
            console.print("\nPress Ctrl-C to stop.")
            waits = [master.ended(), server.ended(), process.wait_for_signal()]
            tasks = [asyncio.ensure_future(one) for one in waits]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            stopped = tasks[2].done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if not stopped:
                name, code = (
                    ("server", server.code) if master.code is None else ("master", master.code)
                )
                raise ServerLost(f"the {name} has ended, with code {code}; its log is above")
