"""How fast the engines of `make demo-fleet` are, one prompt at a time: what a model of them needs.

Measured in the run that is to be predicted, before each row and after the last, because other
programs may have the same cores. `python -m benchmarks.fleet
--demo-results FILE` reads what is written here.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from examples.agent_sessions import Session, long_session
from examples.fleet_report import WITH, WITHOUT, Answered, Row

#: Words of the prompts; a word is nearly two tokens.
_WORDS: Final = (200, 500, 1000)
_BESIDE_WORDS: Final = 500
_ROUTED_WORDS: Final = 150
#: Until what was saved is found by another engine.
_SAVED_S: Final = 1.5
#: Their sessions have numbers of their own, so that no two share a block.
_FIRST_NUMBER: Final = 1000

#: Asks one engine, or the router for None, with this mode and salt.
Ask = Callable[[int | None, str, str, Session], Awaitable[Answered]]


class Probe(NamedTuple):
    """One answer. `cold`: nothing was cached; `held`: by the engine itself; `saved`: cold, and
    stored in the pool; `loaded`: by another engine; `beside`: cold, while `engines` computed;
    `routed`: held, and asked through the router; `crowd`: the same, as one of `engines` requests
    at a time. `pool_beside` and `pool_crowd` are asked with the pool: it is looked up, and what is
    computed is saved. It was asked for before the row of this number."""

    kind: str
    tokens: int
    cached: int
    first_s: float
    step_s: float  # between two tokens of the answer
    engines: int = 1
    row: int = 0


async def probes(ask: Ask, engines: int, at_once: int, row: int, output: int) -> list[Probe]:
    """Every kind, on each engine in turn."""
    found: list[Probe] = []
    salt = f"rates-{row}-"

    def probed(kind: str, one: Answered, beside: int = 1) -> None:
        step_s = (one.done_s - one.began_s - one.first_s) / max(1, output - 1)
        found.append(Probe(kind, one.prompt, one.cached, one.first_s, step_s, beside, row))

    for number, words in enumerate(_WORDS):
        here, other = number % engines, (number + 1) % engines
        session = long_session(_FIRST_NUMBER + number, 1, words)
        probed("cold", await ask(here, WITHOUT, f"{salt}own", session))
        probed("held", await ask(here, WITHOUT, f"{salt}own", session))
        probed("saved", await ask(here, WITH, f"{salt}pool", session))
        await asyncio.sleep(_SAVED_S)
        probed("loaded", await ask(other, WITH, f"{salt}pool", session))
    for repetition in range(2):
        sessions = [
            long_session(_FIRST_NUMBER + 10 * (repetition + 1) + engine, 1, _BESIDE_WORDS)
            for engine in range(engines)
        ]
        for kind, mode, name in (("beside", WITHOUT, "own"), ("pool_beside", WITH, "pool")):
            asked = (ask(engine, mode, salt + name, one) for engine, one in enumerate(sessions))
            for one in await asyncio.gather(*asked):
                probed(kind, one, engines)
    session = long_session(_FIRST_NUMBER + 100, 1, _ROUTED_WORDS)
    for number in range(2 * engines):  # round robin: each engine cold, then each of them again
        one = await ask(None, WITHOUT, f"{salt}routed", session)
        if number >= engines:
            probed("routed", one)
    for kind, mode in (("crowd", WITHOUT), ("pool_crowd", WITH)):
        for _ in range(3):
            crowd = (ask(None, mode, f"{salt}routed", session) for _ in range(at_once))
            for one in await asyncio.gather(*crowd):
                probed(kind, one, at_once)
    return found


class BlockNumbers:
    """Numbers for blocks of prompts: the same one for the same tokens after the same blocks."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Of the whole blocks."""
        chain: list[int] = []
        for first in range(0, len(tokens) - self._block + 1, self._block):
            key = (chain[-1] if chain else -1, tuple(tokens[first : first + self._block]))
            chain.append(self._numbers.setdefault(key, len(self._numbers)))
        return chain


def prompts(url: str, sessions: Sequence[Session], block: int) -> list[dict[str, Any]]:
    """Of each session: whom it follows, and for each turn the tokens and numbers of its blocks.

    The engine at `url` makes the tokens.
    """
    numbers = BlockNumbers(block)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def tokens(messages: list[dict[str, Any]]) -> list[int]:
        request = urllib.request.Request(
            f"{url}/tokenize",
            json.dumps({"model": "tiny", "messages": messages}).encode(),
            {"Content-Type": "application/json"},
        )
        with direct.open(request, timeout=30) as answer:
            found: list[int] = json.load(answer)["tokens"]
            return found

    described = []
    for session in sessions:
        turns = [tokens(session.prompt(turn)) for turn in range(len(session.ends))]
        described.append(
            {
                "name": session.name,
                "parent": session.parent,
                "after": session.after,
                "turns": [{"tokens": len(one), "blocks": numbers.of(one)} for one in turns],
            }
        )
    return described


def write(
    path: Path,
    facts: dict[str, Any],
    sessions: list[dict[str, Any]],
    measured: Sequence[Probe],
    rows: Sequence[Row],
) -> None:
    """Everything of a run that a model of it needs, and what the run came to."""
    found = {
        **facts,
        "sessions": sessions,
        "probes": [one._asdict() for one in measured],
        "rows": [
            {
                "router": row.router,
                "mode": row.mode,
                "seconds": row.seconds,
                "answers": [one._asdict() for one in row.answers],
            }
            for row in rows
        ],
    }
    path.write_text(json.dumps(found) + "\n")
