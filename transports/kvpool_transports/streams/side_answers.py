"""What a server answers beside reads and writes; `side_requests` is the client's half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvpool.errors import BadMessage
from kvpool.protocols import Connection
from kvpool.types import DrainOrder, RemovalCursor
from kvpool.wire.messages import (
    Drain,
    Drained,
    Fetch,
    HoldingsReply,
    Message,
    Namespaces,
    Prefetch,
    Propose,
    Proposed,
    Remove,
    RemoveAll,
    RemovedAll,
    ReportCorruption,
    StatusReply,
    check_part,
    checked_namespace,
    pack_parents,
    pack_sessions,
    unpack_batch,
)

#: What a client may ask us to wait for.
WAIT_S_MAX = 60.0


async def _remove(remove: Remove, connection: Connection) -> Message:
    namespace, digests = unpack_batch(remove)
    if remove.part is not None:
        check_part(namespace, remove.part)
    if remove.checksums and (remove.part is None or len(remove.checksums) != len(digests)):
        raise BadMessage("Remove: one checksum per block, of one part")
    flags = await connection.remove(namespace, digests, remove.part, remove.checksums)
    return StatusReply(bytes(flags))


async def _report_corruption(report: ReportCorruption, connection: Connection) -> Message:
    namespace, digests = unpack_batch(report)
    check_part(namespace, report.part)
    return StatusReply(bytes(await connection.report_corruption(namespace, report.part, digests)))


async def _offer(propose: Propose, connection: Connection) -> Message:
    namespace, digests = unpack_batch(propose)
    check_part(namespace, propose.part)
    offers = connection.handler(Propose)(namespace, propose.part, digests, propose.receiver)
    hits = [offer for offer in offers if offer.status.hit]
    return Proposed(
        bytes([offer.status for offer in offers]),
        [offer.size for offer in hits],
        [offer.checksum for offer in hits],
        pack_parents([offer.parent for offer in hits], propose.digest_size),
        [offer.age_s for offer in hits],
        bytes([offer.copies for offer in hits]),
        pack_sessions([offer.session_hint for offer in hits]),
    )


async def _fetch(fetch: Fetch, connection: Connection) -> Message:
    namespace, digests = unpack_batch(fetch)
    check_part(namespace, fetch.part)
    deadline = asyncio.get_running_loop().time() + min(fetch.wait_s, WAIT_S_MAX)
    statuses = await connection.handler(Fetch)(
        namespace, fetch.part, digests, fetch.source, extra=fetch.extra, deadline=deadline
    )
    return StatusReply(bytes(statuses))


async def _prefetch(prefetch: Prefetch, connection: Connection) -> Message:
    namespace, digests = unpack_batch(prefetch)
    check_part(namespace, prefetch.part)
    return StatusReply(bytes(connection.handler(Prefetch)(namespace, prefetch.part, digests)))


async def _holdings(ask: Namespaces, connection: Connection) -> Message:
    found = await connection.handler(Namespaces)((ask.after, ask.parts))
    held = [(one.namespace.name, one.namespace.parts, *one[1:]) for one in found.held]
    return HoldingsReply((*found.begin,), held, found.more)


async def _remove_all(remove: RemoveAll, connection: Connection) -> Message:
    namespace = checked_namespace(remove.namespace, remove.parts)
    done = await connection.handler(RemoveAll)(namespace, RemovalCursor(*remove.at))
    at = (*done.at,) if done.at is not None else None
    return RemovedAll(done.blocks, done.bytes, at)


async def _drain(drain: Drain, connection: Connection) -> Message:
    if drain.begin and drain.cancel:
        raise BadMessage("a drain to begin and to cancel")
    order = DrainOrder(drain.begin, drain.cancel, drain.within_s, drain.back_in_s)
    report = await connection.handler(Drain)(order)
    return Drained(*report._replace(left=list(report.left)))


SIDE_ANSWERS: Final[dict[type[Message], Callable[[Any, Connection], Awaitable[Message]]]] = {
    Remove: _remove,
    ReportCorruption: _report_corruption,
    Propose: _offer,
    Fetch: _fetch,
    Prefetch: _prefetch,
    Namespaces: _holdings,
    RemoveAll: _remove_all,
    Drain: _drain,
}
