"""What each request looks up in the pool, and what its answer says: pure. Blocks of prompts that
wait are brought into memory before they are loaded. (design: promotion)
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.types import BATCH_BLOCKS_MAX, Match
from kvpool_connector.plan.load_or_recompute import LoadOrRecompute
from kvpool_connector.plan.tracked_request import RequestState, TrackedRequest, digest_of
from kvpool_connector.plan.windows import Windows
from kvpool_connector.records.values import CacheGroup, LookupRequest, PlannerLimits


class PrefetchRequest(NamedTuple):
    """Blocks `first` to `last` (excluded) of one group of a prompt, and where they are."""

    group: int
    hashes: Sequence[bytes]
    cache_group: CacheGroup
    first: int
    last: int
    match: Match

    def digests(self) -> list[bytes]:
        """Their keys. Not made in the engine's thread: they may be a thousand."""
        return [digest_of(self.hashes, self.cache_group, i) for i in range(self.first, self.last)]


class Prefetches:
    """The prompts that have been looked up, wait for the engine, and lie below some memory.

    A prompt leaves when the engine allocates its blocks: from then on its load reads them.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = tuple(groups)
        self._waiting: dict[str, tuple[Sequence[bytes], Sequence[Match]]] = {}

    def found(self, request_id: str, hashes: Sequence[bytes], matches: Sequence[Match]) -> None:
        """What the pool has of a prompt, one match for each group."""
        if not all(run.in_memory for match in matches for run in match.runs):
            self._waiting[request_id] = hashes, matches

    def drop(self, request_id: str) -> None:
        """The prompt does not wait any longer."""
        self._waiting.pop(request_id, None)

    def clear(self) -> None:
        """What was looked up is of no use any more."""
        self._waiting.clear()

    def take(self) -> list[PrefetchRequest]:
        """What to ask for now, once for each prompt. Of each group one message's worth of blocks:
        the first that are below, or of a sliding window the last ones of the hit."""
        if not self._waiting:
            return []
        found = []
        for hashes, matches in self._waiting.values():
            for number, (group, match) in enumerate(zip(self._groups, matches, strict=True)):
                below = [run.first for run in match.runs if not run.in_memory]
                if not below:
                    continue
                first = below[0]
                if group.window_blocks:
                    first = max(first, match.length - group.window_blocks)
                last = min(match.length, first + BATCH_BLOCKS_MAX)
                where = match.of(first, last)
                found.append(PrefetchRequest(number, hashes, group, first, last, where))
        self._waiting.clear()
        return found


@dataclass
class RequestLookups:
    """The lookups of one engine's `requests`, at most one of each; a serial tells old answers."""

    _counters: MutableMapping[str, float]
    _groups: Sequence[CacheGroup]
    _limits: PlannerLimits
    _windows: Windows
    _choice: LoadOrRecompute
    _requests: Mapping[str, TrackedRequest]
    #: The prompts of which some blocks lie below memory, until the engine begins them.
    prefetches: Prefetches
    _serial: int = 0

    def start(
        self, request_id: str, request: TrackedRequest, tokens: int, *, refused: bool
    ) -> LookupRequest | None:
        """What to look up for the first of so many tokens; None: nothing. `refused`: the pool is
        not what this engine may load from."""
        # The last token is always computed: its output is what the engine goes on from.
        last = self._windows.whole_units(tokens - 1)
        no_load = self._limits.load == "never" or request.hints.skip_load or request.stale
        if refused or no_load or last <= 0:
            if not no_load and last > 0:
                self._counters["miss mismatch"] += 1
            request.move_to(RequestState.ANSWERED)
            return None
        chains = tuple(  # of 8,192 blocks at once 20 times as fast as with `digest_of`
            tuple(request.hashes[per_block - 1 : last // size * per_block : per_block])
            for size, per_block, *_ in self._groups
        )
        self._serial += 1
        request.serial = self._serial
        self._counters["lookups"] += 1
        return LookupRequest(request_id, request.serial, chains, session=request.hints.session)

    def is_running(self, request_id: str) -> bool:
        return self._requests[request_id].state is RequestState.LOOKING_UP

    def began(self, request_id: str, now: float) -> None:
        """The time of this lookup begins at `now`: before, no master could be asked."""
        request = self._requests.get(request_id)
        if request is not None:
            request.asked_at = now

    def late(self, request_id: str, tokens: int, computed: int, now: float) -> int | None:
        """The serial of a lookup that has taken as long as it may; None: there is none.

        It may take a share of what it can save: the time of computing the prompt.
        (design: load-or-recompute)
        """
        request = self._requests[request_id]
        if request.state is not RequestState.LOOKING_UP:
            return None
        limit_s = self._choice.lookup_timeout_s(computed, tokens)
        return request.serial if now - request.asked_at >= limit_s else None

    def on_result(
        self, request_id: str, serial: int, matches: Sequence[Match], reason: str
    ) -> LookupRequest | None:
        """The answer to a lookup, one match for each group. Without matches it is a miss.

        Returns what else to look up, under the same serial; its answer comes here as well.
        Ignored when it comes after its timeout, or after the request has restarted or finished.
        """
        request = self._requests.get(request_id)
        if request is None or request.serial != serial or not self.is_running(request_id):
            return None
        whole = request.hints.max_load_tokens is None and not self._limits.drops_last_block
        if prefixes := request.matches:
            matches = self._windows.joined(prefixes, matches)
        elif matches and whole and (chains := self._windows.wanted(matches, request.hashes)):
            request.matches = tuple(matches)
            return LookupRequest(request_id, serial, tuple(chains.values()), tuple(chains))
        request.move_to(RequestState.ANSWERED)
        if not matches:
            self._counters[f"miss {reason}"] += 1
            return None
        request.matches = tuple(matches)
        if not request.hints.skip_prefetch:
            self.prefetches.found(request_id, request.hashes, matches)
        request.blocks_saved = [
            max(blocks, match.length)
            for blocks, match in zip(request.blocks_saved, matches, strict=True)
        ]
        stopped = min(matches, key=lambda match: match.length).stopped
        if not stopped.hit:
            self._counters[f"miss {stopped.label}"] += 1
        return None

    def take_prefetches(self) -> list[PrefetchRequest]:
        """What prompts that still wait will load, and no memory has. Once for each prompt."""
        if found := self.prefetches.take():
            self._counters["prefetches"] += len({id(one.hashes) for one in found})
        return found
