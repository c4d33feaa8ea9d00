"""What a user of the pool relies on, over every transport (G1, G2, G5, G9)."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from kvpool import (
    ROOT,
    BadBuffer,
    BadKey,
    ClientConfig,
    Closed,
    Namespace,
    Pool,
    ReadStatus,
    TooLarge,
    UsageError,
    WriteStatus,
    admin,
    dev,
)
from kvpool.server.state.holdings import Limits
from kvpool_transports.streams import StreamChannel
from tests.conftest import NAMESPACE, buffers, key, keys, patient, value, values


async def test_what_was_written_is_read(pool: Pool) -> None:
    chain = keys("chain", 20)
    assert set(await pool.write(NAMESPACE, chain, values(chain))) == {WriteStatus.STORED}
    match = await pool.match(NAMESPACE, chain)
    assert (match.length, match.stopped) == (20, ReadStatus.HIT)
    got = buffers(20)
    results = await pool.read(NAMESPACE, chain, got, match=match)
    assert all(result.status.hit and result.size == 8192 for result in results)
    assert got == values(chain)


async def test_a_match_ends_at_the_first_gap(tcp: Pool) -> None:
    chain = keys("gap", 10)
    await tcp.write(NAMESPACE, chain[:4], values(chain[:4]))
    await tcp.write(NAMESPACE, chain[6:], values(chain[6:]), parent=chain[5])
    match = await tcp.match(NAMESPACE, chain)
    assert (match.length, match.stopped) == (4, ReadStatus.NEVER_WRITTEN)
    results = await tcp.read(NAMESPACE, chain, buffers(10))
    assert [result.status.hit for result in results] == [True] * 4 + [False] * 2 + [True] * 4


async def test_of_many_writers_one_wins(pool: Pool) -> None:
    """G2 under concurrency: all write other bytes under one key; every read is one writer's."""
    outcomes = await asyncio.gather(
        *(pool.write(NAMESPACE, [key("race")], [bytes([n]) * 300_000]) for n in range(8))
    )
    statuses = [status for (status,) in outcomes]
    assert statuses.count(WriteStatus.STORED) == 1
    assert set(statuses) <= {
        WriteStatus.STORED,
        WriteStatus.ALREADY_STORED,
        WriteStatus.IN_PROGRESS,
    }
    (buffer,) = buffers(1, 300_000)
    await pool.read(NAMESPACE, [key("race")], [buffer])
    assert len(set(buffer)) == 1
    assert buffer[0] == statuses.index(WriteStatus.STORED)


async def test_a_block_is_present_when_all_its_parts_are(tcp: Pool) -> None:
    sharded = Namespace("test/tp2", parts=2)
    chain = keys("parts", 3)
    await tcp.write(sharded, chain, values(chain), part=0)
    match = await tcp.match(sharded, chain)
    assert (match.length, match.stopped) == (0, ReadStatus.PART_MISSING)
    await tcp.write(sharded, chain, [value(key(d)) for d in chain], part=1)
    assert (await tcp.match(sharded, chain)).length == 3
    for part, expected in ((0, values(chain)), (1, [value(key(d)) for d in chain])):
        got = buffers(3)
        await tcp.read(sharded, chain, got, part=part)
        assert got == expected


async def test_every_miss_has_a_reason(tcp: Pool) -> None:
    """G5: never written, removed and evicted are told apart, and `explain` says it in words."""
    await tcp.write(NAMESPACE, [key("gone")], [b"x" * 64])
    assert await tcp.remove(NAMESPACE, [key("gone"), key("never")]) == [True, False]
    await tcp.write(NAMESPACE, [key("old")], [b"x" * 64])
    filler = keys("filler", 16)
    await tcp.write(NAMESPACE, filler, values(filler, 1 << 20))
    results = await tcp.read(NAMESPACE, [key("gone"), key("never"), key("old")], buffers(3))
    reasons = [ReadStatus.REMOVED, ReadStatus.NEVER_WRITTEN, ReadStatus.EVICTED]
    assert [result.status for result in results] == reasons
    answers = await admin(tcp).explain(NAMESPACE, [key("gone"), key("never"), key("old")])
    assert [answer.status for answer in answers] == reasons
    assert all(answer.text for answer in answers)


async def test_a_full_pool_makes_room_while_every_key_is_probed(tcp: Pool) -> None:
    """G9: matches in a loop renew nothing; three times the capacity goes in."""
    chain = keys("storm", 48)
    for first in range(0, 48, 4):
        batch = chain[first : first + 4]
        statuses = await tcp.write(NAMESPACE, batch, values(batch, 1 << 20))
        assert set(statuses) == {WriteStatus.STORED}
        for digest in chain[: first + 4]:
            await tcp.match(NAMESPACE, [digest])
    results = await tcp.read(NAMESPACE, chain[-8:], buffers(8, 1 << 20))
    assert all(result.status.hit for result in results)


async def test_views_show_the_memory_itself(pool_dev: dev.Dev) -> None:
    chain = keys("view", 4)
    for transport in ("inproc", "shm"):
        config = ClientConfig(masters=[pool_dev.address], transports=[transport])
        async with pool_dev.pool(config) as pool:
            await pool.write(NAMESPACE, chain, values(chain))
            async with pool.read_view(NAMESPACE, [*chain, key("absent")]) as views:
                assert [v.data == value(d) for v, d in zip(views, chain, strict=False)] == [
                    True
                ] * 4
                assert views[4].status is ReadStatus.NEVER_WRITTEN
                assert views[0].data is not None
                assert views[0].data.readonly
                assert pool_dev.servers[0].store.held.pins == 4
            await asyncio.sleep(0.05)
            assert pool_dev.servers[0].store.held.pins == 0


async def test_a_viewed_block_survives_a_full_pool(pool_dev: dev.Dev) -> None:
    """G4: what somebody looks at is not evicted, moved or rewritten."""
    config = ClientConfig(masters=[pool_dev.address], transports=["shm"])
    async with pool_dev.pool(config) as pool:
        held = key("held")
        await pool.write(NAMESPACE, [held], [value(held, 1 << 20)])
        async with pool.read_view(NAMESPACE, [held]) as views:
            storm = keys("storm", 40)
            for digest in storm:
                await pool.write(NAMESPACE, [digest], [value(digest, 1 << 20)])
            assert await pool.remove(NAMESPACE, [held]) == [True]
            await pool.write(NAMESPACE, keys("again", 20), values(keys("again", 20), 1 << 20))
            assert views[0].data == value(held, 1 << 20)


async def test_no_space_is_said_by_the_deadline(pool_dev: dev.Dev) -> None:
    """G9: with everything pinned a write is refused in time; when the pins go, it succeeds."""
    config = ClientConfig(masters=[pool_dev.address], transports=["shm"])
    pool_dev.servers[0].store.held.limits = Limits.none()
    async with pool_dev.pool(config) as pool:
        chain = keys("all", 16)
        await pool.write(NAMESPACE, chain, values(chain, 1 << 20))
        loop = asyncio.get_running_loop()
        async with pool.read_view(NAMESPACE, chain):
            started = loop.time()
            (status,) = await pool.write(NAMESPACE, [key("new")], [bytes(1 << 20)], timeout=0.6)
            assert status is WriteStatus.NO_SPACE
            assert loop.time() - started < patient(0.6)
            waiting = asyncio.create_task(
                pool.write(NAMESPACE, [key("patient")], [bytes(1 << 20)], timeout=10)
            )
            await asyncio.sleep(0.2)
        assert await waiting == [WriteStatus.STORED]


async def test_without_a_server_there_is_no_space(pool_dev: dev.Dev) -> None:
    """And none was lost: nothing broke on the way."""
    (key,) = keys("nowhere", 1)
    async with pool_dev.pool() as pool:
        for server in pool_dev.servers:
            await server.close()
        assert await pool.write(NAMESPACE, [key], values([key])) == [WriteStatus.NO_SPACE]


async def test_a_wrong_checksum_is_a_miss_and_the_block_goes(pool: Pool, pool_dev: dev.Dev) -> None:
    """G1: flipped bits in the pool's memory are never handed out."""
    (server,) = pool_dev.servers
    chain = keys("rot", 3)
    await pool.write(NAMESPACE, chain, values(chain))
    entry = server.store.index.peek(NAMESPACE, 0, chain[1])
    server.tier.view(entry.offset, 8192)[77] ^= 1  # type: ignore[attr-defined]
    results = await pool.read(NAMESPACE, chain, buffers(3))
    assert [r.status for r in results] == [ReadStatus.HIT, ReadStatus.CORRUPT, ReadStatus.HIT]
    assert server.store.index.peek(NAMESPACE, 0, chain[1]) is None
    assert pool.counters["corrupt"] == 1
    answers = await admin(pool).explain(NAMESPACE, [chain[1]])
    assert answers[0].status is ReadStatus.CORRUPT
    # The key is free again: the next writer heals it.
    assert await pool.write(NAMESPACE, [chain[1]], [value(chain[1])]) == [WriteStatus.STORED]


async def test_a_batch_larger_than_a_message_is_split(tcp: Pool) -> None:
    chain = keys("many", 2500)
    data = [digest * 4 for digest in chain]
    assert set(await tcp.write(NAMESPACE, chain, data)) == {WriteStatus.STORED}
    assert (await tcp.match(NAMESPACE, chain)).length == 2500
    got = buffers(2500, 128)
    await tcp.read(NAMESPACE, chain, got)
    assert got == data


# --- calls that are wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("digests", "data", "error", "says"),
    [
        ([], [], BadKey, "empty batch"),
        ([key("a"), key("b"), key("a")], [b"x"] * 3, BadKey, "twice"),
        *(([bytes(size)], [b"x"], BadKey, f"{size} bytes") for size in (5, 15, 33)),
        ([key("a"), key("b")[:16]], [b"x"] * 2, BadKey, "expected equal"),
        ([key("a")], [b""], BadBuffer, "empty"),
        ([key("a")], [b"x", b"y"], BadBuffer, "2 buffers for 1 keys"),
        ([key("a")], ["text"], BadBuffer, "str"),
        ([key("a")], [memoryview(bytes(64))[::2]], BadBuffer, "contiguous"),
        ([key("a")], [bytes(17 << 20)], TooLarge, "segment"),
    ],
)
async def test_a_wrong_write_names_what_is_wrong(
    tcp: Pool, digests: list[bytes], data: list[bytes], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        await tcp.write(NAMESPACE, digests, data)
    assert await tcp.write(NAMESPACE, [key("fine")[:16]], [b"fine"]) == [WriteStatus.STORED]


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        (bytes(8192), "read-only"),
        (memoryview(bytearray(16384))[::2], "contiguous"),
        (bytearray(8191), "larger"),
        (bytearray(), "empty"),
    ],
)
async def test_a_wrong_read_buffer_is_named(tcp: Pool, buffer: bytearray, says: str) -> None:
    await tcp.write(NAMESPACE, [key("r")], [value(key("r"))])
    with pytest.raises(BadBuffer, match=says):
        await tcp.read(NAMESPACE, [key("r")], [buffer])


async def test_parents_must_make_sense(tcp: Pool) -> None:
    with pytest.raises(BadKey, match="its parent"):
        await tcp.write(NAMESPACE, [key("p")], [b"x"], parent=key("p"))
    with pytest.raises(BadKey, match="parent 0 has 3 bytes"):
        await tcp.write(NAMESPACE, [key("p")], [b"x"], parent=b"abc")
    with pytest.raises(BadKey, match="2 parents for 1 keys"):
        await tcp.write(NAMESPACE, [key("p")], [b"x"], parents=[ROOT, ROOT])
    with pytest.raises(BadKey, match="part 1"):
        await tcp.write(NAMESPACE, [key("p")], [b"x"], part=1)


async def test_a_closed_pool_says_so(pool_dev: dev.Dev) -> None:
    async with pool_dev.pool() as pool:
        operator = admin(pool)
    for call in (
        pool.match(NAMESPACE, [key("a")]),
        pool.remove(NAMESPACE, [key("a")], timeout=1.0),
        pool.members(),
        operator.namespaces(),
    ):
        with pytest.raises(Closed, match="the pool is closed"):
            await call


async def test_another_thread_is_sent_to_the_sync_pool(tcp: Pool) -> None:
    for call in (tcp.match(NAMESPACE, [key("a")]), tcp.close()):
        with pytest.raises(Closed, match=r"kvpool\.sync"):
            await asyncio.to_thread(asyncio.run, call)


async def test_a_block_beyond_the_match_is_never_a_hit(tcp: Pool) -> None:
    chain = keys("beyond", 4)
    await tcp.write(NAMESPACE, chain[:2], values(chain[:2]))
    match = await tcp.match(NAMESPACE, chain[:2])
    assert match.stopped is ReadStatus.HIT
    results = await tcp.read(NAMESPACE, chain, buffers(4), match=match)
    assert [result.status.hit for result in results] == [True, True, False, False]


async def test_copies_lie_on_servers_of_their_own(two_servers: dev.Dev) -> None:
    async with two_servers.pool() as pool:
        chain = keys("copies", 5)
        assert await pool.write(NAMESPACE, chain, values(chain), copies=2) == [
            WriteStatus.STORED
        ] * len(chain)
        match = await pool.match(NAMESPACE, chain)
        servers = [sorted(replica.server for replica in run.replicas) for run in match.runs]
        assert servers == [["dev-0", "dev-1"]]
        again = await pool.write(NAMESPACE, chain, values(chain), copies=2)
        assert again == [WriteStatus.ALREADY_STORED] * len(chain)
        assert pool.counters["copies_missing"] == 0


async def test_a_block_with_fewer_copies_gets_the_rest(two_servers: dev.Dev) -> None:
    async with two_servers.pool() as pool:
        chain = keys("more", 5)
        await pool.write(NAMESPACE, chain, values(chain))
        await pool.write(NAMESPACE, chain, values(chain), copies=2)
        assert [len(run.replicas) for run in (await pool.match(NAMESPACE, chain)).runs] == [2]
        # More copies than servers: as many as there are, and a count of what is missing.
        await pool.write(NAMESPACE, chain, values(chain), copies=3)
        assert pool.counters["copies_missing"] == len(chain)
        with pytest.raises(UsageError, match="copies is 0"):
            await pool.write(NAMESPACE, chain, values(chain), copies=0)


@pytest.mark.parametrize("copies", [1, 2])
async def test_an_error_of_one_server_leaves_a_call_as_it_is(
    two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """Calls to several servers at once raise a single error, as the documentation says."""
    chain = keys("both", 2)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise TooLarge("no")

    config = ClientConfig(masters=[two_servers.address], transports=["tcp"])
    async with two_servers.pool(config) as pool:
        for number, digest in enumerate(chain):
            await admin(pool).write_to(f"dev-{number}", NAMESPACE, digest, bytes(100))
        match = await pool.match(NAMESPACE, chain)
        assert len(match.runs) == 2
        monkeypatch.setattr(StreamChannel, "read", refuse)
        monkeypatch.setattr(StreamChannel, "write", refuse)
        with pytest.raises(TooLarge, match="no"):
            await pool.read(NAMESPACE, chain, buffers(2), match=match)
        with pytest.raises(TooLarge, match="no"):
            await pool.write(NAMESPACE, keys("new", 1), [bytes(100)], copies=copies)
