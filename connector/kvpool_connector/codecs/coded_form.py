"""Blocks that pass through a codec between the engine's memory and the pool.

In the pool: the encoding, or the block as it is, then a tail that says which (`coded_tail`), then
the writer's mark. What comes from the pool lies where the block belongs, which has room for it; it
is taken out, decoded, compared with the tail's hash and only then put there. All this is done by a
few threads of the process, a block at a time, outside of the interpreter's lock; the pool's thread
goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from kvpool import ConfigError
from kvpool.types import Memory, ReadResult, ReadStatus, WriteStatus
from kvpool_connector.codecs.codec import BadEncoding, Codec, Flat, codec_id, codec_of
from kvpool_connector.codecs.coded_tail import TAIL_BYTES, CodedTail, content_of, opened
from kvpool_connector.codecs.payoff import Payoff
from kvpool_connector.memory.block_form import Found, Rows
from kvpool_connector.memory.block_memory import STAGING_BYTES, BlockMemory, DirectBlockMemory
from kvpool_connector.memory.comparison import LayerBytes, difference, segments
from kvpool_connector.records.provenance import MARK_BYTES, UNKNOWN, writer_of

T = TypeVar("T")

#: Behind each part of a block.
_END_BYTES: Final = TAIL_BYTES + MARK_BYTES
#: An encoding that saves less is not worth its decoding.
_WORTH: Final = 0.97
_THREADS_MAX: Final = 4


@functools.cache
def coders() -> ThreadPoolExecutor:
    """The threads of this process that encode and decode."""
    threads = min(_THREADS_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
    return ThreadPoolExecutor(threads, "kvpool-codec")


class _Encoded(NamedTuple):
    """What a block became; `data` None: it stays as it is, for this `outcome`."""

    outcome: str
    data: bytes | None = None
    content: bytes = b""
    seconds: float = 0.0


class CodedForm:
    """See `BlockForm`. Raises ConfigError for a codec that there is not."""

    def __init__(self, spec: str) -> None:
        self.codec: Codec = codec_of(spec)
        self.tolerance = self.codec.tolerance
        self.id = codec_id(self.codec)
        self.payoff = Payoff()
        self.counters: Counter[str] = Counter()

    def memories(self, memories: Sequence[BlockMemory]) -> Sequence[BlockMemory]:
        for memory in memories:
            if isinstance(memory, DirectBlockMemory):
                raise ConfigError("codec: a codec needs blocks in memory of the host: not `direct`")
            # What is encoded waits in memory until it is written.
            part_bytes = memory.block_bytes // memory.parts
            limit = max(1, STAGING_BYTES // part_bytes)
            memory.blocks_per_transfer = min(memory.blocks_per_transfer, limit)
        return memories

    async def to_read(self, memory: BlockMemory, blocks: list[Memory]) -> Rows:
        return _RowsToRead(self, memory, [_pieces(block) for block in blocks])

    async def to_write(self, memory: BlockMemory, blocks: list[Memory], mark: bytes) -> Rows:
        size, rows, total = memory.block_bytes // memory.parts, list[Memory](), 0
        for block in blocks:
            pieces = _pieces(block)
            one = _Encoded("slower")
            if self.tolerance or self.payoff.codes():
                # One at a time: what is loaded is decoded first.
                [one] = await _done([coders().submit(self._encode, pieces, memory.layers)])
            self.counters[f"coded_blocks {one.outcome}"] += 1
            tail = CodedTail(one.data is not None, size, self.id, one.content.rjust(8, b"\0"))
            data = pieces if one.data is None else [memoryview(one.data)]
            taken = size if one.data is None else len(one.data)
            if one.seconds:
                self.payoff.on_encoded(size, taken, one.seconds)
            self.counters["coded_bytes_before"] += size
            self.counters["coded_bytes_after"] += taken
            rows.append([*data, memoryview(tail.packed() + mark)])
            total += taken + _END_BYTES
        return _RowsToWrite(self.payoff, rows, total)

    def take_counters(self) -> Mapping[str, float]:
        counters, self.counters = self.counters, Counter()
        return counters

    def _encode(self, pieces: Sequence[memoryview], layers: Sequence[LayerBytes]) -> _Encoded:
        began = time.perf_counter()
        block: Flat = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        try:
            data = self.codec.encode(block, layers)
            if len(data) > len(block) * _WORTH:
                return _Encoded("no smaller", seconds=time.perf_counter() - began)
            kept: Flat = block
            if self.tolerance:  # it is the user's word that counts, whatever the codec promises
                kept = bytearray(len(block))
                self.codec.decode(data, layers, memoryview(kept))
                if any(
                    not difference(pairs, layer.dtype) <= self.tolerance
                    for layer, pairs in segments(layers, [block], kept)
                ):
                    return _Encoded("too different")
        except Exception:  # also of a codec that is broken: nothing is lost
            return _Encoded("not encodable")
        return _Encoded("encoded", data, content_of(kept), time.perf_counter() - began)


class _RowsToWrite:
    def __init__(self, payoff: Payoff, memory: list[Memory], size: int) -> None:
        self.memory = memory
        self._payoff, self._size, self._began = payoff, size, time.monotonic()

    async def found(self, results: Sequence[ReadResult], until: float) -> list[Found]:
        raise AssertionError("these are written")

    def written(self, statuses: Sequence[WriteStatus]) -> Sequence[WriteStatus]:
        if set(statuses) == {WriteStatus.STORED}:  # others have moved no bytes
            self._payoff.on_written(self._size, time.monotonic() - self._began)
        return statuses


class _RowsToRead:
    def __init__(
        self, form: CodedForm, memory: BlockMemory, blocks: Sequence[list[memoryview]]
    ) -> None:
        self._form, self._layers, self._blocks = form, memory.layers, blocks
        self._size = memory.block_bytes // memory.parts
        room = memoryview(bytearray(_END_BYTES * len(blocks)))
        self._ends = [room[at : at + _END_BYTES] for at in range(0, len(room), _END_BYTES)]
        self.memory: list[Memory] = [
            [*block, end] for block, end in zip(blocks, self._ends, strict=True)
        ]
        self._began = time.monotonic()

    def written(self, statuses: Sequence[WriteStatus]) -> Sequence[WriteStatus]:
        raise AssertionError("these are read")

    async def found(self, results: Sequence[ReadResult], until: float) -> list[Found]:
        payoff, arrived = self._form.payoff, time.monotonic()
        size = sum(result.size for result in results if result.status.hit)
        payoff.on_read(size, arrived - self._began)
        found, jobs = list[Found](), dict[int, Future[str]]()
        for number, result in enumerate(results):
            one, tail = self._seen(number, result)
            found.append(one)
            if tail is not None:
                work = functools.partial(self._decode, number, result.size, tail, until)
                jobs[number] = coders().submit(work)
        for number, problem in zip(jobs, await _done(list(jobs.values())), strict=True):
            found[number] = found[number]._replace(problem=problem)
        payoff.on_decoded(len(jobs) * self._size, time.monotonic() - arrived)
        return found

    def _seen(self, number: int, result: ReadResult) -> tuple[Found, CodedTail | None]:
        """What a block is; its tail, if it is to be decoded."""
        if not result.status.hit:
            return Found(result.status.label, UNKNOWN), None
        whole = self._size + _END_BYTES
        if not _END_BYTES <= result.size <= whole:
            return Found("wrong size", UNKNOWN), None
        end: Flat = self._ends[number]
        if result.size < whole:  # it ends within the block's own room
            row = [*self._blocks[number], self._ends[number]]
            end = _cut(row, result.size - _END_BYTES, result.size)
        try:
            tail = opened(end[:TAIL_BYTES], self._size, self._form.id)
        except BadEncoding as error:
            return Found(str(error), UNKNOWN), None
        writer = writer_of(bytes(end[TAIL_BYTES:]))
        if tail.encoded:
            return Found("", writer), tail
        return Found("" if result.size == whole else "wrong size", writer), None

    def _decode(self, number: int, size: int, tail: CodedTail, until: float) -> str:
        """Put a block where its encoding lies; why not, if it cannot be."""
        if time.monotonic() > until:
            return ReadStatus.DEADLINE.label
        pieces = self._blocks[number]
        data = _cut(pieces, 0, size - _END_BYTES)
        into = pieces[0] if len(pieces) == 1 else memoryview(bytearray(self._size))
        try:
            self._form.codec.decode(data, self._layers, into)
        except Exception:  # also of a codec that is broken
            return "bad encoding"
        if content_of(into) != tail.content:
            return "wrong content"
        if len(pieces) > 1:
            at = 0
            for piece in pieces:
                piece[:] = into[at : at + len(piece)]
                at += len(piece)
        return ""


def _pieces(block: Any) -> list[memoryview]:
    """The pieces of a block in memory of the host, as bytes."""
    return [memoryview(one).cast("B") for one in (block if isinstance(block, list) else [block])]


def _cut(pieces: Iterable[memoryview], first: int, last: int) -> bytes:
    """A copy of the bytes `first` to `last` (excluded) of pieces that follow one another."""
    found = []
    for piece in pieces:
        if last <= 0:
            break
        found.append(piece[max(first, 0) : last])
        first, last = first - len(piece), last - len(piece)
    return b"".join(found)


async def _done(jobs: Sequence[Future[T]]) -> list[T]:
    """What they return, when all have ended. Cancelled, it waits for those that run, each a block:
    no thread is at work on memory that is given back."""
    ended = [asyncio.wrap_future(job) for job in jobs]
    cancelled = False
    while pending := [one for one in ended if not one.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
            for job in jobs:
                job.cancel()
    if cancelled:
        for one in ended:
            if not one.cancelled():
                one.exception()  # retrieved, or asyncio would log it
        raise asyncio.CancelledError
    return [one.result() for one in ended]
