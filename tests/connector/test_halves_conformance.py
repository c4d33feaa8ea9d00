"""The checks for connectors over both halves of vLLM's, of two ranks: no vLLM here.

The test is the engine between the halves: it asks, loads, computes the rest, and saves it.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

import kvpool
from kvpool.testing import Ran
from kvpool_connector.records.messages import ModelInfo
from kvpool_connector.records.values import ScheduledRequest
from tests.connector.conformance import chain, computed, conformance
from tests.connector.test_halves import BLOCK, BYTES, Engine, ended

#: Of the engine's memory: the longest prompt of the checks has 37, and saves hold theirs.
BLOCKS = 160


class PlayedEngine:
    """An engine whose KV is made up, and whose memory is all that it has of a prompt."""

    def __init__(self, master: str, variant: str, *, ranks: int = 1) -> None:
        self.variant, self.ranks = variant, ranks
        self.requests = 0
        self.at = 0
        self.contents: dict[int, bytes] = {}
        self.engine: Engine | None = None
        if master:
            dtype = torch.bfloat16 if variant == "dtype" else torch.float16
            self.engine = Engine(
                master,
                ranks=ranks,
                dtype=dtype,
                blocks=BLOCKS,
                # What vLLM's side says of model and configuration; its own tests are in vllm/.
                model=ModelInfo(
                    weights="other" if variant == "model" else "weights",
                    packing="other" if variant == "layout" else "packing",
                    description=(("dtype", str(dtype)),),
                ),
                # vLLM's salts are part of its hashes; a tenant is one of the names.
                engine={"fields": {"tenant": "b" if variant == "salt" else "a"}},
                transports=["shm", "tcp"],
                load_timeout_s=1.0,
            )
            self.engine.still_cached = lambda block, _, digest: self.contents.get(block) == digest
            until = time.monotonic() + 3  # for all of them: there may be no pool yet
            for thread in self.engine.threads:
                thread.wait(max(0.0, until - time.monotonic()))

    @property
    def namespaces(self) -> Sequence[kvpool.Namespace]:
        assert self.engine is not None
        self.engine.named()
        return self.engine.scheduler.namespaces

    def run(self, prompt: Sequence[int]) -> Ran:
        hashes = chain(prompt, BLOCK)
        if self.engine is None:
            return Ran([self._digest(self._computed(one)) for one in hashes], 0)
        request, found = self._ask(prompt, hashes)
        blocks = self._allocate(len(hashes))
        good = self._load(request, blocks, found) if found else 0
        for block, digest in zip(blocks[good:], hashes[good:], strict=True):
            for memory, made in zip(self.engine.memory, self._computed(digest), strict=True):
                memory[block] = torch.frombuffer(made, dtype=torch.uint8)
        self.contents.update(zip(blocks, hashes, strict=True))
        self.engine.step([ScheduledRequest(request, good * BLOCK, len(prompt), [blocks])])
        self.engine.scheduler.on_request_finished(request)
        output = [
            self._digest([bytearray(memory[block].numpy()) for memory in self.engine.memory])
            for block in blocks
        ]
        return Ran(output, good * BLOCK)

    def cancel(self, prompt: Sequence[int]) -> None:
        """Aborted while its blocks are loaded: the engine keeps them until the load has ended."""
        assert self.engine is not None
        hashes = chain(prompt, BLOCK)
        request, found = self._ask(prompt, hashes)
        if not found:
            self.engine.scheduler.on_request_finished(request)
            return
        blocks = self._allocate(len(hashes))
        self.engine.scheduler.on_blocks_allocated(request, [blocks], found * BLOCK)
        self.engine.step()
        self.engine.scheduler.on_request_finished(request)
        self.engine.until(lambda: self._has_ended(request))

    def settle(self) -> None:
        engine = self.engine
        engine.settle()
        engine.until(lambda: not self._pinned())

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _ask(self, prompt: Sequence[int], hashes: list[bytes]) -> tuple[str, int]:
        """A new request, and how many of its blocks the pool has."""
        engine = self.engine
        self.requests += 1
        request, tokens = f"request {self.requests}", len(prompt)
        return request, engine.ask(request, hashes, tokens - len(hashes) * BLOCK) // BLOCK

    def _load(self, request: str, blocks: list[int], found: int) -> int:
        """Load the first blocks; how many of them are good. vLLM computes from a bad one on."""
        engine = self.engine
        engine.bad_blocks.clear()
        engine.scheduler.on_blocks_allocated(request, [blocks], found * BLOCK)
        engine.until(lambda: self._has_ended(request))
        bad = [at for at, block in enumerate(blocks[:found]) if block in engine.bad_blocks]
        return bad[0] if bad else found

    def _has_ended(self, request: str) -> bool:
        assert self.engine is not None
        return request in self.engine.loaded and ended(self.engine)

    def _allocate(self, count: int) -> list[int]:
        """Blocks that no save holds, the longest unused first. Block 0 is none."""

        def free() -> list[int]:
            pinned = self._pinned()
            order = [1 + (self.at + one) % (BLOCKS - 1) for one in range(BLOCKS - 1)]
            return [block for block in order if block not in pinned][:count]

        assert self.engine is not None
        self.engine.until(lambda: len(free()) == count)
        blocks = free()
        self.at = blocks[-1]
        for block in blocks:
            self.contents.pop(block, None)
        return blocks

    def _pinned(self) -> Counter[int]:
        assert self.engine is not None
        return Counter(self.engine.pinned) - Counter(self.engine.unpinned)

    def _computed(self, digest: bytes) -> list[bytearray]:
        """KV of one block on each rank."""
        return [computed(digest, BYTES, self.variant, rank) for rank in range(self.ranks)]

    def _digest(self, parts: list[bytearray]) -> str:
        return hashlib.sha256(b"".join(parts)).hexdigest()


#: Of two ranks: what one rank does, each of them does.
test_conformance = conformance(partial(PlayedEngine, ranks=2))
