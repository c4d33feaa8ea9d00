"""The NVMe tier over a simulated disk: random work, faults and kills; then what is found again?

One seed is one history: several lives of a server on one platter. In each, tasks write extents,
remember, read and forget them, with buffers that are scribbled over as soon as a call has ended;
the disk misbehaves; the process is killed at any moment, sometimes with the power. The next life
recovers, and is held to this:

- `recover` does not raise, unless the disk itself fails at that moment.
- What is found was remembered exactly so, and nobody had been told that it was forgotten.
- What somebody was told is remembered is found, unless its header, or the head of the file, was
  damaged, or could not be read.
- Found extents do not overlap, and their bytes are right. After silent damage they may be wrong;
  then the checksum says so.

    python -m tests.tiers.nvme_torture 0:500
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.errors import KvpoolError, Unavailable
from kvpool.protocols.persistent_tier import Record
from kvpool.types import ROOT, Namespace
from kvpool_tiers.nvme import format as nvme_format
from kvpool_tiers.nvme import namespaces as nvme_namespaces
from kvpool_tiers.nvme.format import (
    COPIES,
    HEADER_SIZE,
    SEALED_HEADER_SIZE,
    Geometry,
    pack_superblock,
)
from kvpool_tiers.nvme.tier import Nvme
from tests.simulation.disk import SimDisk
from tests.simulation.loop import Process, SimLoop, Violation
from tests.simulation.platter import DISK_FAULTS, Platter
from tests.simulation.sandbox import sandbox

ALIGNMENT: Final = 4096
NAMESPACES: Final = [
    Namespace("one"),
    Namespace("two/parts", parts=2),
    Namespace("n" * 512),
    *map(Namespace, "abc"),
]


def content(record: Record) -> bytes:
    """The bytes of an extent: another generation has others, no two sectors are alike."""
    return random.Random(record.generation).randbytes(record.size)


def by_generation(record: Record) -> int:
    return record.generation


def sum_of(data: bytes | bytearray, record: Record) -> int:
    return checksum(data, block_seed(namespace_seed(record.namespace, record.part), record.digest))


@dataclass(slots=True)
class HistoryReport:
    """What happened in one history."""

    seed: int
    failure: str | None = None
    counts: Counter[str] = field(default_factory=Counter)


class Books:
    """What a server would know, and what may be true on the platter. Outlives the processes."""

    def __init__(self, units: int) -> None:
        self.free = set(range(units))
        self.live: dict[int, Record] = {}  # offset -> remembered, and somebody was told so
        self.possible: set[Record] = set()  # may be on the platter: neither told, nor excluded
        self.gone: set[Record] = set()  # forgotten, as somebody was told; or not found any more
        self.ghosts: set[Record] = set()  # those of them that were found all the same, after damage
        self.pins: Counter[int] = Counter()  # by offset
        self.generation = 0
        self.blind = False  # a life did not see all headers, and may have written over extents

    def units(self, offset: int, size: int) -> range:
        return range(offset // ALIGNMENT, -(-(offset + size) // ALIGNMENT))

    def take(self, size: int, rng: random.Random) -> int | None:
        """The offset of free grains in a row."""
        count = -(-size // ALIGNMENT)
        fits = [g for g in sorted(self.free) if self.free.issuperset(range(g, g + count))]
        if not fits:
            return None
        offset = rng.choice(fits) * ALIGNMENT
        self.free -= set(self.units(offset, size))
        return offset

    def unpinned(self) -> list[Record]:
        return [record for offset, record in self.live.items() if not self.pins[offset]]

    def give(self, record: Record) -> None:
        self.free |= set(self.units(record.offset, record.size))


class History:
    """One seed."""

    def __init__(self, seed: int, trace: bool = False, *, encrypt: bool = False) -> None:
        self.encrypt = encrypt
        self.salts = random.Random(f"{seed}/salts")
        self.rng = rng = random.Random(f"{seed}/torture")
        self.report = HistoryReport(seed)
        self.trace = trace
        self.loop = SimLoop(random.Random(f"{seed}/threads"), 0.001)  # type: ignore[abstract]
        self.capacity = ALIGNMENT * rng.choice([48, 100, 300])
        self.geometry = Geometry(
            self.capacity, ALIGNMENT, SEALED_HEADER_SIZE if encrypt else HEADER_SIZE
        )
        size = Nvme.disk_size(self.capacity, ALIGNMENT, encrypt=encrypt)
        drawn = random.Random(f"{seed}/disk")
        self.head = pack_superblock(ALIGNMENT, header_size=self.geometry.header_size)
        self.platter = Platter(self.loop, size, drawn, name="nvme0", head=self.head)
        self.books = Books(self.capacity // ALIGNMENT)
        silent = rng.random() < 0.5
        faults = [fault for fault in DISK_FAULTS if silent or not fault.silent]
        self.faults = [fault for fault in faults if rng.random() < 0.4]
        self.power_cuts = silent and rng.random() < 0.5
        self.process: Process
        self.processes: list[Process] = []  # the dead ones too: their tasks must not be collected

    def note(self, event: str) -> None:
        if self.trace:
            print(f"{self.loop.now:.6f} {event}")

    async def run(self) -> None:
        for life in range(self.rng.randint(3, 7)):
            self.process = Process(self.loop, f"life-{life}", "host", self.rng)
            self.processes.append(self.process)
            ended = self.loop.create_future()
            self.process.on_death.append(lambda ended=ended: ended.set_result(None))
            self.process.spawn(self.live())
            if self.faults:
                incident = asyncio.ensure_future(self.break_things(ended))
            await asyncio.sleep(self.rng.choice([0.02, 0.3, 3.0]) * self.rng.random() * 3)
            self.process.kill()
            self.note("kill")
            if self.faults:
                await incident
            if self.power_cuts and self.rng.random() < 0.5:
                self.platter.power_cut()
                self.note("power cut")

    async def break_things(self, ended: asyncio.Future[None]) -> None:
        """One fault after the other, also while it recovers; often one outlives the process."""
        while not ended.done():
            await asyncio.sleep(self.rng.expovariate(1 / self.rng.choice([0.01, 0.2])))
            if not ended.done():
                fault = self.rng.choice(self.faults)
                self.note(f"fault {fault.name}")
                self.report.counts[fault.name] += 1
                fault.begin(self.platter)
                await asyncio.sleep(self.rng.expovariate(1 / self.rng.choice([0.01, 0.5])))
                if not ended.done() or self.rng.random() < 0.7:
                    self.platter.heal()
        if self.platter.condition.stuck:
            self.platter.heal()

    # --- one life -------------------------------------------------------------------------

    async def live(self) -> None:
        disk = SimDisk(self.platter)
        tier = Nvme(self.capacity, path="nvme0", disk=disk, encrypt=self.encrypt)
        if self.encrypt:
            tier.use_key(bytes(32), self.salts.randbytes)
        while True:
            faulty = self.is_faulty()
            try:
                found = await tier.recover()
                break
            except KvpoolError as error:
                self.note(f"recover raised {error!r}")
                excuse = faulty or self.is_faulty() or self.platter.unreadable
                if isinstance(error, Unavailable) and excuse:
                    self.report.counts["recover met a disk that failed"] += 1
                    await asyncio.sleep(0.1)
                elif self.is_hit(0, 2 * ALIGNMENT):
                    self.report.counts["the superblock was destroyed"] += 1
                    # Somebody removes the file, as the error says.
                    self.platter.memory[:] = self.head.ljust(self.platter.size, b"\0")
                    self.books.live.clear()
                    self.books.possible.clear()
                else:
                    return self.loop.fail(f"recover raised {error!r}")
        self.compare(list(found), tier)
        await self.verify_all(tier)
        workers = [self.work(tier) for _ in range(self.rng.choice([1, 3, 8]))]
        await asyncio.gather(*workers)

    def is_faulty(self) -> bool:
        condition = self.platter.condition
        return bool(condition.failing or condition.full or condition.lost or condition.misdirected)

    def compare(self, found: list[Record], tier: Nvme) -> None:
        """What was found again, with what may and must be."""
        books = self.books
        books.blind |= bool(tier.dropped["unreadable"])
        self.report.counts["recovered"] += len(found)
        taken: set[int] = set()
        for record in found:
            if record not in books.possible and books.live.get(record.offset) != record:
                if record not in books.gone:
                    return self.loop.fail(f"found {record}, which was never remembered so")
                if not (self.is_header_hit(record) or self.is_head_hit() or books.blind):
                    return self.loop.fail(f"found {record}, which was forgotten")
                books.ghosts.add(record)
            units = set(books.units(record.offset, record.size))
            if taken & units:
                return self.loop.fail(f"found {record}, which overlaps another")
            taken |= units
        for record in set(books.live.values()) - set(found):
            if not (self.is_header_hit(record) or self.is_head_hit() or books.blind):
                return self.loop.fail(f"lost {record}, which was remembered")
            self.report.counts["lost by damage"] += 1
            books.possible.add(record)
        books.gone |= books.possible - set(found)  # their extents may be given to others now
        books.possible.clear()
        self.report.counts["ghosts"] += len(books.ghosts)
        books.live = {record.offset: record for record in found}
        books.pins.clear()
        books.free = set(range(self.capacity // ALIGNMENT)) - taken

    def is_header_hit(self, record: Record) -> bool:
        at = self.geometry.header(record.offset)
        return self.is_hit(at, at + self.geometry.header_size)

    def is_hit(self, start: int, stop: int) -> bool:
        """Something there was damaged, at any time: recovery writes over what it drops."""
        return any(one.start < stop and start < one.stop for one in self.platter.damage_log)

    def is_head_hit(self) -> bool:
        """Both superblocks were damaged, or both copies of the page of some namespace."""
        numbers = range(nvme_format.NAMESPACES)
        names = [[Geometry.namespace(n, copy) for copy in range(COPIES)] for n in numbers]
        pages = [[0, ALIGNMENT], *names]
        return any(all(self.is_hit(at, at + ALIGNMENT) for at in copies) for copies in pages)

    def may_be_wrong(self, record: Record) -> bool:
        """Its bytes were damaged, or it should not be there and was written over."""
        pieces = self.geometry.pieces(record.offset, record.size)
        hit = any(self.is_hit(at, at + stop - start) for at, start, stop in pieces)
        return hit or record in self.books.ghosts or self.books.blind

    async def verify_all(self, tier: Nvme) -> None:
        for record in list(self.books.live.values()):
            await self.verify(tier, record)

    async def verify(self, tier: Nvme, record: Record) -> None:
        buffer = bytearray(record.size)
        try:
            await tier.read_into(record.offset, memoryview(buffer))
        except Unavailable:
            self.report.counts["read failed"] += 1
            return
        good = buffer == content(record)
        if not good and sum_of(buffer, record) == record.checksum:
            self.loop.fail(f"wrong bytes of {record}, and the checksum does not tell")
        elif not good and not self.may_be_wrong(record):
            self.loop.fail(f"wrong bytes of {record}, which was not damaged")
        self.report.counts["read right" if good else "read and seen to be wrong"] += 1

    async def work(self, tier: Nvme) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 0.01))
            kind = self.rng.choice([self.put, self.put, self.erase, self.read])
            doing = asyncio.ensure_future(kind(tier))
            if self.rng.random() < 0.15:
                await asyncio.sleep(self.rng.expovariate(1 / self.platter.latency_s))
                doing.cancel()
            try:
                await doing
            except (asyncio.CancelledError, Unavailable) as error:
                self.report.counts[type(error).__name__] += 1

    # --- what the server would do ---------------------------------------------------------------

    def draw(self) -> Record | None:
        rng, books = self.rng, self.books
        units = (ALIGNMENT, ALIGNMENT, 5000, 2 * ALIGNMENT, 8 * ALIGNMENT)
        size = rng.choice([100, *units, rng.randint(1, 70000)])
        offset = books.take(size, rng)
        if offset is None:
            return None
        books.generation += 1
        namespace = rng.choice(NAMESPACES)
        digest, parent = rng.randbytes(rng.choice([16, 32])), rng.choice([ROOT, b"p" * 32])
        part = rng.randrange(namespace.parts)
        bare = Record(namespace, part, digest, parent, offset, size, 0, books.generation)
        return bare._replace(checksum=sum_of(content(bare), bare))

    async def put(self, tier: Nvme) -> None:
        """Write extents, then remember them together. What failed is forgotten before reuse."""
        books = self.books
        drawn = (self.draw() for _ in range(self.rng.choice([1, 2, 5, 40])))
        records = [record for record in drawn if record is not None]
        written: list[Record] = []
        try:
            outcomes = await asyncio.gather(
                *(self.write(tier, record) for record in records), return_exceptions=True
            )
            written = [r for r, outcome in zip(records, outcomes, strict=True) if outcome is None]
        finally:  # writes that failed have ended: their extents may be used again
            for record in records:
                if record not in written:
                    books.give(record)
        books.possible.update(written)
        self.note(f"remember {[record.offset for record in written]}")
        skipped = tier.not_persisted
        await tier.persist(written)
        if tier.not_persisted != skipped:  # the table is full: who knows which
            self.report.counts["no room for a namespace"] += 1
            return
        self.note(f"remembered {[record.offset for record in written]}")
        for record in written:
            books.possible.discard(record)
            books.live[record.offset] = record
        self.report.counts["remembered"] += len(written)

    async def write(self, tier: Nvme, record: Record) -> None:
        buffer = bytearray(content(record))
        try:
            await tier.write_from(record.offset, memoryview(buffer))
        finally:
            buffer[:] = bytes(len(buffer))  # the caller uses it for something else

    async def erase(self, tier: Nvme) -> None:
        books, rng = self.books, self.rng
        candidates = sorted(books.unpinned(), key=by_generation)
        records = rng.sample(candidates, min(len(candidates), rng.choice([1, 3, 20])))
        for record in records:
            del books.live[record.offset]
        books.possible.update(records)
        self.note(f"forget {[record.offset for record in records]}")
        # When this fails their extents rest until the next life: nobody knows what is there.
        await tier.erase([record.offset for record in records])
        self.note(f"forgotten {[record.offset for record in records]}")
        for record in records:
            books.possible.discard(record)
            books.gone.add(record)
            books.give(record)
        self.report.counts["forgotten"] += len(records)

    async def read(self, tier: Nvme) -> None:
        """Nobody forgets it meanwhile: that is what pins are for."""
        books = self.books
        if books.live:
            record = self.rng.choice(sorted(books.live.values(), key=by_generation))
            books.pins[record.offset] += 1
            try:
                await self.verify(tier, record)
            finally:
                books.pins[record.offset] -= 1


@contextmanager
def small_format(rng: random.Random) -> Iterator[None]:
    """Groups so small that extents reach over them, and namespaces that must be reused."""
    before = nvme_format.GROUP_SIZE, nvme_format.NAMESPACES
    nvme_format.GROUP_SIZE = ALIGNMENT * rng.choice([8, 32])
    nvme_format.NAMESPACES = nvme_namespaces.NAMESPACES = rng.choice([3, 4, 10])
    nvme_format._HEAD_SIZE = 2 * ALIGNMENT * (1 + nvme_format.NAMESPACES)
    try:
        yield
    finally:
        nvme_format.GROUP_SIZE, nvme_format.NAMESPACES = before
        nvme_namespaces.NAMESPACES = before[1]
        nvme_format._HEAD_SIZE = 2 * ALIGNMENT * (1 + before[1])


def play(seed: int, *, trace: bool = False, encrypt: bool = False) -> HistoryReport:
    with small_format(random.Random(f"{seed}/format")):
        return _play(History(seed, trace, encrypt=encrypt))


def _play(history: History) -> HistoryReport:
    gc.disable()  # finalizers run when the collector pleases, which no seed decides
    try:
        with sandbox(history.loop.fail):
            history.loop.run(history.run())
    except Violation as violation:
        history.report.failure = str(violation)
    finally:
        for process in history.processes:
            process.discard_tasks()
        gc.enable()
    history.report.counts.update(history.platter.counts)
    return history.report


def main() -> None:
    """Seeds as `first:last`, or one of them with everything that it does."""
    argument = sys.argv[1]
    if ":" not in argument:
        print(play(int(argument), trace=True))
        return
    first, last = map(int, argument.split(":"))
    counts: Counter[str] = Counter()
    failed = 0
    for seed in range(first, last):
        report = play(seed)
        counts.update(report.counts)
        if report.failure is not None:
            failed += 1
            print(f"seed {seed}: {report.failure}")
    print(f"{last - first} histories, {failed} failed; {dict(sorted(counts.items()))}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
