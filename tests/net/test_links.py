"""A client's way to a master: it ends what waits when it is closed, and finds a master again."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.errors import Unavailable
from kvpool.net.control_network import TcpNetwork
from kvpool.types import Cluster


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_master_is_found_where_another_program_has_been() -> None:
    """It had the master's address for a while, and answered in a language of its own."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        await reader.read(64)
        writer.close()

    other = await asyncio.start_server(talk, "127.0.0.1", 0)
    address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    network = TcpNetwork(Cluster())
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
