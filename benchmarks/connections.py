"""What a server's memory does while clients come and go: it must stay as it is.

    python -m benchmarks.connections [--connections 10000]

The server is a process of its own, over tcp, on the loop and with the collector of `kvpool server`.
Three kinds of client take turns: one that says hello and goes, one that goes in the middle of a
frame, and one that reads with 64 calls at once and closes its pool.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from kvpool import ClientConfig, Namespace, connect, dev
from kvpool.ops.process import freeze_gc, run
from kvpool.wire.frames import encode_frame
from kvpool.wire.messages import Hello, encode

_NAMESPACE: Final = Namespace("bench")
_KEYS: Final = [hashlib.sha256(bytes([number])).digest() for number in range(64)]
_SIZE: Final = 64 << 10
_HELLO: Final = encode_frame(*encode(Hello("default", "bench")))
#: Rows of the table.
_STEPS: Final = 10


async def serve() -> None:
    """A pool in this process until it is killed; its addresses go to stdout."""
    async with dev.serve("64MiB", listen=("tcp://127.0.0.1:0",)) as running:
        freeze_gc()
        print(running.address, running.servers[0].addresses[0], flush=True)
        await asyncio.Event().wait()


def private_mib(pid: int) -> float:
    """Memory of a process that no other one shares, in MiB: the segment is not in it."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def come_and_go(server: str, connections: int) -> None:
    """Connect, say hello, and go: every other time in the middle of a frame."""
    where = urlsplit(server)
    for number in range(connections):
        with socket.create_connection((where.hostname, where.port)) as client:
            client.sendall(_HELLO)
            client.recv(1 << 10)
            if number % 2:
                client.sendall(_HELLO[:20])


async def read_at_once(master: str) -> None:
    """One client: 64 reads at the same time, ten times."""
    config = ClientConfig(masters=[master], transports=["tcp"])
    async with await connect(config=config) as pool:
        await pool.write(_NAMESPACE, _KEYS, [bytes([n]) * _SIZE for n in range(len(_KEYS))])
        for _ in range(10):
            await asyncio.gather(
                *[pool.read(_NAMESPACE, [digest], [bytearray(_SIZE)]) for digest in _KEYS]
            )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--connections", type=int, default=10_000)
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve:
        run(serve())
        return
    command = [sys.executable, "-m", "benchmarks.connections", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            master, server = process.stdout.readline().split()
            table = Table("connections", "private memory, MiB")
            run(read_at_once(master))  # so that all of its code has run once
            table.add_row("0", f"{private_mib(process.pid):.1f}")
            for step in range(1, _STEPS + 1):
                come_and_go(server, options.connections // _STEPS)
                run(read_at_once(master))
                done = f"{options.connections // _STEPS * step:,}"
                table.add_row(done, f"{private_mib(process.pid):.1f}")
        finally:
            process.kill()
    Console().print(table)


if __name__ == "__main__":
    main()
