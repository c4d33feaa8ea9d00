"""Two writers with other bytes for one key: the copies on several servers are one version (G2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool import ClientConfig, Namespace, Pool, WriteStatus, admin, dev
from kvpool.client import versions
from kvpool.client.versions import WrittenBlock
from kvpool.client.writer import best_status
from kvpool.errors import LinkBroken, Overloaded, PeerError
from kvpool.master.state.demand import listed_of
from kvpool.master.state.placement import Placement
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Addressable, Channel, WriteOptions
from kvpool.registry import transports
from kvpool.runtime import Host
from kvpool.server.connection import ServerConnection
from kvpool.types import ROOT, Cluster, WriteBlock
from kvpool.wire import messages as wire
from kvpool_transports.streams.requests import StreamChannel
from tests.conftest import NAMESPACE, buffers, eventually, keys

HALVES = Namespace("test/halves", parts=2)
STORED, ALREADY_STORED = WriteStatus.STORED, WriteStatus.ALREADY_STORED


def stored(running: dev.Dev, digest: bytes, part: int = 0, of: Namespace = NAMESPACE) -> list[int]:
    """For each server that has the block: the first of its bytes."""
    found = []
    for server in running.servers:
        entry = server.store.index.peek(of, part, digest)
        if entry is not None:
            assert isinstance(server.tier, Addressable)
            found.append(server.tier.view(entry.offset, 1)[0])
    return found


@asynccontextmanager
async def client_on(running: dev.Dev, host: str) -> AsyncIterator[Pool]:
    """A client on another host, so that masters send it to other servers first."""
    config = ClientConfig(masters=[running.address], transports=["tcp"])
    pool = Pool(
        config,
        cluster=Cluster(),
        network=TcpNetwork(),
        transports=transports(["tcp"]),
        owns_network=True,
        host=Host(host, host, host, lambda: 0),
    )
    async with pool:
        yield pool


@pytest.fixture
async def far_apart(two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch) -> dev.Dev:
    """Writers on host `a` write to dev-0 first, those on host `b` to dev-1."""
    place = two_servers.master.directory.place

    def by_host(*asked: Any) -> Placement:
        placed = place(*asked)
        return placed._replace(servers=tuple(sorted(placed.servers, reverse=asked[4] == "b")))

    monkeypatch.setattr(two_servers.master.directory, "place", by_host)
    return two_servers


async def test_a_further_copy_is_made_of_the_stored_bytes(two_servers: dev.Dev) -> None:
    chain = keys("second", 20)
    async with two_servers.pool() as first, two_servers.pool() as second:
        await first.write(NAMESPACE, chain, [b"a" * 5000] * 20)
        statuses = await second.write(NAMESPACE, chain, [b"b" * 5000] * 20, copies=2)
        assert statuses == [ALREADY_STORED] * 20
        assert second.counters["copies_missing"] == 0
    assert [stored(two_servers, digest) for digest in chain] == [[ord("a"), ord("a")]] * 20


async def test_stored_bytes_are_copied_whatever_their_size(two_servers: dev.Dev) -> None:
    """A shorter block is copied; one that is longer than the caller's is left alone."""
    short, long = keys("sizes", 2)
    async with two_servers.pool() as first, two_servers.pool() as second:
        await first.write(NAMESPACE, [short, long], [b"a" * 100, b"a" * 9000])
        await second.write(NAMESPACE, [short, long], [b"b" * 5000] * 2, copies=2)
        assert second.counters["copies_missing"] == 1
        (got,) = buffers(1, 5000)
        (result,) = await second.read(NAMESPACE, [short], [got])
    assert (result.size, got[:100]) == (100, b"a" * 100)
    assert [len(stored(two_servers, digest)) for digest in (short, long)] == [2, 1]


async def test_more_than_a_round_of_stored_bytes_is_copied(
    two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_ROUND_BYTES", 12_000)
    chain = keys("rounds", 7)
    async with two_servers.pool() as first, two_servers.pool() as second:
        await first.write(NAMESPACE, chain, [bytes([i]) * 5000 for i in range(7)])
        await second.write(NAMESPACE, chain, [b"b" * 5000] * 7, copies=2)
    assert [stored(two_servers, digest) for digest in chain] == [[i, i] for i in range(7)]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([8 << 20, 8 << 20, 1], [[0, 1], [2]]),
        ([17 << 20, 1], [[0], [1]]),
        ([1, 17 << 20], [[0], [1]]),
        ([], []),
    ],
)
def test_a_round_is_16_mib_or_one_block(sizes: list[int], groups: list[list[int]]) -> None:
    assert versions.rounds(range(len(sizes)), sizes) == groups


async def test_a_block_on_a_named_server_is_what_the_pool_has(two_servers: dev.Dev) -> None:
    (digest,) = keys("named", 1)
    async with two_servers.pool() as pool:
        assert await admin(pool).write_to("dev-1", NAMESPACE, digest, b"a" * 5000) is STORED
        assert await admin(pool).write_to("dev-0", NAMESPACE, digest, b"b" * 5000) is ALREADY_STORED
        assert stored(two_servers, digest) == [ord("a"), ord("a")]
        await pool.remove(NAMESPACE, [digest])
        await admin(pool).write_to("dev-1", NAMESPACE, digest, b"a" * 5000)
        assert await admin(pool).write_to("dev-0", NAMESPACE, digest, b"a" * 5000) is STORED


async def test_a_named_server_that_refuses_is_an_answer(
    two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example to a writer that was stopped for so long that it was cut off."""

    async def refuse(*arguments: object, **options: object) -> list[WriteStatus]:
        raise Overloaded("no byte moved for 2 s")

    monkeypatch.setattr(ServerConnection, "seal", refuse)
    async with two_servers.pool() as pool:
        status = await admin(pool).write_to("dev-1", NAMESPACE, keys("refused", 1)[0], b"a" * 5000)
        assert status is WriteStatus.REFUSED


async def test_nothing_is_added_to_bytes_that_cannot_be_read(two_servers: dev.Dev) -> None:
    """The holder does not answer, so what it has is not known: a copy might be another version."""
    (digest,) = keys("unknown", 1)
    async with two_servers.pool() as first, client_on(two_servers, "far") as second:
        await admin(first).write_to("dev-1", NAMESPACE, digest, b"a" * 5000)
        for listener in two_servers.servers[1]._listeners:
            await listener.close()
        status = await admin(second).write_to("dev-0", NAMESPACE, digest, b"b" * 5000)
        assert status is ALREADY_STORED
        await second.write(NAMESPACE, [digest], [b"b" * 5000], copies=2)
        assert second.counters["copies_missing"] == 1
    assert stored(two_servers, digest) == [ord("a")]


@pytest.mark.parametrize("copies", [1, 2])
async def test_of_two_writers_at_once_one_version_stays(far_apart: dev.Dev, copies: int) -> None:
    """Who has no time left to look leaves both: here they have."""
    chain = keys("race", 30)
    async with client_on(far_apart, "a") as a, client_on(far_apart, "b") as b:
        outcomes = [
            await asyncio.gather(
                a.write(NAMESPACE, [digest], [b"a" * 5000], copies=copies, timeout=20),
                b.write(NAMESPACE, [digest], [b"b" * 5000], copies=copies, timeout=20),
            )
            for digest in chain
        ]
        lengths = [(await a.match(NAMESPACE, [digest])).length for digest in chain]
        removed = a.counters["versions_removed"] + b.counters["versions_removed"]
    held = [stored(far_apart, digest) for digest in chain]
    assert all(len(set(versions)) == 1 for versions in held)
    assert lengths == [1] * 30
    assert removed or copies == 2  # they did meet
    for (ones, others), found in zip(outcomes, held, strict=True):
        winner = ones if found[0] == ord("a") else others
        assert winner[0] in (STORED, ALREADY_STORED)


@pytest.mark.parametrize(
    ("copies", "holder", "size"),
    [
        (1, 0, 5000),
        (1, 0, 9000),
        (1, 1, 100),
        (2, 0, 100),
        (2, 0, 9000),
        (2, 1, 9000),
        (2, 2, 5000),
    ],
)
async def test_the_version_on_the_first_server_stays(
    monkeypatch: pytest.MonkeyPatch, copies: int, holder: int, size: int
) -> None:
    """Also when another writer's block came after the master had been asked, and is longer."""
    (digest,) = keys("first", 1)
    async with dev.serve("16MiB", servers=3) as running, running.pool() as pool:
        other = b"bc" * 4500  # the shorter ones are beginnings of it
        await admin(pool).write_to(f"dev-{holder}", NAMESPACE, digest, other[:size])
        names = [f"dev-{number}" for number in range(3) if number != holder]
        place = Placement((*names, f"dev-{holder}"), (0,))
        monkeypatch.setattr(running.master.directory, "place", lambda *_: place)
        ours = b"a" * 5000 if size == 5000 else other[:5000]
        (status,) = await pool.write(NAMESPACE, [digest], [ours], copies=copies)
        (got,) = buffers(1, 9000)
        (result,) = await pool.read(NAMESPACE, [digest], [got])
        held = [server.store.index.peek(NAMESPACE, 0, digest) for server in running.servers]
    if holder == 0:
        assert status is ALREADY_STORED
        assert got[: result.size] == other[:size]
    else:
        assert status is STORED
        assert got[: result.size] == ours
    sizes = [entry.size for entry in held if entry is not None]
    # What is longer than the caller's block is not copied.
    assert sizes == [result.size] * (1 if size == 9000 and holder == 0 else copies)


async def test_parts_of_two_writers_are_one_version_each(far_apart: dev.Dev) -> None:
    """The parts of a block are settled one by one, also while others are missing."""
    chain = keys("parts", 20)
    async with client_on(far_apart, "a") as a, client_on(far_apart, "b") as b:
        for digest in chain:
            await asyncio.gather(
                *(
                    pool.write(HALVES, [digest], [data * 5000], part=part)
                    for pool, data in ((a, b"a"), (b, b"b"))
                    for part in (0, 1)
                )
            )
        match = [(await a.match(HALVES, [digest])).length for digest in chain]
    for part in (0, 1):
        assert all(len(set(stored(far_apart, one, part, HALVES))) == 1 for one in chain)
    assert match == [1] * 20


async def test_half_a_block_of_another_writer_is_completed(far_apart: dev.Dev) -> None:
    """Only the part that is there twice goes: the other one is not removed with it."""
    (digest,) = keys("half", 1)
    async with client_on(far_apart, "a") as a, client_on(far_apart, "b") as b:
        await a.write(HALVES, [digest], [b"a" * 5000], part=0)
        await b.write(HALVES, [digest], [b"b" * 5000], part=1)
        await b.write(HALVES, [digest], [b"b" * 5000], part=0)
        assert (await a.match(HALVES, [digest])).length == 1
    assert stored(far_apart, digest, 0, HALVES) == [ord("a")]
    assert stored(far_apart, digest, 1, HALVES) == [ord("b")]


async def test_a_block_that_is_there_with_all_parts_is_not_written_again(
    far_apart: dev.Dev,
) -> None:
    (digest,) = keys("whole", 1)
    async with client_on(far_apart, "a") as a, client_on(far_apart, "b") as b:
        for part in (0, 1):
            await a.write(HALVES, [digest], [b"a" * 5000], part=part)
        for part in (0, 1):
            assert await b.write(HALVES, [digest], [b"b" * 5000], part=part) == [ALREADY_STORED]
    assert stored(far_apart, digest, 0, HALVES) == [ord("a")]


async def test_the_loser_reads_the_version_that_stays(far_apart: dev.Dev) -> None:
    (digest,) = keys("loser", 1)
    async with client_on(far_apart, "a") as a, client_on(far_apart, "b") as b:
        await a.write(NAMESPACE, [digest], [b"a" * 5000], visible=False)
        statuses = await asyncio.gather(
            admin(b).write_to("dev-1", NAMESPACE, digest, b"b" * 5000),
            admin(a).write_to("dev-0", NAMESPACE, digest, b"a" * 5000),
        )
        (got,) = buffers(1, 5000)
        (result,) = await b.read(NAMESPACE, [digest], [got])
    assert result.status.hit
    assert got == b"a" * 5000
    assert statuses[0] is ALREADY_STORED


async def settled(
    running: dev.Dev, pool: Pool, digest: bytes, ours: bytes, servers: set[str]
) -> tuple[set[int], WrittenBlock]:
    """The last look of a writer that has stored `ours` on `servers`."""
    block = WriteBlock(digest, ROOT, (memoryview(ours),), len(ours))
    written = WrittenBlock(block, servers, set())
    deadline = asyncio.get_running_loop().time() + 5
    lost = await pool._writer.versions.settle(
        WriteOptions(NAMESPACE, 0, visible=True), {0: written}, deadline
    )
    return lost, written


@pytest.mark.parametrize(
    ("held", "left", "servers"),
    [
        ("abb", "a", {"dev-0"}),  # the copy on dev-2 is the other writer's by now
        ("bba", "bb", set()),  # the one on dev-0 is, so the other version stays
        ("-ba", "b", set()),  # the one on dev-0 has left: the other version is on the first server
        ("aba", "aa", {"dev-0", "dev-2"}),
        ("bbb", "bbb", set()),
        ("-b-", "b", set()),
    ],
)
async def test_a_writer_looks_at_its_own_copies_again(
    held: str, left: str, servers: set[str]
) -> None:
    """It stored `a` on dev-0 and dev-2. Then another writer may have replaced its copies by `b`."""
    (digest,) = keys("again", 1)
    async with dev.serve("16MiB", servers=3) as running, running.pool() as pool:
        for number, version in enumerate(held):
            if version != "-":
                options = WriteOptions(NAMESPACE, 0, visible=True)
                block = WriteBlock(digest, ROOT, (memoryview(version.encode() * 5000),), 5000)
                deadline = asyncio.get_running_loop().time() + 5
                await pool._writer.write_on(f"dev-{number}", options, [block], deadline)
        lost, written = await settled(running, pool, digest, b"a" * 5000, {"dev-0", "dev-2"})
        assert "".join(map(chr, stored(running, digest))) == left
    assert lost == (set() if servers else {0})
    if servers:
        assert written.servers == servers
        assert not written.others


async def test_a_writer_removes_the_version_that_it_has_read(
    two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its removal another writer has stored the version that stays."""
    (digest,) = keys("meant", 1)
    async with two_servers.pool() as pool:
        await admin(pool).write_to("dev-0", NAMESPACE, digest, b"a" * 5000)
        (server,) = two_servers.servers[1:]
        block = WriteBlock(digest, ROOT, (memoryview(b"b" * 5000),), 5000)
        deadline = asyncio.get_running_loop().time() + 5
        options = WriteOptions(NAMESPACE, 0, visible=True)
        await pool._writer.write_on("dev-1", options, [block], deadline)
        remove = versions.Versions._remove

        async def late(*arguments: Any) -> None:
            server.store.remove(NAMESPACE, [digest])
            same = block._replace(pieces=(memoryview(b"a" * 5000),))
            await pool._writer.write_on("dev-1", options, [same], deadline)
            await remove(*arguments)

        monkeypatch.setattr(versions.Versions, "_remove", late)
        lost, _ = await settled(two_servers, pool, digest, b"a" * 5000, {"dev-0"})
    assert not lost
    assert stored(two_servers, digest) == [ord("a"), ord("a")]


@pytest.mark.parametrize(
    "which", [(None, [7, 7]), (0, [7]), (0, [7] * 3), (None, [], True), (0, [7, 7], True)], ids=str
)
async def test_a_removal_names_one_version_for_each_block(
    two_servers: dev.Dev, which: tuple[Any, ...]
) -> None:
    """Or none, and asks for what is corrupt."""
    chain = keys("named", 2)
    async with client_on(two_servers, "far") as pool:
        await admin(pool).write_to("dev-0", NAMESPACE, chain[0], b"a" * 5000)
        deadline = asyncio.get_running_loop().time() + 5
        channel = await pool._servers.call("dev-0", _itself, deadline)
        message = wire.Remove(*wire.keys_of(NAMESPACE, chain), *which)
        with pytest.raises(PeerError, match="of one part"):
            await channel.request(message, wire.StatusReply, deadline=deadline)
    assert stored(two_servers, chain[0]) == [ord("a")]


async def _itself(channel: Channel) -> Channel:
    return channel


def test_the_more_telling_answer_of_two_servers_counts() -> None:
    """Also what is no answer has a rank: a server that is wrong must not end a write."""
    names = "STORED ALREADY_STORED IN_PROGRESS BYPASSED NO_SPACE REFUSED DEADLINE SERVER_LOST"
    telling = [
        WriteStatus[name] for name in f"{names} TOO_LARGE NO_MASTER NOT_YET RESERVED".split()
    ]
    assert set(telling) == set(WriteStatus)
    for index, one in enumerate(telling):
        for other in telling[index:]:
            assert best_status(one, other) is best_status(other, one) is one


async def test_a_write_that_began_before_its_place_was_known_leaves_one_version(
    far_apart: dev.Dev,
) -> None:
    """The master's answer, that another server has the block, comes too late."""
    (head,), (block,) = keys("head", 1), keys("goes on", 1)
    async with client_on(far_apart, "a") as near, client_on(far_apart, "b") as far:
        await near.write(NAMESPACE, [head], [b"h" * 64])
        await far.write(NAMESPACE, [block], [b"f" * 64], parent=head)
        assert stored(far_apart, block) == [ord("f")]
        await near.write(NAMESPACE, [block], [b"n" * 64], parent=head)
        assert len(set(stored(far_apart, block))) == 1


@pytest.mark.parametrize(
    ("there", "asked", "breaks"), [([], 0, 0), ([0], 1, 0), ([2], 1, 0), ([2], 1, 1)]
)
async def test_masters_are_asked_again_only_about_blocks_that_another_server_has(
    far_apart: dev.Dev, monkeypatch: pytest.MonkeyPatch, there: list[int], asked: int, breaks: int
) -> None:
    """They said so when they listed them, in whatever message, and with whatever attempt."""
    monkeypatch.setattr(wire, "ANNOUNCED_BLOCKS_MAX", 2)
    chain, finds = keys("told", 3), far_apart.master.requests
    whole, links = StreamChannel.write, iter(range(breaks))

    async def write(self: Any, options: Any, blocks: list[WriteBlock], *, deadline: float) -> Any:
        if len(blocks) == 3 and next(links, None) is not None:
            await whole(self, options, blocks[:2], deadline=deadline)
            raise LinkBroken("a test")
        return await whole(self, options, blocks, deadline=deadline)

    monkeypatch.setattr(StreamChannel, "write", write)
    async with client_on(far_apart, "a") as a, client_on(far_apart, "b") as b:
        for one, name in ((a, "a"), (b, "b")):
            await one.write(NAMESPACE, keys(name, 1), [b"-" * 64])
        for position in there:
            await b.write(NAMESPACE, [chain[position]], [b"b" * 64], visible=False)
        listed, place = far_apart.master.directory, Placement(("dev-0", "dev-1"), [0] * 3)
        await eventually(lambda: listed_of(listed, NAMESPACE, chain) == len(there))
        monkeypatch.setattr(listed, "place", lambda *_: place)
        before = finds["find"]
        await a.write(NAMESPACE, chain, [b"a" * 64] * 3)
        assert finds["find"] - before == asked
    assert [len(stored(far_apart, digest)) for digest in chain] == [1, 1, 1]
