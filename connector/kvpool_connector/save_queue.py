"""Which blocks are being saved, which wait for their turn, and which the engine must pin: pure.

It knows no engine, clock or socket; `now` is in seconds of any one clock.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.types import WriteStatus
from kvpool_connector.messages import AdapterKey, GroupBlocks, SaveRequest, SaveResult

#: Blocks that wait for a save; beyond it the oldest are dropped.
WAITING_BLOCKS_MAX: Final = 4096
#: Stored blocks that are remembered for requests that asked the pool before; beyond it the oldest
#: are forgotten, and may be offered to the pool once more.
_STORED_BLOCKS_MAX: Final = 1 << 14
#: Of the waiting blocks, how many one step looks at: the scheduler's loop has microseconds for it.
_RETRIES_PER_STEP: Final = 64
#: Of the blocks that may be pinned, the share that may wait for further ones.
_GATHERED_SHARE_MAX: Final = 0.25
#: Seconds before the first retry; each further one waits twice as long.
_RETRY_AFTER_S: Final = 0.5
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


class SaveItem(NamedTuple):
    """One block to save: the `number`-th of a request in its group, and where its bytes are.

    `asked_at`: when the request asked the pool, which did not have the block then.
    """

    request_id: str
    group: int
    number: int
    digest: bytes
    parent: bytes
    block_id: int
    asked_at: float
    adapter: AdapterKey | None = None
    attempts: int = 0


class StoredBlock(NamedTuple):
    """A block that the pool has now, for KV events: the `number`-th of a request in that group."""

    request_id: str
    group: int
    number: int
    digest: bytes


@dataclass(slots=True)
class _SaveJob:
    items: list[SaveItem]
    ranks_left: int
    refused: dict[tuple[int, bytes], WriteStatus] = field(default_factory=dict)
    forgotten: bool = False  # its blocks are of weights that the engine has no longer


@dataclass(slots=True)
class _Gathered:
    """Blocks of one session that wait for further ones, parents before their children."""

    due_at: float
    items: list[SaveItem] = field(default_factory=list)


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
    is returned exactly once. At most `pinned_blocks_max` are pinned, at most `WAITING_BLOCKS_MAX`
    wait. A block is gathered for `gather_s` at most, as long as the engine steps. `counters` counts
    blocks: `saved_blocks`, `save_retries`, and `dropped REASON`.
    """

    def __init__(
        self,
        counters: MutableMapping[str, float],
        *,
        ranks: int,
        pinned_blocks_max: int,
        retries_max: int,
        gather_s: float = 0.0,
    ) -> None:
        self._counters = counters
        self._gather_s = gather_s
        self._ranks = ranks
        self._pinned_blocks_max = pinned_blocks_max
        self._retries_max = retries_max
        self._jobs: dict[int, _SaveJob] = {}
        self._next_job = 0
        self._pinned = 0
        #: Gathered, or being saved.
        self._saving: set[tuple[int, bytes]] = set()
        self._gathered: dict[tuple[str, float | None], _Gathered] = {}  # by session
        self._gathered_blocks = 0
        self._dropped_ids: list[int] = []  # pinned, until `take_dropped`
        #: When each was stored, oldest first.
        self._stored: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        #: When each may be tried again, oldest first.
        self._waiting: OrderedDict[tuple[int, bytes], tuple[float, SaveItem]] = OrderedDict()

    @property
    def running(self) -> bool:
        """Whether blocks are pinned."""
        return bool(self._jobs or self._gathered or self._dropped_ids)

    def add(
        self,
        items: Iterable[SaveItem],
        session: str,
        resume_in_s: float | None,
        now: float,
        *,
        at_once: bool = False,
    ) -> list[int]:
        """Save these blocks of one session, or `at_once` with the next `take_saves`.

        Returns the block ids that the engine must pin. Left out are blocks that are being saved for
        another request, or have been since this one asked the pool. Those beyond
        `pinned_blocks_max` wait.
        """
        accepted = self._accept(items, now)
        if accepted:
            key = session, resume_in_s
            gathered = self._gathered.get(key)
            if gathered is None:
                gathered = self._gathered[key] = _Gathered(now + self._gather_s)
            gathered.items += accepted
            self._gathered_blocks += len(accepted)
            if at_once:
                gathered.due_at = now
        return [item.block_id for item in accepted]

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
        if self._gathered_blocks > self._pinned_blocks_max * _GATHERED_SHARE_MAX:
            self.expedite_all()
        due = [key for key, gathered in self._gathered.items() if gathered.due_at <= now]
        return [self._start(self._gathered.pop(key).items, *key) for key in due]

    def drop_gathered(self, reason: str) -> None:
        """What is gathered must not be saved any more. `take_dropped` has its pins."""
        for gathered in self._gathered.values():
            self._counters[f"dropped {reason}"] += len(gathered.items)
            for item in gathered.items:
                self._saving.discard((item.group, item.digest))
                self._dropped_ids.append(item.block_id)
        self._gathered.clear()
        self._gathered_blocks = 0

    def take_dropped(self) -> list[int]:
        """Block ids to unpin, of blocks that are not going to be saved."""
        dropped, self._dropped_ids = self._dropped_ids, []
        self._pinned -= len(dropped)
        return dropped

    def on_result(self, result: SaveResult, now: float) -> tuple[list[int], list[StoredBlock]]:
        """One rank has ended a save.

        Returns block ids to unpin and the blocks that the pool has now: both empty until the last
        rank's result, and for a job that has ended.
        """
        job = self._jobs.get(result.job)
        if job is None:
            return [], []
        job.ranks_left -= 1
        for group, digest, status in result.refused:
            job.refused[group, digest] = status
        if job.ranks_left:
            return [], []
        del self._jobs[result.job]
        self._pinned -= len(job.items)
        stored: list[StoredBlock] = []
        for item in job.items:
            name = (item.group, item.digest)
            self._saving.discard(name)
            refusal = job.refused.get(name)
            if job.forgotten:
                if refusal is not None:
                    self._counters["dropped reset"] += 1
            elif refusal is None:
                self._stored[name] = now
                self._stored.move_to_end(name)
                stored.append(StoredBlock(item.request_id, item.group, item.number, item.digest))
            elif refusal in _RETRYABLE and item.attempts < self._retries_max:
                again = item._replace(attempts=item.attempts + 1)
                self._enqueue(again, now + _RETRY_AFTER_S * 2**again.attempts)
            else:
                self._counters[f"dropped {refusal.label}"] += 1
        while len(self._stored) > _STORED_BLOCKS_MAX:
            self._stored.popitem(last=False)
        self._counters["saved_blocks"] += len(stored)
        return [item.block_id for item in job.items], stored

    def reset(self) -> None:
        """The engine's weights have changed: nothing of what they computed is saved from now on.

        Saves that run go on, to the names that they were started with, and are not tried again.
        """
        self.drop_gathered("reset")
        self._counters["dropped reset"] += len(self._waiting)
        self._waiting.clear()
        self._saving.clear()
        self._stored.clear()
        for job in self._jobs.values():
            job.forgotten = True

    def take_due(
        self, still_cached: Callable[[int, int, bytes], bool], now: float
    ) -> list[SaveItem]:
        """Waiting blocks that may be tried again now, for `add`.

        Nothing while all pins are used. A block whose bytes were overwritten is dropped:
        `still_cached(block_id, group, digest)` says whether it still has these contents.
        """
        due: list[SaveItem] = []
        if self._pinned >= self._pinned_blocks_max:
            return due
        for name in list(itertools.islice(self._waiting, _RETRIES_PER_STEP)):
            due_at, item = self._waiting[name]
            if due_at > now:
                continue
            del self._waiting[name]
            if still_cached(item.block_id, item.group, item.digest):
                self._counters["save_retries"] += 1
                due.append(item)
            else:
                self._counters["dropped block reused"] += 1
        return due

    def _start(self, items: list[SaveItem], session: str, resume_in_s: float | None) -> SaveRequest:
        self._gathered_blocks -= len(items)
        job = self._next_job
        self._next_job += 1
        self._jobs[job] = _SaveJob(items, self._ranks)
        groups: dict[int, list[SaveItem]] = {}
        for item in items:
            groups.setdefault(item.group, []).append(item)
        blocks = tuple(
            GroupBlocks(
                group,
                tuple([item.digest for item in members]),
                tuple([item.block_id for item in members]),
                tuple([item.parent for item in members]),
            )
            for group, members in groups.items()
        )
        adapters = frozenset([item.adapter for item in items if item.adapter is not None])
        return SaveRequest(job, blocks, session, resume_in_s, adapters)

    def _accept(self, items: Iterable[SaveItem], now: float) -> list[SaveItem]:
        """Pin those that no save has, as many as the engine can spare."""
        accepted: list[SaveItem] = []
        for item in items:
            name = (item.group, item.digest)
            if name in self._saving or self._stored.get(name, -math.inf) > item.asked_at:
                continue
            if self._pinned >= self._pinned_blocks_max:
                self._enqueue(item, now)
                continue
            self._pinned += 1
            self._saving.add(name)
            self._waiting.pop(name, None)
            accepted.append(item)
        return accepted

    def _enqueue(self, item: SaveItem, due_at: float) -> None:
        self._waiting[item.group, item.digest] = (due_at, item)
        while len(self._waiting) > WAITING_BLOCKS_MAX:
            self._waiting.popitem(last=False)
            self._counters["dropped too many waiting"] += 1
