"""Blocks that pass through a codec between the engine's memory and the pool.

In the pool: the encoding, or the block as it is, then a tail that says which (`coded_tail`). What
comes from the pool lies where the block belongs, which has room for it; it is taken out, decoded,
compared with the tail's hash and only then put there. All this is done by a few threads of the
process, a block at a time, outside of the interpreter's lock; the pool's thread goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple, TypeAlias, TypeVar

from kvpool.threads import submit
from kvpool.types import ReadStatus
from kvpool_codecs.codec import BadEncoding, Codec, Flat, codec_id, codec_of
from kvpool_codecs.coded_tail import TAIL_BYTES, CodedTail, content_of, opened
from kvpool_codecs.payoff import Payoff
from kvpool_engines.comparison import LayerBytes, difference, segments

T = TypeVar("T")
Layers: TypeAlias = Sequence[LayerBytes]
#: The pieces of a block, how many of their bytes have come, and what stood behind those.
Arrived: TypeAlias = tuple[list[memoryview], int, bytes]

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


class Coder:
    """Raises ConfigError for a codec that there is not."""

    #: Of what stands behind each block.
    end_bytes = TAIL_BYTES

    def __init__(self, spec: str) -> None:
        self.codec: Codec = codec_of(spec)
        self.tolerance = self.codec.tolerance
        self.id = codec_id(self.codec)
        self.payoff = Payoff()
        self.on_read, self.on_written = self.payoff.reads.observe, self.payoff.writes.observe
        self.counters: Counter[str] = Counter()

    async def encoded(self, block: list[memoryview], layers: Layers) -> list[memoryview]:
        """The pieces that a block becomes."""
        size, one = sum(map(len, block)), _Encoded("slower")
        if self.tolerance or self.payoff.codes():
            # One at a time: what is loaded is decoded first.
            try:
                [one] = await _done([submit(coders(), self._encode, block, layers)])
            except RuntimeError:  # no thread can be started
                one = _Encoded("not encodable")
        self.counters[f"coded_blocks {one.outcome}"] += 1
        tail = CodedTail(one.data is not None, size, self.id, one.content.rjust(8, b"\0"))
        taken = size if one.data is None else len(one.data)
        if one.seconds:
            self.payoff.on_encoded(size, taken, one.seconds)
        self.counters["coded_bytes_before"] += size
        self.counters["coded_bytes_after"] += taken
        data = block if one.data is None else [memoryview(one.data)]
        return [*data, memoryview(tail.packed())]

    async def decoded(self, arrived: Sequence[Arrived], layers: Layers, until: float) -> list[str]:
        """Put each block where its encoding lies; why not, or empty.

        What was not done by `until`, on the monotonic clock, has a problem. When it returns or is
        cancelled, nothing writes into these pieces any more.
        """
        began, size = time.monotonic(), 0
        problems, jobs = [""] * len(arrived), dict[int, Future[str]]()
        for number, (pieces, taken, end) in enumerate(arrived):
            whole = sum(map(len, pieces))
            try:
                tail = opened(end, whole, self.id)
            except BadEncoding as error:
                problems[number] = str(error)
                continue
            if tail.encoded:
                size += whole
                work = functools.partial(self._decode, pieces, taken, layers, tail, until)
                try:
                    jobs[number] = submit(coders(), work)
                except RuntimeError as error:  # no thread can be started
                    problems[number] = str(error)
            elif taken != whole:
                problems[number] = "wrong size"
        for number, problem in zip(jobs, await _done(list(jobs.values())), strict=True):
            problems[number] = problem
        self.payoff.decoding.observe(size, time.monotonic() - began)
        return problems

    def take_counters(self) -> Mapping[str, float]:
        """What happened since the last call."""
        counters, self.counters = self.counters, Counter()
        return counters

    def _encode(self, pieces: Sequence[memoryview], layers: Layers) -> _Encoded:
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

    def _decode(
        self, pieces: list[memoryview], taken: int, layers: Layers, tail: CodedTail, until: float
    ) -> str:
        if time.monotonic() > until:
            return ReadStatus.DEADLINE.label
        data = bytes(pieces[0][:taken]) if len(pieces) == 1 else b"".join(pieces)[:taken]
        into = pieces[0] if len(pieces) == 1 else memoryview(bytearray(tail.size))
        try:
            self.codec.decode(data, layers, into)
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
