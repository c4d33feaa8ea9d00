"""`import kvpool` loads what a client needs, and nothing of a server (design: import-time)."""

from __future__ import annotations

import subprocess
import sys

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
    loaded = run("import sys, kvpool; print(*sys.modules)").split()
    assert "kvpool.client.pool" in loaded
    heavy = [name for name in loaded if any(f"{name}.".startswith(f"{one}.") for one in NOT_LOADED)]
    assert not heavy


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
