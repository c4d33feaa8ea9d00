"""When conversations come back: learned from each one's own pauses. Pure.

A session pauses after each answer: shortly after a tool call, while its client runs the tool, and
perhaps for long after a last answer, while a person thinks. The two are learned apart, from the
session's own history; before it has one, from what other sessions of this process did last.
(design: session-hints)
"""

from __future__ import annotations

import enum
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: Sessions recorded at once; one more drops the one that was used longest ago.
SESSIONS_MAX: Final = 16_384
#: Pauses of one session, and of all others together, that an estimate looks at.
_OWN_MAX: Final = 8
_ALL_MAX: Final = 256
#: Pauses of other sessions that are needed for an estimate.
_ALL_MIN: Final = 16
#: Seconds. A longer pause is no habit: the session was given up and taken up again.
PAUSE_S_MAX: Final = 3600.0


class Answer(enum.Enum):
    """How an answer ended."""

    TOOL_CALL = "tool call"
    FINAL = "final"
    #: It was cut off, refused, or could not be read.
    UNKNOWN = "unknown"


class Expectation(NamedTuple):
    """What to tell the pool of a session after an answer; neither: nothing."""

    resume_in_s: float | None = None
    ends: bool = False


@dataclass(slots=True)
class _PausingSession:
    waiting: int = 0  # prompts that are being answered
    answered_at: float = 0.0
    answer: Answer = Answer.UNKNOWN
    pauses: dict[Answer, deque[float]] = field(default_factory=dict)


class Pauses:
    """What is known of the sessions of one process. `now` is any clock that does not go back."""

    def __init__(self, limit: int = SESSIONS_MAX) -> None:
        self._limit = limit
        self._sessions: OrderedDict[str, _PausingSession] = OrderedDict()
        self._all: dict[Answer, deque[float]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def on_prompt(self, name: str, now: float) -> None:
        """A prompt of this session was taken: the pause before it has ended."""
        session = self._sessions.setdefault(name, _PausingSession())
        self._sessions.move_to_end(name)
        if len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
        pause_s = now - session.answered_at
        if session.answer is not Answer.UNKNOWN and 0 <= pause_s <= PAUSE_S_MAX:
            for pauses, most in ((session.pauses, _OWN_MAX), (self._all, _ALL_MAX)):
                pauses.setdefault(session.answer, deque(maxlen=most)).append(pause_s)
        session.answer = Answer.UNKNOWN
        session.waiting += 1

    def on_answer(
        self,
        name: str,
        answer: Answer,
        now: float,
        *,
        has_parent: bool = False,
        retention_s: float | None = None,
    ) -> Expectation:
        """An answer has ended. A sub-agent's last answer is the end of its session.

        `retention_s`: how long the client pays for, which counts where no pause is known.
        """
        session = self._sessions.get(name)
        if session is None:
            return Expectation()
        session.waiting = max(0, session.waiting - 1)
        if session.waiting or answer is Answer.UNKNOWN:  # it is not alone, or not known
            return Expectation()
        if has_parent and answer is Answer.FINAL:
            del self._sessions[name]
            return Expectation(ends=True)
        session.answer, session.answered_at = answer, now
        own, others = session.pauses.get(answer, ()), self._all.get(answer, ())
        if own:
            return Expectation(statistics.median(own))
        if retention_s is not None and answer is Answer.FINAL:
            return Expectation(min(retention_s, PAUSE_S_MAX))
        if len(others) >= _ALL_MIN:
            return Expectation(statistics.median(others))
        return Expectation()
