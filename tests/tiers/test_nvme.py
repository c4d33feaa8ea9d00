"""The NVMe tier: bad files, bad disks, and what is left after each of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import mmap
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.errors import Closed, ConfigError, Unavailable
from kvpool.protocols.persistent_tier import Record
from kvpool.types import ROOT, Namespace
from kvpool_tiers.nvme import file_disk as disk_module
from kvpool_tiers.nvme.file_disk import FileDisk
from kvpool_tiers.nvme.format import COPIES, GROUP_SIZE, NAMESPACES, PAGE, Geometry
from kvpool_tiers.nvme.tier import Nvme
from tests.conftest import NAMESPACE, eventually, key, value

CAPACITY = 1 << 20
PIECE = disk_module._PIECE_BYTES


class MemoryDisk:
    """A disk that lives as long as the test, and fails where it is told to."""

    mode = "buffered"

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.reads_fail = self.writes_fail = range(0)  # positions
        self.writes_left = 1 << 60  # then the process has died: of the next one `torn` bytes
        self.torn = 0

    @property
    def size(self) -> int:
        return len(self.bytes)

    async def read(self, offset: int, buffer: memoryview) -> None:
        await asyncio.sleep(0)
        if range(
            max(offset, self.reads_fail.start), min(offset + len(buffer), self.reads_fail.stop)
        ):
            raise Unavailable("EIO")
        buffer[:] = self.bytes[offset : offset + len(buffer)]

    async def write(self, offset: int, buffer: memoryview) -> None:
        await asyncio.sleep(0)
        if offset in self.writes_fail:
            raise Unavailable("ENOSPC")
        assert offset + len(buffer) <= len(self.bytes)
        self.writes_left -= 1
        if self.writes_left < 0:
            size = min(self.torn, len(buffer)) if self.writes_left == -1 else 0
            self.bytes[offset : offset + size] = buffer[:size]
            raise Unavailable("the process has died")
        self.bytes[offset : offset + len(buffer)] = buffer

    async def truncate(self, size: int) -> None:
        await asyncio.sleep(0)
        if size in self.writes_fail or self.writes_left <= 0:
            raise Unavailable("EIO")
        del self.bytes[size:]

    def close(self) -> None:
        pass


def record(
    offset: int, size: int = PAGE, generation: int = 1, namespace: Namespace = NAMESPACE
) -> Record:
    """An extent, and what its bytes must be: those of its key."""
    digest = key(f"{offset}/{generation}")
    sum_ = checksum(value(digest, size), block_seed(namespace_seed(namespace, 0), digest))
    return Record(namespace, 0, digest, ROOT, offset, size, sum_, generation)


async def write(tier: Nvme, *records: Record) -> None:
    """As a server does it: the bytes, then what they mean."""
    for one in records:
        await tier.write_from(one.offset, memoryview(value(one.digest, one.size)))
    await tier.persist(records)


async def is_intact(tier: Nvme, one: Record) -> bool:
    """As a server finds out: by the checksum."""
    buffer = bytearray(one.size)
    await tier.read_into(one.offset, memoryview(buffer))
    seed = block_seed(namespace_seed(one.namespace, one.part), one.digest)
    return checksum(buffer, seed) == one.checksum


async def new_disk(capacity: int = CAPACITY) -> tuple[MemoryDisk, Nvme]:
    """One on which a server has just begun."""
    disk = MemoryDisk(Nvme.disk_size(capacity))
    _, tier = await found(disk, capacity)
    return disk, tier


def damage(disk: MemoryDisk, namespace: int) -> None:
    """A bit of each copy of a namespace's page; again: it is mended."""
    for copy in range(COPIES):
        disk.bytes[Geometry.namespace(namespace, copy) + 30] ^= 1


async def found(disk: MemoryDisk, capacity: int = CAPACITY) -> tuple[set[Record], Nvme]:
    """What a server finds that starts with this disk."""
    tier = Nvme(capacity, path="memory", disk=disk)
    kept = await tier.recover()
    assert len(set(kept)) == len(kept)
    return set(kept), tier


@contextlib.contextmanager
def tier_at(path: Path, capacity: int = CAPACITY, **options: bool) -> Iterator[Nvme]:
    tier = Nvme(capacity, path=path, **options)
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


# --- opening ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"x", b"root:x:0:0:root:/root:/bin/bash\n" * 1000, bytes(1 << 20), os.urandom(1 << 20)],
    ids=["short", "text", "zeros", "noise"],
)
def test_a_file_of_somebody_else_is_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"{path}: is not empty and is not the file of an NVMe tier"
    ):
        Nvme(CAPACITY, path=path)
    assert path.read_bytes() == content


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is a directory, expected a file"):
        Nvme(CAPACITY, path=tmp_path)
    with pytest.raises(ConfigError, match="its directory does not exist"):
        Nvme(CAPACITY, path=tmp_path / "nowhere" / "tier")
    with pytest.raises(ConfigError, match="not a regular file"):
        Nvme(CAPACITY, path="/dev/null")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match=r"loop cannot be opened for writing: ELOOP"):
        Nvme(CAPACITY, path=loop)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_may_not_be_written_is_refused(path: Path) -> None:
    path.touch(0o400)
    with pytest.raises(ConfigError, match=r"cannot be opened for writing: EACCES"):
        Nvme(CAPACITY, path=path)


def test_settings_that_make_no_sense_are_refused(path: Path) -> None:
    for alignment in (0, 512, 4095, 5000, 2 << 20):
        with pytest.raises(ConfigError, match="alignment"):
            Nvme(CAPACITY, path=path, alignment=alignment)
    for queue_depth in (0, 1025):
        with pytest.raises(ConfigError, match=rf"queue_depth is {queue_depth}, expected 1 to 1024"):
            Nvme(CAPACITY, path=path, queue_depth=queue_depth)
    with pytest.raises(ConfigError, match="has 4 KiB, capacity 1 MiB needs 11 MiB"):
        Nvme(CAPACITY, path=path, disk=MemoryDisk(4096))
    assert not path.exists()


async def test_a_capacity_beyond_the_disk_says_what_is_free_and_changes_nothing(path: Path) -> None:
    beyond = r"needs \d+ TiB more, its file system has .*iB free"
    with pytest.raises(ConfigError, match=beyond):
        Nvme(1 << 50, path=path)
    assert not path.exists()  # noqa: ASYNC240
    with tier_at(path) as tier:
        await write(tier, record(0))
    with pytest.raises(ConfigError, match=beyond):
        Nvme(1 << 50, path=path)
    with tier_at(path) as tier:
        assert await tier.recover() == [record(0)]


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="cannot have 11 MiB: ENOSPC: No space left on device"):
        Nvme(CAPACITY, path=path)
    assert not path.exists()


async def test_where_no_space_can_be_set_aside_it_may_run_out_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that copies on write."""

    def unable(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    with tier_at(path) as tier:
        assert path.stat().st_size == Nvme.disk_size(CAPACITY)  # noqa: ASYNC240
        await write(tier, one := record(CAPACITY - PAGE))
        assert await is_intact(tier, one)


def test_all_of_the_file_is_set_aside(path: Path) -> None:
    with tier_at(path):
        status = path.stat()
        assert status.st_blocks * 512 >= status.st_size == Nvme.disk_size(CAPACITY)


async def test_one_file_has_one_server(path: Path) -> None:
    with tier_at(path) as tier:
        await write(tier, record(0))
        with pytest.raises(ConfigError, match=f"{path} is in use by process {os.getpid()}"):
            Nvme(CAPACITY, path=path)
    with tier_at(path) as tier:
        assert await tier.recover() == [record(0)]


async def test_another_version_or_alignment_is_named_and_left_alone(path: Path) -> None:
    with tier_at(path) as tier:
        await write(tier, record(0))
    with pytest.raises(ConfigError, match="made with alignment 4096, not 65536"):
        Nvme(CAPACITY, path=path, alignment=65536)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool_tiers.nvme.format.VERSION", 3)
        with pytest.raises(ConfigError, match="version 2 of the format, this is version 3"):
            Nvme(CAPACITY // 2, path=path)
    with tier_at(path) as tier:
        assert await tier.recover() == [record(0)]


async def test_a_damaged_superblock_is_mended(path: Path) -> None:
    with tier_at(path) as tier:
        await write(tier, record(0))
    for places in ([20], [PAGE + 20], [20, PAGE + 20], [0], [PAGE]):
        with path.open("r+b") as file:
            for place in places:
                os.pwrite(file.fileno(), b"\xff", place)
        with tier_at(path) as tier:
            assert await tier.recover() == [record(0)]
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(2 * PAGE), 0)
    with pytest.raises(ConfigError, match="not the file of an NVMe tier"):
        Nvme(CAPACITY, path=path)


async def test_a_file_is_served_to_its_owner_alone(path: Path) -> None:
    one, other = b"a" * 16, b"b" * 16
    with tier_at(path) as tier:  # an older release wrote no owner
        await write(tier, record(0))
    for damaged in ([], [20], [PAGE + 20]):
        with path.open("r+b") as file:
            for place in damaged:
                os.pwrite(file.fileno(), b"\xff", place)
        with tier_at(path) as tier:
            tier.claim(one)
            assert await tier.recover() == [record(0)]
        before = path.read_bytes()  # noqa: ASYNC240
        with tier_at(path) as tier:
            tier.claim(other)
            with pytest.raises(ConfigError, match=r"belongs to another cluster.*remove it"):
                await tier.recover()
        assert path.read_bytes() == before  # noqa: ASYNC240


async def test_a_file_that_was_cut_has_what_is_left(path: Path) -> None:
    first, last = record(0), record(CAPACITY - PAGE)
    with tier_at(path) as tier:
        await write(tier, first, last)
    os.truncate(path, Nvme.disk_size(CAPACITY) - 1)
    with tier_at(path) as tier:
        assert set(await tier.recover()) == {first, last}
        assert await is_intact(tier, first)
        assert not await is_intact(tier, last)
    os.truncate(path, 100)
    with tier_at(path) as tier:
        assert await tier.recover() == []


async def test_it_grows_and_shrinks_with_its_capacity(path: Path) -> None:
    small, large = 5 * PAGE, GROUP_SIZE + 8 * PAGE
    inside, across = record(PAGE, 3 * PAGE), record(GROUP_SIZE - PAGE, 3 * PAGE + 5)
    with tier_at(path, small) as tier:
        await write(tier, inside)
    with tier_at(path, large) as tier:
        assert await tier.recover() == [inside]
        await write(tier, across)
    with tier_at(path, large) as tier:
        assert await tier.recover() == [inside, across]
        assert await is_intact(tier, across)
        assert await is_intact(tier, inside)
    moved = across._replace(offset=4 * PAGE)
    with tier_at(path, GROUP_SIZE) as tier:
        assert await tier.recover() == [inside, moved]
        assert not tier.dropped
        assert os.stat(path).st_size == Nvme.disk_size(GROUP_SIZE)
        await write(tier, record(20 * PAGE, 3 * PAGE))
    with tier_at(path, small) as tier:
        assert await tier.recover() == [inside]
        assert tier.dropped["beyond"] == 2
        assert "2 beyond headers dropped" in tier.status_text
        assert os.stat(path).st_size == Nvme.disk_size(small)
    with tier_at(path, large) as tier:
        assert await tier.recover() == [inside]
        assert not tier.dropped, "headers of what was cut off are not there any more"
        assert await is_intact(tier, inside)


async def larger_disk(chance: random.Random, units: int) -> tuple[MemoryDisk, list[Record]]:
    """A disk of so many units, partly full of extents of one unit to nine, the newest last."""
    disk, tier = await new_disk(units * PAGE)
    records: list[Record] = []
    unit = 0
    while unit < units - 9:
        count = chance.choice((1, 2, 9))
        size = count * PAGE - chance.choice((0, 1, 4000))
        records.append(record(unit * PAGE, size, chance.getrandbits(40)))
        unit += count + chance.choice((0, 0, 1, 12))
    await write(tier, *records)
    return disk, sorted(records, key=lambda one: one.generation)


def blocks(records: Iterable[Record]) -> dict[bytes, Record]:
    return {one.digest: one for one in records}


async def test_a_file_as_large_as_before_is_not_cut(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with tier_at(path) as tier:
        await write(tier, last := record(tier.capacity - PAGE))
    for capacity, lines in ((CAPACITY, 0), (CAPACITY - PAGE, 1), (CAPACITY - PAGE, 1)):
        with tier_at(path, capacity) as tier:
            (found,) = await tier.recover()
            assert found.digest == last.digest
        said = [one for one in caplog.messages if one.startswith("the file is smaller")]
        assert len(said) == lines


@pytest.mark.parametrize("seed", range(12))
async def test_what_lies_behind_a_new_end_is_moved_newest_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the process dies meanwhile, nothing that had room is lost."""
    monkeypatch.setattr("kvpool_tiers.nvme.format.GROUP_SIZE", 64 * PAGE)
    monkeypatch.setattr("kvpool_tiers.nvme.recovery._MOVED_AT_ONCE", 20 * PAGE)
    chance = random.Random(seed)
    disk, records = await larger_disk(chance, 300)
    units = chance.choice((250, 192, 150, 100, 64, 20))
    capacity = units * PAGE
    while chance.random() < 0.7:
        disk.writes_left, disk.torn = chance.randrange(40), chance.choice((0, 512, PAGE))
        with contextlib.suppress(Unavailable):
            await found(disk, capacity)
    disk.writes_left = 1 << 60
    kept, tier = await found(disk, capacity)
    assert disk.size == Nvme.disk_size(capacity)
    assert blocks(kept).keys() <= blocks(records).keys()
    assert len(blocks(kept)) == len(kept), "a block that had moved before is not moved again"
    assert all([await is_intact(tier, one) for one in kept])
    places = sorted((one.offset, one.offset + one.size) for one in kept)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    lost = [one for one in records if one.digest not in blocks(kept)]
    stayed = [one for one in records if one.offset + one.size <= capacity]
    assert not {one.digest for one in stayed} & {one.digest for one in lost}
    # Newest first: whatever is older than a lost one of the same size did not move, either.
    moved = [one for one in records if one not in stayed and one.digest in blocks(kept)]
    for one in moved:
        assert not [
            other for other in lost if other.generation > one.generation and other.size <= one.size
        ]
    again, tier = await found(disk, capacity)
    assert again == kept
    assert not tier.dropped


async def test_a_file_that_is_cut_to_half_keeps_what_has_room(path: Path) -> None:
    """Exactly: the last free place is used, too."""
    half = 128 * PAGE
    records = [record(n * PAGE, PAGE, 1 + n) for n in range(0, 256, 2)]
    with tier_at(path, 2 * half) as tier:
        await write(tier, *records)
    with tier_at(path, half) as tier:
        kept = await tier.recover()
        assert blocks(kept).keys() == blocks(records).keys()
        assert not tier.dropped
        assert all([await is_intact(tier, one) for one in kept])


@pytest.mark.usefixtures("three_namespaces")
async def test_the_number_of_a_namespace_that_was_cut_off_is_free_again(path: Path) -> None:
    names = [Namespace(f"model/{n}") for n in range(4)]
    with tier_at(path) as tier:
        await write(tier, *(record(n * PAGE, PAGE, 9, names[0]) for n in range(128)))
        await write(tier, record(CAPACITY - PAGE, PAGE, 1, names[1]))
        await write(tier, record(CAPACITY - 2 * PAGE, PAGE, 2, names[2]))
    with tier_at(path, CAPACITY // 2) as tier:
        assert len(await tier.recover()) == 128
        await tier.erase([0])
        await write(tier, record(0, PAGE, 10, names[3]))
        assert not tier.not_persisted


async def test_moving_ends_after_a_minute(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_tiers.nvme.recovery._MOVE_MAX_S", 0.0)
    with tier_at(path) as tier:
        await write(tier, record(0), record(CAPACITY - PAGE))
    with tier_at(path, CAPACITY // 2) as tier:
        assert await tier.recover() == [record(0)]
        assert tier.dropped == {"beyond": 1}


async def test_a_place_that_cannot_be_read_costs_its_own_extent() -> None:
    disk, tier = await new_disk()
    last = [record(CAPACITY - n * PAGE, PAGE, n) for n in range(1, 9)]
    await write(tier, *last)
    (bad,) = Geometry(CAPACITY, PAGE).pieces(last[3].offset, 1)
    disk.reads_fail = range(bad.position, bad.position + 1)
    kept, tier = await found(disk, CAPACITY // 2)
    assert blocks(kept).keys() == blocks(last).keys() - {last[3].digest}
    assert tier.dropped == {"beyond": 1}


# --- bytes -------------------------------------------------------------------------------------


async def test_without_a_thread_calls_fail_and_later_ones_try_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have so many threads (`ulimit -u`, a container's limit of processes)."""
    tier, data = Nvme(CAPACITY, path), memoryview(bytearray(b"x" * 4096))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_thread)
            async with asyncio.timeout(5):
                for _ in range(2):
                    with pytest.raises(
                        Unavailable, match="can't start new thread; see `ulimit -u`"
                    ):
                        await tier.write_from(0, data)
        await tier.write_from(0, data)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_thread)
            await asyncio.gather(*(tier.write_from(n * 4096, data) for n in range(8)))
    finally:
        tier.close()


def refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_memory_of_any_alignment_will_do(path: Path) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * CAPACITY))
    chance = random.Random(7)
    with tier_at(path) as tier:
        for _ in range(200):
            start = chance.choice((0, 1, 512, PAGE, 5000))
            size = chance.choice((1, 511, PAGE - 1, PAGE, PAGE + 1, 65536, 70_000, 3 * PAGE))
            one = record(chance.randrange(CAPACITY // PAGE - 18) * PAGE, size, start + 1)
            source = memory[start : start + size]
            source[:] = value(one.digest, size)
            await tier.write_from(one.offset, source)
            target = memory[2 * CAPACITY + start :][:size]
            await tier.read_into(one.offset, target)
            assert target == source


async def test_where_the_page_cache_cannot_be_passed_by_it_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_open = os.open

    def refuse(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os_open(name, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    one = record(0, 12345)
    with tier_at(path) as tier:
        assert tier.status_text == f"{path}, buffered"
        await write(tier, one)
        assert await is_intact(tier, one)
    monkeypatch.undo()
    with tier_at(path, direct=False) as tier:
        assert tier.status_text == f"{path}, buffered"
        assert await tier.recover() == [one]


async def test_its_status_counts_what_was_mended() -> None:
    disk, records = await file_of_namespaces(2, 6)
    _, tier = await found(disk)
    assert tier.status_text == "memory, buffered"
    for page in pages_in_use(disk)[COPIES : COPIES + 2]:  # the first copy of each namespace
        disk.bytes[page + 8] ^= 1
    for text in ("memory, buffered, 2 pages mended", "memory, buffered"):
        left, tier = await found(disk)
        assert left == records
        assert tier.status_text == text


@pytest.mark.parametrize("pages", [1, 3])
async def test_headers_of_neighbours_are_written_at_once(pages: int) -> None:
    """A batch of small blocks costs one write of headers, and not one for each block."""
    disk, tier = await new_disk()
    await write(tier, first := record(CAPACITY - PAGE))  # names its namespace, too
    near = [record(number * pages * PAGE, pages * PAGE - 7) for number in range(1, 21)]
    far = record(40 * pages * PAGE)
    for one in (*near, far):
        await tier.write_from(one.offset, memoryview(value(one.digest, one.size)))
    disk.writes_left = 2  # a third one would fail
    await tier.persist([far, *reversed(near)])
    assert disk.writes_left == 0
    disk.writes_left = 1 << 60
    assert (await found(disk))[0] == {first, far, *near}


async def test_a_buffer_that_is_none_fails_its_own_call_only(path: Path) -> None:
    with tier_at(path) as tier:
        await write(tier, record(0))
        buffer = bytearray(PAGE)
        outcomes = await asyncio.gather(
            tier.read_into(0, memoryview(bytes(PAGE))),
            tier.read_into(0, memoryview(bytearray(2 * PAGE))[::2]),
            tier.read_into(0, memoryview(buffer)),
            return_exceptions=True,
        )
        assert [isinstance(outcome, Exception) for outcome in outcomes] == [True, True, False]
        assert buffer == value(record(0).digest, PAGE)


# --- disks that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_an_error_of_the_disk_is_told_and_passes(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    name = errno.errorcode[number]
    with tier_at(path) as tier:
        await write(tier, record(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            patch.setattr(os, "preadv", fail)
            for call in (
                tier.read_into(0, memoryview(bytearray(PAGE))),
                tier.write_from(PAGE, memoryview(bytes(PAGE))),
                tier.persist([record(PAGE)]),
                tier.erase([0]),
                tier.recover(),
            ):
                with pytest.raises(Unavailable, match=f"{path}: {name}: {os.strerror(number)}"):
                    await call
        await write(tier, record(2 * PAGE))
        assert await is_intact(tier, record(0))
    with tier_at(path) as tier:
        assert await tier.recover() == [record(0), record(2 * PAGE)]


async def test_a_file_cut_under_it_is_no_end_of_the_process(path: Path) -> None:
    with tier_at(path) as tier:
        await write(tier, record(0), record(CAPACITY - PAGE))
        os.truncate(path, Nvme.disk_size(CAPACITY) - PAGE // 2)
        for offset in (CAPACITY - PAGE, CAPACITY - 2 * PAGE):
            buffer = memoryview(bytearray(CAPACITY - offset))
            with pytest.raises(Unavailable, match="the file ends at"):
                await tier.read_into(offset, buffer)
        assert await is_intact(tier, record(0))


async def test_headers_that_cannot_be_read_are_lost_and_the_others_found() -> None:
    capacity = 3 * GROUP_SIZE
    disk, tier = await new_disk(capacity)
    records = [record(number * GROUP_SIZE) for number in range(3)]
    await tier.persist(records)
    bad = Geometry(capacity, PAGE).header(GROUP_SIZE)
    disk.reads_fail = range(bad, bad + 1)
    kept, tier = await found(disk, capacity)
    assert kept == {records[0], records[2]}
    assert tier.dropped["unreadable"] == 1
    disk.reads_fail = range(disk.size)
    with pytest.raises(Unavailable, match="EIO"):
        await found(disk, capacity)


class Stuck(threading.Event):
    """Reads do not come back before it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = threading.Event()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    freed, read = Stuck(), disk_module._read

    def wait(fd: int, offset: int, buffer: memoryview) -> int:
        freed.reading.set()
        freed.wait()
        return read(fd, offset, buffer)

    monkeypatch.setattr(disk_module, "_read", wait)
    yield freed
    freed.set()


async def test_on_a_stuck_disk_only_calls_that_have_not_begun_can_be_cancelled(
    path: Path, stuck: Stuck
) -> None:
    disk = FileDisk(path, 64 * PAGE, queue_depth=1)
    buffers = [bytearray(PAGE) for _ in range(40)]
    calls = [asyncio.ensure_future(disk.read(0, memoryview(buffer))) for buffer in buffers]
    assert await asyncio.to_thread(stuck.reading.wait, 30)
    for _ in range(3):
        for call in calls:
            call.cancel()
        await asyncio.sleep(0.01)
    await eventually(lambda: [call.done() for call in calls] == [False] + [True] * 39)
    stuck.set()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    await disk.write(PAGE, memoryview(bytes(PAGE)))
    disk.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [PIECE, 3 * PIECE + PAGE, 3 * PIECE + 17])
async def test_a_large_call_is_one_call_in_several_pieces(
    path: Path, size: int, direct: bool
) -> None:
    disk = FileDisk(path, 16 * PIECE, queue_depth=3, direct=direct)
    values = [os.urandom(size) for _ in range(3)]
    places = [0, 5 * PIECE, 10 * PIECE]
    for offset, bytes_ in zip(places, values, strict=True):
        await disk.write(offset, memoryview(bytes_))
    buffers = [bytearray(size) for _ in places]
    await asyncio.gather(
        *(disk.read(o, memoryview(b)) for o, b in zip(places, buffers, strict=True))
    )
    assert buffers == values
    disk.close()
    assert path.read_bytes()[places[1] : places[1] + size] == values[1]  # noqa: ASYNC240


async def test_a_thread_that_waits_keeps_no_buffer_alive(path: Path) -> None:
    """Memory of a caller, of which there may be gigabytes, ends with the call."""

    class Buffer(bytearray):
        pass

    disk = FileDisk(path, 8 * PIECE, queue_depth=2)
    buffer = Buffer(2 * PIECE)
    gone = weakref.ref(buffer)
    await disk.write(0, memoryview(buffer))
    del buffer
    await eventually(lambda: gone() is None)  # the thread may be at its last line
    disk.close()


async def test_a_call_of_which_a_piece_fails_has_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = disk_module._read

    def fail(fd: int, offset: int, buffer: memoryview) -> int:
        if offset == 2 * PIECE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, offset, buffer)

    disk = FileDisk(path, 8 * PIECE)
    monkeypatch.setattr(disk_module, "_read", fail)
    outcomes = await asyncio.gather(
        disk.read(0, memoryview(bytearray(4 * PIECE))),
        disk.read(4 * PIECE, memoryview(bytearray(4 * PIECE))),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], Unavailable)
    assert outcomes[1] is None
    disk.close()


async def test_a_large_call_that_is_cancelled_ends_with_its_last_piece(
    path: Path, stuck: Stuck
) -> None:
    disk = FileDisk(path, 8 * PIECE, queue_depth=2)
    buffer = bytearray(8 * PIECE)
    call = asyncio.ensure_future(disk.read(0, memoryview(buffer)))
    assert await asyncio.to_thread(stuck.reading.wait, 30)
    call.cancel()
    disk.close()
    await asyncio.sleep(0.01)
    assert not call.done()
    stuck.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    buffer[:] = bytes([1]) * len(buffer)
    await asyncio.sleep(0.02)
    assert buffer.count(1) == len(buffer)  # nobody reads into it any more


async def test_closing_does_not_wait_for_a_stuck_disk(path: Path, stuck: Stuck) -> None:
    before = len(os.listdir("/proc/self/fd"))
    disk = FileDisk(path, 64 * PAGE, queue_depth=1)
    buffers = [bytearray(PAGE) for _ in range(40)]
    calls = [asyncio.ensure_future(disk.read(0, memoryview(buffer))) for buffer in buffers]
    assert await asyncio.to_thread(stuck.reading.wait, 30)
    disk.close()
    late = asyncio.ensure_future(disk.read(0, memoryview(bytearray(PAGE))))
    await eventually(lambda: [call.done() for call in calls] == [False] + [True] * 39)
    assert isinstance(calls[1].exception(), Closed)
    assert isinstance(late.exception(), Closed)
    stuck.set()
    await calls[0]
    await eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.mark.parametrize("turns", range(6))
def test_a_loop_that_ends_in_the_middle_leaves_nothing_open(path: Path, turns: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    disk = FileDisk(path, 64 * PAGE)

    async def leave() -> None:
        for _ in range(40):
            asyncio.ensure_future(disk.write(0, memoryview(bytes(PAGE))))
        for _ in range(turns):
            await asyncio.sleep(0)

    asyncio.run(leave())
    buffer = bytearray(PAGE)
    asyncio.run(disk.read(0, memoryview(buffer)))
    disk.close()
    loops_own = 3
    asyncio.run(eventually(lambda: len(os.listdir("/proc/self/fd")) == before + loops_own))


def test_a_stuck_disk_does_not_keep_a_process_from_exiting(path: Path) -> None:
    script = """
import asyncio, sys, threading
from kvpool_tiers.nvme import file_disk as disk
disk._read = lambda *_: threading.Event().wait()
async def main():
    tier = disk.FileDisk(sys.argv[1], 65536)
    task = asyncio.ensure_future(tier.read(0, memoryview(bytearray(4096))))
    await asyncio.sleep(0.1)
    tier.close()
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=30)


# --- what the bytes mean -----------------------------------------------------------------------


async def test_no_tenant_takes_the_table_of_namespaces_from_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tiny namespaces of one leave room for what others keep over a restart."""
    capacity = (NAMESPACES + 620) * PAGE
    mine = [
        record((NAMESPACES + n) * PAGE, 100, 5000 + n, Namespace(f"@globex/{n // 200}"))
        for n in range(600)
    ]
    tiny = [record(n * PAGE, 100, n + 1, Namespace(f"@acme/{n}")) for n in range(NAMESPACES)]
    with tier_at(path, capacity) as tier:
        await tier.persist(tiny)
        left_out = tier.not_persisted
        assert 500 < left_out < 520
        await tier.persist(mine)
        assert all(tier.keeps(one.offset) for one in mine)
        assert sum(tier.keeps(one.offset) for one in tiny) == NAMESPACES - left_out
        assert not tier.keeps(tiny[-1].offset)
        assert tier.not_persisted == left_out
        lines = [one for one in caplog.messages if "not kept for a restart" in one]
        assert len(lines) == 1
        assert "acme" in lines[0]
        await tier.erase([one.offset for one in tiny[:10]])
        await tier.persist(tiny[-6:])
        assert tier.keeps(tiny[-1].offset), "as much as it gave back"
    with tier_at(path, capacity) as tier:
        found = await tier.recover()
        assert {one.namespace for one in mine} < {one.namespace for one in found}
        assert tier.not_persisted == 0
        await tier.persist(tiny)
        again = sum(tier.keeps(one.offset) for one in tiny)
        assert again <= NAMESPACES // 2 + 1, "a restart gives nothing more"
        # Names that the table has still, without extents, count as others do.
        await tier.erase([one.offset for one in tiny])
        await tier.persist(mine)
        await tier.persist([one._replace(generation=one.generation + 9000) for one in tiny])
        assert sum(tier.keeps(one.offset) for one in tiny) <= NAMESPACES // 2 + 1


async def test_a_file_in_which_one_tenant_has_all_namespaces_is_read_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an older release may be; others have room when it has given back enough."""
    capacity = (NAMESPACES + 20) * PAGE
    tiny = [record(n * PAGE, 100, n + 1, Namespace(f"@acme/{n}")) for n in range(NAMESPACES)]
    with monkeypatch.context() as older:
        older.setattr("kvpool_tiers.nvme.namespaces.tenant_of", lambda name: "")
        with tier_at(path, capacity) as tier:
            await tier.persist(tiny)
            assert tier.not_persisted == 0
    mine = record((NAMESPACES + 1) * PAGE, 100, 5000, Namespace("@globex/m"))
    with tier_at(path, capacity) as tier:
        assert set(await tier.recover()) == set(tiny)
        await tier.persist([mine])
        assert not tier.keeps(mine.offset)
        await tier.erase([0])
        await tier.persist([tiny[0]])
        assert not tier.keeps(0), "it has more than its share"
        await tier.persist([mine])
        assert tier.keeps(mine.offset)


async def test_more_namespaces_than_fit_are_served_and_not_remembered(path: Path) -> None:
    capacity = (NAMESPACES + 10) * PAGE
    with tier_at(path, capacity) as tier:
        records = [
            record(n * PAGE, 100, n + 1, Namespace(f"model/{n}")) for n in range(NAMESPACES + 3)
        ]
        await tier.persist(records)
        assert tier.not_persisted == 3
        await tier.erase([records[5].offset])
        await tier.persist(records[-1:])
        await tier.persist(records[-2:-1])
        assert tier.not_persisted == 4
    wanted = {*records[:5], *records[6:NAMESPACES], records[-1]}
    with tier_at(path, capacity) as tier:
        assert set(await tier.recover()) == wanted
        await tier.persist([record(0, 100, 5000, Namespace("a new one"))])
        await tier.persist(records[-2:-1])
        assert tier.not_persisted == 2
        await tier.erase([0, PAGE])
        await tier.persist(records[-2:-1])
    with tier_at(path, capacity) as tier:
        assert set(await tier.recover()) == wanted - set(records[:2]) | {records[-2]}


async def test_a_namespace_that_is_being_replaced_is_not_referred_to() -> None:
    capacity = (NAMESPACES + 2) * PAGE
    disk, tier = await new_disk(capacity)
    records = [record(n * PAGE, 100, n + 1, Namespace(f"m/{n}")) for n in range(NAMESPACES + 1)]
    await tier.persist(records[:NAMESPACES])
    await tier.erase([0])
    await asyncio.gather(tier.persist(records[-1:]), tier.persist(records[:1]))
    assert tier.not_persisted == 1
    kept, tier = await found(disk, capacity)
    assert kept == set(records[1:])
    assert not tier.dropped["unnamed"]


async def test_a_header_of_a_namespace_that_was_replaced_is_none() -> None:
    (one, first), (other, second) = await new_disk(), await new_disk()
    await first.persist([record(0, namespace=Namespace("one"))])
    await second.persist([record(0, namespace=Namespace("other"))])
    for copy in range(COPIES):
        page = slice(Geometry.namespace(0, copy), Geometry.namespace(0, copy) + PAGE)
        other.bytes[page] = one.bytes[page]
    kept, tier = await found(other)
    assert kept == set()
    assert tier.dropped["replaced"] == 1


async def file_of_namespaces(count: int, blocks: int) -> tuple[MemoryDisk, set[Record]]:
    """A disk with so many blocks of so many namespaces."""
    disk, tier = await new_disk()
    names = [Namespace(f"model/{n}") for n in range(count)]
    records = {record(n * PAGE, PAGE, n + 1, names[n % count]) for n in range(blocks)}
    await write(tier, *records)
    return disk, records


def pages_in_use(disk: MemoryDisk) -> list[int]:
    """Of the file's fixed parts: both superblocks, and both copies of each namespace."""
    head = range(0, Geometry(CAPACITY, PAGE).header(0), PAGE)
    return [position for position in head if any(disk.bytes[position : position + PAGE])]


async def test_no_flipped_bit_of_the_fixed_parts_costs_a_block() -> None:
    """Nor does a page that is gone as a whole; and the next start finds both copies intact."""
    disk, records = await file_of_namespaces(3, 60)
    image, chance = bytes(disk.bytes), random.Random(8)
    pages = pages_in_use(disk)
    assert len(pages) == COPIES * (1 + 3)
    for page in pages:
        ends = [0, 7, 8, 12, 20, 24, 26, PAGE - 1]  # of fields
        for place in (*ends, *chance.sample(range(PAGE), 8)):
            disk.bytes[page + place] ^= 1 << chance.randrange(8)
            assert (await found(disk))[0] == records, (page, place)
            assert disk.bytes == image, "the copy is mended"
        disk.bytes[page : page + PAGE] = chance.choice([bytes(PAGE), chance.randbytes(PAGE)])
        assert (await found(disk))[0] == records, page
        assert disk.bytes == image


async def test_a_page_that_cannot_be_read_costs_no_block() -> None:
    disk, records = await file_of_namespaces(3, 60)
    for page in pages_in_use(disk):
        disk.reads_fail = range(page, page + PAGE)
        assert (await found(disk))[0] == records, page
    disk.reads_fail = range(Geometry.namespace(0, 0), Geometry.namespace(0, 1))  # all of one copy
    assert (await found(disk))[0] == records
    disk.reads_fail = range(Geometry.namespace(0, 0), Geometry(CAPACITY, PAGE).header(0))
    with pytest.raises(Unavailable):
        await found(disk)


async def test_a_page_of_another_number_is_not_believed() -> None:
    """A disk that writes to a wrong place leaves pages that are intact and newer."""
    disk, records = await file_of_namespaces(3, 60)
    image = bytes(disk.bytes)
    to, source = Geometry.namespace(0, 0), Geometry.namespace(2, 0)
    disk.bytes[to : to + PAGE] = disk.bytes[source : source + PAGE]
    assert (await found(disk))[0] == records
    assert disk.bytes == image


async def test_blocks_of_a_lost_namespace_come_back_when_it_is_mended() -> None:
    disk, records = await file_of_namespaces(3, 60)
    image = bytes(disk.bytes)
    others = {one for one in records if one.namespace.name != "model/0"}
    damage(disk, 0)
    for _ in range(2):  # each start says it again
        rest, tier = await found(disk)
        assert rest == others
        assert dict(tier.dropped) == {"unnamed": 20}
        assert "20 unnamed headers dropped" in tier.status_text
    disk.bytes[Geometry.namespace(0, 1) + 30] ^= 1  # one of the two is mended, by whom it may be
    rest, tier = await found(disk)
    assert rest == records
    assert disk.bytes == image
    assert not tier.dropped


async def test_what_moves_takes_no_place_of_a_lost_namespace() -> None:
    disk, tier = await new_disk()
    lost = record(0, PAGE, 1, Namespace("model/0"))
    await write(tier, lost)
    await write(tier, record(CAPACITY - PAGE, PAGE, 2, Namespace("model/1")))
    damage(disk, 0)
    (moved,), _ = await found(disk, CAPACITY - PAGE)
    assert moved.offset == PAGE
    disk.bytes[Geometry.namespace(0, 1) + 30] ^= 1
    mended, tier = await found(disk, CAPACITY - PAGE)
    assert mended == {lost, moved}
    assert await is_intact(tier, lost)


async def test_a_lost_namespace_is_mended_by_the_next_block_of_it() -> None:
    disk, records = await file_of_namespaces(3, 60)
    damage(disk, 1)
    rest, tier = await found(disk)
    assert len(rest) == 40
    fresh = record(100 * PAGE, PAGE, 500, Namespace("model/1"))
    other = record(101 * PAGE, PAGE, 501, Namespace("model/9"))
    await write(tier, other, fresh)
    # Of the blocks of the lost namespace, those go whose places are used, wherever they begin.
    lost = sorted(records - rest)
    over = record(lost[3].offset - PAGE, 3 * PAGE, 502, Namespace("model/2"))
    under = [one for one in records if over.offset <= one.offset < over.offset + over.size]
    await tier.erase([one.offset for one in under if one not in lost])
    await write(tier, over)
    assert (await found(disk))[0] == records - set(under) | {fresh, other, over}
    await tier.erase([one.offset for one in (over, *lost)])
    assert (await found(disk))[0] == rest - set(under) | {fresh, other}


@pytest.fixture
def three_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table so small that numbers are used again."""
    for module in ("format", "namespaces"):
        monkeypatch.setattr(f"kvpool_tiers.nvme.{module}.NAMESPACES", 3)
    monkeypatch.setattr("kvpool_tiers.nvme.format._HEAD_SIZE", COPIES * (1 + 3) * PAGE)


@pytest.mark.usefixtures("three_namespaces")
async def test_the_number_of_a_lost_namespace_is_used_again_without_its_blocks() -> None:
    disk, records = await file_of_namespaces(3, 60)
    damage(disk, 0)
    rest, tier = await found(disk)
    lost = sorted(records - rest)
    fresh = record(100 * PAGE, PAGE, 500, Namespace("new"))
    await write(tier, fresh)
    assert tier.not_persisted == 1  # all three numbers have blocks
    for one in lost:
        await tier.write_from(one.offset, memoryview(bytes(one.size)))
    await write(tier, fresh)
    assert tier.not_persisted == 1
    await write(tier, record(101 * PAGE, PAGE, 501, Namespace("model/0")))  # it has no number now
    assert tier.not_persisted == 2
    kept, tier = await found(disk)
    assert kept == rest | {fresh}
    assert not tier.dropped


@pytest.mark.usefixtures("three_namespaces")
@pytest.mark.parametrize("copy", range(COPIES))
async def test_a_copy_whose_write_was_lost_is_the_older_one(copy: int) -> None:
    """Also if the other one was written by a later process."""
    disk, records = await file_of_namespaces(3, 60)
    others = {one for one in records if one.namespace.name != "model/0"}
    _, tier = await found(disk)
    await tier.erase([one.offset for one in records - others])
    page = slice(Geometry.namespace(0, copy), Geometry.namespace(0, copy) + PAGE)
    before = disk.bytes[page]
    fresh = record(100 * PAGE, PAGE, 500, Namespace("new"))
    await write(tier, fresh)
    disk.bytes[page] = before
    kept, tier = await found(disk)
    assert kept == others | {fresh}
    assert "1 pages mended" in tier.status_text


@pytest.mark.usefixtures("three_namespaces")
@pytest.mark.parametrize("torn", [0, 512, PAGE - 512, PAGE])
@pytest.mark.parametrize("writes", range(5))
async def test_a_crash_while_a_namespace_is_written_costs_nothing(writes: int, torn: int) -> None:
    """A number is used again: after the crash one copy may be old, and the other new or torn."""
    disk, records = await file_of_namespaces(3, 60)
    others = {one for one in records if one.namespace.name != "model/0"}
    kept, tier = await found(disk)
    assert kept == records
    await tier.erase([one.offset for one in records - others])
    disk.writes_left, disk.torn = writes, torn
    fresh = record(100 * PAGE, PAGE, 500, Namespace("new"))
    with contextlib.suppress(Unavailable):
        await write(tier, fresh)
    disk.writes_left = 1000
    kept, tier = await found(disk)
    assert others <= kept <= others | {fresh}
    assert set(tier.dropped) <= {"damaged"}  # the header that was written last
    await write(tier, fresh)
    assert (await found(disk))[0] == others | {fresh}


@pytest.mark.parametrize("seed", range(6))
async def test_flipped_bits_are_dropped_or_do_not_matter(seed: int) -> None:
    chance = random.Random(seed)
    capacity = 64 * PAGE
    disk, tier = await new_disk(capacity)
    names = [Namespace(f"model/{n}", n + 1) for n in range(4)]
    records = {record(n * PAGE, chance.randint(1, PAGE), n + 1, names[n % 4]) for n in range(64)}
    await write(tier, *records)
    image = bytes(disk.bytes)
    used = [n for n, byte in enumerate(image) if byte]
    for _ in range(10):
        disk.bytes[:] = image
        for _ in range(chance.choice((1, 3, 40, 400))):
            disk.bytes[chance.choice(used)] ^= 1 << chance.randrange(8)
        kept, tier = await found(disk, capacity)
        assert kept <= records
        assert len(kept) + tier.dropped.total() == len(records)
        assert (await found(disk, capacity))[0] == kept
