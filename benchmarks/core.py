"""The pure parts in process: announcements, matches, reservations, memory per block."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc

from rich.console import Console

from kvpool.config import MasterConfig
from kvpool.master.service import Master
from kvpool.master.state.directory import Directory
from kvpool.master.state.server_record import Registration
from kvpool.net.control_network import TcpNetwork
from kvpool.ops import process
from kvpool.protocols import ReserveRequest
from kvpool.server.state.store import Store
from kvpool.tools.bench import Row, table
from kvpool.types import ROOT, Namespace, WriteStatus
from kvpool.wire import messages

NAMESPACE = Namespace("bench")
BATCH = 64
PAGE = 4096


def measure(blocks: int) -> list[Row]:
    """Rates with `blocks` blocks, memory with a million (or as many, when that is less)."""
    process.freeze_gc()
    digests = [os.urandom(32) for _ in range(blocks)]
    rows = [announced(digests), *matched(digests), *stored(digests)]
    rows += [directory_memory(), store_memory()]
    return rows


def announced(digests: list[bytes]) -> Row:
    """Encoded announcements through the master's handler."""
    network = TcpNetwork()
    directory = Directory()
    master = Master(MasterConfig(), network, directory=directory)
    directory.servers.register(
        "s", Registration(1, "h", ("tcp://s:1",), ("dram",), 1 << 40, token=bytes(16)), 0.0
    )
    step = messages.ANNOUNCED_BLOCKS_MAX
    encoded = [
        messages.encode(
            messages.Announce(
                "s",
                1,
                bytes(16),
                number + 1,
                [
                    messages.BlockChanges(
                        NAMESPACE.name, 1, 32, b"".join(digests[first : first + step]), 0, 0, 0
                    )
                ],
            )
        )
        for number, first in enumerate(range(0, len(digests), step))
    ]
    started = time.perf_counter()
    for type, body in encoded:
        master.handle(type, body)
    rate = len(digests) / (time.perf_counter() - started)
    network.close()
    assert len(directory) == len(digests)
    return _rate("blocks announced to a master, decoded and applied", rate, 200_000)


def matched(digests: list[bytes]) -> list[Row]:
    """Chains of 640, all there; and with a gap in the middle."""
    directory = Directory()
    directory.servers.register("s", Registration(1, "h", ("tcp://s:1",), ("dram",), 1 << 40), 0.0)
    directory.stored("s", NAMESPACE, 0, 0, digests)
    rows = []
    for name, gap in (("all there", False), ("a gap in the middle", True)):
        chains = [list(digests[first : first + 640]) for first in range(0, len(digests), 640)]
        if gap:
            for chain in chains:
                chain[len(chain) // 2] = bytes(32)
        # As they come from the wire: new objects, whose hash nobody has computed yet.
        chains = [[bytes(bytearray(digest)) for digest in chain] for chain in chains]
        started = time.perf_counter()
        for chain in chains:
            directory.match(NAMESPACE, chain)
        looked_up = sum(map(len, chains)) / (2 if gap else 1)
        rate = looked_up / (time.perf_counter() - started)
        rows.append(_rate(f"keys matched, chains of 640, {name}", rate, 1_000_000))
    return rows


def stored(digests: list[bytes]) -> list[Row]:
    """Reserve and seal into free space, then into a full segment; pin and unpin."""
    half = len(digests) // 2
    books = Store(half * PAGE)
    rows = [
        _rate("store: reserve + seal, free space", _write(books, digests[:half]), None),
        _rate("store: pin + unpin", _pin(books, digests[:half]), None),
        _rate("store: reserve + seal, evicting", _write(books, digests[half:]), None),
    ]
    return rows


def _write(books: Store, digests: list[bytes]) -> float:
    started = time.perf_counter()
    for first in range(0, len(digests), BATCH):
        chain = digests[first : first + BATCH]
        sizes = [PAGE] * len(chain)
        for answer in books.reserve(
            1, ReserveRequest(NAMESPACE, 0, chain, [ROOT, *chain[:-1]], sizes), 1.0
        ):
            assert answer.status is WriteStatus.RESERVED
            books.seal(1, answer.id, answer.id, 1.0)
        books.index.change_log.take()
    return len(digests) / (time.perf_counter() - started)


def _pin(books: Store, digests: list[bytes]) -> float:
    started = time.perf_counter()
    for first in range(0, len(digests), BATCH):
        for pin in books.pin(1, NAMESPACE, 0, digests[first : first + BATCH], 2.0):
            books.unpin(1, pin.id)
    return len(digests) / (time.perf_counter() - started)


def directory_memory(count: int = 1_000_000) -> Row:
    """Bytes of memory per block of a directory that holds a million."""
    tracemalloc.start()
    directory = Directory()
    directory.servers.register("s", Registration(1, "h", ("tcp://s:1",), ("dram",), 1 << 40), 0.0)
    for _ in range(0, count, 1000):
        directory.stored("s", NAMESPACE, 0, 0, [os.urandom(32) for _ in range(1000)])
    used = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    return Row("directory: memory per block", f"{used:.0f} bytes", "", None, "<= 600", used <= 600)


def store_memory(count: int = 1_000_000) -> Row:
    """Bytes of memory per block of a store that holds a million."""
    tracemalloc.start()
    books = Store(count * PAGE)
    for _ in range(0, count, 1000):
        chain = [os.urandom(32) for _ in range(1000)]
        _write(books, chain)
    used = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    return Row("store: memory per block", f"{used:.0f} bytes", "", None, "<= 600", used <= 600)


def _rate(what: str, rate: float, target: int | None) -> Row:
    met = rate >= target if target is not None else None
    goal = f">= {target:,} /s" if target is not None else "report"
    return Row(what, f"{rate:,.0f} /s", "", None, goal, met)


if __name__ == "__main__":
    Console(width=None if sys.stdout.isatty() else 140).print(table(measure(400_000)))
