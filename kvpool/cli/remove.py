"""The command that removes whole namespaces: of a name, a model or a tenant."""

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
    console,
    fail,
    open_admin,
    parsed,
    query_settings,
    run,
    stderr,
)
from kvpool.config import cluster_of
from kvpool.errors import ConfigError, UsageError
from kvpool.tenant_names import is_tenant_name, tenant_of, unqualified
from kvpool.types import Namespace
from kvpool.units import human, parse_duration

if TYPE_CHECKING:
    from kvpool.client.namespace_removal import HeldByServers

#: For a look at all servers.
_LOOK_S = 30.0
#: So many other names a message lists.
_NAMES_MAX = 8


def remove(
    namespace: Annotated[
        str | None, typer.Option(help="This namespace, with any number of parts.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Namespaces with the word model=MODEL, as engines name them."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Namespaces of this tenant.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove it; without, only show what would be removed.")
    ] = False,
    deadline: Annotated[str, typer.Option(help="Time for it, e.g. 10m.")] = "10m",
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    transports: TransportNames = None,
    as_json: Json = False,
) -> None:
    """Remove all blocks of a namespace, a model or a tenant, from memory and disks.

    Of several choices all must hold. What is written after the command began stays. Run it again
    after an interruption. Exit code 0 only if no server may have some of it left.
    """
    settings = query_settings(config, masters, cluster, secret_file, local_only, transports)
    try:
        wanted = _Wanted(namespace, model, tenant, cluster_of(settings).tenant)
        within_s = parsed("--deadline", parse_duration, deadline)
    except UsageError as error:
        fail(error)
    removed = [0, 0]

    async def main() -> tuple[HeldByServers, dict[str, str]]:
        async with open_admin(settings) as operator:
            held = await operator.removals.held(wanted, timeout=min(within_s, _LOOK_S))
            if not as_json:
                _show(held, wanted)
            if not yes:
                return held, held.missing
            total = sum(one.bytes for one in held.found)
            with progress("removing", quiet=as_json) as show:

                def report(server: str, blocks: int, size: int) -> None:
                    removed[0] += blocks
                    removed[1] += size
                    show(removed[1], total)

                left = await operator.removals.remove(held.found, timeout=within_s, report=report)
            return held, {**held.missing, **left}

    held, left = run(main())
    if as_json:
        found = [
            {"namespace": name.name, "parts": name.parts, "servers": n, "blocks": b, "bytes": s}
            for name, (n, b, s) in _by_namespace(held).items()
        ]
        done = {"removed_blocks": removed[0], "removed_bytes": removed[1], "left": left}
        print(json.dumps({"found": found, **done}))
    elif yes and held.found:
        console.print(f"removed {removed[0]:,} blocks, {human(removed[1])}", markup=False)
    elif held.found:
        console.print("nothing is removed yet: run it again with --yes")
    for server, why in left.items():
        line = f"server {server} may have some of it: {why}; run this again when it is back"
        stderr.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if yes and left else 0)


class _Wanted:
    """Which namespaces are meant. Raises UsageError for what cannot be any."""

    def __init__(
        self, namespace: str | None, model: str | None, tenant: str | None, own: str
    ) -> None:
        if namespace is None and model is None and tenant is None:
            raise ConfigError("nothing is chosen: give --namespace, --model or --tenant")
        if namespace is not None:
            Namespace(namespace)
        if model is not None and (not model.isprintable() or not model or set(model) & set(" =")):
            raise ConfigError(
                f"--model {model[:40]!r}: expected one word, as it follows model= in a namespace "
                "(`kvpool status` shows them)"
            )
        if tenant is not None and not is_tenant_name(tenant):
            raise ConfigError(
                f"--tenant {tenant[:40]!r}: expected 1 to 32 lower-case letters, digits and "
                "hyphens, no hyphen first"
            )
        if own and tenant not in (None, own):
            raise ConfigError(
                f"--tenant {tenant!r}: this key is tenant {own!r}'s, expected that one; only "
                "operators, with the cluster's secret, remove what is another tenant's"
            )
        self._namespace, self._model = namespace, model
        self._tenant = None if own else tenant  # a tenant sees nothing but its own
        self.others: set[str] = set()  # names that are not meant

    def __call__(self, namespace: Namespace) -> bool:
        name = namespace.name
        owner = tenant_of(name)
        meant = (
            self._namespace in (None, name)
            and self._tenant in (None, owner)
            and (self._model is None or f"model={self._model}" in unqualified(owner, name).split())
        )
        if not meant:
            self.others.add(name)
        return meant


def _by_namespace(held: HeldByServers) -> dict[Namespace, tuple[int, int, int]]:
    """Servers, blocks and bytes of each, by name."""
    found: dict[Namespace, tuple[int, int, int]] = {}
    for one in sorted(held.found, key=lambda one: (one.namespace.name, one.namespace.parts)):
        servers, blocks, size = found.get(one.namespace, (0, 0, 0))
        found[one.namespace] = servers + 1, blocks + one.blocks, size + one.bytes
    return found


def _show(held: HeldByServers, wanted: _Wanted) -> None:
    """What there is, or which other names there are."""
    from rich.table import Table

    from kvpool.ops.folding import Fitted

    if not held.found:
        console.print(f"nothing to remove: {_others(wanted.others)}", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("namespace")
    for name in ("parts", "servers", "blocks", "size"):
        table.add_column(name, justify="right")
    rows = _by_namespace(held)
    for namespace, (servers, blocks, size) in rows.items():
        cells = f"{namespace.parts}", f"{servers}", f"{blocks:,}", human(size)
        table.add_row(escape(namespace.name), *cells)
    if len(rows) > 1:
        blocks, size = sum(row[1] for row in rows.values()), sum(row[2] for row in rows.values())
        table.add_row(f"{len(rows)} namespaces", "", "", f"{blocks:,}", human(size))
    console.print(Fitted(table))


def _others(names: set[str]) -> str:
    shown = sorted(names)[:_NAMES_MAX]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    if not shown:
        return "no server that answers has any namespace"
    return f"no server that answers has such a namespace; there are {', '.join(shown)}{more}"
