"""What a pool of this one host looks like: how much memory and disk, which paths, and why."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kvpool.addresses import is_everywhere, is_loopback, join
from kvpool.config import Config
from kvpool.errors import ConfigError
from kvpool.guard import of_secrets
from kvpool.memory_limits import Limit
from kvpool.units import human

#: The shares of what is left of memory and disks that blocks get.
_MEMORY_SHARE: Final = 0.5
_DISK_SHARE: Final = 0.8
#: Sizes are whole multiples of it.
_STEP: Final = 1 << 20
_CAPACITY_MIN: Final = 16 << 20
_CLUSTER: Final = Config().cluster


class PlannedPart(NamedTuple):
    """One thing that was chosen, and why."""

    what: str
    chosen: str
    why: str


class DiskSpace(NamedTuple):
    """A directory for blocks: the bytes that are free there, and those that its file has."""

    folder: Path
    free: int
    file_size: int


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The words of the commands, and the choices behind them."""

    master: tuple[str, ...]
    server: tuple[str, ...]
    vllm: str
    choices: tuple[PlannedPart, ...]


def look_at(folder: Path) -> DiskSpace:
    """Raises ConfigError for what is no directory that this user may write."""
    folder = folder.resolve()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--disk {folder}: expected a directory that this user may write")
    space, file = os.statvfs(folder), folder / "kvpool"
    if file.exists() and not file.is_file():
        raise ConfigError(
            f"--disk {folder}: {file} is in the way, expected a file of blocks or nothing: name "
            "another directory, or move it"
        )
    return DiskSpace(
        folder, space.f_bavail * space.f_frsize, file.stat().st_size if file.exists() else 0
    )


def _size_on(disk: DiskSpace) -> int:
    """Raises ConfigError for a disk that is full."""
    size = disk.file_size or int(disk.free * _DISK_SHARE) // _STEP * _STEP
    if not size:
        raise ConfigError(
            f"--disk {disk.folder}: {human(disk.free)} are free there, too few for a file of "
            "blocks: free some, or name another directory"
        )
    return size


def planned(
    memory: Limit,
    disks: Sequence[DiskSpace],
    capacity: int,
    host: str,
    port: int,
    who: Config,
) -> HostPlan:
    """A master and a server, both for who may use them: cluster, secrets and tenants of `who`.

    `capacity` 0: what is good. Raises ConfigError.
    """
    if is_everywhere(host) or not (is_loopback(host) or who.secret_file):
        raise ConfigError(
            f"--address {host}: expected an address of this host, and for other hosts a "
            "--secret-file (`kvpool secret FILE` makes one)"
        )
    choices = []
    if not capacity:
        capacity = int(max(0, memory.free) * _MEMORY_SHARE) // _STEP * _STEP
        if capacity < _CAPACITY_MIN:
            raise ConfigError(
                f"{memory.name} has {human(max(0, memory.free))} left: give --capacity"
            )
        why = f"half of what {memory.name} has left, {human(memory.free)}: engines need some, too"
    elif capacity > memory.free:
        raise ConfigError(
            f"--capacity {_text(capacity)}: expected less than {memory.name} has left, "
            f"{human(max(0, memory.free))}; --disk DIR holds more"
        )
    else:
        why = "as --capacity says"
    choices.append(PlannedPart("memory", human(capacity), why))
    folders = [disk.folder for disk in disks]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(f"--disk {folder} is given twice: name each directory once")
    # Not --capacity, which is refused beside the tiers of a file or of this shell.
    tiers = [f"dram:{_text(capacity)}"]
    for disk in disks:
        size = _size_on(disk)
        tiers.append(f"nvme:{disk.folder / 'kvpool'}:{_text(size)}")
        why = (
            "as its file has" if disk.file_size else f"80 % of the {human(disk.free)} that are free"
        )
        choices.append(PlannedPart("disk", f"{disk.folder / 'kvpool'}, {human(size)}", why))
    if not disks:
        choices.append(PlannedPart("disk", "none", "--disk DIR holds more, and over a restart"))
    alone = is_loopback(host)
    why = "for engines of this host; --address serves others" if alone else "shm on this host"
    choices.append(PlannedPart("paths", f"shm, tcp on {host}", why))
    if not alone:
        why = "it asks for no secret: docs/deploy-ucx.md for a fabric"
        choices.append(PlannedPart("lanes", "without ucx", why))
    choices.append(_secret(who))
    if who.tenants_file:
        why = "each has a share and keys of its own (`kvpool tenant-key`)"
        choices.append(PlannedPart("tenants", who.tenants_file, why))
    address, known = join(host, port), _words_of(who)
    sizes = [word for tier in tiers for word in ("--tier", tier)]
    listen = f"tcp://{join(host, 0)},shm://"
    return HostPlan(
        ("master", "--bind", address, *known),
        ("server", "--masters", address, "--listen", listen, *sizes, *known),
        _vllm(address, who),
        tuple(choices),
    )


def _text(size: int) -> str:
    """A size as an option has it, exactly."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << exponent) == 0:
            return f"{size >> exponent}{unit}"
    return str(size)


def _secret(who: Config) -> PlannedPart:
    if who.local_only:
        why = "only processes of this user may use the pool"
        return PlannedPart("secret", str(of_secrets("local_secret_file")()), why)
    if who.secret_file:
        return PlannedPart("secret", who.secret_file, "who has it may use the pool")
    return PlannedPart("secret", "none", "this host only; --secret-file admits others")


def _words_of(who: Config) -> list[str]:
    """Options that say who may use the pool, for a master or a server."""
    words = ["--cluster", who.cluster]  # always: a file or this shell may say another one
    for option, file in (("--secret-file", who.secret_file), ("--tenants", who.tenants_file)):
        words += [option, file] if file else []
    return [*words, "--local-only"] if who.local_only else words


def _vllm(master: str, who: Config) -> str:
    extra: dict[str, object] = {"masters": [master]}
    if who.cluster != _CLUSTER:
        extra["cluster"] = who.cluster
    if secret := str(of_secrets("local_secret_file")()) if who.local_only else who.secret_file:
        extra["secret_file"] = secret
    settings = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return f"vllm serve MODEL --kv-transfer-config {shlex.quote(json.dumps(settings))}"


def unit(
    what: str, command: Sequence[str], after: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """A unit of systemd that runs this command."""
    words = " ".join(_quoted(word.replace("$", "$$")) for word in command)
    variables = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in (environment or {}).items()
    )
    order = f"After=network-online.target {after}".rstrip()
    return (
        f"[Unit]\nDescription=kvpool {what}\nWants=network-online.target\n{order}\n\n"
        f"[Service]\n{variables}ExecStart={words}\nRestart=always\nRestartSec=1\nTimeoutStopSec=30\n"
        "LimitNOFILE=65536\nLimitMEMLOCK=infinity\nNoNewPrivileges=yes\nUMask=0077\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _quoted(word: str) -> str:
    for letter, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        word = word.replace(letter, escaped)
    return f'"{word}"'
