"""A match sends marks for what a master has found before, and is right all the same.

The masters are real; only the network between is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvpool import ClientConfig, Match, Namespace, ReadStatus
from kvpool.client.location_cache import KnownSpans
from kvpool.client.lookup import Lookup
from kvpool.client.masters import Masters
from kvpool.config import MasterConfig
from kvpool.errors import DeadlineExceeded, PeerError
from kvpool.master.service import Master
from kvpool.ops.metrics import pages_of_master
from kvpool.protocols import Link
from kvpool.spans import SPAN_BLOCKS, marks_of
from kvpool.types import ServerStats
from kvpool.wire import messages as wire
from tests.client.test_masters import ScriptedNetwork, later
from tests.conftest import keys

ONE, TWO = Namespace("one"), Namespace("two", parts=2)
CHAIN = keys("chain", 60 * SPAN_BLOCKS + 5)
TOKEN = bytes(16)


class NearMaster:
    """A link to a master in this process."""

    def __init__(self) -> None:
        self.master = Master(MasterConfig(), cast(Any, None))
        self.asked: list[wire.Find] = []
        self.is_silent = False
        self._sent: dict[str, int] = {}
        for server in ("s", "t"):
            where = (server, 1, TOKEN, "host", [f"x://{server}"], ["dram"])
            self.handle(wire.Register(*where, 1 << 40))

    async def request(
        self, type: int, body: bytes, *, deadline: float, hasty: bool = False
    ) -> tuple[int, bytes]:
        if self.is_silent:
            raise DeadlineExceeded("silent")
        kind = wire.message_type(type)
        assert kind is not None
        message = wire.decode(kind, type, body)
        assert isinstance(message, wire.Find)
        self.asked.append(message)
        return self.master.handle(type, body)

    def handle(self, message: wire.Message) -> None:
        self.master.handle(*wire.encode(message))

    def announce(
        self,
        digests: Sequence[bytes],
        status: ReadStatus = ReadStatus.HIT,
        server: str = "s",
        part: int = 0,
        namespace: Namespace = ONE,
    ) -> None:
        for first in range(0, len(digests), 1024):
            packed = b"".join(digests[first : first + 1024])
            name = namespace.name, namespace.parts
            change = wire.BlockChanges(*name, len(digests[0]), packed, part, 0, status)
            number = self._sent[server] = self._sent.get(server, 0) + 1
            self.handle(wire.Announce(server, 1, TOKEN, number, [change]))

    def taken(self) -> list[tuple[str, int, int]]:
        """The questions since the last call: kind, marks, keys."""
        asked, self.asked = self.asked, []
        return [
            (
                "marks" if one.before or one.behind else "keys",
                len(one.before) // 8,
                len(one.digests) // one.digest_size,
            )
            for one in asked
        ]

    def close(self) -> None:
        pass


def lookup_of(*masters: Link) -> Lookup:
    network = ScriptedNetwork()
    network.masters.update({f"m{number}:1": one for number, one in enumerate(masters)})
    config = ClientConfig(masters=list(network.masters))
    return Lookup(Masters(network, config), cast(Any, None))


async def match(
    lookup: Lookup, chain: Sequence[bytes] = CHAIN, namespace: Namespace = ONE
) -> Match:
    return await lookup.match(namespace, chain, later(5))


async def found(
    lookup: Lookup, chain: Sequence[bytes] = CHAIN, namespace: Namespace = ONE
) -> tuple[int, ReadStatus]:
    runs, length, stopped = await match(lookup, chain, namespace)
    covered = [position for run in runs for position in range(run.first, run.last + 1)]
    assert covered == list(range(length))
    return length, stopped


async def test_what_was_found_is_asked_for_with_marks() -> None:
    master = NearMaster()
    lookup = lookup_of(master)
    master.announce(CHAIN)
    assert await found(lookup) == (len(CHAIN), ReadStatus.HIT)
    assert master.taken() == [("marks", 0, 512), ("keys", 0, len(CHAIN) - 512)]
    assert await found(lookup) == (len(CHAIN), ReadStatus.HIT)
    assert master.taken() == [("marks", 60, 5)]
    # The next prompt of the conversation: one question, too.
    longer = [*CHAIN, *keys("new", 300)]
    assert await found(lookup, longer) == (len(CHAIN), ReadStatus.NEVER_WRITTEN)
    assert master.taken() == [("marks", 60, 305)]
    assert await found(lookup, CHAIN[: 2 * SPAN_BLOCKS]) == (2 * SPAN_BLOCKS, ReadStatus.HIT)
    assert master.taken() == [("marks", 1, SPAN_BLOCKS)]


@pytest.mark.parametrize("position", [0, 31, 32, 1000, len(CHAIN) - 1])
async def test_a_block_that_is_gone_is_found_missing(position: int) -> None:
    master = NearMaster()
    lookup, other = lookup_of(master), lookup_of(master)
    master.announce(CHAIN)
    await found(lookup)
    master.announce([CHAIN[position]], ReadStatus.CORRUPT)
    for _ in range(2):
        assert await found(lookup) == (position, ReadStatus.CORRUPT)
        assert await found(other) == (position, ReadStatus.CORRUPT)
    assert len(master.taken()) <= 2 + 2 * 3
    master.announce([CHAIN[position]])
    for _ in range(2):
        assert await found(lookup) == (len(CHAIN), ReadStatus.HIT)
    assert master.taken()[-1] == ("marks", 60, 5)


async def test_a_hole_in_the_first_page_does_not_cost_the_keys_of_all_others() -> None:
    """The map has forgotten one span, not the blocks: 512 keys, then marks again."""
    master = NearMaster()
    lookup = lookup_of(master)
    master.announce(CHAIN)
    await found(lookup)
    master.announce([CHAIN[40]], ReadStatus.EVICTED)
    master.announce([CHAIN[40]])
    master.taken()
    assert await found(lookup) == (len(CHAIN), ReadStatus.HIT)
    assert master.taken() == [("marks", 60, 5), ("keys", 0, 512), ("marks", 43, 5)]


async def test_parts_and_runs_are_those_of_a_match_by_keys() -> None:
    master = NearMaster()
    lookup = lookup_of(master)
    chain = CHAIN[:200]
    master.announce(chain, namespace=TWO)
    master.announce(chain[:100], server="t", part=1, namespace=TWO)
    for _ in range(2):
        assert await found(lookup, chain, TWO) == (100, ReadStatus.PART_MISSING)
    master.announce(chain[100:], server="t", part=1, namespace=TWO)
    for _ in range(2):
        assert await found(lookup, chain, TWO) == (200, ReadStatus.HIT)
    master.announce(chain[50:], server="t", namespace=TWO)
    first, second = await match(lookup, chain, TWO), await match(lookup, chain, TWO)
    assert [(run.first, run.last, len(run.replicas)) for run in second.runs] == [
        (0, 49, 2),
        (50, 199, 3),
    ]
    assert second == first


async def test_a_server_that_is_lost_in_the_middle_of_a_chain() -> None:
    master = NearMaster()
    lookup = lookup_of(master)
    master.announce(CHAIN[:1000])
    master.announce(CHAIN[1000:], server="t")
    assert await found(lookup) == (len(CHAIN), ReadStatus.HIT)
    master.handle(wire.Leave("t", 1, TOKEN))
    for _ in range(2):
        assert await found(lookup) == (1000, ReadStatus.SERVER_LOST)
    master.handle(wire.Heartbeat("t", 1, TOKEN, ServerStats(), sequence=1))
    for _ in range(2):
        assert await found(lookup) == (len(CHAIN), ReadStatus.HIT)


async def test_a_master_that_knows_less_is_asked_for_keys() -> None:
    """One has the blocks and has seen no chain, one has half of the blocks, one has none."""
    all_of_it, unasked, half, empty = (NearMaster() for _ in range(4))
    all_of_it.announce(CHAIN)
    unasked.announce(CHAIN)
    half.announce(CHAIN[:500])
    masters = (all_of_it, unasked, half, empty)
    lookup = lookup_of(*masters)
    whole = len(CHAIN), ReadStatus.HIT
    for answering, expected in (
        (all_of_it, whole),
        (unasked, whole),
        (half, (500, ReadStatus.NEVER_WRITTEN)),
        (empty, (0, ReadStatus.NEVER_WRITTEN)),
        (None, (0, ReadStatus.NO_MASTER)),
        (all_of_it, whole),
        (half, (500, ReadStatus.NEVER_WRITTEN)),
    ):
        for master in masters:
            master.is_silent = master is not answering
        assert await found(lookup) == expected
        assert await found(lookup) == expected


async def test_a_namespace_of_its_own_for_each_mark() -> None:
    master = NearMaster()
    lookup = lookup_of(master)
    master.announce(CHAIN)
    await found(lookup)
    other = Namespace("other")
    assert await found(lookup, CHAIN, other) == (0, ReadStatus.NEVER_WRITTEN)
    assert await found(lookup) == (len(CHAIN), ReadStatus.HIT)


async def test_a_prompt_counts_once_and_all_of_it_is_asked_for() -> None:
    master = NearMaster()
    lookup = lookup_of(master)
    chain = keys("cold", 4000)
    for _ in range(3):
        assert await found(lookup, chain) == (0, ReadStatus.NEVER_WRITTEN)
    assert master.taken() == [("marks", 0, 512)] * 3
    assert master.master.clients.matches[ReadStatus.NEVER_WRITTEN] == 3
    # The rest of it by its marks.
    assert len(master.master.clients._demand._samples[""].asked) == 4000 // SPAN_BLOCKS
    master.announce(CHAIN)
    await found(lookup)
    master.announce([CHAIN[40]], ReadStatus.EVICTED)
    asked, hits = master.master.clients.asked_blocks, master.master.clients.found_blocks
    await found(lookup)
    assert master.master.clients.found_blocks - hits == 40
    assert master.master.clients.asked_blocks - asked == 32 + 512
    assert master.master.clients.matches[ReadStatus.EVICTED] == 1
    assert master.master.clients.unknown_spans == 1
    page = pages_of_master(master.master)["/metrics"]().body.decode()
    assert "kvpool_master_unknown_spans_total 1.0" in page


async def test_a_session_arrives_once_for_a_match() -> None:
    master = NearMaster()
    lookup = lookup_of(master)
    master.announce(CHAIN)
    await found(lookup)
    master.announce([CHAIN[0]], ReadStatus.EVICTED)
    master.announce([CHAIN[0]])
    master.taken()
    await lookup.match(ONE, CHAIN, later(5), "chat")
    assert [one.session for one in master.asked] == ["chat", "", ""]


REPLICA = [("s", "dram", 0)]


@pytest.mark.parametrize(
    "answer",
    [
        wire.FindReply([], b""),
        wire.FindReply([(0, 30, REPLICA)], b""),  # in the middle of a span
        wire.FindReply([(32, 63, REPLICA)], b""),  # with a gap before it
        wire.FindReply([(0, len(CHAIN) - 6, REPLICA)], b""),  # behind the marks
    ],
)
async def test_a_master_that_always_asks_for_more_ends_the_match(answer: wire.FindReply) -> None:
    class Endless(NearMaster):
        lies = False

        async def request(
            self, type: int, body: bytes, *, deadline: float, hasty: bool = False
        ) -> tuple[int, bytes]:
            real = await super().request(type, body, deadline=deadline)
            return wire.encode(answer) if self.lies else real

    master = Endless()
    lookup = lookup_of(master)
    master.announce(CHAIN)
    await found(lookup)
    master.taken()
    master.lies = True
    assert (await match(lookup)).stopped is ReadStatus.NO_MASTER
    assert len(master.taken()) <= 2


@pytest.mark.parametrize(
    "wrong",
    [
        wire.Find("one", 1, 32, b"".join(CHAIN[:2]), True, before=bytes(9)),
        wire.Find("one", 1, 32, b"".join(CHAIN[:2]), True, behind=bytes(7)),
        wire.Find("one", 1, 32, b"", True, before=bytes(8)),
        wire.Find("one", 1, 32, CHAIN[0], False, before=bytes(8)),
        wire.Find("one", 1, 32, CHAIN[0], False, behind=bytes(8)),
        wire.Find("one", 1, 32, bytes(33), True, before=bytes(8)),
        wire.Find("one", 1, 32, CHAIN[0], True, before=bytes(8 * wire.SPANS_MAX + 8)),
    ],
)
async def test_what_no_client_sends_is_refused(wrong: wire.Find) -> None:
    with pytest.raises(PeerError):
        NearMaster().handle(wrong)


def test_the_known_spans_are_bounded_and_forget_the_oldest() -> None:
    known = KnownSpans(limit=100)
    marks = marks_of(b"".join(keys("x", 200 * SPAN_BLOCKS)), 32)
    for first in range(0, 200, 10):
        known.add(marks[first : first + 10])
        known.add(marks[first : first + 10])
        assert len(known) <= 100
    assert known.count(marks, 0, 200) == 0
    assert known.count(marks, 100, 200) == 100  # of both generations
    assert known.count(marks, 190, 195) == 5
    assert known.count(marks, 195, 190) == 0
    known.discard(marks[195:])
    assert known.count(marks, 190, 200) == 5
