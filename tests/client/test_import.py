"""`import kvpool` loads what a client needs, and nothing of a server (design: layout)."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import kvpool

#: A server, a master, tools; and libraries that take long to import and are often not needed.
NOT_LOADED = (
    "kvpool.server",
    "kvpool.master",
    "kvpool.tools",
    "kvpool.cli",
    "kvpool.ops",
    "kvpool.testing",
    "importlib.metadata",
    "numpy",
    "rich",
    "structlog",
    "torch",
    "yaml",
)


def run(source: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_client_loads_what_it_needs() -> None:
    loaded = run("import sys, kvpool; kvpool.connect; print(*sys.modules)").split()
    assert "kvpool.client.pool" in loaded
    heavy = [name for name in loaded if any(f"{name}.".startswith(f"{one}.") for one in NOT_LOADED)]
    assert not heavy


def test_a_command_that_prints_help_loads_neither_a_client_nor_a_loop() -> None:
    program = "import sys, kvpool.cli.app; print(*sys.modules)"
    unwanted = {"asyncio", "ctypes", "kvpool.client", "kvpool.net", "numpy", "zmq"}
    loaded = set(run(program).split())
    assert not unwanted & loaded
    assert {one for one in loaded if "kvpool.ops." in one} == {"kvpool.ops.process"}


def test_each_public_name_is_what_type_checkers_believe() -> None:
    """The imports for type checkers, and where `__getattr__` finds the names, are two lists."""
    believed = {}
    for node in ast.walk(ast.parse(Path(str(kvpool.__file__)).read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvpool"):
            believed |= {alias.name: node.module for alias in node.names}
    assert set(believed) == set(kvpool.__all__)
    for name, module in believed.items():
        home = import_module(str(module))
        assert getattr(kvpool, name) is getattr(home, name), name
    assert set(kvpool.__all__) <= set(dir(kvpool))


def test_sync_and_dev_are_there_after_import_kvpool() -> None:
    assert run("import kvpool; print(kvpool.sync.connect.__name__)").strip() == "connect"
    assert run("import kvpool; print(kvpool.dev.serve.__name__)").strip() == "serve"
    assert run("from kvpool import sync, dev; print(sync.Pool.__name__)").strip() == "Pool"


def test_other_attributes_are_errors() -> None:
    assert run("import kvpool; print(hasattr(kvpool, 'nothing'))").strip() == "False"


def test_a_log_line_needs_no_structlog() -> None:
    warn = "kvpool.logs.get('kvpool.x').warning('w', a=1)"
    loaded = run(f"import sys, kvpool.logs; {warn}; print(*sys.modules)")
    assert "structlog" not in loaded.split()
