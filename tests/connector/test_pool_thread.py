"""The pool's thread, and what a worker reports when there is no pool: nothing waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch

import kvpool
from kvpool import ROOT, ClientConfig, Cluster, Match, Member, Namespace, Pool, ReadStatus, dev
from kvpool.client import servers
from kvpool.errors import MasterLost
from kvpool.types import ServerStats
from kvpool_connector import settings
from kvpool_connector.memory.block_memory import memory_of
from kvpool_connector.records.messages import (
    GroupBlocks,
    LoadRequest,
    ModelInfo,
    ProbeRequest,
    SaveRequest,
    StepWork,
    VerifyRequest,
)
from kvpool_connector.worker.rank_model import ModelInMemory
from kvpool_connector.worker.worker import ConnectorWorker, Rank
from kvpool_engines import pool_thread
from kvpool_engines.engine_pool import EnginePool
from kvpool_engines.pool_thread import PoolThread
from kvpool_transports.ucx import UcxTransport
from tests.conftest import keys
from tests.support import raising
from tests.support.certificates import certificate

CHAIN = tuple(keys("chain", 2))
SETTINGS = settings.parse({"masters": ["127.0.0.1:9"]})


class NoPool:
    """Answers and closes like one."""

    async def match(self, name: Namespace, chain: list[bytes], timeout: float) -> Match:
        return Match((), 0, ReadStatus.NEVER_WRITTEN)

    async def close(self) -> None:
        pass


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.mark.parametrize("kind", ["its own thread", "sync"])
def test_an_engine_that_may_start_no_thread_runs_without_a_pool(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lines: list[str]
) -> None:
    monkeypatch.setattr(threading.Thread, "start", raising.no_thread)
    if kind == "sync":
        pool = EnginePool(SETTINGS.client(), log=logging.getLogger("engine"), start_wait_s=60.0)
        assert pool.call(lambda _: 1, 0) == 0
        pool.close()
        lines.append(caplog.text)
    else:
        thread = PoolThread(SETTINGS.client(), Cluster(), lines.append)
        assert not thread.wait(60.0)
        assert not thread.start(lambda: pytest.fail("it would never be awaited"))
        thread.close(60.0)
    (line,) = lines
    assert "the engine runs without it: can't start new thread; see `ulimit -u`" in line


@pytest.mark.parametrize("best", ["shm", "tcp", "tls", "ucx"])
async def test_workers_take_the_best_path_after_a_restart(
    best: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """The server has another address for it, or has it only now; its other one is what it was."""
    if best == "ucx":
        pytest.importorskip("ucxx")
    monkeypatch.setattr(UcxTransport, "has_fabric", True)
    monkeypatch.setattr(servers, "_RENEW_S", 0.0)
    name, other, mine = Namespace("links"), "tls" if best == "tcp" else "tcp", certificate("both")
    more = {"tls": f"?cert={mine.cert}&key={mine.key}&ca={mine.cert}"}
    at = {one: f"{one}://127.0.0.1:0{more.get(one, '')}" for one in (other, best)} | {
        "shm": "shm://"
    }

    async def read() -> str:
        """The path that was opened last; empty after a miss."""
        pool = cast(Pool, worker.pool)
        await pool.write(name, CHAIN, [b"a" * 100] * 2)
        (_, last) = await pool.read(name, CHAIN, [bytearray(100), bytearray(100)])
        (record,) = pool._servers.known.values()
        return "".join(path.scheme for path in [*record.channels][-1:]) * last.status.hit

    async def path() -> str:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(read(), worker._loop))

    before = (at[other],) if best == "shm" else (at[other], at[best])
    async with dev.serve("64MiB", listen=before) as first:
        chosen = [one + more.get(one, "") for one in (best, other)]
        config = ClientConfig([first.address], transports=chosen)
        start = lambda: lines.append(threading.current_thread().name)  # noqa: E731
        worker = PoolThread(config, Cluster(), lines.append, None, start)
        assert await asyncio.to_thread(worker.wait, 10.0)
        assert lines[0] == "kvpool", "before it connects: UCX takes the context of its thread"
        assert await path() == (other if best == "shm" else best)
        listen = first.servers[0].addresses[0] + more.get(other, ""), at[best]
    async with dev.serve("64MiB", bind=first.address, listen=listen), asyncio.timeout(10):
        while await path() != best:
            pass
        await asyncio.to_thread(worker.close, 5.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> Callable[..., PoolThread]:
    """Makes a hurried thread that connects to a pool, after these errors."""

    def start(pool: NoPool, *errors: Exception) -> PoolThread:
        raised = iter(errors)

        async def connect(**options: Any) -> NoPool:
            assert options["config"].masters == ["127.0.0.1:9"]
            for error in raised:
                raise error
            return pool

        monkeypatch.setattr(kvpool, "connect", connect)
        for name in ("_RETRY_S", "_LOOK_EVERY_S", "_SERVERS_EVERY_S"):
            monkeypatch.setattr(pool_thread, name, 0.001)
        warn = lambda line: lines.append(f"WARNING {line}")  # noqa: E731
        return PoolThread(SETTINGS.client(), Cluster(), lines.append, warn)

    return start


@pytest.fixture
def closed(started: Callable[..., PoolThread]) -> PoolThread:
    thread = started(NoPool())
    assert thread.wait(10)
    thread.close(10)
    return thread


@pytest.mark.parametrize("error", [MasterLost("nobody there"), OSError(24, "too many files")])
def test_it_connects_as_soon_as_there_is_a_master(
    error: Exception, started: Callable[..., PoolThread], lines: list[str]
) -> None:
    said = {MasterLost: "nobody there"}.get(type(error), "OSError: [Errno 24] too many files")
    thread = started(NoPool(), *[error] * 3)
    assert thread.wait(10)
    thread.close(10)
    assert lines == [
        f"WARNING no pool yet, the engine runs without it: {said}",
        "connected to the pool at 127.0.0.1:9",
    ]


class WatchedPool(NoPool):
    """`answers` are those of its masters, one after the other."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers
        self.done = threading.Event()

    async def match(self, name: Namespace, chain: list[bytes], timeout: float) -> Match:
        self.answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if len(self.answers) == 1:
            self.done.set()
        return Match((), 0, ReadStatus.NO_MASTER if self.answer else ReadStatus.NEVER_WRITTEN)

    async def members(self, timeout: float) -> list[Member]:
        raise MasterLost(self.answer)


class ServersPool(WatchedPool):
    """`known` are its members, one list after the other; an error is no answer."""

    def __init__(self, known: list[list[bool] | None]) -> None:
        super().__init__([""])
        self.known = known
        self.all_asked = threading.Event()

    async def members(self, timeout: float) -> list[Member]:
        alive = self.known.pop(0) if len(self.known) > 1 else self.known[0]
        if len(self.known) == 1:
            self.all_asked.set()
        if alive is None:
            raise MasterLost("no answer")
        stats = ServerStats()
        return [Member(str(n), 1, str(n), (), ("dram",), n, 0.0, 1 << 30, stats) for n in alive]


def test_the_log_says_once_that_all_servers_are_gone_and_once_that_some_are_back(
    started: Callable[..., PoolThread], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvpool, "host_id", lambda: "True")  # of those that live
    one_look, up, half = [[False, False], [True, False]], [True, True], [True, False]
    gone: list[list[bool] | None] = [[False, False], None, [False, False], [], [False]]
    watched = ServersPool([up, *one_look, *gone, None, half, up, [], up, *gone, up, half, [], []])
    thread = started(watched)
    assert watched.all_asked.wait(10)
    thread.close(10)
    assert thread.near == {"True"}
    lost = "WARNING the pool at 127.0.0.1:9 has no server left, the engine runs without it: "
    assert [line.partition("a master")[0] for line in lines[1:5]] == [
        lost,
        "the pool at 127.0.0.1:9 has servers again: 1",
        lost,
        "the pool at 127.0.0.1:9 has servers again: 2",
    ]
    assert "knows 2 lost ones" in lines[1]
    assert lines[1].endswith("start one with kvpool server --masters 127.0.0.1:9")


def test_the_log_says_when_the_pool_is_lost_and_when_it_is_back(
    started: Callable[..., PoolThread], lines: list[str]
) -> None:
    gone, secret = "no answer within 2.0 s", "wrong secret"
    once = ["", "one slow answer", "", gone, gone, gone, "no answer within 1.9 s", secret, secret]
    watched = WatchedPool([*once, "", "", gone, gone, "", ""])
    thread = started(watched, *map(MasterLost, ("nobody there", "nobody there", secret)))
    assert watched.done.wait(10)
    thread.close(10)
    of_client = logging.getLogger("kvpool.client.masters")
    assert not of_client.isEnabledFor(logging.WARNING)  # or each loss would have two lines
    lost, back = "WARNING the pool is lost, the engine runs without it: ", "is back"
    assert lines == [
        "WARNING no pool yet, the engine runs without it: nobody there",
        "WARNING no pool yet, the engine runs without it: wrong secret",
        "connected to the pool at 127.0.0.1:9",
        f"{lost}{gone}",
        f"{lost}wrong secret",
        f"the pool at 127.0.0.1:9 {back}",
        f"{lost}{gone}",
        f"the pool at 127.0.0.1:9 {back}",
    ]


def test_failed_work_is_logged(started: Callable[..., PoolThread], lines: list[str]) -> None:
    thread, done = started(NoPool()), threading.Event()

    async def fail() -> None:
        raise TimeoutError("of an inner call")

    async def last() -> None:
        done.set()

    for work in (fail, last):
        assert thread.start(work)
    assert done.wait(10)
    thread.close(10)
    failed = "work of the pool's thread has failed: TimeoutError: of an inner call"
    assert f"WARNING {failed}" in lines


def test_a_closed_thread_takes_no_work(closed: PoolThread) -> None:
    async def work() -> None:
        raise AssertionError("it began")

    assert not closed.start(work)
    closed.close(1)  # again


def fails(*_: object) -> Any:
    raise RuntimeError("planted")


def made(thread: PoolThread, logged: list[str], **model: Any) -> ConnectorWorker:
    worker = ConnectorWorker(
        SETTINGS, thread, Rank(0, 0, True), lambda line, error: logged.append(line)
    )
    memory = memory_of({"layer.0": torch.zeros(8, 4096, dtype=torch.uint8)})
    worker.register([memory], ModelInMemory(**{"info": partial(ModelInfo, packing="k"), **model}))
    return worker


def play(worker: ConnectorWorker) -> Counter[str]:
    """Three steps with every kind of transfer, each of which ends once; what was counted."""
    blocks = (GroupBlocks(0, CHAIN, (3, 4), (ROOT, CHAIN[0])),)
    counters: Counter[str] = Counter()
    for step in range(1, 4):
        load = LoadRequest("r", (GroupBlocks(0, CHAIN, (1, 2)),), 1.0)
        saves = [SaveRequest(0, blocks, adapters=frozenset({(1, ("x",))}))]
        saves.append(SaveRequest(1, blocks))
        work = StepWork(step, (Namespace("n"),), [load], saves, serials=(1,))
        work.probe, work.verify = ProbeRequest(blocks, 1.0), VerifyRequest(step, blocks, 1.0)
        worker.start_loads(work)
        worker.start_saves(work)
        assert worker.take_finished() == ({"r"}, {"r"}, {1, 2})
        time.sleep(0.002)  # the engine hears of it when it steps
        report = worker.take_report()
        assert [(one.request_id, one.complete) for one in report.loads] == [("r", False)]
        assert [one.job for one in report.saves] == [0, 1]
        assert min(one.age_s for one in report.saves) >= 0.002
        assert [len(one.refused) for one in report.saves] == [len(CHAIN)] * 2
        assert [one.job for one in report.verified] == [step]
        assert len(report.probes) == 1
        counters.update(worker.take_counters())
    return counters


@pytest.mark.parametrize("broken", ["info", "whole_info", "adapters"])
def test_a_worker_raises_nothing_into_its_engine_and_ends_every_transfer(
    broken: str, closed: PoolThread
) -> None:
    logged: list[str] = []
    changes = partial(next, iter(range(100))) if broken == "whole_info" else int
    counters = play(made(closed, logged, **{broken: fails, "changes": changes}))
    assert len(logged) == 1, "each reason once"
    assert logged[0].startswith("rank 0: ")
    assert "failed with RuntimeError: planted; the engine goes on without" in logged[0]
    assert any(name.startswith("hook_failed ") for name in counters)
    assert "load_blocks_missing" in counters, "what else there is to count is counted"


#: What vLLM calls, what catches others' mistakes, and what says which transfer has ended.
CATCH = {
    *("start_loads", "start_saves", "take_finished", "take_report", "take_counters"),
    *("_begin", "_context", "begin", "guard", "add"),
    *("on_load", "on_save", "on_check", "count", "_all_refused"),
}


def test_whatever_raises_in_a_worker_each_transfer_ends_once(closed: PoolThread) -> None:
    worker = made(closed, [])
    with raising.called() as seen:
        play(worker)
    functions = [one for one in seen if one.co_name not in CATCH and one.co_name[0] != "<"]
    assert len(functions) >= 9
    for function in functions:
        for at_call in (1, 3):
            worker = made(closed, [])
            with raising.raising(function, at_call):
                play(worker)
