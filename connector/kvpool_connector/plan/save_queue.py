"""Which blocks are being saved, which wait for their turn, and which the engine must pin: pure."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from kvpool.types import WriteStatus
from kvpool_connector.records.messages import AdapterKey, GroupBlocks, SaveRequest, SaveResult
from kvpool_connector.records.values import PlannerLimits

Mark = TypeVar("Mark")

#: Blocks that wait for a save; beyond it the oldest are dropped.
WAITING_BLOCKS_MAX: Final = 4096
#: Stored blocks that are remembered for requests that asked the pool before; beyond it the older
#: half is forgotten, and may be offered to the pool once more.
_STORED_BLOCKS_MAX: Final = 1 << 14
#: Of the waiting blocks, how many one step looks at: the scheduler's loop has microseconds for it.
_RETRIES_PER_STEP: Final = 64
#: Of the blocks that may be pinned, the share that may wait for further ones.
_GATHERED_SHARE_MAX: Final = 0.25
#: Seconds before the first retry; each further one waits twice as long.
_RETRY_AFTER_S: Final = 0.5
#: Runs of blocks that are looked at again when a save ends.
_AGAIN_MAX: Final = 256
#: What may succeed next time. ALREADY_STORED and BYPASSED are final, TOO_LARGE will not change.
_RETRYABLE: Final = frozenset(
    {
        WriteStatus.NO_SPACE,
        WriteStatus.DEADLINE,
        WriteStatus.SERVER_LOST,
        WriteStatus.REFUSED,
        WriteStatus.NO_MASTER,
        WriteStatus.IN_PROGRESS,
    }
)


class SaveRun(NamedTuple):
    """Blocks to save that follow one another: the `number`-th of a request in its group is the
    first, `parent` the key of the one before it, and `block_ids` say where their bytes are.

    `asked_at`: when the request asked the pool, which did not have the blocks then. A prompt of
    128K tokens has 8,192 blocks: as runs the scheduler's loop has time for them.
    """

    request_id: str
    group: int
    number: int
    digests: Sequence[bytes]
    parent: bytes
    block_ids: Sequence[int]
    asked_at: float
    adapter: AdapterKey | None = None
    attempts: int = 0

    def part(self, first: int, last: int) -> SaveRun:
        """The blocks `first` to `last` (excluded) of the run."""
        return self._replace(
            number=self.number + first,
            digests=self.digests[first:last],
            parent=self.digests[first - 1] if first else self.parent,
            block_ids=self.block_ids[first:last],
        )

    def split(self, marks: Sequence[Mark]) -> Iterator[tuple[Mark, SaveRun]]:
        """The parts of equal marks, of which there is one for each block."""
        for mark, places in itertools.groupby(range(len(marks)), marks.__getitem__):
            first, *others = places
            yield mark, self.part(first, first + 1 + len(others))


@dataclass(slots=True)
class _SaveJob:
    runs: list[SaveRun]
    blocks: tuple[GroupBlocks, ...]  # the same
    ranks_left: int
    started_at: float
    stored_at: float = -math.inf  # by the last rank that has acknowledged
    refused: dict[tuple[int, bytes], WriteStatus] = field(default_factory=dict)
    forgotten: bool = False  # its blocks are of weights that the engine has no longer


@dataclass(slots=True)
class _Gathered:
    """Blocks of one session that wait for further ones, parents before their children."""

    due_at: float
    runs: list[SaveRun] = field(default_factory=list)
    blocks: int = 0


class SaveQueue:
    """The saves of one engine, whose `ranks` workers each do every save. (design: pool-thread)

    A block, named by its group and digest, is in one of these states:

    | state    | its bytes          | next state                                                |
    |----------|--------------------|-----------------------------------------------------------|
    | absent   |                    | gathered, with `add`; waiting, if no block may be pinned  |
    | waiting  | may be overwritten | gathered, with `take_due` and `add`; absent, if they were |
    | gathered | pinned             | saving, with `take_saves`; absent, with `drop_gathered`   |
    | saving   | pinned             | absent, when all ranks have acknowledged; waiting, if the |
    |          |                    | pool refused it and may take it later                     |

    A request that asked the pool before a block was stored does not know of it: `add` leaves that
    block out. One that asked later and found nothing saves it again, for the pool has evicted it.

    A block is pinned from `add` to the last rank's `on_result`, or to `drop_gathered`, and each pin
    is returned exactly once. At most `saved_blocks_max` are pinned, at most `WAITING_BLOCKS_MAX`
    wait. A block is gathered for `save_gather_s` at most, as long as the engine steps. `counters`
    counts blocks: `saved_blocks`, `save_retries`, and `dropped REASON`.
    """

    def __init__(
        self, counters: MutableMapping[str, float], limits: PlannerLimits, *, ranks: int
    ) -> None:
        self._counters = counters
        self._limits = limits
        self._ranks = ranks
        self._jobs: dict[int, _SaveJob] = {}
        self._next_job = 0
        self._pinned = 0
        #: Gathered, or being saved; by group.
        self._saving: defaultdict[int, set[bytes]] = defaultdict(set)
        self._gathered: dict[tuple[str, float | None], _Gathered] = {}  # by session
        self._gathered_blocks = 0  # in all of them
        self._dropped_ids: list[int] = []  # pinned, until `take_dropped`
        #: When each was stored, by group; and those of before.
        self._stored: defaultdict[int, dict[bytes, float]] = defaultdict(dict)
        self._stored_before = self._stored
        #: When each may be tried again, those first that have waited longest.
        self._waiting: deque[tuple[float, SaveRun]] = deque()
        self._waiting_names: defaultdict[int, set[bytes]] = defaultdict(set)  # by group
        #: Left out for a save that may have ended before the latest request with this block asked.
        self._again: dict[tuple[int, bytes], SaveRun] = {}

    @property
    def running(self) -> bool:
        """Whether blocks are pinned."""
        return bool(self._jobs or self._gathered or self._dropped_ids)

    def add(
        self,
        runs: Sequence[SaveRun],
        session: str,
        resume_in_s: float | None,
        now: float,
        *,
        at_once: bool = False,
    ) -> list[int]:
        """Save these blocks of one session, or `at_once` with the next `take_saves`.

        Returns the block ids that the engine must pin. Left out are blocks that are being saved for
        another request, or have been since this one asked the pool. Those beyond
        `saved_blocks_max` wait.
        """
        accepted = self._accept(runs, now)
        pinned = _ids(accepted)
        if accepted:
            key = session, resume_in_s
            gathered = self._gathered.get(key)
            if gathered is None:
                gathered = self._gathered[key] = _Gathered(now + self._limits.save_gather_s)
            gathered.runs += accepted
            gathered.blocks += len(pinned)
            self._gathered_blocks += len(pinned)
            if at_once:
                gathered.due_at = now
            if self._gathered_blocks > self._limits.saved_blocks_max * _GATHERED_SHARE_MAX:
                self.expedite_all()
        return pinned

    def expedite(self, session: str, resume_in_s: float | None) -> None:
        """Nothing more comes for what is gathered of this session: save it with the next step."""
        gathered = self._gathered.get((session, resume_in_s))
        if gathered is not None:
            gathered.due_at = -math.inf

    def expedite_all(self) -> None:
        """The engine needs memory, or has time: save all that is gathered with the next step."""
        for gathered in self._gathered.values():
            gathered.due_at = -math.inf

    def take_saves(self, now: float) -> list[SaveRequest]:
        """A save for each session whose blocks have been gathered long enough."""
        due = [key for key, gathered in self._gathered.items() if gathered.due_at <= now]
        return [self._start(self._gathered.pop(key), *key, now) for key in due]

    def drop_gathered(self, reason: str) -> None:
        """What is gathered must not be saved any more. `take_dropped` has its pins."""
        for gathered in self._gathered.values():
            ids = _ids(gathered.runs)
            self._counters[f"dropped {reason}"] += len(ids)
            self._dropped_ids += ids
            for run in gathered.runs:
                self._saving[run.group].difference_update(run.digests)
        self._gathered.clear()
        self._gathered_blocks = 0

    def take_dropped(self) -> list[int]:
        """Block ids to unpin, of blocks that are not going to be saved."""
        dropped, self._dropped_ids = self._dropped_ids, []
        self._pinned -= len(dropped)
        return dropped

    def on_result(self, result: SaveResult, now: float) -> tuple[list[int], list[SaveRun]]:
        """One rank has ended a save.

        Returns block ids to unpin and the blocks that the pool has now: both empty until the last
        rank's result, and for a job that has ended.
        """
        job = self._jobs.get(result.job)
        if job is None:
            return [], []
        job.ranks_left -= 1
        job.stored_at = max(job.stored_at, now - result.age_s)
        for group, digest, status in result.refused:
            job.refused[group, digest] = status
        if job.ranks_left:
            return [], []
        del self._jobs[result.job]
        ids = _ids(job.runs)
        self._pinned -= len(ids)
        for blocks in job.blocks:
            self._saving[blocks.group].difference_update(blocks.digests)
        if job.forgotten:
            self._counters["dropped reset"] += len(job.refused)
            return ids, []
        stored: list[SaveRun] = job.runs
        names: Iterable[SaveRun | GroupBlocks] = job.blocks  # the same, and fewer
        if job.refused:
            names = stored = self._without_refused(job, now)
        for one in names:
            self._stored[one.group].update(dict.fromkeys(one.digests, job.stored_at))
            self._counters["saved_blocks"] += len(one.digests)
        if sum(map(len, self._stored.values())) > _STORED_BLOCKS_MAX // 2:
            self._stored_before, self._stored = self._stored, defaultdict(dict)
        for key in [one for one in self._again if one[1] not in self._saving[one[0]]]:
            for lost in self._unknown(self._again.pop(key)):
                self._enqueue(lost, now)
        return ids, stored

    def _without_refused(self, job: _SaveJob, now: float) -> list[SaveRun]:
        """What the pool has taken. Of the rest, what it may take later waits."""
        stored = []
        for run in job.runs:
            refusals = [job.refused.get((run.group, digest)) for digest in run.digests]
            for refusal, part in run.split(refusals):
                if refusal is None:
                    stored.append(part)
                elif refusal in _RETRYABLE and part.attempts < self._limits.save_retries:
                    again = part._replace(attempts=part.attempts + 1)
                    self._enqueue(again, now + _RETRY_AFTER_S * 2**again.attempts)
                else:
                    self._counters[f"dropped {refusal.label}"] += len(part.digests)
        return stored

    def reset(self) -> None:
        """The engine's weights have changed: nothing of what they computed is saved from now on.

        Saves that run go on, to the names that they were started with, and are not tried again.
        """
        self.drop_gathered("reset")
        waiting, self._waiting = self._waiting, deque()
        self._counters["dropped reset"] += sum(len(run.digests) for _, run in waiting)
        self._waiting_names.clear()
        self._again.clear()
        self._saving.clear()
        self._stored = self._stored_before = defaultdict(dict)
        for job in self._jobs.values():
            job.forgotten = True

    def take_due(
        self, still_cached: Callable[[int, int, bytes], bool], now: float
    ) -> list[SaveRun]:
        """Waiting blocks that may be tried again now, for `add`.

        Nothing while all pins are used. A block is dropped that is not `still_cached`.
        """
        if not self._waiting:
            return []
        due: list[SaveRun] = []
        later: list[tuple[float, SaveRun]] = []
        left = _RETRIES_PER_STEP if self._pinned < self._limits.saved_blocks_max else 0
        while self._waiting and left > 0:
            due_at, run = self._waiting.popleft()
            if due_at > now:
                later.append((due_at, run))
                left -= 1
                continue
            if len(run.digests) > left:
                self._waiting.appendleft((due_at, run.part(left, len(run.digests))))
                run = run.part(0, left)
            left -= len(run.digests)
            self._waiting_names[run.group].difference_update(run.digests)
            for one in self._unknown(run):
                places = zip(one.block_ids, one.digests, strict=True)
                cached = [still_cached(block, one.group, digest) for block, digest in places]
                due += [part for there, part in one.split(cached) if there]
                self._counters["save_retries"] += sum(cached)
                self._counters["dropped block reused"] += len(cached) - sum(cached)
        self._waiting.extendleft(reversed(later))
        return due

    def _start(
        self, gathered: _Gathered, session: str, resume_in_s: float | None, now: float
    ) -> SaveRequest:
        runs = gathered.runs
        self._gathered_blocks -= gathered.blocks
        job = self._next_job
        self._next_job += 1
        groups: dict[int, tuple[list[bytes], list[int], list[bytes]]] = {}
        for run in runs:
            digests, ids, parents = groups.setdefault(run.group, ([], [], []))
            digests += run.digests
            ids += run.block_ids
            parents.append(run.parent)
            parents += run.digests[:-1]
        blocks = tuple(
            GroupBlocks(group, tuple(digests), tuple(ids), tuple(parents))
            for group, (digests, ids, parents) in groups.items()
        )
        self._jobs[job] = _SaveJob(runs, blocks, self._ranks, now)
        adapters = frozenset([run.adapter for run in runs if run.adapter is not None])
        return SaveRequest(job, blocks, session, resume_in_s, adapters)

    def _accept(self, runs: Sequence[SaveRun], now: float) -> list[SaveRun]:
        """Pin those that no save has, as many as the engine can spare."""
        accepted: list[SaveRun] = []
        for run in runs:
            for new in self._unknown(run):
                room = max(0, self._limits.saved_blocks_max - self._pinned)
                if room < len(new.digests):
                    self._enqueue(new.part(room, len(new.digests)), now)
                    if not room:
                        continue
                    new = new.part(0, room)
                self._pinned += len(new.digests)
                self._saving[new.group].update(new.digests)
                accepted.append(new)
        return accepted

    def _unknown(self, run: SaveRun) -> list[SaveRun]:
        """The parts that no save has, or has had since their request asked the pool."""
        group, digests = run.group, run.digests
        saving, stored = self._saving[group], self._stored[group]
        before = self._stored_before[group]
        if all(names.isdisjoint(digests) for names in (saving, stored.keys(), before.keys())):
            return [run]  # as a rule: it takes a fraction of asking for each block
        marks = [
            None
            if digest in saving
            else stored.get(digest, before.get(digest, -math.inf)) <= run.asked_at
            for digest in digests
        ]
        parts = list(run.split(marks))
        oldest = next(iter(self._jobs.values()), None)
        if oldest is not None and oldest.started_at < run.asked_at:
            left_out = [part for is_new, part in parts if is_new is None]
            for part in left_out[: _AGAIN_MAX - len(self._again)]:
                self._again[group, part.digests[0]] = part
        return [part for is_new, part in parts if is_new]

    def _enqueue(self, run: SaveRun, due_at: float) -> None:
        """These wait; of a block that waits already this request's bytes are the newer ones."""
        names = self._waiting_names[run.group]
        if not names.isdisjoint(run.digests):
            again = names.intersection(run.digests)
            self._waiting = deque(
                (at, part)
                for at, one in self._waiting
                for stays, part in one.split(
                    [one.group != run.group or digest not in again for digest in one.digests]
                )
                if stays
            )
        names.update(run.digests)
        self._waiting.append((due_at, run))
        excess = sum(map(len, self._waiting_names.values())) - WAITING_BLOCKS_MAX
        while excess > 0:
            at, oldest = self._waiting.popleft()
            size = len(oldest.digests)
            if size > excess:
                self._waiting.appendleft((at, oldest.part(excess, size)))
                oldest = oldest.part(0, excess)
            self._waiting_names[oldest.group].difference_update(oldest.digests)
            excess -= len(oldest.digests)
            self._counters["dropped too many waiting"] += len(oldest.digests)


def _ids(runs: Iterable[SaveRun]) -> list[int]:
    return list(itertools.chain.from_iterable([run.block_ids for run in runs]))
