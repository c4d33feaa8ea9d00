"""The cold tier: what one server has written any server finds, and what is wrong is a miss."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool import Cluster, Namespace, Pool, ReadStatus, WriteStatus
from kvpool.config import parse_tier
from kvpool.errors import ConfigError
from kvpool.registry import tier
from kvpool.server.block_server import BlockServer
from kvpool.server.cold import bucket
from kvpool.server.state.tier_stores import cold_store
from kvpool.testing.invariants import check_invariants
from tests.conftest import NAMESPACE, eventually, keys, read_back, value, values
from tests.support.object_store import Fleet, Shelf, ring_of, shelf

__all__ = ["shelf"]

ROOT = Path(__file__).parents[2]
BLOCK = 64 << 10
#: 16 blocks in memory.
MEMORY = "dram:1MiB"
FAST = "object_size=256KiB&wait_s=20ms&beat_s=40ms&hedge_s=20ms"
COLD = f"shelf:any:64MiB?{FAST}"
CHAIN = keys("cold", 40)


@asynccontextmanager
async def running(tiers: Sequence[str], secret: bytes = b"") -> AsyncIterator[tuple[Fleet, Pool]]:
    async with Fleet(tiers, Cluster("test", secret=secret)) as fleet, fleet.pool() as pool:
        yield fleet, pool


@pytest.fixture
async def fleet(shelf: Shelf) -> AsyncIterator[Fleet]:
    async with Fleet([MEMORY, COLD], Cluster("test")) as running:
        yield running
        for server in running.servers.values():
            check_invariants(server.stack)
        check_invariants(running.master.directory)


@pytest.fixture
async def pool(fleet: Fleet) -> AsyncIterator[Pool]:
    async with fleet.pool() as client:
        yield client


async def write(pool: Pool, server: BlockServer, chain: Sequence[bytes] = CHAIN) -> None:
    """Chains of eight; each is in the store before the next one, so nothing is evicted sooner."""
    for first in range(0, len(chain), 8):
        some = chain[first : first + 8]
        assert set(await pool.write(NAMESPACE, some, values(some, BLOCK))) == {WriteStatus.STORED}
        await eventually(lambda some=some: all(is_cold(server, one) for one in some))


def is_cold(server: BlockServer, digest: bytes) -> bool:
    cold = cold_store(server.stack.stores)
    assert cold is not None
    return cold.index.peek(NAMESPACE, 0, digest) is not None


async def hits(pool: Pool, chain: Sequence[bytes] = CHAIN) -> int:
    """Eight at a time."""
    eights = [chain[first : first + 8] for first in range(0, len(chain), 8)]
    return sum([(await read_back(pool, some, BLOCK)).count(ReadStatus.HIT) for some in eights])


async def found(server: BlockServer, blocks: int = len(CHAIN)) -> None:
    """A server has looked, and lists so many cold blocks."""
    cold = cold_store(server.stack.stores)
    assert cold is not None
    await asyncio.wait_for(ring_of(server).found.wait(), 5)
    await eventually(lambda: cold.index.stored >= blocks)
    await server._context.wait_until_announced(asyncio.get_running_loop().time() + 5)


async def test_one_that_stops_leaves_it_to_the_others_at_once(shelf: Shelf) -> None:
    """What waits is written first; nobody waits for three beats that do not come."""
    slow = COLD.replace("wait_s=20ms", "wait_s=1h").replace("beat_s=40ms", "beat_s=300ms")
    async with running([MEMORY, slow]) as (fleet, pool):
        await fleet.start("a")
        some = CHAIN[:3]
        await pool.write(NAMESPACE, some, values(some, BLOCK))
        other = await fleet.start("b")
        assert not is_cold(other, some[0])
        await fleet.stop("a")
        await found(other, 3)
        assert await hits(pool, some) == 3


async def test_nothing_is_searched_where_nothing_has_changed(
    shelf: Shelf, fleet: Fleet, pool: Pool
) -> None:
    """Each search costs requests. In an outage nobody shows a sign of life, and nobody is lost."""
    servers = [await fleet.start("a")]
    await write(pool, servers[0], CHAIN[:8])
    servers += [await fleet.start(one) for one in "bc"]
    searches = signs = 0

    def count(request: str, name: str) -> float:
        nonlocal searches, signs
        searches += (request, name) == ("list", "blocks/")
        signs += (request, name) == ("list", "servers/")
        return 0.0

    await eventually(lambda: all(len(ring_of(s)._searcher._living.servers) == 3 for s in servers))
    await asyncio.sleep(0.2)
    shelf.fails("access is refused")
    await asyncio.sleep(0.4)
    shelf.works()
    shelf.delay_s = count
    await eventually(lambda: signs > 10)
    assert searches <= 1


async def test_a_search_that_hangs_does_not_stop_the_sign_of_life(shelf: Shelf) -> None:
    """Else the others take over all that this server answers for."""
    async with running([MEMORY, COLD.replace("40ms", "100ms")]) as (fleet, pool):
        a = await fleet.start("a")
        await write(pool, a)
        shelf.delay_s = lambda request, name: 30.0 * (name == "blocks/")
        b = await fleet.start("b")  # both have somebody new to look for
        (sign,) = (one for one in shelf.names("servers") if one.endswith("/a"))
        await asyncio.sleep(0.5)  # five beats
        before = shelf.times[sign]
        await eventually(lambda: shelf.times[sign] > before)
        shelf.works()
        await eventually(lambda: not ring_of(b)._index.book.by_name)
        assert await hits(pool) == len(CHAIN)


async def test_each_object_has_one_server_that_answers_for_it(shelf: Shelf) -> None:
    """While its writer lives that one; then one of the living, and its writer when it is back."""

    def listed(server: BlockServer) -> int:
        return server.stack.stores[-1].index.stored

    async with running([MEMORY, COLD.replace("40ms", "200ms")]) as (fleet, pool):
        a = await fleet.start("a")
        await write(pool, a)
        others = [await fleet.start(id) for id in "bcd"]
        assert not any(map(listed, others))
        await fleet.lose("a")
        await eventually(lambda: sum(map(listed, others)) == len(CHAIN))
        assert sum(listed(one) > 0 for one in others) > 1, "they share what is left"
        for one in others:
            await one._context.wait_until_announced(asyncio.get_running_loop().time() + 5)
        assert await hits(pool) == len(CHAIN)
        a = await fleet.start("a")
        await found(a)
        await eventually(lambda: not any(map(listed, others)))
        assert await hits(pool) == len(CHAIN)


async def test_a_removed_block_does_not_come_back(fleet: Fleet, pool: Pool, shelf: Shelf) -> None:
    server = await fleet.start("a")
    await write(pool, server)
    gone = CHAIN[::2]
    await pool.remove(NAMESPACE, gone)
    await fleet.lose("a")  # at once: what `remove` has answered holds
    other = await fleet.start("b")
    await found(other, len(CHAIN) // 2)
    assert await hits(pool) == len(CHAIN) // 2
    assert await hits(pool, gone) == 0


async def test_a_block_that_lies_in_two_objects_does_not_come_back(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    """It left memory and was written again while the first object was on its way."""
    server = await fleet.start("a")
    writer, up = ring_of(server)._writer, asyncio.Event()

    def slow(request: str, name: str) -> float:
        first = name.startswith("blocks") and request == "put" and not up.is_set()
        if first:
            up.set()
        return 0.5 * first

    await asyncio.wait_for(ring_of(server).found.wait(), 5)
    shelf.delay_s = slow
    for some in (CHAIN[:2], CHAIN[2:10], CHAIN[10:18], CHAIN[:1]):
        assert set(await pool.write(NAMESPACE, some, values(some, BLOCK))) == {WriteStatus.STORED}
        await asyncio.wait_for(up.wait(), 5)
    await eventually(lambda: not len(writer.waiting) and not writer.drafts)
    await pool.remove(NAMESPACE, CHAIN[:1])
    await fleet.lose("a")
    await found(await fleet.start("b"), 17)
    assert await hits(pool, CHAIN[:1]) == 0


async def test_removals_at_once_do_not_undo_each_other(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    """Of one object: the first request for it ends last, and knows of one block."""
    server = await fleet.start("a")
    await write(pool, server, CHAIN[:4])
    delays = [0.2]
    shelf.delay_s = lambda request, name: (
        delays.pop() if delays and name.startswith("removed") and request == "put" else 0.0
    )
    first = asyncio.create_task(pool.remove(NAMESPACE, CHAIN[:1]))
    await eventually(lambda: not delays)
    await asyncio.gather(first, pool.remove(NAMESPACE, CHAIN[1:2]))
    await fleet.lose("a")
    await found(await fleet.start("b"), 2)
    assert await hits(pool, CHAIN[:4]) == 2


async def test_a_block_that_is_removed_on_its_way_up_does_not_come_back(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    server = await fleet.start("a")
    up = asyncio.Event()

    def slow(request: str, name: str) -> float:
        if request == "put" and "/blocks/" in f"/{name}":
            up.set()
            return 0.3
        return 0.0

    shelf.delay_s = slow
    some = CHAIN[:8]
    await pool.write(NAMESPACE, some, values(some, BLOCK))
    await up.wait()
    await pool.remove(NAMESPACE, some[:2])
    await eventually(lambda: is_cold(server, some[7]))
    assert not is_cold(server, some[0])
    await fleet.lose("a")
    other = await fleet.start("b")
    await found(other, 6)
    assert await hits(pool, some) == 6


def cut(data: bytes) -> bytes:
    return data[:-1]


def flip(place: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = int(place * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(cut, 0, id="cut"),
        pytest.param(lambda data: b"", 0, id="empty"),
        pytest.param(lambda data: random.Random(1).randbytes(len(data)), 0, id="foreign"),
        pytest.param(flip(1.0), 0, id="another MAC"),
        pytest.param(flip(0.9995), 0, id="another index"),
        pytest.param(flip(0.01), len(CHAIN) * 3 // 4, id="another block"),
    ],
)
@pytest.mark.parametrize("secret", [b"", b"s" * 32])
async def test_a_damaged_object_is_a_miss(
    shelf: Shelf, change: Callable[[bytes], bytes], expected: int, secret: bytes
) -> None:
    """Found at the start, by its index; or when it is read, by the checksum of the block."""
    async with running([MEMORY, COLD], secret) as (fleet, pool):
        await write(pool, await fleet.start("a"))
        await fleet.lose("a")
        shelf.rot("blocks", change)
        other = await fleet.start("b")
        await found(other, 0)
        assert await hits(pool) == pytest.approx(expected, abs=4)
        if not expected:
            assert other.stats(0.0).counters["cold_damaged"] > 0


async def test_objects_of_others_without_number_are_some_lines(
    fleet: Fleet, pool: Pool, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can write into the bucket cannot fill the log."""
    await write(pool, await fleet.start("a"))
    await fleet.lose("a")
    first = shelf.names("blocks")[0]
    for number in range(100):
        shelf.objects[f"{first}{number}"] = bytes(100)
        shelf.times[f"{first}{number}"] = shelf.times[first]
    other = await fleet.start("b")
    await found(other, 1)
    said = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert len(said) == 9
    assert "more objects are left out count=92" in said[-1]
    assert other.stats(0.0).counters["cold_damaged"] == 100


@pytest.mark.parametrize("why", ["access is refused", "503 Slow Down"])
async def test_a_store_that_fails_is_a_miss_at_once_and_then_works_again(
    fleet: Fleet,
    pool: Pool,
    shelf: Shelf,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket, "_PAUSE_S", 0.1)
    caplog.set_level(logging.ERROR, "kvpool.cold")
    server = await fleet.start("a")
    await write(pool, server)
    loop = asyncio.get_running_loop()
    shelf.fails(why)
    began = loop.time()
    assert await hits(pool) <= 16
    assert await hits(pool) <= 16
    assert loop.time() - began < 1
    assert sum(why in record.getMessage() for record in caplog.records) == 1
    assert why in server.stats(0.0).usage[-1].status_text
    assert server.stats(0.0).counters["cold_failures"] >= 3
    await asyncio.sleep(0.5)  # signs of life go on, and put nobody else off
    shelf.works()
    await found(server)
    assert await hits(pool) == len(CHAIN)


async def test_a_store_that_refuses_is_asked_less_often(
    fleet: Fleet, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.server.cold._AFTER_FAILURE_S", 0.01)
    shelf.fails("access is refused")
    server = await fleet.start("a", [MEMORY, COLD.replace("40ms", "1s")])
    await asyncio.sleep(1.5)
    assert 4 < shelf.requests["put"] < 12
    shelf.works()
    await eventually(ring_of(server).found.is_set, within_s=0.9)


async def test_what_alerts_and_the_page_name_is_counted_from_the_start(fleet: Fleet) -> None:
    there = {f"kvpool_server_{name}_total" for name in (await fleet.start("a")).stats(0.0).counters}
    page = (ROOT / "docs/cold-tier.md").read_text()
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    named = set(re.findall(r"kvpool\w*_total", page) + re.findall(r"kvpool\w*_cold_\w+", alerts))
    assert len(named) == 4
    assert named <= there


async def test_what_is_written_while_the_store_fails_is_written_later(
    fleet: Fleet, pool: Pool, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the writer does not wait for it."""
    monkeypatch.setattr(bucket, "_PAUSE_S", 0.1)
    server = await fleet.start("a")
    shelf.fails("503", "put")
    began = asyncio.get_running_loop().time()
    some = CHAIN[:8]
    await pool.write(NAMESPACE, some, values(some, BLOCK))
    assert asyncio.get_running_loop().time() - began < 0.5
    await asyncio.sleep(0.1)
    shelf.works()
    await found(server, 8)


async def test_an_error_that_nobody_expects_is_one_of_the_store(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    """What waits to be written is written later."""
    server = await fleet.start("a")
    await asyncio.wait_for(ring_of(server).found.wait(), 5)

    def broken(request: str, name: str) -> str:
        if request == "put" and name.startswith("blocks/"):
            raise KeyError("of the library")
        return ""

    shelf.why = broken
    some = CHAIN[:8]
    await pool.write(NAMESPACE, some, values(some, BLOCK))
    await eventually(lambda: server.stats(0.0).counters["cold_failures"] > 0)
    shelf.works()
    await found(server, 8)
    assert server.stats(0.0).counters["cold_not_written"] == 0


async def test_blocks_that_no_object_gets_are_counted(
    fleet: Fleet, pool: Pool, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, also where the writer itself fails."""
    server = await fleet.start("a")
    await asyncio.wait_for(ring_of(server).found.wait(), 5)

    def fails(*_: object) -> bytes:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("kvpool.server.cold.writer.pack_end", fails)
        some = CHAIN[:8]
        await pool.write(NAMESPACE, some, values(some, BLOCK))
        await eventually(lambda: server.stats(0.0).counters["cold_not_written"] == 8)
    await write(pool, server, CHAIN[8:16])
    assert server.stats(0.0).counters["cold_not_written"] == 8


async def test_a_read_that_hangs_is_asked_for_once_more(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    server = await fleet.start("a")
    await write(pool, server)
    asked: set[str] = set()

    def first_hangs(request: str, name: str) -> float:
        first = request == "get" and name not in asked
        asked.add(name)
        return 60.0 if first else 0.0

    shelf.delay_s = first_hangs
    assert await hits(pool) == len(CHAIN)
    assert server.stats(0.0).counters["cold_hedged"] > 0


async def test_a_budget_of_requests_leaves_reads_the_last_part(
    shelf: Shelf,
) -> None:
    few = COLD.replace("beat_s=40ms", "beat_s=1s") + "&requests=2400"  # 40 at once
    async with running([MEMORY, few]) as (fleet, pool):
        server = await fleet.start("a")
        await write(pool, server, CHAIN[:24])
        began = shelf.requests.total()
        for _ in range(10):
            await hits(pool, CHAIN[:24])
        assert shelf.requests.total() - began <= 44
        assert server.stats(0.0).counters["cold_over_budget"] > 0


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("object_size=1", "65,536 to 1,073,741,824"),
        ("object_size=2GiB", "65,536 to 1,073,741,824"),
        ("wait_s=0", "0.01 to 3,600"),
        ("keep_s=1s", "60 to "),
        ("hedge_s=1us", "0.01 to 60"),
        ("beat_s=499ms", "0.5 to 3,600"),
        ("beat_s=9999h", "0.5 to 3,600"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: str, expected: str) -> None:
    """A server that shows 1,000 times in a second that it lives has no budget for that."""
    name, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=rf"{name}=[\d.e-]+, expected {expected}"):
        tier(parse_tier(f"file:///any:4GiB?{name}={value}"))


async def test_the_oldest_objects_go_where_there_is_no_room(shelf: Shelf) -> None:
    small = COLD.replace("64MiB", "1MiB")
    async with running([MEMORY, small]) as (fleet, pool):
        server = await fleet.start("a")
        chain = keys("many", 64)
        await write(pool, server, chain)
        assert sum(len(shelf.objects[one]) for one in shelf.names("blocks")) <= (1 << 20) + (
            256 << 10
        )
        assert is_cold(server, chain[-1])
        assert not is_cold(server, chain[0])
        check_invariants(server.stack)


async def test_who_takes_over_deletes_nothing_for_what_has_no_room(shelf: Shelf) -> None:
    """Another server may have room for the rest. What is found once more has its room."""
    small = COLD.replace("64MiB", "1MiB")
    async with running([MEMORY, COLD]) as (fleet, pool):
        await write(pool, await fleet.start("a"))
        await fleet.lose("a")
        left = shelf.names("blocks")
        other = await fleet.start("b", [MEMORY, small])
        await found(other, 8)
        await asyncio.sleep(0.2)
        assert shelf.names("blocks") == left
        book = ring_of(other)._index.book
        assert 0 < book.size <= 1 << 20
        here = [digest for digest in CHAIN if is_cold(other, digest)]
        shelf.fails("503", "get")
        await hits(pool, here[:1])
        await eventually(lambda: not is_cold(other, here[0]))
        shelf.works()
        await eventually(lambda: all(is_cold(other, digest) for digest in here))


@pytest.mark.parametrize("ahead_s", [-1e6, 0.0, 1e6])
async def test_objects_are_deleted_after_their_time(shelf: Shelf, ahead_s: float) -> None:
    """By the clock of the store, whatever that shows; also those of lost servers."""
    shelf.ahead_s = ahead_s
    brief = COLD + "&keep_s=1h"
    async with running([MEMORY, brief]) as (fleet, pool):
        server = await fleet.start("a")
        await write(pool, server)
        await fleet.lose("a")
        for name in shelf.names("blocks")[:4]:
            shelf.times[name] -= 3601
        left = len(shelf.names("blocks")) - 4
        other = await fleet.start("b")
        await found(other, 0)
        assert len(shelf.names("blocks")) == left > 0
        shelf.ahead_s += 3601
        await eventually(lambda: not shelf.names("blocks"))
        assert await hits(pool) == 0
        check_invariants(other.stack)


async def test_an_object_that_somebody_has_deleted_is_forgotten(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    server = await fleet.start("a")
    await write(pool, server)
    shelf.objects.clear()
    assert await hits(pool, CHAIN[:1]) == 0
    await eventually(lambda: not is_cold(server, CHAIN[1]))  # in the same object
    assert is_cold(server, CHAIN[8]), "nobody has noticed yet"


async def test_an_object_of_which_all_was_removed_is_deleted_by_who_finds_it(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    server = await fleet.start("a")
    await write(pool, server, CHAIN[:8])
    shelf.fails("not now", "delete")
    await pool.remove(NAMESPACE, CHAIN[:8])
    await eventually(lambda: len(shelf.names("removed")) == len(shelf.names("blocks")) > 0)
    await fleet.lose("a")
    shelf.works()
    await fleet.start("b")
    await eventually(lambda: not shelf.names("removed") and not shelf.names("blocks"))


async def test_what_was_removed_of_an_object_that_is_gone_goes_too(shelf: Shelf) -> None:
    """Also where no other object of that server is left. What is young may be of one that comes."""
    async with running([MEMORY, COLD + "&keep_s=1h"]) as (fleet, pool):
        await write(pool, await fleet.start("a"), CHAIN[:16])
        await pool.remove(NAMESPACE, [CHAIN[0], CHAIN[8]])
        await eventually(lambda: len(shelf.names("removed")) >= 2)
        await fleet.lose("a")
        for name in shelf.names("blocks"):
            del shelf.objects[name]
        old, *young = shelf.names("removed")
        shelf.times[old] -= 3601
        other = await fleet.start("b")
        await found(other, 0)
        await eventually(lambda: shelf.names("removed") == young)


async def test_what_could_not_be_deleted_is_deleted_later(
    shelf: Shelf, fleet: Fleet, pool: Pool
) -> None:
    """By whoever tried, and not only with the next search, which must not find it again: the store
    was not told either what was removed of it."""
    server = await fleet.start("a")
    ring, some = ring_of(server), CHAIN[:3]
    await write(pool, server, some)
    shelf.why = lambda request, name: (
        "not now" if request == "delete" or (request, name[:7]) == ("put", "removed") else ""
    )
    await pool.remove(NAMESPACE, some)
    await eventually(lambda: len(ring._index.gone) == 1)
    await fleet.start("b")  # somebody new: a search is due
    ends = 0

    def count(request: str, name: str) -> float:
        nonlocal ends
        ends += (request, name[:6]) == ("get", "blocks")
        return 0.0

    shelf.delay_s = count
    await eventually(lambda: ends > 0, within_s=10)  # a search has found the object
    await asyncio.sleep(0.1)
    assert not ring._index.book.by_name
    assert await hits(pool, some) == 0
    shelf.works()
    await eventually(lambda: not shelf.names("blocks") and not shelf.names("removed"))
    await eventually(lambda: not ring._index.gone)


@pytest.mark.parametrize("store", ["slow", "refuses"])
async def test_a_start_does_not_wait_for_what_is_to_be_deleted(shelf: Shelf, store: str) -> None:
    """However much that is. All of it goes in the end."""
    async with running([MEMORY, COLD + "&keep_s=1h"]) as (fleet, pool):
        await write(pool, await fleet.start("a"), CHAIN[:16])
        await fleet.lose("a")
        root, _, owner, _ = shelf.names("blocks")[0].split("/")
        notes = [f"{root}/removed/{owner}/{n:016x}-{n:08d}" for n in range(150)]
        shelf.objects |= dict.fromkeys(notes, b"x")
        shelf.times |= dict.fromkeys(notes, time.time() - 7200)
        if store == "slow":
            shelf.delay_s = lambda request, name: 0.1 if request == "delete" else 0.0
        else:
            shelf.fails("not allowed", "delete")
        other = await fleet.start("b")
        await asyncio.wait_for(found(other, 16), 3)
        assert all(is_cold(other, digest) for digest in CHAIN[:16])
        waits = other.stats(0.0)
        assert 75 < waits.counters["cold_outdated"] <= 152
        assert re.search(r", \d+ outdated to delete", waits.usage[-1].status_text)
        shelf.works()
        await eventually(lambda: not shelf.names("removed"), 30)
        await eventually(lambda: not other.stats(0.0).counters["cold_outdated"])
        assert "to delete" not in other.stats(0.0).usage[-1].status_text


async def test_what_was_removed_stays_as_long_as_its_object(shelf: Shelf) -> None:
    """Whoever of several servers answers for that."""
    async with running([MEMORY, COLD + "&keep_s=1h"]) as (fleet, pool):
        await write(pool, await fleet.start("a"))
        gone = CHAIN[::8]
        await pool.remove(NAMESPACE, gone)
        await eventually(lambda: len(shelf.names("removed")) >= 4)
        await fleet.lose("a")
        for name in shelf.names("removed"):
            shelf.times[name] -= 3601
        others = [await fleet.start(one) for one in "bcd"]
        for other in others:
            await found(other, 0)
        left = [digest for number, digest in enumerate(CHAIN) if number % 8]
        await eventually(lambda: all(any(is_cold(one, at) for one in others) for at in left))
        assert not any(is_cold(one, digest) for one in others for digest in gone)
        assert len(shelf.names("removed")) >= 4, "the object is there, and answers for it"


async def test_nothing_is_left_of_a_tenant_that_was_removed(
    fleet: Fleet, pool: Pool, shelf: Shelf
) -> None:
    """Its blocks came between those of another one."""
    server = await fleet.start("a")
    shelf.fails("not now", "put")
    acme, globex = Namespace("@acme/m"), Namespace("@globex/m")
    for first in range(0, 8, 2):
        for space in (acme, globex):
            some = CHAIN[first : first + 2]
            assert set(await pool.write(space, some, values(some, BLOCK))) == {WriteStatus.STORED}
    shelf.works()
    cold = cold_store(server.stack.stores)
    assert cold is not None
    await eventually(lambda: cold.index.peek(acme, 0, CHAIN[7]) and len(shelf.names("blocks")) > 3)
    await pool.remove(acme, CHAIN[:8])
    await eventually(lambda: not shelf.names("removed"))
    left = b"".join(shelf.objects[one] for one in shelf.names("blocks"))
    assert left.count(b"@globex/m") == len(shelf.names("blocks")) > 0
    assert b"@acme" not in left
    assert len(left) < 9 * BLOCK


async def test_a_server_deletes_its_own_objects_after_their_time_too(shelf: Shelf) -> None:
    """Without a restart: nobody else answers for them while it lives."""
    async with running([MEMORY, COLD + "&keep_s=1h"]) as (fleet, pool):
        server = await fleet.start("a")
        await write(pool, server, CHAIN[:16])
        old = set(shelf.names("blocks"))
        shelf.ahead_s, signs = 3500, shelf.requests["list"]
        await eventually(lambda: shelf.requests["list"] > signs + 2)  # it knows what time it is
        await write(pool, server, CHAIN[16:24])
        new = set(shelf.names("blocks")) - old
        shelf.ahead_s = 3700
        await eventually(lambda: not old & set(shelf.names("blocks")))
        await eventually(lambda: not is_cold(server, CHAIN[0]))
        assert new
        assert new == set(shelf.names("blocks"))
        assert is_cold(server, CHAIN[16])
        check_invariants(server.stack)


async def test_another_secret_finds_nothing(shelf: Shelf) -> None:
    for secret, expected in ((b"a" * 32, 0), (b"b" * 32, 0), (b"a" * 32, 8)):
        async with running([MEMORY, COLD], secret) as (fleet, pool):
            server = await fleet.start("a")
            await found(server, 0)
            assert await hits(pool, CHAIN[:8]) == expected
            if secret == b"a" * 32 and not expected:
                await write(pool, server, CHAIN[:8])


async def test_encrypted_objects_have_no_plain_text(shelf: Shelf) -> None:
    hidden = COLD + "&encrypt=yes"
    async with running([MEMORY, hidden], b"s" * 32) as (fleet, pool):
        await write(pool, await fleet.start("a"))
        await fleet.lose("a")
        everything = b"".join(shelf.objects.values())
        assert NAMESPACE.name.encode() not in everything
        assert CHAIN[0] not in everything
        assert value(CHAIN[0], BLOCK)[1000:1100] not in everything
        other = await fleet.start("b")
        await found(other)
        assert await hits(pool) == len(CHAIN)
        shelf.rot("blocks", flip(0.01))
        assert await hits(pool) < len(CHAIN)


async def test_below_a_disk(shelf: Shelf, tmp_path: Path) -> None:
    """What the disk evicts is still there, and what is read lies on the disk again."""
    tiers = [MEMORY, f"nvme:{tmp_path / 'disk'}:2MiB", COLD]
    async with running(tiers) as (fleet, pool):
        server = await fleet.start("a")
        await write(pool, server)
        disk = server.stack.backing
        assert disk.index.stored < len(CHAIN)
        assert await hits(pool) == len(CHAIN)
        await eventually(lambda: disk.index.peek(NAMESPACE, 0, CHAIN[-1]) is not None)
        check_invariants(server.stack)
        await fleet.lose("a")
        (tmp_path / "disk").unlink()
        other = await fleet.start("b")
        await found(other)
        assert await hits(pool) == len(CHAIN)
        check_invariants(other.stack)
        check_invariants(fleet.master.directory)


async def test_what_a_disk_has_kept_is_written_when_a_cold_tier_comes(
    shelf: Shelf, tmp_path: Path
) -> None:
    disk = [MEMORY, f"nvme:{tmp_path / 'disk'}:4MiB"]
    async with running(disk) as (fleet, pool):
        await fleet.start("a")
        await pool.write(NAMESPACE, CHAIN[:8], values(CHAIN[:8], BLOCK))
        await fleet.stop("a")
        server = await fleet.start("a", [*disk, COLD])
        await found(server, 8)


async def test_another_version_is_forgotten(shelf: Shelf) -> None:
    """A block that is written anew before the older version is found stays as it was written."""
    async with running([MEMORY, COLD]) as (fleet, pool):
        server = await fleet.start("a")
        (digest,) = CHAIN[:1]
        others = keys("others", 2)
        await pool.write(NAMESPACE, [digest, *others], [b"older" * 1000, *values(others, BLOCK)])
        await found(server, 3)
        await fleet.lose("a")
        shelf.fails("503", "get")
        other = await fleet.start("b", [MEMORY, COLD.replace("wait_s=20ms", "wait_s=1h")])
        await pool.write(NAMESPACE, [digest], [value(digest, BLOCK)])
        shelf.works()
        await found(other, 2)
        assert not is_cold(other, digest)
        assert await hits(pool, [digest]) == 1
