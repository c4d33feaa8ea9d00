"""Loops over as many records as a file has, in which others have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from heapq import merge
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

#: Records that are looked at in one turn of the loop.
_TURN: Final = 1024


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items; others have their turn between some of them."""
    for number, one in enumerate(items):
        if number % _TURN == 0:
            await asyncio.sleep(0)
        yield one


async def in_order(items: Iterable[T], key: Callable[[T], int]) -> AsyncIterator[T]:
    """The same, sorted."""
    rest, runs = iter(items), list[list[T]]()
    while run := sorted(islice(rest, _TURN), key=key):
        runs.append(run)
        await asyncio.sleep(0)
    async for one in in_turns(merge(*runs, key=key)):
        yield one
