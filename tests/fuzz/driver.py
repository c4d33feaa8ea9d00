"""Common to all targets: libFuzzer's set-up, and mutations of whole messages.

libFuzzer changes bytes, but a changed length or type byte is refused at once. So half of the
mutations change one *field* of a message, or leave out, duplicate or move a message. In this way
the code behind the decoders is fuzzed, too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import atheris
import msgspec

CORPUS = Path(__file__).parent / "corpus"
INPUT_SIZE_MAX = 4096

#: A message: its type and its body.
Record = tuple[int, bytes]
Split = Callable[[bytes], list[Record]]
Join = Callable[[list[Record]], bytes]


def fuzz(
    name: str, target: Callable[[bytes], None], seeds: Iterable[bytes], split: Split, join: Join
) -> None:
    """Run one target with libFuzzer's flags from the command line, or on the files named there."""
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [sys.argv[0], f"-artifact_prefix={CORPUS / name}-", *sys.argv[1:]]
    if all(argument.startswith("-") for argument in sys.argv[1:]):
        arguments += [f"-max_len={INPUT_SIZE_MAX}", str(corpus)]

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        rng = random.Random(seed)
        parts = split(data)
        if not parts or rng.random() < 0.5:
            return bytes(atheris.Mutate(data, size_max))
        return join(changed(parts, rng))[:size_max]

    atheris.Setup(arguments, target, custom_mutator=mutate)
    atheris.Fuzz()


def changed(parts: list[Record], rng: random.Random) -> list[Record]:
    """The same messages with one change."""
    at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    number, body = parts[at]
    step = rng.random()
    if step < 0.1:
        return parts[:at] + parts[at + 1 :]
    if step < 0.2:
        return [*parts[:other], parts[at], *parts[other:]]
    if step < 0.3:
        return [*parts[:at], (rng.randrange(48), body), *parts[at + 1 :]]
    if step < 0.5 and body:
        mutated = bytes(atheris.Mutate(body, len(body) + 16))
        return [*parts[:at], (number, mutated), *parts[at + 1 :]]
    return [*parts[:at], (number, with_another_field(body, rng)), *parts[at + 1 :]]


def with_another_field(body: bytes, rng: random.Random) -> bytes:
    """One field with another value of its type, many of them at the edge of what is allowed."""
    try:
        fields = msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return body
    if not fields:
        return body
    name = rng.choice(sorted(fields))
    old = fields[name]
    if isinstance(old, bool):
        fields[name] = not old
    elif isinstance(old, int):
        fields[name] = rng.choice([0, 1, 2, max(0, old - 1), old + 1, 255, 2**48 - 1, 2**63])
    elif isinstance(old, float):
        fields[name] = rng.choice([0.0, 1e-9, 60.0, 1e9])
    elif isinstance(old, bytes):
        fields[name] = rng.choice([b"", old[:32], old[32:], old[:16], old * 2, bytes(32)])
    elif isinstance(old, str):
        fields[name] = rng.choice(["s", "t", "n", "", "\0", "../x", "default"])
    elif isinstance(old, list):
        fields[name] = rng.choice([[], old[:1], old[1:], old * 2, old[::-1]])
    try:
        return msgspec.msgpack.encode(fields)
    except OverflowError:  # the number was 2**64 - 1 already
        return body
