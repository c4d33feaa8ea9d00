"""Streams of control messages beside zmq: never the reason that an answer is missing."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvpool.errors import BadFrame, ConfigError, DeadlineExceeded, Unavailable
from kvpool.net import control_stream, zmq_rpc
from kvpool.net.control_stream import CallerStream, MasterStreams, StreamCipher, open_stream
from kvpool.net.zmq_rpc import NO_STREAMS, STREAM_AFTER, ZmqNetwork, stream_problem
from kvpool.protocols import Caller, Link
from kvpool.types import Cluster
from kvpool.wire import messages as wire
from kvpool.wire.message_stream import MessageReader, with_size
from tests.conftest import eventually

OPEN, SECRET = Cluster(), Cluster("default", b"0123456789abcdef")
CLUSTERS = pytest.mark.parametrize("cluster", [OPEN, SECRET], ids=["open", "secret"])


class Served:
    """A master's socket that answers with what it was asked, and a link to it."""

    def __init__(self, cluster: Cluster = OPEN, address: str = "127.0.0.1:0") -> None:
        self.cluster = cluster
        self.address = address
        self.work_s = 0.0
        self.asked: list[bytes] = []
        self.callers: list[Caller] = []

    async def start(self, **options: Any) -> None:
        self.network = ZmqNetwork(self.cluster, **options)
        self.listener: Any = await self.network.serve(self.address, self.handle)
        self.address = self.listener.address
        self.streams: MasterStreams = self.listener.streams

    def handle(self, type: int, body: bytes, caller: Caller) -> tuple[int, bytes]:
        self.asked.append(body)
        self.callers.append(caller)
        time.sleep(self.work_s)
        return 1, body

    def connect(self) -> Link:
        return self.network.connect(self.address)


@asynccontextmanager
async def served(cluster: Cluster = OPEN, **options: Any) -> AsyncIterator[Served]:
    master = Served(cluster)
    await master.start(**options)
    try:
        yield master
    finally:
        master.network.close()


async def ask(link: Link, body: bytes = b"", within_s: float = 10.0) -> bytes:
    deadline = asyncio.get_running_loop().time() + within_s
    return (await link.request(1, body, deadline=deadline))[1]


async def on_stream(link: Any) -> Any:
    """Asks until the link has its stream, which is what a caller does that asks often."""
    for _ in range(STREAM_AFTER):
        await ask(link)
    await eventually(lambda: link._stream is not None)
    return link._stream


def endings(monkeypatch: pytest.MonkeyPatch, **constants: float) -> None:
    for name, value in constants.items():
        for module in (zmq_rpc, control_stream):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


# --- a caller and its master -------------------------------------------------------------------


@CLUSTERS
async def test_who_asks_often_gets_a_stream_and_every_answer(cluster: Cluster) -> None:
    async with served(cluster) as master:
        link = master.connect()
        for number in range(STREAM_AFTER - 1):
            assert await ask(link, b"%d" % number) == b"%d" % number
        await asyncio.sleep(0.05)
        assert len(master.streams) == 0  # a command that asks a few times needs none
        await on_stream(link)
        assert len(master.streams) == 1
        bodies = [b"%d" % number for number in range(3000)]
        assert await asyncio.gather(*[ask(link, body) for body in bodies]) == bodies
        large = secrets.token_bytes(1 << 20)
        assert await asyncio.gather(ask(link, large), ask(link, b""), ask(link, large)) == [
            large,
            b"",
            large,
        ]
        assert master.callers[-1].address == "127.0.0.1"
        spent = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - spent < 0.15  # nobody asks, so nothing runs
        assert len(master.streams) == 1
        link.close()
        await eventually(lambda: len(master.streams) == 0)


@CLUSTERS
async def test_what_was_asked_on_a_stream_that_ends_is_asked_again_by_zmq(cluster: Cluster) -> None:
    async with served(cluster) as master:
        link: Any = master.connect()
        await on_stream(link)
        tasks = [asyncio.create_task(ask(link, b"%d" % number)) for number in range(100)]
        await asyncio.sleep(0)  # all are on their way, and none has arrived
        for end in list(master.streams._streams):
            end.abort()
        assert await asyncio.gather(*tasks) == [b"%d" % number for number in range(100)]
        assert link._stream is None
        assert await ask(link, b"next") == b"next"


async def test_after_its_end_a_stream_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    endings(monkeypatch, _ASK_AGAIN_S=0.05)
    async with served() as master:
        link: Any = master.connect()
        first = await on_stream(link)
        (end,) = master.streams._streams
        end.abort()
        await eventually(lambda: link._stream is None)
        for _ in range(3 * STREAM_AFTER):  # not at once
            await ask(link)
        assert link._stream is None
        await asyncio.sleep(0.06)
        assert await on_stream(link) is not first
        assert await ask(link, b"again") == b"again"


async def test_a_master_that_restarts_is_asked_by_zmq_until_it_offers_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endings(monkeypatch, _ASK_AGAIN_S=0.05)
    caller = ZmqNetwork()
    async with served() as master:
        link: Any = caller.connect(master.address)
        await on_stream(link)
    late = asyncio.create_task(ask(link, b"meanwhile"))
    again = Served(address=master.address)
    await again.start()
    try:
        assert await late == b"meanwhile"
        await asyncio.sleep(0.06)
        await on_stream(link)
        assert len(again.streams) == 1
    finally:
        caller.close()
        again.network.close()


async def test_a_master_that_is_silent_on_a_stream_is_asked_by_zmq_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A firewall may drop what is on a stream, and nothing else."""
    endings(monkeypatch, RECONNECT_AFTER_S=0.2)
    async with served() as master:
        link: Any = master.connect()
        stream = await on_stream(link)
        stream.send = lambda message: None  # what is sent on it never arrives
        with pytest.raises(DeadlineExceeded):
            await ask(link, within_s=0.15)
        with pytest.raises(DeadlineExceeded):
            await ask(link, within_s=0.15)
        assert await ask(link, b"by zmq") == b"by zmq"


@pytest.mark.parametrize("why", ["none", "closed", "older"])
async def test_without_a_stream_all_goes_by_zmq(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(stream_port=NO_STREAMS if why == "none" else 0) as master:
        if why == "closed":
            assert master.streams._server is not None
            master.streams._server.close()
        if why == "older":  # it does not know the message
            master.listener._handle = master.handle
        asked: list[object] = []
        offer = MasterStreams.offer
        monkeypatch.setattr(MasterStreams, "offer", lambda *args: asked.append(1) or offer(*args))
        link: Any = master.connect()
        for number in range(10 * STREAM_AFTER):
            assert await ask(link, b"%d" % number) == b"%d" % number
            await asyncio.sleep(0)
        assert link._stream is None
        assert len(asked) == (why != "older")  # it asks again in a second, not at each answer


async def test_a_link_that_is_closed_opens_no_stream_any_more() -> None:
    async with served() as master:
        link: Any = master.connect()
        for _ in range(STREAM_AFTER):
            await ask(link)
        assert link._opening is not None
        link.close()
        await asyncio.sleep(0.1)
        assert (len(master.streams), link._stream, link._opening.done()) == (0, None, True)


@pytest.mark.parametrize("when", ["opening", "open", "dropped"])
async def test_a_network_that_is_closed_has_no_file_open(when: str) -> None:
    async with served() as master:
        caller = ZmqNetwork()
        link: Any = caller.connect(master.address)
        await ask(link)
        before = open_sockets()
        if when == "opening":
            while not link._connected:
                await ask(link)
        else:
            await on_stream(link)
        assert open_sockets() > before
        if when == "dropped":
            link._drop_stream()
        master.streams.stop()
        caller.close()
        async with asyncio.timeout(1):  # in this task, so no turn more than it needs
            await caller.wait_closed()
        assert not link._connected
        await eventually(lambda: not master.streams._streams)
        # Those of zmq's link are closed by its thread, some time.
        assert open_sockets() <= before


def open_sockets() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_port_that_is_taken_is_one_clear_error() -> None:
    async with served() as first:
        taken = int(first.streams._port)
        with pytest.raises(ConfigError, match=rf":{taken} for streams: .*master\.stream_port"):
            async with served(stream_port=taken):
                pass


async def test_the_doctor_learns_why_there_is_no_stream() -> None:
    async with served() as master:
        assert await stream_problem(OPEN, master.address) == ""
        assert master.streams._server is not None
        master.streams._server.close()
        assert "cannot be opened" in await stream_problem(OPEN, master.address)
    async with served(stream_port=NO_STREAMS) as master:
        assert "told to have none" in await stream_problem(OPEN, master.address)


# --- what is sealed ----------------------------------------------------------------------------


def ciphers() -> tuple[StreamCipher, StreamCipher]:
    one, other = secrets.token_bytes(32), secrets.token_bytes(32)
    return StreamCipher(one, other), StreamCipher(other, one)


def test_a_message_is_read_by_the_other_end_and_in_its_place_only() -> None:
    caller, master = ciphers()
    first, second = caller.seal(b"first"), caller.seal(b"second")
    assert b"first" not in first
    for wrong in (second, first[:-1], first[:3], b"", first[:-1] + bytes([first[-1] ^ 1])):
        with pytest.raises(BadFrame):
            master.open(wrong)
    assert master.open(first) == b"first"
    with pytest.raises(BadFrame):
        master.open(first)  # once
    assert master.open(second) == b"second"
    back = master.seal(b"first")
    with pytest.raises(BadFrame):
        master.open(back)  # its own, sent back
    assert caller.open(back) == b"first"
    assert first != back


class Tap:
    """A process between a caller and its master, on the way of their stream."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        #: Whether the last byte of each piece is another one: of questions, of replies.
        self.alters = {"questions": False, "replies": False}
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Tap:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._tasks = [
            asyncio.create_task(self._pass(reader, to_writer, "questions")),
            asyncio.create_task(self._pass(to_reader, writer, "replies")),
        ]

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        while data := await reader.read(1 << 16):
            self.seen += data
            writer.write(data[:-1] + bytes([data[-1] ^ self.alters[way]]))
        writer.close()


def through(monkeypatch: pytest.MonkeyPatch, tap: Tap) -> None:
    offer = MasterStreams.offer
    monkeypatch.setattr(
        MasterStreams, "offer", lambda *args: msgspec.structs.replace(offer(*args), port=tap.port)
    )


async def test_with_a_secret_nobody_on_the_way_reads_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cluster in (SECRET, OPEN):
        async with served(cluster) as master, Tap(master.streams._port) as tap:
            with monkeypatch.context() as patch:
                through(patch, tap)
                link: Any = master.connect()
                await on_stream(link)
                assert await ask(link, b"a name that is nobody's business") != b""
            assert (b"nobody's business" in tap.seen) == (cluster is OPEN)
            link.close()


@pytest.mark.parametrize("way", ["questions", "replies"])
async def test_a_message_that_is_altered_on_the_way_ends_the_stream_and_is_asked_by_zmq(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(SECRET) as master, Tap(master.streams._port) as tap:
        through(monkeypatch, tap)
        link: Any = master.connect()
        await on_stream(link)
        tap.alters[way] = True
        master.asked.clear()
        assert await ask(link, b"question", within_s=1) == b"question"
        assert set(master.asked) == {b"question"}
        assert link._stream is None
        await eventually(lambda: len(master.streams) == 0)
        assert [one for one in caplog.records if "stream" in one.getMessage()]


async def test_those_who_break_the_rules_again_and_again_fill_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endings(monkeypatch, _LOG_EVERY_S=0.5)
    too_long = (control_stream.MESSAGE_SIZE_MAX + 1).to_bytes(4, "little")
    async with served() as master:

        async def broken() -> None:
            stream = await opened(master)
            assert stream._transport is not None
            stream._transport.write(too_long)
            await eventually(lambda: stream.ended)

        for _ in range(5):
            await broken()
            _, stranger = await asyncio.open_connection("127.0.0.1", master.streams._port)
            stranger.write(too_long)
            stranger.close()
        assert len(caplog.records) == 1
        await asyncio.sleep(0.5)
        await broken()
        assert [one.count for one in caplog.records] == [1, 5]  # type: ignore[attr-defined]


async def test_streams_that_do_not_last_are_asked_for_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endings(monkeypatch, _ASK_AGAIN_S=0.05)
    async with served() as master:
        link: Any = master.connect()
        now = asyncio.get_running_loop().time
        waits = []
        for _ in range(4):
            await asyncio.sleep(max(0.0, link._ask_at - now()))
            await on_stream(link)
            link._drop_stream()
            waits.append(link._ask_at - now())
        assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4], abs=0.03)
        await asyncio.sleep(max(0.0, link._ask_at - now()))
        await on_stream(link)
        link._opened_at -= zmq_rpc._ASK_AGAIN_MAX_S  # this one has lasted
        link._drop_stream()
        assert link._ask_at - now() == pytest.approx(0.05, abs=0.03)


async def test_a_token_without_its_keys_is_of_no_use() -> None:
    async with served(SECRET) as master:
        offer = master.streams.offer(Caller())
        replies: list[bytes] = []
        for keys in (b"", secrets.token_bytes(64)):
            stolen = msgspec.structs.replace(offer, keys=keys)
            with pytest.raises(Unavailable):
                await open_stream(master.address, stolen, replies.append, lambda: None, set())
        assert (replies, master.asked) == ([], [])


# --- strangers ---------------------------------------------------------------------------------


async def opened(master: Served, offer: wire.StreamOffer | None = None) -> CallerStream:
    offer = offer or master.streams.offer(Caller())
    return await open_stream(master.address, offer, lambda message: None, lambda: None, set())


async def test_a_token_is_good_once_and_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as master:
        offer = master.streams.offer(Caller())
        assert len(offer.token) == 16
        stream = await opened(master, offer)
        with pytest.raises(Unavailable, match="token"):
            await opened(master, offer)
        for token in (bytes(16), offer.token[:-1] + b"?"):
            with pytest.raises(Unavailable, match="token"):
                await opened(master, msgspec.structs.replace(offer, token=token))
        assert master.network.refused_connections == 3
        endings(monkeypatch, OFFER_S=0.05)
        late = master.streams.offer(Caller())
        await asyncio.sleep(0.06)
        with pytest.raises(Unavailable, match="token"):
            await opened(master, late)
        await asyncio.sleep(0.06)
        assert master.streams.offer(Caller()).token
        assert len(master.streams._offers) == 1  # those that are too old are forgotten
        stream.abort()


async def test_a_stream_that_is_open_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    endings(monkeypatch, OFFER_S=0.1)
    async with served() as master:
        stream = await opened(master)
        await asyncio.sleep(0.2)
        assert not stream.ended
        stream.abort()


async def test_an_offer_is_a_place_until_it_is_used_or_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endings(monkeypatch, OFFER_S=0.1)
    async with served() as master:
        streams = master.streams
        streams._shares.total = 1
        first = streams.offer(Caller())
        assert streams.offer(Caller()).problem == "1 of 1 streams are in use"
        stream = await opened(master, first)
        await asyncio.sleep(0.11)
        assert streams.offer(Caller()).problem, "it is a stream now"
        stream.abort()
        await eventually(lambda: len(streams) == 0)
        late = streams.offer(Caller())
        await asyncio.sleep(0.11)
        assert not streams.offer(Caller()).problem
        with pytest.raises(Unavailable, match="token"):
            await opened(master, late)
        assert streams._shares.used == 1


async def test_hosts_without_a_tenant_leave_room_for_others() -> None:
    async with served() as master:
        streams = master.streams
        streams._shares.total = 16
        for host in ("10.0.0.1", "fd00::1"):
            asked = [streams.offer(Caller(host)) for _ in range(20)]
            assert 0 < sum(not one.problem for one in asked) <= 8
        assert streams._shares.refused["10.0.0.1"] == 12
        await opened(master, streams.offer(Caller("10.0.0.2")))


async def test_streams_of_one_tenant_leave_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endings(monkeypatch, _IDLE_S=0.1)
    acme, globex = Caller(tenant="acme"), Caller(tenant="globex")
    async with served() as master:
        streams = master.streams
        streams._shares.total = 8
        initech = Caller(tenant="initech")
        mine = await opened(master, streams.offer(globex))
        theirs = [await opened(master, streams.offer(acme)) for _ in range(3)]
        assert streams.offer(acme).problem == "3 of 8 streams are in use"
        assert not streams.offer(initech).problem
        assert len(streams) == 4
        await asyncio.sleep(0.15)
        theirs.append(await opened(master, streams.offer(acme)))  # its own idle ones give way
        assert len(streams) <= 4
        await asyncio.sleep(0.01)
        assert not mine.ended
        for stream in (*theirs, mine):
            stream.abort()
        await eventually(lambda: len(streams) == 0)
        assert [streams._shares.held(name) for name in ("acme", "globex")] == [0, 0]


async def test_offers_that_nobody_takes_keep_nobody_else_out() -> None:
    acme, globex = Caller(tenant="acme"), Caller(tenant="globex")
    async with served() as master:
        streams = master.streams
        streams._shares.total = 100
        mine = streams.offer(globex)
        taken = [streams.offer(acme) for _ in range(300)]
        assert sum(not one.problem for one in taken) <= 50
        assert len(streams._offers) <= 51
        assert streams._shares.refused["acme"] >= 250
        await opened(master, mine)
        await opened(master, streams.offer(globex))


async def test_a_port_full_of_silent_connections_still_takes_an_honest_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endings(monkeypatch, _UNOPENED_MAX=20, OFFER_S=1.0)
    async with served() as master:
        silent = [
            await asyncio.open_connection("127.0.0.1", master.streams._port) for _ in range(60)
        ]
        await eventually(lambda: master.network.refused_connections == 40)
        assert len(master.streams._unopened) == 20
        await opened(master)
        await eventually(lambda: not master.streams._unopened)  # they are ended, too
        assert await asyncio.wait_for(silent[-1][0].read(), 5) == b""
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    "said",
    [
        with_size(bytes(17)),
        (1 << 20).to_bytes(4, "little") + bytes(99),
        b"\xff" * 8,
        with_size(b""),
        with_size(bytes(16)),
        b"GET / HTTP/1.1",
    ],
)
async def test_who_says_anything_but_a_token_is_cut_off_at_once(said: bytes) -> None:
    async with served() as master:
        reader, writer = await asyncio.open_connection("127.0.0.1", master.streams._port)
        writer.write(said)
        assert await asyncio.wait_for(reader.read(), 1) == b""
        assert not master.streams._unopened
        writer.close()


async def test_a_message_that_is_too_long_ends_the_stream_before_it_is_here() -> None:
    async with served() as master:
        stream = await opened(master)
        assert stream._transport is not None
        stream._transport.write((control_stream.MESSAGE_SIZE_MAX + 1).to_bytes(4, "little"))
        await eventually(lambda: len(master.streams) == 0)
        await eventually(lambda: stream.ended)


async def test_a_caller_that_reads_no_replies_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    endings(monkeypatch, _UNREAD_MAX=1 << 20)
    async with served() as master:
        link: Any = master.connect()
        deaf = await on_stream(link)
        other: Any = master.connect()
        await on_stream(other)
        deaf._transport.pause_reading()
        tasks = [asyncio.create_task(ask(link, bytes(1 << 20), 60)) for _ in range(12)]
        await eventually(lambda: len(master.streams) == 1)
        assert await ask(other, b"others go on") == b"others go on"
        deaf.abort()
        link._on_stream_end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_idle_stream_gives_way_to_another_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    endings(monkeypatch, _IDLE_S=0.2)
    async with served() as master:
        master.streams._shares.total = 4  # all of them are of one host, which has half
        links: list[Any] = [master.connect() for _ in range(3)]
        await on_stream(links[0])
        await on_stream(links[1])
        problem = master.streams.offer(Caller("127.0.0.1")).problem
        assert problem == "2 of 4 streams are in use"
        await asyncio.sleep(0.25)
        await ask(links[0])  # so the other one is idle
        await on_stream(links[2])
        assert links[1]._stream is None
        assert await ask(links[1], b"by zmq") == b"by zmq"
        assert links[0]._stream is not None


async def test_a_burst_of_one_caller_leaves_the_loop_to_others() -> None:
    async with served() as master:
        busy, other = master.connect(), master.connect()
        await on_stream(busy)
        await on_stream(other)
        master.work_s = 0.001
        burst = [asyncio.create_task(ask(busy, b"%d" % number)) for number in range(300)]
        await asyncio.sleep(0)
        begun = len(master.asked)
        assert await ask(other, b"another") == b"another"
        assert len(master.asked) - begun < 150
        assert await asyncio.gather(*burst) == [b"%d" % number for number in range(300)]
        assert await ask(busy, b"reads again") == b"reads again"


async def test_however_many_ask_at_once_a_turn_of_the_loop_is_short() -> None:
    async with served() as master:
        links = [master.connect() for _ in range(40)]
        for link in links:
            await on_stream(link)
        master.work_s = 0.001
        tasks = [asyncio.create_task(ask(link, b"?")) for link in links]
        before, most = len(master.asked), 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            most = max(most, len(master.asked) - before)
            before = len(master.asked)
        assert 0 < most <= 5


async def test_a_caller_that_asks_faster_than_it_is_answered_is_read_no_further() -> None:
    async with served() as master:
        link: Any = master.connect()
        stream = await on_stream(link)
        (end,) = master.streams._streams
        master.work_s = 0.005
        bodies = [bytes(200_000) + b"%d" % number for number in range(60)]
        tasks = [asyncio.create_task(ask(link, body, 30)) for body in bodies]
        held = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            held = max(held, sum(map(len, end._waiting)) + len(end._reader._rest))
        assert held < 2_000_000  # of 12 MB
        assert [task.result() for task in tasks] == bodies
        assert link._stream is stream


async def test_a_stream_on_which_an_answer_fails_leaves_the_others_alone() -> None:
    async with served() as master:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        bad, good = master.connect(), master.connect()
        await on_stream(bad)
        (end,) = master.streams._streams
        await on_stream(good)

        def fails(*_: object) -> bool:
            raise RuntimeError("the handle is closed")

        end.answer_one = fails
        asked = asyncio.create_task(ask(bad, b"?", within_s=0.2))
        replies = [asyncio.create_task(ask(good, b"%d" % number)) for number in range(20)]
        assert await asyncio.gather(*replies) == [b"%d" % number for number in range(20)]
        with pytest.raises(DeadlineExceeded):
            await asked


# --- the stream as bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_however_a_stream_is_cut_its_messages_are_the_same(seed: int) -> None:
    draw = random.Random(seed)
    messages = [draw.randbytes(draw.choice([0, 1, 3, 16, 200, 70_000])) for _ in range(30)]
    stream = b"".join(map(with_size, messages))
    reader, got = MessageReader(), []
    while stream:
        size = draw.choice([1, 2, 3, 5, 100, 4096, 65536, len(stream)])
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == messages
    assert not reader._rest


def test_a_reader_takes_a_message_of_the_maximum_and_none_beyond() -> None:
    reader = MessageReader(8)
    assert reader.feed(with_size(bytes(8))) == [bytes(8)]
    with pytest.raises(BadFrame, match="message of 9 bytes, limit 8"):
        reader.feed(with_size(bytes(9))[:4])
