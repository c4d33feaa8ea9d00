"""Blocks move while a pool is upgraded: the release before cannot fetch, and nothing is lost by it.

(design: protocol-versions)
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvpool import ReadStatus, WriteStatus, connect
from tests.conftest import NAMESPACE, buffers, keys, values
from tests.net.test_versions import RELEASES, process

_BLOCK = 4096
CHAIN = keys("chain", 64)


@asynccontextmanager
async def pool_of(**servers: str) -> AsyncIterator[str]:
    """A master of this release and a server of each name, `old` or `new`; the master's address.

    The first server has the chain.
    """
    async with AsyncExitStack() as stack:
        start = ("-m", "kvpool", "master", "--bind", "127.0.0.1:0")
        _, line = await stack.enter_async_context(process(*start, says="master at"))
        address = line.split()[-1]
        for number, (name, release) in enumerate(servers.items()):
            options = ("--capacity", "16MiB", "--masters", address, "--id", name)
            start = (*RELEASES[release], "kvpool", "server", *options)
            await stack.enter_async_context(process(*start, says="server "))
            if number == 0:
                async with await connect(address) as pool:
                    written = await pool.write(NAMESPACE, CHAIN, values(CHAIN, _BLOCK))
                    assert set(written) == {WriteStatus.STORED}
        yield address


async def drain(address: str, server: str, *options: str) -> tuple[int, str]:
    """What `kvpool drain` of this release says: its exit code, and its answer or its error."""
    command = ("-m", "kvpool", "drain", server, "--masters", address, *options)
    started = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(started.communicate(), 60)
    assert started.returncode is not None
    return started.returncode, said.decode()


async def where(address: str) -> set[str]:
    """The servers that a reader gets the chain from, whole and right."""
    async with await connect(address) as pool:
        match = await pool.match(NAMESPACE, CHAIN)
        assert match.length == len(CHAIN)
        got = buffers(len(CHAIN), _BLOCK)
        results = await pool.read(NAMESPACE, CHAIN, got, match=match)
        assert {result.status for result in results} == {ReadStatus.HIT}
        assert got == values(CHAIN, _BLOCK)
        return {replica.server for run in match.runs for replica in run.replicas}


async def test_a_server_that_leaves_hands_over_to_those_that_can_fetch() -> None:
    async with pool_of(leaves="new", older="old", newer="new") as address:
        code, said = await drain(address, "leaves", "--json", "--deadline", "20s")
        assert code == 0, said
        assert json.loads(said)["moved_blocks"] == len(CHAIN)
        assert await where(address) == {"leaves", "newer"}


async def test_a_server_that_leaves_beside_older_ones_says_what_is_left_behind() -> None:
    async with pool_of(leaves="new", older="old") as address:
        code, said = await drain(address, "leaves", "--json", "--deadline", "3s")
        assert code == 1
        report = json.loads(said)
        assert [(one["reason"], one["blocks"]) for one in report["left"]] == [
            ("it cannot fetch", len(CHAIN))
        ]
        assert await where(address) == {"leaves"}


async def test_an_older_server_cannot_be_drained_and_serves_on() -> None:
    async with pool_of(leaves="old", newer="new") as address:
        code, said = await drain(address, "leaves", "--deadline", "3s")
        assert code == 1
        assert said == "error: server leaves: Drain needs protocol 4, the peer speaks 3\n"
        assert await where(address) == {"leaves"}
