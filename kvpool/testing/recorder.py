"""A `BlockStore` around a real one: it hears what a transport asks for, answers late or not at all
where a check wants that, and writes garbage over memory at every moment from which on a correct
transport does not look at it, or does not write there, any more.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.errors import KvpoolError
from kvpool.protocols import Addressable, Connection, DeviceAddressable, Peer, ReserveRequest, Tier
from kvpool.server.block_server import BlockServer
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    Extent,
    Namespace,
    Pin,
    ReadStatus,
    Reservation,
    WriteStatus,
)
from kvpool.wire import messages as wire

_GARBAGE: Final = 0xDB


class Recorder:
    """A `BlockStore`: the real server, watched, and made slow or unwilling where a check asks."""

    def __init__(self, server: BlockServer) -> None:
        self._server = server
        self.cluster = server.cluster
        self.guard = server.guard
        self.peers: list[Peer] = []
        #: Each `reserve`, with its deadline; each `reserve_now`, which has none.
        self.asked: list[tuple[ReserveRequest, float | None]] = []
        #: Of so many blocks `reserve_now` takes those that it can; each other one is NOT_YET.
        self.at_once_max = BATCH_BLOCKS_MAX
        self.visible: list[bool] = []
        self.faults: list[str] = []
        self.open: set[_Watched] = set()
        #: Extents that were given back unsealed; full of garbage, and to stay so.
        self.freed: set[Extent] = set()
        #: While it is clear, `reserve`, `remove` and `report_corruption` work and do not answer.
        self.answering = asyncio.Event()
        self.answering.set()
        #: Raised by `connect`.
        self.refuse_clients: KvpoolError | None = None
        #: Raised by `reserve`.
        self.refuse_writes: KvpoolError | None = None
        #: Raised by `pin`, and instead of the answer to a `Remove`; the
        #: names of those that raised it.
        self.refuse_others: KvpoolError | None = None
        self.refused: list[str] = []
        #: Each request that the transport has carried and not looked into.
        self.moves: list[wire.Message] = []
        #: What is answered to these instead of what the real server would do; an exception is
        #: raised.
        self.laid_down: dict[type[wire.Message], wire.Message | KvpoolError] = {}
        #: Those on which the server works now.
        self.working = 0
        #: Remove each block, and write garbage over it, as soon as its last pin is released.
        self.burn_after_reading = False
        #: Whether clients may write into memory that they have mapped.
        self.lends = True
        # Also what the server allocates for itself: it moves blocks to make room.
        allocator = server.store.allocator
        for name in {"allocate", "take_fenced"}.intersection(dir(allocator)):
            setattr(allocator, name, functools.partial(self._allocated, getattr(allocator, name)))

    @property
    def server(self) -> str:
        return self._server.server

    @property
    def tier(self) -> Tier:
        return self._server.tier

    def connect(self, peer: Peer) -> Connection:
        if self.refuse_clients is not None:
            raise self.refuse_clients
        watched = _Watched(self, self._server.connect(peer))
        self.open.add(watched)
        self.peers.append(peer)
        return watched

    def count(self, event: str) -> None:
        self._server.count(event)

    def forbidden(self, peer: Peer, message: str, why: str) -> None:
        self._server.forbidden(peer, message, why)

    def refuse(self, name: str) -> None:
        """Raises `refuse_others`, if it is set."""
        if self.refuse_others is not None:
            self.refused.append(name)
            raise self.refuse_others

    def answer(self, request: wire.Message) -> wire.Message | None:
        """Record a request about moves. What is laid down for it; None if nothing is."""
        self.moves.append(request)
        answer = self.laid_down.get(type(request))
        if isinstance(answer, KvpoolError):
            raise answer
        return answer

    def memory(self, extent: Extent) -> memoryview:
        """The pool's memory of an extent, also of a free one."""
        assert isinstance(self._server.tier, Addressable)
        return self._server.tier.view(extent.offset, extent.size)

    def spoil(self, extent: Extent) -> None:
        """Write garbage over an extent that no client may read any more."""
        self.memory(extent)[:] = bytes([_GARBAGE]) * extent.size

    def _allocated(self, allocate: Callable[[int], int | None], size: int) -> int | None:
        """Memory is in use again: from now on its writer, or the server, may write to it."""
        offset = allocate(size)
        if offset is not None:
            end = offset + size
            reused = {e for e in self.freed if e.offset < end and offset < e.offset + e.size}
            self.freed -= reused
            if any(map(self._is_written, reused)):
                self.faults.append("memory was written into after it had been given back")
        return offset

    def was_freed(self, extents: Iterable[Extent]) -> None:
        """No client may write to these extents any more, until they are reserved again."""
        for extent in extents:
            self.spoil(extent)
            self.freed.add(extent)

    def burn(self, namespace: Namespace, part: int, key: bytes, extent: Extent) -> None:
        """After the last unpin: remove the block and overwrite its bytes."""
        store = self._server.store
        entry = store.index.peek(namespace, part, key)
        if entry is not None and not entry.pins:
            store.remove(namespace, [key], part=part)
            self.spoil(extent)

    def overwritten(self) -> int:
        """The number of freed extents into which a client has written."""
        return sum(map(self._is_written, self.freed))

    def _is_written(self, extent: Extent) -> bool:
        return self.memory(extent) != bytes([_GARBAGE]) * extent.size


class _Watched:
    """A `Connection` of the real server, under observation."""

    def __init__(self, recorder: Recorder, inner: Connection) -> None:
        self._recorder = recorder
        self._inner = inner
        self._unsealed: dict[int, tuple[Extent, int]] = {}
        self._pinned: dict[int, tuple[Namespace, int, bytes, Extent]] = {}

    @property
    def alone(self) -> bool:
        return self._inner.alone

    async def reserve(self, request: ReserveRequest, *, deadline: float) -> list[Reservation]:
        asked = request.subset(range(len(request.digests)))  # lists, whatever the sequences are
        self._recorder.asked.append((asked, deadline))
        if self._recorder.refuse_writes is not None:
            raise self._recorder.refuse_writes
        answers = await self._inner.reserve(request, deadline=deadline)
        self._reserved(request, answers)
        await self._recorder.answering.wait()
        return answers

    def reserve_now(self, request: ReserveRequest) -> list[Reservation]:
        recorder, count = self._recorder, len(request.digests)
        taken = min(count, recorder.at_once_max) if recorder.answering.is_set() else 0
        answers = [Reservation(WriteStatus.NOT_YET)] * count
        if taken:
            asked = request.subset(range(taken))
            recorder.asked.append((asked, None))
            if recorder.refuse_writes is not None:
                raise recorder.refuse_writes
            answers[:taken] = self._inner.reserve_now(asked)
            self._reserved(request, answers)
        return answers

    def _reserved(self, request: ReserveRequest, answers: Sequence[Reservation]) -> None:
        half = namespace_seed(request.namespace, request.part)
        for key, answer in zip(request.digests, answers, strict=True):
            if answer.extent is not None:
                self._recorder.spoil(answer.extent)
                self._unsealed[answer.id] = (answer.extent, block_seed(half, key))

    def lend(self) -> bool:
        return self._recorder.lends and self._inner.lend()

    async def seal(
        self, ids: Sequence[int], checksums: Sequence[int], *, visible: bool, deadline: float
    ) -> list[WriteStatus]:
        self._recorder.visible.append(visible)
        for id, claimed in zip(ids, checksums, strict=True):
            extent, seed = self._unsealed.pop(id, (None, 0))
            if extent is not None and checksum(self._recorder.memory(extent), seed) != claimed:
                self._recorder.faults.append(
                    "a block was sealed before its bytes were there, or with a wrong checksum"
                )
        statuses = await self._inner.seal(ids, checksums, visible=visible, deadline=deadline)
        self._give_back()
        return statuses

    async def pin(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        buffer_sizes: Sequence[int],
        *,
        view: bool = False,
        in_place_above: int | None = None,
    ) -> list[Pin]:
        self._recorder.refuse("pin")
        pins = await self._inner.pin(
            namespace, part, digests, buffer_sizes, view=view, in_place_above=in_place_above
        )
        for key, pin in zip(digests, pins, strict=True):
            if pin.extent is not None and pin.tier is None:
                self._pinned[pin.id] = (namespace, part, key, pin.extent)
        return pins

    def unpin(self, pins: Sequence[Pin]) -> None:
        self._inner.unpin(pins)
        self._let_go([p.id for p in pins if p.status is ReadStatus.HIT and p.tier is None])

    async def answer(self, request: wire.Message) -> wire.Message:
        recorder = self._recorder
        if isinstance(request, wire.Remove):
            recorder.refuse(type(request).__name__)
            answer = await self._really(request)
            await recorder.answering.wait()
            return answer
        laid_down = recorder.answer(request)
        recorder.working += 1
        try:
            answer = laid_down or await self._really(request)
            await recorder.answering.wait()
        finally:
            recorder.working -= 1
        return answer

    async def _really(self, request: wire.Message) -> wire.Message:
        answered: wire.Message = await self._inner.answer(request)
        return answered

    def device_tier(self, tier: int) -> DeviceAddressable:
        return self._inner.device_tier(tier)

    def views(self, held: Sequence[Reservation | Pin]) -> list[memoryview]:
        known = {extent for extent, _ in self._unsealed.values()}
        known.update(extent for *_, extent in self._pinned.values())
        if not known.issuperset(one.extent for one in held if one.extent is not None):
            self._recorder.faults.append("memory was looked at that the connection does not hold")
        return self._inner.views(held)

    def close(self, *, writer_may_be_alive: bool = False) -> bool:
        quarantined = self._inner.close(writer_may_be_alive=writer_may_be_alive)
        self._recorder.open.discard(self)
        if writer_may_be_alive:
            self._unsealed.clear()
        self._give_back()
        self._let_go(list(self._pinned))
        return quarantined

    def writer_exited(self) -> None:
        self._inner.writer_exited()

    def _give_back(self) -> None:
        extents = [extent for extent, _ in self._unsealed.values()]
        self._unsealed.clear()
        self._recorder.was_freed(extents)

    def _let_go(self, ids: Sequence[int]) -> None:
        for id in ids:
            held = self._pinned.pop(id, None)
            if held is not None and self._recorder.burn_after_reading:
                self._recorder.burn(*held)
