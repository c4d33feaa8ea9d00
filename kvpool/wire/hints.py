"""What a client says of a session to a master, and asks about it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvpool.types import Name, Seconds
from kvpool.wire.messages import HINT_ANSWERS_MAX, Message, SessionName, Tolerant, register


class Hint(Message, frozen=True):
    """A session resumes in `resume_s`, or (None) has ended; for every server to know. With 0 its
    prompt is here, and waits to be served."""

    session: Annotated[SessionName, Meta(min_length=1)]
    resume_s: Seconds | None


class ExplainSession(Message, frozen=True):
    """What became of the hints about a session."""

    session: Annotated[SessionName, Meta(min_length=1)]


class SessionExplained(Tolerant, frozen=True):
    """The last hint of each kind, as its age and `resume_s`; and for each server that has answered,
    its name, whether it follows the last one, and the age of that."""

    hints: Annotated[list[tuple[Seconds, Seconds | None]], Meta(max_length=3)]
    servers: Annotated[list[tuple[Name, bool, Seconds]], Meta(max_length=HINT_ANSWERS_MAX)]


register({Hint: 48, ExplainSession: 54, SessionExplained: 55})
