"""Processes of releases that speak other versions of the protocol: each is told, nobody is hurt.

(design: streams)
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvpool import Cluster, MasterLost, connect, dev, registry
from kvpool.errors import VersionMismatch
from kvpool.wire.frames import PROTOCOL_VERSION
from tests.conftest import NAMESPACE, keys, values

THEIRS = ("-m", "tests.support.another_release", "kvpool")
BOTH = f"peer speaks protocol {PROTOCOL_VERSION + 1}, this process {PROTOCOL_VERSION}"


@asynccontextmanager
async def process(*command: str, says: str) -> AsyncIterator[str]:
    """A process, and its line in which it says so."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        line = "begins"
        while says not in line:
            assert line, "it ended"
            line = (await asyncio.wait_for(started.stdout.readline(), 60)).decode()
        yield line
    finally:
        started.kill()
        await started.wait()


async def output(*command: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a process that ends."""
    pipe = asyncio.subprocess.PIPE
    ran = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(ran.communicate(), 60)
    return ran.returncode, out.decode(), " ".join(err.decode().split())


async def test_masters_and_servers_of_another_version_are_named() -> None:
    start = (*THEIRS, "master", "--bind", "127.0.0.1:0")
    async with process(*start, says="master at") as line:
        master = line.split()[-1]
        with pytest.raises(MasterLost, match=BOTH):
            await connect(master)
        start = (*THEIRS, "server", "--capacity", "16MiB", "--masters", master)
        async with process(*start, says="server "):
            _, out, _ = await output(*THEIRS, "status", "--masters", master, "--json")
            addresses = json.loads(out)[0]["addresses"]
            for address in addresses:
                scheme = address.partition("://")[0]
                deadline = asyncio.get_running_loop().time() + 10
                with pytest.raises(VersionMismatch, match=BOTH):
                    await registry.transport(scheme).connect(
                        address, cluster=Cluster(), client="c", deadline=deadline
                    )
            assert {one.partition("://")[0] for one in addresses} >= {"tcp", "shm"}


async def test_a_pool_serves_on_beside_a_client_of_another_version() -> None:
    async with dev.serve("16MiB") as served, served.pool() as pool:
        chain = keys("b", 4)
        await pool.write(NAMESPACE, chain, values(chain, 64))
        code, _, said = await output(*THEIRS, "status", "--masters", served.address)
        assert code == 1
        versions = f"protocol {PROTOCOL_VERSION}, this process {PROTOCOL_VERSION + 1}"
        assert f"peer speaks {versions}: run the same release" in said
        assert (await pool.match(NAMESPACE, chain)).length == 4
