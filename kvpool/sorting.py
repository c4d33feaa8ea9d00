"""Sorting what is too much for one turn of the loop. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: Items that are sorted at once: a millisecond or two.
RUN: Final = 4096


def sorted_runs(items: Sequence[T], key: Callable[[T], Any]) -> Iterator[list[T]]:
    """The items in sorted pieces; `heapq.merge` of all of them, with the same key, is their order.

    Between two pieces, and while it merges, the caller may let the loop run.
    """
    for first in range(0, len(items), RUN):
        yield sorted(items[first : first + RUN], key=key)
