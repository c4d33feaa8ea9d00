"""Redis: `redis-server`s without persistence, keys spread by the client, pipelines, hiredis."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.contract import Blocks, Failed, Key, Memory, Missing, Shape
from benchmarks.peers.pool_kvpool import digest
from benchmarks.peers.processes import Process, Rig, free_ports, until

#: One reply or request is kept below this: a reply lies in memory twice before it is in place.
_PIECE = 64 << 20
#: Read from the socket at once; the library's default is 64 KiB.
_SOCKET_READ = 1 << 20
_TIMEOUT_S = 60.0
#: With a replica, there is no reason to wait long for the first server.
_HEDGE_S = 0.25


class RedisSystem:
    """`shape.stores` servers; with two replicas the second server is a replica of the first."""

    name = "redis"

    def __init__(self, rig: Rig, shape: Shape) -> None:
        self._rig = rig
        self._shape = shape
        self.processes: dict[str, Process] = {}
        self._ports = free_ports(shape.stores)
        self._tuning = shape.tuning.get(self.name, {})

    async def start(self) -> None:
        if shutil.which("redis-server") is None:
            raise Missing("redis: apt-get install redis-server")
        if not all(map(importlib.util.find_spec, ("redis", "hiredis"))):
            raise Missing("redis: pip install redis hiredis (make bench-peers does)")
        for number in range(self._shape.stores):
            await self.restart(f"store-{number}")

    async def restart(self, role: str) -> None:
        """Redis has no master: the client computes the server of a key."""
        number = 0 if role == "master" else int(role.removeprefix("store-"))
        role = f"store-{number}"
        flags = {
            "port": str(self._ports[number]),
            "bind": "127.0.0.1",
            "unixsocket": self._path(number),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self._shape.capacity // self._memories),
            "maxmemory-policy": "allkeys-lru",
            "maxmemory-samples": "10",  # nearer to true LRU
            "logfile": str(self._rig.directory / f"redis-{number}.log"),
            "dir": str(self._rig.directory),
            "proto-max-bulk-len": "1gb",
            **self._tuning,
        }
        if number and self._shape.replicas > 1:
            flags["replicaof"] = f"127.0.0.1 {self._ports[0]}"
            flags["repl-diskless-sync-delay"] = "0"
        words = [word for name, value in flags.items() for word in (f"--{name}", *_words(value))]
        self.processes[role] = process = await self._rig.run(
            f"redis-{role}", "redis-server", *words
        )

        async def answers() -> bool:
            return process.alive and self._info(number, "replication") != ""

        if await until(answers, 10) is None:
            raise Missing(f"redis-server does not start: {process.last_words()}")
        if number and self._shape.replicas > 1:

            async def follows() -> bool:
                return "master_link_status:up" in self._info(number, "replication")

            if await until(follows, 20) is None:
                raise Failed("redis: the replica does not follow in 20 s")

    async def used(self) -> int:
        total = 0
        for number in range(self._memories):
            for line in self._info(number, "memory").splitlines():
                name, _, value = line.partition(":")
                total += int(value) if name == "used_memory_dataset" else 0
        return total

    def about(self) -> dict[str, Any]:
        words = subprocess.run(["redis-server", "--version"], capture_output=True, text=True)
        found = [word for word in words.stdout.split() if word.startswith("v=")]
        settings = "unix socket, no persistence, allkeys-lru of 10 samples, MSET and MGET, hiredis"
        if self._tuning:
            settings += "; " + ", ".join(f"{n}={v}" for n, v in self._tuning.items())
        return {"version": found[0][2:] if found else "?", "settings": settings}

    def client(self) -> dict[str, Any]:
        return {
            "system": "redis",
            "paths": [self._path(number) for number in range(self._shape.stores)],
            "ports": self._ports,
            "replicas": self._shape.replicas,
            "timeout_s": _HEDGE_S if self._shape.replicas > 1 else _TIMEOUT_S,
        }

    async def close(self) -> None:
        pass

    @property
    def _memories(self) -> int:
        """Servers that hold different keys."""
        return max(1, self._shape.stores // self._shape.replicas)

    def _path(self, number: int) -> str:
        return str(self._rig.directory / f"redis-{number}.sock")

    def _info(self, number: int, section: str) -> str:
        """`INFO section` over a plain socket; empty while no server answers."""
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(1.0)
                sock.connect(self._path(number))
                sock.sendall(f"INFO {section}\r\n".encode())
                return sock.recv(1 << 16).decode().replace("\r\n", "\n")
        except OSError:
            return ""


def _words(value: str) -> list[str]:
    """redis-server wants each word of a setting as one argument, and an empty value as ""."""
    return value.split() or [""]


class RedisClient:
    """Whole batches with MSET and MGET; keys are spread over the servers by the client.

    Values are sent without a copy (the library's own packer for hiredis would copy them). Replies
    are copied into the buffers, because MGET cannot read into given memory. With replicas, the
    client asks the second server for blocks that the first one does not return.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self._paths: list[str] = about["paths"]
        self._replicas: int = about["replicas"]
        self._timeout_s: float = about["timeout_s"]
        self._numbers: dict[Key, int] = {}

    def key(self, number: int) -> Key:
        key = digest(number)
        self._numbers[key] = number % (1 if self._replicas > 1 else len(self._paths))
        return key

    async def open(self, memory: Memory) -> Memory:
        import redis
        from redis.connection import PythonRespSerializer, UnixDomainSocketConnection

        class Connection(UnixDomainSocketConnection):  # type: ignore[misc]
            def __init__(self, **settings: Any) -> None:
                super().__init__(**settings)
                packer = PythonRespSerializer(self._buffer_cutoff, self.encoder.encode)
                self._command_packer = packer

        self._errors = (redis.RedisError, OSError)

        def server(path: str, timeout_s: float) -> Any:
            return redis.Redis(
                connection_pool=redis.ConnectionPool(
                    connection_class=Connection,
                    path=path,
                    socket_read_size=_SOCKET_READ,
                    socket_timeout=timeout_s,
                )
            )

        self._servers = [server(path, _TIMEOUT_S) for path in self._paths]
        self._readers = [server(path, self._timeout_s) for path in self._paths]
        for one in self._servers:
            one.ping()
        return memory

    async def write(
        self, keys: Sequence[Key], blocks: Blocks, copies: int = 1, after: Key | None = None
    ) -> list[bool]:
        stored = [False] * len(keys)
        for server, positions in self._pieces(keys, blocks.sizes):
            values = {keys[i]: blocks.views[i] for i in positions}
            good = bool(self._servers[server].mset(values))
            if good and copies > 1:
                good = self._servers[server].wait(copies - 1, 5000) >= copies - 1
            for position in positions:
                stored[position] = good
        return stored

    async def read(self, keys: Sequence[Key], blocks: Blocks) -> list[bool]:
        hits = [False] * len(keys)
        for server, positions in self._pieces(keys, blocks.sizes):
            wanted = [keys[i] for i in positions]
            for position, value in zip(positions, self._mget(server, wanted), strict=True):
                if value is not None and len(value) == blocks.sizes[position]:
                    np.copyto(blocks.rows[position], np.frombuffer(value, np.uint8))
                    hits[position] = True
        return hits

    async def match(self, keys: Sequence[Key]) -> int:
        """One EXISTS for all keys of a server; key by key only where some are missing."""
        found: dict[Key, bool] = {}
        for number, server in enumerate(self._servers):
            mine = [key for key in keys if self._numbers[key] == number]
            if mine:
                if server.exists(*mine) == len(mine):
                    found.update(dict.fromkeys(mine, True))
                else:
                    pipe = server.pipeline(transaction=False)
                    for key in mine:
                        pipe.exists(key)
                    found.update(zip(mine, map(bool, pipe.execute()), strict=True))
        return next((n for n, key in enumerate(keys) if not found[key]), len(keys))

    async def load(self, keys: Sequence[Key], blocks: Blocks) -> int:
        there = await self.match(keys)
        if not there:
            return 0
        hits = await self.read(keys[:there], blocks.part(0, there))
        return next((n for n, hit in enumerate(hits) if not hit), there)

    async def replace(self, key: Key, blocks: Blocks) -> bool:
        return all(await self.write([key], blocks))

    async def remove(self, keys: Sequence[Key]) -> None:
        for number, server in enumerate(self._servers):
            mine = [key for key in keys if self._numbers[key] == number]
            if mine:
                server.delete(*mine)

    async def close(self) -> None:
        for server in (*self._servers, *self._readers):
            server.close()

    def _mget(self, server: int, keys: Sequence[Key]) -> list[bytes | None]:
        others = range(server, len(self._servers)) if self._replicas > 1 else [server]
        for number in others:
            try:
                values: list[bytes | None] = self._readers[number].mget(keys)
                return values
            except self._errors:
                continue
        return [None] * len(keys)

    def _pieces(self, keys: Sequence[Key], sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Positions by server, in requests of a bounded size."""
        pieces: list[tuple[int, list[int]]] = []
        current: dict[int, list[int]] = {}
        held: dict[int, int] = {}
        for position, key in enumerate(keys):
            server = self._numbers[key]
            if server not in current or held[server] + sizes[position] > _PIECE:
                current[server] = []
                held[server] = 0
                pieces.append((server, current[server]))
            current[server].append(position)
            held[server] += sizes[position]
        return pieces
