"""A write whose server is known does not wait for masters, and they hear of it all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest

from kvpool import Pool, WriteStatus, dev
from kvpool.client import writer
from kvpool.client.servers import Servers
from kvpool.client.writer import Places
from kvpool.master.state.placement import Placement
from kvpool.types import ROOT
from kvpool.wire import messages as wire
from tests.conftest import NAMESPACE, eventually, keys

STORED = WriteStatus.STORED
HEAD, TAIL, OTHER = keys("head", 2), keys("tail", 2), keys("other", 2)
DATA = [bytes(64)] * 2


@dataclass
class Master:
    """What clients ask masters, what they hear of that, and when."""

    asked: list[wire.Place] = field(default_factory=list)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    change: Callable[[wire.PlaceReply], wire.PlaceReply | WriteStatus] = lambda placed: placed


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Master:
    made, ask = Master(), Places.ask
    made.answers.set()

    async def placed(
        to: Places, question: wire.Place, deadline: float
    ) -> wire.PlaceReply | WriteStatus:
        made.asked.append(question)
        await made.answers.wait()
        return made.change(await ask(to, question, deadline))

    monkeypatch.setattr(Places, "ask", placed)
    monkeypatch.setattr(writer, "_FRESH_S", 60.0)  # however slow the machine is
    monkeypatch.setattr(writer, "_ASK_AFTER_S", 60.0)
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


async def test_a_chain_goes_on_without_a_question(
    two_servers: dev.Dev, master: Master, pool: Pool
) -> None:
    """A second one from the same block may be a chain of its own, so that one is asked about."""
    before, timers, loop = holder(two_servers, HEAD[-1]), list[Any](), pool._writer._loop
    pool._writer._loop = watched = Mock(wraps=loop)
    watched.call_later = lambda *of: timers.append(loop.call_later(*of)) or timers[-1]
    master.answers.clear()
    assert await pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1]) == [STORED] * 2
    assert holder(two_servers, TAIL[-1]) == before
    assert [one.cancelled() for one in timers] == [True]
    await is_asked_first(two_servers, master, pool, parent=HEAD[-1])


@pytest.mark.parametrize(("limit", "value"), [("_FRESH_S", 0.0), ("_UNTOLD_MAX", 1)])
async def test_what_a_master_said_long_ago_or_must_hear_first_is_asked_beside_the_write(
    two_servers: dev.Dev, master: Master, pool: Pool, limit: str, value: float, monkeypatch: Any
) -> None:
    monkeypatch.setattr(writer, limit, value)
    monkeypatch.setattr(writer, "_TELL_AFTER_S", 60.0)
    pool._places.tell(master.asked[0], 0)
    master.answers.clear()
    writing = asyncio.create_task(pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1]))
    await eventually(lambda: holder(two_servers, TAIL[-1]) != "")
    assert not writing.done()
    master.answers.set()
    assert await writing == [STORED] * 2


@pytest.mark.parametrize(("sessions", "at_most"), [("aaaabb", 1024), ("aaaaaa", 4)])
async def test_masters_hear_of_all_writes_of_a_chain_in_one_message(
    master: Master, pool: Pool, sessions: str, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_TELL_AFTER_S", 0.5)
    monkeypatch.setattr(writer, "BATCH_BLOCKS_MAX", at_most)
    chain = [HEAD[-1], *keys("long", 6)]
    for number in range(6):
        wrote = {"parent": chain[number], "session": sessions[number]}
        await pool.write(NAMESPACE, chain[number + 1 : number + 2], DATA[:1], **wrote)
    await eventually(lambda: len(master.asked) == 3)  # with that for the head
    told = [(one.parent, one.digests, one.size, one.session) for one in master.asked[1:]]
    first, rest = b"".join(chain[1:5]), b"".join(chain[5:])
    assert told == [(HEAD[-1], first, 256, "a"), (chain[4], rest, 128, sessions[-1])]


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


async def test_the_only_server_is_not_asked_about_until_it_is_not_alone(
    pool_dev: dev.Dev, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, HEAD, DATA)
        master.answers.clear()
        monkeypatch.setattr(writer, "_TELL_AFTER_S", 0.5)
        for session, digest in zip("ab", TAIL, strict=True):  # two chains, which count as one
            assert await pool.write(NAMESPACE, [digest], DATA[:1], session=session) == [STORED]
        found = Placement((holder(pool_dev, TAIL[0]), "new"), [0] * 2)
        monkeypatch.setattr(pool_dev.master.directory, "place", lambda *_: found)
        master.answers.set()
        await eventually(lambda: not pool._places._only_server)
        told = [(one.digests, one.size) for one in master.asked[1:]]
        assert told == [(b"".join(TAIL), 128)]
        await is_asked_first(pool_dev, master, pool)


@pytest.fixture
def silent(two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Calls to this server have no answer from now on."""
    monkeypatch.setattr(writer, "_ASK_AFTER_S", 0.02)

    def silence(server: str) -> None:
        call = Servers.call

        async def called(servers: Servers, name: str, *arguments: Any) -> Any:
            if name == server:
                await asyncio.Event().wait()
            return await call(servers, name, *arguments)

        monkeypatch.setattr(Servers, "call", called)

    return silence


@pytest.mark.parametrize("has_master", [False, True])
async def test_a_silent_server_that_no_master_names_is_not_waited_for(
    two_servers: dev.Dev,
    master: Master,
    pool: Pool,
    silent: Callable[[str], None],
    has_master: bool,
) -> None:
    before = holder(two_servers, HEAD[-1])
    silent(before)

    def change(placed: wire.PlaceReply) -> wire.PlaceReply | WriteStatus:
        others = [server for server in placed.servers if server != before]
        return wire.PlaceReply(others, placed.copies) if has_master else WriteStatus.NO_MASTER

    master.change = change
    async with asyncio.timeout(2):
        answer = await pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1])
    assert answer == [STORED if has_master else WriteStatus.NO_MASTER] * 2
    assert bool(holder(two_servers, TAIL[-1])) is has_master


async def test_a_server_that_takes_nothing_is_one_that_was_tried(
    two_servers: dev.Dev, master: Master, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_ASK_AFTER_S", 0.0)
    before = holder(two_servers, HEAD[-1])
    (leaving,) = (server for server in two_servers.servers if server.server == before)
    leaving._context.draining = True
    assert await pool.write(NAMESPACE, TAIL, DATA, parent=HEAD[-1]) == [STORED] * 2
    assert holder(two_servers, TAIL[-1]) not in ("", before)
    assert len(master.asked) == 2  # not again, when it is refused
    leaving._context.draining = False
