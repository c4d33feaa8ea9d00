"""What a master's messages cost: microseconds of CPU of the real one, measured in this run.

A `Master` with a map of `blocks` receives encoded messages and encodes its answers; what sockets
and the event loop add is the difference to a master in a process of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from kvpool.client.opening import connect
from kvpool.config import ClientConfig, MasterConfig
from kvpool.master.service import Master
from kvpool.protocols.network import Caller, Network
from kvpool.tools.dry_pool import digest_of
from kvpool.tools.subprocesses import process_of
from kvpool.types import Namespace, ReadStatus, ServerStats
from kvpool.wire import messages as wire

_NAMESPACE: Final = Namespace("model")
_SIZE: Final = 16
_CHAIN: Final = 2048
_STORED: Final = 256  # blocks in a message while the map is filled
_SERVERS: Final = 16
_ROUND: Final = 64  # messages
_TOKEN: Final = bytes(16)
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of CPU of a message, and of each block in it."""

    message: float
    block: float

    def of(self, blocks: float) -> float:
        """Of a message with so many blocks."""
        return self.message + self.block * blocks

    def half(self) -> Cost:
        """As cheap as that."""
        return Cost(self.message / 2, self.block / 2)


@dataclass(frozen=True, slots=True)
class MasterCosts:
    """Of each kind of message, without `socket`: what each message costs besides. `bytes` is the
    memory of a block in the map."""

    blocks: int  # in the map
    find: Cost  # of blocks that nobody has asked for since they came
    find_again: Cost
    place: Cost
    stored: Cost  # an announcement
    removed: Cost
    heartbeat: float
    socket: float
    bytes: float


async def measured(blocks: int, lookups: int = 2_000) -> MasterCosts:
    """Takes some 15 s of CPU time for a million blocks. Raises ServerLost if no master starts."""
    probe = _Probe()
    before = _resident()
    for first in range(0, blocks, _STORED):
        probe.handle(probe.announce(first, _STORED, ReadStatus.HIT))
    resident = (_resident() - before) / blocks
    fresh = itertools.count(blocks, _STORED)
    gone = itertools.count(0, _STORED)
    chains = itertools.cycle(range(blocks // 2, blocks - _CHAIN + 1, _CHAIN))
    finds = (16, _CHAIN)
    return MasterCosts(
        blocks,
        probe.cost(lambda n: probe.find(next(chains), n), finds),
        probe.cost(lambda n: probe.find(next(chains), n), finds, again=True),
        probe.cost(lambda n: probe.place(next(chains), n), (1, _STORED)),
        probe.cost(lambda n: probe.announce(next(fresh), n, ReadStatus.HIT), (1, _STORED)),
        probe.cost(lambda n: probe.announce(next(gone), n, ReadStatus.EVICTED), (1, _STORED)),
        probe.cost(lambda n: probe.heartbeat(), (1, 2)).of(1),
        await _socket(probe, lookups),
        resident,
    )


class _Probe:
    """A real master, and the messages of some servers and clients."""

    def __init__(self) -> None:
        self._master = Master(MasterConfig(), cast(Network, None))  # nothing listens
        self._sent = [0] * _SERVERS
        for number in range(_SERVERS):
            self.handle(
                wire.Register(
                    *(f"server-{number}", 1, _TOKEN, f"host-{number}", ["tcp://127.0.0.1:1"]),
                    *(["dram"], 1 << 45),
                )
            )

    def handle(self, message: wire.Message) -> None:
        """As it comes from a socket."""
        self._master.handle(*wire.encode(message), Caller("127.0.0.1"))

    def cost(
        self, make: Callable[[int], wire.Message], sizes: tuple[int, int], *, again: bool = False
    ) -> Cost:
        """Of two sizes of message; the least of three rounds, because others use this machine.

        With `again` the master has handled the same message before.
        """
        small, large = (min(self._round(make, size, again) for _ in range(3)) for size in sizes)
        block = max(0.0, (large - small) / (sizes[1] - sizes[0]))
        return Cost(max(0.0, small - block * sizes[0]), block)

    def _round(self, make: Callable[[int], wire.Message], size: int, again: bool) -> float:
        encoded = [wire.encode(make(size)) for _ in range(_ROUND)]
        for number, body in encoded if again else ():
            self._master.handle(number, body, Caller("127.0.0.1"))
        began = time.thread_time()
        for number, body in encoded:
            self._master.handle(number, body, Caller("127.0.0.1"))
        return (time.thread_time() - began) / _ROUND

    def announce(self, first: int, count: int, status: ReadStatus) -> wire.Message:
        """A stretch of blocks is there now, or not any more."""
        number = first // _CHAIN % _SERVERS
        self._sent[number] += 1
        change = wire.BlockChanges(
            _NAMESPACE.name, 1, _SIZE, _packed(first, count), 0, 0, int(status)
        )
        return wire.Announce(f"server-{number}", 1, _TOKEN, self._sent[number], [change])

    def find(self, first: int, count: int) -> wire.Message:
        """A prefix that is there."""
        return wire.Find(_NAMESPACE.name, 1, _SIZE, _packed(first, count), True)

    def place(self, first: int, count: int) -> wire.Message:
        """New blocks behind one that is there."""
        parent = digest_of(first)
        digests = _packed(1 << 50, count)
        return wire.Place(_NAMESPACE.name, 1, _SIZE, digests, parent, 4096, "host-1", 1)

    def heartbeat(self) -> wire.Message:
        return wire.Heartbeat("server-0", 1, _TOKEN, ServerStats())


def _packed(first: int, count: int) -> bytes:
    return b"".join(digest_of(id) for id in range(first, first + count))


async def _socket(probe: _Probe, lookups: int) -> float:
    """What a message costs in a process of its own, over a handled one."""
    chain = [digest_of(1)]
    async with process_of("kvpool", "master", "--bind", "127.0.0.1:0") as child:
        address = (await child.line()).split()[-1]
        async with await connect(config=ClientConfig(masters=[address])) as pool:
            began = _cpu(child.pid)
            for _ in range(lookups):
                await pool.match(_NAMESPACE, chain)
            spent = (_cpu(child.pid) - began) / lookups
    return max(0.0, spent - probe.cost(lambda n: probe.find(1 << 50, n), (1, 2)).of(1))


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
