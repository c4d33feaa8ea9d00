"""The sessions that a fleet serves: their turns in tokens, and the blocks of each prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from kvpool.tools.dry_pool import digest_of
from kvpool.tools.workloads import SYSTEM_TOKENS, Turn, codex_sessions


class FleetLoad(NamedTuple):
    """What is asked of a fleet: sessions that share their first `shared_tokens`."""

    name: str
    shared_tokens: int
    sessions: Callable[[int, int], Iterator[list[Turn]]]  # by count and seed


def scaling_sessions(count: int, seed: int) -> Iterator[list[Turn]]:
    """The load of the published scaling test: 20K tokens in common, 10K of its own to begin with,
    2,048 more each turn, answers of 900, 30 turns. The time between turns is not published."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length, session = _COMMON_TOKENS + 10_000, []
        for turn in range(30):
            prefix = length - 2_048 if turn else _COMMON_TOKENS
            gap_s = float(rng.lognormal(math.log(_SCALING_GAP_S), 0.5))
            session.append(Turn(length, prefix, 900, gap_s))
            length += 900 + 2_048
        yield session


_COMMON_TOKENS: Final = 20_000
_SCALING_GAP_S: Final = 3.0

LOADS: Final = {
    "codex": FleetLoad("codex", SYSTEM_TOKENS, codex_sessions),
    "scaling": FleetLoad("scaling", _COMMON_TOKENS, scaling_sessions),
}


class PromptBlocks:
    """Names for the blocks of all sessions' prompts; those of `shared_tokens` are in common."""

    def __init__(self, shared_tokens: int, block: int) -> None:
        self._block = block
        self._next = 0
        self._shared = self._fresh(shared_tokens // block)

    def prompt(self, before: list[bytes], turn: Turn, first: bool) -> list[bytes]:
        """The whole blocks of a prompt, after the one with the blocks `before`."""
        kept = self._shared if first else before[: turn.prefix // self._block]
        count = turn.length // self._block
        return kept[:count] + self._fresh(count - len(kept))

    def _fresh(self, count: int) -> list[bytes]:
        first = self._next
        self._next += max(0, count)
        return [digest_of(id) for id in range(first, self._next)]
