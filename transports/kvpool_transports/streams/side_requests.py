"""What a channel asks a server beside reads and writes (client's half): one message, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvpool.errors import BadMessage
from kvpool.types import (
    COPIES_MAX,
    DrainOrder,
    DrainReport,
    Holding,
    HoldingsPage,
    Left,
    MoveStatus,
    Namespace,
    Offer,
    ReadStatus,
    Removal,
    RemovalCursor,
)
from kvpool.wire.messages import (
    Drain,
    Drained,
    Fetch,
    HoldingsReply,
    M,
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
    checked_namespace,
    unpack_parents,
    unpack_sessions,
)
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool

#: By value; calling an enum takes ten times as long.
_MOVE: Final = tuple(MoveStatus)


class SideRequests:
    """The part of a channel that is the same over all transports."""

    _streams: StreamPool

    async def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        *,
        part: int | None = None,
        checksums: Sequence[int] = (),
        deadline: float,
    ) -> list[bool]:
        """Remove every part of the blocks, or one `part`; True where the server had one."""
        where = _keys(namespace, digests)
        answer = await self._ask(Remove(*where, part, list(checksums)), StatusReply, deadline)
        return requests.flags(answer, len(digests))

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        """Report wrong checksums; True where the server verified it and removed the block."""
        report = ReportCorruption(*_keys(namespace, digests), part)
        return requests.flags(await self._ask(report, StatusReply, deadline), len(digests))

    async def offer(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        receiver: str,
        *,
        deadline: float,
    ) -> list[Offer]:
        """What the server tells the server `receiver` about blocks that it may fetch.

        Raises BadMessage for an answer that does not fit the request.
        """
        propose = Propose(*_keys(namespace, digests), part, receiver)
        return _offers(await self._ask(propose, Proposed, deadline), digests)

    async def fetch(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        source: str,
        *,
        extra: bool = False,
        deadline: float,
    ) -> list[MoveStatus]:
        """Ask the server to fetch blocks from the server `source`; one status each."""
        wait_s = max(0.0, deadline - asyncio.get_running_loop().time())
        request = Fetch(*_keys(namespace, digests), part, source, wait_s, extra)
        return _moved(await self._ask(request, StatusReply, deadline), len(digests))

    async def prefetch(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[MoveStatus]:
        """Ask the server to bring blocks into memory; one status each."""
        request = Prefetch(*_keys(namespace, digests), part)
        return _moved(await self._ask(request, StatusReply, deadline), len(digests))

    async def holdings(self, after: tuple[str, int], *, deadline: float) -> HoldingsPage:
        """What the server has of the namespaces behind this one."""
        answer = await self._ask(Namespaces(*after), HoldingsReply, deadline)
        held = (
            Holding(checked_namespace(name, parts), blocks, size)
            for name, parts, blocks, size in answer.held
        )
        return HoldingsPage(RemovalCursor(*answer.begin), tuple(held), answer.more)

    async def remove_all(
        self, namespace: Namespace, at: RemovalCursor, *, deadline: float
    ) -> Removal:
        """Remove some of the blocks of a namespace."""
        request = RemoveAll(namespace.name, namespace.parts, (*at,))
        answer = await self._ask(request, RemovedAll, deadline)
        following = RemovalCursor(*answer.at) if answer.at is not None else None
        return Removal(answer.blocks, answer.bytes, following)

    async def drain(self, order: DrainOrder, *, deadline: float) -> DrainReport:
        """Ask the server to hand over its blocks, or to stay, or how far it is."""
        answer = await self._ask(Drain(*order), Drained, deadline)
        try:
            state = None if answer.state is None else MoveStatus(answer.state)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        return DrainReport(
            state,
            answer.total_blocks,
            answer.left_blocks,
            answer.left_bytes,
            answer.moved_blocks,
            answer.moved_bytes,
            tuple(Left(*line) for line in answer.left),
        )

    async def _ask(self, message: Message, answer: type[M], deadline: float) -> M:
        """On a stream of its own meanwhile; what has no streams does it in another way."""
        async with self._streams.stream(deadline) as stream:
            await stream.send(message, deadline=deadline)
            return await stream.expect(answer, deadline=deadline)


def _keys(namespace: Namespace, digests: Sequence[bytes]) -> tuple[str, int, int, bytes]:
    """The first fields of every message that names blocks."""
    return namespace.name, namespace.parts, len(digests[0]), b"".join(digests)


def _moved(answer: StatusReply, count: int) -> list[MoveStatus]:
    requests.check_count(answer.statuses, count)
    try:
        return [_MOVE[value] for value in answer.statuses]
    except IndexError:
        raise BadMessage(f"{max(answer.statuses)} is not a valid MoveStatus") from None


def _offers(answer: Proposed, digests: Sequence[bytes]) -> list[Offer]:
    statuses = requests.read_statuses(answer.statuses, len(digests))
    offers = [Offer(status) for status in statuses]
    hits = [i for i, status in enumerate(statuses) if status.hit]
    parents = unpack_parents(answer.parents, len(digests[0]))
    sizes, checksums, ages_s, copies = answer.sizes, answer.checksums, answer.ages_s, answer.copies
    counts = {len(sizes), len(checksums), len(parents), len(ages_s), len(copies)}
    if counts != {len(hits)}:
        raise BadMessage(f"{len(hits)} blocks offered, and properties of {sorted(counts)}")
    if max(copies, default=0) > COPIES_MAX:
        raise BadMessage(f"{max(copies)} copies of a block, limit {COPIES_MAX}")
    properties = zip(sizes, checksums, parents, ages_s, copies, strict=True)
    for position, (block_size, checksum, parent, age_s, count) in zip(
        hits, properties, strict=True
    ):
        offers[position] = Offer(ReadStatus.HIT, block_size, checksum, parent, age_s, copies=count)
    for position, hint in zip(hits, unpack_sessions(answer.sessions), strict=False):
        offers[position] = offers[position]._replace(session_hint=hint)
    return offers
