"""What travels through the fleet: one prompt of a session, and when what happened to it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.types import Namespace

#: The tenant whose sessions are served, and the one that sends prompts which nobody repeats.
AGENTS: Final = "agents"
HOG: Final = "hog"
_NAMESPACES: Final = {tenant: Namespace(f"@{tenant}/kv") for tenant in (AGENTS, HOG)}


class PromptState(enum.Enum):
    """Of a prompt at a prefill engine.

    Looking up, it becomes any of the next four; waiting and undecided, another of them. Loading, it
    becomes ready. Without a pool it is ready at once.
    """

    QUEUED = "queued"
    LOOKING_UP = "looking up"
    WAITING = "waiting"  # for another prompt's load
    UNDECIDED = "undecided"  # it would be computed, and the engine is busy
    LOADING = "loading"
    READY = "ready"
    COMPUTING = "computing"
    DONE = "done"


def session_name(number: int) -> str:
    """As the pool is told it."""
    return f"@{AGENTS}/{number}"


@dataclass(slots=True)
class Prompt:
    """`tokens` long, the whole blocks of it as `chain`; `output` tokens are to be answered."""

    id: str
    session: int
    turn: int
    chain: Sequence[bytes]
    tokens: int
    output: int
    sent_at: float
    last: bool = False  # of its session
    state: PromptState = PromptState.QUEUED
    engine: int = -1
    #: Tokens that need not be computed: from the engine's own memory, and from the pool.
    own_tokens: int = 0
    loaded_tokens: int = 0
    expected_tokens: int = 0  # of these, as its router expects until it is decided
    compute_s: float = 0.0  # how long computing it takes, as far as it is known
    ready_at: float = 0.0  # loaded, or decided to be computed
    began_at: float = 0.0  # computing
    prefilled_at: float = 0.0
    first_token_at: float = 0.0
    token_s: float = 0.0  # between two tokens of the answer
    done_at: float = 0.0

    @property
    def namespace(self) -> Namespace:
        """Of its tenant. A prompt of no session is the hog's."""
        return _NAMESPACES[HOG if self.session < 0 else AGENTS]

    @property
    def hit_tokens(self) -> int:
        """Tokens that were not computed."""
        return max(self.own_tokens, self.loaded_tokens)
