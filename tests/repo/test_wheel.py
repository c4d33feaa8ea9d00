"""The wheel, as a user gets it: built, installed into an empty environment, and tried there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

import kvpool
from tests.repo.test_house import PLUGINS
from tests.support.wheel import build

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvpool", *PLUGINS)
#: What only developers need. It stays in the repository.
NOT_SHIPPED = ("tests", "simulation", "chaos", "planted", "benchmarks", "examples", "fuzz")

TRIAL = """
    import importlib.metadata, importlib.util, pathlib, sys
    import kvpool, kvpool.testing, kvpool_connector, kvpool_tiers, kvpool_transports

    for module in (kvpool, kvpool_connector, kvpool_tiers, kvpool_transports):
        assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__
    for group in ("kvpool.transports", "kvpool.tiers", "kvpool.policies", "vllm.general_plugins"):
        entries = importlib.metadata.entry_points(group=group)
        assert entries, group
        for entry in entries:
            if group.startswith("kvpool"):
                entry.load()
            elif entry.name == "kvpool":  # loads where vLLM is installed
                assert importlib.util.find_spec(entry.module)
    print("all loaded")
"""


def run(*command: object, **environment: str) -> str:
    """What it printed. A failure shows everything."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=100,
        cwd="/",  # not the repository: nothing of it may be found by chance
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GITHUB_REPOSITORY", raising=False)
        return build(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_what_users_and_plug_in_authors_use(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sources = [name for name in names if name.endswith(".py")]
        lines = sum(archive.read(name).count(b"\n") for name in sources)
    print(f"{wheel.name}: {lines:,} lines of Python in {len(sources)} files")
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    roots = {name.partition("/")[0] for name in names}
    assert roots == {*PACKAGES, f"kvpool-{kvpool.__version__}.dist-info"}
    parts = {part.removesuffix(".py") for name in names for part in name.split("/")}
    assert not parts & set(NOT_SHIPPED)


RELATIVE = r"\]\((?!https:)[^)]*\)"


def description(wheel: Path) -> str:
    """What PyPI shows."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"kvpool-{kvpool.__version__}.dist-info/METADATA").decode()
    assert "\nDescription-Content-Type: text/markdown" in text
    return text.partition("\n\n")[2]


def test_what_the_package_index_shows_links_to_no_file_that_it_lacks(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = (ROOT / "README.md").read_text()
    assert len(re.findall(RELATIVE, written)) > 10
    without = description(wheel)  # built where nobody says which repository this is
    assert not re.findall(RELATIVE, without)
    assert "docs/guarantees.md lists all promises" in without
    for name, value in (("REPOSITORY", "them/pool"), ("REF_NAME", "v9")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    shown = description(build(tmp_path))
    assert not re.findall(RELATIVE, shown)
    assert "(https://github.com/them/pool/blob/v9/docs/guarantees.md)" in shown
    assert "](https://github.com/them/pool/raw/v9/docs/parts.svg)" in shown
    code = r"^```.*?^```"
    found, there = (re.findall(code, one, re.MULTILINE | re.DOTALL) for one in (shown, written))
    assert found == there


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment. Dependencies are those of this interpreter; of kvpool there is
    only the wheel."""
    place = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", place)
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    paths = {"base": str(place), "platbase": str(place)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    # A path in a .pth file comes after the environment's own packages, and the .pth files in it
    # are not read: so the development install of kvpool is not found through it.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return place / "bin"


def test_an_installed_wheel_works(installed: Path) -> None:
    assert run(installed / "kvpool", "--version") == f"kvpool {kvpool.__version__}\n"
    assert run(installed / "python", "-c", textwrap.dedent(TRIAL)) == "all loaded\n"


def test_the_installed_commands_run_a_pool(installed: Path) -> None:
    """Its processes start from the wheel, too."""
    options = "--sessions 1 --limit 3 --block-size 4KiB --servers 1 --clients 1 --capacity 8MiB"
    played = run(installed / "kvpool", "replay", *options.split(), "--json")
    figures = json.loads(played)
    assert (figures["requests"], figures["wrong_bytes"]) == (3, 0)
    dev = subprocess.Popen(
        [installed / "kvpool", "dev", "--capacity", "8MiB", "--bind", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    try:
        assert dev.stdout is not None
        line = dev.stdout.readline()
        assert "is up: master at 127.0.0.1:" in line
        status = run(installed / "kvpool", "status", "--masters", line.split()[-1], "--json")
        assert [one["server"] for one in json.loads(status)] == ["dev-0"]
        dev.send_signal(signal.SIGTERM)
        assert dev.wait(20) == 0
    finally:
        dev.kill()


def test_a_shell_has_completion_after_it_was_installed(installed: Path, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    install = '"$0" --install-completion && true'  # it asks which shell has started it
    assert "installed" in run("bash", "-c", install, installed / "kvpool", **home)
    rules = run("bash", "-c", "source ~/.bashrc; complete -p kvpool", **home)
    assert "kvpool" in rules
