"""The house keeps its order: who may import whom, and a few rules that fail the build."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ["kvpool", "transports", "tiers", "connector", "examples", "benchmarks"]
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
PLUGINS = ("kvpool_transports", "kvpool_tiers", "kvpool_connector")
PURE_STDLIB = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "hmac",
    "itertools",
    "math",
    "struct",
    "typing",
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, with its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                assert alias.name != "*", f"{path}: star import"
                yield f"{node.module}.{alias.name}"


def within(name: str, *allowed: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def files(*folders: str) -> list[Path]:
    return [path for path in SOURCES if within(".".join(path.relative_to(ROOT).parts), *folders)]


def test_the_core_and_the_wire_are_pure() -> None:
    """No clock, no randomness, no I/O: what they import cannot reach any of it."""
    for path in files("kvpool.core", "kvpool.wire"):
        for name in imports(path):
            ours = within(name, "kvpool.types", "kvpool.errors", "kvpool.core", "kvpool.wire")
            pure = name.partition(".")[0] in PURE_STDLIB | {"msgspec", "xxhash"}
            assert ours or pure, f"{path} imports {name}"
    for path in files("kvpool.core"):
        assert not [n for n in imports(path) if within(n, "kvpool.wire")], path
    for path in files("kvpool.wire"):
        assert not [n for n in imports(path) if within(n, "kvpool.core")], path


def test_types_and_errors_stand_below_everything() -> None:
    for name in imports(ROOT / "kvpool/errors.py"):
        assert not within(name, "kvpool"), name
    for name in imports(ROOT / "kvpool/types.py"):
        assert not within(name, "kvpool") or within(name, "kvpool.errors"), name


def test_transports_and_tiers_know_contracts_only() -> None:
    allowed = ("types", "errors", "protocols", "wire", "checksum", "device", "logs")
    for path in files("transports", "tiers"):
        for name in imports(path):
            if within(name, "kvpool") and name != "kvpool.logs":
                assert within(name, *(f"kvpool.{one}" for one in allowed)), f"{path}: {name}"


def test_connectors_and_examples_use_the_public_api() -> None:
    public = ("sync", "dev", "types", "errors", "protocols", "checksum", "testing")
    for path in files("connector", "examples"):
        for name in imports(path):
            if within(name, "kvpool"):
                rest = name.removeprefix("kvpool").lstrip(".")
                internal = rest.partition(".")[0]
                hidden = (ROOT / "kvpool" / f"{internal}.py").exists() or internal == "core"
                assert not hidden or internal in public, f"{path}: {name}"


def test_the_pool_names_no_plug_in() -> None:
    for path in files("kvpool"):
        if "testing" not in path.parts:
            for name in imports(path):
                assert not within(name, *PLUGINS, "kvpool.testing"), f"{path}: {name}"


def test_the_shells_import_downwards() -> None:
    above = {
        "master": ("client", "server", "dev", "cli", "sync"),
        "server": ("client", "master", "dev", "cli", "sync"),
        "client": ("master", "server", "core", "dev", "cli", "sync"),
        "link": ("master", "server", "client", "core"),
        "protocols": ("master", "server", "client", "core", "link", "wire"),
    }
    for module, forbidden in above.items():
        for name in imports(ROOT / f"kvpool/{module}.py"):
            assert not within(name, *(f"kvpool.{one}" for one in forbidden)), f"{module}: {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_evaluates_what_it_was_sent(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "__import__"), path
    assert not [n for n in imports(path) if within(n, "pickle", "marshal", "shelve")], path


def test_a_function_fits_a_screen() -> None:
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 70:
                    long.append(f"{path.relative_to(ROOT)}:{node.name} has {lines} lines")
    assert not long, long


def test_every_package_is_typed() -> None:
    for package in ("kvpool", *(f"{p.split('_')[1]}/{p}" for p in PLUGINS)):
        assert (ROOT / package / "py.typed").exists(), package
