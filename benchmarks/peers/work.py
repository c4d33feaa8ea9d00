"""The work: every system in turn, round after round, until the medians stand."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.contract import Failed
from benchmarks.peers.field import Contender

#: A median stands when its standard error is below this share of it.
_STEADY = 0.03
_BLOCK_OF_A_MATCH = 1024


@dataclass(frozen=True, slots=True)
class Effort:
    """For one figure `rounds` at least, more until it stands, or `seconds` are over."""

    rounds: int = 5
    rounds_max: int = 41
    seconds: float = 12.0


@dataclass(slots=True)
class Row:
    """One line of the result: what was done, by which system, and the figures by name."""

    part: str
    what: str
    system: str
    figures: dict[str, Any] = field(default_factory=dict)


Samples = dict[str, dict[str, list[float]]]  # contender -> figure -> one of each round


async def take_turns(
    contenders: Sequence[Contender],
    effort: Effort,
    one: Callable[[Contender, int], Awaitable[dict[str, float]]],
) -> Samples:
    """A B C A B C ... . The first round of each warms up and does not count."""
    samples: Samples = {contender.name: {} for contender in contenders}
    began = time.monotonic()
    for number in range(effort.rounds_max + 1):
        for contender in contenders:
            figures = await one(contender, number)
            if number:
                for name, value in figures.items():
                    samples[contender.name].setdefault(name, []).append(value)
        late = time.monotonic() - began > effort.seconds
        if number >= effort.rounds and (late or _steady(samples)):
            break
    return samples


def _steady(samples: Samples) -> bool:
    """Whether the medians of what is a speed or a time stand."""
    for figures in samples.values():
        for values in figures.values():
            middle = statistics.median(values)
            spread = statistics.median(abs(value - middle) for value in values)
            # 1.4826: from the median deviation to the standard one; 1.2533: of a median.
            if middle and 1.4826 * 1.2533 * spread / math.sqrt(len(values)) > _STEADY * middle:
                return False
    return True


def _check(contender: Contender, answer: dict[str, Any]) -> None:
    """Every byte was compared; missing blocks and wrong blocks are counted apart."""
    if answer["wrong_bytes"] or answer["missed"] or answer["refused"]:
        raise Failed(
            f"{contender.name}: {answer['wrong_bytes']} bytes came back wrong, "
            f"{answer['missed']} blocks did not, {answer['refused']} were refused"
        )


async def batches(
    contenders: Sequence[Contender], size: int, count: int, effort: Effort
) -> list[Row]:
    """Write and read a batch of new blocks in one call each."""
    total = size * count / 1e9

    async def one(contender: Contender, number: int) -> dict[str, float]:
        answer = await contender.workers[0].do(
            "round_trip", size=size, count=count, number=number, offset=0, at=0.0, read_at=0.0
        )
        _check(contender, answer)
        (_, write_s, write_cpu), (_, read_s, read_cpu) = answer["write"], answer["read"]
        return {
            "write": total / write_s,
            "read": total / read_s,
            "write_cpu": write_cpu / total,
            "read_cpu": read_cpu / total,
        }

    samples = await take_turns(contenders, effort, one)
    return [
        Row("reads", f"{_size(size)} x {count}", name, {**_medians(figures), **_n(figures)})
        for name, figures in samples.items()
    ]


async def several_clients(
    contenders: Sequence[Contender], size: int, count: int, effort: Effort
) -> list[Row]:
    """The same by all clients of a system at once; from the first start to the last end."""
    pause_s = {contender.name: 1.0 for contender in contenders}

    async def one(contender: Contender, number: int) -> dict[str, float]:
        workers = contender.workers
        at = time.monotonic() + 0.1
        read_at = at + pause_s[contender.name]
        for place, worker in enumerate(workers):
            worker.ask(
                "round_trip",
                size=size,
                count=count,
                number=number * len(workers) + place,
                offset=place * size * count,
                at=at,
                read_at=read_at,
            )
        answers = [await worker.answer() for worker in workers]
        for answer in answers:
            _check(contender, answer)
        figures = {}
        total = size * count * len(workers) / 1e9
        for what in ("write", "read"):
            began = min(answer[what][0] for answer in answers)
            ended = max(answer[what][0] + answer[what][1] for answer in answers)
            figures[what] = total / (ended - began)
        longest = max(answer["write"][1] for answer in answers)
        pause_s[contender.name] = 1.5 * longest + 0.1
        return figures

    samples = await take_turns(contenders, effort, one)
    count_of = len(contenders[0].workers) if contenders else 0
    what = f"{_size(size)} x {count}, {count_of} clients"
    return [
        Row("clients", what, name, {**_medians(figures), **_n(figures)})
        for name, figures in samples.items()
    ]


async def singles(
    contenders: Sequence[Contender], size: int, effort: Effort, count: int = 32
) -> list[Row]:
    """Blocks one at a time: the time of one call, over all calls of all rounds."""
    total = size * count / 1e9
    calls: dict[str, dict[str, list[float]]] = {c.name: {} for c in contenders}

    async def one(contender: Contender, number: int) -> dict[str, float]:
        answer = await contender.workers[0].do("singles", size=size, count=count, number=number)
        _check(contender, answer)
        if number:
            for name in ("write_s", "read_s"):
                calls[contender.name].setdefault(name, []).extend(answer[name])
        return {
            "write_p50": statistics.median(answer["write_s"]),
            "read_p50": statistics.median(answer["read_s"]),
            "write_cpu": answer["write_cpu_s"] / total,
            "read_cpu": answer["read_cpu_s"] / total,
        }

    samples = await take_turns(contenders, effort, one)
    rows = []
    for name, figures in samples.items():
        found: dict[str, Any] = {**_medians(figures), **_n(figures)}
        for what in ("write", "read"):
            found[f"{what}_p50"] = quantile(calls[name][f"{what}_s"], 0.5)
            found[f"{what}_p99"] = quantile(calls[name][f"{what}_s"], 0.99)
        rows.append(Row("singles", _size(size), name, found))
    return rows


async def match(contenders: Sequence[Contender], count: int, effort: Effort) -> list[Row]:
    """The time of one match of `count` blocks."""
    calls: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    async def one(contender: Contender, number: int) -> dict[str, float]:
        answer = await contender.workers[0].do(
            "match", count=count, size=_BLOCK_OF_A_MATCH, times=max(10, 12_800 // count)
        )
        if number:
            calls[contender.name] += answer["match_s"]
        return {"p50": statistics.median(answer["match_s"]), "cpu": answer["cpu_s"]}

    samples = await take_turns(contenders, effort, one)
    return [
        Row(
            "match",
            f"{count:,} keys",
            name,
            {
                **_n(figures),
                "p50": quantile(calls[name], 0.5),
                "p99": quantile(calls[name], 0.99),
                "cpu": statistics.median(figures["cpu"]),
            },
        )
        for name, figures in samples.items()
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _medians(figures: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in figures.items()}


def _n(figures: dict[str, list[float]]) -> dict[str, int]:
    return {"rounds": max(map(len, figures.values()), default=0)}


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
