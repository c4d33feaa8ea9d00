"""Servers as a master lists them."""

from __future__ import annotations

from typing import Any

from kvpool.types import Member, ServerStats


def member(server: str = "a", **fields: Any) -> Member:
    """One that is up. `fields` are its own, and figures of it."""
    usual = {"epoch": 1, "host": "host", "addresses": (), "tiers": ("dram",), "alive": True}
    usual |= {"heard_s": 0.0, "capacity": 1 << 30}
    own = {name: fields.pop(name) for name in Member.__struct_fields__ if name in fields}
    return Member(server, **{**usual, "stats": ServerStats(**fields), **own})
