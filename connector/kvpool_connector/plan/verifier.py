"""Which blocks of the pool are compared with the engine's own, and what follows: pure.

(design: provenance)
"""

from __future__ import annotations

import enum
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.types import Match
from kvpool_connector.plan.known_writers import KnownWriters
from kvpool_connector.plan.tracked_request import digest_of
from kvpool_connector.records.messages import (
    AdapterKey,
    GroupBlocks,
    LoadResult,
    Mismatch,
    VerifyRequest,
    VerifyResult,
)
from kvpool_connector.records.values import CacheGroup, ScheduledRequest

#: Blocks that one verification pins until it has ended, in all groups together; workers read some.
_BLOCKS_MAX: Final = 256


class VerifierState(enum.Enum):
    IDLE = "no load has met a writer that is to be compared"
    CHOSEN = "a request computes blocks that the pool has"
    RUNNING = "workers compare these blocks, which are pinned"


class VerifyOutcome(NamedTuple):
    """What a rank's result means: block ids to unpin, the first block that differs, and whether
    blocks of its writer were loaded before."""

    blocks_to_unpin: list[int]
    mismatch: Mismatch | None = None
    was_trusted: bool = False


@dataclass(slots=True)
class _Choice:
    """A request that computes tokens `first` to `last` (excluded), which the pool has."""

    request_id: str
    first: int
    last: int
    matches: tuple[Match, ...]
    computing: bool = False


@dataclass
class Verifier:
    """Compares what a load has refused with what its request computes; never two at a time.

    | state   | next state                                                                      |
    |---------|---------------------------------------------------------------------------------|
    | idle    | chosen, with `choose`                                                           |
    | chosen  | running, with `take`, when the last of its blocks is complete; idle, when the   |
    |         | request ends or loses its blocks before that (`release`)                        |
    | running | idle, when every rank has reported                                              |

    Each block in `VerifyRequest` is pinned from `take` to the last rank's `on_result`, which tells
    `writers` what was found. `counters` counts verifications by their result.
    """

    _counters: MutableMapping[str, float]
    _groups: Sequence[CacheGroup]
    writers: KnownWriters
    _ranks: int
    _timeout_s: float
    #: The largest difference that the latest verification has found.
    difference: float = 0.0
    _state: VerifierState = VerifierState.IDLE
    _asked: str = ""  # the request whose load refuses writers that are due
    _choice: _Choice = field(default_factory=lambda: _Choice("", 0, 0, ()))
    # Of the running verification
    _job: int = 0
    _results: list[VerifyResult] = field(default_factory=list)
    _blocks: tuple[GroupBlocks, ...] = ()
    _begins: dict[int, int] = field(default_factory=dict)  # by group, where the first of them is
    _outdated: bool = False  # the names have changed since

    @property
    def running(self) -> bool:
        """Whether blocks are pinned: the engine must go on stepping."""
        return self._state is VerifierState.RUNNING

    def asks(self, request_id: str) -> frozenset[bytes]:
        """Which writers this load refuses, beside those that are not trusted: of writers that are
        due one load at a time."""
        if self._asked or self._state is not VerifierState.IDLE:
            return frozenset()
        if due := self.writers.due:
            self._asked = request_id
        return due

    def on_load(self, load: LoadResult, first: int, last: int, matches: tuple[Match, ...]) -> bool:
        """A load of tokens `first` to `last` has ended, by all ranks. True if it has refused
        blocks: these are compared, as far as the pool has them."""
        if self._asked == load.request_id:
            self._asked = ""
        self.writers.on_load(load.writers)
        if load.refused:
            self._counters["loads_refused"] += 1
            idle = self._state is VerifierState.IDLE
            if idle and matches and load.refused - self.writers.wrong:
                self.choose(load.request_id, first, last, matches)
        return bool(load.refused)

    def choose(self, request_id: str, first: int, last: int, matches: tuple[Match, ...]) -> None:
        """This request computes tokens `first` to `last` (excluded), which the pool has."""
        assert self._state is VerifierState.IDLE
        self._state = VerifierState.CHOSEN
        self._choice = _Choice(request_id, first, last, matches)

    @property
    def watched(self) -> str | None:
        """The request of which each step must be known."""
        return self._choice.request_id if self._state is VerifierState.CHOSEN else None

    def release(self, request_id: str) -> None:
        """The request ends, or loses its blocks. The next load is chosen instead."""
        if self.watched == request_id:
            self._state = VerifierState.IDLE
        if self._asked == request_id:
            self._asked = ""

    def take(
        self, one: ScheduledRequest, hashes: Sequence[bytes], adapter: AdapterKey | None
    ) -> VerifyRequest | None:
        """What workers compare after this step, if it completes the last block of the choice."""
        if self.watched != one.request_id:
            return None
        choice = self._choice
        if not choice.computing:
            # Tokens before the first step have come from the pool, of writers that are trusted.
            choice.computing, choice.first = True, max(choice.first, one.start)
        if one.end < choice.last:
            return None
        self._blocks = tuple(self._chosen_blocks(one, hashes))
        if not self._blocks:
            self._state = VerifierState.IDLE
            self._counters["verification not compared"] += 1
            return None
        self._state = VerifierState.RUNNING
        self._job += 1
        self._results, self._outdated = [], False
        adapters = frozenset([adapter]) if adapter is not None else frozenset()
        return VerifyRequest(self._job, self._blocks, self._timeout_s, adapters)

    def on_result(self, result: VerifyResult) -> VerifyOutcome:
        """One rank has compared its part of the blocks. The last one decides.

        Of blocks that differ the first of the chain counts: what is computed behind it differs as
        well, whoever did that. A result without a job is of blocks that a save has found.
        """
        if not result.job:
            return self._judged([result], [])
        if self._state is not VerifierState.RUNNING or result.job != self._job:
            return VerifyOutcome([])
        self._results.append(result)
        if len(self._results) < self._ranks:
            return VerifyOutcome([])
        self._state = VerifierState.IDLE
        pinned = [block for blocks in self._blocks for block in blocks.block_ids]
        return VerifyOutcome(pinned) if self._outdated else self._judged(self._results, pinned)

    def stored_at(self, mismatch: Mismatch) -> str:
        """Which servers have the block of this mismatch, as far as the pool has told."""
        replicas = [
            f"{replica.server} ({replica.tier})"
            for block in self._blocks
            if block.group == mismatch.group and mismatch.digest in block.digests
            for run in (block.match.runs if block.match is not None else ())
            if run.first <= block.digests.index(mismatch.digest) <= run.last
            for replica in run.replicas
            if replica.part == mismatch.part
        ]
        return ", ".join(replicas) or "a server that is not known"

    def reset(self) -> None:
        """The engine has other names from now on: what was found concerns the old ones."""
        self.writers.reset()
        self._outdated = True
        self.release(self._choice.request_id)

    def _judged(self, results: Sequence[VerifyResult], pinned: list[int]) -> VerifyOutcome:
        compared = [result for result in results if result.compared]
        self._counters["verified_blocks"] += sum(result.compared for result in compared)
        found = [result.mismatch for result in compared if result.mismatch is not None]
        first = min(found, key=self._token_of, default=None)
        if first is not None:
            self._counters["verification mismatch"] += 1
        elif len(compared) == len(results):
            self._counters["verification equal"] += 1
        else:
            self._counters["verification not compared"] += 1
        if compared:
            self.difference = max(result.difference for result in compared)
        self.writers.problem = self.writers.problem or next(
            (result.problem for result in results if result.problem), ""
        )
        equal = frozenset().union(*(result.equal for result in results))
        if len(compared) == len(results):  # a rank that could not compare proves nothing
            self.writers.on_equal(equal - {first.writer.id if first is not None else b""})
        if first is None:
            return VerifyOutcome(pinned)
        return VerifyOutcome(pinned, first, self.writers.on_wrong(first.writer))

    def _token_of(self, mismatch: Mismatch) -> int:
        """Where the block begins; 0 if it is not of a `VerifyRequest`."""
        for blocks in self._blocks:
            if blocks.group == mismatch.group and mismatch.digest in blocks.digests:
                index = self._begins[blocks.group] + blocks.digests.index(mismatch.digest)
                return index * self._groups[blocks.group].block_size
        return 0

    def _chosen_blocks(self, one: ScheduledRequest, hashes: Sequence[bytes]) -> list[GroupBlocks]:
        """For each group, blocks in turn that the request has computed and the pool has."""
        chosen, choice = [], self._choice
        for number, group in enumerate(self._groups):
            ids, match = one.block_ids[number], choice.matches[number]
            places: list[int] = []
            size = group.block_size
            for index in range(-(-choice.first // size), choice.last // size):
                # It lies before a sliding window, or the pool was not asked for it, or lacks it.
                if not ids[index] or not match.of(index, index + 1).runs:
                    if places:
                        break
                elif len(places) < _BLOCKS_MAX // len(self._groups):
                    places.append(index)
            if places:
                self._begins[number] = places[0]
                digests = tuple(digest_of(hashes, group, index) for index in places)
                pinned = tuple(ids[index] for index in places)
                found = match.of(places[0], places[-1] + 1)
                chosen.append(GroupBlocks(number, digests, pinned, match=found))
        return chosen
