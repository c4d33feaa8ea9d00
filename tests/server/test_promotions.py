"""What comes up from a slower tier, and who waits for it, without a tier."""

from __future__ import annotations

import asyncio

from kvpool.server.promotions import Promotions
from kvpool.server.state.entry import Entry, Index
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.types import ROOT, Extent, Namespace
from tests.conftest import NAMESPACE, keys

CHAIN = keys("chain", 4)
INDEX = Index(NAMESPACE, 0, 1)


def coming(
    number: int, size: int = 100, *, prefetch: bool = False, source: int = 1
) -> TierTransfer:
    entry = Entry(INDEX, CHAIN[number], ROOT, number * 4096, size, number)
    extent = Extent(0, size, number)
    return TierTransfer(source, 0, entry, 0, number, extent, prefetch=prefetch)


async def test_what_readers_ask_for_is_bounded_and_what_is_prefetched_counts_apart() -> None:
    promotions = Promotions(250)
    asked, early = coming(0), coming(1, prefetch=True)
    promotions.begin(asked)
    promotions.begin(early)
    assert (promotions.size, promotions.left(NAMESPACE)) == (100, 150)
    assert promotions.missing(NAMESPACE, 0, CHAIN) == CHAIN[2:]
    promotions.end(asked)
    promotions.end(early)
    assert (promotions.size, promotions.missing(NAMESPACE, 0, CHAIN)) == (0, CHAIN)


async def test_a_tenant_with_many_readers_leaves_the_disk_to_others_too() -> None:
    promotions, acme, blue = Promotions(1000), Namespace("@acme/m"), Namespace("@blue/m")
    index, under_way = Index(acme, 0, 1), []
    while promotions.left(acme) > 0:
        under_way.append(copy := coming(0))
        copy.entry.index, copy.entry.digest = index, bytes([len(under_way)]) * 8
        promotions.begin(copy)
    assert promotions.size == 500
    assert promotions.left(blue) == 250
    assert promotions.left(NAMESPACE) == 500, "the pool itself has no less than is free"
    promotions.end(under_way[0])
    assert promotions.left(acme) > 0


async def test_others_yield_only_while_readers_wait() -> None:
    promotions = Promotions(1000)
    promotions.begin(coming(1, prefetch=True))
    async with asyncio.timeout(0.02):
        await promotions.wait_for_readers()
    promotions.begin(asked := coming(0))
    yielding = asyncio.ensure_future(promotions.wait_for_readers())
    await asyncio.sleep(0)
    assert not yielding.done()
    promotions.end(asked)
    async with asyncio.timeout(0.02):
        await yielding


async def test_a_reader_looks_again_when_all_of_its_blocks_have_ended() -> None:
    promotions = Promotions(1000)
    copies = [coming(number) for number in range(3)]
    for copy in copies:
        promotions.begin(copy)
    waiter = promotions.waiter(NAMESPACE, 0, [CHAIN[0], CHAIN[2], CHAIN[3]])
    assert waiter.remaining == 2
    promotions.end(copies[0])
    promotions.end(copies[1])
    assert not waiter.ready.done()
    promotions.end(copies[2])
    assert waiter.ready.done()


async def test_the_end_of_a_lost_promotion_is_none_of_the_one_that_follows() -> None:
    """The call on a lost device ends later, when the block may come up from elsewhere."""
    promotions = Promotions(1000)
    promotions.begin(lost := coming(0, source=2))
    promotions.begin(coming(1))
    (found,) = promotions.of(lambda one: one.source == 2)
    assert found is lost
    promotions.end(lost)
    promotions.begin(again := coming(0))
    promotions.end(lost)
    assert promotions.missing(NAMESPACE, 0, CHAIN[:1]) == []
    promotions.end(again)
    assert promotions.size == 100
