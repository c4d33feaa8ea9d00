"""What a run of `make demo-fleet` has written: its sessions, its engines' rates, and its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import linear_regression, mean, median, pstdev
from typing import Final, NamedTuple

import msgspec

from kvpool.errors import ConfigError


class DemoTurn(msgspec.Struct, frozen=True):
    """A prompt: its tokens, and numbers of its whole blocks."""

    tokens: int
    blocks: list[int]


class DemoSession(msgspec.Struct, frozen=True):
    """It begins after the answer to one turn of another session, if `after` names one."""

    name: str
    parent: str
    turns: list[DemoTurn]
    after: tuple[str, int] | None = None


class DemoProbe(msgspec.Struct, frozen=True):
    """One answer of an engine with nothing else to do, but for `beside`; see
    `examples/fleet_rates.py`. It was asked for before the row of this number."""

    kind: str
    tokens: int
    cached: int
    first_s: float
    step_s: float
    engines: int = 1
    row: int = 0


class DemoAnswer(msgspec.Struct, frozen=True):
    """One answer of a row, in tokens; `first_s` seconds to the first one."""

    prompt: int
    cached: int
    first_s: float


class DemoRow(msgspec.Struct, frozen=True):
    """One way to route, with one way to use the pool; `seconds` in all."""

    router: str
    mode: str
    answers: list[DemoAnswer]
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return sum(one.cached for one in self.answers) / sum(one.prompt for one in self.answers)

    @property
    def first_s(self) -> float:
        """The median."""
        return middle([one.first_s for one in self.answers])


class DemoRun(msgspec.Struct, frozen=True):
    """One run. `at_once` requests at a time, answers of `output` tokens."""

    engines: int
    engine_bytes: int
    engine_tokens: int
    pool_bytes: int
    block: int
    at_once: int
    output: int
    sessions: list[DemoSession]
    probes: list[DemoProbe]
    rows: list[DemoRow]


class Rates(NamedTuple):
    """Of one engine alone, and how many engines' work the machine does at a time."""

    token_s: float  # of computing a token, but for attention
    attention_s: float  # besides, for each token before it
    step_s: float
    request_s: float  # of work that a prompt costs besides its tokens, router and client included
    load_bytes_s: float
    cores: float
    noise: float  # relative, of the time of a prefill
    late: float  # share of prompts that have nothing of what the pool has of them


def read(path: Path) -> DemoRun:
    """Raises ConfigError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=DemoRun)
    except OSError as error:
        raise ConfigError(f"--demo-results {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"--demo-results {path}: {error}") from None
    except msgspec.DecodeError:
        raise ConfigError(
            f"--demo-results {path}: not a file of `make demo-fleet ARGS='--results FILE'`"
        ) from None
    kinds = {probe.kind for probe in run.probes}
    if missing := [kind for kind in KINDS if kind not in kinds]:
        raise ConfigError(f"--demo-results {path}: no probe is {', '.join(missing)}")
    return run


def rates(run: DemoRun, row: int) -> Rates:
    """Of all probes of the run: beside one row there are a few, and their means differ from row to
    row by no more than chance would have them differ.

    What one prompt costs alone is the least that was measured: all that other programs do adds to
    it. What prompts cost each other is a mean, as the queues of a row add all of it up. In a row
    with the pool that has the pool's costs, where it was measured.
    """
    cold, held, loaded, beside, crowd = (_kind(run, kind) for kind in KINDS)
    if run.rows[row].mode != WITHOUT:
        # A run of before these probes has none.
        beside = _kind(run, "pool_beside") or beside
        crowd = _kind(run, "pool_crowd") or crowd
    held_s = min(one.first_s for one in held)
    token_s, attention_s = _compute_s(cold, held_s)

    def alone_s(one: DemoProbe) -> float:
        return one.tokens * (token_s + attention_s * one.tokens / 2)

    beside_s = max(1e-3, _mean(beside) - held_s)
    cores = mean(one.engines * alone_s(one) for one in beside) / beside_s
    relative = [math.log(max(1e-3, one.first_s - held_s) / alone_s(one)) for one in cold]
    return Rates(
        token_s=token_s,
        attention_s=attention_s,
        step_s=mean(one.step_s for one in (*cold, *held, *loaded, *beside, *crowd)),
        request_s=max(held_s, _mean(crowd) * cores / run.at_once),
        load_bytes_s=_load_bytes_s(run, loaded, held),
        cores=cores,
        noise=pstdev(relative),
        late=mean(not one.cached for one in loaded),
    )


def _compute_s(cold: Sequence[DemoProbe], held_s: float) -> tuple[float, float]:
    """Seconds of a token, and for each token before it: the line through the seconds per token of
    prompts of each length."""
    lengths: dict[int, float] = {}
    for one in cold:
        each = max(1e-3, one.first_s - held_s) / one.tokens
        lengths[one.tokens] = min(each, lengths.get(one.tokens, each))
    if len(lengths) > 1:
        slope, start = linear_regression(list(lengths), list(lengths.values()))
        if slope > 0 and start > 0:
            return start, 2 * slope  # half of a prompt is before each of its tokens
    return mean(lengths.values()), 0.0


def _load_bytes_s(run: DemoRun, loaded: Sequence[DemoProbe], held: Sequence[DemoProbe]) -> float:
    """By medians: a load takes less than what a busy machine adds to any answer."""
    held_s = median(one.first_s for one in held)
    token_bytes = run.engine_bytes / run.engine_tokens
    rates = [
        one.cached * token_bytes / max(1e-3, one.first_s - held_s) for one in loaded if one.cached
    ]
    return median(rates) if rates else 1.0


def _kind(run: DemoRun, kind: str) -> list[DemoProbe]:
    return [one for one in run.probes if one.kind == kind]


def _mean(probes: Sequence[DemoProbe]) -> float:
    """Seconds to the first token."""
    return mean(one.first_s for one in probes)


#: A row's mode.
WITHOUT: Final = "without the pool"
#: Kinds of probes that rates are made of.
KINDS: Final = ("cold", "held", "loaded", "beside", "crowd")


def middle(values: Sequence[float]) -> float:
    """The median as the demo's own table has it: one of the values."""
    return sorted(values)[max(0, math.ceil(len(values) / 2) - 1)]


def chains(session: DemoSession) -> Iterator[list[bytes]]:
    """The blocks of each turn's prompt."""
    for turn in session.turns:
        yield [number.to_bytes(16, "big") for number in turn.blocks]
