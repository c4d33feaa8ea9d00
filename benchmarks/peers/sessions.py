"""Work that takes longer than a round: agentic sessions, a pool that runs full, memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.peers.contract import Failed
from benchmarks.peers.field import Contender
from benchmarks.peers.processes import Process
from benchmarks.peers.work import Row, quantile
from kvpool.tools import workloads as workload

_TURNS_A_TIME = 20
_PROMPT = 16
_SMALL = 64
_PRESSURE_BLOCK = 1 << 20
_REPLAY_BLOCK = 64 << 10
#: Memory is taken to have settled when it changes by less than this in a second.
_SETTLED_BYTES = 256 << 10
_SETTLED_S_MAX = 60


async def replay(
    contenders: Sequence[Contender], sessions: int, concurrent: int, capacity: str
) -> list[Row]:
    """The same trace for all, a few turns each in turn, from an empty pool."""
    total = len(workload.codex(sessions, concurrent))
    sums: dict[str, dict[str, Any]] = {contender.name: {} for contender in contenders}
    for first in range(0, total, _TURNS_A_TIME):
        for contender in contenders:
            answer = await contender.workers[0].do(
                "replay",
                sessions=sessions,
                concurrent=concurrent,
                size=_REPLAY_BLOCK,
                first=first,
                last=min(total, first + _TURNS_A_TIME),
            )
            if answer["wrong_bytes"]:
                raise Failed(f"{contender.name}: {answer['wrong_bytes']} bytes came back wrong")
            for name, value in answer.items():
                so_far = sums[contender.name].get(name)
                sums[contender.name][name] = value if so_far is None else so_far + value
    what = f"{capacity}: {total} turns of {sessions} sessions, {concurrent} at a time"
    return [Row("replay", what, name, _replayed(found)) for name, found in sums.items()]


def _replayed(found: dict[str, Any]) -> dict[str, Any]:
    read_gb = found["read_bytes"] / 1e9
    return {
        "hit_rate": found["hits"] / found["blocks"],
        "read": read_gb / sum(found["turn_s"]),
        "write": found["written_bytes"] / 1e9 / max(found["write_s"], 1e-9),
        "turn_p50": quantile(found["turn_s"], 0.5),
        "turn_p99": quantile(found["turn_s"], 0.99),
        "read_cpu": found["cpu_s"] / max(read_gb, 1e-9),
        "refused": found["refused"],
    }


async def pressure(contenders: Sequence[Contender], capacity: int) -> list[Row]:
    """Write 150 % of the capacity, and look up every block all the time."""
    rows = []
    chains = capacity * 3 // 2 // (_PRESSURE_BLOCK * _PROMPT)
    for contender in contenders:
        answer = await contender.workers[0].do(
            "pressure", size=_PRESSURE_BLOCK, chains=chains, length=_PROMPT
        )
        figures = {
            "puts": answer["puts"],
            "refused": answer["refused"],
            "readable": answer["readable"],
            "newest_share": round(answer["newest_share"], 3),
            "wrong": answer["wrong_bytes"],
            "write_p50": quantile(answer["write_s"], 0.5),
            "write_p99": quantile(answer["write_s"], 0.99),
        }
        what = f"{chains * _PROMPT} x 1 MiB into {capacity >> 20} MiB, every block asked for"
        rows.append(Row("pressure", what, contender.name, figures))
    return rows


async def memory(contenders: Sequence[Contender], count: int) -> list[Row]:
    """What a block costs beside its bytes: the growth of all server processes."""
    count -= count % 256
    rows = []
    for contender in contenders:
        worker, processes = contender.workers[0], contender.system.processes.values()
        await worker.do("many", first=1 << 40, count=256, size=_SMALL)
        before = await _settled(processes)
        answer = await worker.do("many", first=1 << 41, count=count, size=_SMALL)
        grown = await _settled(processes) - before
        figures = {"bytes_per_block": grown / count - _SMALL, "refused": answer["refused"]}
        rows.append(Row("memory", f"{count:,} blocks of {_SMALL} bytes", contender.name, figures))
    return rows


async def _settled(processes: Iterable[Process]) -> int:
    """Their memory when it stops growing; a server touches its segment in the background."""
    last = 0
    for _ in range(_SETTLED_S_MAX):
        now = sum(sum(process.memory().values()) for process in processes)
        if abs(now - last) < _SETTLED_BYTES:
            return now
        last = now
        await asyncio.sleep(1.0)
    raise Failed(f"the memory of the servers still changes after {_SETTLED_S_MAX} s")
