"""What keeps an error of ours out of the engine: it goes on without the pool, and nothing leaks.

An exception in a hook ends vLLM's EngineCore with all of its requests. After one, the scheduler's
half is in an unknown state, so nothing of it is used any more; what the engine must get back is
written down here: blocks that were pinned, and requests that wait for a load. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvpool_connector.records.messages import GroupBlocks, LoadRequest, StepWork, WorkerReport

T = TypeVar("T")

#: Seconds without the pool after a failure; doubled with each, up to `_OFF_S_MAX`.
OFF_S: Final = 60.0
_OFF_S_MAX: Final = 3600.0
#: Reasons that are remembered as logged.
_REASONS_MAX: Final = 64


class Fuse:
    """Whether the scheduler's half is used.

    | state | hooks | next |
    |---|---|---|
    | whole | of the scheduler's half | blown, with an exception in one |
    | blown | answer "no hit, no work" | whole with a new half, when nothing is owed and `due` |
    """

    def __init__(self) -> None:
        self.blown = False
        self._until = 0.0
        self._off_s = OFF_S

    def blow(self, now: float) -> float:
        """Returns for how many seconds at least."""
        off_s, self._off_s = self._off_s, min(2 * self._off_s, _OFF_S_MAX)
        self.blown, self._until = True, now + off_s
        return off_s

    def due(self, now: float) -> bool:
        """Whether the pool may be tried again."""
        return self.blown and now >= self._until

    def mend(self) -> None:
        """There is a new scheduler's half."""
        self.blown = False


@dataclass
class FailureLog:
    """Counts every failure, and writes each reason once."""

    _whose: str
    _write: Callable[[str, Exception], None]
    _count: Callable[[str, float], None]
    _seen: set[str] = field(default_factory=set)

    def add(
        self, what: str, error: Exception, consequence: str = "the engine goes on without"
    ) -> None:
        """It has failed with this error."""
        self._count(f"hook_failed {what}", 1)
        reason = f"{self._whose}{what} failed with {type(error).__name__}: {error}"
        if reason not in self._seen and len(self._seen) < _REASONS_MAX:
            self._seen.add(reason)
            hint = "Please report this: it is a mistake in kvpool"
            self._write(f"{reason}; {consequence}. {hint}", error)

    def guard(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        """What `work` returns; `otherwise` if it fails."""
        try:
            return work()
        except Exception as error:
            self.add(what, error)
            return otherwise


#: An engine without free blocks waits so long for those of saves: they are gathered for 0.1 s, and
#: few saves take longer. Later it preempts, as it would without a pool.
FREES_WAIT_S: Final = 0.25


class Owed:
    """What the engine gets back: pins of its blocks, and the end of loads.

    Blocks of a save are pinned until every one of `ranks` has acknowledged its job: a worker may
    still read them, and bytes of another block under their name would be wrong everywhere.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pinned: Counter[int] = Counter()
        #: Of saves and comparisons: blocks, and ranks that have not acknowledged.
        self._jobs: dict[tuple[str, int], tuple[list[int], int]] = {}
        self._waiting: dict[str, tuple[Sequence[int], ...]] = {}  # blocks of each group
        self._sent: set[str] = set()  # of those, the loads that the workers know
        self._short = False  # of free blocks, in this step
        self._short_since: float | None = None

    def __bool__(self) -> bool:
        return bool(self._pinned or self._waiting or self._jobs)

    def on_allocated(self, request_id: str, block_ids: tuple[Sequence[int], ...]) -> None:
        """The request waits until these blocks are loaded, or known to be missing."""
        self._waiting[request_id] = block_ids

    def on_pinned(self, blocks: Sequence[int]) -> None:
        """These were pinned, one by one."""
        self._pinned.update(blocks)

    def on_sent(self, work: StepWork) -> None:
        """The workers get this, at the end of each step."""
        if not self._short:
            self._short_since = None
        self._short = False
        for load in work.loads:
            self._sent.add(load.request_id)
        for save in work.saves:
            ids = [one for blocks in save.blocks for one in blocks.block_ids]
            self._jobs["save", save.job] = ids, self._ranks
        if work.verify is not None:
            ids = [one for blocks in work.verify.blocks for one in blocks.block_ids]
            self._jobs["verify", work.verify.job] = ids, self._ranks

    def on_report(self, report: WorkerReport) -> None:
        """What the workers have done: jobs that one rank has ended, and loads."""
        for loaded in report.loads:
            self._waiting.pop(loaded.request_id, None)
            self._sent.discard(loaded.request_id)
        for saved in report.saves:
            self._on_rank_ended(("save", saved.job))
        for verified in report.verified:
            self._on_rank_ended(("verify", verified.job))

    def _on_rank_ended(self, job: tuple[str, int]) -> None:
        blocks, ranks = self._jobs.pop(job, ([], 0))
        if ranks > 1:
            self._jobs[job] = blocks, ranks - 1

    @property
    def pinned_blocks(self) -> int:
        return len(self._pinned)

    def frees_blocks(self, uses: Callable[[int], int], now: float) -> bool:
        """Whether an engine without a free block gets one soon: one whose `uses` are all pins. A
        request may have others.

        True for `FREES_WAIT_S` at most, and then not again before a step that did not ask.
        """
        if self._short_since is None:
            self._short_since = now
        self._short = True
        return now - self._short_since < FREES_WAIT_S and any(
            uses(block) == pins for block, pins in self._pinned.items()
        )

    def on_unpinned(self, blocks: Sequence[int]) -> None:
        """These pins were given back."""
        pinned = self._pinned
        for block in blocks:
            if left := pinned.pop(block) - 1:
                pinned[block] = left

    def idle_pins(self) -> list[int]:
        """Blocks whose pins no worker's job needs."""
        busy: Counter[int] = Counter()
        for blocks, _ in self._jobs.values():
            busy.update(blocks)
        return list((self._pinned - busy).elements())

    def take_unsent(self) -> list[LoadRequest]:
        """Loads that are to fail: of requests that wait, and of which no worker knows."""
        unsent = [one for one in self._waiting if one not in self._sent]
        self._sent.update(unsent)
        return [
            LoadRequest(
                request_id,
                tuple(
                    GroupBlocks(group, (), tuple(ids))
                    for group, ids in enumerate(self._waiting[request_id])
                ),
                0.0,
            )
            for request_id in unsent
        ]
