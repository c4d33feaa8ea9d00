"""What this machine can do at best, measured in the same run: memcpy, a bare socket, the disk."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.peers.processes import Rig

_PIECE = 2 << 20
_SIZE = 256 << 20
_RECEIVE_BUFFER = 4 << 20
_CONNECTIONS = (1, 2, 4)


async def memcpy(size: int = _SIZE) -> float:
    """GB/s of one thread's numpy.copyto."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        rates.append(size / 1e9 / (time.perf_counter() - began))
    return sorted(rates)[1]


async def raw_socket(rig: Rig, size: int = _SIZE) -> float:
    """GB/s of two processes with `sendall` and `recv_into` over loopback tcp: with as many
    connections side by side, each with a thread at both ends, as are fastest."""
    sender = await rig.run("limit", sys.executable, "-m", "benchmarks.peers.limits")
    port = int(await sender.line())
    target = memoryview(bytearray(size))

    def receive(place: int, count: int) -> None:
        part = target[place * (size // count) :][: size // count]
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            sock.sendall(len(part).to_bytes(8, "little"))
            got = 0
            while got < len(part):
                got += sock.recv_into(part[got:])

    try:
        rates = []
        for count in _CONNECTIONS:
            of_count = []
            for _ in range(4):
                began = time.perf_counter()
                receives = [asyncio.to_thread(receive, n, count) for n in range(count)]
                await asyncio.gather(*receives)
                of_count.append(size / 1e9 / (time.perf_counter() - began))
            rates.append(statistics.median(of_count[1:]))
        return max(rates)
    finally:
        await sender.stop()


async def raw_disk(directory: Path, size: int = _SIZE) -> tuple[float, float] | None:
    """GB/s of direct writes and reads; None where the file system has no O_DIRECT."""

    def measure() -> tuple[float, float] | None:
        path = directory / "raw"
        piece = mmap.mmap(-1, _PIECE)
        piece.write(os.urandom(_PIECE))
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError:
            return None
        try:
            began = time.perf_counter()
            for offset in range(0, size, _PIECE):
                os.pwrite(file, piece, offset)
            os.fdatasync(file)
            written = time.perf_counter()
            for offset in range(0, size, _PIECE):
                os.preadv(file, [piece], offset)
            ended = time.perf_counter()
        except OSError:
            return None
        finally:
            os.close(file)
            path.unlink()
        return size / 1e9 / (written - began), size / 1e9 / (ended - written)

    return await asyncio.to_thread(measure)


def _send_for_ever() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_send, args=(sock,), daemon=True).start()


def _send(sock: socket.socket) -> None:
    piece = memoryview(np.ones(_PIECE, np.uint8).data)
    while request := sock.recv(8):
        left = int.from_bytes(request, "little")
        while left:
            count = min(left, _PIECE)
            sock.sendall(piece[:count])
            left -= count


if __name__ == "__main__":
    _send_for_ever()
