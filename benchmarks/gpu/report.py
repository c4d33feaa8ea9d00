"""Claims, their answers, and the page that has both. Knows nothing of devices."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple


class Result(enum.Enum):
    MET = "met"
    NOT_MET = "NOT MET"
    FOUND = "found"  # a fact, about which nothing is claimed
    FAILED = "FAILED"  # it could not be answered, although all that it needs is there
    NOT_RUN = "not run"


class Answer(NamedTuple):
    """What was measured, and whether that is what was claimed; None where nothing is."""

    met: bool | None
    figures: str


class Claim(NamedTuple):
    name: str  # for `--one`
    part: str
    text: str
    needs: tuple[str, ...]  # what must be on the machine: keys of `Present`
    ask: Callable[[str], Answer]  # on this device


class Line(NamedTuple):
    part: str
    text: str
    result: Result
    figures: str


#: What a claim may need; None if it is there, else the words for a line that was not run.
Present = Mapping[str, str | None]


def lines(claims: Iterable[Claim], present: Present, ask: Callable[[Claim], Answer]) -> list[Line]:
    """One line for each claim. A claim whose needs are not there, or that fails, ends nothing."""
    found = []
    for claim in claims:
        lacking = next((why for need in claim.needs if (why := present[need]) is not None), None)
        if lacking is not None:
            found.append(Line(claim.part, claim.text, Result.NOT_RUN, f"{lacking}: not run"))
            continue
        try:
            met, figures = ask(claim)
        except Exception as error:  # a claim may fail in any way: that is its answer
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(Line(claim.part, claim.text, Result.FAILED, text))
            continue
        result = Result.FOUND if met is None else Result.MET if met else Result.NOT_MET
        found.append(Line(claim.part, claim.text, result, figures))
    return found


def is_accepted(found: Sequence[Line]) -> bool:
    """Nothing that was run is against a claim."""
    return not any(line.result in (Result.NOT_MET, Result.FAILED) for line in found)


def page(title: str, found: Sequence[Line]) -> str:
    """The page, as Markdown."""
    counts = {one: sum(line.result is one for line in found) for one in Result}
    summary = ", ".join(f"{count} {one.value}" for one, count in counts.items() if count)
    text = [f"# {title}", "", f"{summary}.", ""]
    for part in dict.fromkeys(line.part for line in found):
        text += [f"## {part}", "", "| claim | | figures |", "|---|---|---|"]
        text += [
            f"| {line.text} | {line.result.value} | {_cell(line.figures)} |"
            for line in found
            if line.part == part
        ]
        text.append("")
    return "\n".join(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
