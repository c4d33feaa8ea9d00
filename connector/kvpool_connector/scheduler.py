"""The scheduler half: tells the planner what happened, and the engine what the planner decided.

Runs in the engine's scheduling loop: no hook waits for anything, or does more than a few
microseconds' work for each block that is new.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kvpool import KvpoolError, Match, Namespace, ReadStatus
from kvpool_connector import namespace
from kvpool_connector.cost_model import StepTimes
from kvpool_connector.messages import Hello, Report, Work
from kvpool_connector.planner import Group, Hints, Limits, Lookup, Planner, Scheduled, Stored
from kvpool_connector.pool_thread import PoolThread
from kvpool_connector.settings import Settings
from kvpool_connector.worker import IDLE_S

#: Figures that are always there, such as the hooks' own time, are reported this often.
_FIGURES_S: Final = 1.0
#: After so many lookups in a row without an answer the next ones are misses at once, for this long
#: at first.
_SILENT_AFTER: Final = 3
_SILENT_S: Final = 0.5
_SILENT_S_MAX: Final = 5.0
#: Lookups that end for one of these reasons had no answer in time; the log says so this often.
_LATE: Final = ("lookup timeout", "no master", "silent pool")
_COMPLAIN_S: Final = 60.0
#: The estimated speed of computing is shown for a prompt of so many tokens.
_RATE_TOKENS: Final = 1024


class Engine(NamedTuple):
    """What the scheduler half knows of its engine.

    `fields` are those of the namespace that are known at the start; `seed()` is what all hashes
    begin with. `ranks` are workers, `parts` how many of them have bytes of their own.
    """

    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    fields: Mapping[str, object]
    seed: Callable[[], str]
    ranks: int
    parts: int
    blocks: int
    loads: bool = True
    saves: bool = True


class Answer(NamedTuple):
    """What came of a lookup."""

    request_id: str
    serial: int
    matches: tuple[Match, ...]
    reason: str


class Step(NamedTuple):
    """What the engine computes next. `still_there(block_id, group, digest)`: see the planner."""

    scheduled: Sequence[Scheduled]
    preempted: Sequence[str]
    prefill: list[tuple[int, int]]  # tokens first to last, excluded


class Outcome(NamedTuple):
    """What the workers' reports mean for the engine: blocks to let go of, and what is stored."""

    released: list[int]
    stored: list[Stored]


class Scheduler:
    """One engine's scheduler half. Called by the engine's thread only."""

    def __init__(
        self,
        settings: Settings,
        thread: PoolThread,
        engine: Engine,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._thread = thread
        self._engine = engine
        self._tell = tell
        self._clock = clock
        limits = Limits(
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
        self.namespaces: tuple[Namespace, ...] = ()
        self._times = StepTimes(self.planner.prefill_time)
        self._step = 0
        self._told_at = -_FIGURES_S
        self._generation = ""
        self._hellos: dict[int, Hello] = {}
        self._waiting: list[Lookup] = []  # until the ranks have said how their blocks are made
        self._answers: deque[Answer] = deque()  # from the pool's thread
        self._answered = threading.Event()
        self._asking = 0  # lookups under way
        self._preempted: set[str] = set()
        self._late = 0
        self._complained_at = -_COMPLAIN_S
        self._unanswered = 0  # lookups in a row
        self._silent_until = 0.0

    # --- a request --------------------------------------------------------------------------

    def arrived(self, request_id: str, hashes: Sequence[bytes], tokens: int, hints: Hints) -> None:
        """It is new: the lookup starts."""
        lookup = self.planner.arrived(request_id, hashes, tokens, hints, self._clock())
        self._ask(lookup)

    def offer(self, request_id: str, tokens: int, computed: int) -> int | None:
        """Tokens beyond `computed` that can be loaded; None: ask again."""
        now = self._clock()
        if request_id in self._preempted:
            self._preempted.discard(request_id)
            self._ask(self.planner.again(request_id, tokens, now))
        self._take_answers()
        return self.planner.offer(request_id, tokens, computed, now)

    def allocated(self, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine wants so many of the tokens that were offered, in these blocks."""
        self.planner.allocated(request_id, block_ids, tokens, self._clock())

    def finished(self, request_id: str) -> None:
        """It is over. What it said of its conversation is passed on."""
        self._preempted.discard(request_id)
        hints = self.planner.finished(request_id)
        if hints is not None and hints.session and (hints.ends or hints.resume_in_s is not None):
            self._thread.start(partial(self._hint, hints))

    # --- a step -----------------------------------------------------------------------------

    def step(
        self, step: Step, still_there: Callable[[int, int, bytes], bool]
    ) -> tuple[Work, list[int]]:
        """What the workers do beside this step, and the blocks to keep for it."""
        now = self._clock()
        for request_id in step.preempted:
            if self.planner.knows(request_id):
                self.planner.preempted(request_id)
                self._preempted.add(request_id)
        self._step += 1
        self._times.began(self._step, step.prefill, now)
        idle = not step.scheduled
        if not self.namespaces:
            return Work(self._step, idle=idle), []
        plan = self.planner.step(step.scheduled, still_there, now)
        work = Work(self._step, self.namespaces, plan.loads, plan.saves, plan.probe, idle)
        return work, plan.keep

    def rest(self, work: Work) -> None:
        """Let the pool's thread have the interpreter, if the engine only waits for answers."""
        if work.idle and not work.loads and self._asking:
            self._answered.wait(IDLE_S)
        self._answered.clear()

    def reported(self, report: Report) -> Outcome:
        """What the workers say after a step."""
        now = self._clock()
        self._times.ended(report.step, now)
        for hello in report.hellos:
            self._greet(hello)
        for loaded in report.loaded:
            self.planner.load_ended(loaded, now)
        for probed in report.probed:
            self.planner.probe_ended(probed)
        outcome = Outcome([], [])
        for saved in report.saved:
            released, stored = self.planner.save_ended(saved, now)
            outcome.released.extend(released)
            outcome.stored.extend(stored)
        return outcome

    def figures(self) -> dict[str, float]:
        """What happened since the last call, and the estimates; empty for little news."""
        counters = self.planner.counters
        now = self._clock()
        if now - self._told_at < _FIGURES_S and not counters.keys() - {"hooks", "hook_s"}:
            return {}
        self._told_at = now
        figures = dict(counters)
        counters.clear()
        self._complain(figures, now)
        figures["load_bandwidth_bytes"] = self.planner.load_time.bandwidth
        prefill_s = self.planner.prefill_time.seconds(0, _RATE_TOKENS)
        if prefill_s:
            figures["prefill_tokens_rate"] = _RATE_TOKENS / prefill_s
        return figures

    def reset(self) -> None:
        """The weights have changed: what was saved before is never read again."""
        self._generation = secrets.token_hex(6)
        self._name()

    def close(self) -> None:
        self._thread.close(1.0)

    # --- inside -----------------------------------------------------------------------------

    def _complain(self, figures: Mapping[str, float], now: float) -> None:
        """A pool that is too slow to be asked must not be lost on anybody who reads the log."""
        self._late += int(sum(figures.get(f"miss {reason}", 0) for reason in _LATE))
        if self._late and now - self._complained_at >= _COMPLAIN_S:
            self._tell(
                f"{self._late} prompts were computed without knowing what the pool has of them: no "
                f"answer within lookup_timeout_s ({self._settings.lookup_timeout_s:g} s)"
            )
            self._late = 0
            self._complained_at = now

    def _greet(self, hello: Hello) -> None:
        """A rank says how its blocks are made; with the last of them the namespaces are known."""
        if self.namespaces or hello.rank in self._hellos:
            return
        self._hellos[hello.rank] = hello
        if len(self._hellos) < self._engine.ranks:
            return
        sizes = [hello.block_bytes for hello in self._hellos.values()]
        self.planner.block_bytes = tuple(max(column) for column in zip(*sizes, strict=True))
        self._name()
        waiting, self._waiting = self._waiting, []
        for lookup in waiting:
            self.planner.asked(lookup.request_id, self._clock())
            self._ask(lookup)

    def _name(self) -> None:
        if len(self._hellos) < self._engine.ranks:
            return
        packing = "\n".join(self._hellos[rank].packing for rank in sorted(self._hellos))
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
            self._tell(f"sharing blocks as: {name.name}")

    def _ask(self, lookup: Lookup | None) -> None:
        if lookup is None:
            return
        if not self.namespaces:
            # The first step brings what is missing, and may be slow: that is no reason to miss.
            self.planner.asked(lookup.request_id, self._clock() + self._settings.start_wait_s)
            self._waiting.append(lookup)
            return
        if self._clock() < self._silent_until:
            self.planner.found(lookup.request_id, lookup.serial, (), "silent pool")
            return
        work = partial(self._look_up, lookup, self.namespaces)
        if self._thread.pool is None or not self._thread.start(work):
            self.planner.found(lookup.request_id, lookup.serial, (), "no pool")
        else:
            self._asking += 1

    def _take_answers(self) -> None:
        while self._answers:
            answer = self._answers.popleft()
            self._asking -= 1
            silent = any(match.stopped is ReadStatus.NO_MASTER for match in answer.matches)
            self._unanswered = self._unanswered + 1 if silent or not answer.matches else 0
            if self._unanswered >= _SILENT_AFTER:
                # Not every request is to find out anew, at the cost of a timeout.
                backoff_s = min(_SILENT_S * 2 ** (self._unanswered - _SILENT_AFTER), _SILENT_S_MAX)
                self._silent_until = self._clock() + backoff_s
            self.planner.found(*answer)

    async def _look_up(self, lookup: Lookup, namespaces: Sequence[Namespace]) -> None:
        """In the pool's thread."""
        pool = self._thread.pool
        matches: list[Match] = []
        reason = "no pool"
        try:
            for name, chain in zip(namespaces, lookup.chains, strict=True):
                if pool is not None:
                    timeout_s = self._settings.lookup_timeout_s
                    matches.append(await pool.match(name, chain, timeout=timeout_s))
        except KvpoolError as error:
            matches, reason = [], type(error).__name__
        answer = Answer(lookup.request_id, lookup.serial, tuple(matches), reason)
        self._answers.append(answer)
        self._answered.set()

    async def _hint(self, hints: Hints) -> None:
        """In the pool's thread."""
        pool = self._thread.pool
        try:
            if pool is not None and hints.ends:
                await pool.end(hints.session)
            elif pool is not None and hints.resume_in_s is not None:
                await pool.hint(hints.session, resume_in=hints.resume_in_s)
        except KvpoolError as error:  # advice; it was checked, so this is news
            self._tell(f"a hint was not taken: {error}")


def hints_of(params: Any) -> tuple[Hints, str]:
    """What `kv_transfer_params` of a request say, and what is wrong with them, if anything.

    Known are `session_id` (text), `resume_in_s` (seconds until the next prompt is expected, and so
    how long to retain this one) and `end_session` (true when no more comes). Others are somebody
    else's. What is wrong is left out.
    """
    if not isinstance(params, Mapping):
        return Hints(), ""
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
    return Hints(session, resume_in_s if session else None, ends), ", ".join(wrong)
