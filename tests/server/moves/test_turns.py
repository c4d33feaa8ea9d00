"""Places among transfers: a peer that keeps its own keeps nobody else's."""

from __future__ import annotations

import asyncio

from kvpool.server.moves.turns import Turns


async def started(turns: Turns, *peers: str) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(turns.acquire(peer)) for peer in peers]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def have(tasks: list[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in tasks]


async def test_a_peer_that_gives_nothing_back_leaves_places_for_others() -> None:
    turns = Turns(4)
    frozen = await started(turns, *["frozen"] * 5)
    assert have(frozen) == [True, True, False, False, False]
    for _ in range(10):
        others = await started(turns, "a", "b")
        assert have(others) == [True, True]
        turns.release("a")
        turns.release("b")
    turns.release("frozen")
    await asyncio.sleep(0)
    assert have(frozen) == [True, True, True, False, False], "in the order in which they came"
    for task in frozen[3:]:
        task.cancel()


async def test_who_is_cancelled_keeps_no_place() -> None:
    turns = Turns(2)
    first, waits, last = await started(turns, "a", "a", "a")
    assert have([first, waits, last]) == [True, False, False]
    waits.cancel()
    await asyncio.sleep(0)
    turns.release("a")  # goes to the last one, which is cancelled in the same moment
    last.cancel()
    await asyncio.wait([waits, last])
    assert have(await started(turns, "a", "b")) == [True, True]


async def test_who_is_cancelled_before_its_turn_is_passed_over() -> None:
    """In one turn of the loop: it does not know yet, and its place would be nobody's."""
    turns = Turns(2)
    first, waits, last = await started(turns, "a", "a", "b")
    assert have([first, waits, last]) == [True, False, True]
    waits.cancel()
    turns.release("a")
    await asyncio.wait([waits])
    assert have(await started(turns, "a")) == [True]


async def test_one_place_is_for_whoever_comes_first() -> None:
    turns = Turns(1)
    tasks = await started(turns, "a", "b", "a")
    assert have(tasks) == [True, False, False]
    turns.release("a")
    await asyncio.sleep(0)
    assert have(tasks) == [True, True, False]
    turns.release("b")
    await asyncio.sleep(0)
    assert have(tasks) == [True, True, True]


async def test_a_tenant_that_asks_many_peers_leaves_places_for_others() -> None:
    turns = Turns(4)
    greedy = [asyncio.create_task(turns.acquire(peer, "acme")) for peer in "abcd"]
    await asyncio.sleep(0)
    assert have(greedy) == [True, True, True, False]
    names = (("e", "globex"), ("f", "hooli"))
    modest = [asyncio.create_task(turns.acquire(*one)) for one in names]
    await asyncio.sleep(0)
    assert have(modest) == [True, False]
    turns.release("a", "acme")
    await asyncio.sleep(0)
    assert (have(greedy)[3], have(modest)) == (False, [True, True]), "who has least is next"
    greedy[3].cancel()


async def test_the_pool_itself_may_have_every_place() -> None:
    assert have(await started(Turns(4), "a", "b", "c", "d")) == [True] * 4
