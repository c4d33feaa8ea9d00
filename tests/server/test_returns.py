"""A session that announced its return finds its blocks in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool import ReadStatus, dev
from kvpool.protocols import ReserveRequest
from kvpool.server import prefetcher
from kvpool.server.state import tiered_store
from kvpool.types import ROOT, HintStatus, SessionHint
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.server.test_tiered_store import ONE, PAGE, Server

BLOCK = 64 << 10


def talk(server: Server, session: str, chain: list[bytes]) -> None:
    server.now += 1
    parents, sizes = [ROOT, *chain[:-1]], [PAGE] * len(chain)
    request = ReserveRequest(ONE, 0, chain, parents, sizes, SessionHint(session))
    for digest, answer in zip(chain, server.stack.reserve(7, request, server.now), strict=True):
        assert answer.extent is not None
        server.memory[0][answer.extent.offset] = (ONE, 0, digest)
        server.stack.seal(7, answer.id, hash((ONE, 0, digest)) & 0xFFFF, server.now)
    server.settle()


def test_a_chain_is_returned_once_when_its_time_comes_head_first() -> None:
    server = Server(4, 64)
    stack = server.stack
    chain = keys("chain", 4)
    talk(server, "a", chain)
    talk(server, "b", keys("other", 4))  # it takes the place of the first in memory
    assert stack.resume("a", 30.0, 100.0) is HintStatus.ACCEPTED
    assert stack.next_return(129.0) is None
    found = stack.next_return(130.0)
    assert found is not None
    assert (found.due, [list(one.digests) for one in found.chains]) == (130.0, [chain])
    assert all(stack.is_below(ONE, 0, digest) for digest in chain)
    assert stack.next_return(1e9) is None
    stack.resume("a", 60.0, 100.0)  # a later hint counts
    stack.resume("a", 40.0, 100.0)
    assert stack.next_return(139.0) is None
    stack.end("a", 101.0)
    assert stack.next_return(1e9) is None


def test_a_session_with_very_long_chains_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the loop is short whatever a client has written; half a chain has no head."""
    monkeypatch.setattr(tiered_store, "ANCESTORS_MAX", 6)
    server = Server(16, 64)
    talk(server, "a", keys("long", 7))
    talk(server, "b", keys("short", 6))
    server.stack.resume("a", 30.0, 100.0)
    server.stack.resume("b", 40.0, 100.0)
    assert server.stack.next_return(200.0) == (130.0, [])
    found = server.stack.next_return(200.0)
    assert found is not None
    assert [len(one.digests) for one in found.chains] == [6]


def test_memory_alone_has_nothing_to_return() -> None:
    server = Server(8)
    talk(server, "a", keys("chain", 4))
    server.stack.resume("a", 30.0, 100.0)
    assert server.stack.next_return(200.0) is None


async def test_its_blocks_come_up_in_time_and_within_the_budget(tmp_path: Path) -> None:
    tiers = ["dram:4MiB", f"nvme:{tmp_path}/tier:32MiB"]
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        (server,) = running.servers
        stack = server.stack

        async def write(chain: Sequence[bytes], session: str) -> None:
            await pool.write(NAMESPACE, chain, values(chain, BLOCK), session=session)

        def in_memory(chain: Sequence[bytes]) -> int:
            return sum(stack.front.peek(NAMESPACE, 0, digest) is not None for digest in chain)

        def returned() -> int:
            return server.stats(asyncio.get_running_loop().time()).counters["returned_blocks"]

        small, large = keys("small", 4), keys("large", 40)
        await write(small, "small")
        await write(large, "large")
        for number in range(3):
            await write(keys(f"{number}", 60), "")
        await eventually(lambda: not stack.waiting and not stack.front.pins)
        assert in_memory(small + large) == 0
        assert await pool.hint("small", resume_in=4.0) is HintStatus.ACCEPTED
        await eventually(lambda: in_memory(small) == 4, within_s=8)
        # Before they are read: a reader of blocks that are on their way brings them up itself.
        await eventually(lambda: returned() == 4)
        blocks = buffers(4, BLOCK)
        results = await pool.read(NAMESPACE, small, blocks)
        assert [result.status for result in results] == [ReadStatus.HIT] * 4
        assert blocks == values(small, BLOCK)
        assert returned() == 4
        # An eighth of the memory: 8 blocks, of which the first session may still have 4.
        await pool.hint("large", resume_in=4.0)
        await eventually(lambda: in_memory(large) >= 4, within_s=8)
        await asyncio.sleep(0.5)
        assert 4 <= in_memory(large) <= 8
        assert in_memory(large[:4]) == 4, "the head first"
        stack.check()


async def test_a_session_whose_prompt_has_arrived_returns_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its chain, in as many steps as that takes, although its time has passed."""
    monkeypatch.setattr(prefetcher, "_STEP_BLOCKS", 2)
    monkeypatch.setattr(tiered_store, "FRESH_S", 0.0)
    tiers = ["dram:4MiB", f"nvme:{tmp_path}/tier:32MiB"]
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        (server,) = running.servers
        stack = server.stack
        chain = keys("chain", 6)
        await pool.write(NAMESPACE, chain, values(chain, BLOCK), session="a")
        for number in range(3):
            filler = keys(f"{number}", 40)
            await pool.write(NAMESPACE, filler, values(filler, BLOCK))
        await eventually(lambda: not stack.waiting and not stack.front.pins)

        def in_memory() -> int:
            return sum(stack.front.peek(NAMESPACE, 0, digest) is not None for digest in chain)

        assert in_memory() == 0
        await asyncio.sleep(0.2)  # an arrival so soon after the write may be that of the write
        await pool.arrived("a")
        # A step that a busy machine holds up makes the ones after it wait, by the budget.
        await eventually(lambda: in_memory() == 6, within_s=30)
        counters = server.stats(asyncio.get_running_loop().time()).counters
        assert counters["returned_blocks"] == counters["prefetched_blocks"] == 6
