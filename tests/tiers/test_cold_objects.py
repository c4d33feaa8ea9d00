"""Objects that somebody else has written: they are what they were, or Damaged."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvpool.errors import Unavailable
from kvpool.protocols.cold_tier import ColdSettings, Gone, Listed, ObjectStore
from kvpool.server.cold import bucket as bucket_module
from kvpool.server.cold import search
from kvpool.server.cold.bucket import Bucket, Busy
from kvpool.server.cold.index import ColdIndex
from kvpool.server.cold.search import Searcher
from kvpool.server.cold.state.book import (
    WAITING_MAX,
    Book,
    ColdObject,
    Living,
    Waiting,
    folder,
    responsible,
    server_of,
)
from kvpool.server.cold.state.format import (
    TAIL,
    ColdBlock,
    Damaged,
    ObjectKeys,
    Tail,
    pack_end,
    pack_removed,
    parse_index,
    parse_removed,
    parse_tail,
)
from kvpool.server.cold.writer import ObjectWriter, _Draft
from kvpool.server.context import ServerContext
from kvpool.server.state.entry import Entry
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.tier_stores import ColdStore, FileStore
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace, ReadStatus
from tests.support.turns import others

KEYS = ObjectKeys(b"k" * 32)
NAME = "blocks/a/1"
SALT = bytes(32)
ONE, TWO = Namespace("one"), Namespace("@acme/two", 3)
BLOCKS = [
    ColdBlock(ONE, 0, b"a" * 32, b"", 0, 100, 7, 1),
    ColdBlock(TWO, 2, b"b" * 16, b"a" * 16, 100, 50, (1 << 64) - 1, 0),
]
START = 150


def parse(data: bytes, name: str = NAME, keys: ObjectKeys = KEYS) -> list[ColdBlock]:
    tail = parse_tail(data[-TAIL.size :], len(data))
    return parse_index(name, tail, data[tail.start : tail.start + tail.size], keys)


def packed(blocks: list[ColdBlock] = BLOCKS, cipher: bool = False, start: int = START) -> bytes:
    return bytes(start) + pack_end(NAME, blocks, start, KEYS, SALT, cipher)


def test_what_is_written_is_read() -> None:
    assert parse(packed()) == BLOCKS
    apart = [BLOCKS[0], BLOCKS[1]._replace(position=116)]
    hidden = packed(apart, cipher=True, start=182)
    assert parse(hidden) == apart
    assert b"acme" not in hidden


@pytest.mark.parametrize("cipher", [False, True])
def test_an_object_that_was_changed_is_damaged(cipher: bool) -> None:
    rng = random.Random(1)
    good = packed([BLOCKS[0]], cipher)
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(START, len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del data[rng.randrange(START, len(data)) :]
        if bytes(data) != good:
            with pytest.raises(Damaged):
                parse(bytes(data))


def test_another_name_or_key_is_damaged() -> None:
    with pytest.raises(Damaged):
        parse(packed(), name="blocks/b/1")
    with pytest.raises(Damaged):
        parse(packed(), keys=ObjectKeys(b"l" * 32))


@pytest.mark.parametrize(
    "change",
    [
        {"position": 101},
        {"position": 99},
        {"position": -1},
        {"size": 0},
        {"size": 51},
        {"size": 1 << 63},
        {"part": 3},
        {"part": -1},
        {"digest": b"short"},
        {"digest": b"x" * 33},
        {"parent": b"x" * 33},
        {"checksum": -1},
        {"copies": 17},
    ],
)
def test_an_index_with_the_right_mac_is_not_believed_either(change: dict[str, object]) -> None:
    """As of a server that has a bug, or of a cluster without a secret."""
    with pytest.raises(Damaged):
        parse(packed([BLOCKS[0], BLOCKS[1]._replace(**change)]))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([[["n", 1]], [[1, 0, b"a" * 32, b"", 0, 9, 0, 1]]]),
        msgspec.msgpack.encode([[["n", 1]], [[-1, 0, b"a" * 32, b"", 0, 9, 0, 1]]]),
        msgspec.msgpack.encode([[["", 1]], []]),
        msgspec.msgpack.encode([[["n", 0]], []]),
        msgspec.msgpack.encode([[["n", "1"]], []]),
        msgspec.msgpack.encode([[], [[]] * 20_000]),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_any_bytes_as_an_index(index: bytes) -> None:
    head = b"kvpcold1", 0, SALT, START, len(index)
    mac = KEYS.mac(NAME.encode(), TAIL.pack(*head, b""), index)
    with pytest.raises(Damaged):
        parse_index(NAME, Tail(False, SALT, START, len(index), mac), index, KEYS)


def test_what_was_removed() -> None:
    data = pack_removed(NAME, {5, 3}, KEYS)
    assert parse_removed(NAME, data, KEYS) == {3, 5}
    for bad, name in ((data, "blocks/b/1"), (data[:-1], NAME), (b"", NAME)):
        with pytest.raises(Damaged):
            parse_removed(name, bad, KEYS)


def test_an_object_has_one_of_the_living_and_few_change_hands() -> None:
    names = [f"blocks/{folder('lost/1')}/{n}" for n in range(300)]
    assert server_of(folder("lost/1")) == "lost/1"
    before = {name: responsible(name, {"a", "b", "c"}) for name in names}
    after = {name: responsible(name, {"c", "a", "b", "d"}) for name in names}
    assert {after[name] for name in names if after[name] != before[name]} == {"d"}
    assert min(list(before.values()).count(one) for one in "abc") > 50
    assert responsible(names[0], {"a", "lost/1"}) == "lost/1"


def test_who_lives_is_said_by_one_clock() -> None:
    beats = [Listed("servers/me", 0, 5000.0), Listed("servers/b", 0, 4971.0)]
    beats.append(Listed("servers/c", 0, 4970.0))
    assert Living.of(beats, "me", 30.0) == Living(frozenset({"me", "b"}), 5000.0)


def test_which_object_goes() -> None:
    book, tail = Book(100), Tail(False, SALT, 0, 0, b"")
    one, two = (book.enter(f"blocks/a/{n}", 40, float(n), tail) for n in range(2))
    one.blocks = two.blocks = 1
    book.read(one)
    for book.coming, goes in ((20, None), (21, two), (0, None)):
        assert book.next_to_go(-1.0) is goes
    assert book.next_to_go(1.0) is one
    book.left(two.start, ReadStatus.TIER_LOST)
    assert book.next_to_go(-1.0) is None, "it is found again"
    book.leave(two)
    book.left(one.start, ReadStatus.REMOVED)
    assert one.removed == {0}
    assert book.unsaved
    assert book.next_to_go(-1.0) is one


class Looked(OrderedDict[str, ColdObject]):
    """Counts the objects that somebody looks at on the way to another one."""

    looked = 0

    def values(self) -> Iterator[ColdObject]:  # type: ignore[override]
        for one in super().values():
            self.looked += 1
            yield one


def test_which_object_goes_is_known_without_a_look_at_all_of_them() -> None:
    """A server may have 100,000, and asks after each of those that go."""
    count = 5000
    book, tail = Book(9 * count), Tail(False, SALT, 0, 0, b"")
    objects = [book.enter(f"blocks/a/{n}", 9, float(n), tail) for n in range(count)]
    for one in objects:
        one.blocks = 1
    book.by_name = looked = Looked(book.by_name)
    assert book.next_to_go(0.0) is None
    gone = objects[-1]
    gone.gone = True
    book.look_at(gone)
    book.left(objects[-2].start, ReadStatus.EVICTED)
    assert book.next_to_go(0.0) is book.next_to_go(0.0), "until it has left"
    went: list[ColdObject] = []
    while (one := book.next_to_go(100.0)) is not None:
        went.append(one)
        book.leave(one)
    assert set(went) == {*objects[:100], gone, objects[-2]}
    book.coming = 1000 * 9
    while (one := book.next_to_go(0.0)) is not None:
        went.append(one)
        book.leave(one)
    assert went[102:] == objects[100:998], "that which was read longest ago first"
    assert looked.looked <= len(went)


def test_an_object_of_which_something_is_found_again_stays() -> None:
    book, tail = Book(100), Tail(False, SALT, 0, 0, b"")
    one = book.enter("blocks/a/1", 9, 0.0, tail)
    assert book.next_to_go(-1.0) is None, "its blocks are about to come"
    one.blocks = 1
    book.left(one.start, ReadStatus.TIER_LOST)
    assert (book.lost, book.next_to_go(-1.0)) == ({one.name}, None)
    book.lost.discard(one.name)
    book.look_at(one)
    one.blocks = 1
    assert book.next_to_go(-1.0) is None
    book.left(one.start, ReadStatus.EVICTED)
    assert book.next_to_go(-1.0) is one
    book.leave(one)
    book.coming = 100
    assert book.next_to_go(1.0) is None


def test_who_has_written_what_is_here() -> None:
    book, tail = Book(100), Tail(False, SALT, 0, 0, b"")
    objects = [book.enter(f"blocks/{owner}/{n}", 9, 0.0, tail) for n, owner in enumerate("aab")]
    assert book.written_by == {"a": 2, "b": 1}
    for one in (objects[0], objects[2], objects[2]):
        book.leave(one)
    assert (book.written_by["a"], book.written_by["b"]) == (1, 0)
    book.read(objects[0])  # by who began before it has left
    assert list(book.by_name) == ["blocks/a/1"]


class Shelf:
    """5000 objects that a lost server has left; what of them is read has just gone."""

    async def folders(self, prefix: str) -> list[str]:
        return ["lost"]

    async def listing(self, prefix: str) -> list[Listed]:
        return [Listed(f"{prefix}{n}", 1000, float(n)) for n in range(5000)]

    async def get(self, name: str, start: int, size: int) -> bytes:
        raise Gone("it has gone")


async def test_others_have_their_turn_while_many_objects_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who answers for an object costs as much as there are servers."""
    book, dropped = Book(1 << 40), list[ColdObject]()
    for n in range(5000, 10_000):
        book.enter(f"blocks/lost/{n}", 1000, 0.0, Tail(False, SALT, 0, 0, b""))

    async def drop(one: ColdObject) -> None:
        dropped.append(one)

    index = SimpleNamespace(book=book, bucket=Shelf(), oldest=-1.0, drop=drop, gone={})
    settings = ColdSettings()
    searcher = Searcher("me", 1, cast(ColdIndex, index), settings, Counter(), ())
    living = frozenset(["me", *(f"s{n}" for n in range(49))])
    searcher._living = Living(living, 0.0)
    async with others() as turns:

        def count(name: str, living: Collection[str]) -> str:
            turns.step()
            return responsible(name, living)

        monkeypatch.setattr(search, "responsible", count)
        await searcher._search()
    assert 0 < turns.longest * len(living) <= 2048
    assert len(dropped) == sum(responsible(one, living) != "me" for one in book.by_name) > 4000


def test_what_waits_to_be_written() -> None:
    waiting = Waiting()
    assert waiting.due_in(10, 5.0, 0.0) is None
    waiting.add((ONE, 0, b"a"), 6, 1.0)
    waiting.add((ONE, 0, b"a"), 6, 2.0)
    assert waiting.due_in(10, 5.0, 2.0) == (4.0, "")
    assert waiting.due_in(10, 5.0, 9.0) == (0.0, "")
    waiting.add((ONE, 0, b"b"), 6, 2.0)
    waiting.add((ONE, 0, b"c"), 6, 2.0)
    assert waiting.due_in(10, 5.0, 2.0) == (0.0, "")
    assert [key[2] for key in waiting.take("", 10)] == [b"a", b"b"]
    assert waiting.size == 6


def test_an_object_has_blocks_of_one_tenant() -> None:
    """The one that has waited for its time, else one that has enough for an object."""
    waiting, globex = Waiting(), Namespace("@globex/m")
    for n in range(4):
        waiting.add((ONE, 0, b"%d" % n), 1, 10.0)
        waiting.add((TWO, 0, b"%d" % n), 5, 11.0)
        waiting.add((globex, 0, b"%d" % n), 4, 12.0)
    assert waiting.due_in(99, 5.0, 12.0) == (3.0, "")
    assert waiting.due_in(17, 5.0, 12.0) == (0.0, "acme")
    assert waiting.due_in(17, 5.0, 15.0) == (0.0, "")
    assert waiting.take("acme", 17) == [(TWO, 0, b"%d" % n) for n in range(4)]
    assert waiting.take("acme", 17) == []
    assert waiting.take("globex", 8) == [(globex, 0, b"0"), (globex, 0, b"1")]
    assert (waiting.size, waiting.due_in(8, 9.0, 12.0)) == (4 + 8, (0.0, "globex"))


def test_the_index_of_an_object_is_one_that_readers_accept() -> None:
    """Else a tenant with long names would take all that lies in the object out of it."""
    waiting = Waiting()
    for n in range(5000):
        space = Namespace("@acme/" + "\N{MUSICAL SYMBOL G CLEF}" * 500 + f"{n:06}")
        waiting.add((space, 0, n.to_bytes(32, "little")), 100, 1.0)
    keys = waiting.take("acme", 1 << 20)
    blocks = [
        ColdBlock(*key, b"p" * 32, 100 * n, 100, (1 << 64) - 1, 16) for n, key in enumerate(keys)
    ]
    data = packed(blocks, start=100 * len(keys))
    assert parse(data) == blocks
    waiting = Waiting()
    for n in range(5000):
        waiting.add((ONE, 0, n.to_bytes(32, "little")), 1, 1.0)
    assert len(waiting.take("", 1 << 20)) == 2048, "their index is made in one turn of the loop"
    assert waiting.size == 5000 - 2048


def test_what_waits_of_one_tenant_does_not_drive_out_the_others() -> None:
    """While the object store fails, and a tenant writes many small blocks."""
    waiting, mine = Waiting(), Namespace("@globex/m")
    for n in range(100):
        waiting.add((mine, 0, b"%016d" % n), 1000, 1.0)
    for n in range(WAITING_MAX + 5000):
        waiting.add((TWO, 0, b"%016d" % n), 10, 2.0)
    assert len(waiting) == WAITING_MAX
    assert waiting.left_out == 5100
    assert waiting.size == 100 * 1000 + (WAITING_MAX - 100) * 10
    assert len(waiting.take("globex", 1 << 40)) == 100
    assert waiting.take("acme", 1)[0][2] == b"%016d" % 5100, "its own oldest were left out"
    while taken := waiting.take("acme", 1 << 40):
        last = taken[-1]
    assert last[2] == b"%016d" % (WAITING_MAX + 4999)
    assert (waiting.size, len(waiting), waiting.due_in(1, 1.0, 9.0)) == (0, 0, None)


class FailingDisk:
    """The first block cannot be read, and is removed meanwhile if the test says so."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    async def read_into(self, offset: int, data: memoryview) -> None:
        if not offset:
            self._meanwhile()
            raise Unavailable("the disk has failed")


@pytest.mark.parametrize("when", ["meanwhile", "later"])
async def test_a_removal_of_what_could_not_be_read_takes_no_other_block_along(when: str) -> None:
    def remove() -> None:
        writer.removed(ONE, [b"bad"], 0)

    disk = FailingDisk(remove if when == "meanwhile" else lambda: None)
    held = SimpleNamespace(pin=lambda owner, entry: 1)
    store = SimpleNamespace(held=held, unpin=lambda owner, pin: None)
    stack = SimpleNamespace(front=None, stores=[store])
    context = SimpleNamespace(store=stack, server="s", epoch=1, tiers=[disk])
    counters = Counter[str]()
    index = cast(ColdIndex, None)
    writer = ObjectWriter(cast(ServerContext, context), index, ColdSettings(), counters)
    draft = writer.drafts["any"] = _Draft("any", 2)
    for digest, offset in ((b"bad", 0), (b"good", 64)):
        of = SimpleNamespace(namespace=ONE, part=0, tier=0)
        facts = {"digest": digest, "offset": offset, "size": 64, "parent": b"", "checksum": 1}
        entry = SimpleNamespace(index=of, copies=1, born=1, **facts)
        await writer._copy(draft, cast(Entry, entry))
    if when == "later":
        remove()
    assert [(one.digest, one.position) for one in draft.blocks] == [(b"good", 0)]
    assert draft.removed == set()
    writer.removed(ONE, [b"good"], 3)
    writer.removed(TWO, [b"good"], None)
    assert draft.removed == set(), "another part, another block"
    writer.removed(ONE, [b"good"], None)
    assert draft.removed == {0}


class Flaky:
    """A store that answers as the test says."""

    def __init__(self) -> None:
        self.works = True
        self.asked = 0

    async def delete(self, name: str) -> None:
        self.asked += 1
        if not self.works:
            raise Unavailable("503")

    async def put(self, name: str, data: bytes) -> None:
        await self.delete(name)

    async def get(self, name: str, start: int, size: int) -> bytes:
        await self.delete(name)
        return bytes(size)

    async def listing(self, prefix: str) -> list[Listed]:
        await self.delete(prefix)
        return []


async def test_a_tenant_that_reads_without_end_leaves_others_some_of_the_budget() -> None:
    bucket = Bucket(cast(ObjectStore, Flaky()), requests=6000, hedge_s=9.0)  # 100 at once

    async def reads(tenant: str) -> int:
        asked = [bucket.read("any", 0, 1, tenant) for _ in range(100)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return sum(isinstance(one, bytes) for one in answers)

    counts = [await reads(tenant) for tenant in ("acme", "beta", "acme", "gamma", "")]
    assert 45 <= counts[0] <= 55
    assert counts[1] >= 20
    assert counts[2] < 10
    assert counts[3] >= 10
    assert counts[4] >= 10  # the pool itself has what is left


async def test_a_sign_of_life_is_sent_to_a_store_that_is_left_alone() -> None:
    """Its answer does not say that the store does other work, where other requests have failed."""
    flaky = Flaky()
    bucket = Bucket(cast(ObjectStore, flaky), requests=0, hedge_s=1.0)
    flaky.works = False
    for _ in range(3):
        with pytest.raises(Unavailable):
            await bucket.delete("any")
    flaky.works = True
    await bucket.show("servers/", "me", b"")
    assert bucket.problem
    with pytest.raises(Busy):
        await bucket.delete("any")


@pytest.mark.parametrize(("story", "left_alone"), [("xx.xx.", 0), ("x." * 50, 0), ("xxx", 1)])
async def test_a_store_is_left_alone_after_failures_in_a_row(
    story: str, left_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky, lines = Flaky(), list[str]()
    for level in ("error", "warning"):
        monkeypatch.setattr(bucket_module.log, level, lambda line, **_: lines.append(line))
    bucket = Bucket(cast(ObjectStore, flaky), requests=0, hedge_s=1.0)
    for works in story:
        flaky.works = works == "."
        with contextlib.suppress(Unavailable):
            await bucket.delete("any")
    flaky.works, before = True, flaky.asked
    with pytest.raises(Busy) if left_alone else contextlib.nullcontext():
        await bucket.delete("any")
    assert flaky.asked == before + (not left_alone)
    assert bucket.counters["cold_failures"] == story.count("x")
    assert lines == ["object store fails", "object store answers again"][: 2 - left_alone]


class Hangs:
    """A store that answers when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = asyncio.Event()

    async def get(self, name: str, start: int, size: int) -> bytes:
        self.asked += 1
        await self.answers.wait()
        raise Gone("there is no such object")


async def test_one_reader_tries_a_store_that_was_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have their misses at once: it may hang as before."""
    monkeypatch.setattr("kvpool.server.cold.bucket.REQUEST_S", 0.05)
    monkeypatch.setattr("kvpool.server.cold.bucket._PAUSE_S", 0.01)
    monkeypatch.setattr("kvpool.server.cold.bucket._PAUSE_MAX_S", 0.01)
    hangs = Hangs()
    bucket = Bucket(cast(ObjectStore, hangs), requests=0, hedge_s=9.0)

    async def readers() -> list[type[Unavailable]]:
        found = await asyncio.gather(
            *(bucket.read("any", 0, 1) for _ in range(20)), return_exceptions=True
        )
        return [type(one) for one in found if isinstance(one, Unavailable)]

    assert (await readers()).count(Unavailable) == 20, "nobody knows yet"
    for _ in range(2):
        await asyncio.sleep(0.03)
        before = hangs.asked
        assert sorted(await readers(), key=str) == [Unavailable, *[Busy] * 19]
        assert hangs.asked == before + 1
    await asyncio.sleep(0.03)
    trying = asyncio.create_task(bucket.read("any", 0, 1))
    await asyncio.sleep(0)
    trying.cancel()
    await asyncio.wait([trying])
    hangs.answers.set()
    with pytest.raises(Gone):
        await bucket.read("any", 0, 1)
    assert bucket.problem == "", "that there is no such object is an answer"
    assert await readers() == [Gone] * 20


async def test_a_store_that_answers_again_is_asked_also_beside_a_request_that_still_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.server.cold.bucket._PAUSE_S", 0.01)
    monkeypatch.setattr("kvpool.server.cold.bucket._PAUSE_MAX_S", 0.01)
    hangs, puts = Hangs(), asyncio.Event()

    async def put(name: str, data: object) -> None:
        await puts.wait()

    async def delete(name: str) -> None:
        hangs.asked += 1

    monkeypatch.setattr("kvpool.server.cold.bucket.REQUEST_S", 0.05)
    hangs.put, hangs.delete = put, delete  # type: ignore[attr-defined]
    bucket = Bucket(cast(ObjectStore, hangs), requests=0, hedge_s=9.0)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await bucket.read("any", 0, 1)
    await asyncio.sleep(0.03)
    putting = asyncio.create_task(bucket.put("large", b"x"))
    await asyncio.sleep(0)
    hangs.answers.set()
    with pytest.raises(Gone):
        await bucket.read("any", 0, 1)
    await bucket.delete("any")
    puts.set()
    await putting


@pytest.mark.parametrize("steps", [0, 2])
async def test_no_block_enters_behind_an_object_that_leaves(steps: int) -> None:
    """It was to be found again, and had to make room meanwhile: nobody would look for its blocks,
    which would be announced and never read."""
    cold = ColdStore(1 << 30, 4096)
    stack = TieredStore([FrontStore(1 << 20), FileStore(1 << 20), cold])
    context = cast(ServerContext, SimpleNamespace(store=stack, on_change=lambda: None))
    index = ColdIndex(context, cold, cast(Bucket, None), KEYS)
    one = index.book.enter(NAME, 64_000, 0.0, parse_tail(packed()[-TAIL.size :], len(packed())))
    blocks = [ColdBlock(ONE, 0, b"%032d" % n, bytes(32), n * 64, 64, 1, 1) for n in range(1000)]
    one.places.extend(block.position for block in blocks)
    dropping = asyncio.create_task(index.drop(one))
    for _ in range(steps):
        await asyncio.sleep(0)
    await index.enter(one, blocks)
    await dropping
    assert not index.book.by_name
    assert not cold.index.stored
    check_invariants(stack)


@pytest.mark.parametrize("size_max", [2500, 1300])
async def test_writers_at_the_same_time_share_the_room_there_is(size_max: int) -> None:
    stack = TieredStore([FrontStore(1 << 20), FileStore(1 << 20), ColdStore(size_max, 1)])
    context: Any = SimpleNamespace(store=stack, on_change=lambda: None, server="s", epoch=1)
    takes: Any = SimpleNamespace(put=lambda *_: asyncio.sleep(0.01), delete=Flaky().delete)
    index = ColdIndex(context, cast(ColdStore, stack.stores[-1]), takes, KEYS)
    writer, sizes = ObjectWriter(context, index, ColdSettings(), Counter()), list[int]()
    for given_up in (False, True, False):
        tasks = []
        for number in range(2 * len(sizes), 2 * len(sizes) + 2):
            draft = _Draft(f"blocks/s/{number}", 1)
            draft.payload += bytes(1000)
            draft.blocks.append(ColdBlock(ONE, 0, b"%032d" % number, b"", 0, 1000, 1, 1))
            tasks.append(asyncio.create_task(writer._put(draft)))
        await asyncio.sleep(0.001)
        if given_up:
            tasks[0].cancel()
        await asyncio.wait(tasks)
        sizes.append(index.book.size)
    assert max(sizes) <= size_max
    assert (index.book.coming, len(index.book.by_name)) == (0, size_max // 1200)
