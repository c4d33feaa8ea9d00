"""What operators ask a master about all that it knows, and its answers."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from kvpool.types import Count, Seconds, Total
from kvpool.wire.messages import Message, NamespaceName, Tolerant, register

#: Namespaces in one answer: with names of the maximum length it still fits into a message.
NAMESPACES_MAX: Final = 256


class Namespaces(Message, frozen=True):
    """The namespaces whose names, and parts, come after these, in order. A master answers with
    `NamespacesReply`, a server with `HoldingsReply`."""

    after: NamespaceName = ""
    parts: Annotated[int, Meta(ge=0, le=256)] = 0


class NamespacesReply(Tolerant, frozen=True):
    """Name, parts and blocks of each, as many as fit; with `more`, ask again after the last one."""

    namespaces: Annotated[
        list[tuple[NamespaceName, Annotated[int, Meta(ge=1, le=256)], Count]],
        Meta(max_length=NAMESPACES_MAX),
    ]
    more: bool


class Demands(Message, frozen=True):
    """What clients ask this master for."""


class DemandsReply(Tolerant, frozen=True):
    """`Demand` of the types: seconds of observation; name, parts, bytes and blocks of each live
    working set; blocks of all matches, and those found; bytes of the mean prompt of each set."""

    seconds: Seconds
    working_sets: Annotated[
        list[tuple[NamespaceName, Annotated[int, Meta(ge=1, le=256)], Total, Count]],
        Meta(max_length=NAMESPACES_MAX),
    ]
    chain_servers: Annotated[float, Meta(ge=0, le=4096)]
    beyond_hole: Annotated[float, Meta(ge=0, le=1)]
    asked_blocks: Total = 0
    found_blocks: Total = 0
    prompts: Annotated[list[Total], Meta(max_length=NAMESPACES_MAX)] = field(default_factory=list)


register({Namespaces: 50, NamespacesReply: 51, Demands: 52, DemandsReply: 53})
