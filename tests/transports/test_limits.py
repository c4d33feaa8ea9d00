"""What transports hold of others, and what they agree on without a word, meets its bounds."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from kvpool import WriteStatus, dev
from kvpool.config import ClientConfig
from kvpool.server.state.store import Store
from kvpool_tiers.dram import Dram
from kvpool_transports import shm, ucx
from kvpool_transports.shm import _ShmListener
from kvpool_transports.streams.stream import Stream
from tests.conftest import NAMESPACE, keys, values

MIB = 1 << 20


@pytest.mark.parametrize(
    ("total", "piece"),
    [(1, MIB), (MIB, MIB), (1024 * MIB, MIB), (1024 * MIB + 1, MIB + 1), (3000 * MIB, 3_072_000)],
)
def test_a_large_payload_goes_in_a_thousand_pieces(total: int, piece: int) -> None:
    """Both sides compute the same size (docs/wire.md)."""
    assert ucx._piece_size(total) == piece


async def test_an_end_that_waits_for_its_peer_drops_what_comes() -> None:
    """The peer may have begun to send, and hangs up when all of that has gone."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    _, stream = await loop.create_connection(Stream, sock=ours)
    closing = loop.create_task(stream.close_gracefully())
    await asyncio.wait_for(loop.sock_sendall(theirs, bytes(4 * MIB)), 10)
    assert not closing.done()
    theirs.close()
    await asyncio.wait_for(closing, 10)
    stream.abort()


async def test_a_listener_that_could_not_accept_accepts_again(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no descriptor left for a moment; those who wait are served later."""
    (server,) = pool_dev.servers
    (listener,) = (one for one in server._listeners if isinstance(one, _ShmListener))
    accept, failures = listener._socket.accept, []

    class Refusing:
        """The listener's socket; its first call fails."""

        def __getattr__(self, name: str) -> object:
            return getattr(own, name)

        def accept(self) -> object:
            if not failures:
                failures.append(True)
                raise OSError(errno.EMFILE, "too many open files")
            return accept()

    own = listener._socket
    monkeypatch.setattr(shm, "_ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(listener, "_socket", Refusing())
    config = ClientConfig(masters=[pool_dev.address], transports=["shm"])
    async with pool_dev.pool(config) as pool:
        chain = keys("again", 2)
        assert set(await pool.write(NAMESPACE, chain, values(chain))) == {WriteStatus.STORED}
    assert failures
    monkeypatch.undo()


async def test_a_listener_closes_its_own_descriptors_only() -> None:
    """One that could not listen has none; its number is somebody else's."""
    tier = Dram(MIB, prefault=False)
    before = sorted(os.listdir("/proc/self/fd"))
    listener = _ShmListener(Store(MIB), tier)  # type: ignore[arg-type]
    await listener.close()
    await listener.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    tier.close()
