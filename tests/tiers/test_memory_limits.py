"""Every limit of a process is known before its memory is made: beyond one, the kernel ends it."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvpool import ClientConfig, Config
from kvpool.errors import ConfigError
from kvpool.memory_limits import MemoryLimits, tightest
from kvpool.ops import doctor
from kvpool_tiers.dram import Dram
from kvpool_tiers.nvme import opening
from kvpool_transports.ucx import _check_lockable

MIB, GIB = 1 << 20, 1 << 30
OWN = 64 * MIB  # of a cgroup, for the process itself
UNLIMITED_V1 = 9223372036854771712

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
HUGETLB_V1 = "36 31 0:33 {root} /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb\n"


class Machine:
    """A tree of files as the kernel shows them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ulimits: dict[int, int] = {}
        self.set("proc/meminfo", "MemTotal: 99 kB\nMemAvailable:  67108864 kB\n")  # 64 GiB

    def set(self, path: str, content: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")

    def cgroup(self, folder: str, **files: object) -> None:
        for name, content in files.items():
            self.set(f"sys/fs/cgroup/{folder}/{name.replace('__', '.')}", content)

    @property
    def limits(self) -> MemoryLimits:
        return MemoryLimits(
            self.root, lambda which: self.ulimits.get(which, resource.RLIM_INFINITY)
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_any_limit_it_is_the_machine(machine: Machine) -> None:
    assert tightest(machine.limits.memory())[:2] == ("the machine", 64 * GIB)
    assert tightest(machine.limits.huge_pages()).free == 0
    for none in (machine.limits.mapped(), machine.limits.file_size(), machine.limits.locked()):
        assert none == []


def test_the_limit_of_a_unit_lies_in_its_own_cgroup(machine: Machine) -> None:
    """MemoryMax= of systemd: no file at the root of the tree has it."""
    machine.set("proc/self/mountinfo", V2)
    machine.set("proc/self/cgroup", "0::/system.slice/kvpool.service")
    machine.cgroup("system.slice", memory__max="max", memory__current=9 * GIB)
    stat = f"anon 7\nfile {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\nshmem {GIB // 4}"
    unit = "system.slice/kvpool.service"
    machine.cgroup(unit, memory__max=4 * GIB, memory__current=GIB, memory__stat=stat)
    found = tightest(machine.limits.memory())
    assert found.name == "cgroup /system.slice/kvpool.service (memory.max)"
    # What the kernel can drop is no use: pages of files, but not those of memfds.
    assert found.free == 4 * GIB - GIB // 4 - OWN
    assert "MemoryMax=" in found.advice
    machine.cgroup(unit, memory__high=3 * GIB)
    found = tightest(machine.limits.memory())
    assert found[:2] == (f"cgroup /{unit} (memory.high)", 3 * GIB - GIB // 4 - OWN)


def test_a_cgroup_above_counts_too(machine: Machine) -> None:
    machine.set("proc/self/mountinfo", V2)
    machine.set("proc/self/cgroup", "0::/pods/one/server")
    machine.cgroup("pods/one/server", memory__max=8 * GIB, memory__current=0)
    machine.cgroup("pods", memory__max=6 * GIB, memory__current=5 * GIB)
    found = tightest(machine.limits.memory())
    assert (found.name, found.free) == ("cgroup /pods (memory.max)", GIB - OWN)


def test_in_a_container_the_limit_is_at_the_root(machine: Machine) -> None:
    machine.set("proc/self/mountinfo", V2)
    machine.set("proc/self/cgroup", "0::/")
    machine.cgroup(".", memory__max=2 * GIB, memory__current=0)
    assert tightest(machine.limits.memory()).free == 2 * GIB - OWN


@pytest.mark.parametrize("root", ["/", "/docker", "/docker/abc"])
def test_version_1_with_and_without_a_view_of_the_host(machine: Machine, root: str) -> None:
    machine.set("proc/self/mountinfo", V1.format(root=root))
    machine.set("proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/abc\n0::/other")
    machine.cgroup("memory", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=90 * GIB)
    folder = {"/": "memory/docker/abc", "/docker": "memory/abc", "/docker/abc": "memory"}[root]
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    machine.cgroup(
        folder, memory__limit_in_bytes=5 * GIB, memory__usage_in_bytes=3 * GIB, memory__stat=stat
    )
    found = tightest(machine.limits.memory())
    assert found.free == 4 * GIB - OWN
    assert found.name.endswith("(memory.limit_in_bytes)")
    # A cgroup above the container's has less: its folder is not mounted here.
    machine.cgroup(folder, memory__stat=f"{stat}\nhierarchical_memory_limit {4 * GIB}")
    assert tightest(machine.limits.memory()).free == 3 * GIB - OWN


def test_strict_accounting_of_the_kernel(machine: Machine) -> None:
    machine.set(
        "proc/meminfo",
        "MemAvailable: 9437184 kB\nCommitLimit: 4194304 kB\nCommitted_AS: 1048576 kB",
    )
    assert tightest(machine.limits.memory()).free == 9 * GIB
    machine.set("proc/sys/vm/overcommit_memory", 2)
    assert tightest(machine.limits.memory())[:2] == ("vm.overcommit_memory=2", 3 * GIB)


@pytest.mark.parametrize("v2", [False, True])
def test_reserved_huge_pages_that_a_container_may_not_have(machine: Machine, v2: bool) -> None:
    """A page beyond that limit is no error but the end of the process (SIGBUS)."""
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    machine.set(f"{pool}/free_hugepages", 1024)
    machine.set(f"{pool}/resv_hugepages", 24)
    assert tightest(machine.limits.huge_pages()).free == 2000 * MIB
    machine.set("proc/self/mountinfo", V2 if v2 else HUGETLB_V1.format(root="/"))
    machine.set("proc/self/cgroup", "0::/pod" if v2 else "4:hugetlb:/pod")
    names = ("max", "current") if v2 else ("limit_in_bytes", "usage_in_bytes")
    files: Mapping[str, object] = {f"hugetlb__2MB__{name}": 0 for name in names}
    machine.cgroup("pod" if v2 else "hugetlb/pod", **files)
    found = tightest(machine.limits.huge_pages())
    assert found.free == 0
    assert found.name.startswith("cgroup /pod (hugetlb.2MB.")


def test_what_this_process_may_map_lock_and_write(machine: Machine) -> None:
    machine.ulimits = {
        resource.RLIMIT_AS: 4 * GIB,
        resource.RLIMIT_DATA: 3 * GIB,
        resource.RLIMIT_FSIZE: 2 * GIB,
        resource.RLIMIT_MEMLOCK: 8 * MIB,
    }
    pages = GIB // resource.getpagesize()
    machine.set("proc/self/statm", f"{pages} 1 1 1 0 {pages // 2} 0")
    machine.set("proc/self/status", "Name:\tx\nVmLck:\t    1024 kB\nCapEff:\t0000000000000000")
    space, data = machine.limits.mapped()
    # Threads that start later map their stacks and heaps; without room the process is aborted.
    assert space[:2] == ("ulimit -v", 3 * GIB - 256 * MIB)
    assert data[:2] == ("ulimit -d", 3 * GIB - GIB // 2 - 256 * MIB)
    assert tightest(machine.limits.file_size())[:2] == ("ulimit -f", 2 * GIB)
    assert tightest(machine.limits.locked())[:2] == ("ulimit -l", 7 * MIB)
    machine.set("proc/self/status", "VmLck:\t0 kB\nCapEff:\t0000000000004000")  # may lock all
    assert machine.limits.locked() == []


@pytest.mark.parametrize("content", ["", "nonsense", "0:", "0::", "4:memory", "::::\n\0"])
def test_files_that_are_damaged_or_not_there_are_no_limits(machine: Machine, content: str) -> None:
    for name in ("cgroup", "mountinfo", "statm", "status"):
        machine.set(f"proc/self/{name}", content)
    assert tightest(machine.limits.memory()).free == 64 * GIB
    assert tightest([]).free > 1 << 60


def test_a_segment_that_fits_is_made_and_one_that_does_not_names_the_limit(
    machine: Machine,
) -> None:
    machine.set("proc/self/mountinfo", V2)
    machine.set("proc/self/cgroup", "0::/unit")
    machine.cgroup("unit", memory__max=OWN + 4 * MIB, memory__current=0)
    tier = Dram(4 * MIB, limits=machine.limits)
    assert not tier.huge_pages
    tier.close()
    with pytest.raises(ConfigError, match=r"is 5 MiB, cgroup /unit \(memory\.max\) has 4 MiB"):
        Dram(5 * MIB, limits=machine.limits)
    for which, letter in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_FSIZE, "f")):
        machine.ulimits = {which: 2 * MIB}
        with pytest.raises(ConfigError, match=rf"ulimit -{letter} has .*B available.*or raise"):
            Dram(4 * MIB, limits=machine.limits)


def test_too_few_huge_pages_are_named_beside_the_limit_of_memory(machine: Machine) -> None:
    machine.set("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 1)
    machine.set("proc/meminfo", "MemAvailable: 1024 kB")
    with pytest.raises(ConfigError, match=r"reserved huge pages have 2 MiB, too few"):
        Dram(4 * MIB, limits=machine.limits)


def test_a_card_that_may_not_lock_the_segment_is_named(machine: Machine) -> None:
    machine.ulimits = {resource.RLIMIT_MEMLOCK: 8 * MIB}
    _check_lockable(8 * MIB, machine.limits)
    with pytest.raises(ConfigError, match="is 1 B more than ulimit -l has available; RDMA locks"):
        _check_lockable(8 * MIB + 1, machine.limits)


def test_a_file_of_blocks_that_may_not_be_so_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (MIB, MIB))
    path = tmp_path / "blocks"
    with path.open("wb") as file:
        assert opening.grow(file.fileno(), path, MIB) == MIB
        with pytest.raises(ConfigError, match="ulimit -f allows 1 MiB"):
            opening.grow(file.fileno(), path, MIB + 4096)


def test_doctor_names_what_a_server_here_could_have(machine: Machine) -> None:
    over_tcp = Config(client=ClientConfig(transports=["tcp"]))
    found = doctor._limits(over_tcp, machine.limits)
    assert (found.verdict, found.text) == ("ok", "64 GiB (the machine)")
    machine.set("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 512)
    assert "huge pages 1 GiB" in doctor._limits(over_tcp, machine.limits).text
