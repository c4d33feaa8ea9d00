"""KV events: what an engine tells routers about the blocks that it can use, in vLLM's format.

Pure. A message is three frames: topic, sequence number (u64, big endian), and a batch in msgpack:
`[seconds, [event, ...], rank]`. Routers are strict about it: one unknown field, or one event too
many, and vllm-router drops all that it knew of that engine. So these structs have vLLM's fields and
no others, `batches` keeps within the limits, and `residency` is the one place that chooses how a
block of the pool is described.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from kvpool.errors import BadMessage

#: Events of one batch: vllm-router refuses a larger one.
EVENTS_MAX: Final = 4096
#: Bytes of one batch: vllm-router refuses a larger one.
BATCH_BYTES_MAX: Final = 16 << 20
#: Blocks of one event of ours, so that a batch of events stays far below `BATCH_BYTES_MAX`.
EVENT_BLOCKS_MAX: Final = 512
#: The `ownership` of blocks in the pool: vLLM's field for a tier beside the engine's own.
OWNERSHIP: Final = "kvpool"
#: Tiers whose blocks are in some memory; those of all others are `STORAGE`.
_MEMORY_TIERS: Final = frozenset({"dram", "hbm"})

#: How routers name a block: the last 64 bits of its hash, or all of it.
EventHash: TypeAlias = int | bytes
#: The two ways to describe a block that is on another host; `residency` has the table.
EventForm: TypeAlias = Literal["shared", "plain"]


class Residency(NamedTuple):
    """Where a block is, in the words of the format."""

    medium: str
    locality: str | None = None
    ownership: str | None = None


def residency(form: EventForm, *, near: bool, tier: str) -> Residency:
    """How a block in this `tier` of a server is described; `near`: the server is on this host.

    | form   | near, memory | near, storage  | far                              |
    |--------|--------------|----------------|----------------------------------|
    | shared | CPU, LOCAL   | STORAGE, LOCAL | CPU or STORAGE, REMOTE, `kvpool` |
    | plain  | CPU          | STORAGE        | STORAGE                          |

    `shared` is right for vllm-router, which knows shared pools, and Dynamo ignores the far ones.
    `plain` is understood by all, as a disk of the engine.
    """
    medium = "CPU" if tier in _MEMORY_TIERS else "STORAGE"
    if form == "plain":
        return Residency(medium if near else "STORAGE")
    return Residency(medium, "LOCAL") if near else Residency(medium, "REMOTE", OWNERSHIP)


class StoredEvent(msgspec.Struct, tag="BlockStored", omit_defaults=True, kw_only=True, frozen=True):
    """Consecutive blocks of a chain that an engine can use from now on.

    The fields without a default must be there, also when they are None. `token_ids` are those of
    all blocks, one after the other; none if they are not known.
    """

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class RemovedEvent(
    msgspec.Struct, tag="BlockRemoved", omit_defaults=True, kw_only=True, frozen=True
):
    """Blocks that are no longer there. All but the hashes is as in the event that stored them."""

    block_hashes: list[EventHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedEvent(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    """The engine has no block any more, in any medium."""


KVEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one moment: seconds since 1970, events in order, and the data-parallel rank."""

    seconds: float
    events: list[KVEvent]
    rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EventBatch)


def announced(form: EventForm, event: StoredEvent) -> bool:
    """Whether blocks of the pool may be announced by this event.

    vllm-router drops all that it knows of an engine, when it has discovered that engine, at an
    event about blocks that their tokens and adapter alone do not name (salts of tenants, pictures),
    or of another attention than full. In the form that is made for it there is no such event.
    """
    if form == "plain":
        return True
    extra = {key for keys in event.extra_keys or () for key in keys or ()}
    return event.kv_cache_spec_kind in (None, "full_attention") and extra <= {event.lora_name}


def encode_batch(batch: EventBatch) -> bytes:
    """The third frame of a message."""
    return _ENCODER.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """The batch of an engine. Raises BadMessage; fields that are not known here are left out."""
    if len(payload) > BATCH_BYTES_MAX:
        raise BadMessage(f"a batch of KV events has {len(payload)} bytes, limit {BATCH_BYTES_MAX}")
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise BadMessage(f"a batch of KV events: {str(error)[:200]}") from None


def batches(events: Iterable[KVEvent], count: int = EVENTS_MAX) -> Iterator[list[KVEvent]]:
    """The events in order, at most `count` at a time."""
    batch: list[KVEvent] = []
    for event in events:
        batch.append(event)
        if len(batch) >= count:
            yield batch
            batch = []
    if batch:
        yield batch


def joined(events: Iterable[StoredEvent]) -> Iterator[StoredEvent]:
    """The same, with neighbours of a chain in one event: what a router reads, and limits, is
    events."""
    run: list[StoredEvent] = []
    blocks = 0
    for event in events:
        follows = (
            run
            and blocks + len(event.block_hashes) <= EVENT_BLOCKS_MAX
            and event.parent_block_hash == run[-1].block_hashes[-1]
            and _alike(event) == _alike(run[-1])
        )
        if run and not follows:
            yield _one(run)
            run, blocks = [], 0
        run.append(event)
        blocks += len(event.block_hashes)
    if run:
        yield _one(run)


def _alike(event: StoredEvent) -> tuple[object, ...]:
    """What blocks of one event have in common."""
    return (
        *(event.block_size, event.lora_id, event.lora_name, event.medium, event.locality),
        *(event.ownership, event.group_idx, event.kv_cache_spec_kind, event.session_id),
        event.kv_cache_spec_sliding_window,
    )


def _one(run: list[StoredEvent]) -> StoredEvent:
    if len(run) == 1:
        return run[0]
    extra: list[tuple[Any, ...] | None] = []
    for event in run:
        extra += event.extra_keys or [None] * len(event.block_hashes)
    return msgspec.structs.replace(
        run[0],
        block_hashes=[hash for event in run for hash in event.block_hashes],
        token_ids=[token for event in run for token in event.token_ids],
        extra_keys=extra if any(extra) else None,
    )


def short_hash(digest: bytes) -> int:
    """vLLM's external form of a block's hash: its last 64 bits."""
    return int.from_bytes(digest[-8:], "big")


def removals(
    blocks: Iterable[tuple[EventHash, int | None, Residency]],
) -> Iterator[RemovedEvent]:
    """Events for blocks that are gone: hash, group, and where each was. Those alike together."""
    kinds: dict[tuple[int | None, Residency], list[EventHash]] = {}
    for hash, group, where in blocks:
        kinds.setdefault((group, where), []).append(hash)
    for (group, where), hashes in kinds.items():
        for first in range(0, len(hashes), EVENT_BLOCKS_MAX):
            yield RemovedEvent(
                block_hashes=hashes[first : first + EVENT_BLOCKS_MAX],
                group_idx=group,
                **where._asdict(),
            )
