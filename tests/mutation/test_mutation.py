"""The mistakes are real ones, the sample is repeatable, and the map finds the tests of a line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="make mutants installs it")

from tests.mutation import mutants
from tests.mutation.coverage_map import CoverageMap, load
from tests.mutation.mutants import mutants_of, planted, sample
from tests.mutation.trial import Limits, Verdict, try_mutant

ROOT = Path(__file__).resolve().parents[2]


def test_each_mistake_of_a_sample_changes_the_file_and_compiles() -> None:
    for mutant in sample(ROOT, 40, 7, ["kvpool/client", "kvpool/net"]):
        changed = planted(ROOT, mutant)
        compile(changed, mutant.path, "exec")
        assert changed != (ROOT / mutant.path).read_text(), mutant


def test_a_sample_is_repeatable_and_without_doubles() -> None:
    first, again, other = (sample(ROOT, 100, seed, ["kvpool/wire"]) for seed in (3, 3, 4))
    assert first == again != other
    assert len(set(first)) == 100


def test_a_sample_of_rooms_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["kvpool/net/announced.py", "kvpool/wire/frames.py"]
    monkeypatch.setattr(mutants, "product_files", lambda root: few)
    assert {mutant.room for mutant in sample(ROOT, 50, 1, ["kvpool/wire"])} == {"kvpool/wire"}
    assert sample(ROOT, 50, 1, ["nowhere"]) == []
    assert {mutant.path for mutant in sample(ROOT, 1000, 1, ["pure"])} == {few[1]}
    assert {mutant.path for mutant in sample(ROOT, 1000, 1, ["others"])} == {few[0]}


SOURCE = '''\
def clean(self, items: list[int | None]) -> int | None:
    """Text with 3 < 4 in it."""
    log.info("cleaned", count=3)
    if TYPE_CHECKING:
        pass
    self.held -= 4096
    for item in items:
        self.forget(
            item,
        )
    for item, name in zip(items, self.names, strict=True):
        pass
    return len(items) > 0
'''


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(SOURCE)
    return tmp_path


def test_the_kinds_of_mistakes(small_root: Path) -> None:
    found = {(mutant.operator, mutant.line) for mutant in mutants_of(small_root, "small.py")}
    assert found == {
        ("DropStatement", 6),
        ("DropStatement", 8),
        ("ChangeNumber", 6),
        ("ChangeNumber", 13),
        ("ZeroIterationForLoop", 7),
        ("ZeroIterationForLoop", 11),
        ("ReplaceComparisonOperator_Gt_GtE", 13),
        ("ReplaceComparisonOperator_Gt_LtE", 13),
    }


QUICK = "tests/server/b.py::quick"
LOOKING = "tests/server/c.py::that_compares_constants"


def test_tests_of_a_line_nearest_and_quickest_first() -> None:
    tests = CoverageMap(
        {
            "kvpool/server/state/store.py": {
                "1": ["", "tests/client/a.py::f"],
                "5": [
                    "tests/client/a.py::f",
                    "tests/server/b.py::slow",
                    "tests/server/b.py::quick",
                ],
                "6": [],
            }
        },
        {"tests/server/b.py::slow": 2.0, QUICK: 0.1, LOOKING: 3.0, "tests/client/a.py::g": 0.1},
    )
    near, far = tests.tests_of("kvpool/server/state/store.py", [5])
    assert near == [QUICK, "tests/server/b.py::slow"]
    assert far == ["tests/client/a.py::f"]
    # A constant is executed at import: each test of the file or the room may notice it.
    assert tests.tests_of("kvpool/server/state/store.py", [1]) == ([*near, LOOKING], far)
    assert tests.tests_of("kvpool/server/state/store.py", [6]) == ([], [])
    assert tests.tests_of("kvpool/new.py", [1]) == ([], [])


def test_only_tests_that_have_changed_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # what is run here is no part of this test
    for folder in ("kvpool", "transports", "tiers", "connector", "tests", "kept"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kvpool" / "__init__.py").touch()
    product = tmp_path / "kvpool" / "sizes.py"
    product.write_text("def half(size):\n    return size // 2\n")
    body = "from kvpool.sizes import half\n\ndef test_{0}():\n    open('{0}', 'a').write('x')\n"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    tests = [tmp_path / "tests" / f"test_{name}.py" for name in "ab"]
    for name, file in zip("ab", tests, strict=True):
        file.write_text(body.format(name) + "    assert half(4) == 2\n")

    def found(line: int) -> list[str]:
        near, far = load(tmp_path, tmp_path / "kept").tests_of("kvpool/sizes.py", [line])
        return near + far

    def runs() -> list[int]:
        return [len((tmp_path / name).read_text()) for name in "ab"]

    both = sorted(f"tests/test_{name}.py::test_{name}" for name in "ab")
    assert sorted(found(2)) == both
    product.write_text("#: Moved.\n" + product.read_text())
    tests[0].write_text(tests[0].read_text() + "    assert half(6) == 3\n")
    assert sorted(found(3)) == both
    assert runs() == [2, 1]
    tests[1].unlink()
    assert found(3) == both[:1]
    assert runs() == [2, 1]
    assert load(tmp_path, tmp_path / "kept", ["tests/client"]).tests_of("kvpool/sizes.py", [3]) == (
        [],
        [],
    )


#: The first test fails at these of its runs, as one does that is too slow for a busy machine.
TESTS = """\
from pathlib import Path
from product.sizes import is_full

def test_shaky():
    runs = Path("runs")
    count = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (count + 1))
    assert count not in {failing}

def test_limit():
    assert is_full({size})
"""
SHAKY, LIMIT = (f"tests/product/test_sizes.py::test_{name}" for name in ("shaky", "limit"))


@pytest.mark.parametrize(
    ("failing", "size", "noticed_by"),
    [
        ([0], 4, f"near: {LIMIT}"),  # it failed once: the machine was busy
        ([0, 1], 5, f"near: {SHAKY}"),
    ],
)
def test_a_test_must_fail_twice_to_have_noticed(
    tmp_path: Path, failing: list[int], size: int, noticed_by: str
) -> None:
    root, tree = tmp_path / "root", tmp_path / "tree"
    for folder in (root, tree):
        (folder / "product").mkdir(parents=True)
        (folder / "product" / "sizes.py").write_text(
            "def is_full(held: int) -> bool:\n    return held >= 4\n"
        )
    (tree / "tests" / "product").mkdir(parents=True)
    (tree / "tests" / "product" / "test_sizes.py").write_text(
        TESTS.format(failing=failing, size=size)
    )
    (tree / "pytest.ini").write_text("[pytest]\n")
    tests = CoverageMap({"product/sizes.py": {"2": [SHAKY, LIMIT]}}, {SHAKY: 0.1, LIMIT: 0.2})
    (mutant,) = (m for m in mutants_of(root, "product/sizes.py") if m.operator.endswith("GtE_Gt"))
    verdict = try_mutant(tree, root, mutant, tests, Limits(seconds=1, histories=0))
    assert verdict == Verdict(noticed_by, 2)
    assert "held >= 4" in (tree / "product" / "sizes.py").read_text()
