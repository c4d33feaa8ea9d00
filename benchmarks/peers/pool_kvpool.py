"""kvpool: `kvpool master`, `kvpool server`s, and the asyncio client."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import kvpool
from benchmarks.peers.contract import Blocks, Failed, Key, Memory, Shape
from benchmarks.peers.processes import Process, Rig, free_ports, until
from kvpool import ClientConfig, Namespace
from kvpool.types import ROOT, Member

_NAMESPACE = Namespace("peers")
_TIMEOUT_S = 60.0


def digest(number: int) -> bytes:
    """32 bytes that are distributed like the hashes of an engine."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


class KvpoolSystem:
    """One master, `shape.stores` servers of equal size."""

    name = "kvpool"

    def __init__(self, rig: Rig, shape: Shape) -> None:
        self._rig = rig
        self._shape = shape
        self.processes: dict[str, Process] = {}
        (self._port,) = free_ports(1)
        self._master = f"127.0.0.1:{self._port}"
        self._pool: kvpool.Pool | None = None

    async def start(self) -> None:
        await self._start_master()
        for number in range(self._shape.stores):
            role = f"store-{number}"
            self.processes[role] = process = await self._run(
                role,
                *("server", "--masters", self._master, "--id", role),
                *("--capacity", str(self._shape.capacity // self._shape.stores)),
            )
            if not await process.line():
                raise Failed(f"kvpool server: {process.last_words()}")
        # Patient: beside this, gigabytes of an earlier system may just be given back.
        config = ClientConfig(masters=[self._master], timeout_s=_TIMEOUT_S, attempt_s=10.0)
        self._pool = await kvpool.connect(config=config)
        if await until(self._all_there, 20) is None:
            raise Failed("kvpool: the servers did not register in 20 s")

    async def restart(self, role: str) -> None:
        if role != "master":
            raise Failed(f"kvpool: {role} is not restarted by this benchmark")
        await self._start_master()

    async def used(self) -> int:
        return sum(member.stats.used for member in await self._members())

    def about(self) -> dict[str, Any]:
        return {
            "version": version("kvpool"),
            "settings": "defaults; every read is verified against its checksum",
        }

    def client(self) -> dict[str, Any]:
        return {"system": "kvpool", "master": self._master}

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _start_master(self) -> None:
        self.processes["master"] = process = await self._run(
            "master", "master", "--bind", self._master
        )
        if not await process.line():
            raise Failed(f"kvpool master: {process.last_words()}")

    async def _run(self, role: str, *arguments: str) -> Process:
        command = (sys.executable, "-m", "kvpool", *arguments, "--log-level", "error")
        return await self._rig.run(f"kvpool-{role}", *command)

    async def _members(self) -> list[Member]:
        assert self._pool is not None
        return await self._pool.members()

    async def _all_there(self) -> bool:
        return sum(m.alive for m in await self._members()) == self._shape.stores


def over_tcp(about: dict[str, Any]) -> dict[str, Any]:
    """The same pool for a client that does not use shared memory."""
    return {**about, "transports": ["tcp"]}


class KvpoolClient:
    """`Pool.write`, `Pool.read` and `Pool.match`, as an engine that is asyncio would call them."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._config = ClientConfig(
            masters=[about["master"]],
            transports=about.get("transports", ["shm", "tcp"]),
            timeout_s=_TIMEOUT_S,
        )
        self._pool: kvpool.Pool | None = None

    def key(self, number: int) -> Key:
        return digest(number)

    async def open(self, memory: Memory) -> Memory:
        self._pool = await kvpool.connect(config=self._config)
        return memory

    async def write(
        self, keys: Sequence[Key], blocks: Blocks, copies: int = 1, after: Key | None = None
    ) -> list[bool]:
        parent = _raw([after])[0] if after is not None else ROOT
        statuses = await self.pool.write(
            _NAMESPACE, _raw(keys), blocks.views, copies=copies, parent=parent
        )
        return [status.present for status in statuses]

    async def read(self, keys: Sequence[Key], blocks: Blocks) -> list[bool]:
        results = await self.pool.read(_NAMESPACE, _raw(keys), blocks.views)
        return [result.status.hit for result in results]

    async def match(self, keys: Sequence[Key]) -> int:
        return (await self.pool.match(_NAMESPACE, _raw(keys))).length

    async def load(self, keys: Sequence[Key], blocks: Blocks) -> int:
        match = await self.pool.match(_NAMESPACE, _raw(keys))
        there = match.length
        if not there:
            return 0
        results = await self.pool.read(
            _NAMESPACE, _raw(keys[:there]), blocks.views[:there], match=match
        )
        return next((n for n, result in enumerate(results) if not result.status.hit), there)

    async def replace(self, key: Key, blocks: Blocks) -> bool:
        """Blocks are immutable: the old one is removed, and another is written under its key."""
        await self.pool.remove(_NAMESPACE, _raw([key]))
        return all(await self.write([key], blocks))

    async def remove(self, keys: Sequence[Key]) -> None:
        await self.pool.remove(_NAMESPACE, _raw(keys))

    async def close(self) -> None:
        await self.pool.close()

    @property
    def pool(self) -> kvpool.Pool:
        assert self._pool is not None
        return self._pool


def _raw(keys: Sequence[Key]) -> Sequence[bytes]:
    return keys  # type: ignore[return-value]  # `key` makes no others
