"""Helpers for tests over real processes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvpool import Pool, WriteStatus, admin
from kvpool.tools.subprocesses import Child
from tests.conftest import NAMESPACE, keys, value


async def fill(pool: Pool, server: str, count: int, size: int = 1 << 20) -> list[bytes]:
    """Write `count` blocks to one server; returns their keys."""
    chain = keys(f"on {server}", count)
    for digest in chain:
        status = await admin(pool).write_to(server, NAMESPACE, digest, value(digest, size))
        assert status is WriteStatus.STORED
    return chain


async def member(pool: Pool, name: str) -> dict[str, int]:
    """The counters that masters have of a server."""
    (found,) = [m for m in await pool.members() if m.server == name]
    return {
        **found.stats.counters,
        "reservations": found.stats.reservations,
        "pins": found.stats.pins,
        "used": found.stats.used,
    }


async def until(pool: Pool, name: str, field: str, expected: int, within_s: float) -> None:
    """Wait until a counter of a server has the expected value."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while (await member(pool, name))[field] != expected:
        assert loop.time() < end, await member(pool, name)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def script(source: str, *arguments: str) -> AsyncIterator[Child]:
    """Run a Python program in a process of its own, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(source),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
