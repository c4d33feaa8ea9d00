"""The name under which an engine's blocks are shared: everything that must be equal, spelled out.

`key=value` pairs with spaces between them, so that a person and `kvpool doctor` can compare two
engines that share nothing and see which field keeps them apart. What is too long or not printable
becomes a hash; equal values give equal names, and different ones different names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from kvpool.types import Namespace

#: The first word; a new meaning of any field, or of a block's bytes, changes it.
FORMAT: Final = "vllm/1"
_VALUE_MAX: Final = 64
_NAME_MAX: Final = 512


def name(fields: Mapping[str, object], *, parts: int) -> Namespace:
    """The namespace of these fields, in their order."""
    words = [FORMAT] + [f"{field}={_value(str(value))}" for field, value in fields.items()]
    text = " ".join(words)
    if len(text) > _NAME_MAX:
        text = f"{text[: _NAME_MAX - 26]} digest={digest(text, 16)}"
    return Namespace(text, parts)


def digest(text: str, digits: int = 12) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _value(text: str) -> str:
    """One word, printable, of bounded length; two different texts never become the same one."""
    plain = text.isprintable() and text and not set(text) & set(" =~")
    if plain and len(text) <= _VALUE_MAX:
        return text
    safe = "".join(c if c.isalnum() or c in "-._/:" else "_" for c in text[: _VALUE_MAX - 20])
    return f"{safe}~{digest(text, 16)}"
