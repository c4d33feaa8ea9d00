"""`kvpool bench`: speed as ratios to a limit that is measured in the same run.

Absolute figures drift with the machine and the minute; how near the pool comes to a memcpy, or to
two processes with a bare socket between them, does not. The limit and the thing take turns, and the
median of the rounds counts. Master and server are processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvpool import registry
from kvpool.client.opening import connect
from kvpool.client.pool import Pool
from kvpool.config import ClientConfig
from kvpool.errors import Corrupt
from kvpool.net.control_network import TcpNetwork
from kvpool.ops import process
from kvpool.tools.replay_report import quantiles
from kvpool.tools.subprocesses import process_of, servers_up
from kvpool.types import Namespace, ReadResult, WriteStatus

Bytes = npt.NDArray[np.uint8]

_NAMESPACE = Namespace("bench")
_SINGLE = 128 << 10
#: Of small blocks much is padding, and single ones are written, too.
_CAPACITY_MIN = 64 << 20
_CHAIN = 640
_RAW_PIECE = 2 << 20


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How much to measure. `rounds` of `batch` blocks of `block_size` bytes each."""

    rounds: int = 9
    block_size: int = 2 << 20
    batch: int = 64
    calls: int = 2000  # of what is measured by its latency


class Row(NamedTuple):
    """One line of the result. `target` is a bound in the unit of `ratio` or of `measured`."""

    what: str
    measured: str
    limit: str
    ratio: float | None
    target: str
    met: bool | None


@dataclass(slots=True)
class BenchReport:
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"machine": self.machine, "rows": [row._asdict() for row in self.rows]}


async def bench(options: BenchOptions, console: Console) -> BenchReport:
    """Start a master and a server, measure, stop them."""
    report = BenchReport(machine=machine())
    size = options.block_size * options.batch
    schemes = list(registry.transports(_LISTEN))  # ucx is an extra, and may not be there
    async with serving(max(4 * size, _CAPACITY_MIN), schemes) as address:
        work = _Work(options, address, report, console)
        await work.bulk("shm", work.memcpy, "memcpy")
        await work.views()
        async with _raw_socket(size) as raw:
            for scheme in schemes[1:]:
                await work.bulk(scheme, raw, "raw socket")
        await work.match()
        for scheme in schemes:
            await work.single(scheme)
        await work.loop_stall(schemes)
    return report


@asynccontextmanager
async def serving(capacity: int, schemes: Sequence[str] = ("shm", "tcp")) -> AsyncIterator[str]:
    """A master and a server of that many bytes, in processes of their own; where the master is."""
    quiet = ("--log-level", "error")
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(
            process_of("kvpool", "master", "--bind", "127.0.0.1:0", *quiet)
        )
        address = (await master.line()).removeprefix("master at ")
        listen = ",".join(_LISTEN[scheme] for scheme in schemes)
        place = ("--capacity", str(capacity), "--listen", listen)
        server = ("server", "--masters", address, "--id", "bench", *place)
        await (await stack.enter_async_context(process_of("kvpool", *server, *quiet))).line()
        await servers_up(address, 1)
        yield address


class _Work:
    def __init__(
        self, options: BenchOptions, master: str, report: BenchReport, console: Console
    ) -> None:
        self._options = options
        self._master = master
        self._report = report
        self._console = console
        shape = (options.batch, options.block_size)
        rng = np.random.default_rng(1)
        self._source: Bytes = rng.integers(0, 256, shape, np.uint8)
        self._target: Bytes = np.ones(shape, np.uint8)

    async def memcpy(self) -> None:
        """The limit of anything that copies once, in one thread."""
        np.copyto(self._target, self._source)

    async def bulk(
        self, transport: str, limit: Callable[[], Awaitable[None]], limit_name: str
    ) -> None:
        """Write and read batches, verified and not, beside the limit."""
        for verify in (True, False):
            async with await self._pool(transport, verify) as pool:
                rates: dict[str, list[float]] = {"limit": [], "write": [], "read": []}
                for number in range(self._options.rounds + 1):
                    limit_s = await _timed(limit())
                    write_s, read_s = await self._round(pool)
                    if number:  # the first round warms pages and connections
                        for name, seconds in zip(rates, (limit_s, write_s, read_s), strict=True):
                            rates[name].append(self._source.nbytes / seconds / 1e9)
            best = statistics.median(rates["limit"])
            how = "verified" if verify else "unverified"
            targets = _TARGETS[transport, verify]
            if verify:
                self._ratio(f"{transport} write", rates["write"], best, limit_name, targets[0])
            self._ratio(f"{transport} read, {how}", rates["read"], best, limit_name, targets[1])

    async def views(self) -> None:
        """`read_view` moves nothing: its time does not depend on the size of the blocks."""
        async with await self._pool("shm", False) as pool:
            keys = await self._fill(pool)
            match = await pool.match(_NAMESPACE, keys)
            seconds = []
            for _ in range(200):
                started = time.perf_counter()
                async with pool.read_view(_NAMESPACE, keys, match=match) as views:
                    seconds.append(time.perf_counter() - started)
                    if not all(view.status.hit for view in views):
                        raise Corrupt("a view was a miss")
            await pool.remove(_NAMESPACE, keys)
        p50, p99 = quantiles(seconds)
        size = f"{self._source.nbytes >> 20} MiB in place"
        self._add(f"shm read_view, {size}", _micro(p50, p99), "no copy", None, "report", None)

    async def match(self) -> None:
        """One request for a whole prompt."""
        async with await self._pool("shm", True) as pool:
            chain = [secrets.token_bytes(32) for _ in range(_CHAIN)]
            await pool.write(_NAMESPACE, chain, [b"x"] * _CHAIN)
            seconds = []
            for _ in range(self._options.calls):
                started = time.perf_counter()
                match = await pool.match(_NAMESPACE, chain)
                seconds.append(time.perf_counter() - started)
                if match.length != _CHAIN:
                    raise Corrupt(f"matched {match.length} of {_CHAIN} blocks")
            await pool.remove(_NAMESPACE, chain)
        p50, p99 = quantiles(seconds)
        bare = quantiles(await self._bare_answer())[0]
        what, limit = f"match of {_CHAIN} blocks, p50 / p99", f"bare answer {bare * 1e6:.0f} us"
        self._add(what, _micro(p50, p99), limit, p50 / bare, "p50 <= 300 us", p50 <= 300e-6)

    async def _bare_answer(self) -> list[float]:
        """Round trips of as many bytes to another process that does nothing else."""
        network = TcpNetwork()
        try:
            async with process_of("kvpool.tools.bench", "echo") as echo:
                link = network.connect(await echo.line())
                body, seconds = bytes(32 * _CHAIN), []
                loop = asyncio.get_running_loop()
                for _ in range(self._options.calls):
                    started = time.perf_counter()
                    await link.request(1, body, deadline=loop.time() + 5)
                    seconds.append(time.perf_counter() - started)
                return seconds
        finally:
            network.close()

    async def single(self, transport: str) -> None:
        """A match and a read of one small block, verified."""
        async with await self._pool(transport, True) as pool:
            key = secrets.token_bytes(32)
            source = self._source.reshape(-1)[:_SINGLE]  # a small batch has less
            target = bytearray(source.size)
            await pool.write(_NAMESPACE, [key], [source.data])
            seconds = []
            for _ in range(self._options.calls):
                started = time.perf_counter()
                match = await pool.match(_NAMESPACE, [key])
                results = await pool.read(_NAMESPACE, [key], [target], match=match)
                seconds.append(time.perf_counter() - started)
                _all_hit(results)
            if target != source.tobytes():
                raise Corrupt("wrong bytes came back")
            await pool.remove(_NAMESPACE, [key])
        p50, p99 = quantiles(seconds)
        what = f"{transport} 128 KiB match + read, p50 / p99"
        self._add(what, _micro(p50, p99), "", None, "aim: 200 / 500 us", None)

    async def loop_stall(self, transports: list[str]) -> None:
        """The longest time that this loop could not run a timer while blocks moved."""
        for transport in transports:
            async with await self._pool(transport, True) as pool:
                await self._round(pool)
                watch = asyncio.create_task(_longest_stall())
                for _ in range(3):
                    await self._round(pool)
                watch.cancel()
                stall_s = await watch
            what = f"{transport}: longest callback while blocks move"
            self._add(what, f"{stall_s * 1e3:.1f} ms", "", None, "<= 5 ms", stall_s <= 5e-3)

    async def _round(self, pool: Pool) -> tuple[float, float]:
        """Seconds to write a batch of new blocks and to read it back; every byte is compared."""
        started = time.perf_counter()
        keys = await self._fill(pool)
        write_s = time.perf_counter() - started
        match = await pool.match(_NAMESPACE, keys)
        self._target[:, 0] = 0
        buffers = [row.data for row in self._target]
        started = time.perf_counter()
        results = await pool.read(_NAMESPACE, keys, buffers, match=match)
        read_s = time.perf_counter() - started
        _all_hit(results)
        for sent, got in zip(self._source, self._target, strict=True):
            # A block at a time: freeing one large temporary would hold the GIL for milliseconds.
            if not np.array_equal(sent, got):
                raise Corrupt("wrong bytes came back")
            await asyncio.sleep(0)
        await pool.remove(_NAMESPACE, keys)
        return write_s, read_s

    async def _fill(self, pool: Pool) -> list[bytes]:
        keys = [secrets.token_bytes(32) for _ in range(self._options.batch)]
        statuses = await pool.write(_NAMESPACE, keys, [row.data for row in self._source])
        if set(statuses) != {WriteStatus.STORED}:
            raise Corrupt(f"writes ended as {set(statuses)}")
        return keys

    async def _pool(self, transport: str, verify: bool) -> Pool:
        return await connect(
            config=ClientConfig(
                masters=[self._master], transports=[transport], verify=verify, timeout_s=60
            )
        )

    def _ratio(
        self, what: str, rates: list[float], best: float, limit_name: str, target: float
    ) -> None:
        rate = statistics.median(rates)
        ratio = rate / best
        limit = f"{limit_name} {best:.2f} GB/s"
        self._add(what, f"{rate:.2f} GB/s", limit, ratio, f">= {target:g}x", ratio >= target)

    def _add(
        self,
        what: str,
        measured: str,
        limit: str,
        ratio: float | None,
        target: str,
        met: bool | None,
    ) -> None:
        self._report.rows.append(Row(what, measured, limit, ratio, target, met))
        self._console.print(f"  {what}: {measured}", highlight=False)


_LISTEN = {"shm": "shm://", "tcp": "tcp://127.0.0.1:0", "ucx": "ucx://127.0.0.1:0"}
#: (write, read) as a share of the limit, by transport and whether checksums are checked.
_TARGETS = {
    ("shm", True): (0.6, 0.6),
    ("shm", False): (0.6, 0.85),
    ("tcp", True): (0.6, 0.75),
    ("tcp", False): (0.6, 0.9),
    ("ucx", True): (0.6, 0.75),
    ("ucx", False): (0.6, 0.9),
}


async def _longest_stall() -> float:
    """How late a timer of 0.2 ms ever was, until cancelled."""
    loop = asyncio.get_running_loop()
    longest = 0.0
    try:
        while True:
            due = loop.time() + 0.0002
            await asyncio.sleep(0.0002)
            longest = max(longest, loop.time() - due)
    except asyncio.CancelledError:
        return longest


@asynccontextmanager
async def _raw_socket(size: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The limit of tcp: a blocking socket to another process that sends as fast as it can."""
    async with process_of("kvpool.tools.bench") as sender:
        port = int(await sender.line())
        sock = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target = memoryview(bytearray(size))

        def receive() -> None:
            sock.sendall(size.to_bytes(8, "little"))
            got = 0
            while got < size:
                got += sock.recv_into(target[got:])

        async def limit() -> None:
            await asyncio.to_thread(receive)

        try:
            yield limit
        finally:
            sock.close()


def _send_for_ever() -> None:
    """The other end of `_raw_socket`: `python -m kvpool.tools.bench`."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    piece = memoryview(np.ones(_RAW_PIECE, np.uint8).data)
    while request := sock.recv(8):
        left = int.from_bytes(request, "little")
        while left:
            count = min(left, _RAW_PIECE)
            sock.sendall(piece[:count])
            left -= count


async def _echo() -> None:
    """The other end of `_bare_answer`."""
    network = TcpNetwork()
    listener = await network.serve("127.0.0.1:0", lambda type, body, _: (type, b""))
    print(listener.address, flush=True)
    await process.wait_for_signal()
    await listener.close()
    network.close()


async def _timed(call: Awaitable[None]) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


def _all_hit(results: list[ReadResult]) -> None:
    if not all(result.status.hit for result in results):
        raise Corrupt(f"reads ended as { ({r.status.label for r in results}) }")


def _micro(p50: float, p99: float) -> str:
    return f"{p50 * 1e6:.0f} / {p99 * 1e6:.0f} us"


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "argv": sys.argv[1:],
    }


def table(rows: list[Row]) -> Table:
    """The result, with its limits and targets beside it."""
    shown = Table()
    shown.add_column("what")
    for name in ("measured", "limit in this run", "ratio", "target", ""):
        shown.add_column(name, justify="right")
    marks = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}
    for row in rows:
        ratio = f"{row.ratio:.2f}x" if row.ratio is not None else ""
        shown.add_row(row.what, row.measured, row.limit, ratio, row.target, marks[row.met])
    return shown


if __name__ == "__main__":
    process.die_with_parent()
    if sys.argv[1:] == ["echo"]:
        process.run(_echo())
    else:
        _send_for_ever()
