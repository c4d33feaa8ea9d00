"""Servers and masters that lie to a client: it loses no block that another one has (G1, G11)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from kvpool import ClientConfig, Pool, WriteStatus, admin, dev
from kvpool.errors import LinkBroken, Overloaded, PeerError, Unauthenticated, Unavailable
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Channel, Link, WriteOptions
from kvpool.types import ROOT, Cluster, ReadStatus, ServerStats, WriteBlock
from kvpool.wire import messages as wire
from kvpool_transports.shm import ShmTransport
from kvpool_transports.streams.requests import ONE_REQUEST_MAPPED_MAX
from tests.conftest import CHAIN, NAMESPACE, buffers, eventually, keys, values
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
        "announce": wire.Announce(
            *name,
            watched.master.directory.servers.records["dev-0"].inventories.sequence + 1,
            [gone],
        ),
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
    holder = list(member.addresses)
    assert (record.caller, record.holder) == ("127.0.0.1", holder)  # type: ignore[attr-defined]
    assert sum(watched.master.refusals.values()) == 3
    async with watched.pool() as pool:
        got = buffers(3)
        await pool.read(NAMESPACE, CHAIN, got)
        assert got == values(CHAIN)
        fresh = keys("fresh", 2)
        await pool.write(NAMESPACE, fresh, values(fresh))
        assert (await pool.match(NAMESPACE, fresh)).length == 2  # it is still listened to


@pytest.mark.parametrize("damage", ["less", "more", "moved", "numbers"])
async def test_a_map_that_is_wrong_for_any_reason(watched: dev.Dev, damage: str) -> None:
    """The next heartbeat shows it, and the server sends its inventory again."""
    directory, (server,) = watched.master.directory, watched.servers
    before = server.stats(0.0).counters["map_differences"]
    await asyncio.sleep(0.1)
    if damage == "less":
        directory.removed("dev-0", NAMESPACE, 0, CHAIN[:1], ReadStatus.NEVER_WRITTEN)
    elif damage == "more":
        directory.stored("dev-0", NAMESPACE, 0, 0, keys("made up", 2))
    elif damage == "moved":
        directory.stored("dev-0", NAMESPACE, 0, 7, CHAIN[:1])
    else:
        directory.servers.records["dev-0"].inventories.sequence += 1000
        fresh = keys("after the jump", 1)  # this announcement is ignored: it counts as an old one
        async with watched.pool() as pool:
            await pool.write(NAMESPACE, fresh, values(fresh))
    await asyncio.sleep(0.3)  # two heartbeats, and delivery
    held = server.stack.fingerprint
    assert held is not None
    listed = directory.servers.records["dev-0"].inventories
    await eventually(lambda: not listed.differs(listed.sequence, held.blocks, held.packed()))
    assert server.stats(0.0).counters["map_differences"] - before == (damage != "numbers")
    async with watched.pool() as pool:
        found = await pool.match(NAMESPACE, CHAIN)
        assert found.length == len(CHAIN)
        assert {replica.tier for run in found.runs for replica in run.replicas} == {"dram"}
        assert (await pool.match(NAMESPACE, keys("made up", 2))).length == 0


async def test_made_up_servers_and_blocks_are_bounded(
    link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers of one address, and the blocks of one server by the memory that it registered."""
    accepted = 0
    for number in range(200):
        liar = msgspec.structs.replace(REGISTER, server=f"liar-{number:03}")
        with contextlib.suppress(Overloaded):
            accepted += (await ask(link, liar, wire.Registered)).accepted
    assert accepted == 127  # and the real one
    with pytest.raises(Overloaded, match="128 servers are registered from 127"):
        await ask(link, liar, wire.Registered)
    found = 0
    for sequence in range(1, 11):  # 1 MiB has room for 256 blocks of 4 KiB
        many = {**KEYS, "digests": os.urandom(32 * 1024)}
        changes = [wire.BlockChanges(**many, part=0, tier=0, status=0)]
        answer = await ask(
            link, wire.Announce("liar-000", 7, TOKEN, sequence, changes), wire.Announced
        )
        assert answer.applied
        assert (answer.unlisted, answer.alone) == (768 if sequence == 1 else 1024, False)
        assert "'liar-000' has 256 blocks" in answer.problem
    again = await ask(link, wire.Announce("liar-000", 7, TOKEN, 10, []), wire.Announced)
    assert (again.applied, again.alone) == (True, False), "what it was told is not known any more"
    half = {**KEYS, "digests": os.urandom(32 * 513)}
    halves = [wire.BlockChanges(**half, part=0, tier=0, status=status) for status in (1, 0)]
    for message in (
        wire.Announce("liar-002", 7, TOKEN, 1, halves),
        wire.Inventory("liar-002", 7, TOKEN, 1, 0, True, halves),
    ):
        with pytest.raises(PeerError, match="1026 blocks in one message, limit 1024"):
            await ask(link, message, wire.Announced)
    found = (await ask(link, wire.Members(), wire.MembersReply)).blocks
    assert found == 256 + len(CHAIN), "nothing of a refused message is applied"
    for server, epoch in (("nobody", 7), ("liar-001", 8)):
        leave = wire.Leave(server, epoch, TOKEN)
        assert not (await ask(link, leave, wire.HeartbeatReply)).known
    assert (await ask(link, wire.Leave("liar-001", 7, TOKEN), wire.HeartbeatReply)).known
    assert (await ask(link, liar, wire.Registered)).accepted  # in its place


async def test_a_server_whose_blocks_are_not_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, its other blocks stay, and all are there when the map has room."""
    monkeypatch.setattr("kvpool.server.announcer._RELIST_AFTER_S", 0.5)
    async with dev.serve("16MiB") as running, running.pool() as pool:
        directory, (server,) = running.master.directory, running.servers
        directory.blocks_max, chain = 8, keys("many", 6)
        await pool.write(NAMESPACE, chain, values(chain))
        assert (await pool.match(NAMESPACE, chain)).length == 4
        assert server.stats(0.0).counters["unlisted_blocks"] == 2
        directory.blocks_max = 100
        await eventually(lambda: directory.match(NAMESPACE, chain).length == 6)
        assert server.stats(0.0).counters["unlisted_blocks"] == 0
        assert server.stats(0.0).counters["map_differences"] == 0


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

    network = TcpNetwork()
    listener = await network.serve("127.0.0.1:0", handle)
    config = ClientConfig(masters=[listener.address], timeout_s=1.0)
    pair = keys("pair", 2)
    async with Pool(config, cluster=Cluster(), network=network, transports={}) as pool:
        results = await pool.read(NAMESPACE, pair, buffers(2))
        assert not any(result.status.hit for result in results)
        assert not any(s.present for s in await pool.write(NAMESPACE, pair, values(pair)))
        with contextlib.suppress(PeerError, Unavailable):  # the one that may raise
            assert len(await admin(pool).explain(NAMESPACE, pair)) == 2
        match = await pool.match(NAMESPACE, pair)
        assert not match.stopped.hit or match.runs[-1].last == 1
    network.close()


# --- shared memory -----------------------------------------------------------------------


def memory(size: int = 1 << 16, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def twice(fd: int) -> list[int]:
    return [fd, os.dup(fd)]


def read_only(fd: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


class Passed(NamedTuple):
    """What a server passes on one connection: a frame, and descriptors along with it."""

    descriptors: Callable[[], list[int]]
    size: int = 1 << 16
    frame: bytes = b""


#: What a server may pass to a client that reads.
SEGMENTS = {
    "a byte": Passed(list, frame=b"k"),
    "no descriptors": Passed(list),
    "two descriptors": Passed(lambda: twice(memory())),
    "three descriptors": Passed(lambda: [*twice(memory()), memory()]),
    "no frame": Passed(lambda: [memory()], frame=b"X" * 16),
    "more than a frame": Passed(lambda: [memory()], frame=2 * frame(wire.Welcome("s", 1 << 16))),
    "half a frame": Passed(lambda: [memory()], frame=frame(wire.Welcome("s", 1 << 16))[:-1]),
    "an error": Passed(lambda: [memory()], frame=frame(wire.Error("VersionMismatch", "no"))),
    "smaller than it says": Passed(lambda: [memory()], 1 << 17),
    "empty": Passed(lambda: [memory(0)], 0),
    "a size of 0": Passed(lambda: [memory()], 0),
    "2**47 bytes": Passed(lambda: [memory(1 << 47)], 1 << 47),
    "it could shrink": Passed(lambda: [memory(seals=0)]),
    "a socket": Passed(lambda: [socket.socket().detach()]),
    "a directory": Passed(lambda: [os.open("/", os.O_RDONLY)], 1),
    "a device": Passed(lambda: [os.open("/dev/zero", os.O_RDWR)]),
}
#: What it may pass on the connection after that one, to the same client, which wants to write.
WRITABLE_SEGMENTS: dict[str, Callable[[int], list[int]]] = {
    "one descriptor": lambda fd: [os.dup(fd)],
    "three descriptors": lambda fd: [os.dup(fd) for _ in range(3)],
    "two that are read-only": lambda fd: [os.dup(fd) for _ in range(2)],
    "two segments": lambda fd: [os.dup(fd), memory()],
    "another segment": lambda fd: twice(memory()),
}


@contextlib.asynccontextmanager
async def liar(*connections: Passed) -> AsyncIterator[str]:
    """The address of a server that passes this on its first connections, one after the other."""
    loop = asyncio.get_running_loop()
    name = f"kvpool-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listening:
        listening.bind("\0" + name)
        listening.listen()

        async def serve() -> None:
            async with contextlib.AsyncExitStack() as open_until_the_end:
                for passed in connections:
                    sock, _ = await loop.sock_accept(listening)
                    open_until_the_end.enter_context(sock)
                    await loop.sock_recv(sock, 1 << 10)
                    fds = passed.descriptors()
                    sent = passed.frame or frame(wire.Welcome("s", passed.size))
                    socket.send_fds(sock, [sent], fds)
                    for fd in fds:
                        os.close(fd)
                await asyncio.sleep(60)

        serving = loop.create_task(serve())
        try:
            yield f"shm://@{name}"
        finally:
            serving.cancel()
            await asyncio.wait([serving])


async def connected(address: str) -> Channel:
    deadline = asyncio.get_running_loop().time() + 1
    return await ShmTransport().connect(
        address, cluster=Cluster(), client="test", deadline=deadline
    )


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", SEGMENTS)
async def test_segments(name: str) -> None:
    before = open_descriptors()
    async with liar(SEGMENTS[name]) as address:
        with pytest.raises((PeerError, Unavailable)):
            await connected(address)
    assert open_descriptors() <= before


async def test_descriptors_in_drips() -> None:
    """Two with each byte: the client hangs up before it has none left for others."""
    before = open_descriptors()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listening:
        listening.bind("\0" + (name := f"kvpool-drips-{os.getpid()}"))
        listening.listen()
        connecting = loop.create_task(connected(f"shm://@{name}"))
        sock, _ = await loop.sock_accept(listening)
        with sock, contextlib.suppress(ConnectionError):
            for byte in frame(wire.Welcome("s", 1 << 16)):
                fds = twice(memory())
                try:
                    socket.send_fds(sock, [bytes([byte])], fds)
                finally:
                    for fd in fds:
                        os.close(fd)
                await asyncio.sleep(0.01)
        with pytest.raises(LinkBroken, match="too many descriptors"):
            await connecting
    assert open_descriptors() <= before


@pytest.mark.parametrize("name", WRITABLE_SEGMENTS)
async def test_segments_for_writers(name: str) -> None:
    """The client goes on without: it can read, and has nothing to write into."""
    size = ONE_REQUEST_MAPPED_MAX + 1
    before = open_descriptors()
    fd = read_only(memory())
    again = WRITABLE_SEGMENTS[name]
    async with liar(Passed(lambda: [os.dup(fd)]), Passed(lambda: again(fd))) as address:
        channel = await connected(address)
        with pytest.raises((PeerError, LinkBroken)):
            await channel.write(
                WriteOptions(NAMESPACE, 0, visible=False),
                [WriteBlock(keys("w", 1)[0], ROOT, (memoryview(bytes(size)),), size)],
                deadline=asyncio.get_running_loop().time() + 1,
            )
        await channel.close()
    os.close(fd)
    assert open_descriptors() <= before
