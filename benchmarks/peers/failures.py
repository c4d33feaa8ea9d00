"""The failures: the same script for each system, on servers of its own, one after the other."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.contract import Missing, Shape, System
from benchmarks.peers.field import Field, Worker, start
from benchmarks.peers.processes import Rig, until
from benchmarks.peers.work import Row

_MIB = 1 << 20
_BLOCK = _MIB
_BLOCKS = 32
_READERS = 3
_TWO = Shape(1024 * _MIB, stores=2, replicas=2)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each failure is observed, in seconds."""

    watch_s: float = 16.0
    freeze_s: float = 10.0
    overwrite_s: float = 6.0
    leak_s: float = 60.0
    kills: int = 3


class Trial:
    """One system under one failure, with as many clients as it wants."""

    def __init__(self, field: Field, name: str, shape: Shape, stack: AsyncExitStack) -> None:
        self._field = field
        self._stack = stack
        self.name = name
        self.shape = shape
        self.rig = Rig(field.rig.cores, stack)
        self.system: System

    async def begin(self) -> None:
        self.system = await start(self.rig, self.name, self.shape, self._stack)

    async def client(self) -> Worker:
        return await self._field.worker(self.rig, self.name, self.system)


async def owner_lost(trial: Trial, patience: Patience, number: int) -> dict[str, Any]:
    """Two replicas of every block; one owner is killed, or frozen, under readers."""
    frozen = number == signal.SIGSTOP
    await trial.begin()
    readers = [await trial.client() for _ in range(_READERS)]  # each may prefer another owner
    filled = await readers[0].do("fill", first=0, count=_BLOCKS, size=_BLOCK, copies=2)
    await asyncio.sleep(1.0)
    seconds = (patience.freeze_s if frozen else patience.watch_s) + 2
    what: dict[str, Any] = {"first": 0, "count": _BLOCKS, "size": _BLOCK, "pause_s": 0.01}
    for place, reader in enumerate(readers):
        reader.ask("read_for", seconds=seconds, place=place, **what)
    await asyncio.sleep(2.0)
    struck = time.monotonic()
    trial.system.processes["store-0"].signal(number)
    answers = [await reader.answer() for reader in readers]
    after = [at for answer in answers for at in answer["failed"] if at > struck]
    slow = [
        seconds
        for answer in answers
        for seconds, began in answer["slowest"]
        if began + seconds > struck
    ]
    return {
        "reads": sum(answer["reads"] for answer in answers),
        "failed_reads": sum(len(answer["failed"]) for answer in answers),
        "wrong": sum(answer["wrong"] for answer in answers),
        "longest_read": max(slow, default=0.0),
        "recovered_after": max(after) - struck if after else 0.0,
        "refused": filled["refused"],
    }


async def owner_killed(trial: Trial, patience: Patience) -> dict[str, Any]:
    return await owner_lost(trial, patience, signal.SIGKILL)


async def owner_frozen(trial: Trial, patience: Patience) -> dict[str, Any]:
    return await owner_lost(trial, patience, signal.SIGSTOP)


async def master_restarted(trial: Trial, patience: Patience) -> dict[str, Any]:
    """The master is killed and started again while the stores run on: how many keys are found?"""
    await trial.begin()
    client = await trial.client()
    await client.do("fill", first=0, count=_BLOCKS, size=_BLOCK)
    role = "master" if "master" in trial.system.processes else "store-0"
    await trial.system.processes[role].kill()
    await asyncio.sleep(1.0)
    await trial.system.restart(role)
    found = 0

    async def all_back() -> bool:
        nonlocal found
        answer = await client.do("visible", first=0, count=_BLOCKS)
        found = max(found, answer["visible"])
        return bool(found == _BLOCKS)

    seconds = await until(all_back, patience.freeze_s, 0.1)
    reader = await trial.client()
    what: dict[str, Any] = {
        "first": 0,
        "count": _BLOCKS,
        "size": _BLOCK,
        "pause_s": 0.0,
        "place": 0,
    }
    answer = await reader.do("read_for", seconds=1.0, **what)
    return {
        "visible": found / _BLOCKS,
        "back_after": seconds if seconds is not None else "never",
        "wrong": answer["wrong"],
        "killed": role,
    }


async def overwritten(trial: Trial, patience: Patience) -> dict[str, Any]:
    """One client gives a key new values, another one reads it."""
    await trial.begin()
    writer, reader = await trial.client(), await trial.client()
    size = 32 * _MIB
    writer.ask("replace_for", key=1, size=size, seconds=patience.overwrite_s)
    reader.ask("read_torn", key=1, size=size, seconds=patience.overwrite_s)
    return {**await writer.answer(), **await reader.answer()}


async def writer_killed(trial: Trial, patience: Patience) -> dict[str, Any]:
    """Clients are killed during writes: is there space afterwards that no block uses?"""
    await trial.begin()
    rng = random.Random(1)
    client = await trial.client()
    before = await trial.system.used()
    await client.do("fill", first=0, count=_BLOCKS, size=_BLOCK)
    await asyncio.sleep(1.5)  # servers report their use once a second
    each = (await trial.system.used() - before) / _BLOCKS
    visible = _BLOCKS
    for number in range(1, patience.kills + 1):
        writer = await trial.client()
        writer.ask("write_for_ever", first=number * 10_000, size=_BLOCK, count=16)
        await asyncio.sleep(rng.uniform(0.05, 0.15))
        await writer.process.kill()
    await asyncio.sleep(patience.leak_s)
    for number in range(1, patience.kills + 1):
        answer = await client.do("visible", first=number * 10_000, count=512)
        visible += answer["visible"]
    leaked = await trial.system.used() - before - visible * each
    return {
        "leaked": leaked if abs(leaked) > each / 2 else 0.0,
        "visible_blocks": visible,
        "bytes_per_mib": round(each),
    }


FAILURES = {
    "owner killed": (owner_killed, _TWO),
    "owner frozen": (owner_frozen, _TWO),
    "master restarted": (master_restarted, Shape(1024 * _MIB, stores=2)),
    "overwrite under readers": (overwritten, Shape(1024 * _MIB)),
    "client killed in mid-write": (writer_killed, Shape(1024 * _MIB)),
}


async def play(
    field: Field, what: str, systems: Sequence[str], patience: Patience
) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """One failure for each system in turn; its rows, and what the systems were."""
    trial_of, shape = FAILURES[what]
    rows = []
    abouts = {}
    for name in systems:
        if name.partition("-")[0] in field.missing:
            continue
        async with AsyncExitStack() as stack:
            trial = Trial(field, name, shape, stack)
            try:
                figures = await trial_of(trial, patience)
            except Missing as why:
                field.missing[name.partition("-")[0]] = str(why)
                continue
            rows.append(Row("failures", what, name, figures))
            abouts[name] = trial.system.about()
    return rows, abouts
