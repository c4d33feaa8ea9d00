"""What a server does with other servers' blocks, for tests that look into it."""

from __future__ import annotations

from kvpool.server.block_server import BlockServer
from kvpool.server.moves import Moves
from kvpool.types import DrainReport


def moves_of(server: BlockServer) -> Moves:
    """The moves of this server."""
    (found,) = (one for one in server.extensions.all if isinstance(one, Moves))
    return found


async def drain(server: BlockServer, within_s: float, *, back_in_s: float = 0.0) -> DrainReport:
    """Have others fetch its blocks, until that is over."""
    moves_of(server).drainer.begin(within_s, back_in_s=back_in_s)
    return await moves_of(server).drainer.wait()
