"""No task ends in silence: those that live long are supervised, and go on after any exception."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import zmq

from kvpool import dev, supervision
from kvpool.master.state.server_table import ServerTable
from kvpool.net import tenants_file
from kvpool.net.event_publisher import EventPublisher
from kvpool.net.tenants_file import TenantsFile
from kvpool.ops.metrics import pages_of_master, pages_of_server
from kvpool.ops.pool_watch import PoolWatch
from kvpool.ops.status_page import status_page
from kvpool.server import tier_health
from kvpool.server.announcer import Announcer
from kvpool.server.cold.search import Searcher
from kvpool.server.cold.state.book import Waiting
from kvpool.server.moves.prefetcher import Prefetcher
from kvpool.server.moves.state.copy_demand import RepairPlanner
from kvpool.server.state import tenants
from kvpool.server.state.divided_allocator import DividedAllocator
from kvpool.server.state.store import Store
from kvpool.server.state.tier_transfers import TierTransfers
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tenancy import Tenancy
from kvpool.supervision import Supervisor
from kvpool.tenants import Share, Tenant
from kvpool.types import Cluster
from tests.conftest import NAMESPACE, eventually, keys, values
from tests.support.object_store import shelf_in

ROOT = Path(__file__).parents[2]
SIZE = 8192
STARTS = ("create_task", "ensure_future", "run_coroutine_threadsafe")
_CALL = "one call awaits it, and has its error"
_GROUP = "its group awaits it, and raises its error"
_MAIN = "the process awaits it, and ends with its error"
_CLOSES = "closes one connection"

#: Who may start a task that no supervisor looks after, and why it needs none.
SHORT_LIVED = {
    "connector/kvpool_connector/memory/load_rounds.py LoadRounds.run": "one load, which "
    "waits for them",
    "connector/kvpool_agents/admission_gate.py AdmissionGate.enter": "while prompts "
    "wait; the next one that has to begins it anew",
    "kvpool/cli/run.py _drain": _MAIN,
    "kvpool/cli/run.py _serve_as": _MAIN,
    "kvpool/cli/top.py _on_screen": _MAIN,
    "kvpool/cli/top.py top.main": _MAIN,
    "kvpool/cli/up.py _started": _MAIN,
    "kvpool/client/device_staging.py _run_two": _GROUP,
    "kvpool/client/idle_timeout.py InactivityTimer._on_timer": _CALL,
    "kvpool/client/masters.py Masters._ask_all": _CALL,
    "kvpool/client/prefetch.py PrefetchCalls._copy": "ends by itself, and its error is said",
    "kvpool/client/reader.py Reader.fetch": _GROUP,
    "kvpool/client/reader.py Reader.fetch.follow": _GROUP,
    "kvpool/client/namespace_removal.py Removals.remove": _GROUP,
    "kvpool/client/servers.py Servers._abort_and_close": _CLOSES,
    "kvpool/client/servers.py Servers._renew_addresses": "one request; a failure asks again",
    "kvpool/client/servers.py gather_errors": _GROUP,
    "kvpool/client/shared_copies.py SharedCopies.wrote": "as `PrefetchCalls._copy`",
    "kvpool/client/spread.py Spreader._run": _CALL,
    "kvpool/client/writer.py Writer._place_and_write": _GROUP,
    "kvpool/client/writer.py _run_all": _GROUP,
    "kvpool/net/http_server.py Pages._connected": "one request; it ends with its deadline",
    "kvpool/net/control_network.py _Link._connect": "ends with a connection; a request asks again",
    "kvpool/ops/event_service.py publish_engine": _GROUP,
    "kvpool/server/announcer.py Announcer._send_pieces": _GROUP,
    "kvpool/server/cold/bucket.py Bucket._hedged": _CALL,
    "kvpool/server/moves/drainer.py Drainer._pass": _GROUP,
    "kvpool/server/moves/drainer.py Drainer.begin": "ends with its deadline, and says what is left",
    "kvpool/server/moves/peer_servers.py PeerServers._end": _CLOSES,
    "kvpool/server/tier_mover.py TierMover._demote_to": _CALL,
    "kvpool/server/tier_mover.py TierMover._spawn": "one transfer; whoever asked for it goes on",
    "kvpool/supervision.py Supervisor._start": "this is the supervisor",
    "kvpool/sync.py Pool._run.start": _CALL,
    "kvpool/tools/bench.py _Work.loop_stall": _CALL,
    "kvpool/tools/replay.py _play": _GROUP,
    "kvpool/tools/replay.py _while_alive": _GROUP,
    "transports/kvpool_transports/streams/server.py Sessions.start": "one connection ends with it",
    "connector/kvpool_engines/pool_thread.py PoolThread._begin": "one save or load; `_connect` "
    "catches all",
    "connector/kvpool_lmcache/adapter.py KVPoolL2Adapter._all": _GROUP,
}


#: Who may start a thread, and why nothing that ends it goes unnoticed.
THREADS = {
    "connector/kvpool_engines/engine_pool.py EnginePool.__init__": "it ends when it has "
    "connected, and says and tries again whatever went wrong before",
    "connector/kvpool_engines/pool_thread.py PoolThread.__init__": "it runs a loop, for ever",
    "kvpool/huge_pages.py HugePageMapping.__init__": "pages that it does not touch are slower once",
    "kvpool/net/polled_links.py _PolledLink.begin": "one lookup of a name; it catches all",
    "kvpool/ops/engines.py read_engines": "its caller waits for so long, and says that",
    "kvpool/sync.py Pool.__init__": "it runs a loop, for ever",
    "tiers/kvpool_tiers/nvme/file_disk.py _DaemonThreads.submit": "its calls catch all",
}


def calls(path: Path, *names: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls of methods with these names, each with the function that it is in."""

    def search(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            within = inside
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                within = (*inside, child.name)
            elif isinstance(child, ast.Call):
                name = getattr(child.func, "attr", getattr(child.func, "id", ""))
                if name in names:
                    yield ".".join(inside), child
            yield from search(child, within)

    text = path.read_text()
    return search(ast.parse(text), ()) if any(name in text for name in names) else iter(())


def sources() -> Iterator[Path]:
    for room in ("kvpool", "transports", "tiers", "connector"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if "testing" not in path.parts:
                yield path


def test_every_task_is_supervised_or_lives_shortly() -> None:
    found = {
        f"{path.relative_to(ROOT)} {where}"
        for path in sources()
        for where, _ in calls(path, *STARTS)
    }
    unsupervised = found - SHORT_LIVED.keys()
    assert not unsupervised, "Supervisor.forever or until_done; or list it, with the reason"
    assert not SHORT_LIVED.keys() - found, "they start no task any more"


def test_no_thread_ends_unnoticed() -> None:
    found = {
        f"{path.relative_to(ROOT)} {where}"
        for path in sources()
        for where, _ in calls(path, "Thread", "Timer", "start_new_thread")
    }
    assert found == THREADS.keys(), "list it, with the reason"


def test_somebody_looks_at_the_end_of_what_an_executor_runs() -> None:
    """A future that is dropped takes its exception along."""
    names = {"submit", "run_in_executor", "to_thread", "run_coroutine_threadsafe"}
    dropped = {
        f"{path.relative_to(ROOT)} {node.value.func.attr}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Attribute) and node.value.func.attr in names
    }
    # Its threads are not an executor's: what they run catches all.
    assert dropped == {"tiers/kvpool_tiers/nvme/file_disk.py submit"}


def supervised_names() -> set[str]:
    """The names of all tasks that are started under a supervisor, without what differs."""
    names = set()
    for path in sources():
        for _, call in calls(path, "forever", "until_done"):
            name = call.args[0]
            if isinstance(name, ast.JoinedStr):
                name = name.values[0]
            assert isinstance(name, ast.Constant), path
            names.add(str(name.value).strip())
    return names


class World:
    """A pool with everything that has a long-lived task."""

    def __init__(self, running: dev.Dev, stack: AsyncExitStack) -> None:
        self.running = running
        self.server = running.servers[0]
        self.stack = stack
        self.others = Supervisor()  # of a tenants file, or a publisher

    @property
    def owners(self) -> tuple[Supervisor, ...]:
        return self.server.tasks, self.running.master.tasks, self.others

    def failures(self, name: str) -> int:
        counts = [item for tasks in self.owners for item in tasks.failures.items()]
        return sum(count for task, count in counts if task.startswith(name))

    def statuses(self) -> list[int]:
        """What probes of the server and the master are told."""
        pages = (pages_of_server(self.server), pages_of_master(self.running.master))
        return [one["/ready"]().status for one in pages]

    async def write(self) -> list[bytes]:
        chain = keys("chain", 8)
        async with self.running.pool() as pool:
            statuses = await pool.write(NAMESPACE, chain, values(chain))
            assert all(status.present for status in statuses)
        return chain


@asynccontextmanager
async def world(folder: Path, *below: str) -> AsyncIterator[World]:
    files = (f"nvme:{folder}/{{server}}-{number}:16MiB" for number in range(2))
    tiers = ("dram:4MiB", *files, *below)
    async with dev.serve(tiers=tiers, listen=("inproc://",)) as running, AsyncExitStack() as stack:
        yield World(running, stack)


async def nothing(one: World) -> None:
    """The task takes its next step by itself."""


async def write(one: World) -> None:
    await one.write()


async def read(one: World) -> None:
    chain = await one.write()
    async with one.running.pool() as pool:
        results = await pool.read(NAMESPACE, chain, [bytearray(SIZE) for _ in chain])
        assert all(result.status.hit for result in results)


async def lower_a_limit(one: World) -> None:
    Tenancy.of(one.server).quotas.apply({"": Tenant("")})
    await one.write()
    Tenancy.of(one.server).quotas.apply({"": Tenant("", limit=Share(0))})


async def lose_a_tier(one: World) -> None:
    chain = await one.write()
    backing = one.server.stack.backing
    await eventually(lambda: all(backing.index.peek(NAMESPACE, 0, digest) for digest in chain))
    one.server._context.mover.health.take_offline(1, "a test")


async def refuse_writes(one: World) -> None:
    for part in (0, 1):
        for _ in range(8):
            one.server._context.mover.health.batch_done((1, part), good=False)


async def close_a_file(one: World) -> None:
    await one.write()
    for _ in range(8):
        one.server._context.mover.health.batch_done((1, 1), good=False)


async def lose_a_file(one: World) -> None:
    chain = await one.write()
    await eventually(lambda: one.server.stack.backing.index.stored == len(chain))  # in both files
    one.server._context.mover.health.lose((1, 1), "a test")


async def show_a_page(one: World) -> None:
    await one.stack.enter_async_context(status_page(one.running.master, 1.5))


async def watch_a_file(one: World) -> None:
    folder = Path(one.stack.enter_context(TemporaryDirectory()))
    (folder / "acme").write_bytes(b"0123456789abcdef-acme")
    path = folder / "tenants.yaml"
    path.write_text("tenants: [{name: acme, secret_file: acme}]\n")
    file = TenantsFile(path, Cluster("default", b"0123456789abcdef-cluster"))
    await one.stack.enter_async_context(file.watched(one.others))


async def ask_for_a_replay(one: World) -> None:
    publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    publisher.tasks = one.others
    publisher.start()
    one.stack.callback(publisher.close)
    context: zmq.Context[Any] = zmq.Context()
    one.stack.callback(context.destroy, 0)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"", bytes(8)])


class Step(NamedTuple):
    """A step of a task; `begin` makes the task take it, `again` whenever it waits."""

    owner: type
    method: str
    begin: Callable[[World], Awaitable[None]] = nothing
    again: Callable[[World], None] = lambda one: None


STEPS = {
    "announce to": Step(Announcer, "_send_heartbeat"),
    "write-back": Step(TierTransfers, "next_writebacks", write),
    "prefetch": Step(Prefetcher, "_step"),
    "moves": Step(RepairPlanner, "wants", read),
    "quotas": Step(tenants, "evict_beyond_limits", lower_a_limit),
    "drop what a tier had": Step(TieredStore, "drop_lost", lose_a_tier),
    "try a read-only tier": Step(TierTransfers, "try_writeback", refuse_writes),
    "try a file": Step(DividedAllocator, "open", close_a_file),
    "drop what a file had": Step(Store, "remove", lose_a_file),
    "cold beat": Step(Searcher, "beat"),
    "cold search": Step(Searcher, "step"),
    "cold write": Step(Waiting, "due_in", write),
    "tick": Step(ServerTable, "tick"),
    "status page": Step(PoolWatch, "sample", show_a_page),
    "tenants file": Step(TenantsFile, "look", watch_a_file),
    "replays": Step(EventPublisher, "_send_some", ask_for_a_replay),
}


def test_a_step_of_every_supervised_task_is_tried() -> None:
    assert STEPS.keys() == supervised_names()


@pytest.mark.parametrize("name", STEPS)
async def test_a_task_goes_on_after_exceptions_that_are_counted_and_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "PAUSE_S", 0.01)
    monkeypatch.setattr(supervision, "WELL_AFTER_S", 0.2)
    monkeypatch.setattr(tier_health, "_RETRY_MAX_S", 0.01)
    monkeypatch.setattr(tenants_file, "_LOOK_EVERY_S", 0.01)
    step = STEPS[name]
    real = getattr(step.owner, step.method)
    calls, shown = 0, list[int]()

    def failing(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            shown.extend(one.statuses())
        if calls <= 2:
            raise ValueError("a bug")
        return real(*arguments, **more)

    below = []
    if name.startswith("cold"):
        shelf_in(monkeypatch)
        below.append("shelf:any:64MiB?beat_s=20ms&wait_s=20ms")
    async with world(tmp_path, *below) as one:
        monkeypatch.setattr(step.owner, step.method, failing)
        await step.begin(one)

        def goes_on() -> bool:
            step.again(one)
            return calls > 2

        await eventually(goes_on)
        assert one.failures(name) == 2
        if not one.others.failures[name]:
            assert 503 in shown
        await eventually(lambda: not any(tasks.problem for tasks in one.owners))
        await eventually(lambda: one.statuses() == [200, 200])
        metrics = pages_of_server(one.server)["/metrics"]().body.decode()
        metrics += pages_of_master(one.running.master)["/metrics"]().body.decode()
        counted = re.findall(rf'kvpool_task_failures_total{{task="{name}[^"]*"}} (\S+)', metrics)
        assert one.others.failures[name] or counted == ["2.0"]
