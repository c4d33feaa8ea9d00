"""A read goes on from server to server until each block is there or has no replica left."""

from __future__ import annotations

from kvpool import ClientConfig, Namespace, ReadResult, ReadStatus, dev
from kvpool.client.attempts import Attempt
from kvpool.client.reader import LocationSource, ReadState
from kvpool.protocols import ReadOptions
from tests.conftest import NAMESPACE, buffers, keys, values

HIT, MISS = ReadResult(ReadStatus.HIT, 1), ReadResult(ReadStatus.EVICTED)


def state(*candidates: str, source: LocationSource = LocationSource.MASTER) -> ReadState:
    """One block for each; its servers in the order in which they are asked."""
    count = len(candidates)
    return ReadState(
        ReadOptions(Namespace("test"), 0),
        keys("chain", count),
        [()] * count,
        {},
        [1] * count,
        [MISS] * count,
        [list(reversed(servers)) for servers in candidates],
        0.0,
        source,
    )


def test_what_was_read_is_recorded() -> None:
    read = state("ab", "ab")
    assert read.record(Attempt("a", [0, 1]), [HIT, MISS]) == [read.digests[0]]
    assert read.results == [HIT, MISS]


def test_a_deferred_server_comes_last_and_is_not_hedged_again() -> None:
    read = state("ab")
    assert read.candidates[0].pop() == "a"
    assert read.is_hedged(Attempt("a", [0]))
    read.defer("a", [0])
    assert read.candidates == [["a", "b"]]
    assert not read.is_hedged(Attempt("a", [0]))
    assert read.is_hedged(Attempt("b", [0]))


def test_a_deferred_server_of_the_cache_is_named_again_by_a_master() -> None:
    read = state("a", source=LocationSource.CACHE)
    read.candidates[0].pop()
    read.defer("a", [0])
    assert read.candidates == [[]]


async def test_blocks_of_a_lost_server_are_read_from_different_replicas() -> None:
    chain = keys("chain", 24)
    async with dev.serve("16MiB", servers=4) as running:
        config = ClientConfig(masters=[running.address], transports=["tcp"])
        async with running.pool(config) as writer, running.pool(config) as pool:
            for digest, block in zip(chain, values(chain), strict=True):
                await writer.write(NAMESPACE, [digest], [block], copies=2)
            match = await pool.match(NAMESPACE, chain)
            holders = {replica.server for run in match.runs for replica in run.replicas}
            assert len(holders) > 2
            lost = next(server for server in running.servers if server.server in holders)
            await lost.close()
            got = buffers(len(chain))
            results = await pool.read(NAMESPACE, chain, got, match=match)
    assert {result.status for result in results} == {ReadStatus.HIT}
    assert got == values(chain)
