"""The namespace of an engine's blocks: every property that must be equal, as readable text.

`key=value` pairs separated by spaces, so that a person and `kvpool doctor` can compare two engines
that share no blocks and see which field differs. A value that is too long or not printable becomes
a hash. Equal values give equal names, different values different names (design: namespace).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from kvpool.types import Namespace

#: The first word. Change it when any field, or the bytes of a block, get another meaning.
FORMAT: Final = "vllm/5"
_VALUE_MAX: Final = 64
_NAME_MAX: Final = 512


def name(fields: Mapping[str, object], *, parts: int, format: str = FORMAT) -> Namespace:
    """The namespace of these fields, in their order. `format` names the engine and its bytes."""
    words = [format] + [f"{field}={_value(str(value))}" for field, value in fields.items()]
    text = " ".join(words)
    if len(text) > _NAME_MAX:
        text = f"{text[: _NAME_MAX - 26]} digest={digest(text, 16)}"
    return Namespace(text, parts)


def digest(text: str, digits: int = 12) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:digits]


def _value(text: str) -> str:
    """The text as one printable word of bounded length; different texts give different words."""
    plain = text.isprintable() and text and not set(text) & set(" =~")
    if plain and len(text) <= _VALUE_MAX:
        return text
    safe = "".join(c if c.isalnum() or c in "-._/:" else "_" for c in text[: _VALUE_MAX - 20])
    return f"{safe}~{digest(text, 16)}"
