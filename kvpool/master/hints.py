"""The joint of a master for hints: from clients, by way of heartbeats, to every server."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Final

from kvpool.protocols import Caller
from kvpool.wire import messages as wire

#: `module:class`; the last one is made. Without its line and file no hint is passed on.
HINTS: Final = (
    "kvpool.master.hints:NoHints",
    "kvpool.master.session_hints:SessionHints",
)


class NoHints:
    """What a master asks; each answer as if there were no session."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    @property
    def last(self) -> int:
        """The number of the last hint."""
        return 0

    def hint(self, m: wire.Hint, caller: Caller) -> wire.StatusReply:
        """From a client."""
        return wire.StatusReply(bytes([False]))

    def explain(self, m: wire.ExplainSession, caller: Caller) -> wire.SessionExplained:
        """What became of the hints about a session."""
        return wire.SessionExplained([], [])

    def asked(self, session: str) -> None:
        """A client asks for blocks for a prompt of this session."""

    def heard(self, m: wire.Heartbeat) -> tuple[list[wire.WireHint], int]:
        """From a server that lives: the hints that it has not heard, and the number of the last."""
        return [], m.hints_heard

    def latest(self, count: int) -> list[tuple[str, float | None, float]]:
        """The sessions that were hinted at last: name, `resume_in` of the hint, its age in s."""
        return []


def make_hints(now: Callable[[], float]) -> NoHints:
    made: NoHints = resolve_name(HINTS[-1])(now)
    return made
