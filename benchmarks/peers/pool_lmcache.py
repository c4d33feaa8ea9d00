"""LMCache: its blob server (`python -m lmcache.v1.server`) and its own connector for it (`lm://`).

In an environment of its own, that of `make test WITH=lmcache`: it brings torch.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.peers.contract import Blocks, Failed, Key, Memory, Missing, Shape
from benchmarks.peers.pool_kvpool import digest
from benchmarks.peers.processes import Process, Rig, free_ports, until

_PYTHON = Path(__file__).parents[2] / ".venv-lmcache" / "bin" / "python"
_ENVIRONMENT = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
#: It imports torch first.
_START_S = 60.0

#: Parts of the benchmark that it cannot take part in, and why.
WITHOUT: Final = {
    "replay": "its server has no limit of memory, and evicts nothing",
    "pressure": "its server has no limit of memory, and evicts nothing",
    "failures": "one server without replicas; it removes nothing, and does not say what it holds",
}


class LmcacheSystem:
    """One server. It has no limit: `shape.capacity` means nothing to it."""

    name = "lmcache"

    def __init__(self, rig: Rig, shape: Shape) -> None:
        if shape.stores > 1 or shape.replicas > 1:
            raise Failed("lmcache: its connector knows one server")
        self._rig = rig
        self.processes: dict[str, Process] = {}
        (self._port,) = free_ports(1)
        self._version = ""

    async def start(self) -> None:
        self._version = await asyncio.to_thread(_version)
        command = (str(_PYTHON), "-m", "lmcache.v1.server", "127.0.0.1", str(self._port))
        process = await self._rig.run("lmcache-store-0", *command, environment=_ENVIRONMENT)
        self.processes["store-0"] = process

        async def answers() -> bool:
            if not process.alive:
                raise Missing(f"lmcache's server does not start:\n{process.last_words()}")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                return False
            writer.close()
            return True

        if await until(answers, _START_S, 0.2) is None:
            raise Missing(f"lmcache: no server after {_START_S:.0f} s:\n{process.last_words()}")

    async def restart(self, role: str) -> None:
        raise Failed(f"lmcache: {role} is not restarted by this benchmark")

    async def used(self) -> int:
        raise Failed("lmcache: its server does not say how much it holds")

    def about(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "settings": "its server over tcp, lm:// connector, received into the caller's buffers; "
            "a batch of puts ends with one `exists`, because puts are not answered",
        }

    def client(self) -> dict[str, Any]:
        return {
            "system": "lmcache",
            "python": str(_PYTHON),
            "environment": _ENVIRONMENT,
            "port": self._port,
        }

    async def close(self) -> None:
        pass


def _version() -> str:
    """Of LMCache in its environment. Raises Missing."""
    code = "from importlib.metadata import version; print(version('lmcache'))"
    try:
        done = subprocess.run([_PYTHON, "-c", code], capture_output=True, text=True)
    except OSError:
        done = None
    if done is None or done.returncode:
        raise Missing("lmcache: it is not installed; make .venv-lmcache/ready does that")
    return done.stdout.strip()


class _Buffers:
    """Where LMCache has its pool of pinned memory: gives out the blocks of a batch, in turn.

    So it receives into the memory from which the engine goes on, without a copy, as there.
    """

    def __init__(self) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
        from lmcache.v1.metadata import LMCacheMetadata

        self._torch = torch
        self._object, self._about = TensorMemoryObj, MemoryObjMetadata
        self._format = MemoryFormat.KV_2LTD
        self._rest: list[Any] = []
        self.config = LMCacheEngineConfig.from_defaults()
        # The shape of an engine's blocks; the connector uses that of each block.
        self.metadata = LMCacheMetadata("peers", 1, 1, 0, 0, torch.uint8, (1, 2, 256, 1, 64))

    def of(self, blocks: Blocks) -> list[Any]:
        """LMCache's view of these blocks."""
        return [self._view(row) for row in blocks.rows]

    def offer(self, blocks: Blocks) -> list[Any]:
        """The next blocks that arrive go there, the first to the first."""
        views = self.of(blocks)
        self._rest = views[::-1]
        return views

    def allocate(self, shape: Any, dtype: Any, fmt: Any) -> Any:
        """What the connector calls for each block that arrives; None: no memory for it."""
        view = self._rest.pop() if self._rest else None
        return view if view is not None and view.get_shape() == shape else None

    def nothing(self) -> Any:
        """The smallest value: one byte."""
        return self._view(np.zeros(1, np.uint8))

    def _view(self, row: Any) -> Any:
        torch = self._torch
        about = self._about(torch.Size([row.nbytes]), torch.uint8, 0, row.nbytes, 1)
        about.fmt = self._format
        return self._object(torch.from_numpy(row), about, None)


class LmcacheClient:
    """LMCache's connector with the calls of its remote backend: a put for each block, one call for
    the lookup of many, one for their bytes. Both are an exchange with the server for each block.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self._url = f"lm://127.0.0.1:{about['port']}"
        self._keys: dict[Key, Any] = {}

    def key(self, number: int) -> Key:
        name = digest(number)
        self._keys[name] = self._key(number)
        return name

    async def open(self, memory: Memory) -> Memory:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.storage_backend.connector import CreateConnector

        def key(number: int) -> Any:
            hashed = int.from_bytes(digest(number), "big")
            return CacheEngineKey("peers", 1, 0, hashed, torch.uint8)

        self._key = key
        self._buffers = _Buffers()
        self._remote = CreateConnector(
            self._url,
            asyncio.get_running_loop(),
            self._buffers,
            self._buffers.config,
            self._buffers.metadata,
        )
        return memory

    async def write(
        self, keys: Sequence[Key], blocks: Blocks, copies: int = 1, after: Key | None = None
    ) -> list[bool]:
        """The server does not answer a put; it answers an `exists` behind them when all are there.

        It stores whatever comes, so if the last one is there, all are.
        """
        names = self._names(keys)
        for name, view in zip(names, self._buffers.of(blocks), strict=True):
            await self._remote.put(name, view)
        return [await self._remote.exists(names[-1])] * len(names)

    async def read(self, keys: Sequence[Key], blocks: Blocks) -> list[bool]:
        views = self._buffers.offer(blocks)
        if len(keys) == 1:
            return [await self._remote.get(*self._names(keys)) is views[0]]
        found = await self._remote.batched_get_non_blocking("", self._names(keys))
        # Those before the first one that is missing.
        return [n < len(found) and found[n] is view for n, view in enumerate(views)]

    async def match(self, keys: Sequence[Key]) -> int:
        count: int = await self._remote.batched_async_contains("", self._names(keys))
        return count

    async def load(self, keys: Sequence[Key], blocks: Blocks) -> int:
        there = await self.match(keys)
        return sum(await self.read(keys[:there], blocks.part(0, there))) if there else 0

    async def replace(self, key: Key, blocks: Blocks) -> bool:
        return all(await self.write([key], blocks))

    async def remove(self, keys: Sequence[Key]) -> None:
        """Its protocol has no delete. A value of one byte gives their memory back."""
        nothing = self._buffers.nothing()
        for key in keys:
            await self._remote.put(self._keys.pop(key), nothing)
        await self._remote.exists(self._key(0))  # they are applied

    async def close(self) -> None:
        await self._remote.close()

    def _names(self, keys: Sequence[Key]) -> list[Any]:
        return [self._keys[key] for key in keys]
