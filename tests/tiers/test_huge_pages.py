"""Mappings for huge pages: aligned, touched in advance, and gone after `close`."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.huge_pages import _MADV_COLLAPSE, HUGE_PAGE, HugePageMapping, _libc

MIB = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("kvpool-test-huge-pages")
    try:
        yield fd
    finally:
        os.close(fd)


def resident(address: int, field: str = "Rss") -> int | None:
    """Bytes that the kernel has mapped of the mapping at `address`; None: nothing is mapped."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return None


def collapses() -> bool:
    """Whether this kernel makes the pages of a memfd huge when it is asked (MADV_COLLAPSE)."""
    fd = os.memfd_create("kvpool-test-collapse")
    os.ftruncate(fd, HUGE_PAGE)
    mapping = HugePageMapping(fd, HUGE_PAGE, prefault=False)
    try:
        mapping.memory[0] = 1
        return not _libc.madvise(mapping.address, HUGE_PAGE, _MADV_COLLAPSE)
    finally:
        mapping.close()
        os.close(fd)


def mapped(fd: int) -> bool:
    """Whether this process maps the file, at any address."""
    inode = os.fstat(fd).st_ino
    return any(
        line.split()[4] == str(inode) and "kvpool-test-huge-pages" in line
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


@pytest.mark.parametrize("size", [1, 4096, 2 * MIB, 3 * MIB, 8 * MIB + 4096, 64 * MIB])
def test_a_mapping_begins_at_a_multiple_of_a_huge_page(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    with mmap.mmap(-1, 12288):  # the kernel's next address is not aligned by itself
        mapping = HugePageMapping(fd, size)
        assert mapping.address % HUGE_PAGE == 0
        mapping.close()


@pytest.mark.parametrize("size", [1, 4095, 4096, 2 * MIB - 1, 2 * MIB + 1, 17 * MIB + 4097])
@pytest.mark.parametrize("collapse", [True, False])
def test_any_size_is_mapped_and_touched(fd: int, size: int, collapse: bool) -> None:
    os.ftruncate(fd, size)
    mapping = HugePageMapping(fd, size, collapse=collapse)
    assert len(mapping.memory) == size
    mapping.memory[-1] = 7
    mapping.wait_until_touched()
    assert mapping.memory[-1] == 7
    assert os.pread(fd, 1, size - 1) == b"\7"
    assert os.fstat(fd).st_blocks * 512 >= size  # all of it is allocated
    assert (resident(mapping.address) or 0) >= size
    mapping.close()


@pytest.mark.skipif(not collapses(), reason="this kernel makes no pages huge when it is asked")
def test_pages_become_huge_before_anybody_writes(fd: int) -> None:
    size = 48 << 20
    os.ftruncate(fd, size)
    mapping = HugePageMapping(fd, size, collapse=True)
    mapping.wait_until_touched()
    # Not all of it: a machine may have too few free pages in a row.
    assert (resident(mapping.address, "ShmemPmdMapped") or 0) > size // 2
    mapping.close()


def test_without_prefault_no_page_is_allocated(fd: int) -> None:
    os.ftruncate(fd, 8 * MIB)
    mapping = HugePageMapping(fd, 8 * MIB, prefault=False)
    mapping.wait_until_touched()
    assert os.fstat(fd).st_blocks == 0
    mapping.close()


@pytest.mark.parametrize("turn", range(5))
def test_closing_ends_the_thread_that_touches_and_unmaps(fd: int, turn: int) -> None:
    size = 256 * MIB
    os.ftruncate(fd, size)
    mapping = HugePageMapping(fd, size, collapse=turn % 2 == 0)
    for _ in range(turn):  # a different moment each time
        os.pread(fd, MIB, 0)
    mapping.close()
    assert not mapped(fd)
    assert "prefault" not in {thread.name for thread in threading.enumerate()}
    allocated = os.fstat(fd).st_blocks
    mapping.close()  # idempotent
    assert os.fstat(fd).st_blocks == allocated


def test_a_view_that_is_held_keeps_the_memory_until_it_goes(fd: int) -> None:
    os.ftruncate(fd, 2 * MIB)
    mapping = HugePageMapping(fd, 2 * MIB)
    view = mapping.memory[:4]
    mapping.close()
    view[:] = b"held"
    assert os.pread(fd, 4, 0) == b"held"
    assert mapped(fd)
    del view, mapping
    assert not mapped(fd)


def test_a_child_does_not_inherit_what_it_must_not(fd: int) -> None:
    os.ftruncate(fd, 4096)
    mapping = HugePageMapping(fd, 4096, own=False)
    flags = re.search(
        rf"{mapping.address:x}-.*?VmFlags:([^\n]*)", Path("/proc/self/smaps").read_text(), re.S
    )
    assert flags is not None
    assert "dc" in flags[1].split()
    mapping.close()


def test_a_mapping_becomes_writable_where_it_is(fd: int) -> None:
    os.ftruncate(fd, 3 * MIB)
    mapping = HugePageMapping(fd, 3 * MIB, own=False)
    address, view = mapping.address, mapping.memory[:5]
    with pytest.raises(TypeError):
        view[:] = b"wrong"
    mapping.make_writable(fd)[2 * MIB : 2 * MIB + 4] = b"last"
    mapping.make_writable(fd)[:5] = b"first"
    assert bytes(view) == b"first"
    assert view.readonly
    assert mapping.memory.readonly
    assert os.pread(fd, 4, 2 * MIB) == b"last"
    maps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{address:x}-\S+ (\S+).*?VmFlags:([^\n]*)", maps, re.S)
    assert found is not None
    assert found[1] == "rw-s"
    assert "dc" in found[2].split()  # still not inherited
    view.release()
    mapping.close()
    assert not mapped(fd)


def test_a_mapping_becomes_writable_while_threads_read_it(fd: int) -> None:
    """A thread that found no page for a moment would be killed, and the engine with it."""
    size = 16 * MIB
    os.ftruncate(fd, size)
    os.pwrite(fd, b"\7" * size, 0)
    mapping = HugePageMapping(fd, size, own=False)
    stop = threading.Event()
    wrong: list[int] = []

    def read(first: int) -> None:
        array = np.frombuffer(mapping.memory, np.uint8)[first:]
        while not stop.is_set():
            if not (array[::4096] == 7).all():
                wrong.append(first)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        mapping.make_writable(fd)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    mapping.close()


@pytest.mark.parametrize("why", ["closed", "read-only", "sealed"])
def test_a_mapping_that_cannot_become_writable_stays_as_it_is(why: str) -> None:
    fd = os.memfd_create("kvpool-test-huge-pages", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    os.pwrite(fd, b"kept", 0)
    mapping = HugePageMapping(fd, 4096, own=False)
    try:
        if why == "sealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10)  # F_SEAL_FUTURE_WRITE
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) if why == "read-only" else os.dup(fd)
        if why == "closed":
            os.close(other)
        with pytest.raises(OSError, match=r"Bad file|Permission denied|not permitted"):
            mapping.make_writable(other)
        assert bytes(mapping.memory[:4]) == b"kept"
        if why != "closed":
            os.close(other)
    finally:
        mapping.close()
        os.close(fd)


def test_a_closed_descriptor_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        HugePageMapping(1 << 20, 4096)
