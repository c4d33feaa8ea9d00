"""Which blocks of the requests are saved with a step: those that it completes. Pure."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

from kvpool.types import ROOT
from kvpool_connector.plan.quiet_requests import NEVER
from kvpool_connector.plan.save_queue import SaveQueue, SaveRun
from kvpool_connector.plan.tracked_request import TrackedRequest
from kvpool_connector.records.messages import SaveRequest
from kvpool_connector.records.values import CacheGroup, PlannerLimits, ScheduledRequest


class RequestSaves:
    """Saves for one engine, whose `ranks` workers each do every save.

    A step calls `on_scheduled` for each request that may complete a block, then `take`. `queue` has
    the states of the blocks.
    """

    def __init__(
        self,
        counters: MutableMapping[str, float],
        groups: Sequence[CacheGroup],
        limits: PlannerLimits,
        ranks: int,
    ) -> None:
        self._save_decode = limits.save_decode
        kept = all(one.kept and not one.window_blocks for one in groups)
        together = limits.tokens_together if kept else 1
        #: Number, tokens and hashes of a block, and tokens from one look to the next. (A step has
        #: microseconds for all.)
        self._groups = [
            (n, size, per_block, max(size, together // size * size))
            for n, (size, per_block, *_) in enumerate(groups)
        ]
        self.queue = SaveQueue(counters, limits, ranks=ranks)
        #: What this step completes, by session, when that is expected to return, and whether it
        #: waits for no further blocks: other engines may wait for a prompt's.
        self._completed: dict[tuple[str, float | None, bool], list[SaveRun]] = {}

    def on_scheduled(self, request: TrackedRequest, one: ScheduledRequest) -> int:
        """Save the blocks that are complete after this step, and neither stored nor being saved.

        Returns how many tokens the request computes after it until it is to be looked at again.
        """
        hashes, hints, prompt = request.hashes, request.hints, request.prompt
        request_id, start, end, block_ids = one
        saved, known = request.blocks_saved, len(hashes)
        if end >= prompt:
            request.phase = "decodes"
        last = end if self._save_decode or end < prompt else prompt
        next_at = NEVER
        for number, block_size, per_block, stride in self._groups:
            first, stop = saved[number], last // block_size
            if stop * per_block > known:
                stop = known // per_block
            if stop > first:
                ids = block_ids[number][first:stop]
                stop = saved[number] = first + len(ids)
                run = SaveRun(
                    request_id,
                    number,
                    first,
                    hashes[(first + 1) * per_block - 1 : stop * per_block : per_block],
                    bytes(hashes[first * per_block - 1]) if first else ROOT,
                    ids,
                    request.asked_at,
                    hints.adapter,
                )
                key = hints.session, hints.resume_in_s, start < prompt
                completed = self._completed.setdefault(key, [])
                if 0 in ids:  # that is no block
                    completed += [part for there, part in run.split([*map(bool, ids)]) if there]
                else:
                    completed.append(run)
                first = stop
            next_at = min(next_at, first * block_size + stride)
        if end < prompt:
            return 0
        return max(0, next_at - end) if self._save_decode else NEVER

    def take(
        self, still_cached: Callable[[int, int, bytes], bool], now: float, *, idle: bool
    ) -> tuple[list[SaveRequest], list[int]]:
        """The saves that begin with this step, and the block ids to pin for this and later ones.
        (`still_cached` and `idle`: as in `Planner.plan_step`)"""
        if retries := self.queue.take_due(still_cached, now):
            self._completed.setdefault(("", None, True), []).extend(retries)
        pinned = self.gather(now)
        if idle:
            self.queue.expedite_all()
        return self.queue.take_saves(now), pinned

    def gather(self, now: float) -> list[int]:
        """What `on_scheduled` has found waits for a save from now on; returns the ids to pin."""
        completed, self._completed = self._completed, {}
        pinned: list[int] = []
        for (session, resume_in_s, at_once), runs in completed.items():
            pinned += self.queue.add(runs, session, resume_in_s, now, at_once=at_once)
        return pinned
