"""A tenant with a right key and bad will: python -m tests.attack.tenants KINDS KEY MASTER SERVER S.

Each kind is played by several connections or pools at once, again and again until time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from kvpool import ClientConfig, Cluster, Namespace, Pool, connect, read_cluster
from kvpool.errors import KvpoolError
from kvpool.net.requests import MESSAGE_SIZE_MAX, with_size
from kvpool.wire import messages as wire
from tests.conftest import keys, value
from tests.support.raw_peers import Raw, control_peer, frame
from tests.support.tenant_pool import prove, reserve

MODEL = Namespace("llama")
BLOCK = 64 << 10
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Attacker:
    cluster: Cluster
    pool: Pool
    master: str
    server: str
    deadline: float
    #: Steps of its attack that worked.
    done: int = 0

    @contextlib.asynccontextmanager
    async def peer(self) -> AsyncIterator[Raw]:
        """A connection to the server that has proved itself, for anything."""
        loop = asyncio.get_running_loop()
        host, _, port = self.server.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            await loop.sock_connect(sock, (host, int(port)))
            peer = Raw(sock)
            await prove(peer, self.cluster)
            self.done += 1
            yield peer

    async def hold(self) -> None:
        await asyncio.sleep(self.deadline - asyncio.get_running_loop().time())


async def fill(by: Attacker) -> None:
    """More than there is memory, as quickly as it can."""
    chain = [secrets.token_bytes(32) for _ in range(16)]
    await by.pool.write(MODEL, chain, [value(one, BLOCK) for one in chain], session="s")
    by.done += 1


async def ask(by: Attacker) -> None:
    """The longest questions, about what nobody has."""
    chain = [secrets.token_bytes(32) for _ in range(1024)]
    for _ in range(50):
        await by.pool.match(MODEL, chain)
        by.done += 1


async def names(by: Attacker) -> None:
    """New namespaces and sessions without end, as long as they may be."""
    long, one = secrets.token_hex(61), secrets.token_bytes(32)
    await by.pool.write(Namespace(4 * long), [one], [value(one, 64)], session=long)
    await by.pool.session(long).end()
    by.done += 1


async def removals(by: Attacker) -> None:
    """Of names that nobody has written, and of those that others have in a namespace of theirs."""
    chain = [*keys("honest", 4), *(secrets.token_bytes(32) for _ in range(1020))]
    await by.pool.remove(MODEL, chain)
    by.done += 1


async def reservations(by: Attacker) -> None:
    """Space is taken for bytes that never come, and its owner goes."""
    async with by.peer() as peer:
        digest = secrets.token_bytes(32)
        await peer.ask(reserve("@blue/llama", digest, 1 << 20, 0.5), wire.Reserved)


async def open_write(by: Attacker) -> None:
    """One reservation that is kept as long as the server lets it."""
    async with by.peer() as peer:
        digest = secrets.token_bytes(32)
        await peer.send(frame(reserve("@blue/llama", digest, 1 << 20, 60.0)))
        await by.hold()


async def pins(by: Attacker) -> None:
    """An answer that is not read holds what it was to bring."""
    chain = [secrets.token_bytes(32) for _ in range(16)]
    await by.pool.write(MODEL, chain, [value(one, BLOCK) for one in chain])
    async with by.peer() as peer:
        digests = b"".join(chain)
        await peer.send(frame(wire.Read("@blue/llama", 1, 32, digests, 0, [1 << 20] * 16)))
        await by.hold()


async def connections(by: Attacker) -> None:
    """Every connection that there is, each in the middle of the longest request."""
    async with by.peer() as peer:
        header = frame(wire.Unpin(confirm=True))[:4] + struct.pack("<IQ", 128 << 10, 0)
        await peer.send(header + bytes((128 << 10) - 1))
        await by.hold()


async def questions(by: Attacker) -> None:
    """To a master, in the middle of the longest one that there is."""
    async with control_peer(by.master, by.cluster) as peer:
        await peer.shake()
        by.done += 1
        whole = with_size(bytes(MESSAGE_SIZE_MAX))
        tls = peer.session._tls
        assert tls is not None
        for at in range(0, len(whole) - 1, 1 << 14):
            peer.writer.write(tls.seal(whole[: len(whole) - 1][at : at + (1 << 14)]))
        await by.hold()


async def bad(by: Attacker) -> None:
    """A proof, and then nonsense: a reason for a line in a log."""
    async with by.peer() as peer:
        await peer.send(os.urandom(64))
        await peer.refusal()


async def overwrite(by: Attacker) -> None:
    """Other bytes under the keys of what is there, and the claim that what is there is damaged."""
    chain = keys("honest", 4)
    await by.pool.write(MODEL, chain, [bytes(8192) for _ in chain], session="mine", copies=2)
    async with by.peer() as peer:
        name = f"@{by.cluster.tenant}/llama"
        report = wire.Remove(name, 1, 32, b"".join(chain), 0, corrupt=True)
        for _ in range(20):
            await peer.ask(report, wire.StatusReply)


async def forbidden(by: Attacker) -> None:
    """What belongs to others."""
    async with by.peer() as peer:
        await peer.send(frame(wire.Remove("@acme/llama", 1, 32, secrets.token_bytes(32))) * 50)
        await peer.refusal()


#: Those of each kind, and how many at once.
KINDS: dict[str, tuple[Callable[[Attacker], Awaitable[None]], int]] = {
    "fill": (fill, 8),
    "ask": (ask, 16),
    "names": (names, 16),
    "removals": (removals, 8),
    "reservations": (reservations, 8),
    "open_write": (open_write, 60),
    "pins": (pins, 40),
    "connections": (connections, 700),
    "questions": (questions, 200),
    "bad": (bad, 8),
    "forbidden": (forbidden, 8),
    "overwrite": (overwrite, 8),
}


async def attack(kinds: str, key: str, master: str, server: str, seconds: str) -> None:
    loop = asyncio.get_running_loop()
    chosen = [KINDS[kind] for kind in kinds.split(",")]
    cluster = read_cluster("default", key)
    config = ClientConfig(masters=[master], transports=["tcp"])

    async def come_again(play: Callable[[Attacker], Awaitable[None]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(by.deadline):
                while True:
                    with contextlib.suppress(KvpoolError, OSError, AssertionError):
                        await play(by)
                    await asyncio.sleep(0)

    async with await connect(config=config, cluster=cluster) as pool:
        lasts = float(seconds) + 0.003 * sum(at_once for _, at_once in chosen)
        by = Attacker(cluster, pool, master, server, loop.time() + lasts)
        going = [come_again(play) for play, at_once in chosen for _ in range(at_once)]
        await asyncio.gather(*going)
    print(f"done={by.done}", flush=True)


if __name__ == "__main__":
    os.nice(5)
    asyncio.run(attack(*sys.argv[1:]))
