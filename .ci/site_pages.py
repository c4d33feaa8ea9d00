"""For `make docs`: the tour is the first page, documents outside of docs/ become pages, and links
lead to pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: A document of the repository, and the page that it becomes.
PAGES = {
    "docs/tour.md": "index.md",
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "connector/README.md": "connector.md",
    "benchmarks/README.md": "run-benchmarks.md",
}
DOCUMENTS = {page: document for document, page in PAGES.items()}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
HTML_SOURCE = re.compile(r'(src|srcset)="([^":]+)"')


def on_files(files: Any, config: Any) -> Any:
    files.remove(files.get_file_from_path("tour.md"))
    for document, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    page_path = page.file.src_uri
    document = DOCUMENTS.get(page_path, f"docs/{page_path}")

    def on_site(target: str) -> str | None:
        """The target as a link of this page; None for a file that is not on the site."""
        path, _, anchor = target.partition("#")
        if ":" in path or not path:
            return target
        name = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
        if not (ROOT / name).exists():
            return target  # mkdocs reports it
        place = PAGES.get(name) or (name[5:] if name.startswith("docs/") else None)
        if place is None or (ROOT / name).is_dir():
            return None
        link = posixpath.relpath(place, posixpath.dirname(page_path) or ".")
        return f"{link}#{anchor}" if anchor else link

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        place = on_site(target)
        if place is not None:
            return f"{mark}[{text}]({place})"
        return text if "`" in text or " " in text else f"`{text}`"

    def source(found: re.Match[str]) -> str:
        return f'{found[1]}="{on_site(found[2]) or found[2]}"'

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if n % 2 else HTML_SOURCE.sub(source, LINK.sub(link, part))
        for n, part in enumerate(parts)
    )
