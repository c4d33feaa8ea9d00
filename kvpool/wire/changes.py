"""What those who follow a master's map ask it, and its answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvpool.types import DIGEST_SIZE_MAX, Count, Name
from kvpool.wire.messages import (
    Id,
    Message,
    NamespaceName,
    Packed,
    SequenceNumber,
    Small,
    Tolerant,
    register,
)


class MapChange(Tolerant, frozen=True, omit_defaults=True):
    """One change at one server: `kind` is a `ChangeKind`. Digests are packed, as in `Keys`."""

    kind: Small
    server: Name
    namespace: NamespaceName = ""
    parts: Annotated[int, Meta(ge=0, le=256)] = 0
    part: Small = 0
    tier: Name = ""
    digest_size: Annotated[int, Meta(ge=0, le=DIGEST_SIZE_MAX)] = 0
    digests: Packed = b""
    host: Name = ""


class Changes(Message, frozen=True):
    """What has changed in the map after number `after` of this `stream`."""

    stream: Id
    after: SequenceNumber


class Snapshot(Message, frozen=True):
    """A part of the map: what follows this piece of this namespace; both empty: the beginning."""

    namespace: NamespaceName = ""
    parts: Annotated[int, Meta(ge=0, le=256)] = 0
    piece: Count = 0


class ChangesReply(Tolerant, frozen=True, omit_defaults=True):
    """Changes in order, of which the last one has the number `last`; with `more`, ask again.

    With `gap` there are none: it is not that stream, or it does not have what follows any more.

    To a `Snapshot`: what makes up that part as it is after change `last`; with `more`, ask for the
    one behind `namespace`, `parts` and `piece`. The first part begins with every server.
    """

    stream: Id
    last: SequenceNumber
    changes: Annotated[list[MapChange], Meta(max_length=1 << 16)]
    more: bool
    gap: bool = False
    namespace: NamespaceName = ""
    parts: Annotated[int, Meta(ge=0, le=256)] = 0
    piece: Count = 0


register({Changes: 56, ChangesReply: 57, Snapshot: 58})
