"""A server with memory above a file: more than fits in memory, and there after kill -9 (G1, G8)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from kvpool import Cluster, Pool, ReadStatus, WriteStatus, connect, dev
from kvpool.config import ClientConfig, parse_tier
from kvpool.errors import ConfigError
from kvpool.protocols.persistent_tier import Record
from kvpool.registry import tier
from kvpool.server import tier_health
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.testing.invariants import check_invariants
from kvpool.tools.subprocesses import Child, process_of, servers_up
from kvpool.types import Reservation
from kvpool_tiers.dram import Dram
from kvpool_tiers.nvme.tier import Nvme
from tests.conftest import (
    NAMESPACE,
    TRANSPORTS,
    eventually,
    key,
    keys,
    listening,
    read_back,
    values,
)
from tests.support.failing_disk import FailingDisk
from tests.support.moves import masters_know

BLOCK = 64 << 10
MEMORY = "dram:2MiB"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
async def tiered(request: pytest.FixtureRequest, file: Path) -> AsyncIterator[dev.Dev]:
    """One server of 32 blocks in memory and 256 in a file; its books are checked at the end."""
    tiers = [MEMORY, f"nvme:{file}:16MiB"]
    async with dev.serve(tiers=tiers, listen=listening(request)) as running:
        yield running
        check_invariants(running.servers[0].stack)
        check_invariants(running.master.directory)


@pytest.fixture(params=TRANSPORTS)
async def pool(request: pytest.FixtureRequest, tiered: dev.Dev) -> AsyncIterator[Pool]:
    config = ClientConfig(masters=[tiered.address], transports=[request.param], timeout_s=20)
    async with tiered.pool(config) as client:
        yield client


async def write(pool: Pool, chain: Sequence[bytes]) -> None:
    assert set(await pool.write(NAMESPACE, chain, values(chain, BLOCK))) == {WriteStatus.STORED}


async def read(pool: Pool, chain: Sequence[bytes]) -> list[ReadStatus]:
    return await read_back(pool, chain, BLOCK)


async def saved(running: dev.Dev) -> None:
    """Wait until everything has been copied to the file, and the master knows what that evicted."""
    (server,) = running.servers
    await eventually(lambda: not server.stack.queue.waiting and not server.stack.front.held.pins)
    await server._context.wait_until_announced(asyncio.get_running_loop().time() + 5)


# --- more than fits in memory -----------------------------------------------------------


async def test_what_memory_has_no_room_for_comes_from_the_file(pool: Pool) -> None:
    chain = keys("chain", 200)
    await write(pool, chain[:100])  # one write may be larger than memory
    for first in range(100, 200, 20):
        await write(pool, chain[first : first + 20])
    assert (await pool.match(NAMESPACE, chain)).length == 200
    for _ in range(2):
        assert set(await read(pool, chain)) == {ReadStatus.HIT}
    assert pool.counters["corrupt_blocks"] == 0


async def test_the_file_evicts_tails_first_when_it_is_full(tiered: dev.Dev, pool: Pool) -> None:
    first, rest = keys("first", 100), [keys(f"rest {number}", 50) for number in range(4)]
    await write(pool, first)
    for chain in rest:
        await write(pool, chain)
    await saved(tiered)
    match = await pool.match(NAMESPACE, first)
    assert match.length < 100
    assert match.stopped is ReadStatus.EVICTED
    assert set(await read(pool, first[: match.length])) <= {ReadStatus.HIT}
    assert set(await read(pool, rest[-1])) == {ReadStatus.HIT}


async def test_a_block_that_memory_has_no_room_for_is_refused_at_once(
    tiered: dev.Dev, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has the head of its chain, which the file has lost: no wait would free any of it."""
    chain = keys("head in memory", 33)
    await write(pool, chain)
    await saved(tiered)
    assert set(await read(pool, chain[:32])) == {ReadStatus.HIT}
    stack = tiered.servers[0].stack
    refused = [Reservation(WriteStatus.BYPASSED)]
    monkeypatch.setattr(stack.backing, "reserve", lambda *of, **named: refused)
    stack.stores[1].remove(NAMESPACE, chain[31:32])
    assert stack.front.index.stored == 32
    began = asyncio.get_running_loop().time()
    assert await read(pool, chain[32:]) == [ReadStatus.REFUSED]
    assert asyncio.get_running_loop().time() - began < 5
    assert set(await read(pool, chain[:32])) == {ReadStatus.HIT}


@pytest.mark.parametrize("promotion", [False, True])
async def test_what_is_evicted_for_copies_that_then_find_no_room_is_announced(
    tiered: dev.Dev, monkeypatch: pytest.MonkeyPatch, promotion: bool
) -> None:
    """G7: no transfer begins, so nothing else would tell the masters."""
    chain = keys("evicted below", 4)
    (server,) = tiered.servers
    async with tiered.pool() as pool:
        await write(pool, chain)
        await saved(tiered)

        def evict_and_refuse(*limits: float, **options: bool) -> list[TierTransfer]:
            server.stack.remove(NAMESPACE, chain[3:])
            return []

        name = "start_promotions" if promotion else "next_writebacks"
        monkeypatch.setattr(server.stack.transfers, name, evict_and_refuse)
        if promotion:
            server._context.mover.promote(NAMESPACE, 0, chain)
        else:
            server._context.mover.wake()
        await eventually(lambda: 3 in tiered.master.directory.find(NAMESPACE, chain)[1])
        assert (await pool.match(NAMESPACE, chain)).length == 3


async def test_a_view_of_blocks_in_the_file_shows_memory(tiered: dev.Dev) -> None:
    chain = keys("chain", 60)
    async with tiered.pool() as pool:
        await write(pool, chain)
        await saved(tiered)
        async with pool.read_view(NAMESPACE, chain[:20]) as views:
            # An eighth of the memory, which is 2 MiB, may be viewed at a time.
            assert [bytes(view.data or b"") for view in views[:4]] == values(chain[:4], BLOCK)
            assert {view.status for view in views[4:]} == {ReadStatus.REFUSED}


async def test_readers_of_one_block_share_its_way_up(tiered: dev.Dev) -> None:
    chain = keys("chain", 100)
    async with tiered.pool() as pool:
        await write(pool, chain)
        await saved(tiered)
        answers = await asyncio.gather(*(read(pool, chain[:8]) for _ in range(6)))
        assert {status for answer in answers for status in answer} == {ReadStatus.HIT}
        (member,) = await pool.members()
        assert member.tiers == ("dram", "nvme")
    assert tiered.servers[0].stack.index.hits[1] == 8


async def test_status_tells_what_lies_where(tiered: dev.Dev) -> None:
    chain = keys("chain", 64)
    async with tiered.pool() as pool:
        await write(pool, chain)
        await read(pool, chain)
        await saved(tiered)
        await masters_know(tiered.servers[0])
        (member,) = await pool.members()
        match = await pool.match(NAMESPACE, chain)
    memory, disk = member.stats.usage
    assert (memory.name, disk.name) == ("dram", "nvme")
    assert (disk.blocks, disk.used, disk.written_bytes) == (64, 64 * BLOCK, 64 * BLOCK)
    assert disk.written_blocks == 64
    assert memory.used <= memory.capacity == 2 << 20
    assert disk.capacity == member.capacity == 16 << 20
    assert memory.hits + disk.hits >= 64
    assert disk.read_bytes == disk.hits * BLOCK
    assert "tier" in disk.status_text
    assert {replica.tier for run in match.runs for replica in run.replicas} == {"dram", "nvme"}


# --- a disk that is not well ------------------------------------------------------------


def spoil(file: Path, block: bytes) -> None:
    """Write over some of a block's bytes, wherever they lie."""
    at = file.read_bytes().index(block)
    with file.open("r+b") as opened:
        opened.seek(at + 100)
        opened.write(b"rotten")


async def test_flipped_bits_on_disk_are_a_miss(tiered: dev.Dev, file: Path) -> None:
    chain = keys("chain", 100)
    async with tiered.pool() as pool:
        await write(pool, chain)
        await saved(tiered)
        entry = tiered.servers[0].stack.backing.index.peek(NAMESPACE, 0, chain[3])
        assert entry is not None
        bytes_of = values([chain[3]], BLOCK)[0]
        spoil(file, bytes_of)
        statuses = await read(pool, chain[:8])
        assert statuses[3] is ReadStatus.CORRUPT
        assert set(statuses[:3] + statuses[4:]) == {ReadStatus.HIT}

        async def is_known() -> bool:  # the reader is not kept until they do
            return (await pool.match(NAMESPACE, chain)).length == 3

        await eventually(is_known)
        await write(pool, [chain[3]])
        assert set(await read(pool, chain)) == {ReadStatus.HIT}


async def test_a_file_full_of_damaged_blocks_fills_no_log(
    tiered: dev.Dev, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = tiered.servers[0]._context.mover.health
    for pause_s in (60.0, 0.0):
        monkeypatch.setattr("kvpool.server.tier_health._CORRUPT_LOG_S", pause_s)
        for _ in range(100):
            health.read_corrupt((1, 0), b"digest")
        health._places[1, 0].corrupt_due = 0.0
    counts = [one.count for one in caplog.records if one.message.startswith("block is corrupt")]  # type: ignore[attr-defined]
    assert counts == [1, 100, *[1] * 99]


def test_memory_keeps_its_bytes_while_it_is_put_together() -> None:
    dram = Dram(8 << 20)
    bytes_ = os.urandom(8 << 20)
    for start in range(0, len(bytes_), 4096):
        dram.view(start, 4096)[:] = bytes_[start : start + 4096]
    dram.wait_until_touched()
    assert dram.view(0, len(bytes_)) == bytes_
    dram.close()


async def test_a_dead_disk_is_taken_out_of_service(tiered: dev.Dev) -> None:
    """Its blocks are misses with that reason, and the server is one with memory only."""
    old, new = keys("old", 100), keys("new", 30)
    (server,) = tiered.servers
    async with tiered.pool() as pool:
        await write(pool, old)
        await saved(tiered)
        disk = FailingDisk.under(server.tiers[1])
        disk.read_error = disk.write_error = "EIO: the disk is gone"
        assert set(await read(pool, old[:20])) == {ReadStatus.TIER_LOST}
        await eventually(lambda: server.stack.index.offline == {1})
        for _ in range(3):
            await write(pool, new)
            assert set(await read(pool, new)) == {ReadStatus.HIT}
            await pool.remove(NAMESPACE, new)
        await masters_know(server)
        (member,) = await pool.members()
        assert [usage.lost for usage in member.stats.usage] == [False, True]
        match = await pool.match(NAMESPACE, old)
        assert match.length < 100
        assert match.stopped is ReadStatus.TIER_LOST


async def test_a_disk_that_takes_no_writes_is_read_and_comes_back(
    tiered: dev.Dev, caplog: pytest.LogCaptureFixture
) -> None:
    error = "EROFS: Read-only file system"
    old, new, gone = keys("old", 100), keys("new", 60), keys("gone", 4)
    (server,) = tiered.servers
    stack, nvme = server.stack, server.tiers[1]
    async with tiered.pool() as pool:
        await write(pool, old)
        await write(pool, gone)
        await saved(tiered)
        disk = FailingDisk.under(nvme)
        disk.write_error = error
        await write(pool, new[:1])
        await eventually(lambda: stack.queue.read_only)
        for first in range(1, 60):  # more than memory holds: the first of them leave it
            await write(pool, [new[first]])
        for _ in range(2):
            assert set(await read(pool, old)) == {ReadStatus.HIT}
        assert await pool.remove(NAMESPACE, gone) == [True] * 4
        for digest in new[-8:]:
            assert set(await read(pool, [digest])) <= {ReadStatus.HIT, ReadStatus.EVICTED}
            await pool.write(NAMESPACE, [digest], values([digest], BLOCK))
        await masters_know(tiered.servers[0])
        (member,) = await pool.members()
        usage = member.stats.usage[1]
        assert (usage.read_only, usage.lost) == (True, False)
        assert usage.status_text.endswith(f"read-only: {error}")
        used = stack.backing.allocator.allocated
        assert used == 100 * BLOCK, "what was reserved for writes that failed is given back"
        assert not stack.backing.held.reservations
        disk.write_error = ""
        await eventually(lambda: not stack.queue.read_only, within_s=10)
        await saved(tiered)
        kept = [digest for digest in new if stack.front.index.peek(NAMESPACE, 0, digest)]
        assert set(new[-8:]) <= set(kept)
        for digest in kept:
            assert stack.backing.index.peek(NAMESPACE, 0, digest) is not None
        assert set(await read(pool, [*old, *kept])) == {ReadStatus.HIT}
        assert nvme.status_text == server._context.mover.usage(0.0)[1].status_text
    lines = [line for line in caplog.records if "tier" in line.getMessage()]
    texts = [getattr(line, "event", "") for line in lines if line.levelno >= logging.WARNING]
    assert texts == ["tier is read-only", "tier takes writes again"], "once for each change"
    found = {record.digest for record in await nvme.recover()}  # type: ignore[attr-defined]
    assert {*old, *kept} <= found
    assert not found & set(gone), "what was removed meanwhile is erased"


@pytest.fixture
def retries_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_health, "_RETRY_S", 0.1)


@pytest.mark.usefixtures("retries_soon")
async def test_a_second_outage_begins_anew(tiered: dev.Dev) -> None:
    """One failed batch is none, delays go no further, and a disk that cannot be read is lost."""
    (server,) = tiered.servers
    stack, nvme, mover = server.stack, server.tiers[1], server._context.mover
    async with tiered.pool() as pool:
        await write(pool, old := keys("old", 100))
        await saved(tiered)
        disk = FailingDisk.under(nvme)
        for outage in range(2):
            disk.write_error = f"ENOSPC: No space left on device, outage {outage}"
            await write(pool, keys(f"outage {outage}", 4))
            await eventually(lambda: stack.queue.read_only)
            assert disk.write_error in mover.usage(0.0)[1].status_text
            await eventually(lambda: mover.health.retry.failures >= 2, within_s=10)
            disk.write_error = ""
            await eventually(lambda: not stack.queue.read_only, within_s=10)
            await saved(tiered)
            assert mover.health.retry.failures == 0
            disk.write_error = "EIO: Input/output error"
            await write(pool, keys(f"one {outage}", 1))
            await asyncio.sleep(0.15)
            disk.write_error = ""
            await saved(tiered)
            assert not stack.queue.read_only
        disk.write_error = "EIO: Input/output error"
        await write(pool, keys("last", 4))
        await eventually(lambda: stack.queue.read_only)
        disk.read_error = disk.write_error
        assert set(await read(pool, old[:20])) == {ReadStatus.TIER_LOST}
        await eventually(lambda: stack.index.offline == {1} and not stack.queue.read_only)


async def test_writes_that_fail_now_and_then_are_no_outage(tiered: dev.Dev) -> None:
    (server,) = tiered.servers
    stack, nvme, mover = server.stack, server.tiers[1], server._context.mover
    async with tiered.pool() as pool:
        disk = FailingDisk.under(nvme)
        for number in range(12):
            disk.write_error, before = "EIO: Input/output error", mover.usage(0.0)[1].failures
            await write(pool, keys(f"one {number}", 1))
            await eventually(lambda before=before: mover.usage(0.0)[1].failures > before)
            disk.write_error = ""
            await saved(tiered)
            assert not stack.queue.read_only


# --- kill -9 ----------------------------------------------------------------------------


def command(master: str, file: Path, name: str) -> list[str]:
    tiers = ["--tier", MEMORY, "--tier", f"nvme:{file}:16MiB"]
    return ["server", "--masters", master, "--id", name, "--log-level", "error", *tiers]


@asynccontextmanager
async def server_of(master: str, file: Path, name: str = "one") -> AsyncIterator[Child]:
    async with process_of("kvpool", *command(master, file, name)) as server:
        await server.line()
        yield server


async def holds(pool: Pool, blocks: int) -> bool:
    (member,) = await pool.members()
    return member.stats.usage[1].blocks >= blocks


async def restarted(pool: Pool, epoch: int) -> bool:
    """The master knows the new server; until then it believes in the old one."""
    (member,) = await pool.members()
    return member.epoch != epoch


async def test_a_server_that_was_killed_comes_back_warm(file: Path) -> None:
    chain, removed = keys("chain", 120), keys("removed", 10)
    arguments = ("--bind", "127.0.0.1:0", "--log-level", "error")
    async with process_of("kvpool", "master", *arguments) as running:
        master = (await running.line()).removeprefix("master at ")
        patient = ClientConfig(masters=[master], timeout_s=20, attempt_s=10)
        async with await connect(config=patient) as pool:
            async with server_of(master, file) as server:
                await servers_up(master, 1)
                await write(pool, chain + removed)
                await eventually(lambda: holds(pool, 130), 15)
                assert all(await pool.remove(NAMESPACE, removed))
                (before,) = await pool.members()
                second = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-m", "kvpool", *command(master, file, "two")],
                    capture_output=True,
                    text=True,
                    timeout=30,
                )
                assert second.returncode == 2
                assert "in use" in second.stderr
                server.signal(signal.SIGKILL)
                await server.ended()
            async with server_of(master, file):
                await eventually(lambda: restarted(pool, before.epoch), 15)
                assert set(await read(pool, chain)) == {ReadStatus.HIT}
                assert not any(status.hit for status in await read(pool, removed))
                assert (await pool.write(NAMESPACE, [key("x")], [b"x"])) == [WriteStatus.STORED]


async def test_a_block_that_a_file_has_twice_is_counted_and_said(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that drops anything says how much, and why, in its status and at WARNING."""
    chain = keys("chain", 5)
    async with dev.serve(tiers=[MEMORY, f"nvme:{file}:16MiB"]) as running, running.pool() as pool:
        await write(pool, chain)
        await saved(running)
    recover = Nvme.recover

    async def twice(self: Nvme) -> list[Record]:
        found = await recover(self)
        return [*found, *(one._replace(offset=one.offset + (8 << 20)) for one in found[:2])]

    monkeypatch.setattr(Nvme, "recover", twice)
    async with dev.serve(tiers=[MEMORY, f"nvme:{file}:16MiB"]) as running, running.pool() as pool:
        (server,) = running.servers
        assert set(await read(pool, chain)) == {ReadStatus.HIT}
        assert server._context.mover.usage(0.0)[1].dropped == {"refused": 2}
    (line,) = [one for one in caplog.records if one.message.startswith("tier is warm")]
    assert line.levelname == "WARNING"
    assert "blocks=5" in line.message
    assert "why='2 refused'" in line.message


# --- what people type -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/prefix?endpoint=http://a:1", "expected name:size"),
        ("dram:", "expected name:size"),
        (":1GiB", "expected name:size"),
        ("dram:lots", "expected bytes or a number with unit"),
        ("dram:0", "at least 1 byte"),
        ("dram:1MiB?x", "expected setting=value"),
        ("dram:1MiB?prefault=no&prefault=no", "is given twice"),
        ("dram:1MiB?size=3", "has no setting 'size'; its settings: prefault"),
        ("dram:1MiB?prefault=perhaps", "neither true nor false"),
        ("dram:somewhere:1MiB", "takes no path, got 'somewhere'"),
        ("nvme:1MiB", "needs a path: nvme:<path>:<size>"),
        ("nvme:/tmp:1MiB", "is a directory"),
        ("tape:1MiB", "no tier 'tape' is installed"),
    ],
)
def test_a_tier_that_makes_no_sense_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tier(parse_tier(text))
    assert expected in str(caught.value)


def test_settings_of_a_tier_are_its_own(file: Path) -> None:
    opened = tier(parse_tier(f"nvme:{file}:1MiB?queue_depth=3&direct=no"))
    assert opened.capacity == 1 << 20
    assert "buffered" in opened.status_text  # type: ignore[attr-defined]
    opened.close()


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        (["nvme:{file}:1MiB"], "clients cannot reach any of them"),
        (["nvme:{file}:1MiB", "dram:1MiB"], "put it last"),
    ],
)
async def test_tiers_in_an_order_that_makes_no_sense(
    file: Path, tiers: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        async with dev.serve(tiers=[text.format(file=file) for text in tiers]):
            pass
    assert not file.exists()  # noqa: ASYNC240


async def test_a_file_of_another_cluster_is_refused_and_left_as_it_is(file: Path) -> None:
    """Its blocks are those of other people, perhaps of other weights under the same names."""
    chain = keys("theirs", 8)
    bank = Cluster("bank", b"the secret of the bank, 32 bytes")

    def serve(cluster: Cluster) -> AbstractAsyncContextManager[dev.Dev]:
        tiers = [MEMORY, f"nvme:{file}:16MiB"]
        return dev.serve(tiers=tiers, cluster=cluster)

    async with serve(bank) as running, running.pool() as pool:
        await write(pool, chain)
        await saved(running)
    for other in (Cluster("default"), Cluster("bank"), bank._replace(secret=b"x" * 32)):
        with pytest.raises(ConfigError, match="belongs to another cluster"):
            async with serve(other):
                pass
    async with serve(bank) as running, running.pool() as pool:
        assert await read(pool, chain) == [ReadStatus.HIT] * 8
