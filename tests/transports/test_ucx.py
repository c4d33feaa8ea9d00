"""UCX between real processes: what is missing, what dies, what freezes; tcp lanes on loopback.

The conformance kit runs over ucx in test_conformance.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

import pytest

from kvpool import ClientConfig, Pool, ReadStatus, WriteStatus, connect, dev, registry
from kvpool.errors import ConfigError, LinkBroken, Unavailable
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import ReadOptions
from kvpool.tools.subprocesses import Child, process_of, servers_up
from kvpool.types import Cluster, ReadBlock
from kvpool.wire.frames import HEADER_SIZE, decode_header, encode_frame
from kvpool.wire.messages import PAYLOAD, TYPES, Error, Hello, Welcome
from kvpool_transports import ucx, ucx_context, ucx_worker
from kvpool_transports.tcp import TcpTransport
from kvpool_transports.ucx import UcxChannel, UcxStream, UcxTransport
from kvpool_transports.ucx_context import defaults, make_context
from kvpool_transports.ucx_worker import UcxPath, Worker
from tests.conftest import NAMESPACE, buffers, eventually, keys, value, values
from tests.support.processes import until
from tests.support.programs import master_and_server
from tests.support.raw_peers import frame

SIZE = 2 << 20


@pytest.fixture
def installed() -> None:
    """Skips where UCX is not there."""
    pytest.importorskip("ucxx", reason="the UCX transport needs ucxx: pip install kvpool[ucx]")
    ucx_context.load()


@asynccontextmanager
async def in_one_process(capacity: str = "64MiB") -> AsyncIterator[tuple[dev.Dev, Pool]]:
    """A server and its client, which have no other transport."""
    async with dev.serve(capacity, listen=("ucx://127.0.0.1:0",)) as running:
        config = ClientConfig(masters=[running.address], transports=["ucx"])
        async with running.pool(config) as pool:
            yield running, pool


_TALKATIVE = """
import logging, os
from kvpool_transports import ucx_context
ucx_context.load()
context = ucx_context.make_context(local=True, settings={})
logging.getLogger("ucx").warning("a warning of UCXX")
print("levels", os.environ["UCXX_LOG_LEVEL"])
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ["levels fatal\n"]),
        ({"UCXX_LOG_LEVEL": "info", "UCXPY_LOG_LEVEL": "WARNING"}, [" UCXX ", " UCXPY ", "info"]),
    ],
    ids=["nothing set", "set by the operator"],
)
def test_ucxx_prints_only_what_the_operator_asks_for(
    installed: None, given: dict[str, str], said: list[str]
) -> None:
    """Its C++ writes to stdout, where a command's answer is; its Python to stderr."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UCX")}
    done = subprocess.run(
        [sys.executable, "-c", _TALKATIVE],
        env={**kept, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    text = done.stdout + done.stderr
    assert all(words in text for words in said)
    assert given or [text] == said


LISTEN = "ucx://127.0.0.1:0,tcp://127.0.0.1:0"
SERVER = ("--id", "one", "--capacity", "128MiB", "--listen", LISTEN)


class Running(NamedTuple):
    """A master and a server in processes of their own."""

    master: str
    server: Child

    @asynccontextmanager
    async def client(self, *transports: str, **settings: float) -> AsyncIterator[Pool]:
        config = ClientConfig(masters=[self.master], transports=list(transports), **settings)
        async with await connect(config=config) as pool:
            yield pool


@pytest.fixture
async def running(installed: None) -> AsyncIterator[Running]:
    async with master_and_server(*SERVER) as (address, server):
        await servers_up(address, 1)
        yield Running(address, server)


def server_of(master: str) -> AbstractAsyncContextManager[Child]:
    """It announces itself in a line."""
    return process_of("kvpool", "server", "--masters", master, "--log-level", "error", *SERVER)


# --- not there, or not to be used ----------------------------------------------------------


def test_where_ucx_is_missing_the_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for it by name hears which extra it is; a client just goes without."""
    monkeypatch.setattr(ucx.importlib.util, "find_spec", lambda name: None)
    assert list(registry.transports(["inproc", "shm", "ucx", "tcp"])) == ["inproc", "shm", "tcp"]
    for asking in (
        lambda: registry.transport("ucx"),
        lambda: registry.transports(["ucx"]),
        lambda: registry.transports(["ucx", "tcp"], strict=True),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'kvpool\[ucx\]'"):
            asking()


def test_whoever_receives_is_active() -> None:
    """A sender that wrote into our memory by itself could do so after we gave up on it."""
    for lanes in ("", "self", "tcp,self", "posix,self", "rc,ud,tcp,self", "all", "^tcp,rc_x"):
        assert defaults(lanes, local=True)["RNDV_SCHEME"] == "am", lanes
    # A lane between host and device carries nothing to a peer.
    assert defaults("tcp,cuda_copy,self", local=True)["RNDV_SCHEME"] == "am"
    assert defaults("rc,cuda_ipc,self", local=True)["RNDV_SCHEME"] == "am"
    for lanes in ("rc,self", "rc_x,dc", "dc_mlx5", "rc,cuda_copy,gdr_copy"):
        assert defaults(lanes, local=False)["RNDV_SCHEME"] == "get_zcopy", lanes
    assert all(defaults(lanes, local=True)["RNDV_THRESH"] == "0" for lanes in ("", "rc"))


async def test_lanes_that_ucx_has_not_are_a_config_error(installed: None) -> None:
    async with dev.serve("16MiB", listen=("tcp://127.0.0.1:0",)) as pool:
        with pytest.raises(ConfigError, match="UCX_TLS"):
            await UcxTransport(tls="nonsense").listen("", pool.servers[0])


async def test_no_common_lane_is_another_path(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server shares memory only, the client has tcp only: the next transport takes the call."""
    monkeypatch.setattr(UcxTransport, "has_fabric", True)  # else tcp came first
    transports = {"ucx": UcxTransport(tls="posix,self"), "tcp": TcpTransport()}
    listen = ["ucx://127.0.0.1:0", "tcp://127.0.0.1:0"]
    async with dev.serve("64MiB", listen=tuple(listen), transports=transports) as running:
        config = ClientConfig(masters=[running.address], transports=["ucx", "tcp"])
        client = Pool(
            config,
            cluster=Cluster(),
            network=TcpNetwork(),
            transports={"ucx": UcxTransport(tls="tcp,self"), "tcp": TcpTransport()},
            owns_network=True,
        )
        async with client as pool:
            chain = keys("no common lane", 4)
            statuses = await pool.write(NAMESPACE, chain, values(chain, SIZE), timeout=5)
            assert set(statuses) == {WriteStatus.STORED}
            got = buffers(4, SIZE)
            results = await pool.read(NAMESPACE, chain, got)
            assert all(result.status.hit for result in results)
            assert got == values(chain, SIZE)
            assert pool.counters["failed_ucx"] == 1


# --- garbage -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"x" * 40,
        struct.pack("<4sHHHQQ", b"kvux", 1, 0, 10, 7, 7) + b"0123456789",
        struct.pack("<4sHHHQQ", b"kvux", 1, 0, 11, 7, 7) + b"0123456789",
        bytes(1 << 16),
    ],
)
async def test_a_wrong_introduction_ends_that_link_only(installed: None, garbage: bytes) -> None:
    """UCX never sees an address that did not arrive as it was sent."""
    async with in_one_process() as (running, pool):
        host, port = running.servers[0].addresses[0].removeprefix("ucx://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frame(Hello("default", "test")))
        type, body_size, _ = decode_header(await reader.readexactly(HEADER_SIZE))
        assert type == TYPES[Welcome]
        await reader.readexactly(body_size)
        writer.write(encode_frame(PAYLOAD, b"", len(garbage)) + garbage)
        head = await asyncio.wait_for(reader.readexactly(HEADER_SIZE), 5)
        assert decode_header(head)[0] == TYPES[Error]
        with suppress(ConnectionResetError):  # what it has not read is thrown away
            await asyncio.wait_for(reader.read(), 5)
        writer.close()
        chain = await stored(pool, "after garbage", 2)
        got = buffers(2, SIZE)
        await pool.read(NAMESPACE, chain, got)
        assert got == values(chain, SIZE)


async def test_a_mute_server_costs_nothing_but_time(installed: None) -> None:
    """Each dial that breaks off has another worker afterwards, and the one before has ended."""
    loop = asyncio.get_running_loop()
    transport = UcxTransport()
    mute = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    address = "ucx://{}:{}".format(*mute.sockets[0].getsockname())

    async def dial() -> None:
        with pytest.raises(Unavailable):
            await transport.connect(
                address, cluster=Cluster(), client="test", deadline=loop.time() + 0.05
            )

    await dial()
    gc.collect()
    await asyncio.sleep(0.1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await dial()
    gc.collect()
    mute.close()
    await asyncio.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) < before + 5


# --- dead and frozen -----------------------------------------------------------------------


async def stored(pool: Pool, name: str, count: int) -> list[bytes]:
    chain = keys(name, count)
    statuses = await pool.write(NAMESPACE, chain, values(chain, SIZE))
    assert set(statuses) == {WriteStatus.STORED}
    return chain


async def test_a_killed_server_is_a_miss_at_once(running: Running) -> None:
    """Kill -9 in the middle of a read: no wait for a deadline, no byte after the answer."""
    async with running.client("ucx", timeout_s=20, attempt_s=10, hedge_s=10) as pool:
        chain = await stored(pool, "killed", 32)
        match = await pool.match(NAMESPACE, chain)
        got = buffers(32, SIZE)
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, os.kill, running.server.pid, signal.SIGKILL)
        began = loop.time()
        results = await pool.read(NAMESPACE, chain, got, match=match)
        assert loop.time() - began < 5.0
        seen = [bytes(buffer) for buffer in got]
        await asyncio.sleep(0.05)
        assert got == seen
        for digest, buffer, result in zip(chain, got, results, strict=True):
            assert not result.status.hit or buffer == value(digest, SIZE)


async def frozen(running: Running, call: asyncio.Task[object], after_s: float) -> None:
    """Stop the server after a while, until the call has ended."""
    await asyncio.sleep(after_s)
    running.server.signal(signal.SIGSTOP)
    try:
        await asyncio.wait([call], timeout=10)
        assert call.done()
    finally:
        running.server.signal(signal.SIGCONT)


async def test_nothing_arrives_after_a_read_was_given_up(running: Running) -> None:
    """A server that was frozen goes on sending when it wakes: into nobody's memory."""
    async with running.client("ucx", timeout_s=20, attempt_s=10) as pool:
        chain = await stored(pool, "frozen", 32)
    async with running.client("ucx", hedge_s=10, attempt_s=0.3) as pool:
        await pool.read(NAMESPACE, chain[:1], buffers(1, SIZE), timeout=20)  # it has connected
        match = await pool.match(NAMESPACE, chain)
        got = buffers(32, SIZE)
        reading = pool.read(NAMESPACE, chain, got, match=match, timeout=0.5)
        call = asyncio.ensure_future(reading)
        await frozen(running, call, 0.01)
        for buffer in got:
            buffer[:] = b"\xa5" * SIZE
        await asyncio.sleep(0.3)
        assert all(buffer == b"\xa5" * SIZE for buffer in got)
        await servers_up(running.master, 1)
        await asyncio.sleep(2.0)  # the client keeps away from what was silent for a while
        results = await pool.read(NAMESPACE, chain, got, timeout=20)
        assert {result.status for result in results} == {ReadStatus.HIT}
        assert got == values(chain, SIZE)


async def test_a_write_that_was_given_up_leaves_nothing(running: Running) -> None:
    """The server had the extents reserved; when it wakes, it gives them back and stores nothing."""
    async with running.client("ucx", hedge_s=10, attempt_s=0.3) as pool:
        chain = keys("given up", 32)
        sources = [bytearray(data) for data in values(chain, SIZE)]
        writing = pool.write(NAMESPACE, chain, sources, timeout=0.5)
        call = asyncio.ensure_future(writing)
        await frozen(running, call, 0.02)
        for source in sources:
            source[:] = bytes(SIZE)  # the memory is the caller's again
        await servers_up(running.master, 1)
        async with running.client("tcp") as other:
            got = buffers(32, SIZE)
            results = await other.read(NAMESPACE, chain, got)
            for digest, buffer, result in zip(chain, got, results, strict=True):
                assert not result.status.hit or buffer == value(digest, SIZE)

            async def nothing_is_reserved() -> bool:
                return [one.stats.reservations for one in await other.members()] == [0]

            await eventually(nothing_is_reserved, 10)


def joined(settings: dict[str, str]) -> tuple[Worker, Worker, UcxPath, UcxPath]:
    """A receiver and a sender, and the path that each has to the other."""
    receiver, sender = (Worker(make_context(local=True, settings=settings)) for _ in range(2))
    here, there = receiver.path(), sender.path()
    here.meet(sender.address, there.number)
    there.meet(receiver.address, here.number)
    return receiver, sender, here, there


@pytest.mark.parametrize("steps", [0, 2, 5, 10, 20, 40, 80])
async def test_a_stopped_transfer_is_over(installed: None, steps: int) -> None:
    """When `stop` returns, the sender may do what it likes: nothing of it arrives."""
    receiver, sender, here, there = joined({})
    got = buffers(8, SIZE)
    incoming, outgoing = here.transfer(), there.transfer()
    for buffer in got:
        incoming.receive(memoryview(buffer))
        outgoing.send(memoryview(bytes(SIZE)))
    for _ in range(steps):
        await asyncio.sleep(0)
    await incoming.stop()
    for buffer in got:
        buffer[:] = b"\xa5" * SIZE
    with suppress(Unavailable):  # it may have sent everything by now
        await outgoing.until(0, asyncio.get_running_loop().time() + 0.3)
    await asyncio.sleep(0.05)
    await outgoing.stop()
    receiver.close()
    sender.close()
    assert all(buffer == b"\xa5" * SIZE for buffer in got)


@pytest.fixture
def small_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frozen server has sent is soon read: else whole pieces are, and receives end."""
    monkeypatch.setenv("UCX_TCP_SNDBUF", "64K")
    monkeypatch.setenv("UCX_TCP_RCVBUF", "64K")


async def test_calls_that_met_at_the_same_time_end_apart(
    small_sockets: None, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while the server is frozen, a read ends at once.

    UCX joins the ends of two workers in the order in which they are made. If streams did not meet
    one after the other, a read's receives could belong to another stream's end, and not be stopped
    before the server wakes or that one closes, too. Here they introduce themselves in one order and
    would make their ends in the other, if nobody held them back.
    """
    heard, said = UcxStream.receive_address, UcxStream.send_address
    order: dict[UcxStream, int] = {}

    async def in_turn(stream: UcxStream, deadline: float) -> None:
        order[stream] = len(order)
        await asyncio.sleep(order[stream] * 0.05)
        await said(stream, deadline)

    async def the_other_way_round(stream: UcxStream, deadline: float) -> None:
        await asyncio.sleep(0.3 - order[stream] * 0.1)
        await heard(stream, deadline)

    monkeypatch.setattr(UcxStream, "send_address", in_turn)
    monkeypatch.setattr(UcxStream, "receive_address", the_other_way_round)
    async with running.client("ucx", hedge_s=20, attempt_s=20, timeout_s=30) as pool:
        chain = await stored(pool, "together", 32)
        warm = [buffers(1, SIZE) for _ in range(3)]  # the first has the stream that there was
        await asyncio.gather(*(pool.read(NAMESPACE, chain[:1], into) for into in warm))
        assert len(order) == 3
        got = buffers(32, SIZE)
        call = asyncio.ensure_future(pool.read(NAMESPACE, chain, got))  # the others are idle
        await eventually(lambda: any(got[0][:8]))
        running.server.signal(signal.SIGSTOP)
        try:
            assert not call.done()
            call.cancel()
            await asyncio.wait([call], timeout=2)
            assert call.done()
        finally:
            running.server.signal(signal.SIGCONT)


async def test_a_buffer_cannot_be_freed_under_ucx(installed: None) -> None:
    """While a read is under way, or being stopped, its memory stays where it is."""
    async with in_one_process() as (_, pool):
        chain = await stored(pool, "freed", 8)
        got = buffers(8, SIZE)
        call = asyncio.ensure_future(pool.read(NAMESPACE, chain, got))
        await asyncio.sleep(0.005)
        with pytest.raises(BufferError):
            got[0].clear()
        call.cancel()
        await asyncio.wait([call])
        del call  # its traceback leads to frames that name the buffers
        gc.collect()
        got[0].clear()


@pytest.mark.parametrize("scheme", ["put_zcopy", "put_ppln", "auto"])
def test_senders_may_not_write_by_themselves(
    installed: None, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with pytest.raises(ConfigError, match="RNDV_SCHEME"):
        make_context(local=True, settings={"RNDV_SCHEME": scheme})
    monkeypatch.setattr(ucx_context, "_FROM_ENVIRONMENT", ("RNDV_SCHEME",))
    monkeypatch.setenv("UCX_RNDV_SCHEME", scheme)
    with pytest.raises(ConfigError, match="RNDV_SCHEME"):
        make_context(local=True, settings={})


def test_without_a_place_for_temporary_files_it_cannot_start(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("tmpfile() failed")

    monkeypatch.setattr("ucxx._lib.libucxx.UCXContext", fails)
    with pytest.raises(ConfigError, match=r"cannot start: tmpfile\(\) failed"):
        make_context(local=True, settings={})


async def test_a_ucx_that_is_too_old_for_devices_is_refused_with_a_sentence(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server at its start; a client goes another way and says why once. Without lanes to
    devices it is as good as any."""
    devices, hosts = UcxTransport(tls="tcp,cuda_copy,self"), UcxTransport(tls="tcp,self")
    listen = ("ucx://127.0.0.1:0", "tcp://127.0.0.1:0")
    sentence = "UCX 1.18 has one CUDA device.*install 1.19 or newer, or name lanes without cuda"
    async with dev.serve(
        "64MiB", listen=listen, transports={"ucx": hosts, "tcp": TcpTransport()}
    ) as running:
        with monkeypatch.context() as patch:
            patch.setattr(ucx_context, "version", lambda: (1, 18))
            with pytest.raises(ConfigError, match=sentence):
                await devices.listen(listen[0], running.servers[0].store)
            with pytest.raises(ConfigError, match=sentence):
                _ = devices.status_text  # for `kvpool doctor`
            assert hosts.status_text.startswith("UCX 1.18, lanes tcp,self")
            patch.setattr(UcxTransport, "has_fabric", True)  # else tcp came first
            running._transports = {"ucx": devices, "tcp": TcpTransport()}
            settings = ClientConfig(masters=[running.address], transports=["ucx", "tcp"])
            async with running.pool(settings) as pool:
                await stored(pool, "old", 3)
                assert pool.counters["failed_ucx"] == 1


@pytest.mark.parametrize("lanes", ["tcp,self", "posix,self"])
@pytest.mark.parametrize("whose", ["client", "server"])
async def test_lanes_without_a_rendezvous_are_refused(
    installed: None, lanes: str, whose: str
) -> None:
    """UCX falls back to sending at once where a receiver cannot read: that could not be stopped."""
    wrong = {"tls": lanes, "rndv_scheme": "get_zcopy"}
    settings = {"client": {"tls": lanes}, "server": {"tls": lanes}, whose: wrong}
    transports = {"ucx": UcxTransport(**settings["server"])}
    async with dev.serve("64MiB", listen=("ucx://127.0.0.1:0",), transports=transports) as running:
        with pytest.raises(LinkBroken):
            await UcxTransport(**settings["client"]).connect(
                running.servers[0].addresses[0],
                cluster=Cluster(),
                client="test",
                deadline=asyncio.get_running_loop().time() + 5,
            )


@pytest.mark.parametrize("lanes", ["tcp,self", "posix,self", "sysv,self", "tcp,posix,self"])
async def test_a_transfer_ends_while_its_sender_is_frozen(installed: None, lanes: str) -> None:
    """Over every lane: wherever it is, and whatever the sender does not do."""
    for steps in (0, 2, 5, 10, 20):
        receiver, sender, here, there = joined({"TLS": lanes})
        incoming, outgoing = here.transfer(), there.transfer()
        for buffer in buffers(4, 4 * SIZE):
            incoming.receive(memoryview(buffer))
            outgoing.send(memoryview(bytes(4 * SIZE)))
        for _ in range(steps):
            await asyncio.sleep(0)
        asyncio.get_running_loop().remove_reader(sender._fd)
        sender._scheduled = True  # it will not be driven any more
        drive, sender._turn = sender._turn, lambda: None  # type: ignore[method-assign]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(2):
            await incoming.stop()
        sender._turn = drive  # type: ignore[method-assign]
        await outgoing.stop()
        receiver.close()
        sender.close()


def test_settings_win_over_the_environment_and_that_over_defaults(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only when bytes move is nobody's to set: always by rendezvous."""
    monkeypatch.setattr(ucx_context, "_FROM_ENVIRONMENT", ("RNDV_THRESH", "MAX_RNDV_RAILS", "TLS"))
    monkeypatch.setenv("UCX_RNDV_THRESH", "inf")
    monkeypatch.setenv("UCX_MAX_RNDV_RAILS", "3")
    monkeypatch.setenv("UCX_TLS", "tcp,posix,self")
    for settings, rails in (({}, "3"), ({"MAX_RNDV_RAILS": "4", "NET_DEVICES": "lo"}, "4")):
        found = make_context(local=True, settings=settings).config
        assert found["MAX_RNDV_RAILS"] == rails
        assert found["RNDV_THRESH"] in ("0", "intra:0,inter:0")
        assert found["TLS"] == "tcp,posix,self"
        assert found["NET_DEVICES"] == "lo"


def test_settings_are_written_behind_the_name_and_shown_by_the_doctor(installed: None) -> None:
    made = registry.transport("ucx?tls=tcp%2Cself&net_devices=lo&rails=3")
    assert isinstance(made, UcxTransport)
    assert "lanes tcp,self, devices lo, up to 3 rails, rendezvous am" in made.status_text
    with pytest.raises(ConfigError, match="rails is 17, expected 0 to 16"):
        registry.transport("ucx?rails=17")


def test_ucx_knows_whether_it_has_a_fabric(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before tcp only where it has what tcp has not."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(ucx_context, "_rdma_devices", lambda: ["mlx5_0"])
    for lanes, verbs, has_fabric in (
        ("", True, False),
        ("rc,self", False, False),
        ("rc", True, True),
    ):
        monkeypatch.setattr(ucx_context, "_has", lambda _, verbs=verbs: verbs)
        assert UcxTransport(tls=lanes).has_fabric is has_fabric


@pytest.mark.parametrize("doing", ["read", "write"])
async def test_a_call_ends_when_ucx_has_let_go(
    installed: None, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """Cancelled, it waits for its buffers, however long UCX takes to give them back."""
    close = UcxPath.close
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(UcxPath, "close", lambda path: loop.call_later(0.2, close, path) and None)
    async with in_one_process() as (_, pool):
        chain = await stored(pool, "let go", 8)
        (known,) = pool._servers.known.values()
        (channel,) = known.channels.values()
        assert isinstance(channel, UcxChannel)
        worker = channel._workers.current()
        memory = buffers(8, 2 * SIZE)
        call = asyncio.ensure_future(
            pool.read(NAMESPACE, chain, memory)
            if doing == "read"
            else pool.write(NAMESPACE, keys("more", 8), memory)
        )
        while not worker._moving:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        (transfer,) = worker._moving
        assert transfer._requests
        call.cancel()
        await asyncio.wait([call])
        assert all(request.completed for request in transfer._requests)
        assert not worker._moving
        await asyncio.sleep(0.3)


# --- many, and idle ------------------------------------------------------------------------


async def test_idle_workers_sleep(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight clients of two servers, all in one process, have what they wrote. Then nothing moves,
    and so nobody looks."""
    looks = 0
    drive: Callable[[Worker], None] = Worker._drive

    def counted(worker: Worker) -> None:
        nonlocal looks
        looks += 1
        drive(worker)

    monkeypatch.setattr(Worker, "_drive", counted)
    listen = ("ucx://127.0.0.1:0",)
    async with dev.serve("64MiB", servers=2, listen=listen) as running, AsyncExitStack() as stack:
        config = ClientConfig(
            masters=[running.address], transports=["ucx"], timeout_s=30, attempt_s=20
        )
        pools = [await stack.enter_async_context(running.pool(config)) for _ in range(8)]
        chains = await asyncio.gather(*(stored(pool, str(n), 2) for n, pool in enumerate(pools)))
        got = [buffers(2, SIZE) for _ in chains]
        readers = zip(reversed(pools), chains, got, strict=True)
        await asyncio.gather(*(pool.read(NAMESPACE, *asked) for pool, *asked in readers))
        assert got == [values(chain, SIZE) for chain in chains]
        await asyncio.sleep(0.3)
        before = looks
        await asyncio.sleep(0.5)
        assert before > 16
        assert looks - before < 20


async def test_a_reset_in_mid_transfer_ends_that_call_only(installed: None) -> None:
    """UCX loses an endpoint: the call that used it is Unavailable, the channel goes on."""
    async with in_one_process("256MiB") as (running, pool):
        chain = await stored(pool, "reset", 8)
        channel = await UcxTransport().connect(
            running.servers[0].addresses[0],
            cluster=Cluster(),
            client="reset",
            deadline=asyncio.get_running_loop().time() + 5,
        )
        try:
            await reset(channel, chain)
        finally:
            await channel.close()


async def reset(channel: object, chain: list[bytes]) -> None:
    """Read until the endpoint was lost in the middle; then read once more."""
    assert isinstance(channel, UcxChannel)
    loop = asyncio.get_running_loop()

    def read(into: list[bytearray]) -> asyncio.Task[object]:
        wanted = [ReadBlock(k, (memoryview(b),), len(b)) for k, b in zip(chain, into, strict=True)]
        reading = channel.read(ReadOptions(NAMESPACE, 0), wanted, deadline=loop.time() + 5)
        return asyncio.ensure_future(reading)

    worker = channel._workers.current()
    call = read(buffers(8, SIZE))
    while not worker._moving:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    (path,) = worker._paths.values()
    assert path._endpoint is not None
    path._endpoint.close_blocking()
    with pytest.raises(Unavailable) as caught:
        await call
    assert isinstance(caught.value, LinkBroken)
    got = buffers(8, SIZE)
    await read(got)
    assert got == values(chain, SIZE)


async def test_what_waits_for_a_worker_that_fails_ends_and_it_is_tried_again(
    installed: None,
) -> None:
    worker = Worker(make_context(local=True, settings={}))
    await asyncio.sleep(0.01)
    real, told, looks = worker._worker, list[Exception](), []

    class Failing:
        def progress_once(self) -> bool:
            raise RuntimeError("no memory")

    class Waiting:
        def fail(self, error: Exception) -> None:
            told.append(error)

        def look(self) -> None:
            looks.append(self)

    waiting = Waiting()
    worker.watch(waiting)  # type: ignore[arg-type]
    worker._worker = Failing()
    worker.kick()
    await asyncio.sleep(0.01)
    assert [str(error) for error in told] == ["UCX makes no progress: no memory"]
    assert isinstance(told[0], LinkBroken)
    assert worker.needs_replacement
    loop = asyncio.get_running_loop()
    assert not loop.remove_reader(worker._fd), "what is readable all the time would be all it does"
    worker._worker = real
    await asyncio.sleep(0.3)
    assert looks
    assert loop.remove_reader(worker._fd), "it is driven by its descriptor again"
    worker.forget(waiting)  # type: ignore[arg-type]
    worker.close()


async def test_a_worn_worker_has_a_successor(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What UCX keeps of transfers that were given up is bounded, and calls notice nothing."""
    monkeypatch.setattr(ucx_worker, "_PURGED_MAX", 0)
    async with in_one_process() as (_, pool):
        for number in range(3):
            chain = await stored(pool, f"round {number}", 4)
            got = buffers(4, SIZE)
            reads = [asyncio.ensure_future(pool.read(NAMESPACE, chain, got)) for _ in range(2)]
            await asyncio.sleep(0.005)
            reads[0].cancel()
            await asyncio.wait(reads)
            assert got == values(chain, SIZE)


# --- connections that are lost, as in the simulation -----------------------------------------


async def test_a_killed_client_leaves_nothing(running: Running) -> None:
    """Kill -9 in mid-call: its reservations and pins are gone, and nobody else notices."""
    async with running.client("tcp") as pool:
        chain = await stored(pool, "there", 16)
        read: dict[str, object] = {"do": "read", "name": "there", "timeout": 10}
        for doing, after_s in (("write", 0.05), ("read", 0.2)):
            write: dict[str, object] = {"do": "write", "server": "one", "name": f"half {after_s}"}
            order = write if doing == "write" else read
            async with process_of("tests.support.remote_client", running.master, "ucx") as client:
                await client.line()
                client.write_line(json.dumps(order | {"count": 48, "size": SIZE}))
                await asyncio.sleep(after_s)
                client.signal(signal.SIGKILL)
                await client.ended()
            await until(pool, "one", "reservations", 0, within_s=5)
            await until(pool, "one", "pins", 0, within_s=5)
            for digests in (chain, keys(f"half {after_s}", 48)):
                got = buffers(len(digests), SIZE)
                results = await pool.read(NAMESPACE, digests, got)
                for digest, buffer, result in zip(digests, got, results, strict=True):
                    assert not result.status.hit or buffer == value(digest, SIZE)


async def test_a_restarted_server_is_found_again(running: Running) -> None:
    """Another process, another UCX: the old endpoints are of no use, and nobody asks for them."""
    async with running.client("ucx") as pool:
        await stored(pool, "before", 4)
        running.server.signal(signal.SIGKILL)
        await running.server.ended()
        async with server_of(running.master) as server:
            await server.line()
            await servers_up(running.master, 1)
            for _ in range(100):
                chain = keys("after", 4)
                statuses = await pool.write(NAMESPACE, chain, values(chain, SIZE))
                if set(statuses) <= {WriteStatus.STORED, WriteStatus.ALREADY_STORED}:
                    break
                await asyncio.sleep(0.1)
            got = buffers(4, SIZE)
            await pool.read(NAMESPACE, chain, got)
            assert got == values(chain, SIZE)
