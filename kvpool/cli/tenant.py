"""Commands that make what proves who somebody is: the secret of a cluster, the key of a tenant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.shared import ClusterName, ConfigFile, SecretFile, console, fail, settings_of
from kvpool.config import cluster_of
from kvpool.errors import ConfigError, KvpoolError
from kvpool.tenant_names import is_tenant_name
from kvpool.types import Cluster


def secret(
    file: Annotated[Path, typer.Argument(help="File to make, e.g. /etc/kvpool/secret.")],
) -> None:
    """Make a secret, which masters, servers and clients of a cluster share: --secret-file.

    Only this user can read the file (mode 0600). One that is there is never overwritten. Copy it to
    the other hosts; who has it may do everything.
    """
    try:
        _write(file, _new_secret())
    except ConfigError as error:
        fail(error)
    console.print(
        f"secret: {file}; give every process --secret-file {file}", markup=False, soft_wrap=True
    )


def tenant_key(
    name: Annotated[str, typer.Argument(help="Name of the tenant, e.g. acme.")],
    tenant_secret: Annotated[
        Path,
        typer.Option(
            help="File with this tenant's secret, as the tenants file names it, e.g. "
            "/etc/kvpool/acme.secret; made if it is not there."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="File to write, for this tenant's clients, e.g. acme.key.")
    ],
    config: ConfigFile = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
) -> None:
    """Make the key file of a tenant, which its clients take as their secret file.

    It holds the tenant's name and secret and the hash of the masters' certificate: its owner can be
    a client of this tenant, and neither a master nor a server.
    """
    settings = settings_of(config, {"cluster": cluster, "secret_file": secret_file})
    try:
        made = _make(name, tenant_secret, out, cluster_of(settings))
    except KvpoolError as error:
        fail(error)
    if made:
        console.print(f"secret of tenant {name}: {tenant_secret}", markup=False, soft_wrap=True)
    console.print(f"key for clients of tenant {name}: {out}", markup=False, soft_wrap=True)


def _make(name: str, secret_path: Path, out: Path, cluster: Cluster) -> bool:
    """Write the key; True when the tenant's secret was made, too. Raises ConfigError."""
    import msgspec

    from kvpool.net.masters_certificate import masters_fingerprint
    from kvpool.secret_file import TenantKey, read_secret

    if not is_tenant_name(name):
        raise ConfigError(
            f"tenant {name!r}: expected 1 to 32 lower-case letters, digits and hyphens, no hyphen "
            "first"
        )
    if not cluster.secret or cluster.tenant:
        raise ConfigError("give the secret of the cluster: --secret-file")
    made = not secret_path.exists()
    if made:
        _write(secret_path, _new_secret())
    secret = read_secret(str(secret_path))
    if secret == cluster.secret:
        raise ConfigError(
            f"{secret_path} holds the cluster's secret, expected one of the tenant's own"
        )
    key = TenantKey(2, cluster.name, name, masters_fingerprint(cluster), secret)
    _write(out, msgspec.json.encode(key) + b"\n")
    return made


def _new_secret() -> bytes:
    import secrets

    return secrets.token_hex(32).encode() + b"\n"


def _write(path: Path, content: bytes) -> None:
    """A new file that only this user can read, whole or not at all. Raises ConfigError, also if it
    is there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
        except BaseException:
            path.unlink(missing_ok=True)  # a part of it would be in the way of the next attempt
            raise
    except FileExistsError:
        raise ConfigError(f"{path} is there already, and is not overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
