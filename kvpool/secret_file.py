"""The files that secrets lie in: a cluster's, a tenant's key, and that of one user on one host."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

import msgspec

from kvpool import logs
from kvpool.errors import ConfigError
from kvpool.private_files import make_private_directory, others_may_read, state_directory
from kvpool.tenant_names import is_tenant_name
from kvpool.types import Cluster

log = logs.get("kvpool.config")

_SECRET_SIZE_MIN: Final = 16
_SECRET_SIZE_MAX: Final = 4096
#: Also of a tenant's key, which has a secret in base 64.
_SECRET_FILE_MAX: Final = 16_384


class TenantKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a tenant's key file, as JSON: all that its clients need to be admitted, and
    nothing with which they could be masters, servers or clients of others (design: tenants)."""

    #: The version of this format, 2. Its name is how such a file is recognized.
    kvpool_tenant_key: int
    cluster: str
    tenant: str
    #: The hash of the masters' certificate.
    fingerprint: bytes
    secret: bytes


#: How a tenant's key file begins.
_TENANT_KEY_START: Final = b'{"kvpool_tenant_key"'


def read_cluster(name: str, secret_file: str) -> Cluster:
    """The cluster of this name, with the secret in the file if there is one.

    The file has the cluster's secret, or is the key of a tenant, which `kvpool tenant-key` makes:
    then the process is one of the tenant's clients. Raises ConfigError, which never contains a
    secret.
    """
    content = _read_secret_file(secret_file) if secret_file else b""
    if not content.startswith(_TENANT_KEY_START):
        return Cluster(name, _checked_secret(secret_file, content) if secret_file else b"")
    damaged = "it is damaged, or of another release: make it anew with `kvpool tenant-key`"
    try:
        key = msgspec.json.decode(content, type=TenantKey)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"tenant's key file {secret_file!r}: {error}: {damaged}") from None
    if key.kvpool_tenant_key != 2 or not is_tenant_name(key.tenant) or len(key.fingerprint) != 32:
        raise ConfigError(f"tenant's key file {secret_file!r}: {damaged}")
    if name not in (Cluster().name, key.cluster):
        raise ConfigError(
            f"tenant's key file {secret_file!r} is for cluster {key.cluster!r}, expected {name!r}"
        )
    secret = _checked_secret(secret_file, key.secret)
    return Cluster(key.cluster, secret, key.tenant, key.fingerprint)


def read_secret(path: str) -> bytes:
    """The content of the file without white space around it; empty if there is no path.

    Raises ConfigError, which never contains the secret.
    """
    if not path:
        return b""
    content = _read_secret_file(path)
    if content.startswith(_TENANT_KEY_START):
        raise ConfigError(
            f"secret file {path!r} is the key of a tenant, expected a secret: only clients take it"
        )
    return _checked_secret(path, content)


def _read_secret_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_SECRET_FILE_MAX).strip()
    except OSError as error:
        raise ConfigError(f"secret file {path!r}: {error.strerror}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"secret file {path!r} may be written by other users, who could replace the secret: "
            f"chmod 600 {path}"
        )
    if path not in _warned and (problem := secret_problem(path)):
        _warned.add(path)
        log.warning(problem)
    return content


#: Secrets of which a line in the log says that others may read them: one is read again and again.
_warned: set[str] = set()


def secret_problem(path: str) -> str:
    """What is wrong with the place of a secret, and what to do; empty if nothing is.

    No reason to refuse it: mounts of containers are readable by all, who are one user there.
    """
    try:
        if others_may_read(Path(path)):
            return f"secret file {path!r} may be read by every user of this host: chmod 600 {path}"
    except OSError:
        pass  # who reads it says so
    return ""


def _checked_secret(path: str, secret: bytes) -> bytes:
    _check_secret_size(f"secret file {path!r}", secret)
    return secret


def _check_secret_size(what: str, secret: bytes) -> None:
    if not _SECRET_SIZE_MIN <= len(secret) <= _SECRET_SIZE_MAX:
        raise ConfigError(
            f"{what} holds {len(secret)} bytes, expected {_SECRET_SIZE_MIN} to "
            f"{_SECRET_SIZE_MAX}: `kvpool secret FILE` makes a good one"
        )


def local_secret_file() -> Path:
    """The file of `local_secret`."""
    return state_directory() / "secret"


def local_secret() -> bytes:
    """The secret of this user on this host, made by the first process that asks for it.

    It lies in `$XDG_STATE_HOME/kvpool`, by default `~/.local/state/kvpool`, where no logout removes
    it. A process that knows it is one of this user, or root, because others cannot enter that
    directory (design: authentication). Raises ConfigError when they can.
    """
    path = local_secret_file()
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        make_private_directory(path.parent)
        if not path.exists():
            # Complete before it has its name: of processes that start together, all read the first.
            draft = path.with_name(f"secret.{secrets.token_hex(8)}")
            draft.touch(mode=0o600, exist_ok=False)
            try:
                draft.write_text(secrets.token_hex(32))
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(draft)
            finally:
                draft.unlink()
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None
    return read_secret(str(path))


def checked_cluster(cluster: Cluster, secret_file: str | Path) -> Cluster:
    """A cluster with the secret in the file if there is one, or as it is. Raises ConfigError for a
    secret that no file could hold."""
    name, secret = cluster.name, cluster.secret
    if not isinstance(secret, bytes):
        raise ConfigError(f"the secret of a cluster is a {type(secret).__name__}, expected bytes")
    if not isinstance(secret_file, str | Path):  # a number would be a file that is open
        raise ConfigError(f"secret_file is {secret_file!r:.40}, expected a path")
    if secret and secret_file:
        raise ConfigError(f"secret_file {secret_file}: cluster {name!r} has a secret already")
    if secret:
        _check_secret_size(f"the secret of cluster {name!r}", secret)
    return read_cluster(name, str(secret_file)) if secret_file else cluster
