"""Through how many files one call goes: each function of the product that it enters, in order.

    python -m tests.support.count_rooms tcp [--calls]

A *room* is a file. To follow a call through the code is to open a file at each change of room, so
their number says how much one has to know to understand one call. Printed for each kind of call:
rooms, changes of room, functions, calls and the deepest stack; then how often each file is
entered; with `--calls` every function, in order.

Master, server and client are in this process, so it is the whole way of a call. A coroutine that
goes on after a wait counts as entered again, and so do those that wait for it. Of several runs the
shortest counts: a heartbeat may fall into the others.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from kvpool import ClientConfig, Namespace, Pool, dev

ROOT = Path(__file__).parents[2]
PARTS = ("kvpool", "transports", "tiers", "connector")
BLOCKS = 4
BLOCK_SIZE = 128 << 10
NAMESPACE = Namespace("rooms")
#: Until what a call has left to do in the background is done.
_SETTLED_S = 0.3
_RUNS = 3


@dataclass(frozen=True, slots=True)
class Entered:
    """One function that was entered."""

    room: str
    function: str
    depth: int


class Walk:
    """The functions that were entered in the main thread."""

    def __init__(self) -> None:
        self.entered: list[Entered] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the functions that are entered inside the `with`."""
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def rooms(self) -> list[str]:
        """The files, in order; one that is not left appears once."""
        return [room for room, _ in itertools.groupby(one.room for one in self.entered)]

    def report(self, title: str, *, calls: bool) -> str:
        """What was counted, as text."""
        rooms = self.rooms
        functions = {(one.room, one.function) for one in self.entered}
        lines = [
            f"{title}: {len(set(rooms))} rooms, {len(rooms) - 1} changes of room, "
            f"{len(functions)} functions, {len(self.entered)} calls, "
            f"deepest stack {max((one.depth for one in self.entered), default=0)}"
        ]
        if calls:
            for room, group in itertools.groupby(self.entered, lambda one: one.room):
                lines += [f"  {room}", *(f"      {one.function}" for one in group)]
        else:
            entries = Counter(rooms).most_common()
            lines += [f"  {count:4}  {room}" for room, count in entries]
        return "\n".join(lines)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or threading.current_thread() is not threading.main_thread():
            return
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            return
        room = path.relative_to(ROOT)
        if room.parts[0] in PARTS:
            self.entered.append(Entered(str(room), frame.f_code.co_qualname, _depth(frame)))


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def chain(name: str) -> list[bytes]:
    """Digests of new blocks."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(BLOCKS)]


async def shortest(call: Callable[[int], Awaitable[object]]) -> Walk:
    """The shortest of several runs of one call; `call` takes the number of the run."""
    runs = []
    for number in range(_RUNS):
        run = Walk()
        with run.recorded():
            await call(number)
        runs.append(run)
        await asyncio.sleep(_SETTLED_S)
    return min(runs, key=lambda run: len(run.rooms))


async def walks(scheme: str) -> dict[str, Walk]:
    """A write, a match, reads and a demotion over one transport, by name."""
    found: dict[str, Walk] = {}
    blocks = [bytes([i]) * BLOCK_SIZE for i in range(BLOCKS)]
    buffers = [bytearray(BLOCK_SIZE) for _ in range(BLOCKS)]
    async with dev.serve("64MiB") as running, _client(running, scheme) as pool:
        await pool.write(NAMESPACE, chain("first"), blocks)  # connects
        await asyncio.sleep(_SETTLED_S)
        match = await pool.match(NAMESPACE, chain("first"))
        calls: dict[str, Callable[[int], Awaitable[object]]] = {
            "write": lambda number: pool.write(NAMESPACE, chain(f"run {number}"), blocks),
            "match": lambda _: pool.match(NAMESPACE, chain("first")),
            "read with a match": lambda _: pool.read(
                NAMESPACE, chain("first"), buffers, match=match
            ),
            "read from where it was cached": lambda _: pool.read(
                NAMESPACE, chain("run 0"), buffers
            ),
        }
        for name, call in calls.items():
            found[name] = await shortest(call)
    with TemporaryDirectory() as folder:
        tiers = ("dram:8MiB", f"nvme:{folder}/blocks:64MiB")
        async with dev.serve("8MiB", tiers=tiers) as running, _client(running, scheme) as pool:
            await pool.write(NAMESPACE, chain("first"), blocks)
            await asyncio.sleep(_SETTLED_S)
            await pool.write(NAMESPACE, chain("second"), blocks)
            demotion = Walk()
            with demotion.recorded():
                await asyncio.sleep(_SETTLED_S)
            found["demotion, after the write"] = demotion
    return found


def _client(running: dev.Dev, scheme: str) -> AbstractAsyncContextManager[Pool]:
    return running.pool(ClientConfig(masters=[running.address], transports=[scheme]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scheme", choices=["inproc", "tcp", "shm"])
    parser.add_argument("--calls", action="store_true", help="print every function, in order")
    options = parser.parse_args()
    for name, recorded in asyncio.run(walks(options.scheme)).items():
        print(recorded.report(f"{options.scheme}: {name}", calls=options.calls))


if __name__ == "__main__":
    main()
