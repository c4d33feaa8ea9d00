"""What a server answers beside reads and writes; `side_requests` is the client's half."""

from __future__ import annotations

from typing import Any, Final

from kvpool.errors import BadMessage
from kvpool.protocols import Connection
from kvpool.wire.messages import (
    EXTENDED,
    Message,
    Remove,
    ReportCorruption,
    StatusReply,
    check_part,
    unpack_batch,
    unpack_part,
)

#: The messages that `answer_aside` answers.
ASIDE: Final = EXTENDED | {Remove, ReportCorruption}


async def answer_aside(request: Message, connection: Connection) -> Any:
    """The answer to a request that moves no block between client and server."""
    if isinstance(request, Remove):
        return StatusReply(bytes(await _remove(request, connection)))
    if isinstance(request, ReportCorruption):
        return StatusReply(bytes(await connection.report_corruption(*unpack_part(request))))
    return await connection.answer(request)


async def _remove(remove: Remove, connection: Connection) -> list[bool]:
    namespace, digests = unpack_batch(remove)
    if remove.part is not None:
        check_part(namespace, remove.part)
    if remove.checksums and (remove.part is None or len(remove.checksums) != len(digests)):
        raise BadMessage("Remove: one checksum per block, of one part")
    return await connection.remove(namespace, digests, remove.part, remove.checksums)
