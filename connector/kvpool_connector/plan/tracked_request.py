"""A request on its way to its first load: pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvpool.types import Match
from kvpool_connector.plan.cost_model import ONE_WAY, Route
from kvpool_connector.plan.load_or_recompute import NO_CHOICE, Choice
from kvpool_connector.plan.running_loads import RunningLoad
from kvpool_connector.records.promises import GivenPromise
from kvpool_connector.records.values import CacheGroup, RequestHints


class RequestState(enum.Enum):
    """Where a request is on its way to its first load; `TRANSITIONS` are the possible moves."""

    LOOKING_UP = "the pool has not answered yet"
    ANSWERED = "the lookup has ended, or nothing was looked up: `matches` are what the pool has"
    WAITING = "another request's load brings the same blocks, and is waited for"
    OFFERED = "the engine knows the number of loadable tokens"
    LOADING = "workers fill the blocks that the engine allocated"


#: `on_request_finished` ends every state; after `on_restart` a request is a new one. Saving is no
#: state of a request: its blocks are saved in every state, and after it has finished (`SaveQueue`
#: has their states).
TRANSITIONS: Final[Mapping[RequestState, frozenset[RequestState]]] = {
    # RequestLookups: nothing is looked up, an answer, or the reason why there is none
    RequestState.LOOKING_UP: frozenset({RequestState.ANSWERED}),
    # loadable_tokens decides to load, or to wait
    RequestState.ANSWERED: frozenset(
        {RequestState.OFFERED, RequestState.WAITING, RequestState.ANSWERED}
    ),
    # that load has ended, or takes too long: loadable_tokens decides again
    RequestState.WAITING: frozenset({RequestState.ANSWERED}),
    # on_blocks_allocated: LOADING, or ANSWERED when the engine takes none of the tokens;
    # loadable_tokens may be asked again and decide otherwise; on_preempted
    RequestState.OFFERED: frozenset({RequestState.LOADING, RequestState.ANSWERED}),
    # on_load_result of the last rank
    RequestState.LOADING: frozenset({RequestState.ANSWERED}),
}


@dataclass(slots=True)
class TrackedRequest:
    """What the planner keeps of a request until it has finished."""

    hashes: Sequence[bytes]  # grows while the request generates
    prompt: int  # tokens
    hints: RequestHints
    asked_at: float
    blocks_saved: list[int]  # by group: blocks from the first on that are stored or being saved
    serial: int = 0  # of its lookup
    state: RequestState = RequestState.LOOKING_UP
    #: `begun`: it has blocks; `decodes`: since then a step has computed the end of its prompt.
    phase: Literal["queued", "begun", "decodes"] = "queued"
    stale: bool = False  # the weights have changed since it began: nothing of it is saved
    #: While LOOKING_UP, of prefixes: the ends of sliding windows are looked up.
    matches: tuple[Match, ...] = ()
    choice: Choice = NO_CHOICE  # the last one; its decision is not counted yet
    offered: tuple[int, int, Route] = (0, 0, ONE_WAY)  # first and last token, while OFFERED
    waits_until: float | None = None  # since it first waited
    load: RunningLoad | None = None  # while LOADING
    promise: GivenPromise | None = None

    @property
    def saves_nothing(self) -> bool:
        return self.stale or self.hints.skip_save

    def move_to(self, state: RequestState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


def digest_of(hashes: Sequence[bytes], group: CacheGroup, index: int) -> bytes:
    """The key of a block is the last of the engine's hashes inside it."""
    return bytes(hashes[(index + 1) * group.hashes_per_block - 1])
