"""The field: the systems that can run here, their servers and their clients, side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.peers import pool_kvpool, pool_lmcache, pool_mooncake
from benchmarks.peers.contract import Failed, Memory, Missing, Shape, System
from benchmarks.peers.pool_kvpool import KvpoolSystem
from benchmarks.peers.pool_lmcache import LmcacheSystem
from benchmarks.peers.pool_mooncake import MooncakeSystem
from benchmarks.peers.pool_redis import RedisSystem
from benchmarks.peers.processes import Process, Rig

#: kvpool-tcp is kvpool with clients that do not use shared memory. mooncake has a client in
#: the engine's process, as its vLLM connector has; mooncake-shm goes through the store of its host.
CONTENDERS = ("kvpool", "kvpool-tcp", "mooncake", "mooncake-shm", "redis", "lmcache")
_VARIANTS = {"kvpool-tcp": pool_kvpool.over_tcp, "mooncake-shm": pool_mooncake.on_host}
#: For what is about failures and full memory: no tcp, and mooncake also with settings that have it
#: notice sooner: a shorter lease, which probes renew, a shorter time to live, shorter timeouts.
HARDENED = ("kvpool", "mooncake", "mooncake-tuned", "redis", "lmcache")
_TUNED = {
    "default_kv_lease_ttl": "1000",
    "client_ttl": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TRANSFER_TIMEOUT": "5",
}
#: Ten seconds by default. A trace that is played a hundred times too fast needs a hundredth.
_SCALED = {"default_kv_lease_ttl": "100"}
_SETTINGS = {"tuned": _TUNED, "scaled": _SCALED}
_SYSTEMS: dict[str, Callable[[Rig, Shape], System]] = {
    "kvpool": KvpoolSystem,
    "mooncake": MooncakeSystem,
    "redis": RedisSystem,
    "lmcache": LmcacheSystem,
}
_WITHOUT = {"lmcache": pool_lmcache.WITHOUT}
_RANDOM = 16 << 20


class Worker:
    """A client process of one system."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a command; `answer` waits for its result."""
        self.process.tell(json.dumps({"do": do, **arguments}))

    async def answer(self) -> dict[str, Any]:
        """Raises Failed when the client could not do it, or has ended."""
        line = await self.process.line()
        if not line:
            raise Failed(f"the client of {self.name} ended:\n{self.process.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}")
        return answer

    async def do(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.ask(do, **arguments)
        return await self.answer()


@dataclass(slots=True)
class Contender:
    """A system, seen by clients of one kind."""

    name: str
    system: System
    workers: list[Worker]


class Field:
    """Starts systems and clients on one rig; they all end with it."""

    def __init__(self, rig: Rig, region: int) -> None:
        """`region`: bytes of the memory that clients write from, and of that they read into."""
        self.rig = rig
        self._fd = Memory.create(region)
        self.missing: dict[str, str] = {}
        memory = Memory(self._fd)
        noise = np.random.default_rng(1).integers(0, 256, min(_RANDOM, region), np.uint8)
        for first in range(0, region, len(noise)):
            memory.source[first : first + len(noise)] = noise[: region - first]
        memory.target.fill(0)

    def taking_part(self, part: str, names: Sequence[str]) -> list[str]:
        """Those whose API has what this part needs. `missing` gets the reasons of the others."""
        able = []
        for name in names:
            why = _WITHOUT.get(name, {}).get(part)
            if why is None:
                able.append(name)
            else:
                self.missing[f"{name}, {part}"] = why
        return able

    @asynccontextmanager
    async def contenders(
        self, names: Sequence[str], shape: Shape, clients: int = 1, *, apart: bool = False
    ) -> AsyncIterator[list[Contender]]:
        """Start the systems that can run here, and stop them at the end. `missing` gets the reasons
        why the others cannot run.

            `apart`: two kinds of clients of one system, too, get a pool each, which fills with what
            they themselves wrote.
        """
        async with AsyncExitStack() as stack:
            rig = Rig(self.rig.cores, stack)
            systems: dict[str, System] = {}
            found = []
            for name in names:
                shared = name in _VARIANTS and not apart
                system_name = name.partition("-")[0] if shared else name
                if system_name.partition("-")[0] in self.missing:
                    continue
                try:
                    if system_name not in systems:
                        systems[system_name] = await start(rig, system_name, shape, stack)
                    workers = [
                        await self.worker(rig, name, systems[system_name]) for _ in range(clients)
                    ]
                except Missing as why:
                    self.missing[system_name.partition("-")[0]] = str(why)
                    continue
                found.append(Contender(name, systems[system_name], workers))
            yield found

    async def worker(self, rig: Rig, name: str, system: System) -> Worker:
        """One more client of a system that runs."""
        about = dict(system.client())
        if name in _VARIANTS:
            about = _VARIANTS[name](about)
        about["pids"] = [process.pid for process in system.processes.values()]
        about["memory_fd"] = self._fd
        process = await rig.run(
            f"{name}-client",
            *(about.pop("python", sys.executable), "-m", "benchmarks.peers.worker"),
            json.dumps(about),
            environment=about.get("environment"),
            pass_fds=[self._fd],
        )
        worker = Worker(name, process)
        await worker.answer()
        return worker

    def close(self) -> None:
        os.close(self._fd)


async def start(rig: Rig, name: str, shape: Shape, stack: AsyncExitStack) -> System:
    """A system with its processes up."""
    base, _, variant = name.partition("-")
    if variant in _SETTINGS:
        given = shape.tuning.get(base, {})
        shape = replace(shape, tuning={**shape.tuning, base: {**_SETTINGS[variant], **given}})
    system = _SYSTEMS[base](rig, shape)
    stack.push_async_callback(system.close)
    await system.start()
    return system
