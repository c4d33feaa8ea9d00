"""Which tests execute which line, from runs of the suite under coverage.

A test that does not execute a line cannot notice a mistake in it, so a mutant is given only to
the tests that do. Processes that a test starts are counted for that test.

The map is kept. Next time only the files of tests that have changed are run again, and the lines
of the product that have moved are followed.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

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
#: The first two look at the text of the source, not at what it does; the third needs vLLM.
_NOT_RUN: Final = ("tests/repo/", "tests/mutation/", "tests/connector/vllm/")
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

        Each list begins with the quickest test. A line that runs while its module is imported (a
        constant, a default) matters to every test that executes the file, and to tests of its
        room, which may just look at it.
        """
        executed = self._tests.get(path, {})
        found = {test for line in lines for test in executed.get(str(line), ())}
        near = _test_folder(path)
        if _AT_IMPORT in found:  # besides, programs that tests start import the file
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


class _Stored(NamedTuple):
    """The map as a file holds it."""

    tests: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]
    #: The text of each measured file of the product: the lines of `tests` are lines of it.
    sources: dict[str, str]
    #: A hash of each file of tests that was run.
    test_files: dict[str, str]


def load(root: Path, folder: Path, only: Sequence[str] = ()) -> CoverageMap:
    """The map in `folder`, made or brought up to date first (for all tests some 15 minutes).

    `only`: no other tests than those in these folders and files are run and known.
    """
    file = folder / "map.json"
    stored = _Stored(*json.loads(file.read_text())) if file.exists() else _Stored({}, {}, {}, {})
    for path, before in stored.sources.items():
        now = (root / path).read_text() if (root / path).exists() else ""
        if now != before:
            stored.tests[path] = followed(stored.tests[path], before, now)
            stored.sources[path] = now
    present = _test_files(root, only)
    changed = [path for path in present if stored.test_files.get(path) != present[path]]
    gone = [path for path in stored.test_files if not (root / path).exists()]
    if changed or gone:
        _forget(stored, [*changed, *gone])
        if changed:
            _measure(root, folder, changed, stored)
        stored.test_files.update({path: present[path] for path in changed})
        file.write_text(json.dumps(stored))
    names = tuple(f"{path}::" for path in present)
    return CoverageMap(
        {
            path: {
                line: [test for test in tests if not test or test.startswith(names)]
                for line, tests in lines.items()
            }
            for path, lines in stored.tests.items()
        },
        {test: seconds for test, seconds in stored.seconds.items() if test.startswith(names)},
    )


def followed(tests: Mapping[str, Sequence[str]], before: str, after: str) -> dict[str, list[str]]:
    """The tests of each line, for the text after an edit.

    A line that is new or changed gets the tests of the lines whose place it has taken, or of its
    neighbours.
    """
    old, new = before.splitlines(), after.splitlines()
    found: dict[str, list[str]] = {}
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if kind == "equal":
            for i, j in zip(range(i1, i2), range(j1, j2), strict=True):
                if str(i + 1) in tests:
                    found[str(j + 1)] = list(tests[str(i + 1)])
        else:
            taken = range(i1, i2 + 2) if i1 == i2 else range(i1 + 1, i2 + 1)
            names = sorted({test for i in taken for test in tests.get(str(i), ())})
            found.update({str(j + 1): names for j in range(j1, j2) if names})
    return found


def _test_files(root: Path, only: Sequence[str]) -> dict[str, str]:
    """The files of tests of behaviour, and the hash of each."""
    paths = (path.relative_to(root).as_posix() for path in root.glob("tests/**/test_*.py"))
    return {
        path: hashlib.sha256((root / path).read_bytes()).hexdigest()[:16]
        for path in sorted(paths)
        if not path.startswith(_NOT_RUN)
        and (not only or any(f"{path}/".startswith(f"{one.rstrip('/')}/") for one in only))
    }


def _forget(stored: _Stored, test_files: Sequence[str]) -> None:
    names = tuple(f"{path}::" for path in test_files)
    for lines in stored.tests.values():
        for line, tests in lines.items():
            lines[line] = [test for test in tests if not test.startswith(names)]
    for test in [test for test in stored.seconds if test.startswith(names)]:
        del stored.seconds[test]


def _measure(root: Path, folder: Path, test_files: Sequence[str], stored: _Stored) -> None:
    """Run these files of tests under coverage, and add to the map what they execute."""
    settings = folder / "coveragerc"
    settings.write_text(_SETTINGS.format(folder=folder, root=root))
    for old in folder.glob(".coverage*"):
        old.unlink()
    seconds = folder / "seconds.json"
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]
    command += ["-p", "no:cacheprovider", "--tb=no", "-q"]
    command += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    command += ["-p", "tests.mutation.pytest_plugin", f"--timeout={_TIMEOUT_S}", *test_files]
    # Tests that are too slow under coverage fail here; what they executed counts all the same.
    subprocess.run(
        command,
        cwd=root,
        env=environment(root, MUTATION_SECONDS=str(seconds), MUTATION_COVERAGE=str(settings)),
    )
    for path, lines in _tests_by_line(root, folder).items():
        stored.sources[path] = (root / path).read_text()
        known = stored.tests.setdefault(path, {})
        for line, tests in lines.items():
            known[line] = sorted({*known.get(line, ()), *tests})
    stored.seconds.update(cast(dict[str, float], json.loads(seconds.read_text())))


def _tests_by_line(root: Path, folder: Path) -> dict[str, dict[str, list[str]]]:
    data = coverage.CoverageData(str(folder / ".coverage"))
    data.read()
    found: dict[str, dict[str, list[str]]] = {}
    for file in data.measured_files():
        path = Path(file).relative_to(root).as_posix()
        found[path] = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            found[path][str(line)] = sorted({_test_name(context) for context in contexts})
    return found


def _test_name(context: str) -> str:
    """The test of a context: of `tests/a.py::test_b|run` and of `tests/a.py::test_b (call)`."""
    for phase in ("|setup", "|run", "|teardown", " (setup)", " (call)", " (teardown)"):
        context = context.removesuffix(phase)
    return context or _AT_IMPORT
