"""`PooledCache`: loads what another process has computed, computes the rest, saves it."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, cast

import torch
from transformers import DynamicCache

import kvpool.sync
from kvpool import ROOT, ClientConfig, Cluster, Namespace, UsageError, WriteStatus
from kvpool_engines.engine_pool import EnginePool
from kvpool_transformers.blocks import BLOCK_TOKENS, BlockLayout, chain
from kvpool_transformers.model_name import check_model, check_version, namespace_of, why_not_now
from kvpool_transformers.model_state import ModelState

#: Seconds that a prompt waits for the pool, at most, even if computing would take longer.
LOAD_TIMEOUT_S: Final = 2.0
#: Seconds that a save may take. Its memory is held so long.
SAVE_TIMEOUT_S: Final = 10.0
#: Saves that may wait; further ones are dropped, so that memory is bounded.
SAVES_MAX: Final = 4
#: What a model takes that changes no key of a prompt.
_NO_INPUTS: Final = frozenset(
    ("use_cache", "logits_to_keep", "return_dict", "output_attentions", "output_hidden_states")
)
#: A load that was slow is tried again now and then: each decision against one makes it less so.
_FORGET: Final = 0.9

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Where the tokens of one prompt came from."""

    loaded: int = 0
    computed: int = 0
    seconds: float = 0.0
    #: Why no more was loaded.
    why: str = ""


@dataclass(slots=True)
class _Origin:
    """Of which state of the model a cache's keys and values are. It hangs on the cache."""

    structure: str
    digest: str
    namespace: Namespace
    layout: BlockLayout
    #: The chain of its text, as far as it was loaded or handed to a save.
    done: list[bytes]


class PooledCache:
    """A prefix cache in a pool, for one model in this process. Not for several threads at once.

    `pool` is a master's address, a `ClientConfig`, an open `kvpool.sync.Pool` (which stays yours to
    close), or None: then everything is computed. Without a master the model runs all the same; the
    log has one warning, and the pool is used as soon as it is there.

    Each prompt, and each save, reads all of the model's weights once, so that a change is seen
    however it was made: on a CPU that takes about as long as a token of an answer, or less.

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
        self._origin: _Origin | None = None
        self._refused = ""
        self._look(ModelState(model))
        self._compute_s = 0.0  # recent seconds per computed token; 0 before the first
        self._load_s = 0.0  # the same of loaded ones
        self._saves: set[Future[None]] = set()
        self._saver = ThreadPoolExecutor(1, "kvpool-save")
        #: The last `prefill`.
        self.last = Prefilled()
        #: `tokens_loaded`, `tokens_computed`; `loads_failed`, `saves_failed`, which are errors;
        #: `saves_dropped`, `saves_of_changed_weights`;
        #: `blocks_` and a status of a write.
        self.counters: Counter[str] = Counter()
        if isinstance(pool, str):
            pool = ClientConfig(masters=[pool], timeout_s=load_timeout_s)
        cluster = cluster if isinstance(cluster, Cluster) else Cluster(cluster)
        self._pool = EnginePool(pool, cluster=cluster, log=log)

    def __repr__(self) -> str:
        return f"<PooledCache {self.namespace.name} {self.last}>"

    def __enter__(self) -> PooledCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        """The name under which this model's blocks were shared at the last prompt."""
        assert self._origin is not None
        return self._origin.namespace

    def prefill(self, ids: Sequence[int] | torch.Tensor) -> DynamicCache:
        """The keys and values of all tokens but the last, which `model.generate` computes.

        What the pool has is loaded, the rest is computed and saved in the background. Never raises
        because of the pool. Raises UsageError for anything but one text of one token or more,
        without padding.
        """
        began = time.perf_counter()
        tokens = _tokens(ids)
        past: Any = DynamicCache(config=self._model.config)
        loaded, reason = 0, "no pool"
        if self._pool.is_ready:
            origin, reason = self._attempt(lambda: self._look(self._now()))
            if origin is not None:
                past.kvpool_origin = origin
                found = self._guard("loads", lambda: self._loaded(past, tokens[:-1], origin))
                if found is None:  # some layers may have been filled
                    past = DynamicCache(config=self._model.config)
                    past.kvpool_origin = origin
                loaded, reason = found or (0, "an error: see the log")
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
        return cast(DynamicCache, past)

    def save(self, ids: Sequence[int] | torch.Tensor, past: Any) -> None:
        """Save all full blocks of a cache whose first tokens are `ids`, in the background.

        The bytes are copied before it returns. For what `model.generate` has added: the next turn
        of a conversation begins with it. `ids` and `past` must belong together: nobody can check
        that later. Only a cache that `prefill` has made is saved, with one text in it, and only if
        the model is still, or again, what it was then. Never raises because of the pool.
        """
        tokens = _tokens(ids)
        self._guard("saves", lambda: self._save(tokens, past))

    def _save(self, tokens: list[int], past: Any) -> None:
        origin: _Origin | None = getattr(past, "kvpool_origin", None)
        if origin is None or not self._pool.is_ready or not origin.layout.fits(past):
            return
        keys = chain(tokens[: past.get_seq_length()])
        there = _common(keys, origin.done)
        self._saves = {save for save in self._saves if not save.done()}
        if there == len(keys):
            return
        if len(self._saves) >= SAVES_MAX:
            self.counters["saves_dropped"] += 1
            return
        state, _ = self._attempt(self._now)
        if state is None or state.structure != origin.structure:
            self.counters["saves_of_changed_weights"] += 1
            return
        rows = origin.layout.take(past, there, len(keys))
        parent = keys[there - 1] if there else ROOT
        store = functools.partial(self._store, origin, state, keys[there:], rows, parent)
        try:
            self._saves.add(self._saver.submit(self._guard, "saves", store))
        except RuntimeError:  # no thread was to be had: what is queued would be kept
            self._saver = ThreadPoolExecutor(1, "kvpool-save")
            raise
        origin.done = keys

    def generate(self, ids: Sequence[int] | torch.Tensor, **options: Any) -> list[int]:
        """`model.generate` after `prefill`, and `save` after it: the text with its continuation.

        Raises UsageError for options that make another prompt of the tokens, such as pictures.
        """
        tokens = _tokens(ids)
        takes = inspect.signature(self._model.forward).parameters.keys() - _NO_INPUTS
        for name in takes & options.keys():
            value = options[name]
            if value is None:
                continue
            if name != "attention_mask" or not bool(torch.all(torch.as_tensor(value) == 1)):
                raise UsageError(f"{name} changes what the tokens mean: prefill knows tokens alone")
        past = self.prefill(tokens)
        prompt = torch.tensor([tokens], device=self._model.device)
        with torch.no_grad():
            output = self._model.generate(prompt, past_key_values=past, **options)
        whole: list[int] = getattr(output, "sequences", output)[0].tolist()
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

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, str]:
        """What `work` returns, or why the model is not shared: that must not end a prompt."""
        try:
            return work(), ""
        except Exception as error:  # whatever hangs on a model is looked at
            why = str(error) if isinstance(error, UsageError) else repr(error)
        if why != self._refused:
            self._refused = why
            log.warning("kvpool: not shared as long as %s", why)
        return None, why

    def _guard(self, what: str, work: Callable[[], T]) -> T | None:
        """What `work` returns; None after an error, which must not end a prompt. It is counted."""
        try:
            return work()
        except Exception as error:  # no memory, no thread: the model runs all the same
            self.counters[f"{what}_failed"] += 1
            why = f"{what} fail: {error!r}"
        if why != self._refused:
            self._refused = why
            log.warning("kvpool: %s", why)
        return None

    def _now(self) -> ModelState:
        """The model as it is. Raises UsageError if nothing of it may be shared at this moment."""
        state = ModelState(self._model)
        if why := why_not_now(self._model, state):
            raise UsageError(why)
        return state

    def _look(self, state: ModelState) -> _Origin:
        """Read all weights, and name the model anew if it is another than at the last prompt."""
        digest, last = state.digest(), self._origin
        if last is None or state.structure != last.structure:
            check_model(self._model)
            probe = DynamicCache(config=self._model.config)
            self._compute(probe, [0])
            layout = BlockLayout.of(probe)
        else:
            layout = last.layout
        if last is None or (state.structure, digest) != (last.structure, last.digest):
            namespace = namespace_of(self._model, state, digest, layout, self._salt)
        else:
            namespace = last.namespace
        self._origin = _Origin(state.structure, digest, namespace, layout, [])
        return self._origin

    @torch.no_grad()
    def _compute(self, past: DynamicCache, tokens: Sequence[int]) -> None:
        if tokens:
            ids = torch.tensor([tokens], device=self._model.device)
            self._model(input_ids=ids, past_key_values=past, use_cache=True, **self._last_logits)

    @torch.no_grad()
    def _loaded(
        self, past: DynamicCache, tokens: Sequence[int], origin: _Origin
    ) -> tuple[int, str]:
        """Append the longest prefix that the pool has; its tokens, and why it ends."""
        keys = chain(tokens)
        budget_s = self._budget_s(len(keys))
        if not keys or budget_s <= 0:
            return 0, "shorter than a block" if not keys else "computing is faster"
        began = time.perf_counter()
        nothing: tuple[torch.Tensor | None, str] = (None, "no pool")
        rows, why = self._pool.call(lambda pool: self._read(pool, keys, budget_s, origin), nothing)
        if rows is None or not len(rows):
            return 0, why
        origin.layout.fill(past, rows)
        origin.done = keys[: len(rows)]
        loaded = len(rows) * BLOCK_TOKENS
        self._load_s = (time.perf_counter() - began) / loaded
        return loaded, why

    def _read(
        self, pool: kvpool.sync.Pool, keys: list[bytes], budget_s: float, origin: _Origin
    ) -> tuple[torch.Tensor | None, str]:
        until = time.monotonic() + budget_s
        match = pool.match(origin.namespace, keys, timeout=budget_s)
        self._pool.look_at([match.stopped])
        left_s = until - time.monotonic()
        if not match.length or left_s <= 0:
            return None, match.stopped.label if not match.length else "it took too long to look"
        rows = origin.layout.rows(match.length)
        buffers = [memoryview(row.numpy()) for row in rows]
        results = pool.read(
            origin.namespace, keys[: match.length], buffers, match=match, timeout=left_s
        )
        self._pool.look_at(result.status for result in results)
        for position, result in enumerate(results):
            # A shorter block is a hit for the pool, and fills a part of the buffer.
            if not result.status.hit or result.size != origin.layout.block_bytes:
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

    def _store(
        self,
        origin: _Origin,
        state: ModelState,
        keys: Sequence[bytes],
        rows: torch.Tensor,
        parent: bytes,
    ) -> None:
        # Read again, after they were used: they may have changed on the way. Who trains beside
        # this writes while it reads, which gives a hash that is not this one.
        if state.digest() != origin.digest:
            self.counters["saves_of_changed_weights"] += 1
            return
        buffers = [memoryview(row.numpy()) for row in rows]
        statuses = self._pool.call(
            lambda pool: pool.write(
                origin.namespace, keys, buffers, parent=parent, timeout=self._save_timeout_s
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
