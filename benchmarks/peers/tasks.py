"""The commands of clients. Bytes are made and compared outside of the timed calls."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.peers.client import Bench, stamp, wrong_bytes
from benchmarks.peers.contract import Failed, Key
from kvpool.tools import workloads as workload


async def round_trip(
    bench: Bench, size: int, count: int, number: int, offset: int, at: float, read_at: float
) -> dict[str, Any]:
    """Write a batch of new blocks, read it, compare every byte, remove it.

    Beside other clients the write begins at `at` and the read at `read_at`, or as soon as it can.
    """
    source, target = bench.memory.blocks(size, count, offset)
    stamp(source, number)
    target.rows.fill(0xAA)
    keys = bench.keys(count)
    await _sleep_until(at)
    stored, write = await bench.timed(bench.client.write(keys, source))
    await _sleep_until(read_at)
    hits, read = await bench.timed(bench.client.read(keys, target))
    wrong = wrong_bytes(source, target)
    await bench.client.remove(keys)
    return {
        "refused": stored.count(False),
        "missed": hits.count(False),
        "wrong_bytes": wrong,
        "write": write,
        "read": read,
    }


async def singles(bench: Bench, size: int, count: int, number: int) -> dict[str, Any]:
    """Blocks one at a time, each written and read in a call of its own."""
    source, target = bench.memory.blocks(size, count)
    stamp(source, number)
    target.rows.fill(0xAA)
    keys = bench.keys(count)
    mine = [source.part(n, n + 1) for n in range(count)]
    theirs = [target.part(n, n + 1) for n in range(count)]
    writes, reads = [], []
    refused = missed = 0
    for key, block in zip(keys, mine, strict=True):
        (stored,), timed = await bench.timed(bench.client.write([key], block))
        writes.append(timed)
        refused += not stored
    for key, block in zip(keys, theirs, strict=True):
        (hit,), timed = await bench.timed(bench.client.read([key], block))
        reads.append(timed)
        missed += not hit
    wrong = wrong_bytes(source, target)
    await bench.client.remove(keys)
    return {
        "refused": refused,
        "missed": missed,
        "wrong_bytes": wrong,
        "write_s": [timed.seconds for timed in writes],
        "read_s": [timed.seconds for timed in reads],
        "write_cpu_s": sum(timed.cpu_s for timed in writes),
        "read_cpu_s": sum(timed.cpu_s for timed in reads),
    }


async def match(bench: Bench, count: int, size: int, times: int) -> dict[str, Any]:
    """Write `count` blocks, then match them `times` times."""
    source, _ = bench.memory.blocks(size, count)
    keys = bench.keys(count)
    for first in range(0, count, 256):
        last = min(count, first + 256)
        stored = await bench.client.write(keys[first:last], source.part(first, last))
        if not all(stored):
            raise Failed(f"{stored.count(False)} blocks for the match were refused")
    seconds, cpu = [], 0.0
    for _ in range(times):
        length, timed = await bench.timed(bench.client.match(keys))
        if length != count:
            raise Failed(f"matched {length} of {count} blocks that are there")
        seconds.append(timed.seconds)
        cpu += timed.cpu_s
    await bench.client.remove(keys)
    return {"match_s": seconds, "cpu_s": cpu / times}


async def fill(
    bench: Bench, first: int, count: int, size: int, copies: int = 1, batch: int = 64
) -> dict[str, Any]:
    """Write keys from `first` on; readers compare them with the same source region."""
    source, _ = bench.memory.blocks(size, count)
    stamp(source, first)
    refused = 0
    for start in range(0, count, batch):
        end = min(count, start + batch)
        keys = [bench.client.key(first + number) for number in range(start, end)]
        refused += (await bench.client.write(keys, source.part(start, end), copies)).count(False)
    return {"refused": refused}


async def many(bench: Bench, first: int, count: int, size: int) -> dict[str, Any]:
    """Write many small blocks, all with the bytes of a few."""
    source, _ = bench.memory.blocks(size, 256)
    refused = 0
    for start in range(first, first + count, 256):
        keys = [bench.client.key(number) for number in range(start, start + 256)]
        refused += (await bench.client.write(keys, source)).count(False)
    return {"refused": refused}


async def visible(bench: Bench, first: int, count: int) -> dict[str, Any]:
    """How many of these keys are there, asked for one by one."""
    found = 0
    for number in range(first, first + count):
        found += await bench.client.match([bench.client.key(number)])
    return {"visible": found}


async def pressure(bench: Bench, size: int, chains: int, length: int) -> dict[str, Any]:
    """Write prompts of `length` blocks, and after each one look up all prompts so far."""
    source, target = bench.memory.blocks(size, length)
    written: list[list[Key]] = []
    refused, seconds = 0, []
    for number in range(chains):
        keys = bench.keys(length)
        stamp(source, number)
        stored, timed = await bench.timed(bench.client.write(keys, source))
        seconds.append(timed.seconds)
        refused += stored.count(False)
        written.append(keys)
        for chain in written:
            await bench.client.match(chain)
    wrong = there = 0
    for number, keys in enumerate(written):
        stamp(source, number)
        loaded = await bench.client.load(keys, target)
        wrong += wrong_bytes(source.part(0, loaded), target.part(0, loaded))
        there += loaded
    newest = 0
    for keys in written[-max(1, chains // 4) :]:
        newest += await bench.client.match(keys)
    return {
        "puts": chains * length,
        "refused": refused,
        "readable": there,
        "newest_share": newest / (max(1, chains // 4) * length),
        "wrong_bytes": wrong,
        "write_s": seconds,
    }


class _Replay:
    """An agentic trace, played turn by turn: match, read the blocks found, write the others."""

    def __init__(self, sessions: int, concurrent: int, size: int) -> None:
        self.requests = workload.codex(sessions, concurrent)
        self.payload = workload.Payload(size)
        self.size = size


async def replay(
    bench: Bench, sessions: int, concurrent: int, size: int, first: int, last: int
) -> dict[str, Any]:
    """Turns `first` to `last` of the trace."""
    if not isinstance(bench.replay, _Replay):
        bench.replay = _Replay(sessions, concurrent, size)
    trace = bench.replay
    found: dict[str, Any] = {"blocks": 0, "hits": 0, "wrong_bytes": 0, "read_bytes": 0}
    found |= {"turn_s": [], "write_s": 0.0, "written_bytes": 0, "cpu_s": 0.0, "refused": 0}
    for request in trace.requests[first:last]:
        count = len(request.chain)
        source, target = bench.memory.blocks(size, count)
        digests = [trace.payload.digest(id) for id in request.chain]
        keys = [bench.client.key(id) for id in request.chain]
        for digest, there, here in zip(digests, source.rows, target.rows, strict=True):
            trace.payload.write(digest, there)
            here[:64] = 0xAA
        hits, turn = await bench.timed(bench.client.load(keys, target))
        for digest, row in zip(digests[:hits], target.rows, strict=False):
            found["wrong_bytes"] += trace.payload.wrong(digest, row)
        found["blocks"] += count
        found["hits"] += hits
        found["read_bytes"] += hits * size
        found["turn_s"].append(turn.seconds)
        found["cpu_s"] += turn.cpu_s
        if hits < count:
            after = keys[hits - 1] if hits else None
            rest = source.part(hits, count)
            call = bench.client.write(keys[hits:], rest, 1, after)
            stored, write = await bench.timed(call)
            found["refused"] += stored.count(False)
            found["write_s"] += write.seconds
            found["written_bytes"] += (count - hits) * size
    return found


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
