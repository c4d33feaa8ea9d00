"""`python -m tests.mutation`: which one-line mistakes do the tests notice?

Results are kept in `.mutants/`, so that a run that was broken off goes on where it was. Exit
codes: 0 all goals were met, 1 too many survivors, 2 usage error.
"""

from __future__ import annotations

import hashlib
import json
import queue
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if __package__ != "tests.mutation":
    raise SystemExit("start this program from the repository root: python -m tests.mutation")

from tests.mutation import coverage_map
from tests.mutation.mutants import Mutant, changed_lines, sample
from tests.mutation.tree import copy_tree
from tests.mutation.trial import Limits, Verdict, try_mutant

_ROOT: Final = Path(__file__).resolve().parents[2]
_FOLDER: Final = _ROOT / ".mutants"
#: Most survivors that are accepted, as a part of the mutants; those that make no difference count.
_GOAL_PURE: Final = 0.10
_GOAL: Final = 0.20


def main(
    count: Annotated[int, typer.Option("--sample", min=1, help="Mistakes to plant.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Which mistakes.")] = 1,
    rooms: Annotated[
        str,
        typer.Option(help="Only these folders or files, with commas; pure, others: those parts."),
    ] = "",
    tests: Annotated[
        str, typer.Option(help="No tests but those in these folders or files, with commas.")
    ] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Mistakes tried at a time.")] = 2,
    seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of tests outside the room, for each mistake.")
    ] = 120,
    histories: Annotated[int, typer.Option(min=0, help="Simulated histories for each.")] = 100,
    listed: Annotated[bool, typer.Option("--list", help="Print the mistakes only.")] = False,
) -> None:
    """Plant a random sample of one-line mistakes, and report which the tests do not notice."""
    console = Console()
    mutants = sample(_ROOT, count, seed, _names(rooms))
    if not mutants:
        raise typer.BadParameter(
            f"--rooms {rooms!r}: there is no such folder or file in the product"
        )
    if listed:
        for mutant in mutants:
            console.print(_described(mutant), soft_wrap=True, highlight=False)
        return
    _FOLDER.mkdir(exist_ok=True)
    tests_of_lines = coverage_map.load(_ROOT, _FOLDER, _names(tests))
    found = _Results(_FOLDER / "results.jsonl")
    open_ones = [mutant for mutant in mutants if mutant not in found]
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(jobs):
        trees.put(copy_tree(_ROOT, _FOLDER / f"tree-{number}"))

    def attempt(mutant: Mutant) -> None:
        tree = trees.get()
        try:
            verdict = try_mutant(tree, _ROOT, mutant, tests_of_lines, Limits(seconds, histories))
        finally:
            trees.put(tree)
        found.add(mutant, verdict)
        text = escape(verdict.noticed_by) or "[red]survived[/]"
        console.print(f"{mutant.path}:{mutant.line} {text}", soft_wrap=True, highlight=False)

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(attempt, open_ones):
            pass
    raise typer.Exit(_report(console, {mutant: found[mutant] for mutant in mutants}))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


class _Results:
    """What became of each mutant, in a file of one line each.

    A result holds for one text of the mutant's file: a changed file is tried again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, Verdict] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                key, *verdict = json.loads(line)
                self._found[key] = Verdict(*verdict)

    def __contains__(self, mutant: Mutant) -> bool:
        return self._key(mutant) in self._found

    def __getitem__(self, mutant: Mutant) -> Verdict:
        return self._found[self._key(mutant)]

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        self._found[self._key(mutant)] = verdict
        with self._file.open("a") as file:
            file.write(json.dumps([self._key(mutant), *verdict]) + "\n")

    @staticmethod
    def _key(mutant: Mutant) -> str:
        text = hashlib.sha256((_ROOT / mutant.path).read_bytes()).hexdigest()[:16]
        return f"{mutant.path} {mutant.operator} {mutant.occurrence} {text}"


def _report(console: Console, found: Mapping[Mutant, Verdict]) -> int:
    """Print the table by room and every survivor; 1 if a goal was missed."""
    rooms: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in found:
        rooms[mutant.room].append(mutant)
    table = Table("room", "mutants", "survivors", "part")
    for room, mutants in sorted(rooms.items()):
        table.add_row(room, *_figures(mutants, found))
    pure = [mutant for mutant in found if mutant.is_pure]
    others = [mutant for mutant in found if not mutant.is_pure]
    table.add_section()
    table.add_row(f"pure parts, goal {_GOAL_PURE:.0%}", *_figures(pure, found))
    table.add_row(f"all others, goal {_GOAL:.0%}", *_figures(others, found))
    for mutant in sorted(found):
        if found[mutant].survived:
            console.print(_described(mutant), soft_wrap=True, highlight=False)
    console.print(table)
    return int(
        _survivors(pure, found) > _GOAL_PURE * len(pure)
        or _survivors(others, found) > _GOAL * len(others)
    )


def _figures(mutants: Sequence[Mutant], found: Mapping[Mutant, Verdict]) -> Iterator[str]:
    survivors = _survivors(mutants, found)
    yield str(len(mutants))
    yield str(survivors)
    yield f"{survivors / len(mutants):.0%}" if mutants else "-"


def _survivors(mutants: Sequence[Mutant], found: Mapping[Mutant, Verdict]) -> int:
    return sum(found[mutant].survived for mutant in mutants)


def _described(mutant: Mutant) -> str:
    """The mistake as a person reads it: where, and the lines before and after."""
    changed = changed_lines(_ROOT, mutant)
    return escape("\n".join([f"{mutant.path}:{mutant.line} {mutant.operator}", *changed]))


if __name__ == "__main__":
    typer.run(main)
