"""Every reply fits into a message, with the longest names that there may be: by its type, or in
pages that have everything between them."""

from __future__ import annotations

import asyncio
import re
import secrets
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import inspect

from kvpool import dev, types
from kvpool.client.lookup import Lookup
from kvpool.client.pool_events import EventReader, PoolEventKind
from kvpool.config import MasterConfig
from kvpool.master.service import Master
from kvpool.master.state.change_ring import SIZE_MAX, ChangeRing, message_size_of
from kvpool.master.state.changes import ChangeKind, LoggedChange
from kvpool.master.state.explanations import explain
from kvpool.master.state.server_record import Registration
from kvpool.server import block_server, consumers
from kvpool.types import BATCH_BLOCKS_MAX, BLOCK_SIZE_MAX, Namespace, ReadStatus
from kvpool.wire.frames import BODY_SIZE_MAX
from kvpool_transports.streams.server import _HELLO_MAX, _REQUEST_MAX
from tests.conftest import keys
from tests.support import messages as wire
from tests.support.moves import moves_of

#: What its type does not bound, and who does: the test that tries it with the longest names.
BOUNDED = {
    wire.FindReply: "pages: test_where_blocks_are_comes_in_pages",
    wire.Explained: "pages: test_where_blocks_are_comes_in_pages",
    wire.MembersReply: "pages: test_full_figures_fit_into_a_heartbeat_and_come_in_pages",
    wire.ChangesReply: "pages: test_a_follower_has_the_whole_map",
    wire.PlaceReply: "the first of them: test_a_block_that_is_everywhere_fits_into_one_answer",
    wire.Announce: "the outbox: tests/server/test_announcer.py",
    wire.Inventory: "the outbox: tests/server/test_announcer.py",
    wire.Heartbeat: "what is shown: test_full_figures_fit_into_a_heartbeat_and_come_in_pages",
    wire.Reserve: "a batch: test_a_server_takes_the_longest_request_and_not_much_more",
}
LONG = "\N{BANKNOTE WITH DOLLAR SIGN}"  # takes the most bytes of what a name may have
BLOCKS = keys("sizes", 40)


def most(type: inspect.Type) -> int:
    """Bytes that a value of this type takes at most."""
    match type:
        case inspect.StructType(fields=fields):
            return 5 + sum(5 + len(field.encode_name) + most(field.type) for field in fields)
        case inspect.StrType(max_length=int(length)):
            return 5 + 4 * length
        case inspect.BytesType(max_length=int(length)):
            return 5 + length
        case inspect.ListType(item_type=item, max_length=int(length)):
            return 5 + length * most(item)
        case inspect.DictType(key_type=key, value_type=value, max_length=int(length)):
            return 5 + length * (most(key) + most(value))
        case inspect.TupleType(item_types=items):
            return 5 + sum(map(most, items))
        case inspect.VarTupleType(item_type=item, max_length=int(length)):
            return 5 + length * most(item)
        case inspect.UnionType(types=kinds):
            return max(map(most, kinds))
        case inspect.Metadata(type=inner):
            return most(inner)
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType() | inspect.NoneType():
            return 9
    raise AssertionError(f"nothing bounds {type}")


@pytest.mark.parametrize("kind", wire.TYPES, ids=lambda kind: kind.__name__)
def test_every_message_is_bounded_by_its_type_or_paged(kind: type[wire.Message]) -> None:
    assert (most(inspect.type_info(kind)) > BODY_SIZE_MAX) == (kind in BOUNDED)


def test_no_file_of_messages_is_forgotten() -> None:
    """A ring has its messages in a file of its own; what tests look at has all of them."""
    root = Path(__file__).parents[2]
    files = [*root.glob("kvpool/**/*.py"), *root.glob("transports/*/**/*.py")]
    rings = {one.stem for one in files if re.search(r"^register\(", one.read_text(), re.M)}
    assert {kind.__module__.rpartition(".")[2] for kind in wire.TYPES} == rings | {"messages"}


def test_a_server_takes_the_longest_request_and_not_much_more() -> None:
    many = [secrets.token_bytes(32) for _ in range(BATCH_BLOCKS_MAX)]
    numbers = [2**64 - 1] * len(many)
    longest = wire.Reserve(
        "".ljust(512, LONG),
        256,
        32,
        b"".join(many),
        255,
        b"".join(many),
        [BLOCK_SIZE_MAX] * len(many),
        1.0,
        session="".ljust(128, LONG),
        checksums=numbers,
        visible=True,
    )
    body = wire.encode(longest)[1]
    assert len(body) <= _REQUEST_MAX < 2 * len(body)
    assert len(wire.encode(wire.Hello(LONG * 256, LONG * 256, bytes(32)))[1]) <= _HELLO_MAX


async def test_full_figures_fit_into_a_heartbeat_and_come_in_pages(pool_dev: dev.Dev) -> None:
    """Of servers with eight tiers, that show as many of everything as any does."""
    name, names = LONG * 256, [f"{number}".ljust(256, LONG) for number in range(8)]
    evicted = {f"{number:032}": 2**47 for number in range(17)}
    consumer = types.Consumer("namespace", name, dict.fromkeys(names, 2**47), evicted_by=evicted)
    stats = types.ServerStats(
        counters={f"{number:040}": 2**47 for number in range(128)},
        usage=[types.TierUsage(name, LONG * 2048)] * 8,
        clients=[types.ClientUsage(name, name)] * block_server._CLIENTS_SHOWN,
        consumers=[consumer] * sum(count + 1 for count in consumers._SHOWN.values()),
    )
    answers = [(LONG * 128, True)] * wire.HINT_ANSWERS_MAX
    heartbeat = wire.Heartbeat(name, 2**64 - 1, bytes(16), stats, hint_answers=answers)
    assert len(wire.encode(heartbeat)[1]) <= BODY_SIZE_MAX
    servers, now = pool_dev.master.directory.servers, asyncio.get_running_loop().time()
    for one in names:
        servers.register(one, Registration(1, one, ("tcp://h:1",), ("dram",), 1 << 40), now)
        assert servers.heartbeat(one, 1, stats, now)
    async with pool_dev.pool() as pool:
        assert {one.server for one in await pool.members()} == {"dev-0", *names}
    asked = moves_of(pool_dev.servers[0]).peers.masters
    assert set(await asked.members(now + 5)) == {"dev-0", *names}


# --- those that are paged -------------------------------------------------------------------


def crowded(servers: int, namespaces: int = 1, parts: int = 8) -> Master:
    """A master of which each name is as long as it may be; block n begins on server n."""
    master = Master(MasterConfig(), cast(Any, None))
    directory = master.directory
    for number in range(servers):
        name = f"{number:03}".ljust(256, LONG)
        tier = ["".ljust(256, LONG)]
        host = f"{number}".ljust(256, LONG)
        directory.servers.register(name, Registration(1, host, ("tcp://h:1",), tier, 1 << 40), 0.0)
    records = [one.server for one in directory.servers.members(0.0)]
    for number in range(namespaces):
        namespace = long_name(number, parts)
        for at, digest in enumerate(BLOCKS):
            for server in {records[at % servers], records[(at + 1) % servers], records[0]}:
                for part in range(parts):
                    directory.stored(server, namespace, part, 0, [digest])
    return master


def long_name(number: int, parts: int = 8) -> Namespace:
    return Namespace(f"{number:03}".ljust(512, LONG), parts)


def ask(master: Master, question: wire.Message, answer: type[wire.M]) -> wire.M:
    number, body = master.handle(*wire.encode(question))
    assert len(body) <= BODY_SIZE_MAX
    return wire.decode(answer, number, body)


class Direct:
    """What a client has of a master that is asked directly."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self.asked = 0

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        self.asked += 1
        return ask(self.master, message, answer)


def lookup(master: Master) -> Lookup:
    return Lookup(cast(Any, Direct(master)), cast(Any, None))


async def test_where_blocks_are_comes_in_pages() -> None:
    """Of a chain, of blocks in whatever order, and with words."""
    master = crowded(20)
    client = lookup(master)
    asked = [*BLOCKS[:30], *keys("not there", 3), *BLOCKS[30:]]
    match = await client.match(long_name(0), BLOCKS, 0.0)
    assert match.length == len(BLOCKS)
    assert [at for run in match.runs for at in range(run.first, run.last + 1)] == list(range(40))
    direct = master.directory.match(long_name(0), BLOCKS)
    assert [one.replicas for one in match.runs] == [one.replicas for one in direct.runs]
    assert (
        await client.contains(long_name(0), asked, 0.0) == [True] * 30 + [False] * 3 + [True] * 10
    )
    explained = await client.explain(long_name(0), asked, 0.0)
    assert [one.key.digest for one in explained] == asked
    assert [one.status.hit for one in explained] == [True] * 30 + [False] * 3 + [True] * 10


async def test_a_reason_stays_with_its_block() -> None:
    master = crowded(20)
    for reason, digest in ((ReadStatus.EVICTED, BLOCKS[3]), (ReadStatus.REMOVED, BLOCKS[35])):
        for server in [one.server for one in master.directory.servers.members(0.0)]:
            for part in range(8):
                master.directory.removed(server, long_name(0), part, [digest], reason)
    explained = await lookup(master).explain(long_name(0), BLOCKS, 0.0)
    assert [(at, one.status) for at, one in enumerate(explained) if not one.status.hit] == [
        (3, ReadStatus.EVICTED),
        (35, ReadStatus.REMOVED),
    ]
    found = await lookup(master).match(long_name(0), BLOCKS, 0.0)
    assert (found.length, found.stopped) == (3, ReadStatus.EVICTED)
    beyond = await lookup(master).match(long_name(0), BLOCKS[4:], 0.0)
    assert (beyond.length, beyond.stopped) == (31, ReadStatus.REMOVED)


async def test_a_block_that_is_everywhere_fits_into_one_answer() -> None:
    master = crowded(80)
    everywhere = [one.server for one in master.directory.servers.members(0.0)]
    for server in everywhere:
        for part in range(8):
            master.directory.stored(server, long_name(0), part, 0, BLOCKS[:1])
    question = (long_name(0).name, 8, 32, BLOCKS[0])
    for prefix in (False, True):
        found = ask(master, wire.Find(*question, prefix), wire.FindReply)
        ((first, last, replicas),) = found.runs
        assert (first, last, found.more) == (0, 0, False)
        assert {part for _, _, part in replicas} == set(range(8)), "a reader finds each part"
    (one,) = ask(master, wire.Explain(*question), wire.Explained).blocks
    assert one[0] == 0
    place = wire.Place(*question, parent=BLOCKS[0], size=64, host="h", copies=16)
    assert len(ask(master, place, wire.PlaceReply).servers) >= 16


@pytest.mark.parametrize("servers", [1, 40, 80])
async def test_a_follower_has_the_whole_map(servers: int) -> None:
    """Many servers, many namespaces, blocks on many servers."""
    master = crowded(servers, namespaces=3)
    for number in range(3, 600 if servers == 1 else 3):
        master.directory.stored("000".ljust(256, LONG), long_name(number), 0, 0, BLOCKS[:1])
    everywhere = [one.server for one in master.directory.servers.members(0.0)]
    for server in everywhere:
        for part in range(8):
            master.directory.stored(server, long_name(0), part, 0, BLOCKS[:1])
    direct = Direct(master)
    held: set[tuple[str, Namespace | None, int, bytes]] = set()
    async for event in EventReader(direct, lambda: 0.0):
        for digest in event.digests:
            held.add((event.server, event.namespace, event.part, digest))
        if event.kind is PoolEventKind.LIVE:
            break
    wanted = {
        (replica.server, namespace, replica.part, digest)
        for namespace in master.directory.blocks.after("")
        for digest in BLOCKS
        for one in explain(master.directory, namespace, [digest])
        for replica in one.replicas
    }
    assert held == wanted


async def test_a_follower_has_every_server() -> None:
    master = Master(MasterConfig(), cast(Any, None))
    for number in range(600):
        name, host = (f"{number:03}".ljust(256, LONG) for _ in range(2))
        master.directory.servers.register(
            name, Registration(1, host, ("tcp://h:1",), ("dram",), 1 << 40), 0.0
        )
        if number % 2:
            master.directory.servers.leave(name, 1)
    state: dict[str, PoolEventKind] = {}
    async for event in EventReader(Direct(master), lambda: 0.0):
        if event.server:
            state[event.server] = event.kind
        if event.kind is PoolEventKind.LIVE:
            break
    assert {server: kind is PoolEventKind.BACK for server, kind in state.items()} == {
        one.server: one.alive for one in master.directory.servers.members(0.0)
    }


def test_a_follower_gets_past_any_change() -> None:
    """A tenant writes single blocks into a namespace with a long name."""
    master = crowded(1)
    log = master.directory.servers.changes
    assert isinstance(log, ChangeRing)
    begun = log.last
    for number in range(2500):
        digest = number.to_bytes(32, "big")
        master.directory.stored("000".ljust(256, LONG), long_name(0), 0, 0, [digest])
    stream = ask(master, wire.Changes(1, 0), wire.ChangesReply).stream
    at, seen = begun, 0
    while at < log.last:
        page = ask(master, wire.Changes(stream, at), wire.ChangesReply)
        assert page.changes
        assert page.more == (page.last < log.last)
        at, seen = page.last, seen + len(page.changes)
    assert seen == 2500


def test_what_is_kept_of_changes_is_bounded_in_bytes() -> None:
    log = ChangeRing()
    change = LoggedChange(ChangeKind.REMOVED, "s", long_name(0), 0, "", 32, bytes(32))
    for _ in range(SIZE_MAX // message_size_of(change) + 10):
        log.add(change)
    assert len(log) == SIZE_MAX // message_size_of(change)
    at = log.last - len(log)
    assert log.since(at, 1) == ([change], at + 1)
    assert log.since(at - 1, 1) is None
