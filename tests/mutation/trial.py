"""One mutant against the tests: nearest first, then histories, then all others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutation.coverage_map import CoverageMap
from tests.mutation.mutants import Mutant, planted
from tests.mutation.tree import run

#: What pytest returns when a test failed, and when a file of tests cannot be imported.
_FAILED: Final = (1, 2)
#: A test may take this much longer than when it was measured, and pytest needs some to start.
_SLOWER: Final = 3.0
_START_S: Final = 60.0


class Verdict(NamedTuple):
    """What became of one mutant: `noticed_by` is empty for a survivor."""

    noticed_by: str
    tests: int

    @property
    def survived(self) -> bool:
        return not self.noticed_by


class Limits(NamedTuple):
    """How much is tried before a mutant counts as a survivor."""

    #: Seconds of tests outside the room, the quickest first.
    seconds: float
    histories: int


def try_mutant(
    tree: Path, root: Path, mutant: Mutant, tests: CoverageMap, limits: Limits
) -> Verdict:
    """Plant the mistake in the tree, run the tests until one fails, and mend the tree."""
    file = tree / mutant.path
    near, far = tests.tests_of(mutant.path, range(mutant.first_line, mutant.last_line + 1))
    count = len(near) + len(far)
    file.write_text(planted(root, mutant))
    try:
        if noticed := _run_tests(tree, near, tests):
            return Verdict(f"near: {noticed}", count)
        if limits.histories and any(test.startswith("tests/simulation/") for test in far):
            seeds = f"0:{limits.histories}"
            command = ["-m", "tests.simulation", "--seeds", seeds, "--jobs", "1", "--replays", "0"]
            if all(run(tree, command, _START_S + limits.histories)[0] != 0 for _ in range(2)):
                return Verdict("histories", count)
        if noticed := _run_tests(tree, _first(far, limits.seconds, tests), tests):
            return Verdict(f"far: {noticed}", count)
        return Verdict("", count)
    finally:
        file.write_bytes((root / mutant.path).read_bytes())


def _first(found: Sequence[str], seconds: float, tests: CoverageMap) -> list[str]:
    """The quickest tests, as many as fit into these seconds; at least one."""
    chosen: list[str] = []
    for test in found:
        if chosen and (seconds := seconds - tests.seconds(test)) < 0:
            break
        chosen.append(test)
    return chosen


def _run_tests(tree: Path, names: Sequence[str], tests: CoverageMap) -> str:
    """The first test that fails twice; "" if none does.

    A test that fails once may have failed because the machine was busy: it has noticed nothing,
    and the others are run.
    """
    left = list(names)
    while left and (failed := _first_failure(tree, left, tests)):
        again = [failed] if failed in left else left
        if _first_failure(tree, again, tests):
            return failed
        left = [name for name in left if name not in again]
    return ""


def _first_failure(tree: Path, names: Sequence[str], tests: CoverageMap) -> str:
    """The first test that fails, or what else went wrong; "" if all pass."""
    listed = tree / ".tests"
    listed.write_text("\n".join(names))
    seconds = _START_S + _SLOWER * sum(map(tests.seconds, names))
    command = ["-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", "-rfE"]
    code, output = run(tree, [*command, f"@{listed}"], seconds)
    if code is None:
        return "does not end"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if failed or code in _FAILED or code < 0:  # 4 with an ERROR: a file cannot be imported
        name = failed[0].split(" - ")[0] if failed else f"exit code {code}"
        return name.removeprefix("FAILED ").removeprefix("ERROR ")
    if code != 0:
        raise RuntimeError(f"pytest did not run, exit code {code}: {output}")
    return ""
