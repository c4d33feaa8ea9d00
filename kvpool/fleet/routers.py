"""Which prefill engine a prompt goes to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.fleet.prefill import PrefillEngine
from kvpool.fleet.prompts import Prompt

Router = Callable[[Prompt, Sequence[PrefillEngine]], PrefillEngine]
#: `spill` leaves a session's engine when another one is so much less busy.
_SPILL_S: Final = 5.0


def round_robin() -> Router:
    """Each engine in turn."""
    turns = itertools.count()
    return lambda prompt, engines: engines[next(turns) % len(engines)]


def least_loaded() -> Router:
    """The engine with the least work, in seconds."""
    return lambda prompt, engines: _least(engines)


def sticky(spill_s: float = float("inf")) -> Router:
    """A session stays where its first prompt was, unless that is busier by `spill_s`."""
    homes: dict[int, PrefillEngine] = {}

    def choose(prompt: Prompt, engines: Sequence[PrefillEngine]) -> PrefillEngine:
        home = homes.get(prompt.session)
        if home is None or (
            spill_s < float("inf") and home.work_s > _least(engines).work_s + spill_s
        ):
            home = _least(engines)
        homes[prompt.session] = home
        if prompt.last:
            del homes[prompt.session]
        return home

    return choose


ROUTERS: Final[dict[str, Callable[[], Router]]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "sticky": sticky,
    "spill": lambda: sticky(_SPILL_S),
}


def _least(engines: Sequence[PrefillEngine]) -> PrefillEngine:
    return min(engines, key=lambda engine: (engine.work_s, engine.number))
