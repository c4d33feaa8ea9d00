"""For `make docs`: the reference shows the `#:` comment above an attribute or enum member."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Docstring, Extension


class CommentDocstrings(Extension):
    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        if attr.docstring is not None or attr.lineno is None:
            return
        lines = attr.lines_collection[attr.filepath]
        comment: list[str] = []
        number = attr.lineno - 2
        while number >= 0 and lines[number].strip().startswith("#:"):
            comment.insert(0, lines[number].strip()[2:].strip())
            number -= 1
        if comment:
            attr.docstring = Docstring("\n".join(comment), parent=attr, lineno=number + 2)
