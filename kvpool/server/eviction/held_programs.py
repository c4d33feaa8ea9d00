"""Conversations that are remembered, and what is stored of them, for people. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Program:
    """What is remembered of one conversation, or of one shared block."""

    __slots__ = (
        "begin", "blocks", "common", "depth", "end", "gone", "number", "parted", "prompts", "reads",
        "start", "used",
    )  # fmt: skip

    def __init__(self, prompts: int = 0, number: int = -1, begin: int = 0) -> None:
        self.prompts = prompts
        self.number = number  # of its class; -1: it has had no prompt yet
        self.used = 0.0
        self.start = 0  # length of its chain before its last prompt
        self.depth = 0  # and after it, as far as it is stored
        self.end = b""  # the last block of it
        self.reads = False  # its last prompt has only read so far
        # For people only:
        self.begin = begin  # place of its root
        self.parted = begin - 1  # of the last block from which others go on differently
        self.blocks = 0  # stored, since it is remembered
        self.common = 0  # of these, such as others go on from, or from one behind it
        self.gone = False  # its prompt found no block of its own


class HeldPrograms:
    """What is stored of remembered programs, by class: blocks, and programs with own blocks."""

    def __init__(self, classes: int, shared: int) -> None:
        self._shared = shared  # from this class on: of shared blocks
        self.blocks = [0] * (classes + 1)  # the last one: programs without a prompt yet
        self.programs = [0] * (classes + 1)
        self.common = 0

    def came(self, program: Program, place: int) -> None:
        """A new block of it is stored."""
        program.blocks += 1
        if place <= program.parted:
            program.common += 1
            self.common += 1
            return
        self.blocks[program.number] += 1
        self.programs[program.number] += program.blocks == program.common + 1

    def left(self, program: Program, place: int) -> bool:
        """A block of it is stored no more, perhaps one of a time that is not remembered. Whether
        it was the last one of a conversation."""
        if not program.blocks:
            return False
        own = program.blocks - program.common
        program.blocks -= 1
        if not own or (place <= program.parted and program.common):
            program.common -= 1
            self.common -= 1
            return False
        self.blocks[program.number] -= 1
        self.programs[program.number] -= own == 1
        return own == 1 and 0 <= program.number < self._shared

    def parted(self, program: Program, place: int) -> None:
        """Others go on differently behind this place of it."""
        if place <= program.parted:
            return
        own = program.blocks - program.common
        moved = min(own, place - program.parted)
        program.parted = place
        if moved:
            program.common += moved
            self.common += moved
            self.blocks[program.number] -= moved
            self.programs[program.number] -= moved == own

    def changed(self, program: Program, number: int) -> None:
        """Its class is another one."""
        own = program.blocks - program.common
        if own:
            self.blocks[program.number] -= own
            self.blocks[number] += own
            self.programs[program.number] -= 1
            self.programs[number] += 1
        program.number = number

    def dropped(self, program: Program) -> None:
        """It is remembered no more."""
        own = program.blocks - program.common
        self.common -= program.common
        self.blocks[program.number] -= own
        self.programs[program.number] -= own > 0
        program.blocks = program.common = 0

    def figures(self, expected: Sequence[bool | None]) -> Counter[str]:
        """By what is expected of each class."""
        found = Counter(
            inferred_programs=sum(self.programs[: self._shared]) + self.programs[-1],
            inferred_returning_programs=0,
            inferred_dead_programs=0,
            inferred_returning_blocks=0,
            inferred_dead_blocks=0,
            inferred_shared_blocks=self.common + sum(self.blocks[self._shared : -1]),
        )
        for number, one in enumerate(expected):
            if one is not None:
                what = "returning" if one else "dead"
                found[f"inferred_{what}_blocks"] += self.blocks[number]
                found[f"inferred_{what}_programs"] += self.programs[number]
        return found
