"""Which prefill engine a prompt goes to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.hbm_cache import length_held
from benchmarks.fleet.memory import FleetMemory
from benchmarks.fleet.prefill import PrefillEngine
from benchmarks.fleet.prompts import Prompt

Router = Callable[[Prompt, Sequence[PrefillEngine]], PrefillEngine]


class RouterFacts(NamedTuple):
    """What a router may look at, apart from the engines' queues."""

    events: EventQueue
    constants: Constants
    memory: FleetMemory | None
    block: int  # tokens
    late_s: float  # of engines' events


#: `spill` leaves a session's engine when another one is so much less busy.
_SPILL_S: Final = 5.0


def round_robin(facts: RouterFacts) -> Router:
    """Each engine in turn."""
    turns = itertools.count()
    return lambda prompt, engines: engines[next(turns) % len(engines)]


def least_loaded(facts: RouterFacts) -> Router:
    """The engine with the least work, in seconds."""
    least = _LeastWork()
    return lambda prompt, engines: least(engines)


def sticky(facts: RouterFacts, spill_s: float = float("inf")) -> Router:
    """A session stays where its first prompt was, unless that is busier by `spill_s`."""
    homes: dict[int, int] = {}
    least = _LeastWork()

    def choose(prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine:
        number = homes.get(prompt.session)
        home = None if number is None else engines[number]
        if home is None or (
            spill_s < float("inf") and home.work_s > min(e.work_s for e in engines) + spill_s
        ):
            home = least(engines)
        homes[prompt.session] = home.number
        if prompt.last:
            del homes[prompt.session]
        return home

    return choose


def fewest(facts: RouterFacts) -> Router:
    """A session stays at the engine that had the fewest living ones when it began."""
    homes: dict[int, int] = {}
    living = Counter[int]()

    def choose(prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine:
        number = homes.get(prompt.session)
        if number is None:
            number = min(range(len(engines)), key=lambda one: (living[one], engines[one].work_s))
            homes[prompt.session] = number
            living[number] += 1
        if prompt.last:
            del homes[prompt.session]
            living[number] -= 1
        return engines[number]

    return choose


class PreciseRouter:
    """The engine that is through with a prompt first: its queue, and the least of computing after
    what its events said it holds and of loading what the memory below it has.

    Events arrive `late_s` after what they tell; the memory is asked when the prompt comes, as
    `pool.score` does.
    """

    def __init__(self, facts: RouterFacts) -> None:
        self._facts = facts
        self._held: dict[PrefillEngine, set[bytes]] = {}  # as far as its events have come
        self._next = 0  # of engines that are equal

    def __call__(self, prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine:
        if self._held.keys() != set(engines):
            self._subscribe(engines)
        facts, pooled = self._facts, 0
        if facts.memory is not None and facts.memory.shared:
            pooled = self._pooled(prompt, engines[0])
        best, least_s = engines[self._next], float("inf")
        for engine in _in_turn(engines, self._next):
            if facts.memory is not None and not facts.memory.shared:
                pooled = self._pooled(prompt, engine)
            seconds, tokens = self._estimate(prompt, engine, pooled)
            if seconds < least_s:
                best, least_s, prompt.expected_tokens = engine, seconds, tokens
        self._next = (best.number + 1) % len(engines)
        return best

    def _pooled(self, prompt: Prompt, engine: PrefillEngine) -> int:
        """Blocks of the prompt's beginning that this engine could load."""
        assert self._facts.memory is not None
        now = self._facts.events.now
        return self._facts.memory.match(engine.number, prompt.namespace, prompt.chain, now).length

    def _estimate(self, prompt: Prompt, engine: PrefillEngine, pooled: int) -> tuple[float, int]:
        """Seconds until its prefill has ended there, and how many tokens are not computed."""
        facts, view = self._facts, self._held[engine]
        held = length_held(prompt.chain, view)
        own = min(held * facts.block, prompt.tokens - 1)
        seconds, tokens = facts.constants.prefill_s(own, prompt.tokens), own
        if facts.memory is not None and pooled > held:
            loaded = min(pooled * facts.block, prompt.tokens - 1)
            load_s = facts.memory.load_s(engine.number, pooled - held)
            with_load_s = load_s + facts.constants.prefill_s(loaded, prompt.tokens)
            if with_load_s < seconds:
                seconds, tokens = with_load_s, loaded
        return engine.work_s + seconds, tokens

    def _subscribe(self, engines: Sequence[PrefillEngine]) -> None:
        self._held = {engine: self._held.get(engine, set()) for engine in engines}
        for engine in engines:
            engine.cache.changed = partial(
                self._facts.events.after, self._facts.late_s, self._changed, self._held[engine]
            )

    def _changed(self, held: set[bytes], added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        held.update(added)
        held.difference_update(removed)


ROUTERS: Final[dict[str, Callable[[RouterFacts], Router]]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "sticky": sticky,
    "fewest": fewest,
    "spill": partial(sticky, spill_s=_SPILL_S),
    "precise": PreciseRouter,
}


def _in_turn(engines: Sequence[PrefillEngine], first: int) -> Iterator[PrefillEngine]:
    """All of them, from this number on."""
    return itertools.chain(engines[first:], engines[:first])


class _LeastWork:
    """The engine with the least work; of several, most often idle ones, the next in turn.

    Always the first of them would have most sessions, and its own memory too few bytes for each.
    """

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, engines: Sequence[PrefillEngine]) -> PrefillEngine:
        best, least_s = engines[self._next], float("inf")
        for engine in _in_turn(engines, self._next):
            work_s = engine.work_s
            if work_s < least_s:
                best, least_s = engine, work_s
                if not work_s:
                    break
        self._next = (best.number + 1) % len(engines)
        return best
