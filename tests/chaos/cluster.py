"""A cluster of real processes on loopback that can be killed, frozen and started again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import IO

from kvpool.client.opening import connect
from kvpool.client.pool import Pool
from kvpool.config import ClientConfig
from kvpool.errors import ServerLost, Unavailable
from kvpool.tools.subprocesses import Child, process_of
from tests.chaos.proxy import Proxy

#: How long processes may take to start and to be registered, on a machine with other work.
UP_S = 30.0


class Node:
    """A place in the cluster: its name and address stay, its process is replaced."""

    def __init__(self, name: str, module: str, *arguments: str) -> None:
        self.name = name
        self.process: Child | None = None
        self.frozen = False
        #: The first line that is written to its stdin, if any.
        self.setup = ""
        #: The first line that it printed.
        self.first_line = ""
        #: The file that has its log, if not this process's stderr.
        self.log: IO[bytes] | None = None
        self._command = (module, *arguments)
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<{self.name} {'down' if self.process is None else self.process.pid}>"

    @property
    def alive(self) -> bool:
        return self.process is not None

    async def start(self) -> None:
        """Start the process and wait for its first line. Raises ServerLost when none comes."""
        assert self.process is None, f"{self.name} is running"
        self.process = await self._stack.enter_async_context(
            process_of(*self._command, stderr=self.log)
        )
        if self.setup:
            self.process.write_line(self.setup)
        try:
            self.first_line = await asyncio.wait_for(self.process.line(), UP_S)
        except TimeoutError:
            raise ServerLost(f"{self.name} has not started after {UP_S:g} s") from None

    def check(self) -> None:
        """Raises ServerLost when the process has ended by itself."""
        if self.process is not None and self.process.code is not None:
            raise ServerLost(f"{self.name} ended by itself with code {self.process.code}")

    def freeze(self) -> None:
        """SIGSTOP. This is harder than a kill: the sockets stay open and send nothing."""
        assert self.process is not None
        self.process.signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        if self.process is not None:
            self.process.signal(signal.SIGCONT)
        self.frozen = False

    async def kill(self) -> None:
        """Kill -9; returns when the process has ended."""
        await self.stop(signal.SIGKILL)

    async def stop(self, number: int = signal.SIGTERM) -> tuple[float, int]:
        """Send a signal; returns the seconds until the process ended, and its exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        loop = asyncio.get_running_loop()
        began = loop.time()
        process.signal(number)
        code = await process.ended()
        seconds = loop.time() - began
        self.frozen = False
        await self._stack.aclose()
        return seconds, code

    async def close(self) -> None:
        self.process, self.frozen = None, False
        await self._stack.aclose()


class ProcessCluster:
    """Masters and servers by name: `master-0`, `server-0`. Use with `async with`.

    With `proxied`, each server and the clients reach each master through a proxy of their own, and
    clients reach each server over tcp through one. Proxies are named `server-0 > master-1` or
    `clients > server-2`.
    """

    def __init__(
        self,
        *,
        masters: int = 1,
        servers: int = 2,
        capacity: str = "64MiB",
        proxied: bool = False,
    ) -> None:
        self.masters: dict[str, Node] = {}
        self.servers: dict[str, Node] = {}
        self.addresses: dict[str, str] = {}
        self.proxies: dict[str, Proxy] = {}
        ports = free_ports(masters + servers)
        names = [f"server-{number}" for number in range(servers)]
        quiet = ("--log-level", "error")
        for number in range(masters):
            name, address = f"master-{number}", f"127.0.0.1:{ports.pop()}"
            self.addresses[name] = address
            self.masters[name] = Node(name, "kvpool", "master", "--bind", address, *quiet)
            for who in ["clients", *names] if proxied else []:
                self.proxies[f"{who} > {name}"] = Proxy(address)
        for name in names:
            address = f"127.0.0.1:{ports.pop()}"
            self.addresses[name] = address
            if proxied:
                self.proxies[f"clients > {name}"] = Proxy(address)
        self._capacity = capacity

    async def __aenter__(self) -> ProcessCluster:
        try:
            for proxy in self.proxies.values():
                await proxy.start()
            for name in [name for name in self.addresses if name.startswith("server-")]:
                self.servers[name] = self._server(name)
            starting = [node.start() for node in self.nodes]
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if outcome is not None:
                    raise outcome
            await self.wait_until_healthy()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def nodes(self) -> list[Node]:
        return [*self.masters.values(), *self.servers.values()]

    def masters_of(self, who: str) -> list[str]:
        """The addresses at which `who` (a server's name, or `clients`) reaches the masters."""
        return [self._address_for(who, name) for name in self.masters]

    def routes(self) -> dict[str, str]:
        """The servers' own tcp addresses to those at which clients are to reach them."""
        return {
            f"tcp://{self.addresses[name]}": f"tcp://{self._address_for('clients', name)}"
            for name in self.servers
        }

    @asynccontextmanager
    async def client(self, *transports: str, master: str = "") -> AsyncIterator[Pool]:
        """A client in this process without proxies, for all masters or for one."""
        masters = [self.addresses[name] for name in self.masters if master in ("", name)]
        config = ClientConfig(masters=masters, transports=list(transports) or ["shm", "tcp"])
        async with await connect(config=config) as pool:
            yield pool

    async def wait_until_healthy(self, within_s: float = UP_S) -> None:
        """Wait until every master lists every server as alive.

        Raises ServerLost when that does not happen in time, or when a process has ended by itself.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        for node in self.nodes:
            node.check()
        for master in self.masters:
            alive: set[str] = set()
            while alive < set(self.servers):
                if loop.time() > until:
                    missing = ", ".join(sorted(set(self.servers) - alive))
                    raise ServerLost(f"after {within_s:g} s {master} does not know {missing}")
                with contextlib.suppress(Unavailable):
                    async with self.client(master=master) as pool:
                        while alive < set(self.servers) and loop.time() < until:
                            alive = {m.server for m in await pool.members() if m.alive}
                            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End all processes: first the servers, so that they can leave the masters in order."""
        for node in reversed(self.nodes):
            await node.close()
        for proxy in self.proxies.values():
            await proxy.close()

    def _address_for(self, who: str, name: str) -> str:
        proxy = self.proxies.get(f"{who} > {name}")
        return proxy.address if proxy is not None else self.addresses[name]

    def _server(self, name: str) -> Node:
        return Node(
            name,
            "kvpool",
            "server",
            "--id",
            name,
            "--masters",
            ",".join(self.masters_of(name)),
            "--capacity",
            self._capacity,
            "--listen",
            f"tcp://{self.addresses[name]},shm://",
            "--log-level",
            "error",
        )


def open_sockets(nodes: Iterable[Node]) -> set[str]:
    """The Unix sockets that these servers printed as their addresses, and that exist now."""
    named = {name for node in nodes for name in re.findall(r"shm://(@\S+)", node.first_line)}
    with open("/proc/net/unix") as file:
        return named & set(file.read().split())


def free_ports(count: int) -> list[int]:
    """Free ports below the kernel's range of ephemeral ports.

    A client that dials a dead server again and again would at some time get the server's own port
    as its source port. It would then be connected to itself, and the server could not start again.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        above = int(file.read().split()[0])
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(max(1024, above - 16_000), above), 1000):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ServerLost(f"found {len(ports)} free ports, need {count}")
