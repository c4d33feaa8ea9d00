"""The tier in the contract's docstring passes the checks that the contract names."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from kvpool.protocols import tier as contract
from kvpool.testing import TIER_CHECKS, NotDeclared
from tests.support.programs import module_at


@pytest.mark.parametrize("check", TIER_CHECKS)
async def test_the_tier_in_the_docstring(check: str, tmp_path: Path) -> None:
    assert contract.__doc__ is not None
    _, _, example = contract.__doc__.partition("::\n")
    source = textwrap.dedent(example.rpartition("\n\n(design:")[0])
    path = tmp_path / "heap.py"
    path.write_text(f"from kvpool.errors import Closed, UsageError\n{source}")
    try:
        await TIER_CHECKS[check](module_at(path).Heap)
    except NotDeclared as why:
        pytest.skip(str(why))
