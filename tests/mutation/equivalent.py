"""Mistakes that make no difference, each with the reason: reports leave them out.

A mistake is named by its file, its operator and the line as it stands in the source, so that an
entry holds when lines move and ends when its line changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EQUIVALENT: Final[Mapping[tuple[str, str, str], str]] = {}
