"""What a run of `make demo-fleet` has written: its sessions, its engines' rates, and its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median, pstdev
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

    prefill_tokens_s: float
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
    for row in range(len(run.rows)):
        kinds = {probe.kind for probe in run.probes if probe.row in (row, row + 1)}
        if missing := [kind for kind in KINDS if kind not in kinds]:
            raise ConfigError(
                f"--demo-results {path}: beside row {row} no probe is {', '.join(missing)}"
            )
    return run


def rates(run: DemoRun, row: int) -> Rates:
    """As they were measured just before and just after this row; each kind has probes then.

    What is done, by the seconds of all its probes: other programs have the cores at times, during
    the row as during the probes, and the queues of a row add all of that up. In a row with the pool
    what engines do beside each other has its costs, where that was measured.
    """
    near = {kind: _near(run, kind, row) for kind in KINDS}
    if run.rows[row].mode != WITHOUT:
        # A run of before these probes has none.
        near["beside"] = _near(run, "pool_beside", row) or near["beside"]
        near["crowd"] = _near(run, "pool_crowd", row) or near["crowd"]
    held_s = _mean(near["held"])
    cold_s = max(1e-3, _mean(near["cold"]) - held_s)
    speed = mean(one.tokens for one in near["cold"]) / cold_s
    beside_s = max(1e-3, _mean(near["beside"]) - held_s)
    work_s = mean(one.engines * one.tokens for one in near["beside"]) / speed
    cores = max(1.0, work_s / beside_s)
    every = [one for probes in near.values() for one in probes]
    speeds = [one.tokens / max(1e-3, one.first_s - held_s) for one in near["cold"]]
    return Rates(
        prefill_tokens_s=speed,
        step_s=mean(one.step_s for one in every),
        request_s=max(held_s, _mean(near["crowd"]) * cores / run.at_once),
        load_bytes_s=_load_bytes_s(run, near["loaded"], near["held"]),
        cores=cores,
        noise=pstdev(math.log(one) for one in speeds),
        # Of the whole run: beside one row there are a few, and this is rare.
        late=mean(not one.cached for one in run.probes if one.kind == "loaded"),
    )


def _load_bytes_s(run: DemoRun, loaded: Sequence[DemoProbe], held: Sequence[DemoProbe]) -> float:
    """By medians: a load takes less than what a busy machine adds to any answer."""
    held_s = median(one.first_s for one in held)
    token_bytes = run.engine_bytes / run.engine_tokens
    rates = [
        one.cached * token_bytes / max(1e-3, one.first_s - held_s) for one in loaded if one.cached
    ]
    return median(rates) if rates else 1.0


def _near(run: DemoRun, kind: str, row: int) -> list[DemoProbe]:
    return [one for one in run.probes if one.kind == kind and one.row in (row, row + 1)]


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
