"""What the planner is given, and what it returns: plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool_connector.records.messages import (
    AdapterKey,
    LoadRequest,
    ProbeRequest,
    SaveRequest,
    VerifyRequest,
)
from kvpool_connector.records.promises import PromisedBlocks


class CacheGroup(NamedTuple):
    """A KV cache group: tokens in one of its blocks, and how many of the engine's hashes those are.

    All groups of an engine cover the same tokens, in blocks of different sizes. Of a sliding window
    the last `window_blocks` of a prefix are enough to go on from it; 0: every block is needed.
    `kept`: where there is no window, a request has each of its blocks until it ends.
    """

    block_size: int
    hashes_per_block: int
    window_blocks: int = 0
    kept: bool = True


class PlannerLimits(NamedTuple):
    """What decisions depend on: settings (`settings.py` explains each), and what nobody sets."""

    load: str = "auto"
    save: bool = True
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    save_decode: bool = True
    #: Prompts that load at once; further ones are computed. All share one link: more would only
    #: make each later.
    loads_max: int = 32
    #: Blocks of the engine that unfinished saves keep from reuse; further saves wait.
    saved_blocks_max: int = 1 << 30
    #: Further attempts of a refused save, while the engine still has its blocks: a server that was
    #: full for a moment has room by then.
    save_retries: int = 3
    #: Longest time for which generated blocks wait for further ones, so that one message stores
    #: them; not once their request has ended (design: pool-thread).
    save_gather_s: float = 0.0
    #: A request that decodes is looked at when whole blocks of so many tokens are complete, and
    #: when it ends: until then its blocks stay as they are. Where some do not, it is for each.
    tokens_together: int = 1
    #: While loads are refused because they are slow, the pool's speed is measured that often, by
    #: reading a few blocks, which nobody notices: an engine soon knows that it is fast again.
    probe_every_s: float = 5.0
    #: One of so many loads of a writer's blocks is computed instead, to compare; 0: none.
    loads_per_check: int = 0
    #: Longest time that a load waits for blocks which another engine has promised; as a rule it is
    #: the time that computing them takes. 0: no promise is made, and none is waited for.
    promise_wait_s: float = 10.0
    #: Of the engine: the last block of a prefix that is there is computed all the same.
    drops_last_block: bool = False


class RequestHints(NamedTuple):
    """What a request's parameters say about its conversation, and what they ask for."""

    session: str = ""
    resume_in_s: float | None = None
    ends: bool = False
    #: Not a hint, but as lasting: its LoRA adapter.
    adapter: AdapterKey | None = None
    #: Not saved, not looked up, not brought into memory while it waits, and so many tokens loaded
    #: at most: what the request asks for.
    skip_save: bool = False
    skip_load: bool = False
    skip_prefetch: bool = False
    max_load_tokens: int | None = None
    #: What the engine that has prefilled this prompt says of it.
    promise: PromisedBlocks | None = None


class ScheduledRequest(NamedTuple):
    """One request in one step: computes tokens `start` to `end` (excluded).

    `block_ids[group][n]` is where block n of that group lies; id 0 is no block. Only the blocks
    that the step completes are read.
    """

    request_id: str
    start: int
    end: int
    block_ids: Sequence[Sequence[int]]


class LookupRequest(NamedTuple):
    """Match these chains in the pool, one for each of the `groups` (None: of all groups). `serial`
    marks answers that are old.

    With a `session`, its prompt waits from now on.
    """

    request_id: str
    serial: int
    chains: tuple[tuple[bytes, ...], ...]
    groups: tuple[int, ...] | None = None
    session: str = ""


@dataclass(slots=True)
class StepPlan:
    """What the workers do besides computing a step; the engine pins `blocks_to_pin` for it."""

    loads: list[LoadRequest] = field(default_factory=list)
    saves: list[SaveRequest] = field(default_factory=list)
    probe: ProbeRequest | None = None
    verify: VerifyRequest | None = None
    blocks_to_pin: list[int] = field(default_factory=list)
