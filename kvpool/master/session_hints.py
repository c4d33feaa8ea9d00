"""Hints about sessions in a master: logged, until servers fetch them (design: session-hints)."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.errors import BadMessage
from kvpool.master.extension import Handlers, NoHints
from kvpool.master.state.directory import ChainMatch
from kvpool.master.state.hint_log import HintLog
from kvpool.protocols import Caller
from kvpool.spans import SPAN_BLOCKS, MarkedChain
from kvpool.types import ARRIVED, SESSION_NAME_MAX, ChainEnd, Namespace
from kvpool.wire import messages as wire
from kvpool.wire.hints import ExplainSession, Hint, SessionExplained


class SessionHints(NoHints):
    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self._log = HintLog()

    @property
    def last(self) -> int:
        return self._log.last

    @property
    def handlers(self) -> Handlers:
        return {Hint: self.hint, ExplainSession: self.explain}

    def hint(self, m: Hint, caller: Caller) -> wire.StatusReply:
        return wire.StatusReply(bytes([self._add(m.session, m.resume_s)]))

    def explain(self, m: ExplainSession, caller: Caller) -> SessionExplained:
        report = self._log.explain(m.session, self._now())
        return SessionExplained(report.hints, report.servers)

    def asked(self, session: str) -> None:
        """Its prompt is here, and waits."""
        self._add(session, ARRIVED)

    def found(self, namespace: Namespace, chain: MarkedChain, match: ChainMatch) -> None:
        """It waits for these blocks, of which the last one names it: a chain that goes on from
        another one is its session.

        Servers pass over the end of a page inside of a chain. Nothing is told of a block without a
        key here; nor of a long name, so that an answer with `HINTS_MAX` hints fits into a message.
        """
        name, last = namespace.name, match.length - 1
        known = match.stopped is not None and last >= chain.unsent * SPAN_BLOCKS
        if known and len(name) <= SESSION_NAME_MAX:
            (digest,) = chain.digests(last, last + 1)
            self._log.add(ChainEnd(name, namespace.parts, digest), ARRIVED, self._now())

    def heard(self, m: wire.Heartbeat) -> tuple[list[wire.WireHint], int]:
        now = self._now()
        for session, followed in m.hint_answers:
            self._log.answered(m.server, session, followed, now)
        hints, last = self._log.since(m.hints_heard, wire.HINTS_MAX)
        return [
            (hint.subject, max(0.0, now - hint.received_at), hint.resume_in) for hint in hints
        ], last

    def latest(self, count: int) -> list[tuple[str, float | None, float]]:
        now = self._now()
        return [
            (str(hint.subject), hint.resume_in, max(0.0, now - hint.received_at))
            for hint in self._log.latest(count)
        ]

    def _add(self, session: str, resume_in: float | None) -> bool:
        if not session.isprintable():
            raise BadMessage(f"session {session[:40]!r} is not printable")
        return self._log.add(session, resume_in, self._now())
