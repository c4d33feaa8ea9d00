"""The scheduler half: reports the engine's events to the planner, and carries out its plans.

Runs in the engine's scheduling loop: no hook does more than a few microseconds' work for each new
block, or waits for a lookup longer than a millisecond in a step. Its own thread asks the masters
(`lookups.py`); hints are sent by the pool's thread (`pool_thread.py`). (design: pool-thread)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvpool import MatchPoller, Namespace
from kvpool_connector.identity.adapters import Adapter, KnownAdapters
from kvpool_connector.identity.naming import EngineInfo, EngineNames
from kvpool_connector.plan.cost_model import StepTimer
from kvpool_connector.plan.planner import Planner
from kvpool_connector.plan.save_queue import SaveRun
from kvpool_connector.records.messages import StepWork, WorkerInfo, WorkerReport
from kvpool_connector.records.promises import PromisedBlocks, promise_name
from kvpool_connector.records.provenance import BlockWriter
from kvpool_connector.records.values import PlannerLimits, RequestHints, ScheduledRequest
from kvpool_connector.scheduler.adapter_requests import AdapterRequest, AdapterRequests
from kvpool_connector.scheduler.engine_report import EngineReport
from kvpool_connector.scheduler.lookups import Lookups
from kvpool_connector.scheduler.pool_messages import PoolMessages
from kvpool_connector.scheduler.scheduler_log import SchedulerLog
from kvpool_connector.scheduler.sharing_watch import SharingWatch
from kvpool_connector.settings import Settings
from kvpool_connector.worker.ended_transfers import IDLE_S
from kvpool_engines.pool_thread import START_WAIT_S, PoolThread
from kvpool_engines.session_names import in_tenant

#: Share of the engine's blocks that unfinished saves may keep from reuse: the rest is for prompts.
_SAVE_SHARE_MAX: Final = 0.25
#: For so long generated blocks wait for further ones: a message for each would cost more than they
#: are worth, and no turn of a conversation comes sooner (design: pool-thread).
SAVE_GATHER_S: Final = 0.1
#: Generated tokens from one look at a request to the next: a step has little time for each look.
_TOKENS_TOGETHER: Final = 256


class EngineStep(NamedTuple):
    """What the engine computes next; `scheduled` without the requests that are quiet.

    `prefill` has tokens first to last (excluded) of prompts. `idle`: it computes nothing.
    """

    scheduled: Sequence[ScheduledRequest]
    preempted: Sequence[str]
    prefill: list[tuple[int, int]]
    idle: bool


class ReportOutcome(NamedTuple):
    """What a report of the workers means for the engine.

    `drop_cache`: what the engine has in its own cache is not what it computes now: it was loaded
    from a wrong pool, or computed with other weights.
    """

    blocks_to_unpin: list[int]
    stored: list[SaveRun]
    drop_cache: bool = False


class ConnectorScheduler:
    """One engine's scheduler half. Called by the engine's thread only.

    A request, until it has ended:

    | state           | the engine is told | next                                                  |
    |-----------------|--------------------|-------------------------------------------------------|
    | without adapter | to ask again       | unnamed or tracked, when every rank has loaded its    |
    |                 |                    | LoRA adapter; late ones are only saved. Unknown, if   |
    |                 |                    | the adapter is refused                                |
    | unnamed         | to ask again       | tracked, when the workers have described their model, |
    |                 |                    | or have taken too long                                |
    | tracked         | what the planner   | restarting, when it is preempted, or has no blocks    |
    |                 | says (its states:  | at a reset                                            |
    |                 | `RequestState`)    |                                                       |
    | restarting      |                    | tracked, with a new lookup, when the engine asks      |
    | unknown         | that there is none |                                                       |

    `log_line` writes one line to the engine's log, and is called in either thread; `log_error`
    writes an error.
    """

    def __init__(
        self,
        settings: Settings,
        thread: PoolThread,
        engine: EngineInfo,
        log_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        log_error: Callable[[str], None] | None = None,
        log_warning: Callable[[str], None] | None = None,
        replaces: ConnectorScheduler | None = None,
    ) -> None:
        """`replaces`: one that is used no more. What the engine computes gets a new name."""
        self._settings = settings
        self._log = SchedulerLog(log_line, log_error or log_line)
        self._thread = thread
        self._clock = clock
        limits = PlannerLimits(
            load=settings.load if engine.loads else "never",
            save=engine.saves,
            load_timeout_s=settings.load_timeout_s,
            save_decode=settings.save_decode,
            saved_blocks_max=max(1, int(engine.blocks * _SAVE_SHARE_MAX)),
            save_gather_s=SAVE_GATHER_S,
            tokens_together=_TOKENS_TOGETHER,
            loads_per_check=settings.loads_per_check if engine.recomputes else 0,
            drops_last_block=engine.drops_last_block,
        )
        self.planner = Planner(engine.groups, limits, ranks=engine.ranks)
        #: Known when every rank has sent its `WorkerInfo`.
        self.names = EngineNames(engine)
        self.adapter_requests = AdapterRequests(KnownAdapters(engine.ranks))
        self._step_timer = StepTimer(self.planner.choice.prefill_cost)
        self._step = 0
        self._asked = False  # for a request, since the last step: the engine is not paused
        #: Requests that begin anew when the engine asks for them: preempted, or queued at a reset.
        self._restarting: set[str] = set()
        self._messages = PoolMessages(
            thread, self.planner.counters, log_line, log_warning or log_line
        )
        poller = MatchPoller(settings.client(), settings.member())
        self._lookups = Lookups(self.planner, self.names, poller, self._messages, clock)
        self._watch = SharingWatch(log_line)
        self.report = EngineReport(
            self.planner, self.names, self._lookups, self._watch, self._messages, clock
        )
        if replaces is not None:
            replaces._lookups.close()
            self._step, self.names.serial = replaces._step, replaces.names.serial
            self.reset()

    # --- a request --------------------------------------------------------------------------

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """One for each group; empty until it is known what the workers compute."""
        return self.names.namespaces

    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens: int,
        hints: RequestHints,
        adapter: Adapter | None = None,
    ) -> None:
        """Start its lookup. One with a LoRA adapter waits until the workers have told of it."""
        now = self._clock()
        hints = hints._replace(session=in_tenant(self._settings.tenant, hints.session))
        if adapter is not None:
            until = now + START_WAIT_S
            waiting = AdapterRequest(hashes, tokens, hints, adapter, self._step, until)
            self.adapter_requests.add(request_id, waiting)
            self._start_adapter_requests()
            return
        self._lookups.start(self.planner.on_new_request(request_id, hashes, tokens, hints, now))

    def loadable_tokens(self, request_id: str, tokens: int, computed: int) -> int | None:
        """Tokens beyond `computed` that can be loaded; None: ask again."""
        now = self._clock()
        self._asked = True
        self.planner.choice.transfer_cost.near = self._thread.near
        if self.adapter_requests.must_wait(request_id, now):
            return None
        if request_id not in self.planner.requests:
            return 0
        if request_id in self._restarting:
            self._restarting.discard(request_id)
            self._lookups.start(self.planner.on_restart(request_id, tokens, now))
        self._lookups.take_for(request_id)
        self._lookups.end_late(request_id, tokens, computed, now)
        if self._lookups.waits_for_names(request_id, now):
            return None
        return self.planner.loadable_tokens(request_id, tokens, computed, now)

    def on_blocks_allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int
    ) -> None:
        """The engine wants so many of the tokens that were offered, in these blocks."""
        self._messages.request_begins(request_id)
        if request_id not in self.planner.requests:
            return
        self.planner.on_blocks_allocated(request_id, block_ids, tokens, self._clock())

    def make_promise(self, request_id: str, computed: int) -> PromisedBlocks | None:
        """For the engine that decodes, of a request that is about to finish; None: no promise."""
        if self._thread.pool is None:
            return None
        return self.planner.make_promise(request_id, computed)

    def on_request_finished(
        self, request_id: str, computed: int = 0, block_ids: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """It has ended, with so many tokens in these blocks, which it still has. Sends its hints
        about the conversation to the pool. Returns the block ids to pin."""
        rest = ScheduledRequest(request_id, computed, computed, block_ids)
        blocks_to_pin = self.planner.save_rest(rest, self._clock()) if self.namespaces else []
        self._restarting.discard(request_id)
        self.adapter_requests.drop(request_id)
        self._messages.request_begins(request_id)
        hints = self.planner.on_request_finished(request_id)
        if hints is not None:
            self._messages.request_ended(hints)
        return blocks_to_pin

    # --- a step -----------------------------------------------------------------------------

    def next_step(self) -> int:
        """Number a step in which the pool is not used."""
        self._step += 1
        return self._step

    def plan_step(
        self, step: EngineStep, still_cached: Callable[[int, int, bytes], bool]
    ) -> tuple[StepWork, list[int]]:
        """What the workers do beside this step, and the blocks to pin for it."""
        now = self._clock()
        for request_id in step.preempted:
            if request_id in self.planner.requests:
                self.planner.on_preempted(request_id)
                self._restarting.add(request_id)
        self._step += 1
        self._lookups.on_step()
        weights_wanted, self._asked = self._asked or not step.idle, False
        self._messages.repeat_arrivals(now)
        self._step_timer.on_start(self._step, step.prefill, now)
        self._start_prefetches(idle=step.idle)
        work = StepWork(
            self._step,
            self.namespaces,
            idle=step.idle,
            serials=self.names.serials,
            serial_min=self.names.serial,
            weights_wanted=weights_wanted,
        )
        if not self.namespaces:
            if now >= self._lookups.names_by:
                self._log.no_name(self.names)
            return work, []
        plan = self.planner.plan_step(step.scheduled, still_cached, now, idle=step.idle)
        work.loads, work.saves, work.probe = plan.loads, plan.saves, plan.probe
        work.verify, work.mark = plan.verify, self.names.writer.mark()
        if plan.loads or self.planner.loading:
            work.trust = self.planner.verifier.writers.trust
        return work, plan.blocks_to_pin

    def wait_if_idle(self, work: StepWork) -> bool:
        """Wait for a lookup, at most `IDLE_S`, if the engine only waits for lookups.

        Such an engine would step without a pause, and take a core from the masters.
        """
        waits = work.idle and not work.loads and self._lookups.waiting
        if waits:
            self._lookups.take(IDLE_S)
        return waits

    def on_worker_report(self, report: WorkerReport) -> ReportOutcome:
        """Take what the workers report after a step."""
        now = self._clock()
        self._step_timer.on_end(report.step, now)
        self.adapter_requests.on_report(report.step)
        dropped = self.planner.saves.queue.take_dropped()
        if not report.has_news:  # as after most steps
            return ReportOutcome(dropped, [])
        changed = [self._on_worker_info(info) for info in report.worker_infos]
        for adapters in report.adapters:
            self.adapter_requests.known.on_info(adapters)
        if report.adapters:
            self._start_adapter_requests()
        for loaded in report.loads:
            self.planner.on_load_result(loaded, now)
        for probed in report.probes:
            self.planner.prober.on_result(probed)
        dropped += self.planner.saves.queue.take_dropped()  # by a reset
        outcome = ReportOutcome(dropped, [], any(changed))
        for saved in report.saves:
            unpinned, stored = self.planner.on_save_result(saved, now)
            outcome.blocks_to_unpin.extend(unpinned)
            outcome.stored.extend(stored)
        for verified in report.verified:
            if verified.problem and not self.planner.verifier.writers.problem:
                self._log.line(f"verify_rate has no effect: {verified.problem}")
            unpinned, mismatch, was_trusted = self.planner.verifier.on_result(verified)
            outcome.blocks_to_unpin.extend(unpinned)
            if mismatch is not None:
                self._log.mismatch(mismatch, self.names, self.planner.verifier)
                outcome = outcome._replace(drop_cache=outcome.drop_cache or was_trusted)
        return outcome

    def reset(self, serial: int | None = None) -> None:
        """The weights may have changed: share blocks under the name of those that there are now.

        `serial`: of the infos that tell what they are; None: of those that ranks are asked for.
        """
        self._restarting.update(self.planner.on_reset())
        self._lookups.reset()
        # With parts by heads the fingerprint is of those weights only that no rank divides.
        alone = self._settings.kv_head_parts > 0
        self.names.writer = BlockWriter.new()
        self.names.forget(secrets.token_hex(6), alone=alone, serial=serial)
        self.planner.promises.name = ""
        self.adapter_requests.known.reset()
        self.planner.verifier.reset()
        self._log.reset()

    def close(self) -> None:
        self._lookups.close()
        self._thread.close(1.0)

    # --- inside -----------------------------------------------------------------------------

    def _on_worker_info(self, info: WorkerInfo) -> bool:
        """With the last rank's info the namespaces can be made, and held lookups start.

        True if a rank has found that its weights were changed, and no reset has told of it.
        """
        changed = info.serial > self.names.serial
        if changed:
            self._log.line(
                "the weights were changed without reset_prefix_cache: what the engine has in its "
                "own cache is dropped, and what runs is not saved"
            )
            self.reset(info.serial)
        if not self.names.on_info(info):
            return changed
        self.planner.verifier.reset()
        self._log.names(self.names)
        self.planner.windows.block_bytes = self.names.block_bytes
        self.planner.promises.name = promise_name(self.namespaces)
        self._watch.on_new_names()
        self._lookups.on_names()
        return changed

    def _start_adapter_requests(self) -> None:
        """Track the requests whose LoRA adapters are known now."""
        no_names = bool(self.namespaces) and not self.names.knows_adapters
        for request_id, request, refused in self.adapter_requests.take_ready(no_names=no_names):
            if refused:  # never tracked: the engine computes it
                self.planner.counters["miss adapter refused"] += 1
                replaced = self.adapter_requests.known.refused(request.adapter)
                self._log.refused_adapter(request.adapter, replaced=replaced)
                continue
            lookup = self.planner.on_new_request(
                request_id, request.hashes, request.tokens, request.hints, self._clock()
            )
            if lookup is not None and request.given_up:  # it is being computed: only saves
                reason = "adapter not loaded"
                self.planner.lookups.on_result(request_id, lookup.serial, (), reason)
            else:
                self._lookups.start(lookup)

    def _start_prefetches(self, *, idle: bool) -> None:
        """For the prompts that this step has left in the queue. (design: promotion)"""
        # The engine asks for the first of its queue only. (An idle one waits for answers later.)
        if self._lookups.waiting and not idle:
            self._lookups.take()
        for request in self.planner.lookups.take_prefetches():
            self._messages.prefetch(self.namespaces[request.group], request)
