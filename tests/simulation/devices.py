"""Worlds of their own for direct transfers: a late device, a card, and users that are in a hurry.

Each takes a seed, plays some calls of the real code (`kvpool/client/device_direct.py` and
`device_writes.py`, the thread of a device, its checksums) in virtual time, and returns a sentence
about what went wrong, or nothing. The device is the fake one: its work runs when it is waited for,
and not before. The card reads and writes its memory when it likes, piece by piece; it loses bytes,
changes them, and fails. Users queue work before a call, cancel calls, and use memory again as soon
as a call has ended. A second world of each seed is that of a server's HBM tier
(`device_tiers.py`). `planted_devices.py` has mistakes that these worlds must find:

    python -m tests.simulation --bugs --only pieces-swapped
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
import torch

from kvpool.checksum import block_seeds, checksum
from kvpool.client import device_direct, device_writes
from kvpool.client.buffers import normalize_buffers
from kvpool.config import DIRECT
from kvpool.device import thread
from kvpool.errors import Unavailable
from kvpool.protocols import DeviceReadBlock, DeviceWriteBlock, ReadOptions, WriteOptions
from kvpool.protocols.device_transport import DeviceArrival
from kvpool.types import ROOT, Namespace, ReadResult, ReadStatus, WriteStatus
from kvpool_transports import ucx
from tests.simulation import device_tiers
from tests.simulation.device_tiers import TierWorld
from tests.simulation.loop import Process, SimLoop, Violation
from tests.support.fake_device import FakeGpu

_NAMESPACE: Final = Namespace("devices")
_CALLS: Final = 12
_SCRATCH: Final = 3072
#: Of blocks; those of up to 240 bytes are hashed on the host.
_SIZES: Final = (90, 240, 241, 600, 900)
_LAYERS: Final = 3
_TIMEOUT_S: Final = 5.0


class _Thread:
    """In the place of a thread pool of one: jobs run one after the other, each some time later."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._busy = False

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        job: Future[Any] = Future()
        self._waiting.append((job, partial(work, *arguments)))
        self._next()
        return job

    def shutdown(self, wait: bool) -> None:
        pass

    def _next(self) -> None:
        if self._busy:
            return
        while self._waiting:
            job, work = self._waiting.popleft()
            if job.set_running_or_notify_cancel():
                self._busy = True
                self._loop.call_later(self._rng.expovariate(300), self._run, job, work)
                return

    def _run(self, job: Future[Any], work: Callable[[], Any]) -> None:
        try:
            job.set_result(work())
        except Exception as error:
            job.set_exception(error)
        self._busy = False
        self._next()


class World:
    """One client's devices, a card, and what servers have."""

    def __init__(self, seed: int, loop: SimLoop, gpu: FakeGpu) -> None:
        self.rng = random.Random(f"{seed}/devices")
        self.loop = loop
        self.gpu = gpu
        self.counters: Counter[str] = Counter()
        self.reads = device_direct.DirectReads(device_direct.Devices(), self.counters)
        no_servers: Any = None  # blocks go to this world's card
        self.writes = device_writes.DirectWrites(
            DIRECT, no_servers, no_servers, device_direct.Devices(), _nothing_staged, self.counters
        )
        #: What the pool has under each key: bytes, and the checksum that was sealed with them.
        self.stored: dict[bytes, tuple[bytes, int]] = {}
        self.truth: dict[bytes, bytes] = {}
        self._keys = 0
        #: Memory of calls that have ended, with its contents then.
        self._ended: list[tuple[Any, bytes]] = []

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(_CALLS):
                group.create_task(self._call(self.rng.choice((self._read, self._write))))
                await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.002, 0.02)))
        await asyncio.sleep(0.1)
        for memory, content in self._ended:
            if self.gpu.content(memory) != content:
                self.loop.fail("G1: memory changed after its call had ended")
        for key, (data, check) in self.stored.items():
            if data != self.truth[key] or check != _checksum(key, data):
                self.loop.fail("G1: a block was stored with other bytes than its writer had")

    # --- users ---------------------------------------------------------------------------------

    async def _call(self, kind: Callable[[], Any]) -> None:
        call = asyncio.ensure_future(kind())
        if self.rng.random() < 0.4:
            await asyncio.sleep(self.rng.expovariate(150))
            call.cancel()
        await asyncio.wait([call])
        error = None if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, Unavailable):
            raise error

    async def _write(self) -> None:
        """The work that fills the blocks is queued; they are filled with others at the end."""
        count, device = self.rng.randint(1, 6), self.rng.randrange(2)
        names = {i: (self._key(), ROOT) for i in range(count)}
        memory = []
        with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", device))):
            for key, _ in names.values():
                data = self.rng.randbytes(self.rng.choice(_SIZES))
                self.truth[key] = data
                rows = self._rows(len(data), device)
                for row, part in zip(rows, _split(data, rows), strict=True):
                    row.copy_(self.gpu.tensor(part, device))  # runs when it is waited for
                memory.append(rows)
            blocks = normalize_buffers(memory, writable=False).device
        options = WriteOptions(_NAMESPACE, 0, visible=True)
        deadline = self.loop.time() + self.rng.choice((_TIMEOUT_S, _TIMEOUT_S, 0.01))
        try:
            await self.writes.write(options, names, blocks, self._send, deadline)
        finally:
            for row in (row for rows in memory for row in rows):
                row.behind.fill_(self.rng.randrange(256))

    async def _read(self) -> None:
        """Work that reads the memory's old contents is queued; hits must be there at the end."""
        count, device = self.rng.randint(1, 6), self.rng.randrange(2)
        keys = [self._key() for _ in range(count)]
        memory, old, seen = [], [], []
        own = torch.cuda.Stream(torch.device("cuda", device))
        with torch.cuda.stream(own):
            for key in keys:
                data = self.rng.randbytes(self.rng.choice(_SIZES))
                self.truth[key] = data
                self.stored[key] = data, _checksum(key, data)
                rows = self._rows(len(data), device)
                for row in rows:
                    old.append(self.gpu.content(row))
                    copy = self.gpu.tensor(bytes(len(row)), device)
                    copy.copy_(row)
                    seen.append(copy)
                memory.append(rows)
            blocks = normalize_buffers(memory, writable=True).device
        deadline = self.loop.time() + self.rng.choice((_TIMEOUT_S, _TIMEOUT_S, 0.01))
        try:
            found = await self.reads.read(blocks, partial(self._fetch, keys, deadline), deadline)
            for position, result in found.items():
                content = b"".join(map(self.gpu.content, memory[position]))
                if result.status is ReadStatus.HIT and content != self.truth[keys[position]]:
                    self.loop.fail("G1: a hit without the bytes of its block")
                in_rows = len(memory[position]) > 1
                if result.status is ReadStatus.CORRUPT and in_rows and content.strip(b"-"):
                    self.loop.fail("G1: wrong bytes have reached the layers of an engine")
            if any(result.status is ReadStatus.HIT for result in found.values()):
                own.synchronize()
                if [self.gpu.content(one) for one in seen] != old:
                    self.loop.fail("G1: bytes came before the owner's work had ended")
        finally:
            self._ended += [(r, self.gpu.content(r)) for rows in memory for r in rows]

    def _rows(self, size: int, device: int) -> list[Any]:
        """Memory for a block: one row, or a piece in each layer."""
        if self.rng.random() < 0.35:
            return [self.gpu.tensor(b"-" * size, device)]
        step = size // _LAYERS
        sizes = [step] * (_LAYERS - 1) + [size - step * (_LAYERS - 1)]
        return [self.gpu.tensor(b"-" * one, device) for one in sizes]

    def _key(self) -> bytes:
        self._keys += 1
        return self._keys.to_bytes(32, "big")

    # --- the card ------------------------------------------------------------------------------

    async def _fetch(
        self, keys: Sequence[bytes], deadline: float, targets: Mapping[int, Any]
    ) -> Mapping[int, ReadResult]:
        """A server's answer, received into the device and verified there, as a reader does it."""
        arrivals = []
        for position, memory in targets.items():
            data, check = self.stored[keys[position]]
            fate = self.rng.random()
            if fate < 0.1:
                arrivals.append(DeviceArrival(ReadStatus.EVICTED))
                continue
            if fate < 0.25:  # a byte changes on the way
                wrong = bytearray(data)
                wrong[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                data = bytes(wrong)
            if fate > 0.85:  # it comes with its frame, to the host
                view = memoryview(bytearray(data))
                arrivals.append(DeviceArrival(ReadStatus.HIT, len(data), check, view))
                continue
            at = 0
            while at < len(data):
                await asyncio.sleep(self.rng.expovariate(2000))
                end = min(len(data), at + self.rng.randint(1, 400))
                part = torch.frombuffer(bytearray(data[at:end]), dtype=torch.uint8)
                memory[at:end].behind.copy_(part)
                at = end
            arrivals.append(DeviceArrival(ReadStatus.HIT, len(data), check))
        if self.rng.random() < 0.05:
            raise Unavailable("the connection is lost")
        blocks = [DeviceReadBlock(keys[position], memory) for position, memory in targets.items()]
        options = ReadOptions(_NAMESPACE, 0)
        results = await self.reads.verify(options, blocks, arrivals, deadline)
        return dict(zip(targets, results, strict=True))

    async def _send(self, blocks: Sequence[DeviceWriteBlock]) -> list[WriteStatus]:
        """The card reads each block from the device when it likes; then a server seals it."""
        statuses = []
        for block in blocks:
            data = bytearray()
            while len(data) < block.size:
                await asyncio.sleep(self.rng.expovariate(2000))
                part: Any = block.memory[len(data) : len(data) + self.rng.randint(1, 400)]
                data += self.gpu.content(part)
            if self.rng.random() < 0.1:
                statuses.append(WriteStatus.NO_SPACE)
                continue
            self.stored[block.digest] = bytes(data), block.checksum
            statuses.append(WriteStatus.STORED)
        return statuses


class History(NamedTuple):
    """What went wrong in a world, if something did, and a value that differs if another run of it
    went another way."""

    failure: str
    mark: str


def play(seed: int) -> str:
    """What went wrong in this seed's worlds; nothing, if nothing did."""
    return _play(seed, World).failure or _play(seed, TierWorld).failure


def marks(seed: int) -> list[str]:
    """Of this seed's worlds: equal in each run, whatever was played before."""
    return [_play(seed, kind).mark for kind in (World, TierWorld)]


def _play(seed: int, kind: type[World] | type[TierWorld]) -> History:
    rng = random.Random(f"{seed}/threads")
    loop = SimLoop(rng, 0.001)  # type: ignore[abstract]
    process = Process(loop, "client", "host-0", rng)
    failure = ""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu(patch)
        patch.setattr(thread, "threads_of", lambda *_: _Thread(loop, rng))
        patch.setattr(thread, "submit", _Thread.submit)  # a call that runs can't be cancelled
        patch.setattr(device_direct, "SCRATCH", _SCRATCH)

        patch.setattr(ucx, "SMALL", device_tiers.SMALL)

        async def main() -> None:
            await process.spawn(kind(seed, loop, gpu).play())

        try:
            loop.run(main())
        except Violation as error:
            failure = str(error)
        except Exception as error:
            failure = f"an error that no user expects: {error!r}"
        # What is left of a world that failed must end in it, and not in one that comes later.
        sys.unraisablehook, hook = lambda _: None, sys.unraisablehook
        process.discard_tasks()
        sys.unraisablehook = hook
    mark = f"{loop.steps} {loop.now!r} {rng.random()!r} {failure}"
    return History(failure, mark)


def _nothing_staged() -> Any:
    raise AssertionError("direct writes stage nothing")


def _checksum(key: bytes, data: bytes) -> int:
    (seed,) = block_seeds(_NAMESPACE, 0, [key])
    return checksum(data, seed)


def _split(data: bytes, rows: Sequence[Any]) -> list[bytes]:
    parts, at = [], 0
    for row in rows:
        parts.append(data[at : at + len(row)])
        at += len(row)
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.devices")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps({"failure": play(parser.parse_args().seed) or None}))
