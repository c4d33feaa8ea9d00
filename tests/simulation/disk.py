"""A simulated disk below the real format code: what lies on it, and what can go wrong with it.

The `Platter` is the node's: its bytes outlive every process. A `SimDisk` is one process's open
handle, which dies with it. Calls take virtual time. A write takes its bytes from the caller's
buffer in pieces, some time between start and end of the call; whoever changes the buffer before the
end has written something else. A read fills its buffer just so.

After *kill -9* what had returned is there, as in a page cache; of a write that had not, any sectors
may be. After a *power cut* that holds for the writes of the last moments, too.

    fault                    what it does                                          ends
    slow, stick              calls take longer; they do not end at all             heal
    fill                     writes raise ENOSPC, a part of them may be there      heal
    fail                     reads and writes raise EIO, now and then              heal
    spoil                    reads of these sectors raise EIO                      when written to
    rot                      bits flip, silently                                   never
    lose, misdirect          writes return and went nowhere; went elsewhere        heal
    power_cut                see above; to be called after the kill                at once

A process that waits for a stuck disk can be killed here at once; with a real one that may take as
long as the disk. (Torn at any sector, lost and misdirected writes: the fault model of TigerBeetle's
simulator.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.errors import Closed, ConfigError, KvpoolError, Unavailable, UsageError
from tests.simulation.loop import PROCESS, Process, SimLoop

#: What the page cache counts in.
PAGE: Final = 4096


@dataclass(slots=True)
class Wear:
    """How bad it is at the moment; the methods of `Platter` change it."""

    slowness: float = 1.0
    stuck: bool = False
    full: bool = False
    failing: float = 0.0  # share of calls that raise EIO
    lost: float = 0.0  # share of writes
    misdirected: float = 0.0  # share of writes


class Damage(NamedTuple):
    """Bytes that need not be what was written there last, and what did that."""

    what: str
    start: int
    stop: int


class Platter:
    """The bytes of one disk, and its faults. Everything random comes from `rng`."""

    def __init__(
        self,
        loop: SimLoop,
        size: int,
        rng: random.Random,
        *,
        name: str = "disk",
        head: bytes = b"",
    ) -> None:
        """All zeros, but for the `head` that a new file begins with."""
        self.loop = loop
        self.size = size
        self.rng = rng
        self.name = name
        self.memory = bytearray(head.ljust(size, b"\0"))
        self.wear = Wear()
        #: Written whole or not at all.
        self.sector = rng.choice([512, PAGE])
        self.mode = rng.choice(["O_DIRECT", "buffered"])
        self.latency_s = rng.choice([0.00005, 0.0005, 0.005])
        self.bytes_per_s = rng.choice([50e6, 500e6, 2e9])
        self.queue_depth = rng.choice([1, 4, 16])
        #: Writes younger than this are not safe from a power cut.
        self.unsynced_s = rng.choice([0.05, 1.0, 5.0])
        self.spoilt: set[int] = set()  # sectors
        self.damaged: list[Damage] = []  # until it is written over
        self.scars: list[Damage] = []  # all that ever was
        self.counts: Counter[str] = Counter()  # of what has gone wrong
        self.owner: SimDisk | None = None
        #: Asked when a piece of a call moves, while its process lives: does it write, to or from
        #: which position, and from or into which memory.
        self.watch: Callable[[bool, int, memoryview], None] = lambda *_: None
        #: Where something lies that is worth spoiling; anywhere if it is empty.
        self.worth: Callable[[], Sequence[tuple[int, int]]] = list
        self._unsynced: deque[tuple[float, int, bytes]] = deque()  # what was there before
        self._hanging: list[_Transfer] = []

    def __repr__(self) -> str:
        return f"<Platter {self.name}, {self.size} bytes, {self.wear}>"

    # --- faults ---------------------------------------------------------------------------

    def slow(self, factor: float) -> None:
        """Calls that begin now take `factor` times as long."""
        self.wear.slowness = factor

    def stick(self) -> None:
        """Calls do not get on, not even those that are cancelled."""
        self.wear.stuck = True

    def fill(self) -> None:
        """Nothing can be written. (It was preallocated; some file systems copy on write.)"""
        self.wear.full = True

    def fail(self, share: float) -> None:
        """Any call may raise EIO."""
        self.wear.failing = share

    def lose(self, share: float) -> None:
        """Writes return, and nothing was written. Only checksums can tell."""
        self.wear.lost = share

    def misdirect(self, share: float) -> None:
        """Writes go to another place, and spoil what is there. Only checksums can tell."""
        self.wear.misdirected = share

    def spoil(self, start: int, stop: int) -> None:
        """The sectors there cannot be read, until they are written to: disks replace them then."""
        self.spoilt.update(range(start // self.sector, -(-stop // self.sector)))
        self.counts["spoilt"] += 1
        self.scars.append(Damage("spoilt", start, stop))

    def rot(self, start: int, stop: int, bits: int = 1) -> None:
        """Flip some bits there. Only checksums can tell."""
        for _ in range(bits):
            at = self.rng.randrange(start, stop)
            self.memory[at] ^= 1 << self.rng.randrange(8)
            self._damage("rot", at, 1)

    def heal(self) -> None:
        """Faults end that can; what waited goes on."""
        self.wear = Wear()
        hanging, self._hanging = self._hanging, []
        for transfer in hanging:
            self._step(transfer)

    def power_cut(self) -> None:
        """Each write of the last moments is there, or not, or some sectors of it are."""
        if self.owner is not None:
            raise UsageError(f"{self.name} is open: kill its process first")
        self._forget_synced()
        while self._unsynced:
            _, start, before = self._unsynced.pop()
            for piece in self._survivors(start, before):
                stop = piece.start + len(piece.data)
                if self.memory[piece.start : stop] != piece.data:
                    self.memory[piece.start : stop] = piece.data
                    self._damage("power cut", piece.start, len(piece.data))

    def is_damaged(self, start: int, stop: int) -> bool:
        """What is read there may be something else than what was written, or nothing."""
        return bool(
            self.damages(start, stop) or (self.spoilt and self._sectors(start, stop) & self.spoilt)
        )

    def damages(self, start: int, stop: int) -> set[str]:
        """What has been done to these bytes since they were written."""
        return {one.what for one in self.damaged if one.start < stop and start < one.stop}

    @property
    def hung_s(self) -> float:
        """For how long a call of a living process has been hanging."""
        waiting = [transfer.began for transfer in self._hanging if not transfer.dropped]
        return self.loop.now - min(waiting, default=self.loop.now)

    def spot(self) -> tuple[int, int]:
        """Some bytes, often those of something that lies there."""
        worth = self.worth()
        if worth and self.rng.random() < 0.8:
            return self.rng.choice(worth)
        start = self.rng.randrange(self.size // self.sector) * self.sector
        return start, start + self.sector

    def place(self, size: int) -> int:
        """The start of some sectors, often where something lies."""
        at = self.rng.randrange(*self.spot())
        return min(at, self.size - size) // self.sector * self.sector

    def _damage(self, what: str, start: int, size: int) -> None:
        self.counts[what] += 1
        self.damaged.append(Damage(what, start, start + size))
        self.scars.append(self.damaged[-1])

    def _mend(self, start: int, stop: int) -> None:
        """These bytes are what was written last, again."""
        kept = []
        for what, first, last in self.damaged:
            if first < min(start, last):
                kept.append(Damage(what, first, min(start, last)))
            if max(stop, first) < last:
                kept.append(Damage(what, max(stop, first), last))
        self.damaged = kept

    # --- what the handle asks for -----------------------------------------------------------

    def begin(self, transfer: _Transfer) -> None:
        """Draw when which piece of it moves, and what becomes of it."""
        rng, size = self.rng, len(transfer.buffer)
        transfer.began = self.loop.now
        takes_s = rng.expovariate(1 / self.latency_s) + size / self.bytes_per_s
        end = self.loop.now + takes_s * self.wear.slowness
        edges = range(self.sector - transfer.offset % self.sector, size, self.sector)
        cuts = sorted(rng.sample(edges, min(len(edges), rng.choice([0, 0, 1, 2]))))
        times = sorted(rng.uniform(self.loop.now, end) for _ in range(len(cuts) + 1))
        bounds = [0, *cuts, size]
        for when, start, stop in zip(times, bounds[:-1], bounds[1:], strict=True):
            transfer.steps.append(_Step(when, start, stop))
        transfer.steps.append(_Step(end, size, size))
        transfer.fails = rng.random() < self.wear.failing
        if transfer.writes:
            self._divert(transfer)
        self._wait(transfer)

    def _divert(self, transfer: _Transfer) -> None:
        size = len(transfer.buffer)
        if self.rng.random() < self.wear.lost:
            transfer.target = None
            self._damage("lost", transfer.offset, size)
        elif self.rng.random() < self.wear.misdirected:
            places = range(transfer.offset % self.sector, self.size - size + 1, self.sector)
            near = self.place(size) + transfer.offset % self.sector
            transfer.target = near if near in places else self.rng.choice(places)
            self._damage("misdirected", transfer.offset, size)
            self._damage("misdirected", transfer.target, size)

    def _wait(self, transfer: _Transfer) -> None:
        self.loop.at(max(self.loop.now, transfer.steps[0].when), self._step, transfer)

    def _step(self, transfer: _Transfer) -> None:
        if transfer.dropped:
            return
        if self.wear.stuck:
            self.counts["hung"] += 1
            self._hanging.append(transfer)
            return
        step = transfer.steps.popleft()
        if transfer.error is None and step.stop > step.start:
            number = self._move(transfer, step.start, step.stop)
            if number:
                self.counts[errno.errorcode[number]] += 1
                said = f"{errno.errorcode[number]}: {os.strerror(number)}"
                transfer.error = Unavailable(f"{self.name}: {said}")
                if transfer.writes:
                    self._damage("refused", transfer.offset, len(transfer.buffer))
        if transfer.steps:
            self._wait(transfer)
        else:
            transfer.disk.finish(transfer)

    def _move(self, transfer: _Transfer, start: int, stop: int) -> int:
        """One piece; the number of the error, or 0."""
        self.watch(transfer.writes, transfer.offset + start, transfer.buffer[start:stop])
        if transfer.fails:
            return errno.EIO
        if transfer.writes:
            if self.wear.full:
                return errno.ENOSPC
            self._store(transfer, start, bytes(transfer.buffer[start:stop]))
            return 0
        first, last = transfer.offset + start, transfer.offset + stop
        if self.spoilt and self._sectors(first, last) & self.spoilt:
            return errno.EIO
        transfer.buffer[start:stop] = self.memory[first:last]
        return 0

    def _store(self, transfer: _Transfer, start: int, data: bytes) -> None:
        if transfer.target is None:
            return
        at = transfer.target + start
        self._forget_synced()
        self._unsynced.append((self.loop.now, at, bytes(self.memory[at : at + len(data)])))
        self.memory[at : at + len(data)] = data
        if self.spoilt:
            self.spoilt -= self._sectors(at, at + len(data))
        if transfer.target != transfer.offset:
            self._damage("misdirected", at, len(data))
        elif self.damaged:
            self._mend(at, at + len(data))

    def drop(self, transfer: _Transfer) -> None:
        """Its process has died: any sectors of what it had not written yet are written, or not."""
        transfer.dropped = True
        if transfer.writes and transfer.error is None and not self.wear.full:
            for step in transfer.steps:
                data = bytes(transfer.buffer[step.start : step.stop])
                for piece in self._survivors(transfer.offset + step.start, data):
                    self._store(transfer, piece.start - transfer.offset, piece.data)
                    self.counts["torn"] += len(piece.data) < len(transfer.buffer)

    def _survivors(self, start: int, data: bytes) -> Iterator[_Piece]:
        """All of it, nothing, or some sectors."""
        share = self.rng.choice([0.0, 0.5, 1.0])
        at = 0
        while at < len(data):
            stop = min(len(data), at + self.sector - (start + at) % self.sector)
            if self.rng.random() < share:
                yield _Piece(start + at, data[at:stop])
            at = stop

    def _sectors(self, start: int, stop: int) -> set[int]:
        return set(range(start // self.sector, -(-stop // self.sector)))

    def _forget_synced(self) -> None:
        while self._unsynced and self._unsynced[0][0] < self.loop.now - self.unsynced_s:
            self._unsynced.popleft()


class SimDisk:
    """One process's handle on a platter (`kvpool_tiers.disk.Disk`). Make it in that process."""

    def __init__(self, platter: Platter) -> None:
        """Raises ConfigError while another handle is open: the file is locked."""
        if platter.owner is not None:
            raise ConfigError(f"{platter.name} is in use by {platter.owner._process.name}")
        platter.owner = self
        self._platter = platter
        self._process: Process = PROCESS.get()
        self._process.on_death.append(self._died)
        self._queue: deque[_Transfer] = deque()
        self._running: dict[_Transfer, None] = {}
        self._closed = False

    @property
    def size(self) -> int:
        return self._platter.size

    @property
    def mode(self) -> str:
        return self._platter.mode

    async def read(self, offset: int, buffer: memoryview) -> None:
        await self._call(_Transfer(self, offset, buffer, writes=False))

    async def write(self, offset: int, buffer: memoryview) -> None:
        await self._call(_Transfer(self, offset, buffer, writes=True))

    def close(self) -> None:
        """What has not begun ends with Closed; the platter is free when the rest has ended."""
        self._closed = True
        while self._queue:
            transfer = self._queue.popleft()
            transfer.error = Closed("the disk is closed")
            transfer.end()
        self._release()

    async def _call(self, transfer: _Transfer) -> None:
        if self._closed:
            raise Closed("the disk is closed")
        stop = transfer.offset + len(transfer.buffer)
        if not 0 <= transfer.offset <= stop <= self.size:
            raise UsageError(f"{transfer.offset} to {stop} of a disk of {self.size} bytes")
        self._queue.append(transfer)
        self._start()
        try:
            await asyncio.shield(transfer.done)
        except asyncio.CancelledError:
            if transfer in self._queue:
                self._queue.remove(transfer)
            else:  # however often it is cancelled, the disk is at work on its buffer
                while not transfer.done.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([transfer.done])
            raise
        if transfer.error is not None:
            raise transfer.error

    def _start(self) -> None:
        while self._queue and len(self._running) < self._platter.queue_depth:
            transfer = self._queue.popleft()
            self._check_coherent(transfer)
            self._running[transfer] = None
            self._platter.begin(transfer)

    def _check_coherent(self, transfer: _Transfer) -> None:
        """No page may be written past the page cache and through it at the same time."""
        if self.mode == "O_DIRECT" and transfer.writes:
            for other in self._running:
                if (
                    other.writes
                    and other.is_direct is not transfer.is_direct
                    and other.first_page < transfer.end_page
                    and transfer.first_page < other.end_page
                ):
                    self._platter.loop.fail(
                        f"{self._platter.name}: a page at {transfer.offset} is written past the "
                        f"page cache and through it at once ({other.offset})"
                    )

    def finish(self, transfer: _Transfer) -> None:
        """The disk is through with it; its caller hears when the process runs."""
        del self._running[transfer]
        self._platter.loop.call_soon(transfer.end, context=self._process.context)
        self._start()
        if self._closed:
            self._release()

    @property
    def is_writing(self) -> bool:
        """The disk is at work on a write."""
        return any(transfer.writes for transfer in self._running)

    def _died(self) -> None:
        self._closed = True
        self._queue.clear()
        for transfer in self._running:
            self._platter.drop(transfer)
        self._running.clear()
        self._release()

    def _release(self) -> None:
        if not self._running and self._platter.owner is self:
            self._platter.owner = None


class _Step(NamedTuple):
    when: float
    start: int
    stop: int


class _Piece(NamedTuple):
    start: int
    data: bytes


class _Transfer:
    """One call, from its start to its end."""

    def __init__(self, disk: SimDisk, offset: int, buffer: memoryview, *, writes: bool) -> None:
        self.disk = disk
        self.offset = offset
        self.buffer = buffer
        self.writes = writes
        self.target: int | None = offset  # None: nowhere
        self.fails = False
        self.began = 0.0
        self.steps: deque[_Step] = deque()
        self.error: KvpoolError | None = None
        self.dropped = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_direct(self) -> bool:
        return self.offset % PAGE == len(self.buffer) % PAGE == 0

    @property
    def first_page(self) -> int:
        return self.offset // PAGE

    @property
    def end_page(self) -> int:
        return -(-(self.offset + len(self.buffer)) // PAGE)

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class DiskFault(NamedTuple):
    """A fault as the nemesis draws it: `begin` it, and `Platter.heal` ends it."""

    name: str
    begin: Callable[[Platter], None]
    #: It is silent: nothing but a checksum could tell.
    silent: bool = False


def _rot(platter: Platter) -> None:
    """Flip a bit in one place or in several."""
    for _ in range(platter.rng.choice([1, 8])):
        platter.rot(*platter.spot())


def _range(platter: Platter) -> tuple[int, int]:
    """Some sectors near each other."""
    size = platter.rng.choice([1, 8]) * platter.sector
    start = platter.place(size)
    return start, start + size


#: What a nemesis can do to a disk while its server runs. A power cut is a kind of kill.
DISK_FAULTS: Final = (
    DiskFault("slow disk", lambda p: p.slow(p.rng.choice([10, 100, 1000]))),
    DiskFault("stuck disk", lambda p: p.stick()),
    DiskFault("full disk", lambda p: p.fill()),
    DiskFault("failing disk", lambda p: p.fail(p.rng.choice([0.02, 0.3, 1.0]))),
    DiskFault("spoilt sectors", lambda p: p.spoil(*_range(p))),
    DiskFault("rot on disk", _rot, True),
    DiskFault("lost writes", lambda p: p.lose(p.rng.choice([0.02, 0.3])), True),
    DiskFault("misdirected writes", lambda p: p.misdirect(p.rng.choice([0.02, 0.3])), True),
)
