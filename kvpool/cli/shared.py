"""What the commands share: options, settings, output, and how errors become exit codes."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from kvpool.cli import log_lines
from kvpool.cli.settings import load
from kvpool.config import ClientConfig, Config, cluster_of
from kvpool.errors import ConfigError, KvpoolError, MasterLost, Unavailable, UsageError
from kvpool.ops import process

if TYPE_CHECKING:
    from kvpool.client.admin import Admin
    from kvpool.client.pool import Pool
    from kvpool.types import Member


class _Output(Console):
    """stdout. A reader that goes away is an error like others: the base class raises SystemExit
    instead, which asyncio reports as a task's failure."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Notes(Console):
    """stderr. What is told besides ends nothing: a server goes on where its log file is full."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.quiet = True  # else what it could not write comes again with each line

    def on_broken_pipe(self) -> None:
        self.quiet = True


#: Piped output is for grep: one line per row, not wrapped at 80 columns.
# Names are printed as they are: rich would make a picture of `:x:`.
# A caller may have closed stdout: it is None then.
console = _Output(width=None if sys.stdout and sys.stdout.isatty() else 200, emoji=False)
stderr = _Notes(stderr=True, emoji=False)
T = TypeVar("T")

#: Deadline of a command that queries the pool.
QUERY_S = 1.5
#: Instead of figures that masters do not tell a tenant.
FOR_OPERATORS = "what servers hold and do is for operators: this key is a tenant's"
#: Of a pool that is empty.
NO_SERVER = (
    "no server has registered: `kvpool server` starts one, `kvpool doctor` says what is wrong"
)
#: Settings whose options are given once, comma-separated, or several times.
_LISTS = {"client.masters", "server.masters", "server.listen", "server.announce"}
#: So many names of servers a message lists.
_NAMES_MAX = 8
#: With fewer files not even all modules can be read.
_FILES_MIN = 64

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="YAML file with settings, e.g. pool.yaml.", envvar="KVPOOL_CONFIG"
    ),
]
#: What takes several values takes them as options of their own, too: Click would keep the last one.
Masters = Annotated[
    list[str] | None,
    typer.Option(
        "--masters", help="Addresses of the masters, comma-separated, e.g. 127.0.0.1:7450."
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option("--cluster", help="Name of the cluster. Processes with another name are refused."),
]
SecretFile = Annotated[
    str | None, typer.Option(help="File with the cluster's shared secret, e.g. /etc/kvpool/secret.")
]
TenantsPath = Annotated[
    str | None,
    typer.Option(
        "--tenants",
        help="YAML file with the tenants of the pool, e.g. /etc/kvpool/tenants.yaml; needs "
        "--secret-file.",
    ),
]
TransportNames = Annotated[
    list[str] | None,
    typer.Option(
        "--transport",
        help="Transport to use, e.g. tcp or ucx?tls=tcp. Repeat it for several, best first.",
    ),
]
LocalOnly = Annotated[
    bool,
    typer.Option(
        "--local-only", help="Only processes of this user on this host, by a secret of this user."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond loopback without a secret.")
]
DieWithParent = Annotated[bool, typer.Option("--die-with-parent", hidden=True)]
Http = Annotated[
    str | None,
    typer.Option(
        help="Serve /metrics, /health and /ready at this address, e.g. 127.0.0.1:7452; a master "
        "also a status page at /."
    ),
]
LogLevel = Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")]


def settings_of(config: Path | None, flags: dict[str, object]) -> Config:
    """File, environment and flags together. A wrong one ends the command with exit code 2."""
    for name in _LISTS & flags.keys():
        flags[name] = _joined(flags[name])
    try:
        return load(config, os.environ, flags)
    except ConfigError as error:
        fail(error)


def _joined(given: object) -> object:
    """Options that were given several times, each with one value or several, as one text."""
    return ",".join(given) if isinstance(given, list) else given


def query_settings(
    config: Path | None,
    masters: list[str] | None,
    cluster: str | None,
    secret_file: str | None,
    local_only: bool,
    transports: list[str] | None = None,
) -> Config:
    """Settings of a command that queries the pool."""
    flags = query_flags(masters, cluster, secret_file, local_only, transports)
    return settings_of(config, flags)


def query_flags(
    masters: list[str] | None,
    cluster: str | None,
    secret_file: str | None,
    local_only: bool,
    transports: list[str] | None = None,
) -> dict[str, object]:
    """The settings that its options are; None: not given."""
    return {
        "client.masters": masters,
        "client.transports": transports,
        "cluster": cluster,
        "secret_file": secret_file,
        "local_only": local_only or None,
    }


def digests_of(keys: Sequence[str]) -> list[bytes]:
    """Keys as they are typed, or with `-` those on stdin. Raises ConfigError and BadKey."""
    from kvpool.client.checks import check_digests

    if list(keys) == ["-"]:
        try:
            keys = sys.stdin.read().split()
        except UnicodeDecodeError:
            raise ConfigError("keys on stdin: expected text, got something binary") from None
    try:
        digests = [bytes.fromhex(key) for key in keys]
    except ValueError:
        raise ConfigError(f"keys {', '.join(keys)[:200]}: expected hex digits") from None
    check_digests(digests)
    return digests


def no_such_name(name: str, members: Sequence[Member], *, hosts: bool = False) -> str:
    """What to tell of a name that no server has, nor a host if `hosts` may be named, too."""
    names = {one.server for one in members} | {one.host for one in members if hosts}
    here = difflib.get_close_matches(name, names, _NAMES_MAX) + sorted(names)
    shown = list(dict.fromkeys(here))[:_NAMES_MAX]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    listed = f"there are {', '.join(shown)}{more}" if shown else "masters know no server"
    what = "server or host" if hosts else "server"
    return f"no {what} has the name {name!r}: {listed}; `kvpool status` shows all"


async def check_server(pool: Pool, server: str) -> None:
    """Raises ConfigError when no server has this id, and MasterLost."""
    members = await pool.members()
    if all(one.server != server for one in members):
        raise ConfigError(no_such_name(server, members))


async def open_pool(settings: Config) -> Pool:
    """A client with short timeouts."""
    from kvpool.client.opening import connect

    client = settings.client
    short = ClientConfig(
        masters=client.masters,
        transports=client.transports,
        timeout_s=QUERY_S,
        attempt_s=min(client.attempt_s, QUERY_S / 2),
        verify=client.verify,
    )
    return await connect(config=short, cluster=cluster_of(settings))


@asynccontextmanager
async def open_admin(settings: Config) -> AsyncIterator[Admin]:
    """What an operator asks of the pool, as long as the `with` lasts."""
    from kvpool.client.admin import admin

    async with await open_pool(settings) as pool:
        yield admin(pool)


def run(main: Coroutine[Any, Any, T], log_level: str = "warning") -> T:
    """Run to the end. A KvpoolError is printed as one line and ends the command."""
    if log_level not in ("debug", "info", "warning", "error"):
        main.close()
        fail(ConfigError(f"log level {log_level!r}: expected debug, info, warning or error"))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FILES_MIN:
        main.close()
        more = f"it needs {_FILES_MIN} at least: raise the limit, e.g. `ulimit -n 1024`"
        fail(ConfigError(f"this process may open {files} files, and {more}"))
    log_lines.configure(log_level)
    client = logging.getLogger("kvpool.client")
    if log_level == "warning":  # a command that asks once: its error says what its client would log
        client.setLevel(logging.ERROR)
    try:
        return process.run(main)
    except MasterLost as error:  # it says so itself
        fail(error)
    except Unavailable as error:
        fail(type(error)(f"{error}; `kvpool doctor` says what is wrong there"))
    except KvpoolError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        client.setLevel(logging.NOTSET)


def parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """The value of an option. Raises ConfigError with its name."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def fail(error: KvpoolError) -> NoReturn:
    """Print the error; exit code 2 for a usage error, otherwise 1."""
    stderr.quiet = False  # what failed earlier may be over, and this is the last that is told
    stderr.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(2 if isinstance(error, UsageError) else 1)
