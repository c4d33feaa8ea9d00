"""The rounds of a load overlap, and stop at a miss. Time is that of the loop's own clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import Match, Namespace, ReadStatus, Unavailable
from kvpool.types import Replica, Run
from kvpool_connector.memory.block_memory import READS_MAX
from kvpool_connector.memory.load_rounds import LoadRounds, Span
from kvpool_connector.records.messages import GroupBlocks
from tests.conftest import keys
from tests.support.virtual_time import virtual_time

MIB = 1 << 20


def rounds(
    blocks: int,
    block_bytes: int = MIB,
    parts: int = 1,
    at_once: int = READS_MAX - 1,
    match: Match | None = None,
) -> LoadRounds:
    pool: Any = None
    memory: Any = SimpleNamespace(
        parts=parts, block_bytes=block_bytes, blocks_per_transfer=1 << 30, reads_at_once=at_once
    )
    chain = GroupBlocks(
        0, tuple(keys("rounds", blocks)), tuple(range(100, 100 + blocks)), match=match
    )
    return LoadRounds(pool, Namespace("rounds"), chain, memory, until=60.0)


class Stages:
    """What a round passes: each stage takes one at a time, for seconds per block."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.turns = [asyncio.Lock() for _ in seconds]
        self.under_way = self.most = 0

    async def read_part(self, span: Span, part: int) -> set[int]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for seconds, turn in zip(self.seconds, self.turns, strict=True):
            async with turn:
                await asyncio.sleep(seconds * (span.last - span.first))
        self.under_way -= 1
        return set(range(100 + span.first, 100 + span.last))


@pytest.mark.parametrize(
    "seconds",
    [(0.01, 0.01, 0.01), (0.01, 0.004, 0.004), (0.004, 0.01, 0.004), (0.004, 0.004, 0.01)],
)
@virtual_time
async def test_a_load_takes_little_longer_than_its_slowest_part(seconds: tuple[float, ...]) -> None:
    """Network, verification and copies of 64 MiB, whichever is the slowest."""
    stages = Stages(*seconds)
    assert await rounds(64).run(stages.read_part) == set(range(100, 164))
    assert asyncio.get_running_loop().time() <= 1.15 * 64 * max(seconds)
    assert stages.most < READS_MAX  # one is left for another load


@pytest.mark.parametrize("servers", [1, 2, 8])
@virtual_time
async def test_a_load_into_memory_of_the_host_asks_the_servers_of_its_blocks_at_once(
    servers: int,
) -> None:
    """However small it is: the client takes different ones for reads at once."""
    replicas = tuple(Replica(f"s{number}", "dram", 0) for number in range(servers))
    match = Match((Run(0, 7, replicas),), 8, ReadStatus.HIT)
    stages = Stages(0.01)
    await rounds(8, at_once=1, match=match).run(stages.read_part)
    assert stages.most == min(servers, READS_MAX)
    large = Stages(0.01)  # the client shares each of its reads
    await rounds(64, at_once=1, match=match).run(large.read_part)
    assert large.most == min(servers, READS_MAX - 1)


@pytest.mark.parametrize("blocks", [4, 6, 8, 10, 16, 33])
@pytest.mark.parametrize("servers", [2, 3, 4])
@virtual_time
async def test_each_server_brings_its_share_of_a_load(servers: int, blocks: int) -> None:
    """Blocks of 1 MiB: none is idle while others have more than one block to bring."""
    replicas = tuple(Replica(f"s{number}", "dram", 0) for number in range(servers))
    match = Match((Run(0, blocks - 1, replicas),), blocks, ReadStatus.HIT)

    async def read_part(span: Span, part: int) -> set[int]:
        await asyncio.sleep(0.01 * (span.last - span.first))
        return set(range(100 + span.first, 100 + span.last))

    load = rounds(blocks, at_once=1, match=match)
    assert await load.run(read_part) == set(range(100, 100 + blocks))
    assert asyncio.get_running_loop().time() == pytest.approx(0.01 * -(-blocks // servers))


@pytest.mark.parametrize("missing", [0, 9, 31])
@virtual_time
async def test_nothing_is_read_behind_a_miss(missing: int) -> None:
    """But for rounds that were under way; what they brought counts."""
    spans: list[Span] = []

    async def read_part(span: Span, part: int) -> set[int]:
        spans.append(span)
        await asyncio.sleep(1.0)
        return set(range(100 + span.first, 100 + span.last)) - {100 + missing}

    found = await rounds(32).run(read_part)
    assert found == set(range(100, 100 + spans[-1].last)) - {100 + missing}
    assert spans[-1].last <= missing + 2 * READS_MAX


@virtual_time
async def test_a_part_that_lacks_a_block_is_the_last_that_is_read() -> None:
    """Of two parts: without the first one nobody needs the second."""
    read: list[tuple[int, int]] = []

    async def read_part(span: Span, part: int) -> set[int]:
        read.append((span.first, part))
        return set() if span.first == 2 else {100 + span.first, 101 + span.first}

    assert await rounds(4, parts=2).run(read_part) == {100, 101}
    assert read == [(0, 0), (0, 1), (2, 0)]


@virtual_time
async def test_an_error_leaves_when_no_round_is_under_way() -> None:
    """And as it is: the load says which one it was. A round that is cancelled may take its time."""
    ended = []

    async def read_part(span: Span, part: int) -> set[int]:
        if span.first:
            await asyncio.sleep(0.5)
            raise Unavailable("gone")
        try:
            await asyncio.sleep(9.0)
        finally:
            await asyncio.sleep(2.0)
            ended.append(asyncio.get_running_loop().time())
        return set()

    with pytest.raises(Unavailable, match="gone"):
        await rounds(4).run(read_part)
    assert ended == [2.5]
