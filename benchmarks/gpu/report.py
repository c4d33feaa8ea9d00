"""Claims, their answers, and the page that has both. Knows nothing of devices."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Result(enum.Enum):
    MET = "true"
    NOT_MET = "FALSE"
    FOUND = "found"  # a fact, about which nothing is claimed
    FAILED = "FAILED"  # it could not be answered, although all that it needs is there
    NOT_RUN = "not possible here"


class Answer(NamedTuple):
    """What was measured, and whether that is what was claimed; None where nothing is.

    `figure` stands beside its `limit`, which no way over this device can exceed, or may not.
    """

    met: bool | None
    figures: str
    figure: float | None = None
    limit: float | None = None


class NoTime(Exception):
    """All claims together may take so long, and there is no time left for this one."""


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
    figure: float | None = None
    limit: float | None = None
    seconds: float = 0.0


#: What a claim may need; None if it is there, else the words for a line that was not run.
Present = Mapping[str, str | None]


def lines(
    claims: Iterable[Claim],
    present: Present,
    ask: Callable[[Claim], Answer],
    clock: Callable[[], float] = lambda: 0.0,
) -> Iterator[Line]:
    """One line for each claim, as soon as there is one. A claim whose needs are not there, or that
    fails, ends nothing."""
    for claim in claims:
        lacking = next((why for need in claim.needs if (why := present[need]) is not None), None)
        if lacking is not None:
            yield Line(claim.part, claim.text, Result.NOT_RUN, lacking)
            continue
        began = clock()
        try:
            answer = ask(claim)
        except NoTime as error:
            yield Line(claim.part, claim.text, Result.NOT_RUN, str(error))
            continue
        except Exception as error:  # a claim may fail in any way: that is its answer
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Line(claim.part, claim.text, Result.FAILED, text, seconds=clock() - began)
            continue
        met = answer.met
        result = Result.FOUND if met is None else Result.MET if met else Result.NOT_MET
        yield Line(claim.part, claim.text, result, *answer[1:], seconds=clock() - began)


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


def as_json(title: str, found: Sequence[Line]) -> str:
    """The same for programs: true, false or null, and why."""
    words = {Result.MET: True, Result.NOT_MET: False, Result.FAILED: False}
    rows = [
        {
            "part": line.part,
            "claim": line.text,
            "true": words.get(line.result),
            "result": line.result.value,
            "figures": line.figures,
            "figure": line.figure,
            "limit": line.limit,
            "seconds": round(line.seconds, 1),
        }
        for line in found
    ]
    return json.dumps({"title": title, "lines": rows}, indent=1) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
