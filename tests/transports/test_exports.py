"""What authors of transports may use is exported in one place, and CONTRIBUTING lists just that."""

from __future__ import annotations

import re
from pathlib import Path

import kvpool_transports.streams as streams

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_contributing_lists_what_is_exported() -> None:
    (section,) = re.findall(r"^## Write a transport\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(r"\| name \| what it does \|\n\|---\|---\|\n((?:\|.*\|\n)+)", section)
    listed = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(listed) == sorted(streams.__all__)


def test_every_export_is_there_and_documented() -> None:
    for name in streams.__all__:
        exported = getattr(streams, name)
        assert exported.__doc__, name
        assert re.search(rf"^    {name}\b", streams.__doc__ or "", re.MULTILINE), name


def test_the_example_uses_exports_only() -> None:
    source = (Path(__file__).parents[2] / "examples" / "write_a_transport.py").read_text()
    imported = re.findall(r"^from (kvpool_transports[\w.]*) import", source, re.MULTILINE)
    assert set(imported) == {"kvpool_transports.streams"}
