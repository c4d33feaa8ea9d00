"""The README of a package: PyPI has no other file of this repository, so links become absolute.

The repository is the one that the release runs in (GitHub says which). A package that is built
elsewhere has no links to files and no pictures of files: better none than dead ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A code block, which stays as it is; or a link or picture `![text](target)`.
_PART = re.compile(r"(^```.*?^```)|(!?)\[([^\]]*)\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)


class PackageReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        readme = {"content-type": "text/markdown", "text": absolute(text, os.environ)}
        metadata["readme"] = readme


def absolute(text: str, environment: Mapping[str, str]) -> str:
    """The text without relative links."""
    repository = environment.get("GITHUB_REPOSITORY")
    server = environment.get("GITHUB_SERVER_URL", "https://github.com")
    tag = environment.get("GITHUB_REF_NAME", "main")

    def link(found: re.Match[str]) -> str:
        code, picture, name, target = found.groups()
        if code or re.match(r"[a-z]+:|#", target):
            return found[0]
        if not repository:
            return "" if picture else name
        place = "raw" if picture else "blob"
        return f"{picture}[{name}]({server}/{repository}/{place}/{tag}/{target})"

    return _PART.sub(link, text)
