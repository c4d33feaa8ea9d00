"""A last word goes out when a stream falls idle, and never behind the request that replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kvpool import ClientConfig, dev
from kvpool.errors import BadFrame, BadMessage, DeadlineExceeded, Overloaded
from kvpool.protocols import WriteOptions
from kvpool.types import WriteBlock, WriteStatus
from kvpool.wire.messages import TYPES, Hello, Message, Reserved, StatusReply, Unpin
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool
from kvpool_transports.streams.server import StreamSession
from kvpool_transports.streams.stream import Stream
from tests.conftest import NAMESPACE, keys
from tests.wire.offline import Wire


def offline() -> Stream:
    stream = Stream()
    Wire(stream)
    return stream


class Dialled(list[Stream]):
    """The streams of a pool, which has as many as it dials."""

    async def dial(self, deadline: float) -> Stream:
        self.append(offline())
        return self[-1]


OPTIONS = WriteOptions(NAMESPACE, 0, visible=True)
BLOCK = WriteBlock(b"k" * 32, b"", (memoryview(b"value"),), 5)
#: What a client answers itself when it has no server to ask.
OF_CLIENTS = (WriteStatus.SERVER_LOST, WriteStatus.NO_MASTER)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Stream, Stream]]:
    loop = asyncio.get_running_loop()
    streams = []
    for end in socket.socketpair():
        end.setblocking(False)
        _, stream = await loop.create_connection(Stream, sock=end)
        streams.append(stream)
    try:
        yield streams[0], streams[1]
    finally:
        for stream in streams:
            stream.abort()


async def heard(stream: Stream, count: int) -> list[int]:
    deadline = asyncio.get_running_loop().time() + 5
    return [(await stream.receive(deadline=deadline)).type for _ in range(count)]


async def test_a_small_payload_goes_out_in_the_turn_of_its_call() -> None:
    """A block that the kernel takes at once costs no turn of a busy loop; a long payload does."""

    async def turns(payload: list[tuple[memoryview, ...]]) -> int:
        count, stream = 0, offline()
        sending = stream.send(None, payload, deadline=asyncio.get_running_loop().time() + 5)
        with contextlib.suppress(StopIteration):
            while True:
                sending.send(None)
                count += 1
        return count

    assert await turns([(memoryview(bytes(4096)),)]) == 0
    assert await turns([(memoryview(bytes(8 << 20)),)] * 2) > 0


async def test_an_idle_stream_says_its_last_word() -> None:
    async with pair() as (ours, theirs):
        ours.send_deferred(Unpin())
        ours.send_deferred(Unpin())  # once is enough
        await asyncio.sleep(0)
        await ours.send(hello(), deadline=asyncio.get_running_loop().time() + 5)
        assert await heard(theirs, 2) == [TYPES[Unpin], TYPES[Hello]]


async def test_a_request_takes_the_last_words_place() -> None:
    """Behind it, it would let go of what that request has just pinned (G4)."""
    async with pair() as (ours, theirs):
        deadline = asyncio.get_running_loop().time() + 5
        ours.send_deferred(Unpin())
        await ours.send(hello(), deadline=deadline)
        await asyncio.sleep(0.01)
        await ours.send(hello(), deadline=deadline)
        assert await heard(theirs, 2) == [TYPES[Hello], TYPES[Hello]]


async def test_a_stream_that_is_lost_says_nothing() -> None:
    went_wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: went_wrong.append(what))
    async with pair() as (ours, _):
        ours.send_deferred(Unpin())
        ours.abort()
        await asyncio.sleep(0.01)
    assert went_wrong == []


def hello() -> Message:
    return Hello("default", "test")


async def test_streams_that_the_server_has_closed_keep_no_place() -> None:
    """Or a pool whose idle streams were lost once would dial for nearly every call from then on."""
    loop = asyncio.get_running_loop()
    dialled = Dialled()

    async def at_once(streams: StreamPool, calls: int) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(calls):
                await stack.enter_async_context(streams.stream(loop.time() + 5))

    streams = StreamPool(dialled.dial)
    await at_once(streams, 20)
    for stream in dialled[:]:
        if not stream.lost:
            stream.eof_received()  # the server has closed those that are idle
    await at_once(streams, 8)
    assert len(dialled) == 28  # none of the lost ones was used
    await at_once(streams, 8)
    assert len(dialled) == 28
    streams.abort()


async def test_calls_that_wait_take_the_streams_of_those_before() -> None:
    """All end in one turn of the loop: no stream is dialled anew, and few are kept afterwards."""
    dialled = Dialled()

    async def call(streams: StreamPool) -> None:
        async with streams.stream(asyncio.get_running_loop().time() + 5):
            await asyncio.sleep(0)

    streams = StreamPool(dialled.dial)
    for _ in range(2):
        await asyncio.gather(*[call(streams) for _ in range(400)])
        assert len(dialled) <= 64 + 56
        assert sum(not stream.lost for stream in dialled) <= 8
    streams.abort()


class Timer:
    """An idle timeout that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def touch(self) -> None:
        self.told.append("touch")

    def rest(self) -> None:
        self.told.append("rest")

    def disarm(self) -> None:
        pass


async def test_the_time_of_a_call_rests_while_it_waits_for_a_stream() -> None:
    timer = Timer()

    async def call(streams: StreamPool) -> None:
        async with streams.stream(asyncio.get_running_loop().time() + 5, timer):
            assert timer.told[-1:] != ["rest"]

    streams = StreamPool(Dialled().dial, limit=1)
    async with streams.stream(asyncio.get_running_loop().time() + 5):
        waiting = asyncio.create_task(call(streams))
        await asyncio.sleep(0.01)
        assert timer.told == ["rest"]
    await waiting
    assert timer.told == ["rest", "touch"]
    streams.abort()


class FullServer:
    """Accepts one stream, after so many refusals; `dials` counts what a client tries."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.dials = refusals, 0

    async def dial(self, deadline: float) -> Stream:
        self.dials += 1
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("no further stream")
        self.refusals = 1000
        return offline()


async def test_a_client_without_a_stream_asks_a_full_server_a_few_times() -> None:
    """Its own last streams may not be gone there yet. A server that stays full has refused it."""
    loop = asyncio.get_running_loop()
    nearly, full = FullServer(3), FullServer(1000)
    streams = StreamPool(nearly.dial)
    async with streams.stream(loop.time() + 5):
        assert nearly.dials == 4
    streams.abort()
    streams, began = StreamPool(full.dial), loop.time()
    for dials in (6, 12):  # and the second call is as patient as the first
        with pytest.raises(Overloaded):
            async with streams.stream(loop.time() + 5):
                pass
        assert full.dials == dials
    assert loop.time() - began < 4
    streams.abort()


async def test_a_client_with_a_stream_waits_for_it_where_the_server_is_full() -> None:
    loop = asyncio.get_running_loop()
    server = FullServer(0)
    streams, timer = StreamPool(server.dial), Timer()

    async def call() -> Stream:
        async with streams.stream(loop.time() + 5, timer) as stream:
            await asyncio.sleep(0)
            return stream

    async with streams.stream(loop.time() + 5) as first:
        waiting = [asyncio.create_task(call()) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        assert server.dials == 4  # once each: they do not knock while they wait
        assert timer.told == ["rest"] * 3
    assert set(await asyncio.gather(*waiting)) == {first}
    assert timer.told[3:] == ["touch"] * 3
    with pytest.raises(DeadlineExceeded, match="no further stream for this client, and its 1 are"):
        async with streams.stream(loop.time() + 5), streams.stream(loop.time() + 0.05):
            pass
    streams.abort()


async def test_a_small_answer_waits_for_a_peer_that_does_not_read() -> None:
    """Or the answers to a peer who only asks would pile up without a bound (G11)."""
    stream = offline()
    stream.pause_writing()
    deadline = asyncio.get_running_loop().time() + 0.05
    with pytest.raises(DeadlineExceeded, match="does not read"):
        await stream.send(Unpin(), deadline=deadline)


@pytest.mark.parametrize("first", ["cut off", "junk"])
async def test_junk_behind_the_end_of_a_wait_changes_nothing(first: str) -> None:
    """uvloop reads several times before the owner of the stream hears of what ended its wait."""
    stream = offline()
    deadline = asyncio.get_running_loop().time() + 5
    receiving = asyncio.ensure_future(stream.receive(deadline=deadline))
    await asyncio.sleep(0)
    if first == "cut off":
        stream.interrupt(Overloaded("enough"))
    for _ in range(3):
        if room := stream.get_buffer(-1):
            room[:] = b"j" * len(room)
            stream.buffer_updated(len(room))
    with pytest.raises(Overloaded if first == "cut off" else BadFrame):
        await receiving


@pytest.mark.parametrize("status", [WriteStatus.STORED, *OF_CLIENTS, 200])
async def test_a_block_is_not_stored_because_a_server_answers_reserve_with_it(status: int) -> None:
    """Its bytes have not been sent: the server is broken, and its connection is aborted."""
    async with pair() as (ours, theirs):
        deadline = asyncio.get_running_loop().time() + 5
        await theirs.send(Reserved(bytes([status]), [], []), deadline=deadline)
        with pytest.raises(BadMessage):
            await requests.reserve(ours, OPTIONS, [BLOCK], deadline)


@pytest.mark.parametrize(
    "status", [WriteStatus.RESERVED, WriteStatus.NOT_YET, *OF_CLIENTS, len(WriteStatus)]
)
async def test_a_sealed_block_has_a_final_status(status: int) -> None:
    async with pair() as (ours, theirs):
        deadline = asyncio.get_running_loop().time() + 5
        await theirs.send(StatusReply(bytes([WriteStatus.STORED, status])), deadline=deadline)
        with pytest.raises(BadMessage):
            await requests.seal(ours, OPTIONS, [1, 2], [0, 0], deadline)


async def test_a_bug_in_the_server_costs_one_connection_and_is_in_the_log(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    async with pool_dev.pool(config) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(StreamSession, "_answer", wrong)
            statuses = await pool.write(NAMESPACE, keys("lost", 1), [b"a"])
            assert statuses == [WriteStatus.SERVER_LOST]
        assert "connection failed" in caplog.text
        assert "a bug" in caplog.text
    async with pool_dev.pool(config) as pool:
        assert await pool.write(NAMESPACE, keys("stored", 1), [b"a"]) == [WriteStatus.STORED]
