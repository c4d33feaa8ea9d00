"""What bounds the memory of this process, and how much of it is left: every limit that would end
it later, or fail a call. One that is not set, or cannot be read, is not in the lists.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvpool.huge_pages import HUGE_PAGE

#: Of a cgroup's memory for the process itself: its books grow with its blocks.
_OWN: Final = 64 << 20
_CAP_IPC_LOCK: Final = 14
_UNIT = "MemoryMax= and MemoryHigh= of its unit, or the memory limit of its container"
#: Files of a limit and of what counts for it, in cgroups of version 2 and 1. Above `memory.high`
#: nothing is ended, and each new page waits for seconds: memory of a segment cannot be reclaimed.
_MEMORY = (
    *((f"memory.{limit}", "memory.current") for limit in ("max", "high")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_HUGETLB = tuple(
    (f"hugetlb.2MB.{kind}{most}", f"hugetlb.2MB.{kind}{now}")
    for most, now in (("max", "current"), ("limit_in_bytes", "usage_in_bytes"))
    for kind in ("", "rsvd.")
)


class Limit(NamedTuple):
    """One limit: its name, the bytes that are left below it, and how it is raised."""

    name: str
    free: int
    advice: str


def tightest(limits: Iterable[Limit]) -> Limit:
    """That with the least left; one without end if there is none."""
    return min(limits, key=lambda one: one.free, default=Limit("nothing", 1 << 62, ""))


class MemoryLimits:
    """The limits of this process now. `root` is where /proc and /sys are, and `getrlimit` asks for
    a soft limit: tests give their own."""

    def __init__(
        self,
        root: Path = Path("/"),
        getrlimit: Callable[[int], int] = lambda which: resource.getrlimit(which)[0],
    ) -> None:
        self._root = root
        self._getrlimit = getrlimit

    def memory(self) -> list[Limit]:
        """Of ordinary pages, also those of a memfd: the machine, and cgroups of version 1 and 2,
        from its own upwards (docker, Kubernetes, systemd)."""
        found = []
        machine = self._fields("proc/meminfo", 1024)
        if (available := machine.get("MemAvailable")) is None:
            available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(Limit("the machine", available, ""))
        if self._number("proc/sys/vm/overcommit_memory") == 2 and "CommitLimit" in machine:
            left = machine["CommitLimit"] - machine.get("Committed_AS", 0)
            found.append(Limit("vm.overcommit_memory=2", left, "vm.overcommit_ratio"))
        for folder, name, most, used in self._in_cgroups("memory", _MEMORY):
            stat = self._fields(folder / "memory.stat")
            most = min(most, stat.get("hierarchical_memory_limit", most))  # also above the mount
            prefix = "total_" if "total_inactive_file" in stat else ""
            cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            found.append(Limit(name, most - max(0, used - cache) - _OWN, _UNIT))
        return found

    def huge_pages(self) -> list[Limit]:
        """Of huge pages of 2 MiB that the administrator has reserved, in the same cgroups."""
        pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
        free = self._number(f"{pool}/free_hugepages") or 0
        left = free - (self._number(f"{pool}/resv_hugepages") or 0)
        found = [Limit("reserved huge pages", left * HUGE_PAGE, "vm.nr_hugepages")]
        for _, name, most, used in self._in_cgroups("hugetlb", _HUGETLB):
            found.append(Limit(name, most - used, "hugepages-2Mi of its container"))
        return found

    def mapped(self) -> list[Limit]:
        """Of all that this process maps: a segment, then whole stacks and heaps of threads."""
        pages = (self._text("proc/self/statm") or "").split()
        used = [int(one) * os.sysconf("SC_PAGE_SIZE") for one in pages]
        size, data = (used[0], used[5]) if len(used) > 5 else (0, 0)
        return [
            *self._ulimit("-v", resource.RLIMIT_AS, size + 4 * _OWN),
            *self._ulimit("-d", resource.RLIMIT_DATA, data + 4 * _OWN),
        ]

    def file_size(self) -> list[Limit]:
        """Of one file, which a memfd is, too."""
        return self._ulimit("-f", resource.RLIMIT_FSIZE, 0)

    def locked(self) -> list[Limit]:
        """Of memory that stays where it is, as network cards need it; none for who may lock all."""
        status = self._text("proc/self/status") or ""
        lines = dict(line.partition(":")[::2] for line in status.splitlines())
        if int(lines.get("CapEff", "0").strip() or "0", 16) >> _CAP_IPC_LOCK & 1:
            return []
        used = int((lines.get("VmLck") or "0").split()[0]) << 10
        return self._ulimit("-l", resource.RLIMIT_MEMLOCK, used)

    def _ulimit(self, letter: str, which: int, used: int) -> list[Limit]:
        most = self._getrlimit(which)
        if most == resource.RLIM_INFINITY:
            return []
        advice = f"ulimit {letter}, or the Limit...= of its unit"
        return [Limit(f"ulimit {letter}", most - used, advice)]

    # --- cgroups ------------------------------------------------------------------------------

    def _in_cgroups(
        self, controller: str, files: Iterable[tuple[str, str]]
    ) -> Iterator[tuple[Path, str, int, int]]:
        """Folder, name, limit and use of each cgroup that has one, from this process's upwards."""
        for folder, cgroup in self._cgroups(controller):
            for limit, usage in files:
                most, used = self._number(folder / limit), self._number(folder / usage)
                if most is not None and used is not None:
                    yield folder, f"cgroup {cgroup} ({limit})", most, used

    def _cgroups(self, controller: str) -> Iterator[tuple[Path, str]]:
        """The folders of this process's cgroups of both versions, and their names."""
        own: dict[str, str] = {}
        for line in (self._text("proc/self/cgroup") or "").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controller in controllers.split(",") or (number == "0" and not controllers):
                own["cgroup" if controllers else "cgroup2"] = path
        seen = set()
        for line in (self._text("proc/self/mountinfo") or "").splitlines():
            before, _, after = line.partition(" - ")
            fields, of_kind = before.split(), after.split()
            if len(fields) < 5 or not of_kind or of_kind[0] not in own or of_kind[0] in seen:
                continue
            if (kind := of_kind[0]) == "cgroup" and controller not in of_kind[-1].split(","):
                continue
            seen.add(kind)
            mounted, place = fields[3].rstrip("/"), fields[4]
            # In a container the mount begins at a cgroup somewhere below the host's.
            below = own[kind]
            if (below + "/").startswith(mounted + "/"):
                below = below.removeprefix(mounted)
            names = [name for name in below.split("/") if name not in ("", "..")]
            for depth in range(len(names), -1, -1):
                path = "/".join(names[:depth])
                yield self._root / place.lstrip("/") / path, f"/{path}"

    # --- files --------------------------------------------------------------------------------

    def _text(self, path: str | Path) -> str | None:
        try:
            return (self._root / path).read_text()
        except (OSError, ValueError):
            return None

    def _number(self, path: str | Path) -> int | None:
        """The number in a file; None if there is none, as in `max`."""
        try:
            return int(self._text(path) or "")
        except ValueError:
            return None

    def _fields(self, path: str | Path, unit: int = 1) -> dict[str, int]:
        """The numbers of a file with a name and a number in each line."""
        found = {}
        for line in (self._text(path) or "").splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdecimal():
                found[words[0]] = int(words[1]) * unit
        return found
