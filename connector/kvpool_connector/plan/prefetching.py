"""Which blocks of prompts that wait are to be brought into memory before they are loaded: pure.

(design: promotion)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.types import BATCH_BLOCKS_MAX, Match
from kvpool_connector.plan.tracked_request import digest_of
from kvpool_connector.records.values import CacheGroup


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
