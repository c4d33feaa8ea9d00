"""The engine: continuous batching over the paged cache, with a pool behind it if there is one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from examples.mini_engine.cache import BLOCK, Memory, PrefixCache, prefix_keys
from examples.mini_engine.connector import Connector
from examples.mini_engine.model import Model, attention
from kvpool import Namespace

#: Tokens that prefill computes at once: whole blocks.
#: A cached prefix gives the same bits as a computed one only if the rest is computed in the same
#: shapes, because sums depend on their order. So prompts are cut at multiples of CHUNK, only whole
#: chunks of a found prefix are used, decode always computes BATCH rows, and its blocks are not
#: shared.
CHUNK: Final = 8 * BLOCK
#: Requests that decode together.
BATCH: Final = 8


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its output. All counts are tokens."""

    prompt: list[int]
    new_tokens: int
    keys: list[bytes]
    added_at: float
    output: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    from_cache: int = 0
    from_pool: int = 0
    prefilled: int = 0
    blocks: list[int] = field(default_factory=list)


class Engine:
    """Serves requests. Belongs to one thread."""

    def __init__(self, model: Model, blocks: int, pool: str | None = None) -> None:
        self.model = model
        self._capacity = blocks * BLOCK
        self._memory, self._cache = Memory(model.shape, blocks), PrefixCache(blocks)
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._running: list[Request] = []
        self._saving: deque[tuple[Future[None], list[int]]] = deque()
        self.connector: Connector | None = None
        for token in (0, 1):  # the first run takes longer, so only the second is measured
            self.token_s = 0.0  # recent seconds of prefill per token
            self.add([token] * CHUNK, 1)
            self.run()
        # All properties on which the bytes of a block depend, except its prefix.
        self.namespace = Namespace(f"mini/{model.fingerprint()}/f32/block{BLOCK}/chunk{CHUNK}")
        if pool is not None:
            self.connector = Connector(pool, self.namespace)

    def add(self, prompt: Sequence[int], new_tokens: int) -> Request:
        """Queue a request. Raises ValueError for one that can never be served."""
        if not prompt or new_tokens < 1 or len(prompt) + new_tokens > self._capacity:
            raise ValueError(f"{len(prompt)} + {new_tokens} tokens, of at most {self._capacity}")
        request = Request(list(prompt), new_tokens, prefix_keys(prompt), time.perf_counter())
        self._waiting.append(request)
        return request

    def run(self) -> None:
        """Serve all requests, and wait for what they save."""
        while self._waiting or self._prefilling or self._running:
            self.step()
        wait([save for save, _ in self._saving])

    @torch.inference_mode()
    def step(self) -> None:
        """A chunk of one prompt, then one token for each request that decodes, so that those do not
        wait for the whole prompt."""
        while self._saving and self._saving[0][0].done():  # saves end in the order of their start
            self._cache.release(self._saving.popleft()[1])
        if self._prefilling is None and self._waiting and len(self._running) < BATCH:
            self._admit(self._waiting[0])
        if self._prefilling is not None:
            self._prefill(self._prefilling)
        if self._running:
            self._decode()

    def close(self) -> None:
        if self.connector is not None:
            self.connector.close()

    def _admit(self, request: Request) -> None:
        """Give a request all blocks that it needs; cached and loaded ones contain its prefix."""
        # The last token is always computed: the cache has keys and values, but no output tokens.
        keys = request.keys[: (len(request.prompt) - 1) // CHUNK * CHUNK // BLOCK]
        found = _whole_chunks(self._cache.find(keys))
        self._cache.hold(found)
        missing = -(-(len(request.prompt) + request.new_tokens) // BLOCK) - len(found)
        if missing > len(self._cache.idle):
            self._cache.release(found)
            if not self._running:
                wait([self._saving[0][0]])  # it holds the rest
            return
        self._prefilling = self._waiting.popleft()
        request.blocks = found + self._cache.take(missing)
        request.from_cache = len(found) * BLOCK
        if self.connector is not None and len(found) < len(keys):
            wanted, keys = request.blocks[len(found) : len(keys)], keys[len(found) :]
            buffers = [self._memory.buffer(block) for block in wanted]
            loaded = self.connector.load(keys, buffers, self.token_s * BLOCK)
            usable = _whole_chunks(wanted[:loaded])
            self._cache.name(usable, keys[: len(usable)])
            request.from_pool = len(usable) * BLOCK
        request.prefilled = request.from_cache + request.from_pool

    def _prefill(self, request: Request) -> None:
        """Compute the next chunk of a prompt; after the last one, the first token."""
        began, first = time.perf_counter(), request.prefilled
        tokens = request.prompt[first : first + CHUNK]
        hidden = self._forward([(request, tokens, first)], len(tokens))
        request.prefilled += len(tokens)
        if len(tokens) == CHUNK:
            chunk = slice(first // BLOCK, request.prefilled // BLOCK)
            self._cache.name(request.blocks[chunk], request.keys[chunk])
            took_s = (time.perf_counter() - began) / CHUNK
            self.token_s += (took_s - self.token_s) / 4 if self.token_s else took_s
        if request.prefilled == len(request.prompt):
            token = self.model.next_token(hidden[-1:])
            request.first_token_s = time.perf_counter() - request.added_at
            self._prefilling = None
            self._running.append(request)
            self._save(request)
            self._say(request, token)

    def _decode(self) -> None:
        """One more token for each running request."""
        rows = [(r, r.output[-1:], len(r.prompt) + len(r.output) - 1) for r in self._running]
        hidden = self._forward(rows, BATCH)
        for row, (request, _, _) in enumerate(rows):
            self._say(request, self.model.next_token(hidden[row : row + 1]))

    def _forward(self, pieces: list[tuple[Request, list[int], int]], rows: int) -> Tensor:
        """One pass for new tokens of several requests, each from a position on: [rows, width]."""
        tokens, positions = torch.zeros(2, rows, dtype=torch.int64)
        spans, end = [], 0
        for request, new, first in pieces:
            start, end = end, end + len(new)
            tokens[start:end] = torch.tensor(new)
            positions[start:end] = torch.arange(first, first + len(new))
            spans.append((slice(start, end), torch.tensor(request.blocks), first))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = torch.zeros_like(query)
            for span, table, first in spans:
                self._memory.write(layer, table, first, key[span], value[span])
                known = self._memory.read(layer, table, first + len(key[span]))
                attended[span] = attention(query[span], *known)
            return attended

        return self.model.forward(tokens, positions, attend)

    def _say(self, request: Request, token: int) -> None:
        request.output.append(token)
        if len(request.output) == request.new_tokens:
            self._running.remove(request)
            self._cache.release(request.blocks)

    def _save(self, request: Request) -> None:
        """Save all whole chunks. For blocks that the pool has already, no bytes are sent."""
        blocks = _whole_chunks(request.blocks[: len(request.keys)])
        if self.connector is not None and blocks:
            buffers = [self._memory.buffer(block) for block in blocks]
            save = self.connector.save(request.keys[: len(blocks)], buffers)
            if save is not None:
                self._cache.hold(blocks)  # no request may write to them before it is done
                self._saving.append((save, blocks))


def _whole_chunks(blocks: list[int]) -> list[int]:
    """As many of them as make whole chunks, from the first on."""
    return blocks[: len(blocks) - len(blocks) % (CHUNK // BLOCK)]
