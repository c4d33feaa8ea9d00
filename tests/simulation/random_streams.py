"""Randomness: one generator for each concern, so that one more draw here moves nothing there."""

from __future__ import annotations

import random


class RandomStreams:
    """Everything random in one history comes from here. The same seed, the same history."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[str, random.Random] = {}

    def __getitem__(self, concern: str) -> random.Random:
        """The generator of a concern: `net`, `faults`, `work/client-1`."""
        generator = self._generators.get(concern)
        if generator is None:
            generator = self._generators[concern] = random.Random(f"{self.seed}/{concern}")
        return generator
