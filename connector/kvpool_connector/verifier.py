"""Which loads are computed instead, so that the engine's KV and the pool's can be compared: pure.

It knows no engine, clock, socket or randomness. (design: namespace)
"""

from __future__ import annotations

import enum
from collections.abc import MutableMapping, Sequence
from typing import Final, NamedTuple

from kvpool.types import Match
from kvpool_connector.comparison import spread
from kvpool_connector.messages import AdapterKey, GroupBlocks, Mismatch, VerifyRequest, VerifyResult
from kvpool_connector.tracked_request import digest_of
from kvpool_connector.values import CacheGroup, ScheduledRequest

#: The first verification comes after at most so many loads, and each interval is twice the one
#: before, up to that of the setting: what is wrong was wrong from the start, as a rule.
_FIRST_LOADS: Final = 16
#: Blocks that one verification compares at most, and pins until then.
_BLOCKS_MAX: Final = 16


class VerifierState(enum.Enum):
    IDLE = "the next verification is not due, or no load was chosen for it yet"
    CHOSEN = "a request computes blocks that the pool has"
    RUNNING = "workers compare these blocks, which are pinned"


class VerifyOutcome(NamedTuple):
    """What a rank's result means: block ids to unpin, and the first mismatch under these names."""

    blocks_to_unpin: list[int]
    mismatch: Mismatch | None


class Verifier:
    """Chooses one of `loads_per_check` loads (0: none) of an engine; never two at a time.

    | state   | next state                                                                      |
    |---------|---------------------------------------------------------------------------------|
    | idle    | chosen, with `choose`                                                           |
    | chosen  | running, with `take`, when the last of its blocks is complete; idle, when the   |
    |         | request ends or loses its blocks before that (`release`)                        |
    | running | idle, when every rank has reported                                              |

    Each block in `VerifyRequest` is pinned from `take` to the last rank's `on_result`. After a
    mismatch `mismatch` stays until `reset`: nothing is loaded or saved in between. `counters`
    counts verifications by their result.
    """

    def __init__(
        self,
        counters: MutableMapping[str, float],
        groups: Sequence[CacheGroup],
        *,
        ranks: int,
        loads_per_check: int,
        timeout_s: float,
    ) -> None:
        #: The first mismatch that was found under the present names.
        self.mismatch: Mismatch | None = None
        #: Why blocks of this engine cannot be compared: then no load is chosen any more.
        self.problem = ""
        #: The largest difference that the latest verification has found.
        self.difference = 0.0
        self._counters = counters
        self._groups = tuple(groups)
        self._ranks = ranks
        self._loads_per_check = loads_per_check
        self._timeout_s = timeout_s
        self._interval = min(_FIRST_LOADS, loads_per_check)
        self._loads = 0  # since the latest verification
        self._state = VerifierState.IDLE
        # Of the chosen request
        self._request_id = ""
        self._first = 0  # tokens
        self._last = 0
        self._matches: tuple[Match, ...] = ()
        self._computing = False
        # Of the running verification
        self._job = 0
        self._results: list[VerifyResult] = []
        self._blocks: tuple[GroupBlocks, ...] = ()
        self._outdated = False  # the names have changed since

    @property
    def running(self) -> bool:
        """Whether blocks are pinned: the engine must go on stepping."""
        return self._state is VerifierState.RUNNING

    @property
    def due(self) -> bool:
        """Whether the next load is to be computed instead."""
        return (
            self._state is VerifierState.IDLE
            and self._loads_per_check > 0
            and not self.problem
            and self._loads + 1 >= self._interval
        )

    def on_load(self) -> None:
        """A load has started."""
        self._loads += 1

    def choose(self, request_id: str, first: int, last: int, matches: tuple[Match, ...]) -> None:
        """This request computes tokens `first` to `last` (excluded), which the pool has."""
        assert self._state is VerifierState.IDLE
        self._state = VerifierState.CHOSEN
        self._request_id, self._first, self._last = request_id, first, last
        self._matches, self._computing = matches, False

    def watches(self, request_id: str) -> bool:
        """Whether each step of this request must be known."""
        return self._state is VerifierState.CHOSEN and self._request_id == request_id

    def release(self, request_id: str) -> None:
        """The request ends, or loses its blocks. The next load is chosen instead."""
        if self.watches(request_id):
            self._state = VerifierState.IDLE

    def take(
        self, one: ScheduledRequest, hashes: Sequence[bytes], adapter: AdapterKey | None
    ) -> VerifyRequest | None:
        """What workers compare after this step, if it completes the last block of the choice."""
        if not self.watches(one.request_id):
            return None
        if not self._computing:
            # Tokens before the first step may have come from the pool, by an earlier request.
            self._computing, self._first = True, max(self._first, one.start)
        if one.end < self._last:
            return None
        self._loads = 0
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
        """One rank has compared its part of the blocks: one mismatch is enough."""
        if self._state is not VerifierState.RUNNING or result.job != self._job:
            return VerifyOutcome([], None)
        self._results.append(result)
        self.problem = result.problem or self.problem
        found = None
        if result.mismatch is not None and self.mismatch is None and not self._outdated:
            found = self.mismatch = result.mismatch
        if len(self._results) < self._ranks:
            return VerifyOutcome([], found)
        self._state = VerifierState.IDLE
        if not self._outdated:
            self._count()
        return VerifyOutcome([block.block_ids[0] for block in self._blocks], found)

    def stored_at(self, mismatch: Mismatch) -> str:
        """Which servers have the block of this mismatch, as far as the pool has told."""
        replicas = [
            f"{replica.server} ({replica.tier})"
            for block in self._blocks
            if (block.group, block.digests[0]) == (mismatch.group, mismatch.digest)
            for run in (block.match.runs if block.match is not None else ())
            for replica in run.replicas
            if replica.part == mismatch.part
        ]
        return ", ".join(replicas) or "a server that is not known"

    def reset(self) -> None:
        """The engine has other names from now on: what was found concerns the old ones."""
        self.mismatch = None
        self._loads, self._interval = 0, min(_FIRST_LOADS, self._loads_per_check)
        self._outdated = True
        self.release(self._request_id)

    def _count(self) -> None:
        compared = [result for result in self._results if result.compared]
        self._counters["verified_blocks"] += sum(result.compared for result in compared)
        if any(result.mismatch is not None for result in compared):
            self._counters["verification mismatch"] += 1
        elif len(compared) == len(self._results):
            self._counters["verification equal"] += 1
        else:
            self._counters["verification not compared"] += 1
        self._interval = min(2 * self._interval, self._loads_per_check)
        if compared:
            self.difference = max(result.difference for result in compared)

    def _chosen_blocks(self, one: ScheduledRequest, hashes: Sequence[bytes]) -> list[GroupBlocks]:
        """Some of the blocks that the request has computed and the pool has, the last among them.

        Each is alone in its `GroupBlocks`: they do not follow one another.
        """
        chosen = []
        for number, group in enumerate(self._groups):
            first = -(-self._first // group.block_size)
            count = max(1, _BLOCKS_MAX // len(self._groups))
            for index in spread(first, self._last // group.block_size, count):
                block_id = one.block_ids[number][index]
                if not block_id:  # it lay before a sliding window
                    continue
                match = self._matches[number].of(index, index + 1)
                if not match.runs:  # the pool was not asked for it, for the same reason
                    continue
                digest = digest_of(hashes, group, index)
                chosen.append(GroupBlocks(number, (digest,), (block_id,), match=match))
        return chosen
