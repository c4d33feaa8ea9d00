"""Prints `docs/api/messages.md`: every message with its number and its fields.

python -m tests.wire.tables > docs/api/messages.md
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvpool.types import ClientUsage, Consumer, Member, ServerStats, TierUsage
from tests.support import messages

#: Structs inside of messages, which have lines of their own.
NESTED: Final[tuple[type[msgspec.Struct], ...]] = (
    messages.BlockChanges,
    messages.MapChange,
    Member,
    ServerStats,
    Consumer,
    ClientUsage,
    TierUsage,
)
_HEAD: Final = """\
# Messages

Made from `kvpool/wire/` with `python -m tests.wire.tables`; [wire.md](../wire.md) says
how they are used. Fields after a semicolon are left out when they have their default value.

| # | message | fields |
|--:|---|---|
"""
_NESTED_HEAD: Final = """
Structs inside of messages:

| struct | fields |
|---|---|
"""


def fields(kind: type[msgspec.Struct]) -> str:
    """Behind a semicolon those that are left out when they have their default."""
    found = msgspec.structs.fields(kind)
    needed = [f.name for f in found if f.required or not kind.__struct_config__.omit_defaults]
    others = [f.name for f in found if f.name not in needed]
    listed = ", ".join(needed)
    if others:
        listed += "; " + ", ".join(others)
    return listed or "none"


def page() -> str:
    rows = {n: f"`{kind.__name__}` | {fields(kind)}" for kind, n in messages.TYPES.items()}
    rows[messages.PAYLOAD] = "(payload) | no body; the blocks' bytes, one after the other"
    return (
        _HEAD
        + "".join(f"| {number} | {row} |\n" for number, row in sorted(rows.items()))
        + _NESTED_HEAD
        + "".join(f"| `{kind.__name__}` | {fields(kind)} |\n" for kind in NESTED)
    )


if __name__ == "__main__":
    print(page(), end="")
