"""What came of the hints about a session, in words."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.types import ARRIVED, SessionReport

_ANSWERS = {
    True: "followed",
    False: "not followed, or only in part: it came too late or looks too far ahead, the session has"
    " too many branches, or the budget for hints is used up",
}


def lines_of(session: str, report: SessionReport) -> Iterator[str]:
    """One line for each hint and each server."""
    if not report.hints:
        yield f"{session}: this master has no hint about it"
        return
    for age_s, resume_in in sorted(report.hints, key=lambda hint: hint[0]):
        if resume_in is None:
            what = "it ends"
        elif resume_in == ARRIVED:
            what = "its prompt is here"
        else:
            what = f"it resumes in {resume_in:.1f} s"
        yield f"{session}: {age_s:.1f} s ago: {what}"
    for server, followed, age_s in report.servers:
        yield f"  {server}: {_ANSWERS[followed]} ({age_s:.1f} s ago)"
    if not report.servers:
        yield "  no server has answered: none has blocks that this session alone uses"
