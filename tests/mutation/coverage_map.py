"""Which tests execute which line, from one run of the whole suite under coverage.

A test that does not execute a line cannot notice a mistake in it, so a mutant is given only to
the tests that do. Processes that a test starts are counted for that test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import coverage

from tests.mutation.tree import environment

#: The settings of coverage. A process that a test starts inherits the name of the test from
#: pytest's variable, so its lines are counted for that test.
_SETTINGS: Final = """\
[run]
parallel = true
sigterm = true
data_file = {folder}/.coverage
context = ${{PYTEST_CURRENT_TEST-}}
source =
    {root}/kvpool
    {root}/transports
    {root}/tiers
    {root}/connector
"""
#: They look at the text of the source, not at what it does.
_NOT_TESTS_OF_BEHAVIOUR: Final = ("tests/repo/", "tests/mutation/")
#: Stands for no test: the line was executed before any test began.
_AT_IMPORT: Final = ""
#: Under coverage everything takes longer, and two tracers share the machine.
_TIMEOUT_S: Final = 600


class CoverageMap:
    """The tests that execute each line, and the seconds that each test takes."""

    def __init__(
        self,
        tests: Mapping[str, Mapping[str, Sequence[str]]],
        seconds: Mapping[str, float],
    ) -> None:
        self._tests = tests
        self._seconds = seconds

    def tests_of(self, path: str, lines: Sequence[int]) -> tuple[list[str], list[str]]:
        """Tests that execute one of the lines: those of the file's room, then all others.

        Each list begins with the quickest test. A line that runs only while its module is
        imported (a constant, a default) matters to every test that executes the file, and to
        tests of its room, which may just look at it.
        """
        executed = self._tests.get(path, {})
        found = {test for line in lines for test in executed.get(str(line), ())}
        near = _test_folder(path)
        if found == {_AT_IMPORT}:
            found = {test for tests in executed.values() for test in tests}
            found |= {test for test in self._seconds if test.startswith(near)}
        sorted_ones = sorted(found - {_AT_IMPORT}, key=lambda test: (self.seconds(test), test))
        return (
            [test for test in sorted_ones if test.startswith(near)],
            [test for test in sorted_ones if not test.startswith(near)],
        )

    def seconds(self, test: str) -> float:
        """How long the test took when the map was made."""
        return self._seconds.get(test, 1.0)


def _test_folder(path: str) -> str:
    """`kvpool/server/state/store.py` is tested in `tests/server/`."""
    first, second, *_ = path.split("/")
    return f"tests/{second}/" if first == "kvpool" else f"tests/{first}/"


def load(root: Path, folder: Path) -> CoverageMap:
    """The map in `folder`; it is made first if it is not there (some 15 minutes)."""
    stored = folder / "coverage.json"
    if not stored.exists():
        stored.write_text(json.dumps(_make(root, folder)))
    found = json.loads(stored.read_text())
    return CoverageMap(found["tests"], found["seconds"])


def _make(root: Path, folder: Path) -> dict[str, object]:
    settings = folder / "coveragerc"
    settings.write_text(_SETTINGS.format(folder=folder, root=root))
    for old in folder.glob(".coverage*"):
        old.unlink()
    seconds = folder / "seconds.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    command += ["-p", "tests.mutation.pytest_plugin", f"--timeout={_TIMEOUT_S}"]
    command += [f"--ignore={part}" for part in _NOT_TESTS_OF_BEHAVIOUR]
    # Tests that are too slow under coverage fail here; what they executed counts all the same.
    subprocess.run(
        command,
        cwd=root,
        env=environment(root, MUTATION_SECONDS=str(seconds), MUTATION_COVERAGE=str(settings)),
    )
    return {
        "tests": _tests_by_line(root, folder),
        "seconds": json.loads(seconds.read_text()),
    }


def _tests_by_line(root: Path, folder: Path) -> dict[str, dict[int, list[str]]]:
    data = coverage.CoverageData(str(folder / ".coverage"))
    data.read()
    found: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        path = Path(file).relative_to(root).as_posix()
        found[path] = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            found[path][line] = sorted({_test_name(context) for context in contexts})
    return found


def _test_name(context: str) -> str:
    """The test of a context: of `tests/a.py::test_b|run` and of `tests/a.py::test_b (call)`."""
    for phase in ("|setup", "|run", "|teardown", " (setup)", " (call)", " (teardown)"):
        context = context.removesuffix(phase)
    return context or _AT_IMPORT
