"""Mooncake Store: `mooncake_master`, `mooncake_client`s with the memory, zero-copy clients."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.contract import Blocks, Failed, Key, Memory, Missing, Shape
from benchmarks.peers.pool_kvpool import digest
from benchmarks.peers.processes import Process, Rig, free_ports, until

_PACKAGE = "mooncake-transfer-engine-non-cuda"
_LIBRARIES = "libcurl4 libibverbs1 libnuma1 liburing2"
_LOCAL_BUFFER = 64 << 20
_METADATA = "P2PHANDSHAKE"


class MooncakeSystem:
    """One master, and `shape.stores` clients that do nothing but offer a segment.

    `tuning`: flags of the master, and environment variables for every process of it (`MC_...`).
    """

    name = "mooncake"

    def __init__(self, rig: Rig, shape: Shape) -> None:
        self._rig = rig
        self._shape = shape
        self.processes: dict[str, Process] = {}
        self._port, self._http, *self._stores = free_ports(2 + shape.stores)
        self._address = f"127.0.0.1:{self._port}"
        tuning = shape.tuning.get(self.name, {})
        self._environment = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"} | {
            name: value for name, value in tuning.items() if name.startswith("MC_")
        }
        self._flags = {n: v for n, v in tuning.items() if not n.startswith("MC_")}

    async def start(self) -> None:
        self._programs = await asyncio.to_thread(_programs)
        await self._start_master()
        for number in range(self._shape.stores):
            await self._start_store(number)
        wanted = self._shape.stores

        async def mounted() -> bool:
            segments = await self._get("/get_all_segments")
            return len(segments.split()) >= wanted

        if await until(mounted, 20) is None:
            words = "\n".join(process.last_words() for process in self.processes.values())
            raise Missing(f"mooncake: its segments did not come up in 20 s:\n{words}")

    async def restart(self, role: str) -> None:
        if role != "master":
            raise Failed(f"mooncake: {role} is not restarted by this benchmark")
        await self._start_master()

    async def used(self) -> int:
        found = re.search(
            r"^master_allocated_bytes(?:\{[^}]*\})? ([\d.e+]+)$", await self._get("/metrics"), re.M
        )
        if found is None:
            raise Failed("mooncake: its metrics do not say how much is allocated")
        return int(float(found[1]))

    def about(self) -> dict[str, Any]:
        return {
            "version": version(_PACKAGE),
            "settings": "tcp, P2PHANDSHAKE, registered buffers, batch_put_from, batch_get_into; "
            + ", ".join(f"{n}={v}" for n, v in {**self._flags, **self._environment}.items()),
        }

    def client(self) -> dict[str, Any]:
        return {
            "system": "mooncake",
            "master": self._address,
            "environment": self._environment,
            "replicas": self._shape.replicas,
            "stores": [f"127.0.0.1:{port}" for port in self._stores],
        }

    async def close(self) -> None:
        pass

    async def _start_master(self) -> None:
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": str(self._port),
            "metrics_host": "127.0.0.1",
            "metrics_port": str(self._http),
            "enable_metric_reporting": "false",
            **self._flags,
        }
        self.processes["master"] = process = await self._rig.run(
            "mooncake-master",
            str(self._programs / "mooncake_master"),
            *(f"--{name}={value}" for name, value in flags.items()),
            environment=self._environment,
        )

        async def answers() -> bool:
            return bool(await self._get("/health"))

        if await until(answers, 10) is None:
            raise Missing(f"mooncake_master does not start:\n{process.last_words()}")

    async def _start_store(self, number: int) -> None:
        self.processes[f"store-{number}"] = await self._rig.run(
            f"mooncake-store-{number}",
            str(self._programs / "mooncake_client"),
            "--host=127.0.0.1",
            f"--port={self._stores[number]}",
            f"--global_segment_size={self._shape.capacity // self._shape.stores} B",
            f"--master_server_address={self._address}",
            f"--metadata_server={_METADATA}",
            "--protocol=tcp",
            environment=self._environment,
        )

    async def _get(self, path: str) -> str:
        """A page of the master's HTTP server; empty while there is none."""

        def fetch() -> str:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._http}{path}", timeout=2) as r:
                    text: bytes = r.read()
                    return text.decode()
            except OSError:
                return ""

        return await asyncio.to_thread(fetch)


def _programs() -> Path:
    """The folder with the binaries. Raises Missing."""
    try:
        version(_PACKAGE)
    except PackageNotFoundError:
        raise Missing(f"mooncake: pip install {_PACKAGE} (make bench-peers does)") from None
    # In a process of its own: it wants libraries that pip does not bring, and starts threads.
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True)
    if tried.returncode:
        why = (tried.stderr.decode(errors="replace").splitlines() or ["it cannot be loaded"])[-1]
        raise Missing(f"mooncake: {why}; apt-get install {_LIBRARIES}")
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise Missing("mooncake: the package cannot be found")
    return Path(spec.submodule_search_locations[0])


def on_host(about: dict[str, Any]) -> dict[str, Any]:
    """The same pool for clients that go through the store process of their host, in its memory."""
    return {**about, "host": about["stores"][0]}


class MooncakeClient:
    """A client without memory of its own to offer, with both regions registered."""

    def __init__(self, about: dict[str, Any]) -> None:
        from mooncake import store

        self._master = about["master"]
        self._host = about.get("host", "")
        self._store = store.MooncakeDistributedStore()
        self._config = store.ReplicateConfig()
        self._config.replica_num = about["replicas"]

    def key(self, number: int) -> Key:
        return digest(number).hex()

    async def open(self, memory: Memory) -> Memory:
        if self._host:
            memory = self._open_on_host(memory)
        elif code := self._store.setup(
            "127.0.0.1", _METADATA, 0, _LOCAL_BUFFER, "tcp", "", self._master
        ):
            raise Failed(f"mooncake: setup says {code}")
        for region in (memory.source, memory.target):
            if code := self._store.register_buffer(region.ctypes.data, region.nbytes):
                raise Failed(f"mooncake: register_buffer says {code}")
        return memory

    def _open_on_host(self, memory: Memory) -> Memory:
        """A `dummy` client: what it reads and writes lies in memory that the store maps, too."""
        size = len(memory.source)
        if code := self._store.setup_dummy(2 * size + _LOCAL_BUFFER, _LOCAL_BUFFER, self._host):
            raise Failed(f"mooncake: setup_dummy says {code}")
        regions = []
        for _ in range(2):
            address = self._store.alloc_from_mem_pool(size)
            if not address:
                raise Failed(f"mooncake: alloc_from_mem_pool of {size} bytes failed")
            region = (ctypes.c_uint8 * size).from_address(address)
            regions.append(np.frombuffer(memoryview(region), np.uint8))
        return memory.copied_to(*regions)

    async def write(
        self, keys: Sequence[Key], blocks: Blocks, copies: int = 1, after: Key | None = None
    ) -> list[bool]:
        self._config.replica_num = copies
        if len(keys) == 1:
            code = self._store.put_from(keys[0], blocks.addresses[0], blocks.sizes[0], self._config)
            return [code == 0]
        codes = self._store.batch_put_from(keys, blocks.addresses, blocks.sizes, self._config)
        return [code == 0 for code in codes]

    async def read(self, keys: Sequence[Key], blocks: Blocks) -> list[bool]:
        if len(keys) == 1:
            size = self._store.get_into(keys[0], blocks.addresses[0], blocks.sizes[0])
            return [size == blocks.sizes[0]]
        sizes = self._store.batch_get_into(keys, blocks.addresses, blocks.sizes)
        return [got == size for got, size in zip(sizes, blocks.sizes, strict=True)]

    async def match(self, keys: Sequence[Key]) -> int:
        found = self._store.batch_is_exist(keys)
        return next((n for n, code in enumerate(found) if code != 1), len(found))

    async def load(self, keys: Sequence[Key], blocks: Blocks) -> int:
        there = await self.match(keys)
        if not there:
            return 0
        hits = await self.read(keys[:there], blocks.part(0, there))
        return next((n for n, hit in enumerate(hits) if not hit), there)

    async def replace(self, key: Key, blocks: Blocks) -> bool:
        code: int = self._store.upsert_from(key, blocks.addresses[0], blocks.sizes[0], self._config)
        return code == 0

    async def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._store.remove(key, True)  # also while leased

    async def close(self) -> None:
        self._store.close()
