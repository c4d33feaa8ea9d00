"""Publishes what the pool has, and what it loses, for routers: `kvpool events`.

Alone, or beside the events of one engine, as one stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from kvpool import logs
from kvpool.client.pool_events import PoolEvent, PoolEventKind
from kvpool.net.event_publisher import EventPublisher
from kvpool.net.event_subscriber import EngineBatch
from kvpool.ops.engine_stream import EngineStream
from kvpool.ops.pool_stream import PoolStream
from kvpool.runtime import task_group

log = logs.get("kvpool.events")

#: Copies that did not fit are in the log this often.
_WARN_EVERY_S: Final = 60.0


@dataclass(slots=True)
class EngineCounts:
    """What a relay has had of its engine. `lag_s`: between the time that the engine wrote into its
    last batch, by the clock of its host, and its publication here."""

    batches: int = 0
    lost: int = 0  # how often routers were told to forget the engine
    lag_s: float = 0.0


async def publish_pool(
    events: AsyncIterator[PoolEvent], stream: PoolStream, publisher: EventPublisher
) -> None:
    """Publish each event in small batches until it is cancelled; `publisher` has been started."""
    loop = asyncio.get_running_loop()
    warned_at, left_out = -_WARN_EVERY_S, 0
    async for event in events:
        for batch in stream.apply(event):
            publisher.publish(batch, time.time())
            await asyncio.sleep(0)
        if event.kind is PoolEventKind.RESET:
            log.info("the map is read anew")
        elif event.kind is PoolEventKind.LIVE:
            log.info("the stream is live", copies=len(stream), batches=publisher.counts.batches)
        if stream.left_out > left_out and loop.time() >= warned_at + _WARN_EVERY_S:
            warned_at, left_out = loop.time(), stream.left_out
            log.warning("the stream is full, copies are left out", left_out=left_out)


async def publish_engine(
    engine: AsyncIterator[EngineBatch],
    pool: AsyncIterator[PoolEvent],
    stream: EngineStream,
    publisher: EventPublisher,
    counts: EngineCounts | None = None,
) -> None:
    """Publish an engine's batches as they are, and between them where the pool has its blocks.

    Until it is cancelled; `publisher` has been started. The turns of one batch are not mixed with
    those of another: a stream's state and what was published of it are always the same.
    """
    turn = asyncio.Lock()
    async with task_group() as tasks:
        tasks.create_task(_pass_on(engine, stream, publisher, turn, counts or EngineCounts()))
        tasks.create_task(_add_pool(pool, stream, publisher, turn))


async def _pass_on(
    engine: AsyncIterator[EngineBatch],
    stream: EngineStream,
    publisher: EventPublisher,
    turn: asyncio.Lock,
    counts: EngineCounts,
) -> None:
    async for payload, batch, lost in engine:
        async with turn:
            if lost:
                counts.lost += 1
                log.warning("routers are told to forget the engine", reason=lost)
                for events in stream.on_engine_lost():
                    publisher.publish(events, time.time())
                    await asyncio.sleep(0)
            if batch is None:
                continue
            publisher.publish_encoded(payload)
            counts.batches += 1
            counts.lag_s = max(0.0, time.time() - batch.seconds)
            if events := stream.on_engine(batch.events):
                publisher.publish(events, time.time())


async def _add_pool(
    pool: AsyncIterator[PoolEvent],
    stream: EngineStream,
    publisher: EventPublisher,
    turn: asyncio.Lock,
) -> None:
    loop = asyncio.get_running_loop()
    warned_at, left_out = -_WARN_EVERY_S, 0
    async for event in pool:
        async with turn:
            for events in stream.on_pool(event):
                publisher.publish(events, time.time())
                await asyncio.sleep(0)
        if event.kind is PoolEventKind.LIVE:
            log.info("the pool is live", blocks=len(stream), batches=publisher.counts.batches)
        if stream.left_out > left_out and loop.time() >= warned_at + _WARN_EVERY_S:
            warned_at, left_out = loop.time(), stream.left_out
            log.warning("too many copies, some are left out", left_out=left_out)
