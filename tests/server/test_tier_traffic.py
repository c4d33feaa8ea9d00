"""The seconds and rates of a tier's transfers, which operators and `kvpool status` go by."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvpool import ReadStatus, dev
from kvpool.protocols.policy import Decision
from kvpool.server import tier_mover
from kvpool.server.promotions import PROMOTED_BYTES_MIN, PromotionWaiter
from kvpool.server.tier_traffic import TransferStats
from kvpool.testing.invariants import check_invariants
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.support.moves import moves_of


def test_transfers_that_overlap_share_their_seconds() -> None:
    stats = TransferStats()
    for begun, now in ((True, 1.0), (True, 2.0), (False, 4.0), (True, 5.0), (False, 6.0)):
        (stats.begin if begun else stats.end)(now)
        assert stats.seconds == 0.0
    stats.end(7.0)
    assert stats.seconds == 6.0
    stats.begin(10.0)
    stats.end(10.5)
    assert stats.seconds == 6.5


def test_rates_are_of_the_last_seconds() -> None:
    stats = TransferStats()
    stats.tick(100.0)
    stats.size, stats.blocks = 4_000, 8
    stats.tick(100.5)
    assert (stats.rate, stats.block_rate) == (0.0, 0.0)
    stats.tick(102.0)
    assert (stats.rate, stats.block_rate) == (2_000.0, 4.0)
    stats.size, stats.blocks = 5_000, 9
    stats.tick(103.0)
    assert (stats.rate, stats.block_rate) == (1_000.0, 1.0)
    stats.tick(104.0)
    assert (stats.rate, stats.block_rate) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("count", "size", "enough"),
    [(3, 10, 3), (10, PROMOTED_BYTES_MIN // 2, 2), (10, PROMOTED_BYTES_MIN, 1), (1, 0, 1)],
)
async def test_a_reader_waits_for_all_of_its_blocks_or_for_enough_bytes(
    count: int, size: int, enough: int
) -> None:
    waiter = PromotionWaiter(asyncio.get_running_loop().create_future())
    waiter.remaining = count
    for number in range(1, count + 1):
        waiter.arrived(size)
        assert waiter.ready.done() is (number >= enough)


def put_off(store: Any, times: int) -> list[int]:
    """Its policy answers so many times that it does not know yet. Who counts that."""
    policy, left = store.extents.policy, [times]
    victim = policy.victim

    def later(*arguments: Any, **more: Any) -> Any:
        if left[0]:
            left[0] -= 1
            return Decision.NOT_YET
        return victim(*arguments, **more)

    policy.victim = later
    return left


async def test_what_moves_between_tiers_waits_for_the_order_of_eviction(tmp_path: Path) -> None:
    """A policy brings that up to date in steps. Readers get their blocks all the same, and what was
    written reaches the disk."""
    block, tiers = 64 << 10, ["dram:1MiB", f"nvme:{tmp_path}/file:2MiB"]
    chain = keys("chain", 64)
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        stack = running.servers[0].stack
        for first in range(0, 48, 8):
            some = chain[first : first + 8]
            await pool.write(NAMESPACE, some, values(some, block))
            await eventually(lambda: not stack.front.extents.dirty)
        below = [one for one in chain if stack.index.below(NAMESPACE, 0, one) is not None]
        left = put_off(stack.front, 21)
        (result,) = await pool.read(NAMESPACE, below[:1], buffers(1, block))
        assert (result.status, left) == (ReadStatus.HIT, [0])
        left = put_off(stack.backing, 21)
        await pool.write(NAMESPACE, chain[48:56], values(chain[48:56], block))
        await eventually(lambda: not stack.front.extents.dirty)
        assert left == [0]
        found = [stack.backing.index.peek(NAMESPACE, 0, one) for one in chain[48:56]]
        assert all(found)
        check_invariants(stack)


async def test_what_was_put_off_comes_to_a_cache_tier_all_the_same(tmp_path: Path) -> None:
    block, tiers = 64 << 10, ["dram:4MiB", "dram:1MiB", f"nvme:{tmp_path}/file:8MiB"]
    chain = keys("chain", 40)
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        stack = running.servers[0].stack
        cache = stack.stores[1]
        for first in range(0, 40, 8):
            some = chain[first : first + 8]
            await pool.write(NAMESPACE, some, values(some, block))
        await eventually(lambda: not stack.front.extents.dirty)
        await pool.read(NAMESPACE, chain[:16], buffers(16, block))
        await eventually(lambda: cache.index.stored == 16)  # full
        left, more = put_off(cache, 16), chain[16:24]
        await pool.read(NAMESPACE, more, buffers(8, block))
        await eventually(
            lambda: all(cache.index.peek(NAMESPACE, 0, digest) is not None for digest in more)
        )
        assert left == [0]


async def test_a_policy_that_never_answers_takes_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_mover, "_PUT_OFF_MAX", 50)
    block, tiers = 64 << 10, ["dram:1MiB", f"nvme:{tmp_path}/file:1MiB"]
    chain = keys("chain", 32)
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        stack = running.servers[0].stack
        for first in (0, 8):
            await pool.write(NAMESPACE, chain[first:][:8], values(chain[first:][:8], block))
        await eventually(lambda: not stack.front.extents.dirty)
        before = 1 << 20
        left = put_off(stack.backing, before)
        await pool.write(NAMESPACE, chain[16:24], values(chain[16:24], block))
        await eventually(lambda: before - left[0] > 102)  # two in a step
        asked = left[0]
        await asyncio.sleep(0.5)
        assert 0 < asked - left[0] < 50, "each of two tasks asks some ten times a second"
        left[0] = 0
        await eventually(lambda: not stack.front.extents.dirty)


async def test_what_was_put_off_puts_off_no_other_call(tmp_path: Path) -> None:
    """A reader would ask in each turn of the loop, until its deadline, as write-back does."""
    tiers = ["dram:1MiB", f"nvme:{tmp_path}/file:1MiB"]
    async with dev.serve(tiers=tiers) as running:
        transfers = running.servers[0].stack.transfers
        for call in (
            lambda: transfers.start_promotions(NAMESPACE, 0, keys("none", 1), 1 << 20, 0.0),
            lambda: transfers.try_writeback(0.0),
            lambda: transfers.next_writebacks(1 << 20, 8, 0.0),
        ):
            transfers.behind = True
            assert call() == []
            assert not transfers.behind


async def test_only_a_last_tier_that_lasts_makes_a_server_durable() -> None:
    """Otherwise what a server does not hand over before a restart is lost."""
    async with dev.serve(tiers=["dram:1MiB", "dram:2MiB"]) as running:
        assert not moves_of(running.servers[0]).drainer._durable
    async with dev.serve(tiers=["dram:1MiB"]) as running:
        assert not moves_of(running.servers[0]).drainer._durable
