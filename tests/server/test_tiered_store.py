"""Several tiers as one: nothing is lost on the way down, nothing wrong comes up."""

from __future__ import annotations

import itertools
import random

import pytest

from kvpool import registry
from kvpool.protocols import ReserveRequest
from kvpool.protocols.persistent_tier import Record
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.holdings import Limits
from kvpool.server.state.store import Store
from kvpool.server.state.tier_stores import SPAN, ColdStore, FileStore
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_invariants, inventory
from kvpool.types import ROOT, Extent, Namespace, Pin, ReadStatus, SessionHint, WriteStatus
from tests.conftest import key, keys

PAGE = 4096
ONE = Namespace("one")
TWO = Namespace("two", parts=2)
BIG = [1 << 30] * 64
Name = tuple[Namespace, int, bytes]


class Server:
    """A stack, its tiers' memory (whose bytes are in each extent), and a master that listens."""

    def __init__(
        self,
        *pages: int,
        front_tier: int = 0,
        write_back: bool = False,
        in_place: tuple[int, ...] = (),
        cold: bool = False,
    ) -> None:
        stores: list[Store] = [
            (FrontStore if tier == front_tier else FileStore)(count * PAGE, alignment=PAGE)
            for tier, count in enumerate(pages)
        ]
        self.stack = TieredStore(
            [*stores, *[ColdStore(1 << 30, PAGE)] * cold],
            front_tier=front_tier,
            write_back=write_back,
            in_place_tiers=in_place,
        )
        self.memory: list[dict[int, Name]] = [{} for _ in self.stack.stores]
        #: The tier with a file below memory, if there is one; what that remembers for a restart.
        self.base = len(pages) - 1 if len(pages) - 1 != front_tier else None
        self.records: dict[int, Name] = {}
        self.copies: list[TierTransfer] = []
        self.map: dict[Name, int] = {}
        #: Why a block is not there: of a part that has left, whichever it was.
        self.reasons: dict[tuple[Namespace, bytes], ReadStatus] = {}
        self.pins: list[tuple[int, Name, Pin]] = []
        self.open: dict[tuple[int, int], tuple[Name, Extent]] = {}
        self.now = 0.0

    def write(self, owner: int, namespace: Namespace, part: int, chain: list[bytes]) -> list[str]:
        """Reserve, fill and seal; what became of each block."""
        statuses = self.reserve(owner, namespace, part, chain)
        for held in [held for held in self.open if held[0] == owner]:
            self.seal(*held)
        return statuses

    def reserve(self, owner: int, namespace: Namespace, part: int, chain: list[bytes]) -> list[str]:
        self.now += 1
        parents = [ROOT, *chain[:-1]]
        answers = self.stack.reserve(
            owner, ReserveRequest(namespace, part, chain, parents, [PAGE] * len(chain)), self.now
        )
        for digest, answer in zip(chain, answers, strict=True):
            if answer.extent is not None:
                name = (namespace, part, digest)
                self.memory[self.stack.front_tier][answer.extent.offset] = name
                self.open[owner, answer.id] = (name, answer.extent)
        return [answer.status.name for answer in answers]

    def seal(self, owner: int, id: int) -> None:
        name, _ = self.open.pop((owner, id))
        self.stack.seal(owner, id, hash(name) & 0xFFFF, self.now)

    def read(
        self,
        owner: int,
        namespace: Namespace,
        part: int,
        chain: list[bytes],
        above: int | None = None,
    ) -> list[ReadStatus]:
        self.now += 1
        self.look()
        pins = self.stack.pin(
            owner, namespace, part, chain, self.now, BIG[: len(chain)], in_place_above=above
        )
        being_written = {name for name, _ in self.open.values()}
        for digest, pin in zip(chain, pins, strict=True):
            name = (namespace, part, digest)
            assert pin.tier not in self.stack.index.offline
            if pin.extent is not None:
                self.pins.append((owner, name, pin))
            if name in self.map:
                assert pin.status in (ReadStatus.HIT, ReadStatus.NOT_YET)
            elif name in being_written:
                assert pin.status is ReadStatus.BEING_WRITTEN
            else:
                assert pin.status is self.reasons.get((namespace, digest), ReadStatus.NEVER_WRITTEN)
        self.look()
        return [pin.status for pin in pins]

    def unpin(self, number: int) -> None:
        owner, _, pin = self.pins.pop(number)
        self.stack.unpin(owner, [pin])

    def drop(self, owner: int) -> None:
        self.stack.drop_owner(owner)
        self.pins = [held for held in self.pins if held[0] != owner]
        self.open = {held: what for held, what in self.open.items() if held[0] != owner}

    def start(self, size: int = 1 << 30) -> None:
        self.copies += self.stack.transfers.next_writebacks(size, 1 << 20, self.now)

    def stage(
        self, namespace: Namespace, part: int, chain: list[bytes], size: int = 1 << 30
    ) -> None:
        self.copies += self.stack.transfers.start_promotions(namespace, part, chain, size, self.now)

    def keep(self, entry: Entry) -> None:
        """Another object has this block."""
        cold, index, place = self.stack.stores[-1], entry.index, len(self.memory[-1]) * SPAN
        assert isinstance(cold, ColdStore)
        name = index.namespace, index.part, entry.digest
        record = Record(*name, entry.parent, place, entry.size, entry.checksum, 0)
        self.memory[-1][place] = name
        cold.add(record, entry.born)

    def lose(self, tier: int) -> None:
        self.stack.take_offline(tier)
        for _ in self.stack.drop_lost(tier):
            pass

    def finish(self, copy: TierTransfer, good: bool = True) -> None:
        """The bytes arrive as they are at the source *now*, which is when they are read."""
        name = self.memory[copy.source][copy.entry.offset]
        if good:
            self.memory[copy.target][copy.extent.offset] = name
            if copy.target == self.base:
                self.records[copy.extent.offset] = name
        self.stack.transfers.done(copy, good=good, now=self.now)
        self.look()

    def settle(self) -> None:
        """Copy until there is nothing left to copy."""
        while True:
            self.start()
            if not self.copies:
                return
            while self.copies:
                self.finish(self.copies.pop(0))

    def look(self) -> None:
        """Pinned memory holds what it should; the master's map is what readers would find; and the
        file remembers nothing that has left."""
        check_invariants(self.stack)
        for offset in self.stack.erasures.take():
            self.records.pop(offset, None)
        if self.base is not None and self.base not in self.stack.index.offline:
            index = self.stack.stores[self.base].index
            for offset, name in self.records.items():
                assert (entry := index.peek(*name)) is not None
                assert entry.offset == offset
        for _, name, pin in self.pins:
            assert pin.extent is not None
            tier = self.stack.front_tier if pin.tier is None else pin.tier
            assert self.memory[tier][pin.extent.offset] == name
        for namespace, part, digests, status, tier in self.stack.change_log.take():
            for name in [(namespace, part, digest) for digest in digests]:
                if status is ReadStatus.HIT:
                    if name not in self.map:
                        self.reasons.pop((namespace, name[2]), None)
                    self.map[name] = tier
                else:
                    self.map.pop(name, None)
                    self.reasons[namespace, name[2]] = status
        found = {}
        for entry in inventory(self.stack):
            found[entry.index.namespace, entry.index.part, entry.digest] = self.place(entry)
        assert self.map == found

    def place(self, entry: Entry) -> int:
        tier = entry.index.tier
        holder = self.stack.stores[tier].index.peek(
            entry.index.namespace, entry.index.part, entry.digest
        )
        assert holder is not None
        assert self.memory[tier][holder.offset] == (
            entry.index.namespace,
            entry.index.part,
            entry.digest,
        )
        return tier


def test_what_is_below_is_not_written_again() -> None:
    server = Server(4, 64)
    chain = keys("chain", 4)
    server.write(1, ONE, 0, chain)
    server.settle()
    server.write(1, ONE, 0, keys("other", 4))
    assert server.write(1, ONE, 0, chain) == ["ALREADY_STORED"] * 4


def test_a_full_tier_waits_for_the_base_and_for_nothing_else() -> None:
    server = Server(4, 64)
    server.write(1, ONE, 0, keys("first", 4))
    other = keys("other", 1)
    assert server.write(1, ONE, 0, other) == ["NO_SPACE"]
    server.start(PAGE)
    server.finish(server.copies.pop())
    # The head of a chain that is still here in full: its tail goes first, and is not copied yet.
    assert server.write(1, ONE, 0, other) == ["NO_SPACE"]
    server.settle()
    assert server.write(1, ONE, 0, other) == ["RESERVED"]


def flooded_while_read(*, write_back: bool = False) -> tuple[Server, bytes]:
    """Memory for 4 blocks: one with a copy below, read after the three that wait were written."""
    server = Server(4, 64, write_back=write_back)
    hot = key("hot")
    server.write(1, ONE, 0, [hot])
    server.copies += server.stack.transfers.try_writeback(server.now)
    server.settle()
    for number in range(3):
        assert server.write(1, ONE, 0, [key(f"flood {number}")]) == ["RESERVED"]
    assert server.read(2, ONE, 0, [hot]) == [ReadStatus.HIT]
    server.drop(2)
    return server, hot


@pytest.mark.parametrize("begun", [0, 1, 3])
@pytest.mark.parametrize("write_back", [False, True])
def test_a_writer_waits_for_the_disk_before_it_evicts_what_was_used_since(
    write_back: bool, begun: int
) -> None:
    """Only that one has a copy below. Each block of a flood took its place, and each of its readers
    waited for the disk, and for room."""
    server, hot = flooded_while_read(write_back=write_back)
    for _ in range(0 if write_back else begun):
        server.start(PAGE)
    assert server.write(1, ONE, 0, [key("late")]) == ["NO_SPACE"]
    assert server.stack.is_held  # so the connection waits
    server.start(PAGE)
    server.finish(server.copies.pop(0))
    assert server.write(1, ONE, 0, [key("late")]) == ["RESERVED"]
    assert server.stack.front.index.peek(ONE, 0, hot) is not None
    assert server.stack.front.index.peek(ONE, 0, key("flood 0")) is None
    server.look()


def test_a_writer_waits_for_no_disk_where_the_oldest_block_has_a_copy() -> None:
    server = Server(4, 64)
    server.write(1, ONE, 0, keys("old", 1))
    server.settle()
    server.write(1, ONE, 0, keys("flood", 3))
    assert server.write(1, ONE, 0, [key("late")]) == ["RESERVED"]
    assert server.stack.front.index.peek(ONE, 0, keys("old", 1)[0]) is None


def test_a_writer_waits_a_second_and_no_longer() -> None:
    """The disk may be slow: a write is not refused in order that one block stays. The second is of
    one block: the next one waits, too."""
    server, hot = flooded_while_read()

    def write(name: str) -> WriteStatus:
        request = ReserveRequest(ONE, 0, [key(name)], [ROOT], [PAGE])
        (answer,) = server.stack.reserve(1, request, server.now)
        return answer.status

    assert write("late") is WriteStatus.NO_SPACE
    server.now += 0.9
    assert write("late") is WriteStatus.NO_SPACE
    assert write("another") is WriteStatus.NO_SPACE
    server.now += 0.9
    assert write("late") is WriteStatus.NO_SPACE
    server.now += 1.0
    assert write("late") is WriteStatus.RESERVED
    assert server.stack.front.index.peek(ONE, 0, hot) is None


def test_a_writer_waits_for_no_disk_that_takes_no_writes() -> None:
    server, hot = flooded_while_read()
    server.start()
    assert len(server.copies) == 3
    list(server.stack.queue.stop_writing())
    assert server.write(1, ONE, 0, [key("late")]) == ["RESERVED"]
    assert server.stack.front.index.peek(ONE, 0, hot) is None


def test_a_writer_waits_for_the_block_that_was_used_least_recently() -> None:
    """With write-back that one goes down first, and not the one that came to memory first."""
    server, hot = flooded_while_read(write_back=True)
    server.read(2, ONE, 0, [key("flood 0")])
    server.drop(2)
    assert server.write(1, ONE, 0, [key("late")]) == ["NO_SPACE"]
    server.settle()
    assert server.write(1, ONE, 0, [key("late")]) == ["RESERVED"]
    assert server.stack.front.index.peek(ONE, 0, hot) is not None
    assert server.stack.front.index.peek(ONE, 0, key("flood 1")) is None


def test_a_reader_takes_the_place_of_what_another_has_read() -> None:
    """It waits for its own block, and not for the disk to write others first."""
    server, hot = flooded_while_read()
    server.settle()
    server.write(1, ONE, 0, keys("new", 3))
    server.read(2, ONE, 0, [hot])
    server.drop(2)
    server.stage(ONE, 0, [key("flood 0")])
    assert [copy.target for copy in server.copies] == [0]
    assert server.stack.front.index.peek(ONE, 0, hot) is None
    assert server.stack.backing.index.peek(ONE, 0, hot) is not None


def test_a_writer_waits_for_no_disk_to_keep_a_further_copy() -> None:
    """Of a block that another server has, too."""
    server = Server(4, 64)
    now = server.now = 1.0
    request = ReserveRequest(ONE, 0, keys("copy", 1), [ROOT], [PAGE], copies=[0])
    (answer,) = server.stack.reserve(1, request, now)
    assert answer.extent is not None
    server.memory[0][answer.extent.offset] = (ONE, 0, keys("copy", 1)[0])
    server.stack.seal(1, answer.id, 7, now)
    server.settle()
    server.write(1, ONE, 0, keys("flood", 3))
    server.read(2, ONE, 0, keys("copy", 1))
    server.drop(2)
    assert server.write(1, ONE, 0, [key("late")]) == ["RESERVED"]


def test_a_read_above_keeps_a_block_in_the_base() -> None:
    """Both tiers see each use: else the base would throw out what is read most."""
    server = Server(8, 8)
    often, once = keys("often", 4), keys("once", 4)
    for chain in (often, once):
        server.write(1, ONE, 0, chain)
        server.settle()
    server.read(1, ONE, 0, often)
    server.drop(1)
    server.write(2, ONE, 0, keys("new", 4))
    server.settle()
    assert server.read(3, ONE, 0, often)[0] is ReadStatus.HIT
    assert server.read(3, ONE, 0, once)[0] is ReadStatus.EVICTED


def test_a_block_that_the_base_has_no_room_for_stays_until_it_is_evicted() -> None:
    server = Server(4, 2)
    small = keys("small", 2)
    server.write(1, ONE, 0, small)
    server.settle()
    for digest in small:  # held for a copy: the base cannot evict them
        entry = server.stack.backing.index.peek(ONE, 0, digest)
        assert entry is not None
        server.stack.backing.held.pin(7, entry)
    server.write(1, ONE, 0, keys("late", 2))
    server.settle()
    assert server.read(1, ONE, 0, keys("late", 2)) == [ReadStatus.HIT] * 2
    server.drop(1)
    server.write(1, ONE, 0, keys("later", 4))
    server.look()
    assert server.read(1, ONE, 0, keys("late", 2))[1] is ReadStatus.EVICTED


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_lost_device_keeps_the_memory_it_may_fill_and_not_the_name(
    good: bool, again: bool
) -> None:
    server = Server(4, 8)
    chain = keys("chain", 2)
    server.write(1, ONE, 0, chain)
    server.settle()
    server.stack.front.remove(ONE, chain, ReadStatus.EVICTED)
    server.stage(ONE, 0, chain[:1])
    copy = server.copies.pop()
    front = server.stack.front
    front.quarantine(MOVER, copy.id, -copy.id)
    assert front.index.peek(ONE, 0, chain[0]) is None
    if again:
        server.stage(ONE, 0, chain[:1])
        server.finish(server.copies.pop())
    assert server.write(2, TWO, 0, keys("other", 4)) == ["RESERVED"] * 3 + ["NO_SPACE"]
    assert copy.extent.offset not in {entry.offset for entry in front.index.inventory()}
    server.settle()
    server.stack.transfers.done(copy, good=good, now=server.now)  # late
    server.look()
    assert (front.held.quarantined, front.held.quarantined_bytes) == (0, 0)
    assert [store.held.pins for store in server.stack.stores] == [0, 0]
    assert front.index.peek(ONE, 0, chain[0]) is None  # evicted meanwhile, where it was there again
    assert server.write(3, ONE, 0, keys("all", 4)) == ["RESERVED"] * 4


def below(count: int, *pages: int) -> tuple[Server, list[bytes]]:
    """A server that has blocks in its backing tier alone, from which they can be read in place."""
    server = Server(*pages, in_place=(1,))
    chain = keys("in place", count)
    server.write(1, ONE, 0, chain)
    server.drop(1)
    server.settle()
    server.stack.front.remove(ONE, chain, ReadStatus.EVICTED)
    server.look()
    return server, chain


@pytest.mark.parametrize(("above", "hits"), [(None, 0), (3 * PAGE, 0), (3 * PAGE - 1, 3), (-1, 3)])
def test_blocks_are_read_where_they_are_if_they_are_enough(above: int | None, hits: int) -> None:
    server, chain = below(3, 8, 16)
    statuses = server.read(2, ONE, 0, chain, above)
    assert statuses == [ReadStatus.HIT] * hits + [ReadStatus.NOT_YET] * (3 - hits)
    assert [pin.tier for _, _, pin in server.pins] == [1] * hits
    assert server.stack.index.hits == [0, hits]
    held = server.stack.holders(2)
    assert sum(one.pinned_bytes for one in held) == hits * PAGE
    server.drop(2)
    assert [store.held.pins for store in server.stack.stores] == [0, 0]


def test_what_memory_has_counts_for_the_answer_and_is_read_from_there() -> None:
    server, chain = below(3, 8, 16)
    server.stage(ONE, 0, chain[:1])
    server.settle()
    assert server.read(2, ONE, 0, chain, 3 * PAGE - 1) == [ReadStatus.HIT] * 3
    assert [pin.tier for _, _, pin in server.pins] == [None, 1, 1]


def test_blocks_that_are_not_enough_together_with_what_may_be_pinned_are_promoted() -> None:
    """A part of them would be too small for its way."""
    server, chain = below(3, 8, 16)
    server.stack.stores[1].held.limits = Limits.of(4 * PAGE, PAGE)  # two for each
    assert server.read(2, ONE, 0, chain, 2 * PAGE) == [ReadStatus.NOT_YET] * 3
    assert server.stack.stores[1].held.pins == 0
    assert server.stack.stores[1].held.limits.copies.used == 0
    statuses = server.read(2, ONE, 0, chain, 2 * PAGE - 1)
    assert statuses == [ReadStatus.HIT] * 2 + [ReadStatus.NOT_YET]


def test_a_block_is_copied_up_once_when_it_is_read() -> None:
    server = Server(8, 8, 64, front_tier=1)
    chain = keys("chain", 3)
    server.write(1, ONE, 0, chain)
    server.settle()
    copied = []
    for _ in range(4):
        server.read(1, ONE, 0, chain)
        server.start()
        copied.append([copy.target for copy in server.copies])
        server.settle()
    assert copied == [[0, 0, 0], [], [], []]


def test_a_step_of_copies_has_its_size() -> None:
    """However they are asked for: down to the base, up to a cache, or up for a reader."""
    server = Server(8, 8, 64, front_tier=1)
    chain = keys("chain", 6)
    server.write(1, ONE, 0, chain)
    for count in (2, 4, 6):
        server.start(2 * PAGE)
        assert [copy.target for copy in server.copies] == [2] * count
    server.settle()
    server.read(1, ONE, 0, chain)
    server.drop(1)
    steps = [(PAGE + 1, 2), (PAGE, 3), (3 * PAGE, 6)]
    for size, count in steps:
        server.start(size)
        assert [copy.target for copy in server.copies] == [0] * count
    server.settle()
    server.write(1, ONE, 0, keys("other", 8))
    server.settle()
    for size, count in steps:
        server.stage(ONE, 0, chain, size)
        assert [copy.target for copy in server.copies] == [1] * count
    server.settle()
    assert server.read(1, ONE, 0, chain) == [ReadStatus.HIT] * 6


def test_a_copy_that_leaves_another_place_than_readers_use_is_not_announced() -> None:
    server = Server(8, 8, 64, front_tier=1)
    (digest,) = keys("one", 1)
    server.write(1, ONE, 0, [digest])
    server.settle()
    server.read(1, ONE, 0, [digest])
    server.drop(1)
    server.settle()
    server.look()
    cache, front, base = server.stack.stores
    assert all(store.index.peek(ONE, 0, digest) for store in (cache, front, base))
    cache.remove(ONE, [digest], ReadStatus.CORRUPT)
    assert server.stack.change_log.take() == []
    front.remove(ONE, [digest], ReadStatus.CORRUPT)
    assert [(one.status, one.tier) for one in server.stack.change_log.take()] == [
        (ReadStatus.HIT, 2)
    ]


def test_a_block_that_a_reader_waits_for_takes_the_place_of_one_whose_session_comes_back() -> None:
    """Memory is full of one chain, whose end belongs to that session; all of it is on disk, too."""
    server = Server(4, 64)
    server.write(1, ONE, 0, keys("old", 1))
    server.settle()
    chain = keys("chain", 4)
    server.write(1, ONE, 0, chain[:3])
    end = ReserveRequest(ONE, 0, chain[3:], chain[2:3], [PAGE], SessionHint("s", resume_in=5.0))
    (answer,) = server.stack.reserve(1, end, server.now)
    assert answer.extent is not None
    server.memory[0][answer.extent.offset] = (ONE, 0, chain[3])
    server.stack.seal(1, answer.id, 1, server.now)
    server.settle()
    assert server.stack.backing.index.peek(ONE, 0, chain[3]) is not None
    server.stage(ONE, 0, keys("old", 1))
    server.settle()
    assert server.read(1, ONE, 0, keys("old", 1)) == [ReadStatus.HIT]
    assert server.stack.backing.index.peek(ONE, 0, chain[3]) is not None


@pytest.mark.parametrize(
    ("ends", "writes_again", "known"), [(False, False, 1), (True, False, 0), (True, True, 1)]
)
def test_a_copy_belongs_to_its_session_unless_that_has_ended(
    ends: bool, writes_again: bool, known: int
) -> None:
    """A session that writes again has not ended: in the base its hints count, too."""
    server = Server(8, 8)
    stack = server.stack

    def write(name: str) -> None:
        request = ReserveRequest(ONE, 0, [key(name)], [ROOT], [PAGE], SessionHint("talk"))
        (answer,) = stack.reserve(1, request, 1.0)
        assert answer.extent is not None
        server.memory[0][answer.extent.offset] = (ONE, 0, key(name))
        stack.seal(1, answer.id, 7, 1.0)

    write("first")
    if ends:
        stack.front.hint("talk", None, 2.0)
    if writes_again:
        write("second")
    server.settle()
    assert stack.backing.index.stored == 1 + writes_again
    assert stack.backing.extents.policy.figures["sessions"] == known


def test_the_most_blocks_are_those_of_all_tiers() -> None:
    """A master lists as many blocks of this server, and no more."""
    assert Server(4, 8).stack.blocks_max == 12


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_tier_is_lost_in_small_steps(lost: int, write_back: bool) -> None:
    """However much it has, and however much waits to be written to it, the loop runs in between."""
    server = Server(600, 600, 900, front_tier=1, write_back=write_back)
    stack = server.stack
    server.write(1, ONE, 0, keys("chain", 300))
    stack.transfers._to_promote.extend(stack.front.index.inventory())
    for copy in stack.transfers.next_writebacks(1 << 30, 1 << 10, server.now):
        server.memory[copy.target][copy.extent.offset] = ONE, 0, copy.entry.digest
        stack.transfers.done(copy, good=True, now=server.now)
    server.write(1, ONE, 0, keys("dirty", 290))
    server.copies += stack.transfers.next_writebacks(9 * PAGE, 9, server.now)
    server.look()
    there, order = len(server.map), stack.queue.write_back

    def left() -> tuple[int, int, int]:
        listed = 0 if order is None else len(order._listed)
        return stack.stores[lost].index.stored, stack.front.extents.dirty, listed

    before = left()
    stack.take_offline(lost)
    assert left() == before
    for _ in stack.drop_lost(lost):
        now = left()
        assert all(old - 128 <= new <= old for old, new in zip(before, now, strict=True))
        before = now
        check_invariants(stack)
        assert stack.fingerprint is None, "masters must not compare what is still being announced"
    while server.copies:
        server.finish(server.copies.pop(), good=lost == 0)
    server.look()
    assert (len(server.map), stack.stores[lost].index.stored) == (there, 0)
    if lost == 2:
        assert (left(), stack.is_writing_back) == ((0, 0, 0), False)
        for number in range(4):  # all of memory can be had again
            assert set(server.write(1, ONE, 0, keys(f"new {number}", 140))) == {"RESERVED"}


def test_a_block_that_is_written_while_its_tier_is_dropped() -> None:
    server = Server(4, 64)
    old, new = keys("old", 4), keys("new", 4)
    for chain in (old, new):
        server.write(1, ONE, 0, chain)
        server.settle()
    server.look()
    server.stack.take_offline(1)
    steps = server.stack.drop_lost(1)
    assert server.write(1, ONE, 0, old[:2]) == ["RESERVED"] * 2
    for _ in steps:
        pass
    server.look()
    assert {server.map.get((ONE, 0, digest)) for digest in old[:2]} == {0}
    assert {server.reasons[ONE, digest] for digest in old[2:]} == {ReadStatus.TIER_LOST}


def test_a_writer_waits_until_what_the_lost_tier_was_to_get_may_be_evicted() -> None:
    server = Server(300, 600)
    server.write(1, ONE, 0, keys("dirty", 300))
    server.stack.take_offline(1)
    assert server.write(1, ONE, 0, keys("more", 1)) == ["NO_SPACE"]
    assert server.stack.is_writing_back, "it is worth a wait"
    for _ in server.stack.drop_lost(1):
        pass
    assert not server.stack.is_writing_back
    assert server.write(1, ONE, 0, keys("more", 1)) == ["RESERVED"]


def test_while_the_base_is_read_only_memory_is_a_pool_of_its_own() -> None:
    """Every block may be evicted; what is left is written later, in the order of writing."""
    server = Server(4, 16)
    old, new = keys("old", 3), keys("new", 6)
    server.write(1, ONE, 0, old)
    server.settle()
    server.write(1, ONE, 0, new[:1])
    server.start()
    server.write(1, ONE, 0, new[1:2])
    for _ in server.stack.queue.stop_writing():
        pass
    assert not server.stack.queue.waiting
    server.finish(server.copies.pop(), good=False)
    check_invariants(server.stack)
    for digest in new[2:]:
        assert server.write(1, ONE, 0, [digest]) == ["RESERVED"]
    assert not server.stack.queue.waiting
    assert not server.stack.transfers.next_writebacks(1 << 30, 9, server.now)
    assert server.read(1, ONE, 0, old) == [ReadStatus.NOT_YET] * 3
    server.stage(ONE, 0, old[:1])  # promotion goes on
    while server.copies:
        server.finish(server.copies.pop())
    server.look()
    left = [digest for digest in new if server.stack.front.index.peek(ONE, 0, digest)]
    assert 0 < len(left) < len(new)
    for good in (False, True):  # the first try fails: the block's turn comes again
        (copy,) = server.stack.transfers.try_writeback(server.now)
        assert copy.entry.digest == left[0 if not good else 1]
        server.finish(copy, good=good)
        assert not server.stack.backing.held.reservations
    assert server.stack.queue.resume_writing() == len(left) - 1
    assert server.stack.queue.waiting == len(left) - 1
    server.stack.remove(ONE, left[-1:])
    assert server.stack.queue.waiting == len(left) - 2
    server.settle()
    assert all(server.stack.backing.index.peek(ONE, 0, digest) for digest in left[:-1])
    assert server.write(1, ONE, 0, keys("more", 1)) == ["RESERVED"]
    assert server.stack.queue.waiting == 1, "as before: dirty, and in the queue"


def test_writing_stops_in_steps() -> None:
    server = Server(5000, 6000)
    for number in range(5):
        server.write(1, ONE, 0, keys(f"{number}", 1000))
    assert sum(1 for _ in server.stack.queue.stop_writing()) == 4
    assert not server.stack.queue.waiting


def test_what_was_found_on_disk_is_served() -> None:
    server = Server(4, 64)
    chain = keys("chain", 4)
    records = [
        Record(ONE, 0, digest, parent, offset * PAGE, PAGE, 1, generation)
        for digest, parent, offset, generation in zip(
            chain, [ROOT, *chain], [9, 3, 5, 1], [10, 20, 30, 40], strict=False
        )
    ]
    records.append(Record(ONE, 0, key("over"), ROOT, 9 * PAGE, PAGE, 1, 5))  # overlaps
    records.append(Record(ONE, 0, key("beyond"), ROOT, 64 * PAGE, PAGE, 1, 5))
    for record in records:
        server.memory[1][record.offset] = (ONE, 0, record.digest)
    server.memory[1][9 * PAGE] = (ONE, 0, chain[0])
    list(server.stack.restore(records, 0.0))
    assert sorted(server.stack.erasures.take()) == [9 * PAGE, 64 * PAGE]
    assert {entry.digest for entry in inventory(server.stack)} == set(chain)
    server.map = {(ONE, 0, digest): 1 for digest in chain}
    server.stage(ONE, 0, chain)
    server.settle()
    assert server.read(1, ONE, 0, chain) == [ReadStatus.HIT] * 4


def test_what_was_found_on_disk_is_added_in_steps() -> None:
    """Between two of them a server that starts answers."""
    server = Server(4, 2500)
    records = [
        Record(ONE, 0, digest, ROOT, number * PAGE, PAGE, 1, number + 1)
        for number, digest in enumerate(keys("found", 2500))
    ]
    backing = server.stack.backing
    added = [0, *(backing.index.stored for _ in server.stack.restore(records, 0.0))]
    assert added[-1] == 2500
    assert max(after - before for before, after in itertools.pairwise(added)) <= 256


@pytest.mark.parametrize("policy", ["lru", "arc", "lease", "density"])
def test_what_was_found_on_disk_may_be_evicted_by_any_policy(policy: str) -> None:
    store = FileStore(4 * PAGE, alignment=PAGE, policy=registry.policy(policy, 4 * PAGE))
    records = [
        Record(ONE, 0, digest, ROOT, number * PAGE, PAGE, 1, number + 1)
        for number, digest in enumerate(keys("found", 4))
    ]
    entries = [entry for record in records if (entry := store.restore(record)) is not None]
    list(store.activate_restored(entries, 1.0))
    check_invariants(store)
    assert store.extents.policy.victim_age(5.0) == pytest.approx(4.0, abs=0.1)
    statuses = [
        store.reserve(1, ReserveRequest(ONE, 0, [digest], [ROOT], [PAGE]), 1e6 + second)[0].status
        for second, digest in enumerate(keys("new", 4))
    ]
    check_invariants(store)
    assert statuses == [WriteStatus.RESERVED] * 4


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_histories(seed: int, write_back: bool) -> None:
    """Writers, readers, copies that end late or badly, removals, full tiers, a tier that dies."""
    play(seed, write_back, cold=False)


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("seed", range(1000, 1016))
def test_random_histories_above_a_cold_tier(seed: int, write_back: bool) -> None:
    """The same; and blocks come into objects, which are deleted."""
    play(seed, write_back, cold=True)


def play(seed: int, write_back: bool, *, cold: bool) -> None:
    rng = random.Random(seed)
    pages, front_tier = rng.choice([((12, 40), 0), ((12, 16), 0), ((8, 12, 40), 1), ((8, 12), 1)])
    in_place = (0,) if front_tier and rng.random() < 0.7 else (1,) if rng.random() < 0.3 else ()
    server = Server(
        *pages, front_tier=front_tier, write_back=write_back, in_place=in_place, cold=cold
    )
    for tier in server.stack.in_place_tiers:
        server.stack.stores[tier].held.limits = Limits.of(6 * PAGE, PAGE)
    digests = keys("random", 48)
    for _ in range(300):
        if cold and rng.random() < 0.3 and (there := inventory(server.stack)):
            server.keep(rng.choice(there))
        if cold and rng.random() < 0.05 and (there := server.stack.stores[-1].index.inventory()):
            entry = rng.choice(there)
            index = entry.index
            lost = [entry.digest]
            server.stack.stores[-1].remove(index.namespace, lost, ReadStatus.EVICTED, index.part)
        step, owner, first = rng.random(), rng.randint(1, 3), rng.randrange(48)
        namespace, part = rng.choice([(ONE, 0), (ONE, 0), (TWO, 0), (TWO, 1)])
        chain = digests[first : first + rng.randint(1, 6)]
        if step < 0.25:
            server.reserve(owner, namespace, part, chain)
        elif step < 0.4 and server.open:
            server.seal(*rng.choice(sorted(server.open)))
        elif step < 0.55:
            above = rng.choice([None, 0, PAGE, 2 * PAGE])
            if ReadStatus.NOT_YET in server.read(owner, namespace, part, chain, above):
                server.stage(namespace, part, chain, rng.choice([PAGE, 3 * PAGE, 1 << 30]))
        elif step < 0.65:
            server.start(rng.choice([PAGE, 4 * PAGE, 1 << 30]))
        elif step < 0.85 and server.copies:
            copy = server.copies.pop(rng.randrange(len(server.copies)))
            if rng.random() < 0.1:
                server.stack.transfers.failed(copy, ReadStatus.CORRUPT)
                server.finish(copy, good=False)
            else:
                server.finish(copy, good=rng.random() < 0.8)
        elif step < 0.9 and server.pins:
            server.unpin(rng.randrange(len(server.pins)))
        elif step < 0.95:
            server.stack.remove(namespace, chain)
        elif step < 0.98:
            server.drop(owner)
        elif step < 0.995:
            if server.stack.queue.read_only:
                server.stack.queue.resume_writing()
            elif server.base is not None and server.base not in server.stack.index.offline:
                list(server.stack.queue.stop_writing())
        elif not server.stack.index.offline:
            server.lose(rng.choice([tier for tier in range(len(pages)) if tier != front_tier]))
        server.look()
    server.stack.queue.resume_writing()
    for owner in (1, 2, 3):
        server.drop(owner)
    server.settle()
    for tier, store in enumerate(server.stack.stores):
        if tier not in server.stack.index.offline:
            assert store.held.pinned_by(MOVER) == []
            assert store.held.reservations == store.held.pins == 0
    if server.base not in server.stack.index.offline:  # else staging evicts what nobody else has
        for namespace, part, digest in [n for n in server.map if server.map[n] != front_tier]:
            # A block that only the cache has leaves with it when that needs the place.
            in_base = server.stack.backing.index.peek(namespace, part, digest) is not None
            for _ in range(1 + write_back):  # memory may have to be written first
                server.stage(namespace, part, [digest])
                server.settle()
            if (namespace, part, digest) not in server.map:
                assert write_back or not in_base, "room was made by evicting what the base had"
                continue
            assert server.read(9, namespace, part, [digest]) == [ReadStatus.HIT]
            server.drop(9)
            server.settle()
    for _ in range(20 * write_back):  # what is dirty is written for it
        server.write(9, ONE, 0, [key("there is room")])
        server.settle()
    assert WriteStatus.NO_SPACE.name not in server.write(9, ONE, 0, [key("there is room")])


def test_a_cold_block_of_another_version_is_forgotten() -> None:
    """An object was found while the block was being written."""
    server = Server(4, cold=True)
    (digest,) = chain = keys("version", 1)
    server.reserve(1, ONE, 0, chain)
    cold = server.stack.stores[-1]
    assert isinstance(cold, ColdStore)
    assert cold.add(Record(ONE, 0, digest, ROOT, SPAN, PAGE, 1, 0), 0) is not None
    for held in list(server.open):
        server.seal(*held)
    assert cold.index.peek(ONE, 0, digest) is None
    server.look()


def test_a_circle_that_a_file_describes_can_be_evicted() -> None:
    """G9: what a restart finds is checked, too; a file may come from a version that let it in."""
    server = Server(2, 4)
    a, b = keys("circle", 2)
    records = [
        Record(ONE, 0, a, b, 0, PAGE, 0, 1),
        Record(ONE, 0, b, a, PAGE, PAGE, 0, 2),
    ]
    list(server.stack.restore(records, 0.0))
    assert [one.parent for one in server.stack.backing.index.inventory()].count(ROOT) == 1
    check_invariants(server.stack.backing)
