"""What `kvpool session` says of the hints about a session."""

from __future__ import annotations

from kvpool.ops.sessions import lines_of
from kvpool.types import ARRIVED, SessionReport


def test_a_session_without_hints_is_one_line() -> None:
    assert list(lines_of("s", SessionReport([], []))) == ["s: this master has no hint about it"]


def test_hints_come_with_what_servers_have_answered() -> None:
    hints = [(9.0, None), (2.0, 30.0), (4.0, ARRIVED)]
    report = SessionReport(hints, [("one", True, 1.5), ("two", False, 0.5)])
    assert list(lines_of("s", report)) == [
        "s: 2.0 s ago: it resumes in 30.0 s",
        "s: 4.0 s ago: its prompt is here",
        "s: 9.0 s ago: it ends",
        "  one: followed (1.5 s ago)",
        "  two: not followed, or only in part: it came too late or looks too far ahead, the "
        "session has too many branches, or the budget for hints is used up (0.5 s ago)",
    ]


def test_that_no_server_has_answered_is_said() -> None:
    *_, last = lines_of("s", SessionReport([(1.0, None)], []))
    assert last == "  no server has answered: none has blocks that this session alone uses"
