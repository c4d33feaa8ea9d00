"""Worlds of their own for what leaves the pool: events for routers, promises between engines, loads
over several ways, and blocks of another codec.

Each takes a seed, plays some hundred steps of the real code with made-up time, and returns a
sentence about what went wrong, or nothing. `planted_streams.py` has mistakes that they must find:

    python -m tests.simulation.streams --bug lost-removal --seeds 0:40
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

if __name__ == "__main__":
    from tests.simulation.planted_streams import BUGS
    from tests.simulation.small_worlds import plant_chosen, play_worlds

    SEEDS = plant_chosen("tests.simulation.streams", BUGS)

from kvpool import ReadResult
from kvpool.client import pool_events
from kvpool.client.attempts import Attempt
from kvpool.kv_events import ClearedEvent, KVEvent, StoredEvent, decode_batch, encode_batch
from kvpool.kv_events import EventBatch as Batch
from kvpool.master import follower_requests
from kvpool.master.state.change_ring import CHANGES_MAX
from kvpool.net.event_publisher import EventPublisher, ReplayBuffer, _Reader
from kvpool.net.event_subscriber import Arrival
from kvpool.net.event_subscriber import Sequence as Numbers
from kvpool.ops.pool_stream import PoolStream
from kvpool.types import Match, Namespace, ReadStatus, Replica, Run
from kvpool_codecs import codec, coder
from kvpool_codecs.checks import Sample, like_kv
from kvpool_codecs.codec import Flat
from kvpool_codecs.coded_tail import TAIL_BYTES
from kvpool_codecs.coder import Coder
from kvpool_codecs.lossless import Lossless
from kvpool_connector.form_choice import fields_of
from kvpool_connector.plan.planner import Planner
from kvpool_connector.records.messages import LoadRequest, LoadResult
from kvpool_connector.records.promises import BlockWait, PromisedBlocks, PromiseState
from kvpool_connector.records.values import CacheGroup, PlannerLimits, RequestHints
from kvpool_engines.comparison import LayerBytes
from tests.client.test_ways import HEDGE_S, Load
from tests.connector.test_codecs import unpacked
from tests.master.test_changes import NAMESPACES, Asked, Fleet, reader
from tests.simulation.loop import SimLoop

# --- events -----------------------------------------------------------------------------------

_ACTS: Final = 250
#: The loop's turns until everything has been read.
_TURNS_MAX: Final = 20_000
_KEPT: Final = 12  # batches for replay: some gaps cannot be filled


class Router:
    """A subscriber that loses messages, and does what docs/events.md says that it should do."""

    def __init__(self, publisher: EventPublisher, chance: random.Random) -> None:
        self.believes: dict[bytes, set[str]] = {}
        self._publisher = publisher
        self._chance = chance
        self._sequence = Numbers()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._deaf = 0  # messages that are lost from now on
        self._parts: Iterator[tuple[bytes, bytes]] = iter(())
        self._held: tuple[int, bytes] | None = None  # a part that waits for its number
        self._begin_anew()

    def hear(self, number: int, payload: bytes) -> None:
        """A message is on its way: it may be lost, and wait. Parts of a snapshot come between."""
        if self._deaf == 0 and self._chance.random() < 0.02:
            self._deaf = self._chance.randrange(3 * _KEPT)
        self._deaf = max(0, self._deaf - 1)
        if not self._deaf and self._chance.random() < 0.9:
            self._queue.append((number, payload))
        while self._queue and self._chance.random() < 0.6:
            self._take_live(*self._queue.popleft())
        if self._chance.random() < 0.4:
            self._take_part()

    def finish(self) -> None:
        """Nothing is lost any more, and nothing changes."""
        while self._queue:
            self._take_live(*self._queue.popleft())
        while self._take_part(at_rest=True):
            pass
        self._fill(self._publisher.buffer.next)
        while self._take_part(at_rest=True):
            pass

    def _begin_anew(self) -> None:
        self.believes.clear()
        self._queue.clear()
        self._held = None
        self._sequence.skip(self._publisher.buffer.next - 1)
        snapshot = self._publisher._snapshot
        assert snapshot is not None
        self._parts = self._publisher._next_of(_Reader(0, 0.0, snapshot()))

    def _take_live(self, number: int, payload: bytes) -> None:
        arrival = self._sequence.on_live(number)
        if arrival is Arrival.GAP:
            if not self._fill(number):
                return
            self._sequence.skip(number)
        if arrival is not Arrival.KNOWN:
            self._believe(payload)

    def _fill(self, before: int) -> bool:
        """Ask for what is missing before this number; False: it is not kept, all begins anew."""
        assert self._sequence.next is not None
        while self._sequence.next < before:
            kept = list(self._publisher.buffer.since(self._sequence.next, 5))
            if not kept or not self._sequence.on_replayed(kept[0].number):
                self._begin_anew()
                return False
            self._believe(kept[0].payload)
        return True

    def _take_part(self, *, at_rest: bool = False) -> bool:
        """The next part of a snapshot, after all that was sent before it. False: it has ended."""
        if self._held is None:
            part = next(self._parts, None)
            if part is None:
                return False
            self._held = struct.unpack(">Q", part[0])[0], part[1]
        number, payload = self._held
        while self._queue and self._queue[0][0] <= number:
            self._take_live(*self._queue.popleft())
        if number >= self._publisher.buffer.next and not at_rest:
            return True  # it claims to be of the future: what comes before it has not been sent
        if self._held is not None and self._fill(min(number + 1, self._publisher.buffer.next)):
            self._believe(payload)
            self._held = None
        return True

    def _believe(self, payload: bytes) -> None:
        for event in decode_batch(payload).events:
            if isinstance(event, ClearedEvent):
                self.believes.clear()
                continue
            where = f"{event.medium} {event.ownership}"
            for name in event.block_hashes:
                assert isinstance(name, bytes)
                places = self.believes.setdefault(name, set())
                if isinstance(event, StoredEvent):
                    places.add(where)
                else:
                    places.discard(where)

    @property
    def known(self) -> dict[bytes, set[str]]:
        return {name: places for name, places in self.believes.items() if places}


def truth(fleet: Fleet, namespace: Namespace) -> dict[bytes, set[str]]:
    """Where a router may believe that blocks are: living servers that have all of their parts."""
    tiers: dict[tuple[bytes, str], list[str]] = {}
    for (server, name, _, digest), tier in fleet.truth().items():
        if name == namespace and fleet.alive()[server]:
            tiers.setdefault((digest, server), []).append(tier)
    found: dict[bytes, set[str]] = {}
    for (digest, server), parts in tiers.items():
        if len(parts) == namespace.parts:
            medium = "STORAGE" if "nvme" in parts else "CPU"
            found.setdefault(digest, set()).add(f"{medium} kvpool/{server}")
    return found


def play_events(seed: int) -> str:
    """A master whose map never rests, its changes read, published, lost, replayed and told anew."""
    limits = {"_SNAPSHOT_BLOCKS": 64, "_CHANGES_BLOCKS": 50}
    pauses = dict.fromkeys(("_POLL_S", "_RETRY_S", "_RETRY_S_MAX"), 0.0001)
    with Changed(follower_requests, limits), Changed(pool_events, pauses):
        return SimLoop(random.Random(seed), 0.0).run(_events(seed))  # type: ignore[abstract]


async def _events(seed: int) -> str:
    chance = random.Random(seed)
    namespace = chance.choice(NAMESPACES)
    kept = chance.choice([10, 40]) if chance.random() < 0.5 else CHANGES_MAX
    fleet = Fleet(seed, kept)
    stream = PoolStream(namespace, "full")
    buffer = ReplayBuffer(first=1, kept_max=_KEPT)
    publisher = EventPublisher("", buffer=buffer, snapshot=stream.snapshot)
    routers: list[Router] = []
    left = _ACTS

    def act() -> None:
        nonlocal left
        for _ in range(min(left, 40 if chance.random() < 0.05 else 1)):
            left -= 1
            fleet.act()
        if not left:
            fleet.rest()
        if len(routers) < 3 and chance.random() < 0.05:
            routers.append(Router(publisher, chance))

    def publish(events: list[KVEvent]) -> None:
        payload = encode_batch(Batch(0.0, events))
        number = buffer.add(payload)
        for router in routers:
            router.hear(number, payload)

    at = -1  # the change that was published last; -1 while the map is read

    async def follow() -> None:
        nonlocal at
        live = False
        async for event in reader(Asked(fleet, act)):
            for batch in stream.apply(event):
                if batch:
                    publish(batch)
            live = (live or event.kind.name == "LIVE") and event.kind.name != "RESET"
            at = event.position.number if live else -1

    following = asyncio.create_task(follow())
    try:
        for _ in range(_TURNS_MAX):
            await asyncio.sleep(0.0001)
            fleet.rest()
            if following.done() or (not left and at == fleet.log.last):
                break
        else:
            return "the stream does not come to rest"
    finally:
        following.cancel()
        publisher.close()
    if following.done() and not following.cancelled():
        following.result()
    expected = truth(fleet, namespace)
    for router in [*routers, Router(publisher, chance)]:
        router.finish()
        if router.known != expected:
            return _difference(router.known, expected)
    return ""


def _difference(known: dict[bytes, set[str]], expected: dict[bytes, set[str]]) -> str:
    stale = sum(len(places - expected.get(name, set())) for name, places in known.items())
    missing = sum(len(places - known.get(name, set())) for name, places in expected.items())
    return f"a router believes in {stale} copies that are gone, and not in {missing} that are there"


class Changed:
    """Other values of a module's constants, for a while."""

    def __init__(self, module: Any, values: dict[str, Any]) -> None:
        self._module, self._values = module, values

    def __enter__(self) -> None:
        self._before = {name: getattr(self._module, name) for name in self._values}
        self._set(self._values)

    def __exit__(self, *exc_info: object) -> None:
        self._set(self._before)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._module, name, value)


# --- promises ---------------------------------------------------------------------------------

_BLOCK: Final = 16
_NAME: Final = "0123456789abcdef"
_LIMIT_S: Final = 3.0
_LOADS_MAX: Final = 6
#: Of a wait: the longest pause between two looks, and the time that each may take.
_SLACK_S: Final = 0.05 + 0.03 + 0.01


class Producer:
    """An engine that computes one prompt, block by block, and may die on the way."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.blocks = chance.randrange(2, 40)
        self.hashes = [f"{number} {block}".encode().ljust(32) for block in range(self.blocks)]
        self.block_s = chance.choice([0.0005, 0.004, 0.02, 0.05])
        self.begins_at = chance.random()
        alive_s = chance.random() * self.block_s * self.blocks
        self.dies_at = self.begins_at + alive_s if chance.random() < 0.4 else 1e9

    def stored(self, now: float) -> int:
        """Blocks that are in the pool by then."""
        alive_s = min(now, self.dies_at) - self.begins_at
        return max(0, min(self.blocks, int(alive_s / self.block_s)))

    @property
    def ends_at(self) -> float:
        """From here on no block comes any more."""
        return min(self.dies_at, self.begins_at + self.blocks * self.block_s)

    def promise(self, chance: random.Random) -> PromisedBlocks:
        """A true one as a rule; else of another prompt, of another name, or a proxy's."""
        tokens, tail = self.blocks * _BLOCK, self.hashes[-1]
        match chance.randrange(8):
            case 0:
                return PromisedBlocks(tokens, b"another prompt", _NAME, 1.0)
            case 1:
                return PromisedBlocks(tokens, tail, _NAME[::-1], 1.0)
            case 2:
                return PromisedBlocks()
            case _:
                return PromisedBlocks(tokens, tail, _NAME, self.blocks * self.block_s)


class Consumer:
    """The planner of the engine that decodes, and what its worker does for each load."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        limits = PlannerLimits(
            load=chance.choice(["auto", "always"]),
            loads_max=_LOADS_MAX,
            promise_wait_s=_LIMIT_S,
        )
        self.always = limits.load == "always"
        self.planner = Planner([CacheGroup(_BLOCK, 1)], limits)
        self.planner.windows.block_bytes = (1 << 10,)
        self.planner.promises.name = _NAME
        if chance.random() < 0.7:
            self.planner.choice.prefill_cost.observe([(0, 160)], chance.choice([0.05, 0.2, 1.0]))
        self.given = 0
        self.problem = ""

    def serve(self, name: str, producer: Producer, now: float) -> float:
        """One request, from its arrival to its end; returns when that is."""
        promise = producer.promise(self.chance)
        tokens = producer.blocks * _BLOCK + 1
        self.given += 1
        lookup = self.planner.on_new_request(
            name, producer.hashes, tokens, RequestHints(promise=promise), now
        )
        assert lookup is not None
        there = self._matched(producer.stored(now), producer.blocks)
        self.planner.lookups.on_result(name, lookup.serial, [there], "")
        offered = self.planner.loadable_tokens(name, tokens, 0, now)
        if offered and self.chance.random() < 0.9:
            ids = [list(range(1, producer.blocks + 2))]
            self.planner.on_blocks_allocated(name, ids, offered, now)
            (load,) = self.planner.plan_step([], lambda *block: True, now).loads
            if self.planner._running.awaiting > _LOADS_MAX // 2:
                self.problem = "promises take more than their share of the loads"
            if self.chance.random() < 0.8:
                now = self._wait(load, producer, now)
        self.planner.on_request_finished(name)
        return now

    def _wait(self, load: LoadRequest, producer: Producer, began: float) -> float:
        """As the worker does: read what has come, look again for the rest."""
        (blocks,) = load.blocks
        count, came, now, waited_s = len(blocks.digests), 0, began, 0.0
        if load.wait_limits is not None:
            wait, silent_from, compute_s = BlockWait(load.wait_limits, count), began, 0.0
            compute_s = load.wait_limits.compute_s
            while came < count:
                there = min(count, producer.stored(now))
                if there > came:
                    wait.came(there - came)
                    came, silent_from = there, now
                    continue
                look_s = wait.next_look_s()
                if look_s is None:
                    break
                wait.waited(look_s)
                now += look_s
                if wait.waited_s > _LIMIT_S + _SLACK_S:
                    self.problem = "a promise is waited for longer than it may be"
                    break
                rest_s = compute_s * (1 - came / count)
                if now > max(silent_from, began) + rest_s + _SLACK_S:
                    self.problem = "nothing comes any more, and the promise is kept all the same"
                    break
            waited_s = wait.waited_s
        else:
            came = count
        result = LoadResult(load.request_id, came << 10, came == count, 0.001, waited_s)
        self.planner.on_load_result(result, now)
        return now

    def _matched(self, length: int, blocks: int) -> Match:
        length = min(length, blocks)
        runs = (Run(0, length - 1, (Replica("a", "dram"),)),) if length else ()
        return Match(runs, length, ReadStatus.NEVER_WRITTEN)


def play_promises(seed: int) -> str:
    """Producers that compute, stop or die, and an engine to which some of them promise blocks."""
    chance = random.Random(seed)
    consumer, now = Consumer(chance), 0.0
    for number in range(30):
        producer = Producer(chance, number)
        producer.begins_at += now
        producer.dies_at += now
        now = consumer.serve(f"r{number}", producer, now + chance.random()) + 0.01
        if consumer.problem:
            return consumer.problem
    planner = consumer.planner
    ends = {f"promise {state.value}" for state in PromiseState}
    ended = sum(count for name, count in planner.counters.items() if name in ends)
    if ended != consumer.given:
        return f"of {consumer.given} promises {ended:g} have ended"
    if planner._running.awaiting or planner.loading:
        return "a load is still waited for, and its request has ended"
    return ""


# --- a way that freezes, or becomes slow, in the middle of a load -----------------------------

#: That a server is given which was left once (`ClientConfig.attempt_s`).
_ATTEMPT_S: Final = 1.0


class FailingLoad(Load):
    """One of its servers has another speed from some moment on: 0 is frozen."""

    def fail(self, server: str, at: float, speed: float) -> None:
        self.failing, self.fails_at, self.speed = server, at, speed

    def ask(self, attempts: list[Attempt]) -> None:
        super().ask(attempts)
        for number, (end, attempt) in enumerate(self.running):
            if attempt in attempts and attempt.server == self.failing and end > self.fails_at:
                late_s = _ATTEMPT_S if attempt.server in self.unresponsive else HEDGE_S
                if self.speed:
                    late_s = sum(self.sizes[i] for i in attempt.positions) / self.speed
                self.running[number] = max(self.now, self.fails_at) + late_s, attempt

    def end(self, attempt: Attempt, results: list[ReadResult] | None = None) -> None:
        hangs = not self.speed and attempt.server == self.failing and self.now >= self.fails_at
        super().end(attempt, None if hangs else results)


def play_ways(seed: int) -> str:
    """One of several servers fails: the load takes a hedge longer than without it."""
    chance = random.Random(seed)
    servers = "abcdefgh"[: chance.randint(2, 8)]
    speeds = {one: chance.choice([5e7, 1e8, 2e8]) for one in servers}
    blocks, bad = [servers] * chance.randint(16, 256), chance.choice(servers)
    without_s = Load([servers.replace(bad, "")] * len(blocks), speeds, known=speeds).play()
    load = FailingLoad(blocks, speeds, known=speeds)
    fails_at = chance.random() * chance.choice([0.0, 0.5, 1.0]) * without_s
    load.fail(bad, fails_at, chance.choice([0.0, 0.0, 1e3, 1e6]))
    took_s = load.play()
    if load.missing():
        return f"{load.missing()} blocks that other servers have were not read"
    if took_s > without_s + HEDGE_S + 0.01 + HEDGE_S / 4:  # timers look four times a hedge
        return f"a load that takes {without_s:.3f} s without a bad way took {took_s:.3f} s"
    return ""


# --- codecs and their versions ----------------------------------------------------------------


class SomeCodec(Lossless):
    """Each version has other numbers in the same bytes; with more tolerance it loses more."""

    def __init__(self, spec: str) -> None:
        super().__init__((lambda data: zlib.compress(data, 1), unpacked))
        version, _, tolerance = spec.partition("?")
        self.version, self.tolerance = int(version), float(tolerance)

    def kept(self, block: Flat) -> bytes:
        """What is left of a block."""
        lost = round(self.tolerance * 10)
        return (np.frombuffer(block, np.uint16) >> lost << lost).tobytes()

    def encode(self, block: Flat, layers: Sequence[LayerBytes]) -> bytes:
        return super().encode(self._turned(self.kept(block)), layers)

    def decode(self, data: Flat, layers: Sequence[LayerBytes], into: memoryview) -> None:
        super().decode(data, layers, into)
        into[:] = self._turned(into)

    def _turned(self, block: Flat) -> bytes:
        return (np.frombuffer(block, np.uint8) ^ self.version).tobytes()


def play_codecs(seed: int) -> str:
    """Engines find blocks of others, with their codec or another one, under their own names."""
    with Changed(codec, {"codec_of": SomeCodec}), Changed(coder, {"codec_of": SomeCodec}):
        return asyncio.run(_codecs(random.Random(seed)))


async def _codecs(chance: random.Random) -> str:
    specs = [f"{chance.choice('12')}?{chance.choice(['0', '0.1', '0.3'])}" for _ in range(2)]
    writer, reader = map(Coder, specs)
    same = specs[0] == specs[1]
    if (fields_of(specs[0]) == fields_of(specs[1])) != same:
        return f"the namespaces of {specs} do not say that they differ"
    for _ in range(4):
        _, block, layers, _ = Sample.of("", like_kv(chance.randrange(1 << 30), 1, 1), "bfloat16")
        if chance.random() < 0.4:
            block = chance.randbytes(len(block))  # it does not get smaller
        whole = b"".join(await writer.encoded([memoryview(bytearray(block))], layers))
        taken = len(whole) - TAIL_BYTES
        memory = bytearray(whole[:taken].ljust(len(block), b"."))
        arrived = [([memoryview(memory)], taken, whole[taken:])]
        [problem] = await reader.decoded(arrived, layers, time.monotonic() + 60)
        if problem != ("" if same else "other codec"):
            return f"a block of {specs[0]} is for an engine with {specs[1]}: {problem!r}"
        if same and memory not in (block, SomeCodec(specs[0]).kept(block)):
            return "a block has wrong bytes"
    return ""


WORLDS: Final[dict[str, Callable[[int], str]]] = {
    "events": play_events,
    "promises": play_promises,
    "ways": play_ways,
    "codecs": play_codecs,
}


if __name__ == "__main__":
    play_worlds(WORLDS, SEEDS)
