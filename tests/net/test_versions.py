"""Processes of releases that speak other versions of the protocol: each is told, nobody is hurt.

(design: streams)
"""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from kvpool import Cluster, MasterLost, connect, dev, registry
from kvpool.errors import VersionMismatch
from kvpool.tools.subprocesses import process_of
from kvpool.wire.frames import PROTOCOL_VERSION
from tests.conftest import NAMESPACE, keys, values

THEIRS = ("tests.support.another_release", "kvpool")
BOTH = f"peer speaks protocol {PROTOCOL_VERSION + 1}, this process {PROTOCOL_VERSION}"


async def output(*command: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a command of theirs."""
    pipe = asyncio.subprocess.PIPE
    ran = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *THEIRS, *command), stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(ran.communicate(), 60)
    return ran.returncode, out.decode(), " ".join(err.decode().split())


async def test_masters_and_servers_of_another_version_are_named() -> None:
    async with process_of(*THEIRS, "master", "--bind", "127.0.0.1:0") as running:
        master = (await running.line()).removeprefix("master at ")
        with pytest.raises(MasterLost, match=BOTH):
            await connect(master)
        start = ("server", "--capacity", "16MiB", "--masters", master)
        async with process_of(*THEIRS, *start) as server:
            await server.line()
            _, out, _ = await output("status", "--masters", master, "--json")
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
        code, _, said = await output("status", "--masters", served.address)
        assert code == 1
        versions = f"protocol {PROTOCOL_VERSION}, this process {PROTOCOL_VERSION + 1}"
        assert f"peer speaks {versions}: run the same release" in said
        assert (await pool.match(NAMESPACE, chain)).length == 4
