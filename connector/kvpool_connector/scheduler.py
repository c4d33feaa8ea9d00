"""The scheduler half: reports the engine's events to the planner, and carries out its plans.

Runs in the engine's scheduling loop: no hook does more than a few microseconds' work for each new
block, or waits for a lookup longer than `_WAIT_S` in a step. Its own thread asks the masters
(`lookups.py`); hints are sent by the pool's thread (`pool_thread.py`). (design: pool-thread)
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kvpool import KvpoolError, MatchPoller, Namespace
from kvpool_connector import namespace
from kvpool_connector.cost_model import StepTimer
from kvpool_connector.lookups import LATE_REASONS, NO_NAMESPACE, Lookups
from kvpool_connector.messages import StepWork, WorkerInfo, WorkerReport
from kvpool_connector.planner import (
    CacheGroup,
    LookupRequest,
    Planner,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
)
from kvpool_connector.pool_thread import PoolThread
from kvpool_connector.save_queue import StoredBlock
from kvpool_connector.settings import Settings
from kvpool_connector.worker import IDLE_S

#: Metrics that always have news, such as the hooks' own time, are reported this often.
_METRICS_EVERY_S: Final = 1.0
#: Lookups without an answer are in the log this often.
_WARN_EVERY_S: Final = 60.0
#: A master answers within a millisecond as a rule. Where the engine computes for other requests, a
#: lookup that is not waited for so long costs its request a whole step. So long in all per step.
_WAIT_S: Final = 0.001
#: The estimated speed of computing is reported for a prompt of so many tokens.
_RATE_TOKENS: Final = 1024


class EngineInfo(NamedTuple):
    """What the scheduler half knows about its engine.

    `fields` are those of the namespace that are known at the start; `seed()` is what all hashes
    begin with. `ranks` workers run the model, `parts` of them have bytes of their own. `blocks` are
    those of the engine's KV cache.
    """

    groups: tuple[CacheGroup, ...]
    kinds: tuple[str, ...]
    fields: Mapping[str, object]
    seed: Callable[[], str]
    ranks: int
    parts: int
    blocks: int
    loads: bool = True
    saves: bool = True


class EngineStep(NamedTuple):
    """What the engine computes next; `scheduled` without the requests that are quiet.

    `prefill` has tokens first to last (excluded) of prompts. `idle`: it computes nothing.
    """

    scheduled: Sequence[ScheduledRequest]
    preempted: Sequence[str]
    prefill: list[tuple[int, int]]
    idle: bool


class ReportOutcome(NamedTuple):
    """What a report of the workers means for the engine."""

    blocks_to_unpin: list[int]
    stored: list[StoredBlock]


class ConnectorScheduler:
    """One engine's scheduler half. Called by the engine's thread only.

    `log_line` writes one line to the engine's log, and is called in either thread.
    """

    def __init__(
        self,
        settings: Settings,
        thread: PoolThread,
        engine: EngineInfo,
        log_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._thread = thread
        self._engine = engine
        self._log_line = log_line
        self._clock = clock
        limits = PlannerLimits(
            load=settings.load if engine.loads else "never",
            save=engine.saves,
            hit_tokens_min=settings.hit_tokens_min,
            lookup_timeout_s=settings.lookup_timeout_s,
            load_timeout_s=settings.load_timeout_s,
            save_decode=settings.save_decode,
            loads_max=settings.loads_max,
            saved_blocks_max=max(1, int(engine.blocks * settings.save_share_max)),
            save_retries=settings.save_retries,
            probe_every_s=settings.probe_every_s,
        )
        self.planner = Planner(engine.groups, limits, ranks=engine.ranks)
        #: One for each group; empty until every rank has sent its `WorkerInfo`.
        self.namespaces: tuple[Namespace, ...] = ()
        self._step_timer = StepTimer(self.planner.prefill_cost)
        self._step = 0
        self._metrics_at = -_METRICS_EVERY_S
        self._generation = ""
        self._worker_infos: dict[int, WorkerInfo] = {}
        self._held_lookups: dict[int, LookupRequest] = {}  # until there are namespaces
        poller = MatchPoller(settings.client(), settings.member())
        self._lookups = Lookups(poller, settings.start_wait_s, clock)
        self._wait_left_s = _WAIT_S
        self._preempted: set[str] = set()
        self._late_lookups: Counter[str] = Counter()  # by reason
        self._warned_at = -_WARN_EVERY_S

    # --- a request --------------------------------------------------------------------------

    def on_new_request(
        self, request_id: str, hashes: Sequence[bytes], tokens: int, hints: RequestHints
    ) -> None:
        """Start its lookup."""
        now = self._clock()
        self._start_lookup(self.planner.on_new_request(request_id, hashes, tokens, hints, now))

    def loadable_tokens(self, request_id: str, tokens: int, computed: int) -> int | None:
        """Tokens beyond `computed` that can be loaded; None: ask again."""
        now = self._clock()
        if request_id in self._preempted:
            self._preempted.discard(request_id)
            self._start_lookup(self.planner.on_restart(request_id, tokens, now))
        self._take_lookup_results()
        if self._lookups.waiting and self.planner.is_looking_up(request_id):
            self._wait_for_lookups()
        late = self.planner.late_lookup(request_id, tokens, computed, now)
        if late is not None:
            held = self._held_lookups.pop(late, None)
            reason = self._lookups.give_up(late) if held is None else NO_NAMESPACE
            self.planner.on_lookup_result(request_id, late, (), reason)
        return self.planner.loadable_tokens(request_id, tokens, computed, now)

    def on_blocks_allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int
    ) -> None:
        """The engine wants so many of the tokens that were offered, in these blocks."""
        self.planner.on_blocks_allocated(request_id, block_ids, tokens, self._clock())

    def on_request_finished(self, request_id: str) -> None:
        """It has ended. Sends its hints about the conversation to the pool."""
        self._preempted.discard(request_id)
        hints = self.planner.on_request_finished(request_id)
        if hints is not None and hints.session and (hints.ends or hints.resume_in_s is not None):
            self._thread.start(partial(self._send_hints, hints))

    # --- a step -----------------------------------------------------------------------------

    def plan_step(
        self, step: EngineStep, still_cached: Callable[[int, int, bytes], bool]
    ) -> tuple[StepWork, list[int]]:
        """What the workers do beside this step, and the blocks to pin for it.

        `still_cached(block_id, group, digest)` says whether a block still has these contents.
        """
        now = self._clock()
        for request_id in step.preempted:
            if self.planner.tracks(request_id):
                self.planner.on_preempted(request_id)
                self._preempted.add(request_id)
        self._step += 1
        self._wait_left_s = _WAIT_S
        self._step_timer.on_start(self._step, step.prefill, now)
        if not self.namespaces:
            return StepWork(self._step, idle=step.idle), []
        plan = self.planner.plan_step(step.scheduled, still_cached, now)
        work = StepWork(self._step, self.namespaces, plan.loads, plan.saves, plan.probe, step.idle)
        return work, plan.blocks_to_pin

    def wait_if_idle(self, work: StepWork) -> None:
        """Wait for a lookup, at most `IDLE_S`, if the engine only waits for lookups.

        Such an engine would step without a pause, and take a core from the masters.
        """
        if work.idle and not work.loads and self._lookups.waiting:
            self._take_lookup_results(IDLE_S)

    def on_worker_report(self, report: WorkerReport) -> ReportOutcome:
        """Take what the workers report after a step."""
        now = self._clock()
        self._step_timer.on_end(report.step, now)
        for info in report.worker_infos:
            self._on_worker_info(info)
        for loaded in report.loads:
            self.planner.on_load_result(loaded, now)
        for probed in report.probes:
            self.planner.on_probe_result(probed)
        outcome = ReportOutcome([], [])
        for saved in report.saves:
            unpinned, stored = self.planner.on_save_result(saved, now)
            outcome.blocks_to_unpin.extend(unpinned)
            outcome.stored.extend(stored)
        return outcome

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, and the estimates; empty when there is little news."""
        counters = self.planner.counters
        now = self._clock()
        if now - self._metrics_at < _METRICS_EVERY_S and not counters.keys() - {"hooks", "hook_s"}:
            return {}
        self._metrics_at = now
        metrics = dict(counters)
        counters.clear()
        self._warn_late_lookups(metrics, now)
        metrics["load_bandwidth_bytes"] = self.planner.transfer_cost.bandwidth
        prefill_s = self.planner.prefill_cost.seconds(0, _RATE_TOKENS)
        if prefill_s:
            metrics["prefill_tokens_rate"] = _RATE_TOKENS / prefill_s
        return metrics

    def reset(self) -> None:
        """The weights have changed: what was saved before is never read again."""
        self._generation = secrets.token_hex(6)
        self._make_namespaces()

    def close(self) -> None:
        self._lookups.close()
        self._thread.close(1.0)

    # --- inside -----------------------------------------------------------------------------

    def _warn_late_lookups(self, metrics: Mapping[str, float], now: float) -> None:
        """One line now and then: a pool that answers too late must be seen in the log as well."""
        for reason in LATE_REASONS:
            if count := int(metrics.get(f"miss {reason}", 0)):
                self._late_lookups[reason] += count
        if self._late_lookups and now - self._warned_at >= _WARN_EVERY_S:
            late = self._late_lookups
            reasons = ", ".join(f"{late[name]} {name}" for name in LATE_REASONS if late[name])
            self._log_line(
                f"{self._late_lookups.total()} prompts were computed without a lookup: {reasons}"
            )
            self._late_lookups.clear()
            self._warned_at = now

    def _on_worker_info(self, info: WorkerInfo) -> None:
        """With the last rank's info the namespaces can be made, and held lookups start."""
        if self.namespaces or info.rank in self._worker_infos:
            return
        self._worker_infos[info.rank] = info
        if len(self._worker_infos) < self._engine.ranks:
            return
        sizes = [info.block_bytes for info in self._worker_infos.values()]
        self.planner.block_bytes = tuple(max(column) for column in zip(*sizes, strict=True))
        self._make_namespaces()
        held, self._held_lookups = self._held_lookups, {}
        for lookup in held.values():
            self.planner.lookup_started(lookup.request_id, self._clock())
            self._start_lookup(lookup)

    def _make_namespaces(self) -> None:
        """One for each group. (design: namespace)"""
        if len(self._worker_infos) < self._engine.ranks:
            return
        packing = "\n".join(self._worker_infos[rank].packing for rank in sorted(self._worker_infos))
        self.namespaces = tuple(
            namespace.name(
                {
                    **self._engine.fields,
                    "seed": self._engine.seed(),
                    "group": f"{number}:{kind}",
                    "packing": namespace.digest(packing),
                    **({"generation": self._generation} if self._generation else {}),
                },
                parts=self._engine.parts,
            )
            for number, kind in enumerate(self._engine.kinds)
        )
        for name in self.namespaces:
            self._log_line(f"sharing blocks as: {name.name}")

    def _start_lookup(self, lookup: LookupRequest | None) -> None:
        if lookup is None:
            return
        if not self.namespaces:
            # The first step brings what is missing, and may be slow: that is no reason to miss.
            start_at = self._clock() + self._settings.start_wait_s
            self.planner.lookup_started(lookup.request_id, start_at)
            self._held_lookups[lookup.serial] = lookup
            return
        if reason := self._lookups.start(lookup, self.namespaces):
            self.planner.on_lookup_result(lookup.request_id, lookup.serial, (), reason)

    def _take_lookup_results(self, wait_s: float = 0.0) -> None:
        for result in self._lookups.take(wait_s):
            self.planner.on_lookup_result(*result)

    def _wait_for_lookups(self) -> None:
        """Wait for the next answer, as long as this step's hooks may wait."""
        if self._wait_left_s > 0:
            began = time.perf_counter()
            self._take_lookup_results(_WAIT_S)
            self._wait_left_s -= time.perf_counter() - began

    async def _send_hints(self, hints: RequestHints) -> None:
        """In the pool's thread."""
        pool = self._thread.pool
        try:
            if pool is not None and hints.ends:
                await pool.end(hints.session)
            elif pool is not None and hints.resume_in_s is not None:
                await pool.hint(hints.session, resume_in=hints.resume_in_s)
        except KvpoolError as error:  # a lost hint costs hits, never correctness
            self._log_line(f"a session hint was not sent: {error}")


def parse_hints(params: Any) -> tuple[RequestHints, str]:
    """The hints in a request's `kv_transfer_params`, and the names of those that are not valid.

    Known are `session_id` (printable text, at most 128 characters), `resume_in_s` (seconds until
    the next prompt is expected, and so how long to retain this one) and `end_session` (true when no
    more prompts come). Others are ignored, they may be another connector's. So is what is not
    valid.
    """
    if not isinstance(params, Mapping):
        return RequestHints(), ""
    wrong = []
    session = params.get("session_id", "")
    if not isinstance(session, str) or len(session) > 128 or not session.isprintable():
        wrong.append("session_id")
        session = ""
    resume_in_s = params.get("resume_in_s")
    number = isinstance(resume_in_s, int | float) and not isinstance(resume_in_s, bool)
    if resume_in_s is not None and not (number and 0 <= resume_in_s <= 1e9):
        wrong.append("resume_in_s")
        resume_in_s = None
    ends = params.get("end_session", False)
    if not isinstance(ends, bool):
        wrong.append("end_session")
        ends = False
    return RequestHints(session, resume_in_s if session else None, ends), ", ".join(wrong)
