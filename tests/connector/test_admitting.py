"""The middleware that lets sessions wait in front of one engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool import ClientConfig, Cluster, admin, dev
from kvpool.types import Demand, WorkingSet
from kvpool_agents import admission as admission_module
from kvpool_agents import admission_gate, sessions
from kvpool_agents.admitting import AdmittingMiddleware
from kvpool_agents.sessions import Message, Scope
from kvpool_engines.pool_thread import PoolThread
from tests.conftest import NAMESPACE, eventually


class Engine:
    """An API server that answers when it may."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        self.asked += 1
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body, more in ((b"one", True), (b"two", False)):
            await send({"type": "http.response.body", "body": body, "more_body": more})


class NoSender:
    """Of hints: an engine without a pool."""

    thread: PoolThread | None = None

    def __init__(self, *given: object) -> None:
        pass

    def send(self, *given: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[AdmittingMiddleware, Engine]:
    for name in ("_KNOWN_S", "_BUSY"):
        monkeypatch.setattr(admission_module, name, -1.0)
    monkeypatch.setattr(admission_gate, "_LOOK_S", 0.01)
    monkeypatch.setattr(sessions, "HintSender", NoSender)
    engine = Engine()
    return AdmittingMiddleware(engine), engine


async def ask(middleware: AdmittingMiddleware, session: str, final: str = "false") -> bytes:
    """The answer's header that says how long it waited, without a body's bytes changed."""
    headers = [(b"x-dynamo-session-final", final.encode())]
    headers += [(b"x-dynamo-session-id", session.encode())] if session else []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await middleware(scope, receive, send)
    assert b"".join(one.get("body", b"") for one in sent) == b"onetwo"
    found: bytes = dict(sent[0]["headers"]).get(b"x-kvpool-waited", b"")
    return found


async def test_a_session_waits_in_front_of_the_engine(
    made: tuple[AdmittingMiddleware, Engine],
) -> None:
    middleware, engine = made
    first = asyncio.create_task(ask(middleware, "one", "true"))
    await eventually(lambda: engine.asked == 1)
    assert middleware._gate is not None
    middleware._gate.measured(0.01)
    second = asyncio.create_task(ask(middleware, "two"))
    unnamed = asyncio.create_task(ask(middleware, ""))
    await eventually(lambda: engine.asked == 2)
    assert middleware._gate.admission.waiting == 1
    await asyncio.sleep(0.1)
    engine.go.set()
    assert (await first, await unnamed) == (b"0.0s", b"")
    assert float((await second).removesuffix(b"s")) >= 0.1
    third = asyncio.create_task(ask(middleware, "three"))
    await eventually(lambda: middleware._gate is not None and bool(middleware._gate._waiting))
    middleware.close()
    await asyncio.sleep(0.02)
    assert middleware._gate._looking is not None
    assert middleware._gate._looking.cancelled()
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)


async def test_a_wait_that_is_over_and_a_fault_let_the_prompt_pass(
    made: tuple[AdmittingMiddleware, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    middleware, engine = made
    engine.go.set()
    await ask(middleware, "one")
    assert middleware._gate is not None
    middleware._gate.measured(0.01)
    monkeypatch.setattr(admission_gate, "HOLD_S", 0.02)
    assert await ask(middleware, "two") == b""
    assert await ask(middleware, "one") == b"0.0s"
    monkeypatch.setattr(admission_gate, "HOLD_S", 60.0)
    waiting = [asyncio.create_task(ask(middleware, name)) for name in ("two", "four")]
    await eventually(lambda: len(middleware._gate._waiting) == 2)
    monkeypatch.setattr(middleware._gate.admission, "admit", None)
    async with asyncio.timeout(10):
        await asyncio.gather(*waiting)
        assert await ask(middleware, "three") == b""
    assert middleware._faults == 1


async def test_the_pool_is_asked_in_its_own_thread(
    made: tuple[AdmittingMiddleware, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    middleware, engine = made
    engine.go.set()
    async with dev.serve("1MiB") as running:
        demand = Demand(600.0, (WorkingSet(NAMESPACE, 4 << 20, 10, 1 << 20),), 1.0, 0.0)
        monkeypatch.setattr(running.master.clients, "demand", lambda now: demand)
        async with running.pool() as pool:
            assert (await admin(pool).room()).share == 0.25
        config = ClientConfig(masters=[running.address])
        thread = PoolThread(config, Cluster(), lambda line: None)
        monkeypatch.setattr(NoSender, "thread", thread)
        await eventually(lambda: thread.pool is not None)
        await ask(middleware, "one")
        gate = middleware._gate
        await eventually(lambda: gate._share == 0.25)
        await asyncio.to_thread(thread.close, 2.0)
        assert await ask(middleware, "one") == b"0.0s"
