"""The sessions of agents, for `vllm serve --middleware kvpool_agents.sessions.Middleware`.

Agents name their conversation in headers and fields that vLLM does not know. This middleware passes
the name on in the fields that vLLM does know, reads from each answer whether the session pauses for
a tool or has ended, and tells the pool when it will probably resume. (design: session-hints)

What it does not know passes byte for byte, and so does every answer. A fault in here is logged and
counted, and the request goes on without it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, Final

from kvpool import KvpoolError
from kvpool_agents.admission_gate import WAITED, Ticket
from kvpool_agents.client_requests import (
    PATHS,
    SESSION_HEADER,
    AnswerReader,
    FromBody,
    Spoken,
    from_body,
    from_headers,
    spliced,
)
from kvpool_agents.pauses import Answer, Expectation, Pauses
from kvpool_connector import settings
from kvpool_engines import client_log
from kvpool_engines.pool_thread import PoolThread
from kvpool_engines.session_names import DEFAULT_TENANT, in_tenant

#: Bytes. A longer body passes unread: reading this much takes 2 to 3 ms of the server's loop.
BODY_MAX: Final = 4 << 20
#: Hints that are on their way at once; further ones are dropped.
HINTS_MAX: Final = 1024
#: An end is sent so much later: a write of the session would end the end, and the last blocks are
#: on their way to the servers when the answer is out.
_END_AFTER_S: Final = 1.0
#: Faults that are logged; all are counted.
_FAULTS_MAX: Final = 8

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("vllm.kvpool.sessions")


class Middleware:
    """Around vLLM's API server, whose configuration says which pool there is.

    It stands outside of the server's authentication, so it reads a body only when the server does,
    and learns from nothing but answers with the status 200.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._pauses = Pauses()
        self._hints: HintSender | None = None
        self._counters = _counters()
        self._faults = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                self.close()
            return
        if scope["type"] != "http" or scope["method"] != "POST" or _path(scope) not in PATHS:
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self, scope, receive, send)
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        finally:
            exchange.close()

    # --- what an exchange reports ----------------------------------------------------------------

    def began(self, session: str) -> None:
        """A body was taken by the server; "": it names no session."""
        self._counters("named" if session else "unnamed")
        if session:
            self._pauses.on_prompt(session, time.monotonic())

    def answered(
        self, scope: Scope, spoken: Spoken, answer: Answer, retention_s: float | None
    ) -> None:
        """Tell the pool what to expect of the session now."""
        expected = self._pauses.on_answer(
            spoken.session,
            answer,
            time.monotonic(),
            has_parent=bool(spoken.parent),
            retention_s=retention_s,
        )
        if spoken.ends and answer is not Answer.UNKNOWN:
            expected = Expectation(ends=True)
        if expected.ends or expected.resume_in_s is not None:
            self.hints(scope).send(spoken.session, expected)

    def hints(self, scope: Scope) -> HintSender:
        """What talks to the pool; its thread begins with the first call."""
        if self._hints is None:
            self._hints = HintSender(scope, self._counters)
        return self._hints

    async def admit(self, scope: Scope, spoken: Spoken) -> Ticket | None:
        """Called when a prompt is there, and before the server has it. This one lets all pass."""
        return None

    def close(self) -> None:
        """The server has ended."""
        if self._hints is not None:
            self._hints.close()

    def count(self, event: str) -> None:
        self._counters(event)

    def fault(self) -> None:
        """Called while an exception of this module is handled."""
        self._counters("fault")
        self._faults += 1
        if self._faults <= _FAULTS_MAX:
            logger.exception("kvpool: a request goes on without its session")


class _Exchange:
    """One prompt and its answer.

    | state of the body | what `receive` returns                                          |
    |-------------------|-----------------------------------------------------------------|
    | not asked for     | nothing yet; the first call reads all of it, up to BODY_MAX      |
    | held              | what was held: as it came, or as one message with the session   |
    | passed on         | what the server's own `receive` returns                         |
    """

    def __init__(self, middleware: Middleware, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._middleware = middleware
        self._receive, self._send = receive, send
        self._spoken = Spoken()
        self._retention_s: float | None = None
        self._held: deque[Message] = deque()
        self._size = 0
        self._reading = True
        self._began = self._finished = False
        self._reader: AnswerReader | None = None
        self._ticket: Ticket | None = None
        try:
            self._spoken = from_headers(scope["headers"])
            if self._spoken.session:
                self.scope = _with_session(scope, self._spoken.session)
        except Exception:
            middleware.fault()

    async def receive(self) -> Message:
        while self._reading:  # what was held survives a cancelled call
            message = await self._receive()
            self._held.append(message)
            if message["type"] != "http.request":
                self._reading = False  # the client has gone
                break
            self._size += len(message.get("body", b""))
            if self._size > BODY_MAX or not message.get("more_body", False):
                self._reading = False
                self._read_body()
                await self._admit()
        return self._held.popleft() if self._held else await self._receive()

    async def _admit(self) -> None:
        try:
            self._ticket = await self._middleware.admit(self.scope, self._spoken)
        except Exception:
            self._middleware.fault()

    async def send(self, message: Message) -> None:
        if self._ticket is not None:
            if message["type"] == "http.response.start":
                waited = WAITED.encode(), f"{self._ticket.waited_s:.1f}s".encode()
                message = {**message, "headers": [*message.get("headers", ()), waited]}
            elif message.get("body"):
                self._ticket.began()
        await self._send(message)
        try:
            self._look_at(message)
        except Exception:
            self._reader = None
            self._middleware.fault()

    def close(self) -> None:
        """The server has answered, or given up."""
        if self._ticket is not None:
            self._ticket.ended(session_ends=self._spoken.ends and not self._spoken.parent)
        if not (self._began and self._spoken.session):
            return
        answer = self._reader.answer if self._reader is not None and self._finished else None
        try:
            self._middleware.answered(
                self.scope, self._spoken, answer or Answer.UNKNOWN, self._retention_s
            )
        except Exception:
            self._middleware.fault()

    def _read_body(self) -> None:
        try:
            found = FromBody()
            if self._size > BODY_MAX:
                self._middleware.count("too_large")
            else:
                body = b"".join(message.get("body", b"") for message in self._held)
                found = from_body(_path(self.scope), body, has_session=bool(self._spoken.session))
                if found.splice:
                    body = spliced(body, found.splice)
                    self._held = deque([{**self._held[0], "body": body, "more_body": False}])
            self._retention_s = found.retention_s
            if found.session and found.session != self._spoken.session:
                self._spoken = Spoken(found.session, ends=self._spoken.ends)
            self._middleware.began(self._spoken.session)
            self._began = True
        except Exception:
            self._middleware.fault()

    def _look_at(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            encoded = any(name.lower() == b"content-encoding" for name, _ in headers)
            if message["status"] == 200 and not encoded and self._spoken.session:
                self._reader = AnswerReader()
        elif message["type"] == "http.response.body" and self._reader is not None:
            self._reader.feed(message.get("body", b""))
            self._finished = not message.get("more_body", False)


class HintSender:
    """Sends hints to the pool that the engine's connector uses, in a thread of its own."""

    def __init__(self, scope: Scope, counters: Callable[[str], None]) -> None:
        self._counters = counters
        self._room = threading.BoundedSemaphore(HINTS_MAX)
        self.thread: PoolThread | None = None
        self._tenant = DEFAULT_TENANT
        try:
            chosen = _settings(scope)
            if chosen is not None:
                self._tenant = chosen.tenant
                client_log.hand_on(logger)
                self.thread = PoolThread(chosen.client(), chosen.member(), _log_line)
                return
            problem = "this engine has no KVPoolConnector"
        except Exception as error:  # no thread, say: the prompt has its answer all the same
            problem = str(error)
        logger.warning("kvpool: sessions are passed on, and no pool learns of them: %s", problem)

    def send(self, session: str, expected: Expectation) -> None:
        if self.thread is None or not self._room.acquire(blocking=False):
            self._counters("hint_dropped")
            return
        name = in_tenant(self._tenant, session)
        if not self.thread.start(partial(self._tell, self.thread, name, expected)):
            self._room.release()
            self._counters("hint_dropped")

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close(1.0)

    async def _tell(self, thread: PoolThread, session: str, expected: Expectation) -> None:
        """In the pool's thread."""
        try:
            accepted = False
            if expected.ends:
                await asyncio.sleep(_END_AFTER_S)
            if thread.pool is not None and expected.ends:
                accepted = await thread.pool.session(session).end()
            elif thread.pool is not None and expected.resume_in_s is not None:
                session_of = thread.pool.session(session)
                accepted = await session_of.hint(resume_in=expected.resume_in_s)
            kind = "ends" if expected.ends else "resumes"
            self._counters(f"{kind}_{'accepted' if accepted else 'refused'}")
        except KvpoolError:
            self._counters("hint_dropped")
        finally:
            self._room.release()


def _path(scope: Scope) -> str:
    """The path within the server."""
    return str(scope["path"]).removeprefix(scope.get("root_path") or "")


def _with_session(scope: Scope, session: str) -> Scope:
    """The scope with vLLM's header for the session, in place of one that is no name."""
    header = (SESSION_HEADER, session.encode("latin-1"))
    if header in scope["headers"]:
        return scope
    return {**scope, "headers": [*(h for h in scope["headers"] if h[0] != SESSION_HEADER), header]}


def _settings(scope: Scope) -> settings.Settings | None:
    """Those of the engine's connector; vLLM's API server has its configuration in its state."""
    state = getattr(scope.get("app"), "state", None)
    transfer = getattr(getattr(state, "vllm_config", None), "kv_transfer_config", None)
    given = next(settings.given_settings(transfer), None) if transfer is not None else None
    return settings.parse(given) if given is not None else None


@functools.cache
def _counters() -> Callable[[str], None]:
    """Counts an event in the metrics of the API server; nowhere, where there are none."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return lambda event: None
    text = "Prompts of clients, and what the pool was told about their sessions."
    counter = Counter("vllm:kvpool_client_events", text, ["event"])
    return lambda event: counter.labels(event).inc()


def _log_line(line: str) -> None:
    logger.info("kvpool: sessions: %s", line)
