"""Workloads: who asks for which blocks, in which order, and what is in them.

`codex` generates agentic traffic calibrated to published aggregates of Codex on SWE-bench Pro (610
traces: median 33 turns, 94.2 % of the input repeated); `fan_out` has agents that start children
with their own context, `many_answers` has several answers to each prompt. Recorded ones: `traces`.
What a cache should do with the same requests: `cache_bounds`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError
from kvpool.tools import traces
from kvpool.tools.traces import Request

Bytes = npt.NDArray[np.uint8]


class Turn(NamedTuple):
    """One prompt of a session in tokens, and what follows it."""

    length: int  # tokens of the prompt
    prefix: int  # of which were there before
    output: int  # tokens that the model answers
    gap_s: float  # until the next prompt


# --- generators ------------------------------------------------------------------------


def codex(
    sessions: int = 610, concurrent: int = 64, *, block: int = 512, seed: int = 1
) -> list[Request]:
    """Agentic coding: `concurrent` sessions at any time, blocks of `block` tokens.

    A session starts at about 12,000 tokens and grows by about 2,200 a turn; now and then its
    history is rewritten from some point on. All share a system prompt of 816 tokens.
    """
    rng = np.random.default_rng(1)
    lanes = list(rng.random(concurrent) * 300.0)  # when each lane is free for its next session
    fresh = iter(range(1 << 40)).__next__
    system = [fresh() for _ in range(SYSTEM_TOKENS // block)]
    timed: list[tuple[int, Request]] = []
    for number, session in enumerate(codex_sessions(sessions, seed)):
        lane = int(np.argmin(lanes))
        now = lanes[lane]
        ids = list(system)
        for position, turn in enumerate(session):
            ids = ids[: min(turn.prefix // block, len(ids)) if position else len(system)]
            ids = ids + [fresh() for _ in range(-(-turn.length // block) - len(ids))]
            lasts_s = 0.5 + 0.0137 * turn.output + turn.gap_s
            resumes_s = lasts_s if position + 1 < len(session) else None
            at_ms = int(now * 1000)
            timed.append((at_ms, Request(number, tuple(ids), at_ms / 1000, resumes_s)))
            now += lasts_s
        lanes[lane] = now
    timed.sort(key=lambda entry: entry[0])
    return [request for _, request in timed]


#: Of the system prompt that all sessions of `codex` share.
SYSTEM_TOKENS = 816
_CONTEXT_MAX = 258_000


def fan_out(
    groups: int = 60, concurrent: int = 12, *, block: int = 512, seed: int = 1
) -> list[Request]:
    """Agents with children: `concurrent` groups at any time, blocks of `block` tokens.

    An agent reads a context of about 40,000 tokens, then starts 16 children in two seconds. Each
    begins with the agent's whole context and has about eight turns of its own; then the agent goes
    on for three turns. All groups share a system prompt and tools of 20,480 tokens.
    """
    rng = np.random.default_rng(seed)
    lanes = list(rng.random(concurrent) * 60.0)
    fresh = iter(range(1 << 40)).__next__
    system = [fresh() for _ in range(20_480 // block)]
    timed: list[tuple[int, Request]] = []
    number = iter(range(1 << 40)).__next__

    def grown(chain: list[int], tokens: float) -> list[int]:
        return chain + [fresh() for _ in range(max(1, int(tokens) // block))]

    def conversation(chain: list[int], turns: int, now: float) -> float:
        """The turns of one session, the first with `chain`. Returns when the last one ends."""
        session = number()
        for turn in range(turns):
            lasts_s = 6.0 + float(rng.lognormal(math.log(5.2), 1.0))
            resumes_s = lasts_s if turn + 1 < turns else None
            at_ms = int(now * 1000)
            timed.append((at_ms, Request(session, tuple(chain), at_ms / 1000, resumes_s)))
            now += lasts_s
            chain = grown(chain, rng.lognormal(math.log(1_800), 0.6))
        return now

    for _ in range(groups):
        lane = int(np.argmin(lanes))
        context = grown(system, rng.lognormal(math.log(40_000), 0.4))
        ready = conversation(context, 1, lanes[lane])
        starts = ready + np.sort(rng.random(_CHILDREN)) * 2.0
        turns = np.maximum(2, rng.poisson(8, _CHILDREN))
        ends = [
            conversation(grown(context, 600), int(count), float(start))
            for start, count in zip(starts, turns, strict=True)
        ]
        lanes[lane] = conversation(grown(context, 8_000), 3, max(ends))
    timed.sort(key=lambda entry: entry[0])
    return [request for _, request in timed]


_CHILDREN = 16


def many_answers(
    groups: int = 500, concurrent: int = 32, *, block: int = 512, seed: int = 1
) -> list[Request]:
    """Eight answers to one prompt, as sampled for training or to choose the best of them:
    `concurrent` groups at any time, blocks of `block` tokens.

    A prompt has about 8,000 tokens, all begin with the same 1,024. Its answers begin over a minute,
    as engines have room; each has one to three turns of its own, 20 seconds apart.
    """
    rng = np.random.default_rng(seed)
    lanes = list(rng.random(concurrent) * 60.0)
    fresh = iter(range(1 << 40)).__next__
    system = [fresh() for _ in range(max(1, 1_024 // block))]
    timed: list[tuple[int, Request]] = []
    for group in range(groups):
        lane = int(np.argmin(lanes))
        tokens = int(rng.lognormal(math.log(8_000), 0.5))
        prompt = system + [fresh() for _ in range(max(1, tokens // block))]
        starts = lanes[lane] + np.sort(rng.exponential(20.0, _ANSWERS))
        for answer, start in enumerate(starts):
            chain, now = list(prompt), float(start)
            turns = int(rng.integers(1, 4))
            for turn in range(turns):
                lasts_s = float(rng.lognormal(math.log(20.0), 0.6))
                resumes_s = lasts_s if turn + 1 < turns else None
                at_ms = int(now * 1000)
                session = group * _ANSWERS + answer
                timed.append((at_ms, Request(session, tuple(chain), at_ms / 1000, resumes_s)))
                now += lasts_s
                chain = chain + [fresh() for _ in range(max(1, 1_024 // block))]
            lanes[lane] = max(lanes[lane], now)
    timed.sort(key=lambda entry: entry[0])
    return [request for _, request in timed]


_ANSWERS = 8


def codex_sessions(count: int, seed: int) -> Iterator[list[Turn]]:
    """The sessions of `codex`, turn by turn."""
    rng = np.random.default_rng(seed)

    def around(median: float, sigma: float) -> float:
        return float(rng.lognormal(math.log(median), sigma))

    def averaging(mean: float, sigma: float) -> float:
        return float(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma))

    for _ in range(count):
        turns = max(3, round(around(33, 0.29)))
        context = max(float(SYSTEM_TOKENS + 500), around(12_000, 0.22))
        verbosity = averaging(1.0, 0.20)
        reusable = 0
        session: list[Turn] = []
        for turn in range(turns):
            length = int(context)
            prefix = min(reusable, length) if turn else SYSTEM_TOKENS
            if turn and rng.random() < 0.0375:  # the agent rewrites its history
                kept = rng.random() * max(0, prefix - SYSTEM_TOKENS)
                prefix = int(SYSTEM_TOKENS + kept)
            output = int(1 + averaging(402, 1.0))
            tool = int(verbosity * averaging(1840, 1.25))
            gap_s = around(5.2, 1.1825)
            session.append(Turn(length, prefix, output, gap_s))
            rng.random()  # keeps the stream in step with the published check values
            reusable, context = length + output, length + output + tool
            if context > _CONTEXT_MAX:
                break
        yield session


def mooncake(path: str | Path) -> list[Request]:
    """`traces.load(path).requests`, under the name that scripts know: of a trace in any format."""
    return traces.load(path).requests


def blocks(requests: Sequence[Request]) -> int:
    """Block references in all requests."""
    return sum(len(request.chain) for request in requests)


def hit_rate(hits: int, requests: Sequence[Request]) -> float:
    """The share of all block references; 0 where no prompt has a block."""
    return hits / max(1, blocks(requests))


# --- contents ---------------------------------------------------------------------------


class Payload:
    """Bytes that follow from the key, so that any reader can check every byte of any block.

    A block is its digest, followed by a stretch of one random tape that starts where the digest
    says. No two blocks are equal, and making or checking one is a single pass over memory.
    """

    _TAPE_EXTRA = (1 << 20) - 3

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 64:
            raise ConfigError(f"block size {size}: expected at least 64 bytes")
        self.size = size
        self._salt = str(seed).encode()
        rng = np.random.default_rng(seed)
        self._tape: Bytes = rng.integers(0, 256, size + self._TAPE_EXTRA, np.uint8)
        self.digest = lru_cache(maxsize=1 << 18)(self._digest)

    def _digest(self, id: int) -> bytes:
        return hashlib.blake2b(str(id).encode(), digest_size=32, key=self._salt).digest()

    def write(self, digest: bytes, block: Bytes) -> None:
        """Fill `block` with what belongs under `digest`."""
        np.copyto(block, self._stretch(digest))
        block[:32] = np.frombuffer(digest, np.uint8)

    def spoil(self, digest: bytes, block: Bytes) -> None:
        """Make every byte of `block` wrong for `digest`, so that one that never comes is seen.

        Memory that is used again may still hold the right bytes from before.
        """
        np.invert(self._stretch(digest), out=block)
        np.invert(np.frombuffer(digest, np.uint8), out=block[:32])

    def wrong(self, digest: bytes, block: Bytes) -> int:
        """How many bytes of `block` are not what belongs under `digest`."""
        head = np.frombuffer(digest, np.uint8)
        stretch = self._stretch(digest)
        if np.array_equal(block[:32], head) and np.array_equal(block[32:], stretch[32:]):
            return 0
        expected = np.concatenate([head, stretch[32:]])
        return int(np.count_nonzero(block != expected))

    def _stretch(self, digest: bytes) -> Bytes:
        start = int.from_bytes(digest[:8], "little") % self._TAPE_EXTRA
        return self._tape[start : start + self.size]
