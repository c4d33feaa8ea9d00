"""A conversation, as a client tells servers about it: what `Pool.session` returns."""

from __future__ import annotations

from kvpool.client.checks import check_resume_in
from kvpool.client.context import ClientContext
from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.errors import Unavailable
from kvpool.types import ARRIVED, SessionReport
from kvpool.wire import messages as wire
from kvpool.wire.hints import ExplainSession, Hint, SessionExplained


class SessionCalls(ClientExtension):
    """The conversations of one client."""

    def __init__(self, parts: ClientParts) -> None:
        self._context = parts.context

    def named(self, name: str) -> ClientSession:
        """As `Pool.session`."""
        return ClientSession(self._context, name)


class ClientSession:
    """What will become of a conversation, for the servers that have its blocks.

    Blocks belong to it that were written with its name, `pool.write(..., session=name)`. All that
    is said here is advice: one master passes it to every server within a heartbeat, and each server
    counts how it applied it. The answer is whether a master accepted it. The object holds nothing:
    any number may have the same name, in any process.

    Every call takes `timeout`, and raises Closed, as those of `Pool` (design: session-hints).
    """

    def __init__(self, context: ClientContext, name: str) -> None:
        self._context = context
        self._known_as = context.own_session(name)
        self.name = name

    def __repr__(self) -> str:
        return f"<ClientSession {self.name!r}>"

    async def hint(self, *, resume_in: float, timeout: float | None = None) -> bool:
        """It is expected to go on in `resume_in` seconds.

        Until then servers prefer to evict other blocks; among expected sessions, the one with the
        latest time is evicted first. A hint expires when the session does not go on. Raises
        UsageError for a wrong `resume_in`.
        """
        return await self._hint(check_resume_in(resume_in), timeout)

    async def end(self, *, timeout: float | None = None) -> bool:
        """It is over: its blocks that no other session uses are evicted first."""
        return await self._hint(None, timeout)

    async def arrived(self, *, timeout: float | None = None) -> bool:
        """A prompt of it waits to be served, in the queue of an engine perhaps.

        Servers keep its blocks until they are read or the session writes, for 120 seconds at most,
        within the same budget of bytes as for hints; call it again while the prompt waits, up to 10
        minutes. `Pool.match` with a session does the same in one message.
        """
        return await self._hint(ARRIVED, timeout)

    async def explain(self, *, timeout: float | None = None) -> SessionReport:
        """What became of the hints about it: the last of each kind, and servers' answers.

        It is what one master knows, the one that this client asks; a hint that was sent to another
        one is not in it, and answers come with heartbeats. Raises MasterLost when no master
        answers.
        """
        context = self._context
        question = ExplainSession(self._known_as)
        answer = await context.masters.ask(question, SessionExplained, context.begin(timeout))
        return SessionReport(answer.hints, answer.servers)

    async def _hint(self, resume_in: float | None, timeout: float | None) -> bool:
        context = self._context
        deadline = context.begin(timeout)
        try:
            hint = Hint(self._known_as, resume_in)
            accepted = any((await context.masters.ask(hint, wire.StatusReply, deadline)).statuses)
        except Unavailable:
            accepted = False
        context.counters["hint_accepted" if accepted else "hint_refused"] += 1
        return accepted
