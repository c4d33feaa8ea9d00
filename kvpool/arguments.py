"""Numbers and texts that callers pass, as the wire has them.

Python has more types of numbers and texts than messages have: numpy's, fractions, subclasses of
`str`. Such a value must not reach a peer, which refuses the whole message, and then counts as one
that fails. A bool is no number here: whoever passes one has mixed up two arguments.
"""

from __future__ import annotations

import numbers
import operator


def as_int(value: object) -> int | None:
    """The whole number that `value` is, of whatever type; None if it is none, or a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_float(value: object) -> float | None:
    """The real number that `value` is, of whatever type; None if it is none, or a bool."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_text(value: object) -> str | None:
    """The text that `value` is, as a plain `str`; None if it is none."""
    return str.__str__(value) if isinstance(value, str) else None
