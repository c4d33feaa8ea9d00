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
    "wait; it catches all",
    "kvpool/cli/run.py _drain": _MAIN,
    "kvpool/cli/run.py _serve_as": _MAIN,
    "kvpool/cli/top.py _on_screen": _MAIN,
    "kvpool/cli/up.py _started": _MAIN,
    "kvpool/client/device_staging.py _run_two": _GROUP,
    "kvpool/client/idle_timeout.py InactivityTimer._on_timer": _CALL,
    "kvpool/client/masters.py Masters._ask_all": _CALL,
    "kvpool/client/writer.py Places.tell": "what it does not tell costs hits, and it tells anew",
    "kvpool/client/prefetch.py PrefetchCalls._copy": "ends by itself, and its error is said",
    "kvpool/client/reader.py Reader.fetch": _GROUP,
    "kvpool/client/reader.py Reader.fetch.follow": _GROUP,
    "kvpool/client/namespace_removal.py Removals.remove": _GROUP,
    "kvpool/client/servers.py Servers._abort_and_close": _CLOSES,
    "kvpool/client/servers.py Servers._renew_addresses": "one request; a failure asks again",
    "kvpool/client/servers.py gather_errors": _GROUP,
    "kvpool/client/shared_copies.py SharedCopies.wrote": "as `PrefetchCalls._copy`",
    "kvpool/client/spread.py Spreader._run": _CALL,
    "kvpool/client/writer.py Writer._place.begin": _CALL,
    "kvpool/net/http_server.py Pages._connected": "one request; it ends with its deadline",
    "kvpool/ops/process.py until_stopped": _MAIN,
    "kvpool/net/control_network.py MasterLink._connect": "ends with a connection; one asks again",
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
    "kvpool/net/polled_links.py _PolledLink._begin": "one connection; it catches all",
    "kvpool/ops/engines.py read_engines": "its caller waits for so long, and says that",
    "kvpool/sync.py Pool.__init__": "it runs a loop, for ever",
    "tiers/kvpool_tiers/nvme/file_disk.py _DaemonThreads.submit": "its calls catch all",
}


#: Who has an executor of its own do something, or need not fear that it is done later.
EXECUTORS = {
    "connector/kvpool_codecs/coder.py Coder.decoded": "`kvpool.threads.submit`",
    "connector/kvpool_codecs/coder.py Coder.encoded": "`kvpool.threads.submit`",
    "connector/kvpool_transformers/pooled_cache.py PooledCache._save": "its calls catch all",
    "kvpool/device/thread.py DeviceThread._start_to_prepare": "`kvpool.threads.submit`",
    "kvpool/device/thread.py DeviceThread.run": "`kvpool.threads.submit`",
    "kvpool/ops/doctor.py examine": "a check that fails",
    "kvpool/ops/engines.py examine_engines": "a check that fails",
    "kvpool/threads.py in_thread": "this is what others call",
    "kvpool/threads.py submit": "this is what others call",
    "kvpool/tools/bench.py _raw_socket": _MAIN,
    "kvpool/tools/bench.py _raw_socket.limit": _MAIN,
    "tiers/kvpool_tiers/nvme/file_disk.py FileDisk._submit": "its threads are no executor's",
    "transports/kvpool_transports/copy_pool.py CopyPool._run_in_threads": "a flag stops it",
}

SCHEDULES = ("call_later", "call_at", "call_soon", "call_soon_threadsafe", "add_reader")
SCHEDULES += ("add_writer", "add_done_callback", "add_signal_handler", "finalize")
#: Who has the loop call something, by what an exception in there costs.
CALLBACKS = {
    "nothing: it sets an event or stops the loop, or takes something out of a collection": """
        connector/kvpool_engines/pool_thread.py:PoolThread.close
        kvpool/cli/top.py:_on_screen
        kvpool/client/servers.py:Servers._abort_and_close
        kvpool/net/tenants_file.py:TenantsFile.watched
        kvpool/ops/process.py:run.until_asked
        kvpool/ops/process.py:wait_for_signal
        kvpool/server/context.py:ServerContext._wake_some
        kvpool/server/context.py:ServerContext.wait_for_space
        kvpool/server/moves/peer_servers.py:PeerServers._end
        kvpool/server/tier_mover.py:TierMover._own
        kvpool/supervision.py:Supervisor._start
        kvpool/sync.py:Pool._cancel
        kvpool/sync.py:Pool._end_loop
        kvpool/sync.py:Pool._stop
        kvpool/threads.py:in_thread
        kvpool/threads.py:submit
        transports/kvpool_transports/streams/server.py:Sessions.start""",
    "one call or one connection: it ends with its deadline, or its peer's": """
        connector/kvpool_engines/pool_thread.py:PoolThread._begin
        connector/kvpool_engines/pool_thread.py:PoolThread.start
        kvpool/client/idle_timeout.py:InactivityTimer._look_at
        kvpool/client/prefetch.py:PrefetchCalls._copy
        kvpool/client/shared_copies.py:SharedCopies.wrote
        kvpool/client/writer.py:Writer._place
        kvpool/device_copy.py:DeviceCopier._distribute
        kvpool/device_copy.py:DeviceCopier.copy
        kvpool/net/control_listener.py:_MasterEnd._watch
        kvpool/net/control_listener.py:_MasterEnd.connection_made
        kvpool/net/http_server.py:Pages._connected
        kvpool/net/requests.py:PendingRequests.request
        kvpool/sync.py:Pool._resolve
        kvpool/sync.py:Pool._run
        kvpool/sync.py:Pool._run.start
        tiers/kvpool_tiers/nvme/encryption.py:Sealing.finish
        tiers/kvpool_tiers/nvme/file_disk.py:FileDisk._call
        tiers/kvpool_tiers/nvme/file_disk.py:FileDisk._piece_done
        transports/kvpool_transports/shm.py:_BareStream._wait_until_readable
        transports/kvpool_transports/streams/server.py:Sessions.accept
        transports/kvpool_transports/streams/stream.py:Stream._received
        transports/kvpool_transports/streams/stream.py:Stream.send_deferred
        transports/kvpool_transports/streams/stream.py:wait_until""",
    "one time of many: what comes next begins it anew": """
        connector/kvpool_agents/admitting.py:AdmittingMiddleware._ask.ask
        kvpool/cli/keyboard.py:keyboard
        kvpool/server/context.py:ServerContext.publish_evicted
        kvpool/server/moves/peer_servers.py:PeerServers._watch
        kvpool/server/namespace_removal.py:NamespaceRemoval.holdings
        kvpool/server/tier_health.py:TierHealth.calling
        kvpool/server/tier_health.py:TierHealth.calling.late""",
    "one connection: the loop calls it again for the next one": """
        transports/kvpool_transports/shm.py:_ShmListener._accept
        transports/kvpool_transports/shm.py:_ShmListener._accept_again
        transports/kvpool_transports/shm.py:_ShmListener.start
        transports/kvpool_transports/tls.py:_TlsListener._accept
        transports/kvpool_transports/tls.py:_TlsListener._listen""",
    "one of those in line: it catches all, and goes on": """
        kvpool/net/control_listener.py:_Answers._work
        kvpool/net/control_listener.py:_Answers.asked
        kvpool/net/event_publisher.py:EventPublisher._take_requests
        kvpool/net/event_publisher.py:EventPublisher.start
        kvpool/net/secret_sessions.py:_Handshakes._plan
        transports/kvpool_transports/ucx_worker.py:Worker.__init__
        transports/kvpool_transports/ucx_worker.py:Worker._drive
        transports/kvpool_transports/ucx_worker.py:Worker._failed
        transports/kvpool_transports/ucx_worker.py:Worker.kick""",
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
    found = found_calls(*STARTS)
    unsupervised = found - SHORT_LIVED.keys()
    assert not unsupervised, "Supervisor.forever or until_done; or list it, with the reason"
    assert not SHORT_LIVED.keys() - found, "they start no task any more"


def test_no_thread_ends_unnoticed() -> None:
    assert found_calls("Thread", "Timer", "start_new_thread") == THREADS.keys(), (
        "list it, with the reason"
    )


def found_calls(*names: str) -> set[str]:
    return {
        f"{path.relative_to(ROOT)} {where}"
        for path in sources()
        for where, _ in calls(path, *names)
    }


def test_what_an_executor_cannot_start_never_runs_later() -> None:
    """And somebody looks at its end: a future that is dropped takes its exception along."""
    found = found_calls("run_in_executor", "to_thread", "submit", "run_coroutine_threadsafe")
    assert found == EXECUTORS.keys(), "kvpool.threads; or list it, with the reason"


def test_a_callback_that_raises_ends_nothing_that_others_wait_for() -> None:
    """The loop logs its exception, and calls it no more."""
    listed = " ".join(CALLBACKS.values()).split()
    assert len(listed) == len(set(listed))
    found = found_calls(*SCHEDULES)
    assert {one.replace(" ", ":") for one in found} == set(listed), "list it under its reason"


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
    one.server.stack.front.index.copied = True
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
