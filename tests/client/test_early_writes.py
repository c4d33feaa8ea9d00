"""A write to the server that a master will name first begins while the master is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpool import Pool, WriteStatus, dev
from kvpool.client.servers import Servers
from kvpool.client.writer import Writer
from kvpool.types import ROOT
from kvpool.wire import messages as wire
from tests.conftest import NAMESPACE, eventually, keys

STORED = WriteStatus.STORED
HEAD, TAIL, OTHER = keys("head", 2), keys("tail", 2), keys("other", 2)
DATA = [bytes(64)] * 2


@dataclass
class Master:
    """What clients hear of masters, and when."""

    answers: asyncio.Event = field(default_factory=asyncio.Event)
    change: Callable[[wire.PlaceReply], wire.PlaceReply | WriteStatus] = lambda placed: placed


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Master:
    made, place = Master(), Writer._place
    made.answers.set()

    async def placed(*arguments: Any) -> wire.PlaceReply | WriteStatus:
        await made.answers.wait()
        return made.change(await place(*arguments))

    monkeypatch.setattr(Writer, "_place", placed)
    return made


@pytest.fixture
async def pool(two_servers: dev.Dev, master: Master) -> AsyncIterator[Pool]:
    """A client that has written the head of a chain."""
    async with two_servers.pool() as made:
        assert await made.write(NAMESPACE, HEAD, DATA) == [STORED] * 2
        yield made


def holder(running: dev.Dev, digest: bytes) -> str:
    """The server that has the block."""
    held = [one.server for one in running.servers if one.store.index.peek(NAMESPACE, 0, digest)]
    return held[0] if held else ""


async def test_a_chain_goes_on_before_its_place_is_known(
    two_servers: dev.Dev, master: Master, pool: Pool
) -> None:
    """A second one from the same block may be a chain of its own, so that one is asked about."""
    before = holder(two_servers, HEAD[-1])
    master.answers.clear()
    writing = asyncio.create_task(pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1]))
    await eventually(lambda: holder(two_servers, TAIL[-1]) == before)
    assert not writing.done()
    master.answers.set()
    assert await writing == [STORED] * 2
    await is_asked_first(two_servers, master, pool, parent=HEAD[-1])


@pytest.mark.parametrize("options", [{"visible": False}, {"copies": 2}, {"parent": ROOT}], ids=str)
async def test_others_ask_first(
    two_servers: dev.Dev, master: Master, pool: Pool, options: dict[str, Any]
) -> None:
    await is_asked_first(two_servers, master, pool, **{"parent": HEAD[-1]} | options)


async def is_asked_first(running: dev.Dev, master: Master, pool: Pool, **options: Any) -> None:
    master.answers.clear()
    writing = asyncio.create_task(pool.write(NAMESPACE, OTHER, DATA, **options))
    await asyncio.sleep(0.05)
    assert not holder(running, OTHER[0])
    master.answers.set()
    assert await writing == [STORED] * 2


async def test_the_only_server_is_written_to_before_its_place_is_known(
    pool_dev: dev.Dev, master: Master
) -> None:
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, HEAD, DATA)
        master.answers.clear()
        writing = asyncio.create_task(pool.write(NAMESPACE, OTHER, DATA))
        await eventually(lambda: holder(pool_dev, OTHER[-1]) != "")
        master.answers.set()
        assert await writing == [STORED] * 2


@pytest.fixture
def silent(two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Calls to this server have no answer from now on."""

    def silence(server: str) -> None:
        call = Servers.call

        async def called(servers: Servers, name: str, *arguments: Any) -> Any:
            if name == server:
                await asyncio.Event().wait()
            return await call(servers, name, *arguments)

        monkeypatch.setattr(Servers, "call", called)

    return silence


async def test_a_silent_server_that_no_master_names_is_not_waited_for(
    two_servers: dev.Dev, master: Master, pool: Pool, silent: Callable[[str], None]
) -> None:
    before = holder(two_servers, HEAD[-1])
    silent(before)
    master.change = lambda placed: wire.PlaceReply(
        [server for server in placed.servers if server != before], placed.copies
    )
    async with asyncio.timeout(2):
        assert await pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1]) == [STORED] * 2
    assert holder(two_servers, TAIL[-1]) not in ("", before)


async def test_a_server_that_takes_nothing_is_one_that_was_tried(
    two_servers: dev.Dev, master: Master, pool: Pool
) -> None:
    before = holder(two_servers, HEAD[-1])
    (leaving,) = (server for server in two_servers.servers if server.server == before)
    leaving._context.draining = True
    assert await pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1]) == [STORED] * 2
    assert holder(two_servers, TAIL[-1]) not in ("", before)
    leaving._context.draining = False


@pytest.mark.parametrize("is_silent", [False, True])
async def test_without_a_master_what_is_stored_counts(
    two_servers: dev.Dev,
    master: Master,
    pool: Pool,
    silent: Callable[[str], None],
    is_silent: bool,
) -> None:
    def lost(_: wire.PlaceReply) -> WriteStatus:
        return WriteStatus.NO_MASTER

    master.change = lost
    master.answers.clear()
    if is_silent:
        silent(holder(two_servers, HEAD[-1]))
    writing = asyncio.create_task(pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1]))
    await asyncio.sleep(0.05)
    if not is_silent:
        await eventually(lambda: holder(two_servers, TAIL[-1]) != "")
        await asyncio.sleep(0.05)
    master.answers.set()
    async with asyncio.timeout(2):
        expected = WriteStatus.NO_MASTER if is_silent else STORED
        assert await writing == [expected] * 2
