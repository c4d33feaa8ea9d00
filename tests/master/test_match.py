"""A match by spans finds what a lookup of each block finds, whatever came and went (G5, G9)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvpool.master.state.block_map import BlockMap
from kvpool.master.state.directory import ChainMatch, Directory
from kvpool.master.state.server_table import ServerTable
from kvpool.master.state.sweeper import Sweeper
from kvpool.spans import SPAN_BLOCKS, MarkedChain, marks_of, pack_marks, unpack_marks
from kvpool.testing.invariants import check_invariants
from kvpool.types import Match, Namespace, ReadStatus, ServerStats
from tests.conftest import key, keys
from tests.master.test_directory import directory_of, registered
from tests.support.sweeping import sweep_all

ONE = Namespace("one")
TWO = Namespace("two", parts=2)
SPANS = 4
CHAIN = keys("chain", SPANS * SPAN_BLOCKS + 5)


def spans_of(directory: Directory, namespace: Namespace = ONE) -> int:
    blocks = directory.blocks.get(namespace)
    return len(blocks.spans) if blocks is not None else 0


def by_marks(
    directory: Directory, chain: Sequence[bytes], unsent: int, namespace: Namespace = ONE
) -> ChainMatch:
    """The keys of the first spans are not sent."""
    packed, size = b"".join(chain), len(chain[0])
    marks = marks_of(packed, size)[:unsent]
    page = MarkedChain(size, packed[len(marks) * SPAN_BLOCKS * size :], marks)
    return directory.match_chain(namespace, page)


def block_by_block(directory: Directory, namespace: Namespace, chain: Sequence[bytes]) -> Match:
    runs, reasons = directory.find(namespace, chain)
    length = min(reasons, default=len(chain))
    before = [run for run in runs if run.first < length]
    return Match(tuple(before), length, reasons.get(length, ReadStatus.HIT))


def learned(*servers: str, chain: Sequence[bytes] = CHAIN) -> Directory:
    """Every server has the chain, and the map knows its spans."""
    directory = directory_of(*servers)
    for server in servers:
        directory.stored(server, ONE, 0, 0, chain)
    assert directory.match(ONE, chain).length == len(chain)
    assert spans_of(directory) == len(chain) // SPAN_BLOCKS
    check_invariants(directory)
    return directory


@pytest.mark.parametrize("seed", range(12))
def test_spans_and_single_blocks_give_one_answer(seed: int) -> None:
    """Chains that share heads, on three servers that evict, lose, move and list again."""
    rng = random.Random(seed)
    directory = Directory(ServerTable(timeout_s=3.0, forget_s=60.0))
    sweeper = Sweeper(directory)
    epochs = dict.fromkeys(("s0", "s1", "s2"), 0)
    has: dict[str, set[tuple[Namespace, int, bytes]]] = {server: set() for server in epochs}

    def start(server: str) -> None:
        epochs[server] += 1
        has[server].clear()
        assert registered(directory, server, epochs[server]) is None

    for server in epochs:
        start(server)
    trunk = keys("trunk", 3 * SPAN_BLOCKS)
    chains = [trunk]
    for number in range(3):
        stem = rng.choice(chains)
        chains.append(stem[: rng.randrange(len(stem))] + keys(f"branch {number}", 90))
    learned = 0
    for _ in range(150):
        server, step = rng.choice(sorted(epochs)), rng.random()
        namespace, part = rng.choice([(ONE, 0), (ONE, 0), (TWO, 0), (TWO, 1)])
        chain = rng.choice(chains)
        if step < 0.4:
            first = rng.choice([0, 0, rng.randrange(len(chain))])
            some = chain[first : rng.choice([len(chain), rng.randint(first, len(chain))])]
            directory.stored(server, namespace, part, rng.choice([0, 0, 1]), some)
            has[server] |= {(namespace, part, one) for one in some}
        elif step < 0.7:
            some = rng.choice([chain[-rng.randint(1, 9) :], [rng.choice(chain)]])
            reason = rng.choice([ReadStatus.EVICTED, ReadStatus.REMOVED, ReadStatus.CORRUPT])
            directory.removed(server, namespace, part, some, reason)
            has[server] -= {(namespace, part, one) for one in some}
        elif step < 0.75:
            start(server)
        elif step < 0.8:
            directory.servers.leave(server, epochs[server])
        elif step < 0.88:
            assert directory.servers.heartbeat(server, epochs[server], ServerStats(), 0.0)
        elif step < 0.94:
            sequence = directory.servers.records[server].inventories.sequence + 1
            directory.servers.check_piece(server, epochs[server], sequence, 0, last=True)
            for name, number, digest in sorted(has[server], key=repr):
                directory.stored(server, name, number, 0, [digest])
            directory.servers.end_inventory(server)
        else:
            sweeper.step(rng.randint(1, 200))
        for name in (ONE, TWO):
            asked = rng.choice(chains)
            asked = asked[: rng.randint(1, len(asked))]
            exact = block_by_block(directory, name, asked)
            assert directory.match(name, asked) == exact
            unsent = rng.randint(0, (len(asked) - 1) // SPAN_BLOCKS)
            found = by_marks(directory, asked, unsent, name)
            if found.stopped is None:  # nothing is claimed of what the map cannot know
                assert found.length <= exact.length
                assert found.length % SPAN_BLOCKS == 0
                assert found.length < unsent * SPAN_BLOCKS
            else:
                assert Match(tuple(found.runs), found.length, found.stopped) == exact
            learned = max(learned, spans_of(directory, name))
        check_invariants(directory)
    assert learned


@pytest.mark.parametrize("position", [0, SPAN_BLOCKS - 1, SPAN_BLOCKS, 70, len(CHAIN) - 1])
def test_a_hole_ends_the_match_where_it_is_and_has_its_reason(position: int) -> None:
    directory = learned("s")
    directory.removed("s", ONE, 0, [CHAIN[position]], ReadStatus.CORRUPT)
    check_invariants(directory)
    match = directory.match(ONE, CHAIN)
    assert (match.length, match.stopped) == (position, ReadStatus.CORRUPT)
    found = by_marks(directory, CHAIN, SPANS)
    if position < SPANS * SPAN_BLOCKS:  # the span is none any more, and the others still are
        assert found.stopped is None
        assert found.length == position // SPAN_BLOCKS * SPAN_BLOCKS
        assert spans_of(directory) == SPANS - 1
    else:
        assert (found.length, found.stopped) == (position, ReadStatus.CORRUPT)
    directory.stored("s", ONE, 0, 0, [CHAIN[position]])
    assert directory.match(ONE, CHAIN).length == len(CHAIN)
    assert spans_of(directory) == SPANS
    assert by_marks(directory, CHAIN, SPANS).stopped is ReadStatus.HIT


def test_a_server_that_is_lost_in_the_middle_of_a_chain_ends_the_match_there() -> None:
    """Its spans stay known: the server may come back with all of them."""
    directory = directory_of("s", "t")
    directory.stored("s", ONE, 0, 0, CHAIN[: 2 * SPAN_BLOCKS])
    directory.stored("t", ONE, 0, 0, CHAIN[2 * SPAN_BLOCKS :])
    assert len(directory.match(ONE, CHAIN).runs) == 2
    directory.servers.leave("t", 1)
    match = directory.match(ONE, CHAIN)
    assert (match.length, match.stopped) == (2 * SPAN_BLOCKS, ReadStatus.SERVER_LOST)
    # A reason belongs to a block, and its key is not here.
    assert by_marks(directory, CHAIN, SPANS)[1:] == (2 * SPAN_BLOCKS, None)
    assert directory.servers.heartbeat("t", 1, ServerStats(), 1.0)
    assert by_marks(directory, CHAIN, SPANS)[1:] == (len(CHAIN), ReadStatus.HIT)
    directory.servers.leave("t", 1)
    assert registered(directory, "t", 2) is None  # it has lost them
    sweep_all(directory)
    check_invariants(directory)
    assert spans_of(directory) == 2


def test_a_master_that_knows_nothing_asks_for_the_keys() -> None:
    directory = directory_of("s")
    assert by_marks(directory, CHAIN, 2)[1:] == (0, None)
    directory.stored("s", ONE, 0, 0, CHAIN)  # it has the blocks, and never saw the chain
    assert by_marks(directory, CHAIN, 2)[1:] == (0, None)
    other = Namespace("other")
    directory.match(ONE, CHAIN)
    assert by_marks(directory, CHAIN, 2, other)[1:] == (0, None)  # a mark is of one namespace


def test_a_block_is_in_one_span_only() -> None:
    """Who asks from the middle of a chain has other spans, which the map does not learn."""
    directory = learned("s")
    shifted = CHAIN[7:]
    for _ in range(2):
        assert directory.match(ONE, shifted).length == len(shifted)
        assert directory.match(ONE, CHAIN).length == len(CHAIN)
        assert spans_of(directory) == SPANS
        check_invariants(directory)
    directory.removed("s", ONE, 0, [CHAIN[20]], ReadStatus.EVICTED)
    assert directory.match(ONE, shifted).length == 13
    assert directory.match(ONE, CHAIN).length == 20


def test_a_block_twice_in_a_chain_is_in_no_span() -> None:
    directory = directory_of("s")
    chain = CHAIN[:20] * 2
    directory.stored("s", ONE, 0, 0, chain)
    assert directory.match(ONE, chain).length == len(chain)
    assert spans_of(directory) == 0
    check_invariants(directory)


def test_the_order_of_blocks_is_part_of_a_span() -> None:
    directory = learned("s")
    twisted = [*CHAIN[:10], key("unknown"), *CHAIN[11:]]
    assert directory.match(ONE, twisted)[1:] == (10, ReadStatus.NEVER_WRITTEN)
    swapped = [CHAIN[1], CHAIN[0], *CHAIN[2:]]
    assert directory.match(ONE, swapped).length == len(CHAIN)
    assert by_marks(directory, swapped, 1)[1:] == (0, None)


def test_spans_take_no_more_than_a_32nd_of_the_blocks_and_go_with_them() -> None:
    directory = learned("s")
    for first in range(len(CHAIN)):
        directory.match(ONE, CHAIN[first:])
    assert spans_of(directory) == SPANS
    directory.removed("s", ONE, 0, CHAIN, ReadStatus.EVICTED)
    assert spans_of(directory) == 0
    assert len(directory) == 0


def test_marks_travel_as_they_are() -> None:
    marks = marks_of(b"".join(CHAIN), 32)
    assert len(marks) == SPANS
    assert list(unpack_marks(pack_marks(marks))) == marks
    with pytest.raises(ValueError, match="multiple of 8"):
        unpack_marks(bytes(9))
    assert marks_of(b"".join(CHAIN[:31]), 32) == []


def test_the_map_of_a_namespace_forgets_spans_block_by_block() -> None:
    blocks = BlockMap()
    blocks.split(5 << 64)  # in no span
    blocks.split(5 << 64 | 77)  # in one that is none any more
    assert len(blocks.spans) == 0


def test_an_empty_chain_matches() -> None:
    match = Directory(ServerTable(timeout_s=3.0, forget_s=60.0)).match(ONE, [])
    assert (match.runs, match.length) == ((), 0)
