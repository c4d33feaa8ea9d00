"""The worker half: moves blocks between the engine's memory and the pool, off the engine's thread.

The engine's thread starts transfers and collects those that have ended; all else happens in the
pool's thread. Each load and each save ends once, by its deadline, whatever happens, and is reported
once. (design: pool-thread)
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kvpool import KvpoolError, Pool, WriteStatus, tracing
from kvpool_connector.form_choice import form_of
from kvpool_connector.hook_guard import FailureLog
from kvpool_connector.memory.block_memory import READS_MAX, WRITES_MAX, BlockMemory
from kvpool_connector.memory.load_rounds import LOOK_TIMEOUT_S, LoadRounds, Span
from kvpool_connector.records.messages import (
    AdapterKey,
    GroupBlocks,
    LoadRequest,
    ProbeRequest,
    ProbeResult,
    SaveRequest,
    StepWork,
    VerifyRequest,
    VerifyResult,
    WorkerReport,
)
from kvpool_connector.records.promises import BlockWait
from kvpool_connector.records.provenance import MetWriters, Trust
from kvpool_connector.settings import Settings
from kvpool_connector.worker.ended_transfers import EndedTransfers, FinishedTransfers
from kvpool_connector.worker.rank_model import ModelInMemory, RankModel
from kvpool_connector.worker.worker_checks import CANCEL_AFTER_S, TransferContext, WorkerChecks
from kvpool_engines.pool_thread import PoolThread

_CLOSE_S: Final = 5.0
#: A save without an acknowledgement releases the engine's blocks after so long.
_SAVE_TIMEOUT_S: Final = 10.0
#: Why a transfer is not begun.
_CHANGED: Final = "the blocks have no name now, or another adapter"


class Rank(NamedTuple):
    """A worker's place among its peers: its number, the first of the `parts` of each block that it
    moves, and whether it saves (of several with equal bytes, one does) and `compares` some of what
    it saves with what is there (of an engine that loads nothing)."""

    number: int
    part: int
    saves: bool
    parts: int = 1
    compares: bool = False


class ConnectorWorker:
    """One rank's transfers. Called by the engine's thread only."""

    def __init__(
        self,
        settings: Settings,
        thread: PoolThread,
        rank: Rank,
        log_error: Callable[[str, Exception], None] = lambda line, error: None,
    ) -> None:
        self._settings = settings
        self._ended = EndedTransfers()
        self._failures = FailureLog(f"rank {rank.number}: ", log_error, self._ended.count)
        self._thread = thread
        self._rank = rank
        self._model = RankModel(rank.number, self._failures)
        self._memory: Sequence[BlockMemory] = ()
        self._work = StepWork(0)  # of the step that is computed
        self._load_slots = asyncio.Semaphore(READS_MAX)
        slots = asyncio.Semaphore(WRITES_MAX)
        form = form_of(settings.codec)
        self._checks = WorkerChecks(rank.number, rank.part, slots, form, compares=rank.compares)
        self._trust = Trust(None)
        self._tracer = tracing.tracer()

    def register(self, memory: Sequence[BlockMemory], model: ModelInMemory) -> None:
        """The engine's blocks, one memory for each group, and the model that computes them."""
        self._memory = self._checks.form.memories(memory)
        self._model.register(self._memory, model)

    def start_loads(self, work: StepWork) -> None:
        """Start the loads of a step; returns at once, unless the weights have changed.

        Raises nothing: what cannot be started has failed.
        """
        self._trust = work.trust or self._trust
        began = time.monotonic()
        context = self._context(work, self._model.on_step, needed=bool(work.loads))
        for load in work.loads:
            if self._begin(partial(self._load, load, began), context, span="kvpool.load"):
                missing = [i for blocks in load.blocks for i in blocks.block_ids]
                self._ended.on_load(load, 0, missing, 0.0)

    def start_saves(self, work: StepWork) -> None:
        """Start the saves of a step, which was computed, and what is beside; returns at once.

        Raises nothing: what cannot be started has failed.
        """
        self._work, probe, verify = work, work.probe, work.verify
        needed = bool(work.saves) or probe is not None or verify is not None
        context = self._context(work, self._model.on_names, needed=needed)
        for save in work.saves:
            run, status = partial(self._save, save), WriteStatus.NO_MASTER
            if why := self._begin(run, context, save.adapters, span="kvpool.save"):
                if why is _CHANGED:
                    status = WriteStatus.BYPASSED
                    self._ended.count("save_error ModelChanged", 1)
                self._ended.on_save(save, 0, _all_refused(save, status))
        if probe is not None and self._begin(partial(self._probe, probe), context):
            self._ended.on_check(ProbeResult(0, 0.0))
        if verify is not None and self._begin(
            partial(self._verify, verify), context, verify.adapters
        ):
            self._ended.on_check(VerifyResult(verify.job, 0))

    def take_finished(self) -> FinishedTransfers:
        """The loads that have ended since the last call.

        Waits for one at most `IDLE_S`, if the engine has nothing else to do.
        """
        return self._ended.take_finished(idle=self._work.idle)

    def take_report(self) -> WorkerReport:
        """For the scheduler half: what has ended, and this worker's info until it has that."""
        report = self._ended.take_report(self._work.step)
        self._failures.guard("describing the model", lambda: self._model.add_to(report), None)
        return report

    def take_counters(self) -> dict[str, float]:
        """What happened since the last call."""
        counters, guard = self._ended.take_counters(), self._failures.guard
        guard("counting", lambda: counters.update(self._thread.take_durations()), None)
        guard("counting", lambda: counters.update(self._checks.form.take_counters()), None)
        return counters

    def close(self) -> None:
        """Cancel every transfer and wait for its end, at most `_CLOSE_S`."""
        self._thread.close(_CLOSE_S)

    def _describe(self, **attributes: str | float) -> None:
        """Of the span that runs here, if there are spans."""
        if self._tracer is not None:
            tracing.describe(**attributes)

    def _context(
        self, work: StepWork, look: Callable[[StepWork], None], *, needed: bool
    ) -> TransferContext | None:
        """After a `look` at the step; None: it is not needed, the step's blocks have no name, or
        their memory cannot be used."""

        def made() -> TransferContext | None:
            look(work)
            if not needed or not self._model.registered:
                return None
            events = [memory.record_event() for memory in self._memory]
            return TransferContext(work.namespaces, events, self._model.serial, work.mark)

        return self._failures.guard("looking at a step", made, None)

    def _begin(
        self,
        run: Callable[[TransferContext], Coroutine[Any, Any, None]],
        context: TransferContext | None,
        adapters: frozenset[AdapterKey] = frozenset(),
        span: str = "",
    ) -> str:
        """Run a transfer in the pool's thread. Empty, or why it does not run and never will."""
        self._ended.begin()

        def begun() -> str:
            if context is None or not self._model.has(adapters):
                return _CHANGED
            work = partial(run, context)
            if self._tracer is not None and span:
                work = partial(tracing.run, self._tracer, span, work)
            return "" if self._thread.start(work) else "the pool's thread has ended"

        return self._failures.guard("starting a transfer", begun, "a mistake")

    # --- in the pool's thread ---------------------------------------------------------------

    async def _load(self, load: LoadRequest, began: float, context: TransferContext) -> None:
        missing = [one for blocks in load.blocks for one in blocks.block_ids]
        size, wait, limit_s = 0, None, load.timeout_s
        met = MetWriters(load.compared, set(), set())
        if load.wait_limits is not None:
            wait = BlockWait(load.wait_limits, len(missing))
            limit_s += load.wait_limits.limit_s
        try:
            async with asyncio.timeout(limit_s + CANCEL_AFTER_S):
                pool = self._thread.pool
                for blocks in load.blocks if pool is not None else ():
                    assert pool is not None
                    name, memory = context.namespaces[blocks.group], self._memory[blocks.group]
                    until = began + load.timeout_s
                    rounds = LoadRounds(pool, name, blocks, memory, until, wait)
                    loaded_ids = await rounds.run(
                        partial(self._read_part, pool, context, blocks, met)
                    )
                    size += len(loaded_ids) * memory.block_bytes
                    missing = [block for block in missing if block not in loaded_ids]
        except (KvpoolError, TimeoutError) as error:
            self._ended.count(f"load_error {type(error).__name__}", 1)
            self._describe(error=type(error).__name__)
        finally:
            other_weights = context.serial != self._model.serial
            if other_weights or not all(
                self._trust.covers(one, context.mark) for one in met.writers
            ):
                size, missing = 0, [one for blocks in load.blocks for one in blocks.block_ids]
            took_s = time.monotonic() - began
            waited_s = wait.waited_s if wait is not None else 0.0
            self._describe(
                request=load.request_id,
                blocks=sum(len(blocks.block_ids) for blocks in load.blocks),
                missing=len(missing),
                bytes=size,
                waited_s=waited_s,
            )
            self._ended.on_load(load, size, missing, took_s - waited_s, waited_s, met)

    async def _read_part(
        self,
        pool: Pool,
        context: TransferContext,
        blocks: GroupBlocks,
        met: MetWriters,
        span: Span,
        part: int,
    ) -> set[int]:
        """Read one part of the blocks of a span; returns the ids of those read.

        Who has written them is added to `met`.
        """
        first, last, match, until = span
        memory = self._memory[blocks.group]
        ids, after = blocks.block_ids[first:last], context.events[blocks.group]
        async with self._load_slots, memory.target(ids, after, part) as target:
            found = await self._checks.form.read(
                *(pool, context.namespaces[blocks.group], memory),
                *(blocks.digests[first:last], target),
                part=self._rank.part + part,
                match=match,
                until=until,
            )
        read_ids, wrong = set(), []
        for digest, block, (problem, writer) in zip(
            blocks.digests[first:last], ids, found, strict=True
        ):
            trusted = self._trust.covers(writer, context.mark) and writer.id not in met.compared
            if trusted and not problem:
                read_ids.add(block)
                met.writers.add(writer)
            else:
                if not problem:
                    met.refused.add(writer.id)
                    wrong += [digest] if writer.id in self._trust.removed else []
                self._ended.count(f"load_miss {problem or 'not trusted'}", 1)
        if wrong:  # otherwise what is computed instead could not be stored
            name = context.namespaces[blocks.group]
            removed = await pool.remove(name, wrong, timeout=LOOK_TIMEOUT_S)
            self._ended.count("removed_blocks", sum(removed))
        return read_ids

    async def _save(self, save: SaveRequest, context: TransferContext) -> None:
        # What is not written by the end counts as refused, so that it is tried again.
        refused = _all_refused(save, WriteStatus.NO_MASTER)
        size = 0
        began = time.monotonic()
        try:
            async with asyncio.timeout(_SAVE_TIMEOUT_S + CANCEL_AFTER_S):
                pool = self._thread.pool
                if not self._rank.saves:  # another rank has the same bytes
                    refused = {}
                elif pool is not None:
                    for blocks in save.blocks:
                        parts = self._memory[blocks.group].parts
                        written = [
                            await self._write(pool, context, blocks, save, part)
                            for part in range(parts)
                        ]
                        for number, digest in enumerate(blocks.digests):
                            of_parts = [statuses[number] for statuses in written]
                            bad = [one for one in of_parts if not _will_be_there(one)]
                            if bad:  # a block without one of its parts is none
                                refused[blocks.group, digest] = bad[0]
                            else:
                                refused.pop((blocks.group, digest), None)
                            new = of_parts.count(WriteStatus.STORED)
                            size += new * self._memory[blocks.group].block_bytes // parts
                        compared = await self._checks.verify_saved(
                            pool, self._memory[blocks.group], blocks, written, context
                        )
                        if compared is not None:
                            self._ended.on_compared(compared)
        except (KvpoolError, TimeoutError) as error:
            self._ended.count(f"save_error {type(error).__name__}", 1)
            self._describe(error=type(error).__name__)
        finally:
            took_s = time.monotonic() - began
            self._ended.count("save_s", took_s)
            self._ended.count(f"save_duration {took_s:.2g}", 1)
            refusals = Counter(f"results.{one.name.lower()}" for one in refused.values())
            count = sum(len(one.digests) for one in save.blocks)
            self._describe(blocks=count, refused=len(refused), bytes=size, **refusals)
            self._ended.on_save(save, size, refused)

    async def _write(
        self,
        pool: Pool,
        context: TransferContext,
        blocks: GroupBlocks,
        save: SaveRequest,
        part: int,
    ) -> list[WriteStatus]:
        """Write one part of the blocks; returns the status of each."""
        statuses: list[WriteStatus] = []
        memory = self._memory[blocks.group]
        for first in range(0, len(blocks.digests), memory.blocks_per_transfer):
            digests = blocks.digests[first : first + memory.blocks_per_transfer]
            ids = blocks.block_ids[first : first + memory.blocks_per_transfer]
            after = context.events[blocks.group]
            async with self._checks.slots, memory.source(ids, after, part) as source:
                statuses += await self._checks.form.write(
                    *(pool, context.namespaces[blocks.group], memory),
                    *(digests, source, context.mark),
                    parents=blocks.parents[first : first + memory.blocks_per_transfer],
                    part=self._rank.part + part,
                    copies=self._settings.copies,
                    session=save.session,
                    resume_in=save.resume_in_s,
                    timeout=_SAVE_TIMEOUT_S,
                )
        return statuses

    async def _probe(self, probe: ProbeRequest, context: TransferContext) -> None:
        result = ProbeResult(0, 0.0)
        try:
            result = await self._checks.probe(self._thread.pool, self._memory, probe, context)
        finally:
            self._ended.count("probes", 1)
            self._ended.on_check(result)

    async def _verify(self, verify: VerifyRequest, context: TransferContext) -> None:
        result = VerifyResult(verify.job, 0)
        try:
            result = await self._checks.verify(self._thread.pool, self._memory, verify, context)
        finally:
            self._ended.on_check(result)


def _will_be_there(status: WriteStatus) -> bool:
    """Whether the pool has the block, or another writer is about to bring it."""
    return status.present or status is WriteStatus.IN_PROGRESS


def _all_refused(save: SaveRequest, status: WriteStatus) -> dict[tuple[int, bytes], WriteStatus]:
    return {(blocks.group, digest): status for blocks in save.blocks for digest in blocks.digests}
