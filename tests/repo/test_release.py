"""A release: its notes are those of its version, and its workflow publishes what was checked."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpool
from tests.support.programs import module_at

ROOT = Path(__file__).parents[2]
PACKAGE = '__version__ = "1.2.0"\n'
CHANGELOG = """# Changelog

## 1.2.0 - 2030-01-31

Faster: see [design](docs/design.md) and [a paper](https://a.example/b).

### Added

- One.

## 1.1.0 - 2029-01-01

### Added

- Older.
"""


notes = module_at(ROOT / ".ci" / "release_notes.py").notes


def test_notes_are_the_page_of_the_version() -> None:
    assert notes("v1.2.0", CHANGELOG, PACKAGE) == (
        "Faster: see design and [a paper](https://a.example/b).\n\nAll changes: CHANGELOG.md.\n"
    )
    without = CHANGELOG.replace(CHANGELOG[CHANGELOG.index("Faster") : CHANGELOG.index("###")], "")
    assert notes("v1.2.0", without, PACKAGE).startswith("### Added\n\n- One.\n\nAll changes")


@pytest.mark.parametrize(
    ("tag", "changelog", "package", "why"),
    [
        ("v1.3.0", CHANGELOG, PACKAGE, "the package is 1.2.0"),
        ("1.2.0", CHANGELOG, PACKAGE, "tag '1.2.0'"),
        ("v1.2.0", CHANGELOG, "", "the package is unknown"),
        ("v1.2.0", CHANGELOG.replace("1.2.0 - 2030-01-31", "Unreleased"), PACKAGE, "'Unreleased'"),
        ("v1.1.0", CHANGELOG, '__version__ = "1.1.0"', "begins with '1.2.0 - 2030-01-31'"),
        ("v1.2.0", "# Changelog\n", PACKAGE, "'nothing'"),
    ],
)
def test_a_tag_that_does_not_fit_is_no_release(
    tag: str, changelog: str, package: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        notes(tag, changelog, package)


def test_the_page_of_this_release_is_a_page() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if "\n## Unreleased\n" in changelog:
        pytest.skip("between releases")
    package = (ROOT / "kvpool" / "__init__.py").read_text()
    page = notes(f"v{kvpool.__version__}", changelog, package)
    assert 40 < len(page.split()) < 400


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    return loaded


def test_only_the_step_that_publishes_may_publish() -> None:
    release = workflow("release")
    assert release["permissions"] == {"contents": "read"}
    may = {name: job.get("permissions") for name, job in release["jobs"].items()}
    assert may == {
        "build": None,
        "try": None,
        "publish": {"id-token": "write"},
        "notes": {"contents": "write"},
    }
    needs = {name: job.get("needs") for name, job in release["jobs"].items()}
    assert needs == {"build": None, "try": "build", "publish": "try", "notes": "publish"}
    assert release["jobs"]["publish"]["environment"] == "pypi"
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text  # trusted publishing: no token to keep
    assert "password" not in text
    # What a tag may contain is no program: it reaches a shell as a variable only.
    steps = [step for job in release["jobs"].values() for step in job["steps"]]
    assert not [step["run"] for step in steps if "${{" in step.get("run", "")]


@pytest.mark.parametrize("name", ["ci", "release"])
def test_a_workflow_is_bounded_and_names_versions(name: str) -> None:
    loaded = workflow(name)
    for job in loaded["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)


def test_every_python_that_is_promised_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    start = "Programming Language :: Python :: "
    promised = [one.removeprefix(start) for one in project["classifiers"] if one.startswith(start)]
    assert project["requires-python"] == f">={promised[0]}"
    for name, job in (("ci", "test"), ("release", "try")):
        assert workflow(name)["jobs"][job]["strategy"]["matrix"]["python"] == promised
