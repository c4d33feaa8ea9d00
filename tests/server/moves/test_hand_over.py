"""What one server has another one fetch, whoever wants it."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from kvpool.errors import LinkBroken, MasterLost
from kvpool.server.moves.state.wants import BlockName, MovePlanner, Want
from kvpool.types import MoveStatus
from tests.conftest import NAMESPACE, keys
from tests.support.moves import movers, moves_of, now, put


class Told(MovePlanner):
    """Keeps what became of each block."""

    def __init__(self) -> None:
        self.has: list[BlockName] = []
        self.lacks: list[BlockName] = []

    def came(self, name: BlockName, target: str, *, moved: bool) -> None:
        self.has.append(name)

    def left(self, name: BlockName, reason: str) -> None:
        self.lacks.append(name)


async def test_blocks_for_which_there_is_no_time_yet_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        here, other = running.servers
        await put(pool, here, keys("again", 4), apart=True)
        fetcher = moves_of(other).fetcher
        fetch, asked = fetcher.fetch, []

        async def slowly(*arguments: Any, **named: Any) -> list[MoveStatus]:
            statuses = await fetch(*arguments, **named)
            asked.append(len(statuses))
            return statuses[:1] + [MoveStatus.NOT_YET] * (len(statuses) - 1)

        monkeypatch.setattr(fetcher, "fetch", slowly)
        (await moves_of(here).peers.channel(other.server, now() + 5)).abort()
        told, names = Told(), [BlockName(NAMESPACE, 0, digest) for digest in keys("again", 4)]
        refused = await moves_of(here).hand_over._offer(told, other.server, names)
        assert (refused, told.has, told.lacks) == ([], names, [])
        assert asked == [4, 3, 2, 1]
        breaks = AsyncMock(side_effect=LinkBroken("each time"))
        monkeypatch.setattr("kvpool.server.moves.hand_over.fetch", breaks)
        async with asyncio.timeout(5):
            assert await moves_of(here).hand_over._offer(told, other.server, names) == names


async def test_while_no_master_answers_one_want_waits_and_not_each_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        here, _ = running.servers
        await put(pool, here, keys("later", 4), apart=True)
        hand_over, tried = moves_of(here).hand_over, []

        async def lost(planner: MovePlanner, want: Want) -> None:
            tried.append(want)
            raise MasterLost("no master answers")

        monkeypatch.setattr(hand_over, "_give", lost)
        found = [here._context.store.peek(NAMESPACE, 0, one) for one in keys("later", 4)]
        wants = iter([Want([entry]) for entry in found if entry is not None])
        told = Told()
        await hand_over.carry_out(told, wants)
        assert [name.digest for name in told.lacks] == keys("later", 1)
        assert (len(tried), len(list(wants))) == (1, 3)  # the next pass has the rest
