"""The message by which the ends of a link see what its lanes do with memory of a device."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvpool.wire.messages import Message, register


class SendToken(Message, frozen=True):
    """These bytes come next from memory of a device, by the way of blocks: of a client that is
    about to write some, or of the server that has been asked for some.

    They show what the lanes do with that memory, before a block goes that way
    (design: device-memory).
    """

    content: Annotated[bytes, Meta(min_length=8, max_length=8)]


register({SendToken: 30})
