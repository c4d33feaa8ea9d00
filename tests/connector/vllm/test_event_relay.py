"""`kvpool events --engine` on the stream of vLLM's own publisher, read as vLLM's own events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvpool import EventPosition, Namespace, PoolEvent, PoolEventKind
from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
from kvpool.net.event_subscriber import EventSubscriber
from kvpool.ops.engine_stream import EngineStream
from kvpool.ops.event_service import publish_engine
from tests.conftest import eventually
from tests.support.programs import free_port

pytestmark = pytest.mark.timeout(60)

POOL = Namespace("pool")


def stored(*hashes: int) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=list(range(16 * len(hashes))),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="s",
    )


class Reader:
    """What a router believes that reads vLLM's format with vLLM's own classes."""

    def __init__(self) -> None:
        self.where: dict[int, set[str]] = {}
        self.sessions: set[str | None] = set()
        self.ranks: set[int | None] = set()

    def take(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.where.clear()
                continue
            for hash in event.block_hashes:
                places = self.where.setdefault(hash, set())
                if isinstance(event, BlockRemoved):
                    places.discard(event.medium)
                else:
                    places.add(event.medium)
                    self.sessions.add(event.session_id)
                    assert len(event.token_ids) == 16 * len(event.block_hashes)

    @property
    def known(self) -> dict[int, set[str]]:
        return {hash: places for hash, places in self.where.items() if places}


async def test_vllms_publisher_is_relayed_restarted_and_missed() -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    bound = endpoint.replace("127.0.0.1", "*")  # else vLLM connects

    async def publisher() -> ZmqEventPublisher:
        end = time.monotonic() + 10
        while True:  # the sockets of one that was shut down are closed a little later
            try:
                return ZmqEventPublisher(0, bound, replay.replace("127.0.0.1", "*"))
            except zmq.ZMQError:
                assert time.monotonic() < end
                await asyncio.sleep(0.1)

    changes: asyncio.Queue[PoolEvent] = asyncio.Queue()

    async def pool() -> AsyncIterator[PoolEvent]:
        while True:
            yield await changes.get()

    def change(kind: PoolEventKind, *hashes: int) -> None:
        digests = tuple(hash.to_bytes(32, "big") for hash in hashes)
        at = EventPosition(1, 1)
        changes.put_nowait(PoolEvent(kind, at, "a", "here", POOL, 0, "dram", digests))

    engine = await publisher()
    engine.publish(KVEventBatch(ts=1.0, events=[stored(1, 2)]))  # before anybody listens
    stream = EngineStream(POOL, "shared", "here")
    relay = EventPublisher("tcp://127.0.0.1:0", buffer=ReplayBuffer(first=1))
    relay.start()
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(relay.endpoint)
    reader, source = Reader(), EventSubscriber(endpoint, replay)

    async def read() -> None:
        while True:
            reader.take((await sub.recv_multipart())[2])

    await asyncio.sleep(0.3)
    tasks = [
        asyncio.create_task(publish_engine(source.batches(), pool(), stream, relay)),
        asyncio.create_task(read()),
    ]
    try:
        change(PoolEventKind.BACK)
        change(PoolEventKind.STORED, 1)
        await eventually(lambda: reader.known == {1: {"GPU", "CPU"}, 2: {"GPU"}}, 10)
        await asyncio.sleep(0.5)  # the relay listens, too
        gone = BlockRemoved(block_hashes=[1, 2], medium="GPU", group_idx=0)
        engine.publish(KVEventBatch(ts=2.0, events=[gone]))
        await eventually(lambda: reader.known == {1: {"CPU"}}, 10)
        assert (reader.sessions, reader.ranks) == ({"s"}, {0})
        engine.shutdown()
        engine = await publisher()
        await asyncio.sleep(1.0)
        engine.publish(KVEventBatch(ts=3.0, events=[stored(3)]))
        await eventually(lambda: reader.known == {1: {"CPU"}, 3: {"GPU"}}, 10)
        engine.publish(KVEventBatch(ts=4.0, events=[AllBlocksCleared()]))
        await eventually(lambda: not reader.known, 10)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        engine.shutdown()
        source.close()
        relay.close()
        context.destroy(linger=0)
