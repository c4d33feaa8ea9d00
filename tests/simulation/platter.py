"""The bytes of a simulated disk and its faults; `disk.py` has the table of faults."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpool.errors import Unavailable, UsageError
from kvpool.protocols.persistent_tier import Record
from tests.simulation.loop import SimLoop

if TYPE_CHECKING:
    from tests.simulation.disk import SimDisk, Transfer

#: Bytes of a page of the page cache.
PAGE: Final = 4096


@dataclass(slots=True)
class DiskCondition:
    """The faults that are active now; the methods of `Platter` change them."""

    slowness: float = 1.0
    stuck: bool = False
    full: bool = False
    failing: float = 0.0  # share of calls that raise EIO
    lost: float = 0.0  # share of writes
    misdirected: float = 0.0  # share of writes


class Damage(NamedTuple):
    """Bytes that may differ from the last write there, and the fault that changed them."""

    what: str
    start: int
    stop: int


class Platter:
    """The bytes of one disk, and its faults. All randomness comes from `rng`."""

    def __init__(
        self,
        loop: SimLoop,
        size: int,
        rng: random.Random,
        *,
        name: str = "disk",
        head: bytes = b"",
    ) -> None:
        """All zeros, except for the `head` that a new file begins with."""
        self.loop = loop
        self.size = size
        self.rng = rng
        self.name = name
        self.memory = bytearray(head.ljust(size, b"\0"))
        self.condition = DiskCondition()
        #: A sector is written completely or not at all.
        self.sector = rng.choice([512, PAGE])
        self.mode = rng.choice(["O_DIRECT", "buffered"])
        self.latency_s = rng.choice([0.00005, 0.0005, 0.005])
        self.bytes_per_s = rng.choice([50e6, 500e6, 2e9])
        self.queue_depth = rng.choice([1, 4, 16])
        #: A power cut may undo writes that are younger than this.
        self.unsynced_s = rng.choice([0.05, 1.0, 5.0])
        self.unreadable: set[int] = set()  # sectors
        self.damaged: list[Damage] = []  # until the bytes are written again
        self.damage_log: list[Damage] = []  # all damage since the beginning
        self.counts: Counter[str] = Counter()  # of faults, by name
        self.owner: SimDisk | None = None
        #: Called for each piece that moves while its process is alive, with: whether it is a write,
        #: the position on the disk, and the memory on the other side.
        self.watch: Callable[[bool, int, memoryview], None] = lambda *_: None
        #: Called with the records that its process is about to write.
        self.recorded: Callable[[Sequence[Record]], None] = lambda _: None
        #: Ranges that a fault should hit: used extents and headers. If empty, any range.
        self.targets: Callable[[], Sequence[tuple[int, int]]] = list
        self._unsynced: deque[tuple[float, int, bytes]] = deque()  # with the bytes before the write
        self._hanging: list[Transfer] = []

    def __repr__(self) -> str:
        return f"<Platter {self.name}, {self.size} bytes, {self.condition}>"

    # --- faults ---------------------------------------------------------------------------

    def slow(self, factor: float) -> None:
        """Calls that begin now take `factor` times as long."""
        self.condition.slowness = factor

    def stick(self) -> None:
        """Calls make no progress, even if they are cancelled."""
        self.condition.stuck = True

    def fill(self) -> None:
        """Writes fail. (The file is preallocated, but some file systems copy on write.)"""
        self.condition.full = True

    def fail(self, share: float) -> None:
        """Any call may raise EIO."""
        self.condition.failing = share

    def lose(self, share: float) -> None:
        """Writes return, but nothing was written. Only checksums can detect this."""
        self.condition.lost = share

    def misdirect(self, share: float) -> None:
        """Writes go to another position and damage it. Only checksums can detect this."""
        self.condition.misdirected = share

    def make_unreadable(self, start: int, stop: int) -> None:
        """Reads of these sectors fail until the next write, when a disk replaces them."""
        self.unreadable.update(range(start // self.sector, -(-stop // self.sector)))
        self.counts["unreadable"] += 1
        self.damage_log.append(Damage("unreadable", start, stop))

    def rot(self, start: int, stop: int, bits: int = 1) -> None:
        """Flip some bits there. Only checksums can detect this."""
        for _ in range(bits):
            at = self.rng.randrange(start, stop)
            self.memory[at] ^= 1 << self.rng.randrange(8)
            self._damage("rot", at, 1)

    def heal(self) -> None:
        """End all faults that can end; waiting calls continue."""
        self.condition = DiskCondition()
        hanging, self._hanging = self._hanging, []
        for transfer in hanging:
            self._step(transfer)

    def power_cut(self) -> None:
        """Keep each of the last writes completely, in some sectors, or not at all."""
        if self.owner is not None:
            raise UsageError(f"{self.name} is open: kill its process first")
        self._forget_synced()
        while self._unsynced:
            _, start, before = self._unsynced.pop()
            for piece in self._surviving_sectors(start, before):
                stop = piece.start + len(piece.data)
                if self.memory[piece.start : stop] != piece.data:
                    self.memory[piece.start : stop] = piece.data
                    self._damage("power cut", piece.start, len(piece.data))

    def is_damaged(self, start: int, stop: int) -> bool:
        """A read there may fail, or return other bytes than the last write."""
        return bool(
            self.damages(start, stop)
            or (self.unreadable and self._sectors(start, stop) & self.unreadable)
        )

    def damages(self, start: int, stop: int) -> set[str]:
        """The faults that have changed these bytes since their last write."""
        return {one.what for one in self.damaged if one.start < stop and start < one.stop}

    @property
    def hung_s(self) -> float:
        """Seconds for which the oldest waiting call of a living process has hung."""
        waiting = [transfer.began for transfer in self._hanging if not transfer.dropped]
        return self.loop.now - min(waiting, default=self.loop.now)

    def random_range(self) -> tuple[int, int]:
        """A range of bytes, often one that is in use."""
        targets = self.targets()
        if targets and self.rng.random() < 0.8:
            return self.rng.choice(targets)
        start = self.rng.randrange(self.size // self.sector) * self.sector
        return start, start + self.sector

    def random_start(self, size: int) -> int:
        """The start of some sectors, often in a range that is in use."""
        at = self.rng.randrange(*self.random_range())
        return min(at, self.size - size) // self.sector * self.sector

    def _damage(self, what: str, start: int, size: int) -> None:
        self.counts[what] += 1
        self.damaged.append(Damage(what, start, start + size))
        self.damage_log.append(self.damaged[-1])

    def _mend(self, start: int, stop: int) -> None:
        """These bytes were written again, so they are no longer damaged."""
        kept = []
        for what, first, last in self.damaged:
            if first < min(start, last):
                kept.append(Damage(what, first, min(start, last)))
            if max(stop, first) < last:
                kept.append(Damage(what, max(stop, first), last))
        self.damaged = kept

    # --- what the handle calls --------------------------------------------------------------

    def begin(self, transfer: Transfer) -> None:
        """Draw the time of each piece of the transfer, and its faults."""
        rng, size = self.rng, len(transfer.buffer)
        transfer.began = self.loop.now
        takes_s = rng.expovariate(1 / self.latency_s) + size / self.bytes_per_s
        end = self.loop.now + takes_s * self.condition.slowness
        edges = range(self.sector - transfer.offset % self.sector, size, self.sector)
        cuts = sorted(rng.sample(edges, min(len(edges), rng.choice([0, 0, 1, 2]))))
        times = sorted(rng.uniform(self.loop.now, end) for _ in range(len(cuts) + 1))
        bounds = [0, *cuts, size]
        for when, start, stop in zip(times, bounds[:-1], bounds[1:], strict=True):
            transfer.steps.append(TransferStep(when, start, stop))
        transfer.steps.append(TransferStep(end, size, size))
        transfer.fails = rng.random() < self.condition.failing
        if transfer.writes:
            self._divert(transfer)
        self._wait(transfer)

    def _divert(self, transfer: Transfer) -> None:
        size = len(transfer.buffer)
        if self.rng.random() < self.condition.lost:
            transfer.target = None
            self._damage("lost", transfer.offset, size)
        elif self.rng.random() < self.condition.misdirected:
            places = range(transfer.offset % self.sector, self.size - size + 1, self.sector)
            near = self.random_start(size) + transfer.offset % self.sector
            transfer.target = near if near in places else self.rng.choice(places)
            self._damage("misdirected", transfer.offset, size)
            self._damage("misdirected", transfer.target, size)

    def _wait(self, transfer: Transfer) -> None:
        self.loop.at(max(self.loop.now, transfer.steps[0].when), self._step, transfer)

    def _step(self, transfer: Transfer) -> None:
        if transfer.dropped:
            return
        if self.condition.stuck:
            self.counts["hung"] += 1
            self._hanging.append(transfer)
            return
        step = transfer.steps.popleft()
        if transfer.error is None and step.stop > step.start:
            number = self._move(transfer, step.start, step.stop)
            if number:
                self.counts[errno.errorcode[number]] += 1
                self.counts["failed reads"] += not transfer.writes
                said = f"{errno.errorcode[number]}: {os.strerror(number)}"
                transfer.error = Unavailable(f"{self.name}: {said}")
                if transfer.writes:
                    self._damage("refused", transfer.offset, len(transfer.buffer))
        if transfer.steps:
            self._wait(transfer)
        else:
            transfer.disk.finish(transfer)

    def _move(self, transfer: Transfer, start: int, stop: int) -> int:
        """Move one piece; returns the errno, or 0."""
        self.watch(transfer.writes, transfer.offset + start, transfer.buffer[start:stop])
        if transfer.fails:
            return errno.EIO
        if transfer.writes:
            if self.condition.full:
                return errno.ENOSPC
            self._store(transfer, start, bytes(transfer.buffer[start:stop]))
            return 0
        first, last = transfer.offset + start, transfer.offset + stop
        if self.unreadable and self._sectors(first, last) & self.unreadable:
            return errno.EIO
        transfer.buffer[start:stop] = self.memory[first:last]
        return 0

    def _store(self, transfer: Transfer, start: int, data: bytes) -> None:
        if transfer.target is None:
            return
        at = transfer.target + start
        self._forget_synced()
        self._unsynced.append((self.loop.now, at, bytes(self.memory[at : at + len(data)])))
        self.memory[at : at + len(data)] = data
        if self.unreadable:
            self.unreadable -= self._sectors(at, at + len(data))
        if transfer.target != transfer.offset:
            self._damage("misdirected", at, len(data))
        elif self.damaged:
            self._mend(at, at + len(data))

    def drop(self, transfer: Transfer) -> None:
        """The process has died: of the sectors that are not written yet, write some or none."""
        transfer.dropped = True
        if transfer.writes and transfer.error is None and not self.condition.full:
            for step in transfer.steps:
                data = bytes(transfer.buffer[step.start : step.stop])
                for piece in self._surviving_sectors(transfer.offset + step.start, data):
                    self._store(transfer, piece.start - transfer.offset, piece.data)
                    self.counts["torn"] += len(piece.data) < len(transfer.buffer)

    def _surviving_sectors(self, start: int, data: bytes) -> Iterator[_Piece]:
        """All sectors, none, or some."""
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


class TransferStep(NamedTuple):
    when: float
    start: int
    stop: int


class _Piece(NamedTuple):
    start: int
    data: bytes


class DiskFault(NamedTuple):
    """A fault that the nemesis can draw: `begin` starts it, `Platter.heal` ends it."""

    name: str
    begin: Callable[[Platter], None]
    #: Only a checksum can detect it.
    silent: bool = False


def _rot(platter: Platter) -> None:
    """Flip a bit in one place or in eight."""
    for _ in range(platter.rng.choice([1, 8])):
        platter.rot(*platter.random_range())


def _range(platter: Platter) -> tuple[int, int]:
    """One sector, or eight adjacent ones."""
    size = platter.rng.choice([1, 8]) * platter.sector
    start = platter.random_start(size)
    return start, start + size


#: Faults of a disk while its server runs. (A power cut is a kind of kill.)
DISK_FAULTS: Final = (
    DiskFault("slow disk", lambda p: p.slow(p.rng.choice([10, 100, 1000]))),
    DiskFault("stuck disk", lambda p: p.stick()),
    DiskFault("full disk", lambda p: p.fill()),
    DiskFault("failing disk", lambda p: p.fail(p.rng.choice([0.02, 0.3, 1.0]))),
    DiskFault("unreadable sectors", lambda p: p.make_unreadable(*_range(p))),
    DiskFault("rot on disk", _rot, True),
    DiskFault("lost writes", lambda p: p.lose(p.rng.choice([0.02, 0.3])), True),
    DiskFault("misdirected writes", lambda p: p.misdirect(p.rng.choice([0.02, 0.3])), True),
)
