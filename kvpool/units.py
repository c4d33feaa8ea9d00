"""Sizes, durations and switches as people write and read them: `64GiB`, `250ms`, `yes`.

Every size that a command takes or prints is in powers of 1024.
"""

from __future__ import annotations

import re

from kvpool.errors import ConfigError


def parse_size(text: str | int | float) -> int:
    """Bytes: `64GiB`, `512 MiB`, `4096`. Raises ConfigError; `64GB` is one of the errors."""
    number: float
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = text, ""
    else:
        found = re.fullmatch(r"\s*([+-]?[0-9.]{1,20})\s*([A-Za-z]*)\s*", str(text))
        if found is None:
            raise ConfigError(f"size {text!r}: expected bytes or a number with unit, like 64GiB")
        try:
            number, unit = float(found[1]), found[2]
        except ValueError:
            raise ConfigError(f"size {text!r}: {found[1]!r} is no number") from None
    factors = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    if unit not in factors:
        binary = {"K": "KiB", "M": "MiB", "G": "GiB", "T": "TiB"}.get(unit[:1].upper())
        hint = f"; did you mean {found[1]}{binary}?" if binary and found else ""
        raise ConfigError(f"size {text!r}: unit {unit!r} is not one of KiB, MiB, GiB, TiB{hint}")
    if number < 0:
        raise ConfigError(f"size {text!r} is negative")
    if factors[unit] == 1 and number % 1:
        raise ConfigError(f"size {text!r}: expected a whole number, or a unit")
    return int(number * factors[unit])


def human(size: float) -> str:
    """Bytes as people read them, in the units that `parse_size` takes: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def parse_duration(text: str | int | float) -> float:
    """Seconds: `250ms`, `2s`, `5m`, `1h`, `0.5`. Raises ConfigError."""
    if isinstance(text, float):
        return text
    found = re.fullmatch(r"\s*([0-9.]{1,20})\s*([a-z]*)\s*", str(text))
    factors = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        if found is not None and found[2] in factors:
            return float(found[1]) * factors[found[2]]
    except ValueError:
        pass
    raise ConfigError(f"duration {text!r}: expected seconds or a number with ms, s, m or h")


def parse_bool(text: str, name: str) -> bool:
    """`yes`, `no` and the like. Raises ConfigError, which names the setting."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ConfigError(f"setting {name!r}: {text!r} is neither true nor false")
    return words[text.lower()]
