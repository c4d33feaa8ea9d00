"""What clients do while something fails; more commands of `worker.py`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from benchmarks.peers.client import Bench, wrong_bytes

_SLOW = 5


async def read_for(
    bench: Bench, first: int, count: int, size: int, seconds: float, pause_s: float, place: int
) -> dict[str, Any]:
    """Read blocks that `fill` has written, one after the other, over and over.

    Each reader of the same blocks has a `place` of its own to read into.
    """
    source, _ = bench.memory.blocks(size, count)
    _, target = bench.memory.blocks(size, count, place * count * size)
    keys = [bench.client.key(first + number) for number in range(count)]
    mine = [target.part(n, n + 1) for n in range(count)]
    until = time.monotonic() + seconds
    calls: list[tuple[float, float]] = []
    failed: list[float] = []
    wrong = 0
    while time.monotonic() < until:
        for number in range(count):
            target.rows[number].fill(0xAA)
            began = time.monotonic()
            (hit,) = await bench.client.read([keys[number]], mine[number])
            ended = time.monotonic()
            calls.append((ended - began, began))
            if not hit:
                failed.append(ended)
            elif wrong_bytes(source.part(number, number + 1), mine[number]):
                wrong += 1
            if ended > until:
                break
            await asyncio.sleep(pause_s)
    calls.sort(reverse=True)
    return {"reads": len(calls), "failed": failed, "slowest": calls[:_SLOW], "wrong": wrong}


async def write_for_ever(bench: Bench, first: int, size: int, count: int) -> dict[str, Any]:
    """Write batch after batch, until killed."""
    source, _ = bench.memory.blocks(size, count)
    while True:
        keys = [bench.client.key(number) for number in range(first, first + count)]
        await bench.client.write(keys, source)
        first += count


async def replace_for(bench: Bench, key: int, size: int, seconds: float) -> dict[str, Any]:
    """Give one key a new value again and again; all bytes of a value are equal."""
    source, _ = bench.memory.blocks(size, 1)
    done = refused = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        source.rows.fill(1 + done % 250)
        if await bench.client.replace(bench.client.key(key), source):
            done += 1
        else:
            refused += 1
            await asyncio.sleep(0.001)
    return {"replaced": done, "refused": refused}


async def read_torn(bench: Bench, key: int, size: int, seconds: float) -> dict[str, Any]:
    """Read that key: each hit must be of one value."""
    _, target = bench.memory.blocks(size, 1)
    hits = misses = torn = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        target.rows.fill(0)
        (hit,) = await bench.client.read([bench.client.key(key)], target)
        if not hit:
            misses += 1
            await asyncio.sleep(0.001)
            continue
        hits += 1
        row = target.rows[0]
        torn += not (row[0] and np.array_equal(row, np.full_like(row, row[0])))
    return {"hits": hits, "misses": misses, "torn": torn}
