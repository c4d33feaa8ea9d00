"""A `kvpool` command as a process of a newer release of the same protocol: it says more.

python -m tests.support.newer_release COMMAND...
"""

from __future__ import annotations

import runpy
import sys
from typing import Any, Final

import msgspec

from kvpool.wire import messages

#: A field that this release does not know, and what may be in it.
MORE: Final[dict[str, Any]] = {"later": [1, {"a": None}, b"x" * 64]}
_FIGURES: Final = ("stats", "usage", "clients", "consumers", "members", "changes")


def with_more(body: bytes) -> bytes:
    """An encoded message with one more field in it, and in each map of figures inside of it."""
    return msgspec.msgpack.encode(_more(msgspec.msgpack.decode(body)))


def _more(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields.keys() & _FIGURES:
        inner = fields[name]
        if isinstance(inner, dict):
            fields[name] = _more(inner)
        elif isinstance(inner, list) and all(isinstance(one, dict) for one in inner):
            fields[name] = [_more(one) for one in inner]
    return fields | MORE


def says_more(kind: type[msgspec.Struct]) -> bool:
    """Whether an older peer passes over a field that it does not know."""
    return not kind.__struct_config__.forbid_unknown_fields


class Encoder:
    """Encodes with more fields whatever may have them."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: msgspec.Struct) -> bytes:
        body = self._encoder.encode(message)
        return with_more(body) if says_more(type(message)) else body


if __name__ == "__main__":
    messages.ENCODER = Encoder()  # type: ignore[misc, assignment]
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
