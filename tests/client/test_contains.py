"""`Pool.contains`: which blocks are there, for keys that form no chain."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from kvpool import MasterLost, Namespace, Pool, ReadStatus, dev
from kvpool.client import lookup as lookup_module
from kvpool.wire import messages as wire
from tests.client.test_masters import ScriptedNetwork, client, later
from tests.conftest import NAMESPACE, key, keys, value, values


async def test_one_answer_for_each_key_in_its_place(pool_dev: dev.Dev) -> None:
    """A hole does not end it, as it ends a match; a key that comes twice has two answers."""
    flat = keys("flat", 6)
    async with pool_dev.pool() as pool:
        for one in (flat[1], flat[2], flat[5]):
            await pool.write(NAMESPACE, [one], [value(one)])
        assert await pool.contains(NAMESPACE, flat) == [False, True, True, False, False, True]
        assert await pool.contains(NAMESPACE, [flat[5], flat[0], flat[5]]) == [True, False, True]
        assert await pool.contains(Namespace("another"), flat) == [False] * 6
        await pool.remove(NAMESPACE, [flat[2]])
        assert (await pool.contains(NAMESPACE, flat))[1:3] == [True, False]
        halves = Namespace("test/halves", parts=2)
        for part, whole in ((0, False), (1, True)):  # a block whose parts are not all there is not
            await pool.write(halves, [key("a")], [bytes(64)], part=part)
            assert await pool.contains(halves, [key("a")]) == [whole]


async def test_it_is_no_use_of_the_blocks_and_pins_nothing(pool_dev: dev.Dev) -> None:
    """Otherwise an engine that asks often keeps blocks in the pool which nobody reads."""
    old, new = key("old"), key("new")
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, [old], [value(old)])
        await pool.write(NAMESPACE, [new], [value(new)])
        (server,) = pool_dev.servers
        used = {entry.digest: entry.last_used for entry in server.store.index.inventory()}
        assert await pool.contains(NAMESPACE, [old]) == [True]
        assert {entry.digest: entry.last_used for entry in server.store.index.inventory()} == used
        assert not any(entry.pins for entry in server.store.index.inventory())


async def test_it_takes_one_message(pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = keys("flat", 64)
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, flat[::2], values(flat[::2], 64))
        asked: list[wire.Message] = []
        ask = pool._context.masters.ask

        async def count(message: wire.Message, *rest: object) -> object:
            asked.append(message)
            return await ask(message, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(pool._context.masters, "ask", count)
        assert await pool.contains(NAMESPACE, flat) == [True, False] * 32
        assert len(asked) == 1
        monkeypatch.setattr(lookup_module, "_FIND_KEYS", 10)
        assert await pool.contains(NAMESPACE, flat) == [True, False] * 32
        assert len(asked) == 1 + 7


def _found(replies: wire.FindReply) -> Callable[[wire.Message], wire.Message]:
    return lambda question: replies


async def test_another_master_answers_for_one_that_is_silent() -> None:
    there = wire.FindReply([(1, 1, [("server", "dram", 0)])], bytes([ReadStatus.NEVER_WRITTEN]))
    network = ScriptedNetwork(a=_found(there), b=_found(there))
    network.masters["a"].is_silent = True
    lookup, _ = client(network)
    assert await lookup.contains(NAMESPACE, keys("k", 2), later(5.0)) == [False, True]
    assert len(network.masters["b"].asked) == 1


async def test_an_answer_that_contradicts_itself_is_none() -> None:
    network = ScriptedNetwork(a=_found(wire.FindReply([(0, 5, [])], b"")))
    lookup, _ = client(network)
    with pytest.raises(MasterLost, match="run 0-5 of 2"):
        await lookup.contains(NAMESPACE, keys("k", 2), later(1.0))


async def test_no_master_is_an_error_that_says_so(pool_dev: dev.Dev) -> None:
    """Not `False`: who takes an outage for a miss would write everything again."""
    pool: Pool
    async with pool_dev.pool() as pool:
        pool._context.masters.ask = Mock(side_effect=MasterLost("no master answers: it is gone"))  # type: ignore[method-assign]
        with pytest.raises(MasterLost, match="no master answers"):
            await pool.contains(NAMESPACE, keys("k", 2))
