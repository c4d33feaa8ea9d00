"""The wheel, as a user gets it: built, installed into an empty environment, and tried there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

import kvpool
from tests.support.wheel import build

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "kvpool",
    "kvpool_transports",
    "kvpool_tiers",
    "kvpool_connector",
    "kvpool_lmcache",
    "kvpool_sglang",
    "kvpool_transformers",
)
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


def test_an_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """Dependencies are those of this interpreter; of kvpool there is only the wheel."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    paths = {"base": str(tmp_path), "platbase": str(tmp_path)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    # A path in a .pth file comes after the environment's own packages, and the .pth files in it
    # are not read: so the development install of kvpool is not found through it.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    assert run(tmp_path / "bin" / "kvpool", "--version") == f"kvpool {kvpool.__version__}\n"
    assert run(python, "-c", textwrap.dedent(TRIAL)) == "all loaded\n"
