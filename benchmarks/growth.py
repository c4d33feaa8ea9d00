"""How the cost of each request and each periodic step grows: at n and at 10 n of everything.

    .venv/bin/python -m benchmarks.growth [--part master|server|client]

Of a master: blocks, namespaces, tenants, servers and sessions. Of a server: blocks, namespaces,
tenants, sessions of programs, connections, blocks that have left, and writers that wait for space.
Of a client: tenants, and servers that have the blocks of a read. One dimension grows at a time.
Times are CPU time of this thread, the least of several, so a busy machine changes them little. Exit
code 1 if something grows faster than n log n, or holds the loop for more than 5 ms in one turn.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from kvpool import ServerConfig
from kvpool.client.attempts import ReadRates, Standing
from kvpool.client.room import room_of
from kvpool.client.ways import Ways
from kvpool.config import MasterConfig
from kvpool.master.service import Master
from kvpool.master.state.change_ring import ChangeRing
from kvpool.master.state.server_record import Registration
from kvpool.operators import RemovalCursor
from kvpool.ops.metrics import pages_of_master, pages_of_server
from kvpool.protocols import Caller, Connection, Peer, ReserveRequest
from kvpool.server.block_server import BlockServer
from kvpool.server.eviction.lru import LRU
from kvpool.server.moves.state.copy_demand import RepairPlanner
from kvpool.server.moves.state.wants import MoveView
from kvpool.server.namespace_removal import NamespaceRemoval, remove_written
from kvpool.server.state.quota import Quota
from kvpool.server.state.tenants import set_quotas
from kvpool.server.state.tier_stores import stores_of
from kvpool.types import (
    ARRIVED,
    ROOT,
    ChainEnd,
    Cluster,
    Demand,
    Member,
    Namespace,
    ReadResult,
    ReadStatus,
    ServerStats,
    SessionHint,
    WorkingSet,
)
from kvpool.wire import messages as wire
from kvpool.wire.changes import Changes, ChangesReply, Snapshot
from kvpool.wire.hints import ExplainSession, Hint
from kvpool.wire.questions import Demands, Namespaces
from kvpool_tiers.dram import Dram

#: Seconds of one turn of a loop.
TURN_S = 0.005
#: Below this a ratio is noise.
SMALL_S = 0.0003
REPEATS = 7
BATCH = 512
BLOCK = 64
TOKEN = bytes(16)
NUMBERS = itertools.count()
#: The first one of the first tenant.
SESSION = "@t0/program=p0;0"

Work = Callable[[], object]


class Row(NamedTuple):
    """The cost of one piece of work, in seconds, at n and at 10 n of one dimension."""

    grows: str
    n: int
    work: str
    small_s: float
    large_s: float

    @property
    def verdict(self) -> str:
        """Empty, or what is wrong."""
        allowed = 1.5 * 10 * math.log(10 * self.n) / math.log(self.n)
        if self.large_s > SMALL_S and self.large_s > allowed * max(self.small_s, SMALL_S / 10):
            return "grows faster than n log n"
        return f"more than {TURN_S * 1e3:g} ms" if self.large_s > TURN_S else ""


def cost(work: Work) -> float:
    """Seconds of CPU time, or what the work returns as such; the least of several runs."""
    best = math.inf
    for _ in range(REPEATS):
        began = time.thread_time()
        took = work()
        best = min(best, took if isinstance(took, float) else time.thread_time() - began)
    return best


def longest_step(steps: Iterator[object]) -> float:
    """Of what is done in steps, between which others may run."""
    most = 0.0
    while True:
        began = time.thread_time()
        more = next(steps, None)
        most = max(most, time.thread_time() - began)
        if more is None:
            return most


def turns_of(work: Coroutine[None, None, object]) -> Iterator[object]:
    """The turns of a coroutine that awaits no more than others' turns."""
    try:
        while True:
            yield work.send(None) is None
    except StopIteration:
        return


def digests(count: int) -> list[bytes]:
    """New ones."""
    first = next(NUMBERS) << 64
    return [(first + number).to_bytes(32, "little") for number in range(count)]


# --- a master -----------------------------------------------------------------------------------

MASTER_SIZES = {
    "blocks": 10_000,
    "namespaces": 1000,
    "tenants": 100,
    "servers": 60,
    "sessions": 1000,
}


def master_with(
    blocks: int = 2000,
    namespaces: int = 10,
    tenants: int = 2,
    servers: int = 10,
    sessions: int = 10,
) -> dict[str, Work]:
    """All that one does, by name."""
    master = Master(MasterConfig(), cast(Any, None))
    directory = master.directory
    names = [f"s{number:05}" for number in range(servers)]
    for name in names:
        register(master, name)
    spaces = [Namespace(f"@t{n % tenants}/{n:06}") for n in range(max(namespaces, tenants))]
    here = digests(max(blocks, len(spaces)))
    each = max(1, len(here) // len(spaces))
    for number, namespace in enumerate(spaces):
        own = here[number * each : (number + 1) * each]
        for first in range(0, len(own), BATCH):
            server = names[(number + first // BATCH) % servers]
            directory.stored(server, namespace, 0, 0, own[first : first + BATCH])
    for number in range(max(sessions, wire.HINTS_MAX)):
        ask(master, Hint(f"session {number % sessions}", 5.0))
    space, found = spaces[0], here[: min(each, BATCH)]
    return {**questions(master, space, found), **announcements(master, space, names[0])}


def register(master: Master, name: str) -> None:
    address = (f"tcp://{name}:1",)
    master.directory.servers.register(
        name,
        Registration(1, f"h-{name}", address, ("dram",), 1 << 45, token=TOKEN, blocks_max=1 << 40),
        now(),
    )


def ask(master: Master, question: wire.Message, tenant: str = "") -> bytes:
    return master.handle(*wire.encode(question), Caller("10.0.0.1", tenant=tenant))[1]


def questions(master: Master, space: Namespace, found: list[bytes]) -> dict[str, Work]:
    new = digests(BATCH)
    here = (space.name, 1, 32, b"".join(found))
    missing = (space.name, 1, 32, b"".join(new))
    nowhere = ("@t0/typo", 1, 32, b"".join(new))
    changes = master.directory.servers.changes
    assert isinstance(changes, ChangeRing)
    stream = wire.decode(ChangesReply, wire.TYPES[ChangesReply], ask(master, Changes(1, 0))).stream
    asked: dict[str, wire.Message] = {
        "Find": wire.Find(*here, False),
        "Find, missing": wire.Find(*missing, False),
        "Find, a chain": wire.Find(*here, True, "session 1"),
        "Find, a chain of no session": wire.Find(*here, True, None),
        "Place": wire.Place(*missing, parent=found[0], size=1 << 20, host="h", copies=2),
        "Explain": wire.Explain(*here),
        "Explain, no namespace": wire.Explain(*nowhere),
        "Members": wire.Members(),
        "Namespaces": Namespaces(),
        "Namespaces, last": Namespaces("@t9", 1),
        "Demands": Demands(),
        "Hint": Hint("session 1", 5.0),
        "ExplainSession": ExplainSession("session 1"),
        "Changes": Changes(stream, max(0, changes.last - len(changes) // 2)),
        "Snapshot": Snapshot(),
        "Snapshot, later": Snapshot(space.name, 1, 0),
    }
    work: dict[str, Work] = {
        name: lambda question=question: ask(master, question)  # type: ignore[misc]
        for name, question in asked.items()
    }
    work["Namespaces of a tenant"] = lambda: ask(master, Namespaces(), "t1")
    return work


def announcements(master: Master, space: Namespace, server: str) -> dict[str, Work]:
    """What servers send, and what a master does by itself."""
    directory = master.directory
    order = [list[bytes]()]

    def announce(status: ReadStatus) -> None:
        if status is ReadStatus.HIT:
            order.append(digests(BATCH))
        changed = order[-1] if status is ReadStatus.HIT else order.pop()
        change = wire.BlockChanges(
            *(space.name, 1, 32, b"".join(changed)), part=0, tier=0, status=int(status)
        )
        number = directory.servers.records[server].inventories.sequence + 1
        ask(master, wire.Announce(server, 1, TOKEN, number, [change] if changed else []))

    def in_new_namespaces() -> None:
        changes = [
            wire.BlockChanges(f"new {next(NUMBERS)}", 1, 32, digest, part=0, tier=0, status=0)
            for digest in digests(128)  # as many as a server sends at once
        ]
        number = directory.servers.records[server].inventories.sequence + 1
        ask(master, wire.Announce(server, 1, TOKEN, number, changes))

    def lose() -> None:
        name = f"lost {next(NUMBERS)}"
        register(master, name)
        directory.stored(name, space, 0, 0, digests(BATCH))
        directory.servers.leave(name, 1)
        register(master, name)

    def sweep() -> Iterator[object]:
        lose()
        while master.sweeper.step():
            yield True

    pages = pages_of_master(master)
    beat = wire.Heartbeat(server, 1, TOKEN, ServerStats(used=5))
    behind = wire.Heartbeat(server, 1, TOKEN, ServerStats(used=5), 0)  # it has heard no hint
    return {
        "Heartbeat": lambda: ask(master, beat),
        "Heartbeat, with hints": lambda: ask(master, behind),
        "Announce": lambda: announce(ReadStatus.HIT),
        "Announce, evicted": lambda: announce(ReadStatus.EVICTED),
        "Announce, new namespaces": in_new_namespaces,
        "a server comes, and is lost": lose,
        "tick": lambda: directory.servers.tick(now()),
        "longest step of a sweep": lambda: longest_step(sweep()),
        "longest step of /metrics": lambda: longest_step(cast(Any, pages["/metrics"]).steps()),
    }


# --- a server -----------------------------------------------------------------------------------

SERVER_SIZES = {
    **{"blocks": 10_000, "namespaces": 500, "tenants": 100, "sessions": 1000},
    **{"connections": 100, "departures": 6000, "waiters": 400, "lookups": 1000},
}


def server_with(
    blocks: int = 2000,
    namespaces: int = 5,
    tenants: int = 0,
    sessions: int = 10,
    connections: int = 5,
    departures: int = 10,
    waiters: int = 10,
    lookups: int = 10,
) -> dict[str, Work]:
    memory = Dram((blocks + 100_000) * BLOCK, prefault=False)
    server = BlockServer(
        ServerConfig(id="s", masters=["127.0.0.1:1"], connections_max=4096),
        cluster=Cluster(),
        network=cast(Any, NoNetwork()),
        transports={},
        tiers=[memory],
        stores=stores_of([memory], LRU(), BLOCK),
    )
    if tenants:
        set_quotas(server.store, {f"t{n}": Quota() for n in range(tenants)})
    namespaces, sessions = max(namespaces, tenants), max(sessions, tenants)
    clients = [server.connect(Peer(f"client {n}", "tcp")) for n in range(connections)]
    spaces = [Namespace(f"@t{n % (tenants or 7)}/{n:06}") for n in range(namespaces)]
    here: list[list[bytes]] = []
    per = max(1, blocks // max(namespaces, sessions))
    for number in range(max(namespaces, sessions, blocks // per)):
        own = digests(per)
        one, of = number % sessions, number % namespaces % (tenants or 7)
        session = f"@t{of}/program=p{one};{one}"
        for first in range(0, per, BATCH):
            write(clients[0], spaces[number % namespaces], own[first : first + BATCH], session)
        here.append(own)
    gone = server.stack.change_log.tombstones
    gone.left_all(spaces[0], digests(departures), ReadStatus.EVICTED)
    for client in clients:  # each holds something
        request = ReserveRequest(spaces[0], 0, digests(1), [ROOT], [BLOCK], None)
        client.reserve_now(request)
    ends = [ChainEnd(spaces[0].name, 1, digest) for digest in digests(lookups)]
    for end in ends:
        write(clients[0], spaces[0], [end.digest])
    for end in ends:
        server.stack.hint(end, ARRIVED, now() + 1.0)
    work = work_of(server, clients[-1], spaces[0], here[0][:BATCH], ends)
    return work | beside(server, clients[-1], spaces, waiters, tenants or 7)


class NoNetwork:
    def connect(self, address: str) -> Any:
        return None


def write(
    client: Connection, space: Namespace, blocks: list[bytes], session: str = "", copies: int = 1
) -> None:
    parents, count = [ROOT, *blocks[:-1]], len(blocks)
    hint = SessionHint(session, None) if session else None
    request = ReserveRequest(space, 0, blocks, parents, [BLOCK] * count, hint)
    request = request._replace(copies=[copies] * count)
    answers = client.reserve_now(request)
    ids = [one.id for one in answers if one.extent is not None]
    cast(Any, client)._store.seal_all(cast(Any, client)._id, ids, [0] * len(ids), now())


def work_of(
    server: BlockServer,
    client: Connection,
    space: Namespace,
    found: list[bytes],
    ends: list[ChainEnd],
) -> dict[str, Work]:
    stack, policy = server.stack, cast(Any, server.store.extents.policy)
    missing = digests(len(found))
    order: list[list[bytes]] = []

    def write_new() -> None:
        order.append(digests(len(found)))
        write(client, space, order[-1], SESSION)

    def read(blocks: list[bytes]) -> None:
        pins = cast(Any, client)._pin(space, 0, blocks, [BLOCK] * len(blocks))
        client.unpin([pin for pin in pins if pin.extent is not None])

    def remove() -> None:
        stack.remove(space, order.pop() if order else missing)

    hints: list[tuple[str, float | None]] = [(SESSION, 5.0), ("@t1/program=p1;1", None)]
    pages, times = pages_of_server(server), itertools.count(2)

    def looked_up() -> None:
        at = now() + next(times)
        for end in ends[:8]:  # as many as a server hears of in one turn
            server.stack.hint(end, ARRIVED, at)

    return {
        "write": write_new,
        "read": lambda: read(found),
        "read, missing": lambda: read(missing),
        "remove": remove,
        "hints": lambda: [server.stack.hint(*hint, 0.0) for hint in hints],
        "hints of lookups": looked_up,
        "stats of a heartbeat": lambda: server.stats(now()),
        "longest step of an inventory": lambda: longest_step(stack.inventory_steps()),
        "the next victim": lambda: [policy.victim_age(now())],
        "the next useless one": lambda: policy.next_useless(lambda entry: False),
        "longest step of /metrics": lambda: longest_step(cast(Any, pages["/metrics"]).steps()),
    }


def beside(
    server: BlockServer, client: Connection, spaces: list[Namespace], waiters: int, tenants: int
) -> dict[str, Work]:
    """What is done for operators, for lost copies, and for writers that wait."""
    context, stack = server._context, server.stack
    removal = cast(Any, NamespaceRemoval)(server._parts)
    planner, rounds = RepairPlanner(stack), itertools.count(1)
    copied = [digests(BATCH) for _ in range(8)]  # as many as one round looks at
    for number, blocks in enumerate(copied):
        write(client, spaces[number % len(spaces)], blocks, copies=2)

    def repair() -> float:
        for number in range(256):
            planner.read(spaces[number % 8 % len(spaces)], 0, copied[number % 8])
        return longest_step(planner.wants(MoveView("s", 10.0 * next(rounds))))

    def remove() -> float:
        gone = Namespace(f"@t0/gone {next(NUMBERS)}")
        write(client, gone, digests(BATCH))

        def steps() -> Iterator[object]:
            at: RemovalCursor | None = RemovalCursor(0, 1 << 62)
            while at is not None:
                at = remove_written(stack, gone, at, 64).at
                yield True

        return longest_step(steps())

    def wake() -> float:
        loop = asyncio.get_running_loop()
        context._to_wake.clear()
        context._waiting_for_space = {
            loop.create_future(): (1e9, 64, f"t{number % tenants}") for number in range(waiters)
        }
        began = time.thread_time()
        context.space_changed()
        return time.thread_time() - began

    def list_all() -> float:
        return longest_step(turns_of(removal.holdings("", ("", 0))))

    return {
        "longest step of a repair": repair,
        "longest step of a removal": remove,
        "longest step of a list of all": list_all,
        "space for those who wait": wake,
    }


# --- a client -----------------------------------------------------------------------------------

CLIENT_SIZES = {"blocks": 500, "servers": 25, "tenants": 25}


def client_with(blocks: int = 500, servers: int = 4, tenants: int = 4) -> dict[str, Work]:
    """What it plans: a read over the servers that have its blocks, and how many sessions fit."""
    names = [f"s{number:05}" for number in range(servers)]
    good, size = Standing(ailing=False, far=True, networked=True), 1 << 20
    sets = tuple(WorkingSet(Namespace(f"@t{n}/m"), 1 << 30, 1000, 1 << 20) for n in range(tenants))
    members = [Member(one, 1, "h", (), (), True, 0.0, 1 << 40, ServerStats()) for one in names]

    def read() -> float:
        results = [ReadResult(ReadStatus.NOT_YET)] * blocks
        plan = Ways(
            *([list(names) for _ in range(blocks)], [size] * blocks, results, set[str]()),
            *(lambda server: good, ReadRates(), Counter[str](), 0.25),
        )

        def turns() -> Iterator[object]:
            clock = itertools.count()
            attempts = plan.begin(range(blocks), 0.0)
            while attempts:
                yield True
                done = attempts.pop(0)
                for position in done.positions:
                    results[position] = ReadResult(ReadStatus.HIT, size)
                attempts += plan.ended(done, 0.01 * next(clock))

        return longest_step(turns())

    return {
        "longest turn of a read": read,
        "room": lambda: room_of(Demand(1e3, sets, 1.0, 0.0), members),
    }


# --- all ---------------------------------------------------------------------------------------


def now() -> float:
    return asyncio.get_running_loop().time()


def measured(build: Callable[..., dict[str, Work]], sizes: dict[str, int]) -> Iterator[Row]:
    for grows, count in sizes.items():
        small = {name: cost(work) for name, work in build(**{grows: count}).items()}
        large = {name: cost(work) for name, work in build(**{grows: 10 * count}).items()}
        for name, seconds in small.items():
            yield Row(grows, count, name, seconds, large[name])


async def measure(part: str) -> list[Row]:
    parts: dict[str, tuple[Callable[..., dict[str, Work]], dict[str, int]]] = {
        "master": (master_with, MASTER_SIZES),
        "server": (server_with, SERVER_SIZES),
        "client": (client_with, CLIENT_SIZES),
    }
    return [
        row._replace(work=f"{name}: {row.work}")
        for name, (build, sizes) in parts.items()
        if part in ("", name)
        for row in measured(build, sizes)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["master", "server", "client"], default="")
    gc.disable()  # a collection is in no request's time
    rows = asyncio.run(measure(parser.parse_args().part))
    table = Table("grows", "n", "work", "n, ms", "10 n, ms", "ratio", "")
    for row in rows:
        if row.verdict or row.large_s > SMALL_S:
            table.add_row(
                *(row.grows, f"{row.n:,}", row.work),
                *(f"{row.small_s * 1e3:.2f}", f"{row.large_s * 1e3:.2f}"),
                *(f"{row.large_s / max(row.small_s, 1e-6):.1f}", row.verdict),
            )
    Console(width=120).print(table)
    print(f"{len(rows)} costs, {sum(bool(row.verdict) for row in rows)} too high")
    sys.exit(any(row.verdict for row in rows))


if __name__ == "__main__":
    main()
