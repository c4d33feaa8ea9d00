"""The house keeps its order: who may import whom, and a few rules that fail the build."""

from __future__ import annotations

import ast
import functools
import graphlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ["kvpool", "transports", "tiers", "connector", "examples", "benchmarks"]
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
PLUGINS = (
    "kvpool_transports",
    "kvpool_tiers",
    "kvpool_agents",
    "kvpool_codecs",
    "kvpool_connector",
    "kvpool_engines",
    "kvpool_events",
    "kvpool_lmcache",
    "kvpool_sglang",
    "kvpool_transformers",
)
PURE_STDLIB = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "hmac",
    "itertools",
    "math",
    "operator",
    "re",
    "pkgutil",  # of joints: they only import what is there
    "struct",
    "typing",
}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All that a file consists of."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, with its full name."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
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


#: Who may import whom, one direction: a layer sees itself only where it is a package, and all
#: layers above it in this list. `client`, `server` and `master` run in processes of their own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "arguments", "logs", "private_files", "runtime", "threads"),
    (
        *("types", "units", "tenant_names", "tenants", "backoff", "piecewise_dict", "spans"),
        *("kv_events", "file_stamp", "yaml_file", "tracing", "sorting", "addresses", "guard"),
    ),
    (
        *("protocols", "config", "wire"),
        *("audit", "checksum", "fingerprint", "tombstones", "device_copy", "huge_pages"),
        *("shares", "strangers", "device", "supervision", "memory_limits"),
        *("moves", "operators", "removals", "secret_file", "tenancy", "write_rates"),
    ),
    ("net", "registry"),
    ("client", "server", "master"),
    ("sync", "dev", "ops", "testing"),
    ("tools",),
    ("cli",),
    ("__main__",),
)
#: Of their own layer these may import, too; nobody else imports a neighbour.
NEIGHBOURS = {
    "tenants": {"units", "tenant_names"},
    "audit": {"shares"},
    "tenancy": {"audit", "wire", "write_rates"},
    "wire": {"protocols", "fingerprint"},
    "config": {"wire"},
    "moves": {"protocols", "wire"},
    "removals": {"protocols", "wire"},
    "checksum": set(),
    "device": {"checksum", "device_copy"},
    "memory_limits": {"huge_pages"},
    "testing": {"dev"},
}
PURE = (
    "kvpool.wire",
    "kvpool.server.state",
    "kvpool.server.moves.state",
    "kvpool.server.eviction",
    "kvpool.master.state",
)
#: The root package re-exports what a program imports.
ROOT_EXPORTS = {"client", "config", "errors", "registry", "runtime", "secret_file", "types"}
ROOT_EXPORTS |= {"sync", "dev"}


def room_of(name: str) -> str:
    """`kvpool.client.pool.Pool` is of the room `client`."""
    return name.removeprefix("kvpool").lstrip(".").partition(".")[0]


def test_every_file_of_the_pool_is_in_a_layer() -> None:
    known = {room for layer in LAYERS for room in layer} | {"__init__"}
    assert {
        path.stem if path.parent.name == "kvpool" else room(path) for path in files("kvpool")
    } == known


def room(path: Path) -> str:
    return path.relative_to(ROOT / "kvpool").parts[0].removesuffix(".py")


def test_the_pool_imports_one_way() -> None:
    for path in files("kvpool"):
        here = room(path)
        if here == "__init__":
            rooms = {room_of(name) for name in imports(path) if within(name, "kvpool")}
            assert rooms <= ROOT_EXPORTS, path
            continue
        (level,) = (n for n, layer in enumerate(LAYERS) if here in layer)
        below = {one for layer in LAYERS[:level] for one in layer}
        allowed = below | {here, "logs", "__version__"} | NEIGHBOURS.get(here, set())
        for name in imports(path):
            if within(name, "kvpool"):
                assert room_of(name) in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[1:] if parts[0] in ("transports", "tiers", "connector") else parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    graph = {
        module: {owner for name in imports(path) if (owner := module_of(name, modules))} - {module}
        for module, path in modules.items()
    }
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError, which names the circle


def module_of(name: str, modules: Mapping[str, Path]) -> str | None:
    """The file that an imported name comes from."""
    return next((one for one in (name, name.rpartition(".")[0]) if one in modules), None)


def test_the_pure_rooms_are_pure() -> None:
    """No clock, no randomness, no I/O: what they import cannot reach any of it."""
    ours = (
        "types",
        "errors",
        "tombstones",
        "shares",
        "fingerprint",
        "piecewise_dict",
        "operators",
        "sorting",
        "spans",
        "protocols",
        "tenant_names",
        "tenants",
    )
    for path in files(*PURE):
        for name in imports(path):
            known = within(name, *(f"kvpool.{one}" for one in ours), *PURE)
            pure = name.partition(".")[0] in PURE_STDLIB | {"msgspec", "xxhash"}
            assert known or pure, f"{path} imports {name}"
    for path in files(*PURE[1:]):
        assert not [n for n in imports(path) if within(n, "kvpool.wire")], path
    for path in files("kvpool.wire"):
        assert not [n for n in imports(path) if within(n, *PURE[1:])], path


def test_transports_and_tiers_know_contracts_only() -> None:
    helpers = "addresses checksum device device_copy file_stamp guard huge_pages logs memory_limits"
    helpers += " shares strangers tenant_names threads units"
    allowed = ("types", "errors", "protocols", "wire", *helpers.split())
    for path in files("transports", "tiers"):
        for name in imports(path):
            if within(name, "kvpool") and name != "kvpool.logs":
                assert within(name, *(f"kvpool.{one}" for one in allowed)), f"{path}: {name}"


def test_connectors_and_examples_use_the_public_api() -> None:
    public = {"sync", "dev", "types", "errors", "protocols", "checksum", "backoff", "testing"}
    public |= {"kv_events", "threads", "tracing", "device"}
    rooms = {room for layer in LAYERS for room in layer}
    for path in files("connector", "examples"):
        for name in imports(path):
            drawn = path.stem in ("takeover_report", "fleet_report")
            if within(name, "kvpool.tools.charts") and drawn:
                continue  # pictures of what demos measured, drawn as the pool's own are
            if within(name, "kvpool") and room_of(name) in rooms:
                assert room_of(name) in public, f"{path}: {name}"


def test_the_pool_names_no_plug_in() -> None:
    for path in files("kvpool"):
        for name in imports(path):
            assert not within(name, *PLUGINS, "tests", "benchmarks"), f"{path}: {name}"
            if "testing" not in path.parts:
                assert not within(name, "kvpool.testing"), f"{path}: {name}"


def test_nothing_evaluates_what_it_was_sent() -> None:
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), path
        assert not [n for n in imports(path) if within(n, "pickle", "marshal", "shelve")], path


def test_a_function_fits_a_screen() -> None:
    long = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 70:
                    long.append(f"{path.relative_to(ROOT)}:{node.name} has {lines} lines")
    assert not long, long


def test_every_package_is_typed() -> None:
    for package in ("kvpool", *PLUGINS):
        rooms = [room for room in (ROOT / package, *ROOT.glob(f"*/{package}")) if room.is_dir()]
        assert [room for room in rooms if (room / "py.typed").exists()] == rooms != [], package


def test_no_gather_leaves_others_running() -> None:
    """The first error ends a bare `gather`, and the other calls go on in memory that is free."""
    for path in files("kvpool", "transports", "tiers", "connector"):
        if "testing" in path.parts:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("asyncio.gather"):
                waits = [one.arg for one in node.keywords]
                assert waits == ["return_exceptions"], f"{path}:{node.lineno}: threads.wait_for_all"


def test_no_line_of_a_log_has_a_field_that_logging_has_itself() -> None:
    """It would be an exception in place of the line."""
    taken = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {one.arg}"
        for part in ("kvpool", "transports", "tiers", "connector")
        for path in sorted((ROOT / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log.")
        for one in node.keywords
        if one.arg in taken
    ]
    assert not found
