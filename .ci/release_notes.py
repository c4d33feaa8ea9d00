"""Release notes of a tag, from CHANGELOG.md: `python .ci/release_notes.py v0.2.0`.

Prints what stands between the heading of the version and its first list of changes. Ends with exit
code 1 and a sentence where the tag, the package and the changelog are of different versions.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, changelog: str, package: str) -> str:
    """`package` is the source that says `__version__`. Raises ValueError."""
    version = tag.removeprefix("v")
    built = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if not tag.startswith("v") or built is None or built[1] != version:
        raise ValueError(f"tag {tag!r}, but the package is {built[1] if built else 'unknown'}")
    newest = re.search(r"^## (.+)$", changelog, re.MULTILINE)
    if newest is None or not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest[1]):
        found = newest[1] if newest else "nothing"
        raise ValueError(f"CHANGELOG.md begins with {found!r}, expected '{version} - YYYY-MM-DD'")
    section = changelog[newest.end() :].partition("\n## ")[0]
    page = section.partition("\n### ")[0].strip()
    # What a link is relative to, a page of releases does not have.
    page = re.sub(r"\[([^]]+)\]\((?!https?://)[^)]+\)", r"\1", page)
    return f"{page or section.strip()}\n\nAll changes: CHANGELOG.md.\n"


if __name__ == "__main__":
    try:
        print(
            notes(
                sys.argv[1],
                (ROOT / "CHANGELOG.md").read_text(),
                (ROOT / "kvpool" / "__init__.py").read_text(),
            ),
            end="",
        )
    except ValueError as error:
        sys.exit(str(error))
