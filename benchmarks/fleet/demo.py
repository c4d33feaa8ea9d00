"""The check on the model: it plays the load of `make demo-fleet`, with the rates that were measured
in that run, and is compared with what the real engines did.

Engines, router and pool are the parts of every other fleet here. Two things are the demo's: all
engines share one machine, and a few requests are under way at a time.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.demo_results import (
    WITHOUT,
    DemoRow,
    DemoRun,
    DemoSession,
    Rates,
    chains,
    middle,
    rates,
)
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.links import SharedLink
from benchmarks.fleet.memory import FleetMemory
from benchmarks.fleet.mixed import MixedDecoder
from benchmarks.fleet.prefill import PrefillEngine
from benchmarks.fleet.prompts import Prompt
from benchmarks.fleet.routers import ROUTERS, RouterFacts
from kvpool.server.eviction.lru import LRU
from kvpool.tools.dry_pool import DryPool

#: Routers of the demo that the model has, too. None: one of its own.
_ROUTERS: Final = {
    "example: round_robin": "round-robin",
    "example: least_loaded": "least-loaded",
    "example: session": None,
    "example: precise": "precise",
}
#: The bounds of the check: of hits, and of the first token, relatively.
HITS_WITHIN: Final = 0.02
FIRST_WITHIN: Final = 0.3
#: Runs with other noise: the median of nine moved by a point with the seeds.
_RUNS: Final = 101
_SERVERS: Final = 2
#: Of prompts in a step: vLLM's default for a server on a CPU.
_STEP_TOKENS: Final = 2048


class Outcome(NamedTuple):
    """Of a row."""

    hit_rate: float
    first_s: float
    seconds: float  # until the last answer


class Prediction(NamedTuple):
    """What the model says of a row: the median of its runs, and the least and the most."""

    row: DemoRow
    rates: Rates
    predicted: Outcome
    least: Outcome
    most: Outcome

    @property
    def hits_are_near(self) -> bool:
        """Within the bound of the check."""
        return abs(self.predicted.hit_rate - self.row.hit_rate) <= HITS_WITHIN

    @property
    def first_is_near(self) -> bool:
        """Within the bound of the check."""
        return abs(self.predicted.first_s / self.row.first_s - 1) <= FIRST_WITHIN


def predictions(run: DemoRun) -> list[Prediction]:
    """Of each row whose router the model has. The same for the same file."""
    found = []
    for number, row in enumerate(run.rows):
        if row.router not in _ROUTERS:
            continue
        known = rates(run, number)
        outcomes = [DemoFleet(run, row, known, seed).run() for seed in range(_RUNS)]
        figures = [sorted(values) for values in zip(*outcomes, strict=True)]
        medians, least, most = (
            Outcome(*map(of, figures)) for of in (middle, itemgetter(0), itemgetter(-1))
        )
        found.append(Prediction(row, known, medians, least, most))
    return found


@dataclass(slots=True, eq=False)
class _Playing:
    """A session of the demo."""

    plan: DemoSession
    number: int
    parent: int | None
    chains: list[list[bytes]] = field(default_factory=list)


class DemoFleet:
    """One row. `run` once."""

    def __init__(self, run: DemoRun, row: DemoRow, known: Rates, seed: int) -> None:
        self._run = run
        self._known = known
        self._rng = random.Random(seed)
        self._events = events = EventQueue()
        # A transfer of this link is work, in seconds of one engine alone.
        self._machine = SharedLink(events, known.cores, each_max=1.0)
        self._constants = constants = _constants(run, known)
        block_bytes = run.block * constants.kv_bytes
        self._memory = None
        if row.mode != WITHOUT:
            pool = DryPool(_SERVERS, int(run.pool_bytes / block_bytes), lambda size: LRU())
            self._memory = FleetMemory(
                [pool], run.engines, events, constants, block_bytes, shared=True
            )
        router = _ROUTERS[row.router]
        facts = RouterFacts(events, constants, self._memory, run.block, 0.0)
        self._choose = self._at_home if router is None else ROUTERS[router](facts)
        self._homes: dict[int, int] = {}  # engines by session
        self._turn = 0
        self._decoders = [
            MixedDecoder(events, constants, self._answered) for _ in range(run.engines)
        ]
        self._engines = [self._engine(number) for number in range(run.engines)]
        numbers = {one.name: number for number, one in enumerate(run.sessions)}
        self._sessions = [
            _Playing(one, number, numbers.get(one.parent), list(chains(one)))
            for number, one in enumerate(run.sessions)
        ]
        self._waiting: deque[tuple[_Playing, int]] = deque()  # for one of the places
        self._free = run.at_once
        self._done: list[Prompt] = []

    def run(self) -> Outcome:
        """Every session to its end."""
        for session in self._sessions:
            if session.plan.after is None:
                self._ask(session, 0)
        self._events.run()
        asked = sum(one.tokens for one in self._done)
        return Outcome(
            sum(one.hit_tokens for one in self._done) / asked,
            middle([one.first_token_at - one.sent_at for one in self._done]),
            max(one.done_at for one in self._done),
        )

    def _engine(self, number: int) -> PrefillEngine:
        return PrefillEngine(
            number,
            self._events,
            self._constants,
            self._memory,
            block=self._run.block,
            load="auto",
            prefilled=lambda prompt: self._decoders[prompt.engine].add(prompt),
            hint=lambda prompt: None,
            beside=self._decoders[number],
            compute=self._work,
            lookup_s=self._lookup_s,
        )

    def _lookup_s(self) -> float:
        """Part of a load's time, if it is answered at all."""
        return math.inf if self._rng.random() < self._known.late else 0.0

    def _work(self, seconds: float, done: Callable[[], None]) -> None:
        """Of one engine, on the machine that all share."""
        noise = self._known.noise
        factor = self._rng.lognormvariate(-noise * noise / 2, noise)
        self._machine.start(seconds * factor, done)

    def _ask(self, session: _Playing, turn: int) -> None:
        if not self._free:
            self._waiting.append((session, turn))
            return
        self._free -= 1
        sent = session.plan.turns[turn]
        prompt = Prompt(
            *(f"{session.number}-{turn}", session.number, turn, session.chains[turn]),
            *(sent.tokens, self._run.output, self._events.now),
        )
        self._machine.start(self._constants.front_end_s, partial(self._route, prompt))

    def _route(self, prompt: Prompt) -> None:
        self._choose(prompt, self._engines).add(prompt)

    def _at_home(self, prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine:
        """As `session` of examples/router/core.py: where the session is, or its parent, unless that
        has two requests more than another engine."""
        self._turn = (self._turn + 1) % len(engines)
        home = self._homes.get(prompt.session)
        if home is None:
            turns = [*range(self._turn, len(engines)), *range(self._turn)]
            home = min(turns, key=self._requests)
            parent = self._sessions[prompt.session].parent
            above = None if parent is None else self._homes.get(parent)
            if above is not None and self._requests(above) <= self._requests(home) + 1:
                home = above
            self._homes[prompt.session] = home
        return engines[home]

    def _requests(self, engine: int) -> int:
        return self._engines[engine].prompts + self._decoders[engine].requests

    def _answered(self, prompt: Prompt) -> None:
        self._done.append(prompt)
        self._free += 1
        if self._waiting:
            self._ask(*self._waiting.popleft())
        session = self._sessions[prompt.session]
        # As in `run` of examples/vllm_fleet.py: those that wait for this answer wake up later.
        if prompt.turn + 1 < len(session.plan.turns):
            self._ask(session, prompt.turn + 1)
        for other in self._sessions:
            if other.plan.after == (session.plan.name, prompt.turn):
                self._ask(other, 0)


def _constants(run: DemoRun, known: Rates) -> Constants:
    """Those of the run's engines. What a prompt costs besides its tokens is in the front end."""
    return Constants().changed(
        {
            "kv_bytes": run.engine_bytes / run.engine_tokens,
            "linear_flop": known.token_s,
            "attention_flop": known.attention_s,
            "prefill_flop_s": 1.0,  # these are seconds
            "prefill_start_s": 0.0,
            "hbm_tokens": run.engine_tokens - run.block,  # vLLM's null block
            "chunk_tokens": _STEP_TOKENS,
            "pool_load_bytes_s": known.load_bytes_s,
            "save_bytes_s": known.load_bytes_s,
            "first_byte_s": 0.0,
            "front_end_s": known.request_s,
            "token_s": known.step_s,
            "token_each_s": 0.0,
        }
    )
