"""Servers and masters that lie to a client: it loses no block that another one has (G1, G11)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvpool import ClientConfig, Pool, WriteStatus, dev
from kvpool.errors import LinkBroken, PeerError, Unauthenticated, Unavailable
from kvpool.net.zmq_rpc import ZmqNetwork
from kvpool.protocols import Channel, Link
from kvpool.types import Cluster, ReadStatus, ServerStats
from kvpool.wire import messages as wire
from kvpool_transports.shm import ShmTransport
from tests.conftest import CHAIN, NAMESPACE, buffers, keys, values
from tests.support.raw_peers import KEYS, REGISTER, TOKEN, ask, frame

# --- servers that lie ---------------------------------------------------------------------

NOWHERE = {
    "a port that is closed": "tcp://127.0.0.1:1",
    "port 0": "tcp://127.0.0.1:0",
    "port 70000": "tcp://127.0.0.1:70000",
    "no port": "tcp://127.0.0.1",
    "no host": "tcp://",
    "half a bracket": "tcp://[::1",
    "a name that is none": "tcp://a..b:1",
    "a scheme nobody knows": "gopher://x",
    "a socket that is not there": "shm://@nobody",
    "a socket without a name": "shm://",
    "a long socket": f"shm://@{'x' * 200}",
    "a path": "shm:///../../nowhere",
}


@pytest.mark.parametrize("name", NOWHERE)
async def test_a_server_that_lies_about_itself(watched: dev.Dev, link: Link, name: str) -> None:
    """It says that it has what others have, and cannot be reached: it costs nobody a block."""
    host = (await ask(link, wire.Members(), wire.MembersReply)).members[0].host
    liar = msgspec.structs.replace(REGISTER, host=host, addresses=[NOWHERE[name]], capacity=1 << 47)
    assert (await ask(link, liar, wire.Registered)).accepted
    told = wire.Inventory(
        "liar", 7, TOKEN, 1, 0, True, [wire.BlockChanges(**KEYS, part=0, tier=0, status=0)]
    )
    assert (await ask(link, told, wire.Announced)).applied
    config = ClientConfig(masters=[watched.address], transports=["shm", "tcp"])
    async with watched.pool(config) as pool:
        got = buffers(3)
        results = await pool.read(NAMESPACE, CHAIN, got)
        assert all(result.status.hit for result in results)
        assert got == values(CHAIN)
        fresh = keys("fresh", 3)
        assert set(await pool.write(NAMESPACE, fresh, values(fresh))) == {WriteStatus.STORED}


@pytest.mark.parametrize("attack", ["register", "announce", "inventory", "heartbeat", "leave"])
async def test_a_server_that_takes_the_name_of_another(
    watched: dev.Dev, link: Link, caplog: pytest.LogCaptureFixture, attack: str
) -> None:
    """Id and epoch are public; only the server itself has its token."""
    (member,) = (await ask(link, wire.Members(), wire.MembersReply)).members
    name = (member.server, member.epoch, TOKEN)
    gone = wire.BlockChanges(**KEYS, part=0, tier=0, status=ReadStatus.REMOVED)
    attacks: dict[str, wire.Message] = {
        "register": wire.Register(*name, "h", ["tcp://127.0.0.1:1"], ["dram"], 1 << 20),
        "announce": wire.Announce(*name, watched.master.directory.sequence("dev-0") + 1, [gone]),
        "inventory": wire.Inventory(*name, 2**62, 0, True, []),
        "heartbeat": wire.Heartbeat(*name, ServerStats()),
        "leave": wire.Leave(*name),
    }
    caplog.set_level(logging.WARNING, "kvpool")
    for _ in range(3):
        if attack == "register":
            answer = await ask(link, attacks[attack], wire.Registered)
            assert not answer.accepted
            assert member.addresses[0] in answer.problem
        else:
            with pytest.raises(Unauthenticated, match=re.escape(member.addresses[0])):
                await ask(link, attacks[attack], wire.Announced)
    (record,) = caplog.records  # once, with both addresses
    assert (record.caller, record.holder) == ("127.0.0.1", member.addresses)  # type: ignore[attr-defined]
    assert sum(watched.master.refusals.values()) == 3
    async with watched.pool() as pool:
        got = buffers(3)
        await pool.read(NAMESPACE, CHAIN, got)
        assert got == values(CHAIN)
        fresh = keys("fresh", 2)
        await pool.write(NAMESPACE, fresh, values(fresh))
        assert (await pool.match(NAMESPACE, fresh)).length == 2  # it is still listened to


async def test_servers_that_say_too_much_of_themselves(watched: dev.Dev, link: Link) -> None:
    """However much they say, a client learns of all of them: in pages, none too large."""
    wordy = [f"tcp://{'x' * 240}:{port}" for port in range(64)]
    for number in range(60):
        liar = msgspec.structs.replace(REGISTER, server=f"liar-{number:02}", addresses=wordy)
        assert (await ask(link, liar, wire.Registered)).accepted
    async with watched.pool() as pool:
        names = [member.server for member in await pool.members()]
        assert len(names) == len(set(names)) == 61
        got = buffers(3)
        await pool.read(NAMESPACE, CHAIN, got)
        assert got == values(CHAIN)


# --- masters that lie --------------------------------------------------------------------

HERE: list[Any] = [("s", "dram", 0)]
LIES: dict[str, wire.Message | None] = {
    "no answer": None,
    "an answer to something else": wire.HeartbeatReply(True),
    "a reason that is a hit": wire.FindReply([], b"\0\0"),
    "no reasons": wire.FindReply([], b""),
    "a reason nobody knows": wire.FindReply([], b"\xff\xff"),
    "a run past the end": wire.FindReply([(0, 9, HERE)], b""),
    "a run that ends before it begins": wire.FindReply([(1, 0, HERE)], b""),
    "runs that overlap": wire.FindReply([(0, 1, HERE), (1, 1, HERE)], b""),
    "a run that is nowhere": wire.FindReply([(0, 1, [])], b""),
    "a server nobody knows": wire.FindReply([(0, 1, HERE)], b""),
    "servers nobody knows": wire.PlaceReply(["s", "t"], b"\0\0"),
    "an answer for fewer blocks": wire.PlaceReply([], b"\0"),
    "an explanation of fewer blocks": wire.Explained([(0, "here", HERE)]),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_master_that_lies(name: str) -> None:
    """No answer of a master makes a hit: only bytes do."""
    lie = LIES[name]

    def handle(number: int, body: bytes, caller: str) -> tuple[int, bytes]:
        if number == wire.TYPES[wire.Members]:
            return wire.encode(wire.MembersReply("m", 0, 0, [], False))
        return wire.encode(lie) if lie is not None else (250, b"")

    network = ZmqNetwork()
    listener = await network.serve("127.0.0.1:0", handle)
    config = ClientConfig(masters=[listener.address], timeout_s=1.0)
    pair = keys("pair", 2)
    async with Pool(config, cluster=Cluster(), network=network, transports={}) as pool:
        results = await pool.read(NAMESPACE, pair, buffers(2))
        assert not any(result.status.hit for result in results)
        assert not any(s.present for s in await pool.write(NAMESPACE, pair, values(pair)))
        with contextlib.suppress(PeerError, Unavailable):  # the one that may raise
            assert len(await pool.explain(NAMESPACE, pair)) == 2
        match = await pool.match(NAMESPACE, pair)
        assert not match.stopped.hit or match.runs[-1].last == 1
    network.close()


async def test_what_was_not_matched_is_no_hit(watched: dev.Dev) -> None:
    """A match of two blocks says nothing of the third, however well it ended."""
    async with watched.pool() as pool:
        match = await pool.match(NAMESPACE, CHAIN[:2])
        results = await pool.read(NAMESPACE, CHAIN, buffers(3), match=match)
    assert [result.status.hit for result in results] == [True, True, False]


# --- shared memory -----------------------------------------------------------------------


def memory(size: int = 1 << 16, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def twice(fd: int) -> list[int]:
    return [fd, os.dup(fd)]


def read_only(fd: int) -> list[int]:
    try:
        return [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) for _ in range(2)]
    finally:
        os.close(fd)


#: The byte and the descriptors that a server sends, and the size it claims.
SEGMENTS: dict[str, tuple[bytes, Callable[[], list[int]], int]] = {
    "nothing at all": (b"", list, 0),
    "no descriptors": (b"S", list, 1 << 16),
    "one descriptor": (b"S", lambda: [memory()], 1 << 16),
    "three descriptors": (b"S", lambda: [*twice(memory()), memory()], 1 << 16),
    "another byte": (b"X", lambda: twice(memory()), 1 << 16),
    "smaller than it says": (b"S", lambda: twice(memory()), 1 << 17),
    "empty": (b"S", lambda: twice(memory(0)), 0),
    "a size of 0": (b"S", lambda: twice(memory()), 0),
    "2**47 bytes": (b"S", lambda: twice(memory(1 << 47)), 1 << 47),
    "it could shrink": (b"S", lambda: twice(memory(seals=0)), 1 << 16),
    "a pipe": (b"S", lambda: list(os.pipe()), 1 << 16),
    "a directory": (b"S", lambda: twice(os.open("/", os.O_RDONLY)), 1),
    "a device": (b"S", lambda: twice(os.open("/dev/zero", os.O_RDWR)), 1 << 16),
    "two segments": (b"S", lambda: [memory(), memory()], 1 << 16),
}


async def connected(byte: bytes, descriptors: list[int], size: int) -> Channel:
    """A channel to a server that passes this as its segment."""
    loop = asyncio.get_running_loop()
    name = f"kvpool-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listening:
        listening.bind("\0" + name)
        listening.listen()

        async def serve() -> None:
            sock, _ = await loop.sock_accept(listening)
            with sock:
                if byte:
                    socket.send_fds(sock, [byte], descriptors)
                    with contextlib.suppress(ConnectionError):
                        await loop.sock_recv(sock, 1 << 10)
                        await loop.sock_sendall(sock, frame(wire.Welcome("s", size)))
                        await loop.sock_recv(sock, 1 << 10)

        serving = loop.create_task(serve())
        try:
            return await ShmTransport().connect(
                f"shm://@{name}", cluster=Cluster(), client="test", deadline=loop.time() + 2
            )
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            for fd in descriptors:
                os.close(fd)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", SEGMENTS)
async def test_segments(name: str) -> None:
    byte, make, size = SEGMENTS[name]
    before = open_descriptors()
    with pytest.raises((PeerError, LinkBroken)):
        await connected(byte, make(), size)
    assert open_descriptors() <= before


async def test_a_segment_that_cannot_be_written() -> None:
    channel = await connected(b"S", read_only(memory()), 1 << 16)
    with pytest.raises(LinkBroken):
        channel._segment.writable()  # type: ignore[attr-defined]
    await channel.close()
