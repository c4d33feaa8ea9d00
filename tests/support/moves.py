"""What a server does with other servers' blocks, for tests that look into it."""

from __future__ import annotations

import asyncio

from kvpool.server.block_server import BlockServer
from kvpool.server.moves import Moves
from kvpool.server.moves.prefetcher import Prefetcher
from kvpool.types import DrainReport


def moves_of(server: BlockServer) -> Moves:
    """The moves of this server."""
    (found,) = (one for one in server.extensions.all if isinstance(one, Moves))
    return found


def prefetcher_of(server: BlockServer) -> Prefetcher:
    """What brings blocks of this server up before they are read."""
    (found,) = (one for one in server.extensions.all if isinstance(one, Prefetcher))
    return found


async def masters_know(*servers: BlockServer) -> None:
    """Every master has the figures of now."""
    told = (announcer.heartbeat_soon() for one in servers for announcer in one._context.announcers)
    await asyncio.wait([*told], timeout=5)


async def drain(server: BlockServer, within_s: float, *, back_in_s: float = 0.0) -> DrainReport:
    """Have others fetch its blocks, until that is over."""
    moves_of(server).drainer.begin(within_s, back_in_s=back_in_s)
    return await moves_of(server).drainer.wait()


def keep_chains(server: BlockServer) -> None:
    """It hands over no chains to others that have room."""
    vars(moves_of(server).balance)["others_have_room"] = lambda: None


def hand_over_chains(server: BlockServer) -> None:
    """It does again, as if a master had just said that others have room."""
    vars(moves_of(server).balance).pop("others_have_room", None)
    moves_of(server)._others_have_room()
