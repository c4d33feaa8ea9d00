"""Our KV events as llm-d's indexer reads them: by the published format alone.

There is no package of it to run (it is written in Go), so this reader is made from the format: it
shares no code with the product, and refuses whatever the format does not have.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvpool import dev
from kvpool.kv_events import ClearedEvent, KVEvent, Residency, StoredEvent, removals, short_hash
from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
from kvpool.net.event_subscriber import EventSubscriber
from kvpool.ops.engine_stream import EngineStream
from kvpool.ops.event_service import publish_engine, publish_pool
from kvpool.ops.pool_stream import PoolStream
from kvpool.runtime import host_id
from tests.conftest import NAMESPACE, eventually, keys, values

TOPIC: Final = "kv@pod-1@tiny"
ANY: Final = "tcp://127.0.0.1:0"
BLOCK: Final = 4
GPU: Final = Residency("GPU")
#: Of each event: the fields that must be there, also when they are nil, and those that may be.
STORED: Final = (
    {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"}
    | {"lora_name"},
    {"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}
    | {"locality", "ownership", "session_id"},
)
REMOVED: Final = ({"block_hashes", "medium"}, {"group_idx", "locality", "ownership"})
MEDIA: Final = {"GPU", "CPU", "STORAGE"}


class Index:
    """What it knows: for each block, the pods that have it, and in which tier."""

    def __init__(self) -> None:
        self.places: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)
        self.model = ""
        self.numbers: list[int] = []

    def take(self, frames: list[bytes]) -> None:
        """One message: topic, number, batch."""
        topic, number, payload = frames
        kind, pod, self.model = topic.decode().split("@")
        assert kind == "kv"
        self.numbers.append(struct.unpack(">Q", number)[0])
        batch = msgspec.msgpack.decode(payload)
        assert isinstance(batch, list)
        assert len(batch) in (2, 3)
        assert isinstance(batch[0], float)
        assert all(rank is None or isinstance(rank, int) for rank in batch[2:])
        assert len(batch[1]) <= 4096
        for event in batch[1]:
            self._event(pod, event)

    def _event(self, pod: str, event: dict[str, Any]) -> None:
        fields = event.keys() - {"type"}
        match event["type"]:
            case "BlockStored":
                _check(fields, STORED)
                count, tokens = len(event["block_hashes"]), event["token_ids"]
                assert len(tokens) == count * event["block_size"]
                assert all(isinstance(token, int) for token in tokens)
                for name in _hashes(event):
                    self.places[name].add((pod, _tier(event)))
            case "BlockRemoved":
                _check(fields, REMOVED)
                for name in _hashes(event):
                    self.places[name].discard((pod, _tier(event)))
            case "AllBlocksCleared":
                assert not fields
                self.places.clear()
            case other:
                raise AssertionError(other)

    @property
    def known(self) -> dict[int, set[str]]:
        return {name: {tier for _, tier in pods} for name, pods in self.places.items() if pods}

    def longest(self, chain: list[int]) -> int:
        """Blocks from the first one on that the pod has, in any tier: its score."""
        missing = (number for number, name in enumerate(chain) if not self.places.get(name))
        return next(missing, len(chain))


def _check(fields: set[str], format: tuple[set[str], set[str]]) -> None:
    needed, allowed = format
    assert needed <= fields, needed - fields
    assert fields <= needed | allowed, fields - needed - allowed


def _hashes(event: dict[str, Any]) -> Iterator[int]:
    for one in event["block_hashes"]:
        whole = isinstance(one, bytes)
        assert len(one) == 32 if whole else 0 <= one < 1 << 64
        yield int.from_bytes(one[-8:], "big") if whole else one


def _tier(event: dict[str, Any]) -> str:
    assert event["medium"] in MEDIA
    return str(event["medium"]).lower()


@pytest.fixture
def index() -> Index:
    return Index()


async def follow(index: Index, endpoint: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        sub.connect(endpoint)
        while True:
            index.take(await sub.recv_multipart())


def told(digests: list[bytes], first: int, last: int) -> StoredEvent:
    names = [short_hash(one) for one in digests]
    return StoredEvent(
        block_hashes=list(names[first:last]),
        parent_block_hash=names[first - 1] if first else None,
        token_ids=list(range(first * BLOCK, last * BLOCK)),
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="conversation",
    )


async def test_a_relayed_engine_and_the_pool_are_one_pod_in_its_index(index: Index) -> None:
    digests = keys("llm-d", 6)
    chain = [short_hash(one) for one in digests]
    engine = EventPublisher(ANY, ANY)
    engine.start()
    async with dev.serve("64MiB") as serving, serving.pool() as pool:
        stream = EngineStream(NAMESPACE, "plain", host_id())
        relay = EventPublisher(ANY, ANY, topic=TOPIC, buffer=ReplayBuffer(first=1))
        relay.start()
        reader = EventSubscriber(engine.endpoint, engine.replay_endpoint)
        tasks = [
            asyncio.create_task(publish_engine(reader.batches(), pool.events(), stream, relay)),
            asyncio.create_task(follow(index, relay.endpoint)),
        ]

        def publish(*events: KVEvent) -> None:
            engine.publish(list(events), 1.0)

        try:
            await asyncio.sleep(0.5)
            publish(told(digests, 0, 4), told(digests, 4, 6))
            await eventually(lambda: index.longest(chain) == 6)
            await pool.write(NAMESPACE, digests[:4], values(digests[:4]))
            both = {name: {"gpu", "cpu"} for name in chain[:4]}
            await eventually(lambda: index.known == both | {n: {"gpu"} for n in chain[4:]})
            publish(*removals([(name, 0, GPU) for name in chain]))
            await eventually(lambda: index.known == {name: {"cpu"} for name in chain[:4]})
            assert index.longest(chain) == 4
            await pool.remove(NAMESPACE, digests[1:2])
            await eventually(lambda: index.longest(chain) == 1)
            publish(ClearedEvent())
            await eventually(lambda: not index.known)
            assert index.model == "tiny"
            assert index.numbers == list(range(index.numbers[0], index.numbers[-1] + 1))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            reader.close()
            relay.close()
            engine.close()


@pytest.mark.parametrize("hashes", ["short", "full"])
async def test_the_pools_own_stream_can_be_read(index: Index, hashes: Any) -> None:
    digests = keys(f"llm-d {hashes}", 3)
    chain = [short_hash(one) for one in digests]
    async with dev.serve("64MiB") as serving, serving.pool() as pool:
        stream = PoolStream(NAMESPACE, hashes)
        publisher = EventPublisher(ANY, topic=TOPIC, rank=None)
        publisher.start()
        tasks = [
            asyncio.create_task(follow(index, publisher.endpoint)),
            asyncio.create_task(publish_pool(pool.events(), stream, publisher)),
        ]
        try:
            await asyncio.sleep(0.5)
            await pool.write(NAMESPACE, digests, values(digests))
            await eventually(lambda: index.longest(chain) == 3)
            await pool.remove(NAMESPACE, digests[2:])
            await eventually(lambda: index.longest(chain) == 2)
            assert index.known == {name: {"cpu"} for name in chain[:2]}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            publisher.close()


def test_the_reader_is_strict(index: Index) -> None:
    """Else these tests would show nothing."""
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}
    frames = [TOPIC.encode(), struct.pack(">Q", 1)]
    index.take([*frames, msgspec.msgpack.encode([1.0, [event], None])])
    stored = msgspec.to_builtins(told(keys("strict", 1), 0, 1))
    for wrong in (
        {**event, "lease_until": 1},
        {"type": "BlockRemoved", "block_hashes": [1]},
        {**event, "medium": "DRAM"},
        {**event, "block_hashes": [-1]},
        {**stored, "token_ids": [1]},
        {name: value for name, value in stored.items() if name != "lora_name"},
        {"type": "BlockMoved"},
    ):
        with pytest.raises(AssertionError):
            index.take([*frames, msgspec.msgpack.encode([1.0, [wrong], None])])
