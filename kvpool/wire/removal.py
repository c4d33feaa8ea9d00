"""What is asked of a server about its namespaces, to remove them: what it has comes first."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvpool.types import Count, Total
from kvpool.wire.messages import Hash64, Message, NamespaceName, Small, Tolerant, register
from kvpool.wire.questions import NAMESPACES_MAX, Namespaces

WireCursor = tuple[Hash64, Total, Small, Small, Count]


class HoldingsReply(Tolerant, frozen=True):
    """Name, parts, blocks and bytes of each, in order; with `more`, ask again after the last one.
    `begin`: where a removal of what is there now begins."""

    begin: WireCursor
    held: Annotated[
        list[tuple[NamespaceName, Annotated[int, Meta(ge=1, le=256)], Count, Total]],
        Meta(max_length=NAMESPACES_MAX),
    ]
    more: bool


class RemoveAll(Message, frozen=True):
    """Forget some of the blocks of this namespace, from this place on: epoch, generation up to
    which blocks were written, tier, part, piece of the index."""

    namespace: NamespaceName
    parts: Annotated[int, Meta(ge=1, le=256)]
    at: WireCursor


class RemovedAll(Tolerant, frozen=True):
    """What was removed; with `at`, ask again from there."""

    blocks: Count
    bytes: Total
    at: WireCursor | None


register({HoldingsReply: 64, RemoveAll: 65, RemovedAll: 66}, requests=(Namespaces, RemoveAll))
