"""Histories that fail and whose cause is not mended yet.

Each is a defect that is known and printed by every run. It is not counted as a failure, so that
the run still says whether a change broke something else. A seed in this list that ends without
its failure is printed, too: then its line goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: By seed, with the default number of operations: the beginning of the failure.
OPEN_FAILURES: Final[Mapping[int, str]] = {}
