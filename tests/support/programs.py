"""Programs of a test as processes, each with its log in a folder, and addresses for them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvpool.tools.subprocesses import process_of

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port on loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@asynccontextmanager
async def pool_of_commands(*options: str) -> AsyncIterator[str]:
    """`kvpool master` and `kvpool server` with these options; the master's address."""
    async with process_of("kvpool", "master", "--bind", "127.0.0.1:0", *options) as master:
        address = (await master.line()).removeprefix("master at ")
        of_server = ("--masters", address, "--capacity", "4MiB", *options)
        async with process_of("kvpool", "server", *of_server) as server:
            await server.line()
            yield address


class RunningPrograms:
    """They run until they are killed, or all of them with `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"log-{name}").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def start_kvpool(self, name: str, *words: str) -> None:
        self.start(name, sys.executable, "-m", "kvpool", *words, "--die-with-parent")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def close(self) -> None:
        for name in self.processes:
            self.kill(name)
