"""The sessions that a fleet serves: their turns in tokens, and the blocks of each prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvpool.errors import ConfigError
from kvpool.tools.dry_pool import digest_of
from kvpool.tools.traces import Trace
from kvpool.tools.workloads import SYSTEM_TOKENS, Turn, codex_sessions


class SessionPlan(NamedTuple):
    """The turns of one session. Its children begin with the context of its first turn, after that
    one's answer; its second turn follows when all of them have ended. One of a recorded trace
    begins at its time, with blocks that have names."""

    turns: Sequence[Turn]
    children: Sequence[SessionPlan] = ()
    begins_s: float | None = None
    chain: Sequence[bytes] | None = None


class FleetLoad(NamedTuple):
    """What is asked of a fleet: sessions that share their first `shared_tokens`."""

    name: str
    shared_tokens: int
    sessions: Callable[[int, int], Iterator[SessionPlan]]  # by count and seed


def agent_sessions(count: int, seed: int) -> Iterator[SessionPlan]:
    """Agents that code, one conversation each."""
    return map(SessionPlan, codex_sessions(count, seed))


def scaling_sessions(count: int, seed: int) -> Iterator[SessionPlan]:
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
        yield SessionPlan(session)


def parent_sessions(count: int, seed: int) -> Iterator[SessionPlan]:
    """Agents with children: a context of about 60K tokens, 16 children that read it within two
    seconds and have about eight turns each, and three more turns of the agent itself. The shape is
    assumed; it is that of `kvpool replay --workload fan-out`."""
    rng = np.random.default_rng(seed)

    def turns(count: int, length: float, prefix: float) -> list[Turn]:
        made = []
        for _ in range(count):
            output, gap_s = 400, float(rng.lognormal(math.log(5.2), 1.0))
            made.append(Turn(int(length), int(prefix), output, gap_s))
            prefix = length + output
            length = prefix + float(rng.lognormal(math.log(1_400), 0.6))
        return made

    for _ in range(count):
        context = _COMMON_TOKENS + float(rng.lognormal(math.log(40_000), 0.4))
        lengths = np.maximum(2, rng.poisson(8, _CHILDREN))
        children = [SessionPlan(turns(int(n), context + 600, context)) for n in lengths]
        (first,) = turns(1, context, _COMMON_TOKENS)
        later = turns(3, context + 8_000, context)
        yield SessionPlan([first, *later], children)


def front_loaded_sessions(count: int, seed: int) -> Iterator[SessionPlan]:
    """Agents whose first turns add most, as in the post's Figure 1: 6.2K tokens, 5.8K, and so on
    to 1.6K. Turns, answers and pauses are those of `codex`; the spread is assumed."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length, prefix, session = 12_000 * float(rng.lognormal(0.0, 0.22)), SYSTEM_TOKENS, []
        for turn in range(max(3, round(float(rng.lognormal(math.log(33), 0.29))))):
            output = int(1 + rng.lognormal(math.log(402) - 0.5, 1.0))
            session.append(Turn(int(length), prefix, output, _pause_s(rng)))
            added = max(1_600, 6_200 - 400 * turn) * float(rng.lognormal(-0.125, 0.5))
            prefix = int(length) + output
            length += max(added, output + 1)
        yield SessionPlan(session)


def pipeline_sessions(count: int, seed: int) -> Iterator[SessionPlan]:
    """Six agents that work on one document of some 30K tokens, one after the other: each reads the
    document, then its own task with what the one before has written. The shape is assumed."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        document = _COMMON_TOKENS + int(rng.lognormal(math.log(30_000), 0.4))
        session, written = [], 0
        for stage in range(6):
            own = int(rng.lognormal(math.log(3_000), 0.5))
            prefix = document if stage else _COMMON_TOKENS
            output = int(rng.lognormal(math.log(2_000), 0.4))
            session.append(Turn(document + own + written, prefix, output, 0.2))
            written = output
        yield SessionPlan(session)


def reasoning_sessions(count: int, seed: int) -> Iterator[SessionPlan]:
    """Long answers, of which the next prompt has only the end: thoughts of some 6K tokens are left
    out, so an answer's blocks are never asked for again. The shape is assumed."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length, prefix, session = 4_000 + int(rng.lognormal(math.log(2_000), 0.5)), 0, []
        for _ in range(max(2, int(rng.poisson(8)))):
            output = int(rng.lognormal(math.log(6_000), 0.6))
            session.append(Turn(length, prefix, output, _pause_s(rng)))
            prefix = length
            length += 600 + int(rng.lognormal(math.log(1_500), 0.6))
        yield SessionPlan(session)


def trace_sessions(trace: Trace, rate: float, count: int) -> Iterator[SessionPlan]:
    """The first `count` prompts of a recorded trace, each a session of its own, at `rate` times
    their speed, with their whole blocks. Raises ConfigError for one without lengths."""
    requests = trace.requests[:count]
    for one in requests:
        if not one.length:
            raise ConfigError(
                f"trace {trace.name}: the prompt at {one.time_s:g} s has no length; expected "
                "input_length and output_length in each row"
            )
        turn = Turn(one.length, 0, max(1, one.output), 0.0)
        chain = [digest_of(id) for id in one.chain[: one.length // trace.block]]
        begins_s = (one.time_s - requests[0].time_s) / rate
        yield SessionPlan([turn], begins_s=begins_s, chain=chain)


def _pause_s(rng: np.random.Generator) -> float:
    return float(rng.lognormal(math.log(5.2), 1.1825))


_COMMON_TOKENS: Final = 20_000
_SCALING_GAP_S: Final = 3.0
_CHILDREN: Final = 16
#: In which a session's children begin.
CHILDREN_WITHIN_S: Final = 2.0

LOADS: Final = {
    "codex": FleetLoad("codex", SYSTEM_TOKENS, agent_sessions),
    "scaling": FleetLoad("scaling", _COMMON_TOKENS, scaling_sessions),
    "fan-out": FleetLoad("fan-out", _COMMON_TOKENS, parent_sessions),
    "front-loaded": FleetLoad("front-loaded", SYSTEM_TOKENS, front_loaded_sessions),
    "pipeline": FleetLoad("pipeline", _COMMON_TOKENS, pipeline_sessions),
    "reasoning": FleetLoad("reasoning", 0, reasoning_sessions),
}


class PromptBlocks:
    """Names for the blocks of all sessions' prompts; those of `shared_tokens` are in common."""

    def __init__(self, shared_tokens: int, block: int) -> None:
        self._block = block
        self._next = 0
        self._shared = self._fresh(shared_tokens // block)

    def prompt(self, before: Sequence[bytes] | None, turn: Turn) -> list[bytes]:
        """The whole blocks of a prompt, after the one with the blocks `before`; None: it is the
        first of its session."""
        kept = self._shared if before is None else list(before[: turn.prefix // self._block])
        count = turn.length // self._block
        return kept[:count] + self._fresh(count - len(kept))

    def _fresh(self, count: int) -> list[bytes]:
        first = self._next
        self._next += max(0, count)
        return [digest_of(id) for id in range(first, self._next)]
