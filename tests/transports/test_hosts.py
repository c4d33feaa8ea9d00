"""Two hosts on one machine: network namespaces and a real link between them, which is slow, loses
packets, and is cut. Master and one server on the left, another server and the client on the right.

Needs root and `ip` (Debian's iproute2); skipped where the kernel or the container forbids it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvpool.tools.subprocesses import Child
from tests.conftest import UCX

LEFT, RIGHT = "10.77.31.1", "10.77.31.2"
SIZE = 1 << 20
pytestmark = pytest.mark.timeout(120)


def tool(*words: str) -> str:
    """Run a command; what it complained of, or nothing."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return (done.stderr or f"exit code {done.returncode}").strip() if done.returncode else ""


@dataclass
class Link:
    """Two hosts and the wire between them."""

    left: str
    right: str
    number: str

    def ip(self, host: str, *words: str) -> str:
        return tool("ip", "netns", "exec", host, "ip", *words)

    def shape(self, *discipline: str) -> str:
        """Both directions; what `tc` complained of, or nothing."""
        for host, wire in ((self.left, "l"), (self.right, "r")):
            run = ("ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev")
            if why := tool(*run, f"kv{wire}{self.number}", "root", *discipline):
                return why
        return ""

    def cut(self) -> None:
        assert not self.ip(self.right, "link", "set", f"kvr{self.number}", "down")

    def mend(self) -> None:
        assert not self.ip(self.right, "link", "set", f"kvr{self.number}", "up")

    @asynccontextmanager
    async def process(
        self, host: str, module: str, *arguments: str, **environment: str
    ) -> AsyncIterator[Child]:
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", host, sys.executable, "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            yield Child(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@pytest.fixture
def link() -> Iterator[Link]:
    if shutil.which("ip") is None:
        pytest.skip("needs `ip`: install iproute2")
    number = str(os.getpid() % 100_000)
    two = Link(f"kvpool-l{number}", f"kvpool-r{number}", number)
    try:
        for host in (two.left, two.right):
            if why := tool("ip", "netns", "add", host):
                pytest.skip(f"network namespaces are not allowed here: {why}")
        ends = (f"kvl{number}", f"kvr{number}")
        why = tool(
            *("ip", "link", "add", ends[0], "netns", two.left),
            *("type", "veth", "peer", "name", ends[1], "netns", two.right),
        )
        if why:
            pytest.skip(f"no veth pair can be made here: {why}")
        for host, end, address in zip((two.left, two.right), ends, (LEFT, RIGHT), strict=True):
            assert not two.ip(host, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                assert not two.ip(host, "link", "set", device, "up")
        yield two
    finally:
        for host in (two.left, two.right):
            tool("ip", "netns", "del", host)


class Client:
    """`tests.support.remote_client` on the right."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def tell(self, **order: Any) -> None:
        self._child.write_line(json.dumps(order))

    async def hear(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(await asyncio.wait_for(self._child.line(), 60))
        return heard

    async def write(self, server: str, name: str, count: int, size: int = SIZE) -> None:
        self.tell(do="write", server=server, name=name, count=count, size=size)
        heard = await self.hear()
        assert heard["statuses"] == ["STORED"], heard

    async def read(self, name: str, count: int, timeout: float, size: int = SIZE) -> dict[str, Any]:
        self.tell(do="read", name=name, count=count, size=size, timeout=timeout)
        assert await self.hear() == {"reading": name}
        return await self.hear()


@asynccontextmanager
async def client_of(link: Link, transports: str, **environment: str) -> AsyncIterator[Client]:
    """A pool across the link, and a client of it on the right. `environment` is the servers'."""
    async with AsyncExitStack() as stack:
        silent = ("--log-level", "error", "--insecure", "--die-with-parent")
        master = await stack.enter_async_context(
            link.process(link.left, "kvpool", "master", "--bind", f"{LEFT}:0", *silent)
        )
        address = (await master.line()).removeprefix("master at ")
        for host, ip, name in ((link.left, LEFT, "left"), (link.right, RIGHT, "right")):
            listen = [f"{scheme}://{ip}:0" for scheme in transports.split(",")]
            server = await stack.enter_async_context(
                link.process(
                    *(host, "kvpool", "server", "--masters", address, "--id", name),
                    *("--capacity", "128MiB", "--listen", ",".join(["shm://", *listen]), *silent),
                    **environment,
                )
            )
            await server.line()
        child = await stack.enter_async_context(
            link.process(link.right, "tests.support.remote_client", address, f"shm,{transports}")
        )
        client = Client(child)
        assert await client.hear() == {"connected": True}
        yield client


#: What is wrong with the link, one after another. In a short queue what does not fit is lost.
BAD = ("netem delay 5ms 1ms loss 1%", "tbf rate 400mbit burst 64kb limit 96kb")


@pytest.mark.parametrize("transport", ["tcp", UCX])
async def test_blocks_cross_a_link_that_gets_worse(link: Link, transport: str) -> None:
    """From the other host over the wire, from the own one by shared memory. A bad link is slow and
    right; one that is cut in the middle of a read ends calls by their deadline: misses that say
    why, no byte afterwards, and then all is as before."""
    async with client_of(link, transport) as client:
        await client.write("left", "far", 64)
        await client.write("right", "near", 16)
        for name in ("far", "near"):
            heard = await client.read(name, 16, timeout=10)
            assert (heard["hits"], heard["wrong"]) == (16, 0), heard
        assert f"failed_{transport}" not in heard["counters"], heard
        for discipline in BAD:
            if not link.shape(*discipline.split()):  # else this kernel has none
                heard = await client.read("far", 8, timeout=30)
                assert (heard["hits"], heard["wrong"]) == (8, 0), (discipline, heard)
        if why := link.shape("tbf", "rate", "400mbit", "burst", "128kb", "latency", "50ms"):
            pytest.skip(f"tc has no tbf here: {why}")
        client.tell(do="read", name="far", count=64, size=SIZE, timeout=3.0)
        assert await client.hear() == {"reading": "far"}
        await asyncio.sleep(0.3)  # of the 1.3 s that it takes
        link.cut()
        heard = await client.hear()
        assert heard["took_s"] < 3.3, heard
        assert (heard["wrong"], heard["late"]) == (0, 0), heard
        assert heard["hits"] < 64, heard
        again = await client.read("far", 4, timeout=1.0)
        assert again["took_s"] < 1.3, again
        assert again["hits"] == 0, again
        link.mend()
        for _ in range(20):
            heard = await client.read("far", 64, timeout=10)
            if heard["hits"] == 64:
                break
            await asyncio.sleep(0.5)
        assert (heard["hits"], heard["wrong"]) == (64, 0), heard


async def test_a_lane_that_leads_nowhere_is_another_path(link: Link) -> None:
    """The words of ucx arrive, its bytes could not: tcp takes the same call."""
    pytest.importorskip("ucxx", reason="needs ucxx: pip install kvpool[ucx]")
    async with client_of(link, "ucx,tcp", UCX_NET_DEVICES="lo") as client:
        await client.write("left", "far", 4)
        heard = await client.read("far", 4, timeout=5)
        assert (heard["hits"], heard["wrong"]) == (4, 0), heard
        assert heard["counters"]["failed_ucx"] >= 1, heard
