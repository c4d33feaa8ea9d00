"""The joint of `kvpool_events`: KV events about the pool's blocks in the engine's own stream."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

from kvpool import Namespace
from kvpool.kv_events import EventForm, KVEvent, RemovedEvent, StoredEvent
from kvpool_connector.plan.save_queue import SaveRun
from kvpool_connector.vllm_engine.interface import (
    BlockRemoved,
    BlockStored,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    kv_cache_utils,
)
from kvpool_connector.worker.ended_transfers import IDLE_S
from kvpool_engines.pool_thread import PoolThread
from kvpool_events.event_feed import EventFeed

#: Finished requests that are kept for the KV events of their last blocks.
_FINISHED_MAX: Final = 256


class EngineEvents:
    """Of one engine, whatever becomes of its scheduler's half."""

    def __init__(
        self,
        form: EventForm,
        thread: PoolThread,
        kv_cache_config: Any,
        counters: MutableMapping[str, float],
    ) -> None:
        self._feed = EventFeed(form, thread, counters)
        self._kv = kv_cache_config
        self._finished: OrderedDict[str, Any] = OrderedDict()

    @property
    def waiting(self) -> bool:
        """Whether the engine should step once more, so that news go out."""
        return self._feed.waiting

    def step(self, namespaces: Sequence[Namespace], *, waits: bool) -> None:
        """A step begins, of an engine that waits for nothing else, or goes on at once."""
        self._feed.step(namespaces, time.monotonic())
        if waits and self._feed.waiting:
            self._feed.wait(IDLE_S)

    def on_stored(self, stored: Iterable[SaveRun], requests: Mapping[str, Any]) -> None:
        """The pool has these blocks now."""
        known = {**self._finished, **requests}
        self._feed.add(_events_of(stored, known, self._kv), time.monotonic())

    def on_finished(self, request: Any) -> None:
        """Its last saves may end later."""
        self._finished[request.request_id] = request
        while len(self._finished) > _FINISHED_MAX:
            self._finished.popitem(last=False)

    def take(self) -> list[Any]:
        return [vllm_event(event) for event in self._feed.take()]


def _events_of(
    stored: Iterable[SaveRun], requests: Mapping[str, Any], kv_cache_config: Any
) -> Iterator[tuple[int, bytes, StoredEvent]]:
    """Group and key of what the pool has now, and an event of it in the form of the engine's own,
    which does not say where it is."""
    blocks = ((one, place) for one in stored for place in enumerate(one.digests, one.number))
    for run, (number, digest) in blocks:
        request = requests.get(run.request_id)
        if request is None:
            continue
        spec = kv_cache_config.kv_cache_groups[run.group].kv_cache_spec
        first, last = number * spec.block_size, (number + 1) * spec.block_size
        hashed = kv_cache_config.hash_block_size or spec.block_size
        parent = request.block_hashes[first // hashed - 1] if first else None
        convert = kv_cache_utils.maybe_convert_block_hash
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, first, last, 0)
        lora = request.lora_request
        yield (
            run.group,
            digest,
            StoredEvent(
                block_hashes=[convert(request.block_hashes[last // hashed - 1])],
                parent_block_hash=convert(parent) if parent is not None else None,
                token_ids=list(request.all_token_ids[first:last]),
                block_size=spec.block_size,
                lora_id=lora.adapter_id if lora else None,
                medium=None,
                lora_name=lora.name if lora else None,
                extra_keys=kv_cache_utils.to_event_extra_keys([extra]) if extra else None,
                group_idx=run.group,
                kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
                kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
                session_id=request.session_id,
            ),
        )


def vllm_event(event: KVEvent) -> Any:
    """The same as an object of vLLM's."""
    kind = {StoredEvent: BlockStored, RemovedEvent: BlockRemoved}[type(event)]
    return kind(**{name: getattr(event, name) for name in event.__struct_fields__})
