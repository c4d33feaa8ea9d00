"""The pool's own stream of KV events: what a subscriber believes of it is what the pool has."""

from __future__ import annotations

import asyncio
import errno
import random
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvpool import EventPosition, PoolEvent, PoolEventKind, dev
from kvpool.errors import BadMessage, ConfigError
from kvpool.kv_events import (
    BATCH_BYTES_MAX,
    ClearedEvent,
    EventHash,
    KVEvent,
    RemovedEvent,
    StoredEvent,
    decode_batch,
    short_hash,
)
from kvpool.net import event_publisher
from kvpool.net.event_publisher import SNAPSHOT, EventPublisher, ReplayBuffer
from kvpool.net.event_subscriber import EventSubscriber
from kvpool.ops.event_service import publish_pool
from kvpool.ops.pool_stream import PoolStream
from kvpool.types import Namespace
from tests.conftest import NAMESPACE, eventually, keys, values

AT = EventPosition(1, 1)
ONE, TWO = Namespace("one", 1), Namespace("two", 2)


class Subscriber:
    """A router: where it believes that each block is, by its medium and owner."""

    def __init__(self) -> None:
        self.believes: defaultdict[EventHash, set[tuple[str | None, ...]]] = defaultdict(set)

    def take(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if isinstance(event, ClearedEvent):
                self.believes.clear()
                continue
            where = (event.medium, event.locality, event.ownership)
            for hash in event.block_hashes:
                if isinstance(event, StoredEvent):
                    self.believes[hash].add(where)
                else:
                    self.believes[hash].discard(where)

    @property
    def known(self) -> dict[EventHash, set[tuple[str | None, ...]]]:
        return {hash: places for hash, places in self.believes.items() if places}


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(server: str, namespace: Namespace, *numbers: int, part: int = 0, tier: str = "dram"):
    return PoolEvent(
        PoolEventKind.STORED, AT, server, "", namespace, part, tier, tuple(map(digest, numbers))
    )


def removed(server: str, namespace: Namespace, *numbers: int, part: int = 0) -> PoolEvent:
    return stored(server, namespace, *numbers, part=part)._replace(kind=PoolEventKind.REMOVED)


def far(server: str, medium: str = "CPU") -> tuple[str, str, str]:
    return (medium, "REMOTE", f"kvpool/{server}")


def taken(stream: PoolStream, *events: PoolEvent) -> list[KVEvent]:
    return [one for event in events for batch in stream.apply(event) for one in batch]


def test_a_block_on_two_servers_is_lost_by_each_alone() -> None:
    stream, router = PoolStream(ONE), Subscriber()
    router.take(taken(stream, stored("a", ONE, 1), stored("b", ONE, 1, tier="nvme")))
    assert router.known == {1: {far("a"), far("b", "STORAGE")}}
    router.take(taken(stream, removed("a", ONE, 1)))
    assert router.known == {1: {far("b", "STORAGE")}}


def test_a_block_that_moves_to_another_tier_is_removed_and_stored() -> None:
    stream = PoolStream(ONE)
    taken(stream, stored("a", ONE, 1))
    assert not taken(stream, stored("a", ONE, 1)), "nothing has changed"
    gone, come = taken(stream, stored("a", ONE, 1, tier="nvme"))
    assert isinstance(gone, RemovedEvent)
    assert isinstance(come, StoredEvent)
    assert (gone.medium, come.medium) == ("CPU", "STORAGE")


def test_a_block_of_several_parts_is_stored_when_all_are_there() -> None:
    stream, router = PoolStream(TWO), Subscriber()
    router.take(taken(stream, stored("a", TWO, 1), stored("b", TWO, 1, part=1)))
    assert not router.known
    router.take(taken(stream, stored("a", TWO, 1, part=1, tier="nvme")))
    assert router.known == {1: {far("a", "STORAGE")}}
    router.take(taken(stream, removed("a", TWO, 1)))
    assert not router.known


@pytest.mark.parametrize("kind", [PoolEventKind.LOST, PoolEventKind.LEFT])
def test_a_lost_server_is_lost_with_all_its_blocks_and_back_with_them(kind: PoolEventKind) -> None:
    stream, router = PoolStream(ONE), Subscriber()
    lost, back = PoolEvent(kind, AT, "a"), PoolEvent(PoolEventKind.BACK, AT, "a")
    router.take(taken(stream, stored("a", ONE, 1, 2), stored("b", ONE, 2)))
    router.take(taken(stream, lost, lost, stored("a", ONE, 3), removed("a", ONE, 1)))
    assert router.known == {2: {far("b")}}
    assert {h for part in stream.snapshot() for e in part for h in e.block_hashes} == {2}  # type: ignore[union-attr]
    router.take(taken(stream, back))
    assert router.known == {2: {far("a"), far("b")}, 3: {far("a")}}
    router.take(taken(stream, PoolEvent(PoolEventKind.CLEARED, AT, "a")))
    assert router.known == {2: {far("b")}}
    assert len(stream) == 1


def test_other_namespaces_and_impossible_parts_are_left_out() -> None:
    stream = PoolStream(ONE)
    assert not taken(stream, stored("a", TWO, 1), stored("a", ONE, 1, part=7))
    assert not len(stream)


def test_hashes_are_the_engines_short_ones_or_the_whole_keys() -> None:
    key = bytes(range(32))
    event = PoolEvent(PoolEventKind.STORED, AT, "a", "", ONE, 0, "dram", (key,))
    for form, expected in (("short", short_hash(key)), ("full", key)):
        (one,) = taken(PoolStream(ONE, form), event)  # type: ignore[arg-type]
        assert isinstance(one, StoredEvent)
        assert one.block_hashes == [expected]
        assert (one.token_ids, one.parent_block_hash) == ([], None)


def test_too_many_copies_are_left_out_and_counted() -> None:
    stream = PoolStream(ONE, copies_max=3)
    taken(stream, stored("a", ONE, *range(5)))
    assert (len(stream), stream.left_out) == (3, 2)
    taken(stream, removed("a", ONE, *range(5)), stored("a", ONE, 7))
    assert len(stream) == 1


def test_nothing_is_large_or_long_however_much_a_server_has() -> None:
    stream = PoolStream(ONE)
    for first in range(0, 12_000, 1000):
        taken(stream, stored("a", ONE, *range(first, first + 1000)))
    for event in (
        PoolEvent(PoolEventKind.LOST, AT, "a"),
        PoolEvent(PoolEventKind.BACK, AT, "a"),
        PoolEvent(PoolEventKind.RESET, AT),
    ):
        for batch in stream.apply(event):
            hashes = [len(one.block_hashes) for one in batch if not isinstance(one, ClearedEvent)]
            assert sum(hashes) < 1400
            assert max(hashes, default=0) <= 512
    assert not len(stream)


def test_a_snapshot_that_a_reset_overtakes_has_nothing_of_before() -> None:
    stream = PoolStream(ONE)
    taken(stream, stored("a", ONE, *range(3000)))
    snapshot = stream.snapshot()
    assert next(snapshot)
    batches = stream.apply(PoolEvent(PoolEventKind.RESET, AT))
    assert next(batches) == [ClearedEvent()]
    assert not list(snapshot), "it would come behind the AllBlocksCleared"
    assert not [event for batch in batches for event in batch]


@pytest.mark.parametrize("seed", range(8))
def test_a_snapshot_taken_while_everything_changes_is_right_behind_its_numbers(seed: int) -> None:
    """As a subscriber is told: apply the stream up to a part's number, then the part."""
    rng, stream = random.Random(seed), PoolStream(TWO)
    always, late = Subscriber(), Subscriber()
    live: list[list[KVEvent]] = []

    def act() -> None:
        server, part = f"s{rng.randrange(3)}", rng.randrange(2)
        numbers = [rng.randrange(4000) for _ in range(rng.randrange(60))]
        kind = rng.choice([*[PoolEventKind.STORED] * 6, *PoolEventKind])
        event = stored(server, TWO, *numbers, part=part, tier=rng.choice(["dram", "nvme"]))
        for batch in stream.apply(event._replace(kind=kind)):
            live.append(batch)
            always.take(batch)
            if parts is not None and rng.random() < 0.5:
                snapshot_part()

    def snapshot_part() -> None:
        nonlocal done
        part = next(parts, None)  # type: ignore[arg-type]
        if part is None:
            done = True
            return
        catch_up()
        late.take(part)

    def catch_up() -> None:
        nonlocal heard
        for batch in live[heard:]:
            late.take(batch)
        heard = len(live)

    parts, done = None, False
    for _ in range(300):
        act()
    heard = len(live)
    parts = stream.snapshot()
    while not done:
        act()
    for _ in range(20):
        act()
    catch_up()
    assert late.known == always.known


# --- the sockets ------------------------------------------------------------------------------


#: Clients and publishers of the test that runs.
MADE: list[Client | EventPublisher] = []


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    """After a failure, too: zmq waits for ever for the end of a context that is dropped open."""
    yield
    for one in MADE:
        one.close()
    MADE.clear()


class Client:
    """A subscriber with vLLM's format, over real sockets."""

    def __init__(self, publisher: EventPublisher, own: str = "") -> None:
        """It comes from its `own` address, if it has one: `127.0.0.2:0;`."""
        self._context = zmq.asyncio.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.connect(publisher.endpoint)
        self.sub.subscribe(b"")
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.connect(publisher.replay_endpoint.replace("tcp://", f"tcp://{own}"))
        MADE.append(self)

    async def next(self) -> tuple[int, list[KVEvent]]:
        _, number, payload = await asyncio.wait_for(self.sub.recv_multipart(), 10)
        return int.from_bytes(number, "big"), decode_batch(payload).events

    async def ask(self, request: bytes) -> list[tuple[int, list[KVEvent]]]:
        await self.dealer.send_multipart([b"", request])
        found: list[tuple[int, list[KVEvent]]] = []
        while True:
            frames = await asyncio.wait_for(self.dealer.recv_multipart(), 10)
            empty, _, number, payload = frames
            assert empty == b""
            if number == struct.pack(">q", -1):
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), decode_batch(payload).events))

    def close(self) -> None:
        self._context.destroy(linger=0)


def started(**options: Any) -> EventPublisher:
    one = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", **options)
    MADE.append(one)
    one.start()
    return one


@pytest.fixture
async def publisher() -> EventPublisher:
    return started()


@pytest.fixture
async def client(publisher: EventPublisher) -> Client:
    one = Client(publisher)
    while True:  # a subscription takes a moment
        publisher.publish([ClearedEvent()], time.time())
        if await one.sub.poll(50):
            break
    await asyncio.sleep(0.05)
    while await one.sub.poll(0):
        await one.next()
    return one


async def test_a_replay_has_no_gap_at_any_length(publisher: EventPublisher, client: Client) -> None:
    first = publisher.buffer.next
    for number in range(500):
        publisher.publish(taken(PoolStream(ONE), stored("a", ONE, number)), time.time())
        if number % 100 == 0:
            await asyncio.sleep(0)
    found = await client.ask(struct.pack(">Q", first))
    assert [number for number, _ in found] == list(range(first, first + 500))
    assert [events[0].block_hashes for _, events in found] == [[n] for n in range(500)]  # type: ignore[union-attr]


@pytest.mark.parametrize("request_", [b"", b"x", SNAPSHOT, bytes(9), bytes(200)])
async def test_nonsense_harms_nobody(
    publisher: EventPublisher, client: Client, request_: bytes
) -> None:
    """A stream that cannot tell all that is there does not know that request either."""
    await client.dealer.send_multipart([b"", request_])
    await client.dealer.send_multipart([request_])
    await client.dealer.send_multipart([b"", request_, b"", b""])
    await asyncio.sleep(0.05)  # an answer to any of them would be taken for that to the next
    last = publisher.buffer.next - 1
    answers = await client.ask(struct.pack(">Q", last))
    assert [number for number, _ in answers] == [last]
    assert publisher.counts.refused == 3


@pytest.mark.parametrize("number", [10**12, 2**64 - 1])
async def test_the_future_is_an_empty_answer(
    publisher: EventPublisher, client: Client, number: int
) -> None:
    assert not await client.ask(struct.pack(">Q", number))
    assert await client.ask(struct.pack(">Q", 0))


def fill(publisher: EventPublisher) -> None:
    """More events than sockets take at once."""
    big = taken(PoolStream(ONE, "full"), stored("a", ONE, *range(500)))
    for _ in range(3000):
        publisher.publish(big, time.time())


async def asks_for_all(publisher: EventPublisher, own: str = "") -> Client:
    """A reader that reads nothing of what it has asked for."""
    silent = Client(publisher, own)
    silent.dealer.setsockopt(zmq.RCVHWM, 1)
    await silent.dealer.send_multipart([b"", struct.pack(">Q", 0)])
    return silent


async def test_a_reader_that_never_reads_is_given_up(
    publisher: EventPublisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "_READER_TIMEOUT_S", 0.3)
    fill(publisher)
    await asks_for_all(publisher)
    await eventually(lambda: bool(publisher._readers))
    await eventually(lambda: not publisher._readers)
    # And everybody else is served.
    last = publisher.buffer.next - 1
    assert [number for number, _ in await client.ask(struct.pack(">Q", last))] == [last]
    assert (publisher.counts.given_up, publisher.counts.replays) == (1, 1)


async def test_a_reader_that_has_gone_is_given_up_at_once(
    publisher: EventPublisher, client: Client
) -> None:
    fill(publisher)
    leaving = await asks_for_all(publisher)
    await eventually(lambda: publisher.readers == 1)
    leaving.close()
    began = time.monotonic()
    await eventually(lambda: publisher.readers == 0)
    assert time.monotonic() - began < event_publisher._READER_TIMEOUT_S / 2
    assert (publisher.counts.given_up, publisher.counts.replays) == (1, 0)


async def test_of_too_many_readers_the_oldest_of_who_has_most_are_given_up(
    publisher: EventPublisher, client: Client
) -> None:
    """Each holds a place in the buffer, and anybody may ask."""
    publisher._readers.total = 2
    fill(publisher)
    for own in ("127.0.0.2:0;", "", "", ""):
        await asks_for_all(publisher, own)
    await eventually(lambda: publisher.counts.given_up == 2)
    assert {one.peer for one in publisher._readers.values()} == {"127.0.0.1", "127.0.0.2"}
    last = publisher.buffer.next - 1
    assert [number for number, _ in await client.ask(struct.pack(">Q", last))] == [last]
    assert (publisher.counts.given_up, publisher.counts.replays) == (3, 1)


async def test_a_publisher_counts_what_it_has_sent_and_what_it_could_not() -> None:
    stream = PoolStream(ONE)
    one = started(buffer=ReplayBuffer(first=1, kept_max=10), snapshot=stream.snapshot)
    asking = Client(one)
    for number in range(20):
        one.publish(taken(stream, stored("a", ONE, number)), time.time())
    for first in (10, 11, 20, 21):  # 10 is not kept any more, 21 has not come yet
        await asking.ask(struct.pack(">Q", first))
    await asking.ask(SNAPSHOT)
    counts = one.counts
    assert (counts.batches, counts.replays, counts.snapshots) == (20, 4, 1)
    assert counts.too_late == 1
    assert one.buffer.bytes < counts.bytes
    assert one.readers == 0


async def test_a_request_that_fails_keeps_nobody_behind_it_waiting(
    publisher: EventPublisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells again that there are requests."""
    monkeypatch.setattr(publisher, "_snapshot", lambda: 1 / 0)
    for _ in range(3):
        await client.dealer.send_multipart([b"", SNAPSHOT])
    async with asyncio.timeout(5):
        last = publisher.buffer.next - 1
        assert [number for number, _ in await client.ask(struct.pack(">Q", last))] == [last]
    assert publisher.counts.refused == 3


def test_the_buffer_is_bounded_in_batches_and_bytes() -> None:
    buffer = ReplayBuffer(first=5, kept_max=3, bytes_max=100)
    for number in range(5, 10):
        assert buffer.add(bytes(10)) == number
    assert [one.number for one in buffer.since(0, 10)] == [7, 8, 9]
    assert [one.number for one in buffer.since(8, 1)] == [8]
    buffer.add(bytes(95))
    assert [one.number for one in buffer.since(0, 10)] == [10]
    buffer.add(bytes(500))  # the last one is kept, or its loss could never be mended
    assert (len(buffer), buffer.bytes) == (1, 500)
    assert not list(buffer.since(12, 10))


def test_batches_of_strangers_are_bad_messages() -> None:
    wrong: list[Any] = [b"", b"\xff", b"\x93", bytes(BATCH_BYTES_MAX + 1), b"\x91" * 5000]
    for payload in wrong:
        with pytest.raises(BadMessage):
            decode_batch(payload)


async def test_an_address_that_is_taken_is_one_sentence(publisher: EventPublisher) -> None:
    second = EventPublisher(publisher.endpoint)
    with pytest.raises(ConfigError, match="cannot publish at"):
        second.start()


async def test_a_process_that_may_open_no_file_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Context, "socket", full)
    with pytest.raises(ConfigError, match=r"publish at .*Too many open files"):
        EventPublisher("tcp://127.0.0.1:0").start()
    with pytest.raises(ConfigError, match=r"read .*Too many open files"):
        EventSubscriber("tcp://127.0.0.1:1")


async def test_a_router_that_starts_late_has_the_whole_pool(pool_dev: dev.Dev) -> None:
    """From a real pool: a snapshot on request, then live from there."""
    chain = keys("chain", 30)
    (server,) = pool_dev.servers
    stream = PoolStream(NAMESPACE)
    publisher = started(buffer=ReplayBuffer(first=1), snapshot=stream.snapshot)
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain[:20], values(chain[:20]))
        following = asyncio.create_task(publish_pool(pool.events(), stream, publisher))
        await eventually(lambda: len(stream) == 20)
        router, client = Subscriber(), Client(publisher)
        await asyncio.sleep(0.3)
        for number, events in await client.ask(SNAPSHOT):
            assert number == publisher.buffer.next - 1, "that of the last batch before it"
            router.take(events)
        assert set(router.known) == set(map(short_hash, chain[:20]))
        await pool.write(NAMESPACE, chain[20:], values(chain[20:]), parent=chain[19])
        await pool.remove(NAMESPACE, chain[:5])
        async with asyncio.timeout(10):
            while set(router.known) != set(map(short_hash, chain[5:])):
                router.take((await client.next())[1])
        await server.close()
        async with asyncio.timeout(10):
            while router.known:
                router.take((await client.next())[1])
        following.cancel()
