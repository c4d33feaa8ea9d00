"""Who gets a server's memory over shm: no process before the handshake, and what can be written
only a process that writes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import mmap
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool
from kvpool import ClientConfig, Cluster, dev
from kvpool.errors import BadMessage, ConfigError, Unauthenticated, Unavailable
from kvpool.protocols import Channel, Peer, ReadOptions, WriteOptions
from kvpool.types import ROOT, ReadBlock, WriteBlock, WriteStatus
from kvpool.wire import auth
from kvpool_transports import shm
from kvpool_transports.shm import ShmTransport
from kvpool_transports.streams import requests
from kvpool_transports.streams import server as serving
from tests.conftest import NAMESPACE, buffers, eventually, key, keys, value, values
from tests.net.test_secret import OURS, THEIRS, pool_of
from tests.support import messages as wire
from tests.support.raw_peers import Raw, frame, raw, read

OPEN = Cluster()
SOMEBODY = 65534


class Collected:
    """Everything that a server sends on one connection: bytes, and descriptors."""

    def __init__(self, peer: Raw) -> None:
        self._socket = peer.socket
        self._loop = asyncio.get_running_loop()
        self.data = b""
        self.fds: list[int] = []

    async def until(self, what: bytes | None) -> None:
        """Receive until these bytes have come; without any, until the server has hung up."""
        async with asyncio.timeout(5):
            while what is None or what not in self.data:
                await self._until_readable()
                try:
                    data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 8)
                except ConnectionResetError:
                    data, fds = b"", []
                self.data += data
                self.fds += fds
                if not data:
                    assert what is None, self.data
                    return

    async def _until_readable(self) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(self._socket)


@contextlib.asynccontextmanager
async def stranger(running: dev.Dev) -> AsyncIterator[tuple[Raw, Collected]]:
    async with raw(running, "shm") as peer:
        got = Collected(peer)
        yield peer, got
        for fd in got.fds:
            os.close(fd)


def mappings(access: str) -> int:
    """How often this process has mapped the memory of a server: `r--s` or `rw-s`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split() for line in lines if "/memfd:kvpool " in line]
    # By their ends: while memory is mapped elsewhere, a long file may list one of them twice.
    return len({one[0].partition("-")[2] for one in found if one[1] == access})


def descriptors() -> int:
    """How many descriptors of a server's memory this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "/memfd:kvpool " in os.readlink(f"/proc/self/fd/{fd}")
    return found


async def connect(address: str, cluster: Cluster = OPEN, within_s: float = 5.0) -> Channel:
    deadline = asyncio.get_running_loop().time() + within_s
    return await ShmTransport().connect(address, cluster=cluster, client="c", deadline=deadline)


async def write(channel: Channel, name: str, within_s: float = 5.0) -> list[WriteStatus]:
    digest = key(name)
    return await channel.write(
        WriteOptions(NAMESPACE, 0, visible=False),
        [WriteBlock(digest, ROOT, (memoryview(value(digest)),), 8192)],
        deadline=asyncio.get_running_loop().time() + within_s,
    )


def shm_address(running: dev.Dev) -> str:
    (server,) = running.servers
    return next(a for a in server.addresses if a.startswith("shm:"))


# --- addresses -----------------------------------------------------------------------------


async def test_a_tier_that_cannot_be_mapped_is_named_with_what_to_do() -> None:
    store = SimpleNamespace(tier=SimpleNamespace(name="ram"), server="s")
    with pytest.raises(ConfigError, match=r"'ram' cannot be mapped .* --listen tcp://"):
        await ShmTransport().listen("", store)  # type: ignore[arg-type]


@pytest.mark.parametrize("server", ["n" * 86, "n" * 256, "ü" * 256])
def test_a_server_with_a_long_id_has_an_address(server: str) -> None:
    """Kubernetes' node names have 253 characters, and a socket's name 107 bytes."""
    address = shm._free_address(server)
    assert address != shm._free_address(server)  # two servers of one id on a host
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(shm._socket_name(address))


@pytest.mark.parametrize("kind", ["@", "/"])
def test_a_socket_name_that_is_too_long_is_named_with_its_limit(kind: str) -> None:
    assert len(shm._socket_name(f"shm://{kind}{'n' * 106}")) == 107
    with pytest.raises(ConfigError, match=r"has 108 bytes.* 107 at most"):
        shm._socket_name(f"shm://{kind}{'n' * 107}")
    with pytest.raises(ConfigError, match="108 bytes"):
        shm._socket_name(f"shm://{kind}a{'ü' * 53}")


# --- before the handshake ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"", b"DeadlineExceeded"),
        (frame(wire.Hello("default", "x", bytes(32))) + frame(read(bytes(32))), b"BadMessage"),
    ],
    ids=["nothing", "a request instead of the proof"],
)
async def test_before_its_proof_a_client_gets_no_memory(
    said: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HELLO_S", 0.3)
    async with pool_of(OURS) as running, stranger(running) as (peer, got):
        await peer.send(said)
        await got.until(None)
        assert answer in got.data
        assert got.fds == []


@pytest.mark.parametrize("writer", [False, True])
@pytest.mark.parametrize("knows", ["nothing", "another secret", "what the server said"])
async def test_without_the_secret_there_is_no_memory(knows: str, writer: bool) -> None:
    async with pool_of(OURS) as running, stranger(running) as (peer, got):
        nonce = bytes(range(32)) if knows != "nothing" else b""
        await peer.send(frame(wire.Hello("default", "x", nonce, writer)))
        if knows != "nothing":
            await got.until(frame(wire.Challenge(bytes(32), bytes(32)))[:4])
            challenge = wire.decode(wire.Challenge, wire.TYPES[wire.Challenge], got.data[16:])
            proof = challenge.proof
            if knows == "another secret":
                proof = auth.client_proof(THEIRS, nonce, challenge.nonce)
            await peer.send(frame(wire.Proof(proof)))
        await got.until(None)
        assert b"Unauthenticated" in got.data
        assert got.fds == []


async def test_a_server_that_is_full_passes_no_memory() -> None:
    async with pool_of(OPEN) as running, stranger(running) as (peer, got):
        server = running.servers[0]
        held = [server.connect(Peer("test")) for _ in range(1024)]
        await peer.send(frame(wire.Hello("default", "x")))
        await got.until(None)
        assert b"Overloaded" in got.data
        assert got.fds == []
        for connection in held:
            connection.close()


# --- after it ------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", [False, True])
async def test_what_a_client_gets(writer: bool) -> None:
    """One descriptor, which cannot be written through; a second one if it says that it writes."""
    async with pool_of(OPEN) as running, stranger(running) as (peer, got):
        await peer.send(frame(wire.Hello("default", "x", b"", writer)))
        await got.until(frame(wire.Welcome("s", 1 << 20)))
        access = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in got.fds]
        assert access == [os.O_RDONLY, os.O_RDWR][: 1 + writer]
        with pytest.raises(PermissionError):
            mmap.mmap(got.fds[0], 1 << 20)
        # Nor can it be opened anew for writing, unless its owner (or root) changes that first.
        assert stat.S_IMODE(os.fstat(got.fds[0]).st_mode) == 0o400


async def test_a_reader_maps_nothing_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = keys("mapped", 2)
    async with pool_of(OPEN) as running:
        own, held = mappings("rw-s"), descriptors()
        config = ClientConfig(masters=[running.address], transports=["shm"])
        async with (
            await kvpool.connect(config=config) as writer,
            await kvpool.connect(config=config) as reader,
        ):
            small = keys("small", 1)
            await writer.write(NAMESPACE, small, values(small))
            assert mappings("rw-s") == own  # its bytes came with the request
            monkeypatch.setattr(requests, "ONE_REQUEST_MAPPED_MAX", 0)
            await writer.write(NAMESPACE, chain, values(chain))
            # The writer has read-only memory no more: it has one mapping, not two.
            assert (mappings("rw-s"), mappings("r--s")) == (own + 1, 0)
            got = buffers(2)
            assert all(r.status.hit for r in await reader.read(NAMESPACE, chain, got))
            assert got == values(chain)
            assert (mappings("rw-s"), mappings("r--s")) == (own + 1, 1)
            async with writer.read_view(NAMESPACE, chain) as views:
                assert all(view.data is not None and view.data.readonly for view in views)
            # Clients keep mappings, and no descriptor that could be inherited or passed on.
            assert descriptors() == held
        assert (mappings("rw-s"), mappings("r--s")) == (own, 0)


_CLIENT = """
import asyncio, sys
import kvpool
from kvpool import ClientConfig, Namespace
from tests.conftest import keys

MIB = 1 << 20

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10

async def main(address):
    config = ClientConfig(masters=[address], transports=["shm"])
    async with await kvpool.connect(config=config) as pool:
        chain, space = keys("resident", 16), Namespace("resident")
        sizes = [resident()]
        buffer = bytearray(MIB)
        async def write(digests):
            await pool.write(space, digests, [buffer] * len(digests), timeout=60)
        await write(chain[:1])
        sizes.append(resident())
        await write(chain[1:])
        sizes.append(resident())
        buffers = [bytearray(MIB) for _ in chain]
        got = await pool.read(space, chain, buffers, timeout=60)
        assert all(one.status.hit for one in got)
        sizes.append(resident())
        await asyncio.sleep(0.5)
        sizes.append(resident())
        print(*sizes)

asyncio.run(main(sys.argv[1]))
"""


def test_a_client_holds_what_it_has_touched_and_no_more(dev_in_thread: dev.Dev) -> None:
    """Resident memory of a client of 64 MiB that has written and read 16."""
    ran = subprocess.run(
        [sys.executable, "-c", _CLIENT, dev_in_thread.address],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    start, one, all_written, all_read, later = map(int, ran.stdout.split())
    mib = 1 << 20
    assert start == 0
    # A huge page is mapped as a whole, and each block may begin in another one.
    assert mib <= one <= 4 * mib
    assert 16 * mib <= all_written <= 24 * mib
    # What was written and is read is resident once, and nothing is touched in advance.
    assert all_read <= all_written + 2 * mib
    assert later == all_read


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write copies into the server's memory itself, also a small one."""
    monkeypatch.setattr(requests, "ONE_REQUEST_MAPPED_MAX", 0)


@pytest.mark.usefixtures("in_steps")
async def test_many_first_writes_make_one_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of(OPEN) as running:
        (server,) = running.servers
        before = mappings("rw-s")
        channel = await connect(shm_address(running))
        accept, accepted = server.connect, []
        monkeypatch.setattr(server, "connect", lambda peer: accepted.append(peer) or accept(peer))
        statuses = await asyncio.gather(*(write(channel, f"first/{n}") for n in range(20)))
        assert statuses == [[WriteStatus.STORED]] * 20
        assert mappings("rw-s") == before + 1
        assert len(accepted) <= 20  # a stream for each but the first, and one for the mapping
        await channel.close()
        assert mappings("rw-s") == before


class Watched:
    """A timer that records what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def touch(self) -> None:
        self.told.append("touch")

    def disarm(self) -> None:
        self.told.append("disarm")


async def test_the_time_for_copying_is_not_the_servers() -> None:
    """When it has said where the blocks lie, a reader that is slow itself does not end its read."""
    async with pool_of(OPEN) as running:
        channel = await connect(shm_address(running))
        assert await write(channel, "copied") == [WriteStatus.STORED]
        timer, data = Watched(), bytearray(8192)
        options = ReadOptions(NAMESPACE, 0, idle_timeout=timer)
        block = ReadBlock(key("copied"), (memoryview(data),), len(data))
        deadline = asyncio.get_running_loop().time() + 5
        (result,) = await channel.read(options, [block], deadline=deadline)
        assert result.status.hit
        assert timer.told[-1] == "disarm"
        await channel.close()


@pytest.mark.parametrize(
    ("offsets", "why"), [([], "1 hits, 0 offsets"), ([1 << 40], "in a segment of")]
)
async def test_an_answer_without_places_in_the_segment_is_refused(
    monkeypatch: pytest.MonkeyPatch, offsets: list[int], why: str
) -> None:
    """As over tcp it would be complete: here the bytes do not follow."""
    send = serving.StreamSession._send

    async def wrong(session: Any, message: Any, *arguments: Any, **more: Any) -> None:
        if isinstance(message, wire.Data):
            message = wire.Data(message.statuses, message.sizes, message.checksums, offsets)
        await send(session, message, *arguments, **more)

    async with pool_of(OPEN) as running:
        channel = await connect(shm_address(running))
        assert await write(channel, "here") == [WriteStatus.STORED]
        monkeypatch.setattr(serving.StreamSession, "_send", wrong)
        data = bytearray(8192)
        block = ReadBlock(key("here"), (memoryview(data),), len(data))
        deadline = asyncio.get_running_loop().time() + 5
        with pytest.raises(BadMessage, match=why):
            await channel.read(ReadOptions(NAMESPACE, 0), [block], deadline=deadline)
        await channel.close()


@pytest.mark.usefixtures("in_steps")
async def test_a_first_write_that_was_cancelled_does_not_stop_the_next() -> None:
    """At each of its awaits, one after the other; no connection is left behind."""
    gc.collect()
    before = descriptors()  # of servers of other tests, which may end meanwhile
    async with pool_of(OURS) as running:
        (server,) = running.servers
        for steps in range(40):
            channel = await connect(shm_address(running), OURS)
            writing = asyncio.create_task(write(channel, f"cancelled/{steps}"))
            for _ in range(steps):
                await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            assert await write(channel, f"next/{steps}") == [WriteStatus.STORED]
            await channel.close()
        await eventually(lambda: server.stats(0.0).counters["connections"] == 0)
        await eventually(lambda: descriptors() <= before + 2)  # the server's own


@pytest.mark.usefixtures("in_steps")
async def test_the_first_write_keeps_its_deadline() -> None:
    """A server that answers reads and then accepts no connection."""
    async with pool_of(OPEN) as running:
        channel = await connect(shm_address(running))
        started = asyncio.get_running_loop().time()
        listener = running.servers[0]._listeners[-1]
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener._socket)  # type: ignore[attr-defined]
        with pytest.raises(Unavailable):
            await write(channel, "never", within_s=0.3)
        assert loop.time() - started < 2
        got = bytearray(8192)
        (result,) = await channel.read(
            ReadOptions(NAMESPACE, 0),
            [ReadBlock(key("x"), (memoryview(got),), 8192)],
            deadline=loop.time() + 5,
        )
        assert not result.status.hit
        await channel.close()


async def test_a_burst_of_clients_waits_its_turn() -> None:
    """More than the queue of new connections holds: for the kernel that is EAGAIN, not a wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as full:
        name = f"kvpool-full-{os.getpid()}"
        full.bind("\0" + name)
        full.listen(0)
        waiting = [asyncio.create_task(connect(f"shm://@{name}", within_s=0.5)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes
    async with pool_of(OPEN) as running:
        many = await asyncio.gather(*(connect(shm_address(running)) for _ in range(300)))
        await asyncio.gather(*(channel.close() for channel in many))


# --- other users ----------------------------------------------------------------------------


async def test_a_client_refuses_a_server_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a server that has ended is free: another user could listen there."""
    async with pool_of(OPEN) as running:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(shm, "_peer", lambda sock: (1, 1001))
        with pytest.raises(Unauthenticated, match="of user 1001 listens"):
            await connect(shm_address(running))


async def test_nobody_in_a_user_namespace_is_not_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user outside of it looks like that one."""
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    monkeypatch.setattr(shm, "_peer", lambda sock: (1, SOMEBODY))
    async with pool_of(OPEN) as running:
        monkeypatch.setattr(shm, "_ambiguous_user", lambda: None)
        await (await connect(shm_address(running))).close()
        monkeypatch.setattr(shm, "_ambiguous_user", lambda: SOMEBODY)
        with pytest.raises(Unauthenticated):
            await connect(shm_address(running))


# --- a socket with a path -------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path
    assert not list(tmp_path.glob("*.sock")), "a socket was left behind"


async def test_only_its_user_may_use_a_socket_with_a_path(directory: Path) -> None:
    path = directory / "s.sock"
    old = os.umask(0)  # whatever it is
    try:
        async with dev.serve("1MiB", listen=(f"shm://{path}",)) as running:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            channel = await connect(shm_address(running))
            assert await write(channel, "path") == [WriteStatus.STORED]
            await channel.close()
    finally:
        os.umask(old)


async def test_a_killed_server_leaves_a_file_that_its_successor_replaces(directory: Path) -> None:
    path = directory / "s.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.is_socket()
    async with dev.serve("1MiB", listen=(f"shm://{path}",)) as running:
        await (await connect(shm_address(running))).close()


async def test_a_living_server_keeps_its_path(directory: Path) -> None:
    path = directory / "s.sock"
    async with dev.serve("1MiB", listen=(f"shm://{path}",)) as running:
        with pytest.raises(ConfigError, match="in use"):
            async with dev.serve("1MiB", listen=(f"shm://{path}",)):
                pass
        await (await connect(shm_address(running))).close()


async def test_a_file_that_is_no_socket_is_not_removed(directory: Path) -> None:
    path = directory / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="in use"):
        async with dev.serve("1MiB", listen=(f"shm://{path}",)):
            pass
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("mode", "allowed"), [(0o777, False), (0o770, False), (0o1777, True), (0o755, True)]
)
async def test_a_directory_in_which_others_could_replace_the_socket(
    directory: Path, mode: int, allowed: bool
) -> None:
    os.chmod(directory, mode)
    with contextlib.nullcontext() if allowed else pytest.raises(ConfigError, match="chmod 700"):
        async with dev.serve("1MiB", listen=(f"shm://{directory}/s.sock",)):
            pass
