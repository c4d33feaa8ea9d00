"""One engine's events and the pool's as one stream: what a router believes is what there is."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvpool import PoolEvent, PoolEventKind
from kvpool.errors import ConfigError, MasterLost
from kvpool.kv_events import ClearedEvent, EventHash, KVEvent, RemovedEvent, StoredEvent
from kvpool.net import event_subscriber
from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
from kvpool.net.event_subscriber import Arrival, EngineBatch, EventSubscriber, Sequence
from kvpool.ops.engine_stream import EngineStream
from kvpool.ops.event_service import publish_engine
from tests.conftest import eventually
from tests.ops.test_pool_stream import AT, ONE, Subscriber, digest, removed, stored

BLOCK = 4
GPU = ("GPU", None, None)
NEAR, NEAR_DISK = ("CPU", "LOCAL", None), ("STORAGE", "LOCAL", None)
FAR = ("CPU", "REMOTE", "kvpool")


def told(*hashes: EventHash, first: int = 0, **fields: object) -> StoredEvent:
    """The engine has these blocks of a chain on its device."""
    event = StoredEvent(
        block_hashes=list(hashes),
        parent_block_hash=first or None,
        token_ids=list(range(len(hashes) * BLOCK)),
        block_size=BLOCK,
        lora_id=None,
        lora_name=None,
        medium="GPU",
    )
    return msgspec.structs.replace(event, **fields)


def gone(*hashes: EventHash) -> RemovedEvent:
    return RemovedEvent(block_hashes=list(hashes), medium="GPU")


def here(server: str, host: str = "here") -> PoolEvent:
    return PoolEvent(PoolEventKind.BACK, AT, server, host)


RESET, LIVE = PoolEvent(PoolEventKind.RESET, AT), PoolEvent(PoolEventKind.LIVE, AT)


class Played:
    """A relay without sockets, and the router behind it."""

    def __init__(self, **options: int) -> None:
        self.stream = EngineStream(ONE, "shared", "here", **options)  # type: ignore[arg-type]
        self.router = Subscriber()
        self.pool(here("a"), here("b", "there"))

    def engine(self, *events: KVEvent) -> list[KVEvent]:
        self.router.take(events)
        added = self.stream.on_engine(events)
        self.router.take(added)
        return added

    def pool(self, *events: PoolEvent) -> list[KVEvent]:
        added = [one for event in events for batch in self.stream.on_pool(event) for one in batch]
        self.router.take(added)
        return added


def test_a_block_is_announced_wherever_the_pool_has_it() -> None:
    played = Played()
    assert not played.pool(stored("a", ONE, 1)), "its tokens are not known"
    (added,) = played.engine(told(1, 2))
    assert isinstance(added, StoredEvent)
    assert (added.block_hashes, added.token_ids, added.session_id) == ([1], [0, 1, 2, 3], None)
    assert played.router.known == {1: {GPU, NEAR}, 2: {GPU}}
    played.pool(stored("b", ONE, 2))
    assert played.router.known == {1: {GPU, NEAR}, 2: {GPU, FAR}}
    played.engine(gone(1, 2))
    assert played.router.known == {1: {NEAR}, 2: {FAR}}, "the pool has them still"
    played.pool(removed("a", ONE, 1), removed("b", ONE, 2))
    assert not played.router.known


def test_the_nearest_copy_counts_and_the_next_one_when_it_goes() -> None:
    played = Played()
    played.engine(told(1))
    played.pool(stored("b", ONE, 1))
    assert played.router.known == {1: {GPU, FAR}}
    played.pool(stored("a", ONE, 1, tier="nvme"))
    assert played.router.known == {1: {GPU, NEAR_DISK}}
    played.pool(stored("a", ONE, 1))
    assert played.router.known == {1: {GPU, NEAR}}
    played.pool(PoolEvent(PoolEventKind.LOST, AT, "a"))
    assert played.router.known == {1: {GPU, FAR}}
    played.pool(here("a"))
    assert played.router.known == {1: {GPU, NEAR}}
    played.pool(PoolEvent(PoolEventKind.CLEARED, AT, "a"))
    assert played.router.known == {1: {GPU, FAR}}


def test_a_chain_is_one_event_with_its_parents_and_tokens() -> None:
    played = Played()
    played.engine(told(*range(1, 9), session_id="s", extra_keys=[("x",), *[None] * 7]))
    (added,) = played.pool(stored("a", ONE, *range(2, 9)))
    assert isinstance(added, StoredEvent)
    assert added.block_hashes == list(range(2, 9))
    assert added.parent_block_hash == 1
    assert added.token_ids == list(range(BLOCK, 8 * BLOCK))
    assert added.session_id == "s"
    assert not played.pool(stored("a", ONE, 1)), "vllm-router forgets the engine at its extra keys"


def test_whole_hashes_are_related_by_their_last_64_bits() -> None:
    played = Played()
    played.engine(told(digest(7)))
    played.pool(stored("a", ONE, 7))
    assert played.router.known == {digest(7): {GPU, NEAR}}


@pytest.mark.parametrize(
    "event",
    [
        told(1, token_ids=[1]),
        told(1, block_size=0, token_ids=[]),
        told(1, group_idx=1),
        told(1, medium="CPU", locality="REMOTE", ownership="kvpool"),
    ],
)
def test_what_cannot_be_related_is_left_alone(event: StoredEvent) -> None:
    played = Played()
    played.pool(stored("a", ONE, 1))
    assert not played.engine(event)


def test_an_engine_that_clears_has_to_tell_anew() -> None:
    """Its weights may have changed: what the pool has under the old name is of no use to it."""
    played = Played()
    played.pool(stored("a", ONE, 1, 2))
    played.engine(told(1, 2))
    assert not played.engine(ClearedEvent())
    assert not played.router.known
    played.pool(stored("b", ONE, 1), removed("a", ONE, 1))
    assert not played.router.known
    played.engine(ClearedEvent(), told(2))
    assert played.router.known == {2: {GPU, NEAR}}


def test_an_engine_that_is_lost_keeps_what_the_pool_has_of_it() -> None:
    played = Played()
    played.pool(stored("a", ONE, 1))
    played.engine(told(1, 2))
    for batch in played.stream.on_engine_lost():
        played.router.take(batch)
    assert played.router.known == {1: {NEAR}}
    played.engine(told(2))
    played.pool(stored("b", ONE, 2))
    assert played.router.known == {1: {NEAR}, 2: {GPU, FAR}}


def test_a_map_that_is_read_anew_takes_back_only_what_is_gone() -> None:
    played = Played()
    played.engine(told(1, 2, 3))
    played.pool(stored("a", ONE, 1, 2, 3))
    changes = played.pool(RESET, here("a"), stored("a", ONE, 2), stored("a", ONE, 3, tier="nvme"))
    assert played.router.known == {1: {GPU, NEAR}, 2: {GPU, NEAR}, 3: {GPU, NEAR_DISK}}
    assert sum(len(one.block_hashes) for one in changes) == 2  # type: ignore[union-attr]
    played.pool(LIVE)
    assert played.router.known == {1: {GPU}, 2: {GPU, NEAR}, 3: {GPU, NEAR_DISK}}


def test_a_map_that_is_read_anew_does_not_flicker() -> None:
    """A copy that goes while the map is read: the other one may be in a part that still comes."""
    played = Played()
    played.engine(told(1))
    played.pool(stored("a", ONE, 1))
    changes = played.pool(RESET, here("a"), stored("a", ONE, 1), removed("a", ONE, 1))
    assert not changes
    played.pool(stored("b", ONE, 1), LIVE)
    assert played.router.known == {1: {GPU, FAR}}


def test_a_server_may_say_later_on_which_host_it_is() -> None:
    played = Played()
    played.engine(told(1, 2))
    played.pool(stored("c", ONE, 1))
    assert played.router.known == {1: {GPU, FAR}, 2: {GPU}}
    played.pool(here("c"), stored("c", ONE, 2), LIVE)
    assert played.router.known == {1: {GPU, NEAR}, 2: {GPU, NEAR}}


def test_what_is_known_is_bounded() -> None:
    played = Played(known_max=10, copies_max=15)
    played.pool(stored("a", ONE, *range(1, 21)))
    assert played.stream.left_out == 5
    played.engine(told(*range(1, 21)))
    assert len(played.stream) == 10
    announced = {hash for hash, where in played.router.known.items() if NEAR in where}
    assert announced == set(range(11, 16)), "the oldest are taken back"


def test_a_snapshot_is_what_a_router_believes_that_was_there_from_the_start() -> None:
    for seed in range(30):
        chance, played = random.Random(seed), Played()
        for _ in range(60):
            numbers = [chance.randrange(1, 40) for _ in range(chance.randrange(1, 5))]
            server = chance.choice("ab")
            match chance.randrange(8):
                case 0 | 1 | 2:
                    played.engine(told(*dict.fromkeys(numbers)))
                case 3:
                    played.engine(gone(*numbers))
                case 4 | 5:
                    tier = chance.choice(["dram", "nvme"])
                    played.pool(stored(server, ONE, *numbers, tier=tier))
                case 6:
                    played.pool(removed(server, ONE, *numbers))
                case 7:
                    kind = chance.choice([PoolEventKind.LOST, PoolEventKind.BACK])
                    host = "here" if server == "a" else "there"
                    played.pool(PoolEvent(kind, AT, server, host))
        late = Subscriber()
        for part in played.stream.snapshot():
            late.take(part)
        assert late.known == played.router.known, seed


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_say_what_has_happened() -> None:
    sequence = Sequence()
    assert sequence.on_live(5) is Arrival.NEXT
    assert sequence.on_live(6) is Arrival.NEXT
    assert sequence.on_live(9) is Arrival.GAP
    assert [sequence.on_replayed(number) for number in (6, 7, 8)] == [False, True, True]
    assert sequence.next == 9
    assert sequence.on_replayed(9)  # the replay goes on beyond what was asked for
    assert sequence.on_replayed(10)
    assert sequence.on_live(10) is Arrival.KNOWN
    assert sequence.on_live(11) is Arrival.NEXT
    assert sequence.on_live(0) is Arrival.RESTART
    sequence.begin_again()
    sequence.skip(0)
    assert sequence.on_live(1) is Arrival.NEXT
    assert sequence.on_live(1) is Arrival.RESTART


# --- with sockets ---------------------------------------------------------------------------------


ANY = "tcp://127.0.0.1:0"
Found = list[EngineBatch]


def engine_at(endpoint: str = ANY, replay: str = ANY, kept: int = 100) -> EventPublisher:
    engine = EventPublisher(endpoint, replay, buffer=ReplayBuffer(kept_max=kept))
    engine.start()
    return engine


@asynccontextmanager
async def read_from(engine: EventPublisher, replay: str | None = None) -> AsyncIterator[Found]:
    """What a reader has read of an engine; both are closed in the end."""
    reader = EventSubscriber(engine.endpoint, engine.replay_endpoint if replay is None else replay)
    found: Found = []

    async def collect() -> None:
        async for one in reader.batches():
            found.append(one)

    await asyncio.sleep(0.3)  # it is connected, and reads nothing yet
    task = asyncio.create_task(collect())
    try:
        yield found
    finally:
        task.cancel()
        reader.close()
        engine.close()


async def arrived(found: Found, count: int) -> None:
    await eventually(lambda: len(found) == count)


async def test_a_reader_that_comes_late_or_misses_some_asks_for_them() -> None:
    engine = engine_at()
    for number in range(3):
        engine.publish([told(number + 1)], time.time())
    async with read_from(engine) as found:
        await arrived(found, 3)
        engine.buffer.add(b"\x93\xca\x00\x00\x00\x00\x90\x00")  # sent, and lost on the way
        engine.publish([told(5)], time.time())
        await arrived(found, 5)
        assert not [one for one in found if one.lost]
        assert all(one.batch is not None for one in found)


@pytest.mark.parametrize("replay", [None, ""])
async def test_a_gap_that_nobody_can_fill_is_noticed(replay: str | None) -> None:
    engine = engine_at(kept=1)
    async with read_from(engine, replay) as found:
        await asyncio.sleep(0.1)
        engine.publish([told(1)], time.time())
        await arrived(found, 1)
        for _ in range(3):
            engine.buffer.add(b"lost")
        engine.publish([told(5)], time.time())
        await arrived(found, 2)
        assert "missing" in found[1].lost
        engine.publish([told(6)], time.time())
        await arrived(found, 3)
        assert not found[2].lost


async def test_what_the_replay_has_told_is_left_out_when_it_comes_again() -> None:
    """It was on its way when the reader asked. What follows it is read all the same."""
    engine = engine_at()
    async with read_from(engine) as found:
        for number in range(3):  # before the reader's first turn
            engine.publish([told(number + 1)], time.time())
        await arrived(found, 3)
        engine.publish([told(4)], time.time())
        await arrived(found, 4)
        batches = [one.batch.events for one in found if one.batch is not None and not one.lost]
        assert batches == [[told(number + 1)] for number in range(4)]


async def test_a_replay_address_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_subscriber, "_REPLAY_TIMEOUT_S", 0.2)
    engine = engine_at()
    async with read_from(engine, "tcp://127.0.0.1:9") as found:
        await asyncio.sleep(0.3)
        engine.publish([told(1)], time.time())
        await arrived(found, 1)


async def test_an_engine_is_started_again_and_sends_nonsense() -> None:
    first = engine_at()
    async with read_from(first) as found:
        await asyncio.sleep(0.1)
        for number in range(5):
            first.publish([told(number + 1)], time.time())
        await arrived(found, 5)
        first.close()
        engine = engine_at(first.endpoint, first.replay_endpoint)
        engine.publish([told(10)], time.time())  # before the reader is connected again
        await asyncio.sleep(1.0)
        engine.publish([told(11)], time.time())
        await arrived(found, 8)
        assert "started again" in found[5].lost
        assert [one.batch.events[0].block_hashes for one in found[6:] if one.batch] == [[10], [11]]  # type: ignore[union-attr]
        engine.publish_encoded(b"nonsense")
        await arrived(found, 9)
        assert found[8].lost
        assert (found[8].batch, found[8].payload) == (None, b"")
        engine.close()


def test_an_address_that_is_none_is_refused() -> None:
    async def make() -> None:
        EventSubscriber("nowhere")

    with pytest.raises(ConfigError, match="cannot read nowhere"):
        asyncio.run(make())


async def test_an_error_of_the_pool_ends_a_relay_as_it_is() -> None:
    """The command prints it as one line; it would not know a group."""

    async def lost() -> AsyncIterator[PoolEvent]:
        if publisher is not None:
            raise MasterLost("no master answers")
        yield RESET

    async def silent() -> AsyncIterator[EngineBatch]:
        await asyncio.Event().wait()
        yield EngineBatch(b"", None, "")

    publisher = EventPublisher("tcp://127.0.0.1:*", "")
    with pytest.raises(MasterLost):
        await publish_engine(silent(), lost(), EngineStream(ONE, "shared", "here"), publisher)
