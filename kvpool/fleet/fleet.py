"""One run of a fleet: sessions, a router, prefill and decode engines, and what lies under them."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvpool import registry
from kvpool.errors import ConfigError
from kvpool.fleet.constants import Constants
from kvpool.fleet.decode import DecodeEngine
from kvpool.fleet.events import EventQueue
from kvpool.fleet.memory import FleetMemory, local_memories, shared_pool
from kvpool.fleet.prefill import PrefillEngine
from kvpool.fleet.prompts import Prompt
from kvpool.fleet.results import FleetResult, measured
from kvpool.fleet.routers import ROUTERS
from kvpool.fleet.sessions import LOADS, PromptBlocks
from kvpool.tools.workloads import Turn
from kvpool.types import SessionHint

#: An instance is 4 GPUs that prefill and 8 that decode.
GPUS_PER_INSTANCE: Final = 12


class Scope(enum.Enum):
    """What lies under the engines' device memory."""

    NONE = "none"
    LOCAL = "local"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """`sessions` in all, `concurrent` of them at a time; `memory_tokens` of all servers together.

    `end_hints`: the pool is told when a session ends. `block` in tokens. Raises ConfigError.
    """

    gpus: int = GPUS_PER_INSTANCE
    load: str = "codex"
    sessions: int = 610
    concurrent: int = 50
    scope: Scope = Scope.POOL
    router: str = "round-robin"
    policy: str = "lru"
    planner: str = "auto"
    end_hints: bool = False
    memory_tokens: int | None = None
    block: int = 512
    seed: int = 1
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        if self.gpus < GPUS_PER_INSTANCE or self.gpus % GPUS_PER_INSTANCE:
            raise ConfigError(f"gpus: {self.gpus} is not a multiple of {GPUS_PER_INSTANCE}")
        if self.load not in LOADS:
            raise ConfigError(f"load {self.load!r}: expected one of {', '.join(LOADS)}")
        if self.planner not in ("auto", "always", "never"):
            raise ConfigError(f"planner {self.planner!r}: expected auto, always or never")
        if self.router not in ROUTERS:
            raise ConfigError(f"router {self.router!r}: expected one of {', '.join(ROUTERS)}")
        registry.policy(self.policy, 1 << 30)  # raises for a name that is not installed
        if not 0 < self.concurrent <= self.sessions:
            raise ConfigError(f"concurrent: {self.concurrent} is not 1 to {self.sessions} sessions")
        if not 16 <= self.block <= 4096:
            raise ConfigError(f"block: {self.block} tokens, expected 16 to 4096")

    @property
    def instances(self) -> int:
        return self.gpus // GPUS_PER_INSTANCE

    @property
    def memory(self) -> int:
        """Tokens that fit into the memory of all servers together."""
        default = int(self.constants.pool_tokens) * self.instances
        return default if self.memory_tokens is None else self.memory_tokens


class Fleet:
    """`run` once. A session sends its next prompt some time after an answer has ended; after the
    session's end the next one takes its place."""

    def __init__(self, options: FleetOptions) -> None:
        self._options = options
        self._constants = options.constants
        self._events = EventQueue()
        self._memory = self._make_memory()
        self._choose = ROUTERS[options.router]()
        self._engines = [
            PrefillEngine(
                number,
                self._events,
                options.constants,
                self._memory,
                block=options.block,
                load=options.planner,
                prefilled=self._prefilled,
                hint=self._hint,
            )
            for number in range(options.instances)
        ]
        self._decoders = [
            DecodeEngine(self._events, options.constants, self._answered)
            for _ in range(options.instances)
        ]
        load = LOADS[options.load]
        self._blocks = PromptBlocks(load.shared_tokens, options.block)
        self._waiting = enumerate(load.sessions(options.sessions, options.seed))
        self._running: dict[int, _RunningSession] = {}
        self._done: list[Prompt] = []
        self._last_began_at = 0.0

    def run(self) -> FleetResult:
        """Serve every session to its end."""
        rng = random.Random(self._options.seed)
        for _ in range(self._options.concurrent):
            self._events.at(rng.uniform(0.0, _RAMP_S), self._begin_session)
        self._events.run()
        return measured(
            self._done,
            gpus=self._options.gpus,
            first=self._constants.warm_s,
            last=self._last_began_at,
            loaded_bytes=self._memory.moved if self._memory is not None else 0.0,
            saves_dropped=self._memory.saves_dropped if self._memory is not None else 0,
        )

    # --- inside --------------------------------------------------------------------------

    def _make_memory(self) -> FleetMemory | None:
        options = self._options
        if options.scope is Scope.NONE:
            return None
        blocks = options.memory // options.block
        shared = options.scope is Scope.POOL
        make = shared_pool if shared else local_memories
        pools = make(options.instances, blocks, partial(registry.policy, options.policy))
        block_bytes = options.block * self._constants.kv_bytes
        return FleetMemory(
            pools,
            options.instances,
            self._events,
            self._constants,
            block_bytes,
            shared=shared,
        )

    def _begin_session(self) -> None:
        following = next(self._waiting, None)
        if following is None:
            return
        number, turns = following
        self._last_began_at = self._events.now
        self._running[number] = _RunningSession(turns)
        self._send(number)

    def _send(self, number: int) -> None:
        """The session's next prompt."""
        session = self._running[number]
        turn = session.turns[session.sent]
        session.chain = self._blocks.prompt(session.chain, turn, not session.sent)
        prompt = Prompt(
            f"{number}-{session.sent}",
            number,
            session.sent,
            session.chain,
            turn.length,
            turn.output,
            self._events.now,
            session.sent + 1 == len(session.turns),
        )
        session.sent += 1
        self._events.after(self._constants.front_end_s, self._route, prompt)

    def _route(self, prompt: Prompt) -> None:
        self._choose(prompt, self._engines).add(prompt)

    def _prefilled(self, prompt: Prompt) -> None:
        min(self._decoders, key=lambda engine: engine.requests).add(prompt)

    def _answered(self, prompt: Prompt) -> None:
        self._done.append(prompt)
        gap_s = self._running[prompt.session].turns[prompt.turn].gap_s
        if not prompt.last:
            self._events.after(gap_s, self._send, prompt.session)
            return
        del self._running[prompt.session]
        if self._options.end_hints and self._memory is not None:
            self._memory.end(prompt.engine, str(prompt.session), self._events.now)
        self._events.after(gap_s, self._begin_session)

    def _hint(self, prompt: Prompt) -> SessionHint | None:
        return SessionHint(str(prompt.session)) if self._options.end_hints else None


#: The first sessions begin in this time.
_RAMP_S: Final = 60.0


@dataclass(slots=True)
class _RunningSession:
    turns: list[Turn]
    sent: int = 0
    chain: list[bytes] = field(default_factory=list)
