"""What a server does with other servers' blocks, for tests that look into it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool import Namespace, Pool, dev
from kvpool.operators import DrainReport
from kvpool.protocols import WriteOptions
from kvpool.server.block_server import BlockServer
from kvpool.server.moves import Moves, asked_masters, drainer, hand_over
from kvpool.server.moves.prefetcher import Prefetcher
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.types import ROOT, SessionHint, WriteBlock
from tests.conftest import NAMESPACE, value, values

SIZE = 8192
LISTEN = ("inproc://", "tcp://127.0.0.1:0")
#: How long a server waits before it asks masters again.
_LOOKS = (
    (asked_masters, "REFRESH_S"),
    (drainer, "REFRESH_S"),
    (drainer, "PAUSE_S"),
    (hand_over, "PAUSE_S"),
)


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def movers(capacity: str = "8MiB", servers: int = 3, **more: Any) -> AsyncIterator[dev.Dev]:
    """Servers that fetch from each other as fast as they can, and look ten times as often."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in _LOOKS:
            patch.setattr(module, name, 0.05)
        async with dev.serve(capacity, servers=servers, listen=LISTEN, **more) as running:
            for server in running.servers:
                moves_of(server).fetcher.budget = FetchBudget(1e9)
            yield running


async def put(
    pool: Pool,
    server: BlockServer,
    chain: Sequence[bytes],
    *,
    namespace: Namespace = NAMESPACE,
    session_hint: SessionHint | None = None,
    apart: bool = False,
) -> None:
    """Store a chain on this server, or blocks that are none."""
    options = WriteOptions(namespace, 0, visible=True, session_hint=session_hint)
    parents = [ROOT] * len(chain) if apart else [ROOT, *chain[:-1]]
    blocks = [
        WriteBlock(digest, parent, (memoryview(value(digest, SIZE)),), SIZE)
        for parent, digest in zip(parents, chain, strict=True)
    ]
    for first in range(0, len(blocks), 100):
        some = blocks[first : first + 100]
        statuses = await pool._writer.write_on(server.server, options, some, now() + 10)
        assert all(status.present for status in statuses), statuses


async def assert_readable(pool: Pool, digests: Sequence[bytes]) -> None:
    """All are hits, with the right bytes."""
    into = [bytearray(SIZE) for _ in digests]
    for first in range(0, len(digests), 100):
        part = slice(first, first + 100)
        results = await pool.read(NAMESPACE, digests[part], into[part], timeout=20)
        assert all(result.status.hit for result in results), results
    assert list(map(bytes, into)) == values(digests)


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
