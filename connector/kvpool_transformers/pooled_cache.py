"""`PooledCache`: loads what another process has computed, computes the rest, saves it."""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from transformers import DynamicCache

import kvpool.sync
from kvpool import ROOT, ClientConfig, Cluster, Namespace, UsageError, WriteStatus
from kvpool_connector.engine_pool import EnginePool
from kvpool_transformers.blocks import BLOCK_TOKENS, BlockLayout, chain
from kvpool_transformers.model_name import (
    check_model,
    check_version,
    namespace_of,
    weights_state,
    why_not_now,
)

#: Seconds that a prompt waits for the pool, at most, even if computing would take longer.
LOAD_TIMEOUT_S: Final = 2.0
#: Seconds that a save may take. Its memory is held so long.
SAVE_TIMEOUT_S: Final = 10.0
#: Saves that may wait; further ones are dropped, so that memory is bounded.
SAVES_MAX: Final = 4
#: A load that was slow is tried again now and then: each decision against one makes it less so.
_FORGET: Final = 0.9

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Where the tokens of one prompt came from."""

    loaded: int = 0
    computed: int = 0
    seconds: float = 0.0
    #: Why no more was loaded.
    why: str = ""


class PooledCache:
    """A prefix cache in a pool, for one model in this process. Not for several threads at once.

    `pool` is a master's address, a `ClientConfig`, an open `kvpool.sync.Pool` (which stays yours to
    close), or None: then everything is computed. Without a master the model runs all the same; the
    log has one warning, and the pool is used as soon as it is there.

    `load` decides when: `auto`, only what comes faster than it was computed lately, and no longer
    than that; `always` and `never` are for experiments. Processes with another `salt` share
    nothing. Raises UsageError for models whose prefixes cannot be shared, and for a wrong release
    of transformers.
    """

    def __init__(
        self,
        pool: kvpool.sync.Pool | ClientConfig | str | None,
        model: Any,
        *,
        salt: str = "",
        load: Literal["auto", "always", "never"] = "auto",
        load_timeout_s: float = LOAD_TIMEOUT_S,
        save_timeout_s: float = SAVE_TIMEOUT_S,
        cluster: str | Cluster = "default",
    ) -> None:
        if load not in ("auto", "always", "never"):
            raise UsageError(f"load is {load!r}, expected auto, always or never")
        if warning := check_version():
            log.warning("kvpool: %s", warning)
        check_model(model)
        self._model = model
        self._salt = salt
        self._load = load
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        takes = inspect.signature(model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._state = 0
        self._layout = BlockLayout([])
        self._namespace = Namespace("transformers/unnamed")
        self._name()
        #: The chain of the last text, as far as it was loaded or handed to a save.
        self._done: list[bytes] = []
        self._compute_s = 0.0  # recent seconds per computed token; 0 before the first
        self._load_s = 0.0  # the same of loaded ones
        self._saves: set[Future[None]] = set()
        self._saver = ThreadPoolExecutor(1, "kvpool-save")
        #: The last `prefill`.
        self.last = Prefilled()
        #: `tokens_loaded`, `tokens_computed`; `saves_dropped`, `blocks_` and a status of a write.
        self.counters: Counter[str] = Counter()
        if isinstance(pool, str):
            pool = ClientConfig(masters=[pool], timeout_s=load_timeout_s)
        cluster = cluster if isinstance(cluster, Cluster) else Cluster(cluster)
        self._pool = EnginePool(pool, cluster=cluster, log=log)

    def __repr__(self) -> str:
        return f"<PooledCache {self._namespace.name} {self.last}>"

    def __enter__(self) -> PooledCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        """The name under which this model's blocks are shared."""
        return self._namespace

    def prefill(self, ids: Sequence[int] | torch.Tensor) -> DynamicCache:
        """The keys and values of all tokens but the last, which `model.generate` computes.

        What the pool has is loaded, the rest is computed and saved in the background. Never raises
        because of the pool. Raises UsageError for anything but one text of one token or more,
        without padding.
        """
        began = time.perf_counter()
        tokens = _tokens(ids)
        if reason := why_not_now(self._model):
            past, loaded = DynamicCache(config=self._model.config), 0
            self._done = []
        else:
            self._name()
            past, loaded, reason = self._loaded(tokens[:-1])
        load_s = time.perf_counter() - began
        self._compute(past, tokens[loaded:-1])
        computed = len(tokens) - 1 - loaded
        seconds = time.perf_counter() - began
        if computed >= BLOCK_TOKENS:
            self._compute_s = (seconds - load_s) / computed
        self.last = Prefilled(loaded, computed, seconds, reason)
        self.counters["tokens_loaded"] += loaded
        self.counters["tokens_computed"] += computed
        self.save(tokens, past)
        return past

    def save(self, ids: Sequence[int] | torch.Tensor, past: Any) -> None:
        """Save all full blocks of a cache whose first tokens are `ids`, in the background.

        The bytes are copied before it returns. For what `model.generate` has added: the next turn
        of a conversation begins with it. `ids` and `past` must belong together: nobody can check
        that later. Other caches than `prefill` makes, of several texts for example, are not saved.
        """
        tokens = _tokens(ids)
        if not self._pool.is_ready or why_not_now(self._model) or not self._layout.fits(past):
            return
        keys = chain(tokens[: past.get_seq_length()])
        there = _common(keys, self._done)
        self._saves = {save for save in self._saves if not save.done()}
        if there == len(keys):
            return
        if len(self._saves) >= SAVES_MAX:
            self.counters["saves_dropped"] += 1
            return
        rows = self._layout.take(past, there, len(keys))
        parent = keys[there - 1] if there else ROOT
        self._saves.add(self._saver.submit(self._store, keys[there:], rows, parent))
        self._done = keys

    def generate(self, ids: Sequence[int] | torch.Tensor, **options: Any) -> list[int]:
        """`model.generate` after `prefill`, and `save` after it: the text with its continuation."""
        tokens = _tokens(ids)
        past = self.prefill(tokens)
        prompt = torch.tensor([tokens], device=self._model.device)
        with torch.no_grad():
            output = self._model.generate(prompt, past_key_values=past, **options)
        whole: list[int] = output[0].tolist()
        self.save(whole, past)
        return whole

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all saves have ended; False if some have not by then."""
        timeout_s = self._save_timeout_s if timeout_s is None else timeout_s
        return not wait(self._saves, timeout_s).not_done

    def close(self) -> None:
        """Wait for saves, at most the timeout of one, and close the connection. Idempotent."""
        self.settle()
        self._saver.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
        self._saver.shutdown(wait=True)

    # --- inside --------------------------------------------------------------------------

    def _name(self) -> None:
        """Name the model anew if its weights may be others than they were."""
        state = weights_state(self._model)
        if state != self._state:
            probe = DynamicCache(config=self._model.config)
            self._compute(probe, [0])
            self._layout = BlockLayout.of(probe)
            self._namespace = namespace_of(self._model, self._layout, self._salt)
            self._state = state

    @torch.no_grad()
    def _compute(self, past: DynamicCache, tokens: Sequence[int]) -> None:
        if tokens:
            ids = torch.tensor([tokens], device=self._model.device)
            self._model(input_ids=ids, past_key_values=past, use_cache=True, **self._last_logits)

    @torch.no_grad()
    def _loaded(self, tokens: Sequence[int]) -> tuple[DynamicCache, int, str]:
        """A cache with the longest prefix that the pool has, its tokens, and why it ends."""
        past = DynamicCache(config=self._model.config)
        keys, self._done = chain(tokens), []
        budget_s = self._budget_s(len(keys))
        if not keys or budget_s <= 0:
            return past, 0, "shorter than a block" if not keys else "computing is faster"
        began = time.perf_counter()
        nothing: tuple[torch.Tensor | None, str] = (None, "no pool")
        rows, why = self._pool.call(lambda pool: self._read(pool, keys, budget_s), nothing)
        if rows is None or not len(rows):
            return past, 0, why
        self._layout.fill(past, rows)
        self._done = keys[: len(rows)]
        loaded = len(rows) * BLOCK_TOKENS
        self._load_s = (time.perf_counter() - began) / loaded
        return past, loaded, why

    def _read(
        self, pool: kvpool.sync.Pool, keys: list[bytes], budget_s: float
    ) -> tuple[torch.Tensor | None, str]:
        until = time.monotonic() + budget_s
        match = pool.match(self._namespace, keys, timeout=budget_s)
        self._pool.look_at([match.stopped])
        left_s = until - time.monotonic()
        if not match.length or left_s <= 0:
            return None, match.stopped.label if not match.length else "it took too long to look"
        rows = self._layout.rows(match.length)
        buffers = [memoryview(row.numpy()) for row in rows]
        results = pool.read(
            self._namespace, keys[: match.length], buffers, match=match, timeout=left_s
        )
        self._pool.look_at(result.status for result in results)
        for position, result in enumerate(results):
            # A shorter block is a hit for the pool, and fills a part of the buffer.
            if not result.status.hit or result.size != self._layout.block_bytes:
                return rows[:position], result.status.label
        return rows, match.stopped.label

    def _budget_s(self, blocks: int) -> float:
        """Seconds that loading these blocks may take; 0: it is not worth trying."""
        tokens = blocks * BLOCK_TOKENS
        if self._load == "never":
            return 0.0
        if self._load == "always" or not self._compute_s:
            return self._load_timeout_s
        if self._load_s > self._compute_s:
            self._load_s *= _FORGET
            return 0.0
        return min(self._load_timeout_s, tokens * self._compute_s)

    def _store(self, keys: Sequence[bytes], rows: torch.Tensor, parent: bytes) -> None:
        buffers = [memoryview(row.numpy()) for row in rows]
        statuses = self._pool.call(
            lambda pool: pool.write(
                self._namespace, keys, buffers, parent=parent, timeout=self._save_timeout_s
            ),
            list[WriteStatus](),
        )
        self._pool.look_at(statuses)
        self.counters.update(f"blocks_{status.name.lower()}" for status in statuses)


def _tokens(ids: Sequence[int] | torch.Tensor) -> list[int]:
    """One text as a list. Raises UsageError for several texts, none, or what is no token."""
    if isinstance(ids, torch.Tensor):
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 1 or ids.is_floating_point():
            raise UsageError(f"ids have the shape {tuple(ids.shape)}, expected one text: [1, n]")
        ids = ids.tolist()
    tokens = list(ids)
    if not tokens or not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise UsageError("ids are no tokens: expected one text of one token or more")
    return tokens


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """The length of their common beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
