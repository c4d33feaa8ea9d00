"""`kvpool doctor`: what settings ask of this host, before a server is started with them."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvpool.addresses import is_loopback, split
from kvpool.config import Config, ServerConfig, parse_tier
from kvpool.ops.finding import Finding
from kvpool.units import human

#: Open files of a server: two for each connection of a full one, and some.
_FILES_MIN: Final = 4096
#: The kind of a filesystem in memory, in /proc/mounts.
_IN_MEMORY: Final = ("tmpfs", "ramfs")
#: Of one that lies on another host.
_REMOTE: Final = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "fuse.", "9p")


def examine_settings(settings: Config) -> Iterator[Finding]:
    """What is wrong with these settings on this host; nothing for what is right."""
    yield from _files(settings.server)
    yield from _times(settings)
    yield from _addresses(settings)
    yield from _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if not settings.client.verify:
        text = "client.verify is off: damaged bytes are not noticed"
        yield Finding("checksums", "warn", text, "turn it on, unless this is a measurement")


def wanted_memory(config: ServerConfig) -> int:
    """Bytes of this host's memory that a server with these settings takes for blocks."""
    if not config.tiers:
        return config.capacity
    return sum(one.capacity for one in map(parse_tier, config.tiers) if one.name == "dram")


def _files(config: ServerConfig) -> Iterator[Finding]:
    """Of nvme tiers."""
    tiers = [one for one in map(parse_tier, config.tiers) if one.name == "nvme"]
    sizes: Counter[Path] = Counter()
    for tier in tiers:
        path = Path(os.path.realpath(tier.place))
        if path in sizes:
            text = f"{path} stands in server.tiers more than once"
            yield Finding("tier files", "fail", text, "give each tier a file of its own")
        sizes[path] += tier.capacity
    needed: Counter[int] = Counter()  # by disk
    for path, size in sizes.items():
        if (problem := _of_file(path)) is not None:
            yield problem
        if not path.parent.is_dir():
            continue
        disk, space = os.stat(path.parent).st_dev, os.statvfs(path.parent)
        needed[disk] += max(0, size - _allocated(path))
        free = space.f_bavail * space.f_frsize
        if needed[disk] > free:
            text = f"{path.parent} has {human(free)} left, and {human(needed[disk])} is wanted"
            yield Finding("disk space", "fail", text, "make room, or give --tier a smaller size")


def _of_file(path: Path) -> Finding | None:
    check, folder = "tier files", path.parent
    if not folder.is_dir():
        return Finding(check, "fail", f"there is no directory {folder}", f"mkdir -p {folder}")
    if path.is_dir():
        return Finding(check, "fail", f"{path} is a directory", f"name a file in it: {path}/kvpool")
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return Finding(check, "fail", f"{folder} is mounted read-only", "mount it for writing")
    place = path if path.exists() else folder
    if not os.access(place, os.R_OK | os.W_OK):
        advice = f"chown it to user {os.getuid()}, or run as its owner"
        return Finding(check, "fail", f"this user may not write {place}", advice)
    kind = _kind_of_mount(folder)
    if kind.startswith(_REMOTE):
        text = f"{folder} lies on another host or in a program ({kind}): slow, or gone at times"
        return Finding(check, "warn", text, "name a file on a disk of this host")
    if kind in _IN_MEMORY:
        text = f"{folder} lies in memory, not on a disk"
        return Finding(check, "warn", text, "name a file on a disk, or use --tier dram:SIZE")
    return None


def _allocated(path: Path) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


def _kind_of_mount(folder: Path) -> str:
    """The filesystem of a directory; empty where /proc does not say."""
    found = (0, "")
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        place, kind = line.split(" ")[1:3]
        if folder.is_relative_to(place):
            found = max(found, (len(place), kind))
    return found[1]


def _times(settings: Config) -> Iterator[Finding]:
    server, client, silence_s = settings.server, settings.client, settings.master.timeout_s
    if 2 * server.heartbeat_s >= silence_s:
        text = f"one lost heartbeat in {silence_s:g} s makes a server count as lost"
        advice = "keep server.heartbeat_s at a third of master.timeout_s"
        yield Finding("times", "warn", text, advice)
    if not client.hedge_s < client.attempt_s < client.timeout_s:
        text = (
            f"client.hedge_s is {client.hedge_s:g} s, attempt_s {client.attempt_s:g} s, timeout_s "
            f"{client.timeout_s:g} s: a silent server costs a call all of its time"
        )
        yield Finding("times", "warn", text, "choose hedge_s < attempt_s < timeout_s")


def _addresses(settings: Config) -> Iterator[Finding]:
    masters = Counter(settings.client.masters)
    if twice := [one for one, count in masters.items() if count > 1]:
        text = f"{', '.join(twice)} stands twice in client.masters"
        yield Finding("masters", "warn", text, "name each master once")
    if settings.secret_file or settings.local_only:
        return
    beyond = []
    for address in (*masters, *settings.server.listen):
        parts = split(address)
        if parts is not None and not is_loopback(parts[1]):
            beyond.append(address)
    if beyond:
        text = f"none, and {beyond[0]} is reachable from other machines"
        advice = (
            "`kvpool secret FILE` makes one; without it whoever reaches the port reads and writes"
        )
        yield Finding("secret", "warn", text, advice)


def _open_files(most: int) -> Iterator[Finding]:
    if 0 <= most < _FILES_MIN:
        text = f"this process may open {most:,}, and a server with many clients needs more"
        yield Finding("open files", "warn", text, "ulimit -n 65536, or LimitNOFILE= of the unit")
