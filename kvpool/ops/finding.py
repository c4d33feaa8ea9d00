"""What one check of `kvpool doctor` found."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One check. `verdict` is ok, warn or fail; `advice` says what to do unless it is ok."""

    check: str
    verdict: str
    text: str
    advice: str = ""
