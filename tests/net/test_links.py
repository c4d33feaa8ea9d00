"""A client's way to a master: it ends what waits when it is closed, and finds a master again."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
import zmq

from kvpool.errors import KvpoolError, Unavailable
from kvpool.net import zmq_rpc
from kvpool.net.zmq_rpc import ZmqNetwork
from kvpool.types import Cluster
from tests.conftest import eventually


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_what_waits_for_an_answer_ends_when_the_network_is_closed() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    network = ZmqNetwork(Cluster())
    links = [network.connect(f"127.0.0.1:{port}") for _ in range(2)]
    waiting = [asyncio.create_task(link.request(1, b"", deadline=later(60))) for link in links]
    await asyncio.sleep(0.02)
    network.close()
    done, left = await asyncio.wait(waiting, timeout=5)
    assert not left
    assert all(isinstance(task.exception(), KvpoolError) for task in done)
    silent.close()


async def test_a_master_is_found_where_another_program_has_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had the master's address for a while, and answered in a language of its own."""
    monkeypatch.setattr(zmq_rpc, "RECONNECT_AFTER_S", 0.1, raising=False)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"OTHER".ljust(52, b"\0"))
        await writer.drain()
        await reader.read(64)
        writer.close()

    other = await asyncio.start_server(talk, "127.0.0.1", 0)
    address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    network = ZmqNetwork(Cluster())
    try:
        link = network.connect(address)
        with pytest.raises(Unavailable):
            await link.request(1, b"question", deadline=later(0.2))
        other.close()
        await other.wait_closed()
        await network.serve(address, lambda type, body, *more: (2, b"answer"))
        until = later(10)
        while True:
            try:
                assert await link.request(1, b"", deadline=later(0.2)) == (2, b"answer")
                break
            except Unavailable:
                assert later(0) < until
    finally:
        network.close()


def no_descriptors(*_: Any, **__: Any) -> Any:
    raise zmq.ZMQError(errno.EMFILE)


async def test_a_link_that_can_open_no_socket_keeps_the_one_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The master was silent; when it answers again, the link is as good as before."""
    monkeypatch.setattr(zmq_rpc, "RECONNECT_AFTER_S", 0.0)
    network, callers = ZmqNetwork(Cluster()), ZmqNetwork(Cluster())
    try:
        listener = await network.serve("127.0.0.1:0", lambda *_: (2, b"answer"))
        link = callers.connect(listener.address)
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "socket", no_descriptors)
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await link.request(1, b"", deadline=later(-1))
        assert await link.request(1, b"", deadline=later(5)) == (2, b"answer")
    finally:
        callers.close()
        network.close()


async def test_without_descriptors_a_link_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    network = ZmqNetwork(Cluster())
    monkeypatch.setattr(zmq.Context, "socket", no_descriptors)
    with pytest.raises(Unavailable, match="Too many open files"):
        network.connect("127.0.0.1:9")
    with pytest.raises(Unavailable, match="Too many open files"):
        await network.serve("127.0.0.1:0", lambda *_: (2, b""))
    network.close()


async def test_a_message_that_cannot_be_handled_holds_up_no_other() -> None:
    """No edge tells of those behind it that have arrived already."""
    context: zmq.Context[Any] = zmq.Context()
    taken: list[list[bytes]] = []

    def receive(parts: list[bytes], _: Any) -> None:
        taken.append(parts)
        if len(taken) == 1:
            raise KeyError("a bug")

    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://both")
    sender.connect("inproc://both")
    for number in range(3):
        sender.send(b"%d" % number)
    reading = zmq_rpc._Socket(receiver, receive)
    await eventually(lambda: len(taken) == 3)
    assert len(errors) == 1
    reading.close()
    context.destroy(linger=0)
