"""Random number streams: one generator per concern, so that a draw in one moves no other."""

from __future__ import annotations

import random


class RandomStreams:
    """The source of all randomness in one history: the same seed gives the same history."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[str, random.Random] = {}

    def __getitem__(self, concern: str) -> random.Random:
        """The generator of one concern, such as `net`, `faults` or `work/client-1`."""
        generator = self._generators.get(concern)
        if generator is None:
            generator = self._generators[concern] = random.Random(f"{self.seed}/{concern}")
        return generator
