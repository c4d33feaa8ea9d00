"""The tier in the contract's docstring passes the checks that the contract names."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from kvpool.protocols import tier as contract
from kvpool.testing import TIER_CHECKS, NotDeclared


@pytest.mark.parametrize("check", TIER_CHECKS)
async def test_the_tier_in_the_docstring(check: str, tmp_path: Path) -> None:
    assert contract.__doc__ is not None
    _, _, example = contract.__doc__.partition("::\n")
    source = textwrap.dedent(example.rpartition("\n\n(design:")[0])
    path = tmp_path / "heap.py"
    path.write_text(f"from kvpool.errors import Closed, UsageError\n{source}")
    spec = importlib.util.spec_from_file_location("heap", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        await TIER_CHECKS[check](module.Heap)
    except NotDeclared as why:
        pytest.skip(str(why))
