"""The pool for threads: the same answers, from anywhere."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

import kvpool.sync
from kvpool import BadKey, Closed, MasterLost, UsageError, WriteStatus, dev
from kvpool.client.admin import Admin
from kvpool.client.session import ClientSession
from kvpool.config import ClientConfig
from kvpool.errors import DeadlineExceeded, Unavailable
from tests.conftest import NAMESPACE, buffers, key, keys, value, values


@pytest.fixture
def address(dev_in_thread: dev.Dev) -> str:
    """Of a pool that runs in a thread of its own."""
    return dev_in_thread.address


def test_a_call_takes_and_tells_what_the_pool_s_does() -> None:
    """A signature and a docstring of each, and no coroutine for a thread; so do sessions' and
    operators' calls."""
    for here, there, absent in (
        (kvpool.sync.Pool, kvpool.Pool, {"events"}),
        (kvpool.sync.ClientSession, ClientSession, set()),
        (kvpool.sync.Admin, Admin, {"removals", "write_to"}),
    ):
        methods = {name for name in vars(there) if not name.startswith("_")}
        assert methods - set(dir(here)) == absent
        for name in methods - absent - {"read_view", "session", "close"}:
            mine, original = getattr(here, name), getattr(there, name)
            assert inspect.signature(mine) == inspect.signature(original), name
            assert mine.__doc__ == original.__doc__
            assert not inspect.iscoroutinefunction(mine), name


def test_a_session_and_an_operator_in_a_thread(address: str) -> None:
    with kvpool.sync.connect(address) as pool:
        session, operator = pool.session("agent"), kvpool.sync.admin(pool)
        assert session.name == "agent"
        assert session.hint(resume_in=2.0) is True
        assert session.end() is True
        assert session.explain().hints
        with pytest.raises(UsageError, match="printable"):
            pool.session("")
        with pytest.raises(UsageError, match=r"a kvpool.sync.Pool has kvpool.sync.admin"):
            kvpool.admin(pool)  # type: ignore[arg-type]
    for call in (session.arrived, operator.namespaces, pool.members):
        with pytest.raises(Closed):
            call()


def test_threads_share_a_pool(address: str) -> None:
    with kvpool.sync.connect(address) as pool:
        wrong: list[str] = []

        def work(number: int) -> None:
            for turn in range(10):
                chain = keys(f"thread {number} turn {turn}", 8)
                pool.write(NAMESPACE, chain, values(chain))
                match = pool.match(NAMESPACE, chain)
                got = buffers(8)
                pool.read(NAMESPACE, chain, got, match=match)
                if match.length != 8 or got != values(chain):
                    wrong.append(f"{number}/{turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_views_removal_and_explanations(address: str) -> None:
    with kvpool.sync.connect(address) as pool:
        pool.write(NAMESPACE, [key("v")], [value(key("v"))])
        with pool.read_view(NAMESPACE, [key("v")]) as (view,):
            assert view.data == value(key("v"))
        with kvpool.sync.connect(address) as other, other.read_view(NAMESPACE, [key("v")]):
            other.close()  # nothing is raised where the view ends
        assert pool.remove(NAMESPACE, [key("v")]) == [True]
        assert kvpool.sync.admin(pool).explain(NAMESPACE, [key("v")])[0].status.label == "removed"


def test_errors_are_the_same(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvpool.sync.connect(address) as pool, pytest.raises(BadKey):
        pool.match(NAMESPACE, [b"short"])
    with pytest.raises(Closed):
        pool.match(NAMESPACE, [key("a")])
    with pytest.raises(MasterLost):
        kvpool.sync.connect(config=ClientConfig(masters=["127.0.0.1:9"], timeout_s=0.3))
    monkeypatch.setattr(asyncio, "new_event_loop", Mock(side_effect=OSError("no files")))
    with pytest.raises(Unavailable, match="cannot open a pool: no files"):
        kvpool.sync.connect(address)


def test_closing_ends_the_calls_of_other_threads(address: str) -> None:
    pool = kvpool.sync.connect(address)
    ended = threading.Event()

    def work() -> None:
        try:
            while True:
                fresh = os.urandom(32)
                assert pool.write(NAMESPACE, [fresh], [bytes(1 << 20)]) != [WriteStatus.RESERVED]
        except Closed:
            ended.set()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.2)
    pool.close()
    pool.close()
    for thread in threads:
        thread.join(3)
        assert not thread.is_alive()
    assert ended.is_set()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("does", ["calls", "closes"])
@pytest.mark.parametrize("first", [True, False])
def test_a_signals_handler_may_call_or_close(address: str, does: str, first: bool) -> None:
    """In the middle of what hands a call over, before and behind its only step."""
    pool = kvpool.sync.connect(address)
    run, handled = pool._loop.call_soon_threadsafe, []

    def interrupted(*asked: Any) -> Any:
        pool._loop.call_soon_threadsafe = run  # type: ignore[method-assign]
        if not first:
            run(*asked)
        handled.append(pool.members() if does == "calls" else pool.close())
        return run(*asked) if first else None

    pool._loop.call_soon_threadsafe = interrupted  # type: ignore[method-assign]
    with nullcontext() if does == "calls" else pytest.raises(Closed):
        assert pool.members()
    assert len(handled) == 1
    pool.close()


async def test_the_interpreters_end_does_not_wait_for_it(address: str) -> None:
    source = "import sys, kvpool.sync\nclass Engine:\n    def __del__(self): self.pool.close()\n"
    source += "engine = Engine()\nengine.pool = kvpool.sync.connect(sys.argv[1])"
    command, began = [sys.executable, "-c", source, address], time.monotonic()
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr, time.monotonic() - began < 9) == (0, b"", True)


def test_a_call_that_begins_while_the_pool_is_closed_ends(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = kvpool.sync.connect(address)
    closed, stop = list[Closed](), pool._stop

    def call() -> None:
        try:
            pool.members()
        except Closed as error:
            closed.append(error)

    def stop_beside_it() -> None:
        pool._loop.call_soon_threadsafe(time.sleep, 0.2)
        other.start()
        time.sleep(0.05)
        stop()

    other = threading.Thread(target=call)
    monkeypatch.setattr(pool, "_stop", stop_beside_it)
    pool.close()
    other.join(3)
    assert len(closed) == 1


def test_a_forked_child_is_told(address: str) -> None:
    with kvpool.sync.connect(address) as pool:
        child = os.fork()
        if child == 0:
            try:
                pool.match(NAMESPACE, [key("a")])
            except Closed as error:
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.match(NAMESPACE, [key("a")]).length == 0


def test_a_call_that_is_given_up_has_ended(address: str) -> None:
    """G1: the caller has its buffers back, so nothing may write into them any more."""
    ended = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            ended.append(True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with kvpool.sync.connect(address) as pool:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                pool._run(stubborn(), 60)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert ended
        with pytest.raises(DeadlineExceeded):
            pool._run(stubborn(), -4.9)
        assert len(ended) == 2
