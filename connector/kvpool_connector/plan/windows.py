"""Which blocks a hit needs of each KV cache group: all, or the last of a sliding window. Pure.

A layer with a sliding window reads only the last tokens before the one that it computes, so an
engine goes on from a prefix with those, as it does from its own cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvpool.types import Match, Run
from kvpool_connector.plan.tracked_request import digest_of
from kvpool_connector.records.values import CacheGroup


class Windows:
    """For one engine; hits are multiples of `unit` tokens, so that none has a part of a block."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = tuple(groups)
        self.unit = math.lcm(*(group.block_size for group in groups))
        #: Bytes of a block of each group, of one rank; 0 until the ranks have reported them.
        self.block_bytes: tuple[int, ...] = (0,) * len(groups)
        #: Groups of which a hit has every block, if there are any; and the first, or 0.
        self._whole_groups = [n for n, group in enumerate(groups) if not group.window_blocks]
        self.whole = next(iter(self._whole_groups), 0)

    def whole_units(self, tokens: int) -> int:
        """So many tokens, without those that are no whole unit."""
        return tokens // self.unit * self.unit

    def blocks(self, group: CacheGroup, first: int, last: int) -> int:
        """How many blocks of a group a load of these tokens moves."""
        blocks = (last - first) // group.block_size
        return min(blocks, group.window_blocks) if group.window_blocks else blocks

    def bytes_of(self, first: int, last: int) -> int:
        """Bytes that one rank moves for these tokens."""
        return sum(
            self.blocks(group, first, last) * size
            for group, size in zip(self._groups, self.block_bytes, strict=True)
        )

    def available(self, matches: Sequence[Match]) -> int:
        """Tokens that every group has."""
        return self._tokens(matches, range(len(self._groups)))

    def wanted(
        self, matches: Sequence[Match], hashes: Sequence[bytes]
    ) -> Mapping[int, tuple[bytes, ...]]:
        """What to look up in addition, by group: the ends of sliding windows, where the prefixes in
        `matches` are shorter than what the other groups have. Empty: nothing."""
        if not self._whole_groups or len(self._whole_groups) == len(self._groups):
            return {}
        tokens = self._tokens(matches, self._whole_groups)
        chains = {}
        for number, group in enumerate(self._groups):
            if matches[number].length * group.block_size < tokens:
                stop = tokens // group.block_size
                start = max(0, stop - group.window_blocks)
                chains[number] = tuple(digest_of(hashes, group, i) for i in range(start, stop))
        return chains

    def joined(self, prefixes: Sequence[Match], ends: Sequence[Match]) -> tuple[Match, ...]:
        """The matches of a hit with the ends that were found, one for each of `wanted`; without
        one of them what the prefixes alone allow."""
        tokens = self._tokens(prefixes, self._whole_groups)
        found = iter(ends)
        joined = []
        for match, group in zip(prefixes, self._groups, strict=True):
            stop = tokens // group.block_size
            if match.length < stop:
                end = next(found, None)
                start = max(0, stop - group.window_blocks)
                if end is None or end.length < stop - start:
                    return tuple(prefixes)
                runs = (Run(r.first + start, r.last + start, r.replicas) for r in end.runs)
                match = Match(tuple(runs), stop, end.stopped)
            joined.append(match)
        return tuple(joined)

    def _tokens(self, matches: Sequence[Match], numbers: Sequence[int]) -> int:
        tokens = min(matches[n].length * self._groups[n].block_size for n in numbers)
        return self.whole_units(tokens)
