"""Publishes what the pool has, and what it loses, for routers: `kvpool events`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from kvpool import logs
from kvpool.net.event_publisher import EventPublisher
from kvpool.ops.pool_stream import PoolStream
from kvpool.types import PoolEvent, PoolEventKind

log = logs.get("kvpool.events")

#: Copies that did not fit are in the log this often.
_WARN_EVERY_S: Final = 60.0


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
            log.info("the stream is live", copies=len(stream), batches=publisher.sent)
        if stream.left_out > left_out and loop.time() >= warned_at + _WARN_EVERY_S:
            warned_at, left_out = loop.time(), stream.left_out
            log.warning("the stream is full, copies are left out", left_out=left_out)
