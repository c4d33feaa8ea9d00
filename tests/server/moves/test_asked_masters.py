"""Questions to masters that answer, that do not, and that are asked no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool.errors import DeadlineExceeded, MasterLost, Unavailable
from kvpool.server.moves.asked_masters import AskedMasters
from kvpool.server.moves.state.wants import BlockName
from kvpool.types import Member, Namespace, ServerStats
from kvpool.wire import messages as wire


class Masters:
    """A network of masters that know one server; `down` answer nothing."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.silent: set[str] = set()
        self.asked: list[str] = []
        self.closed: list[str] = []
        self.epoch = 1

    def connect(self, address: str) -> LinkToMaster:
        return LinkToMaster(self, address)


class LinkToMaster:
    def __init__(self, masters: Masters, address: str) -> None:
        self.masters, self.address = masters, address

    async def request(self, *message: Any, deadline: float) -> tuple[Any, ...]:
        self.masters.asked.append(self.address)
        if self.address in self.masters.down:
            raise Unavailable("down")
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0 or self.address in self.masters.silent:
            await asyncio.sleep(left)
            raise DeadlineExceeded("no answer")
        if message[0] == wire.TYPES[wire.Find]:
            assert wire.decode(wire.Find, *message).observes, "no client wants these blocks"
            runs = [] if self.address == "a" else [(0, 0, [("one", "dram", 0)])]
            return wire.encode(wire.FindReply(runs, b"" if runs else b"\x01", partial=not runs))
        one = ("one", self.masters.epoch, "host", (), (), True, 0.0, 0, ServerStats())
        member = Member(*one)
        return wire.encode(wire.MembersReply("m", 1.0, 2, [member], False))

    def close(self) -> None:
        self.masters.closed.append(self.address)


@pytest.fixture
def network() -> Masters:
    return Masters()


@pytest.fixture
def masters(network: Masters) -> AskedMasters:
    return AskedMasters(network, ["a", "b"], lambda: None)  # type: ignore[arg-type]


async def test_one_that_does_not_answer_is_asked_last_the_next_time(
    network: Masters, masters: AskedMasters
) -> None:
    network.down = {"a"}
    until = asyncio.get_running_loop().time() + 5
    for _ in range(2):
        await masters.ask(wire.Members(""), wire.MembersReply, until)
    assert network.asked == ["a", "b", "b"]
    network.down = {"a", "b"}
    with pytest.raises(MasterLost, match="down"):
        await masters.ask(wire.Members(""), wire.MembersReply, until)


async def test_a_silent_one_leaves_time_for_the_next_one(
    network: Masters, masters: AskedMasters
) -> None:
    network.silent, loop = {"a"}, asyncio.get_running_loop()
    await masters.ask(wire.Members(""), wire.MembersReply, loop.time() + 0.2)
    assert network.asked == ["a", "b"]
    network.silent = {"a", "b"}
    with pytest.raises(MasterLost, match="no answer"):
        await masters.ask(wire.Members(""), wire.MembersReply, loop.time() + 0.1)


async def test_members_are_asked_for_again_when_a_call_to_one_has_failed(
    network: Masters, masters: AskedMasters
) -> None:
    until = asyncio.get_running_loop().time() + 5
    assert masters.epoch("one") == 0
    for _ in range(2):
        assert (await masters.members(until))["one"].epoch == 1
    assert network.asked == ["a"]
    network.epoch = 2
    masters.members_changed()
    await masters.members(until)
    assert (masters.epoch("one"), masters.epoch("two")) == (2, 0)


async def test_what_was_closed_connects_again_until_all_ends(
    network: Masters, masters: AskedMasters
) -> None:
    until = asyncio.get_running_loop().time() + 5
    await masters.members(until)
    assert masters.are_connected
    masters.close()
    assert (masters.are_connected, network.closed) == (False, ["a", "b"])
    masters.members_changed()
    await masters.members(until)
    assert masters.are_connected
    masters.ended = True
    masters.close()
    with pytest.raises(MasterLost, match="this server is closed"):
        await masters.ask(wire.Members(""), wire.MembersReply, until)


async def test_a_master_that_has_just_begun_counts_where_no_other_answers(
    network: Masters, masters: AskedMasters
) -> None:
    name, until = BlockName(Namespace("m"), 0, bytes(32)), asyncio.get_running_loop().time() + 5
    assert await masters.holders([name], ["one"], until) == {name: {"one"}}
    network.down.add("b")
    assert await masters.holders([name], ["one"], until) == {name: set()}
