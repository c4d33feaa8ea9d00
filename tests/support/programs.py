"""Programs of a test as processes, each with its log in a folder, and addresses for them."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvpool.tools.subprocesses import Child, process_of

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port on loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def module_at(path: Path) -> Any:
    """A program that is no part of a package, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def master_and_server(
    *of_server: str, both: tuple[str, ...] = ("--log-level", "error"), **environment: str
) -> AsyncIterator[tuple[str, Child]]:
    """`kvpool master`, its address, and `kvpool server`, which it knows."""
    async with process_of("kvpool", "master", "--bind", "127.0.0.1:0", *both) as master:
        address = (await master.line()).removeprefix("master at ")
        command = ("server", "--masters", address, *of_server, *both)
        async with process_of("kvpool", *command, environment=environment) as server:
            await server.line()
            yield address, server


@asynccontextmanager
async def pool_of_commands(*options: str) -> AsyncIterator[str]:
    """A master and a server with these options; the master's address."""
    async with master_and_server("--capacity", "4MiB", both=options) as (address, _):
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
