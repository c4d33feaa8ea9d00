"""Processes that a command starts and takes with it when it ends, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import IO, Final

from kvpool.client.opening import connect
from kvpool.config import ClientConfig
from kvpool.errors import ServerLost
from kvpool.ops.process import PARENT
from kvpool.types import Member

_END_S = 0.8
_START_S = 20.0
#: Settings of one pool: its secret, its addresses, and its files, which a server would open.
_OF_A_POOL: Final = {
    *("KVPOOL_CONFIG", "KVPOOL_CLUSTER", "KVPOOL_SECRET_FILE", "KVPOOL_TENANTS_FILE"),
    *("KVPOOL_LOCAL_ONLY", "KVPOOL_MASTER_HTTP", "KVPOOL_SERVER_TIERS", "KVPOOL_SERVER_ID"),
    *("KVPOOL_SERVER_IDENTITY_FILE", "KVPOOL_SERVER_LISTEN", "KVPOOL_SERVER_ANNOUNCE"),
    "KVPOOL_SERVER_HTTP",
}


class Child:
    """A child process that reads and writes lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def write_line(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.returncode

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait until it has; its `code`."""
        return await self._process.wait()

    async def line(self) -> str:
        """The next line of its stdout. Raises ServerLost when it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise ServerLost(
                f"a child process ended with code {code}: its error messages are above"
            )
        return line.decode().strip()


@asynccontextmanager
async def process_of(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
) -> AsyncIterator[Child]:
    """`python -m module`, ended with the `with`, or by the kernel when this process dies.

    Its stderr is that of this process, or a file. It does not inherit what belongs to a pool in
    use; `environment` is added.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in _OF_A_POOL}
    if module == "kvpool":
        arguments = (*arguments, "--die-with-parent")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        limit=1 << 24,
        env={**inherited, **(environment or {}), PARENT: str(os.getpid())},
        start_new_session=True,  # Ctrl-C is for us; we end them in order
    )
    try:
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                process.kill()
            await process.wait()


async def servers_up(master: str, count: int) -> list[Member]:
    """Wait until `count` servers are alive. Raises ServerLost when they do not come."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _START_S
    async with connect(config=ClientConfig(masters=[master])) as pool:
        while True:
            members = await pool.members()
            if sum(member.alive for member in members) >= count:
                return members
            if loop.time() > until:
                raise ServerLost(f"{count} servers were started, {len(members)} registered")
            await asyncio.sleep(0.05)
