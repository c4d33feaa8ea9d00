"""A pool that is upgraded one process at a time: both releases at once.

(design: protocol-versions)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvpool import (
    ClientConfig,
    Cluster,
    Match,
    MatchPoller,
    PrefetchStatus,
    ReadStatus,
    Replica,
    Run,
    WriteStatus,
    connect,
)
from tests.conftest import NAMESPACE, buffers, keys, values

NEW = ("-m",)
OLD = ("-m", "tests.support.previous_release")
RELEASES = {"old": OLD, "new": NEW}


@asynccontextmanager
async def process(
    *command: str, says: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process, and its line in which it says so."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        line = "begins"
        while says not in line:
            assert line, "it ended"
            line = (await asyncio.wait_for(started.stdout.readline(), 60)).decode()
        yield started, line
    finally:
        started.kill()
        await started.wait()


@asynccontextmanager
async def pool_of(master: str, server: str, *options: str) -> AsyncIterator[str]:
    """A master and a server, each of its release; the master's address."""
    async with AsyncExitStack() as stack:
        start = (*RELEASES[master], "kvpool", "master", "--bind", "127.0.0.1:0", *options)
        _, line = await stack.enter_async_context(process(*start, says="master at"))
        address = line.split()[-1]
        start = (*RELEASES[server], "kvpool", "server", "--capacity", "16MiB", "--masters", address)
        await stack.enter_async_context(process(*start, *options, says="server "))
        yield address


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(("master", "server"), [("old", "new"), ("new", "old"), ("old", "old")])
async def test_a_client_works_with_masters_and_servers_of_the_release_before(
    master: str, server: str, transport: str
) -> None:
    async with pool_of(master, server) as address:
        config = ClientConfig(masters=[address], transports=[transport], measure=False)
        async with await connect(config=config) as pool:
            chain = keys("chain", 64)
            written = await pool.write(NAMESPACE, chain, values(chain, 4096))
            assert set(written) == {WriteStatus.STORED}
            got = buffers(64, 4096)
            results = await pool.read(NAMESPACE, chain, got)
            assert {result.status for result in results} == {ReadStatus.HIT}
            assert got == values(chain, 4096)
            for _ in range(2):  # the second one with what the first has found
                assert (await pool.match(NAMESPACE, chain)).length == 64
            # What an older server does not know is refused, and the connection stays.
            below = Run(0, 63, (Replica(pool._servers.rank(pool._servers._records)[0], "nvme"),))
            match = Match((below,), 64, ReadStatus.HIT)
            statuses = await pool.prefetch(NAMESPACE, chain, match=match)
            refused, known = PrefetchStatus.REFUSED, PrefetchStatus.IN_MEMORY
            assert set(statuses) == {refused if server == "old" else known}
            again = await pool.read(NAMESPACE, chain, got)
            assert {result.status for result in again} == {ReadStatus.HIT}
            assert not any(count for name, count in pool.counters.items() if "failed_" in name)
            (member,) = await pool.members()
            assert member.stats.blocks in (0, 64)
            if master == "old":  # and without a loop
                poller = MatchPoller(config, Cluster())
                for _ in range(3):
                    poller.start("a", [(NAMESPACE, chain)])
                    end = time.monotonic() + 10
                    while not (ended := poller.poll(0.005)):
                        assert time.monotonic() < end
                    assert ended[0].matches[0].length == 64
                poller.close()


async def test_a_client_of_the_release_before_works_with_a_pool_of_this_one() -> None:
    async with pool_of("new", "new") as address:
        command = (*OLD, "tests.support.remote_client", address, "tcp,shm")
        async with process(*command, says="connected") as (client, _):
            assert client.stdin is not None
            assert client.stdout is not None
            (server,) = await members(address)
            answers = []
            for order in (
                {"do": "write", "server": server, "name": "a", "count": 8, "size": 4096},
                {"do": "read", "name": "a", "count": 8, "size": 4096, "timeout": 5.0},
            ):
                client.stdin.write(json.dumps(order).encode() + b"\n")
                line = await asyncio.wait_for(client.stdout.readline(), 60)
                while b"reading" in line:
                    line = await asyncio.wait_for(client.stdout.readline(), 60)
                answers.append(json.loads(line))
            written, read = answers
            assert written["statuses"] == ["STORED"]
            assert (read["hits"], read["wrong"]) == (8, 0)


async def members(address: str) -> list[str]:
    async with await connect(address) as pool:
        return [member.server for member in await pool.members()]
