"""The client's bounds and accounts: what fits exactly, what is counted, what ends a wait.

Reader and writer are the real ones; servers and masters are scripts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvpool import ClientConfig, ReadResult, ReadStatus, WriteStatus
from kvpool.client import attempts
from kvpool.client.attempts import ReadRates, Standing
from kvpool.client.block_transfers import BlockTransfers
from kvpool.client.buffers import Buffers
from kvpool.client.device_arena import Arena
from kvpool.client.location_cache import CachedLocation, LocationCache
from kvpool.client.lookup import Lookup
from kvpool.client.masters import Masters
from kvpool.client.reader import Reader
from kvpool.client.servers import Servers
from kvpool.client.versions import Versions
from kvpool.client.writer import Places, Writer
from kvpool.errors import BadMessage, DeadlineExceeded, KvpoolError, LinkBroken, Overloaded
from kvpool.protocols import WriteOptions
from kvpool.wire import messages as wire
from tests.conftest import NAMESPACE, keys
from tests.support.virtual_time import virtual_time

HIT, NOT_YET = ReadResult(ReadStatus.HIT, 100), ReadResult(ReadStatus.NOT_YET)
OPTIONS = WriteOptions(NAMESPACE, 0, visible=True)


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def host_memory(count: int) -> Buffers:
    return Buffers([(memoryview(bytearray(100)),) for _ in range(count)], {}, [100] * count)


# --- what fits exactly -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([50, 50, 1], [[0, 1], [2]]),
        ([60, 60, 40, 1], [[0], [1, 2], [3]]),
        ([200, 1], [[0], [1]]),
        ([], []),
    ],
)
def test_a_batch_is_filled_exactly(
    sizes: list[int], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_BATCH_BYTES", 100)
    assert attempts.batches(range(len(sizes)), sizes) == expected


def test_a_batch_has_as_many_blocks_as_a_message() -> None:
    found = attempts.batches(range(2049), [1] * 2049)
    assert [len(batch) for batch in found] == [1024, 1024, 1]


@pytest.mark.parametrize(
    ("used", "size", "start"),
    [
        ({}, 100, 0),
        ({}, 101, None),
        ({0: 40}, 60, 40),
        ({0: 40}, 61, None),
        ({0: 10, 30: 70}, 20, 10),
        ({0: 10, 30: 70}, 21, None),
        ({20: 80}, 20, 0),
    ],
)
def test_a_round_takes_the_first_gap_that_fits(
    used: dict[int, int], size: int, start: int | None
) -> None:
    arena = Arena(100)
    arena.taken = used
    assert arena._gap(size) == start


# --- reads -----------------------------------------------------------------------------------


class ScriptedServers:
    """Answers of servers, in order; each takes `seconds`, or never comes for a silent server."""

    def __init__(self, *silent: str, seconds: float = 0.0) -> None:
        self.silent = silent
        self.seconds = seconds
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[str] = []
        self.left: list[tuple[str, bool]] = []
        self.under_way = Counter[str]()

    def standing(self, server: str) -> Standing:
        return Standing(ailing=False, far=True, networked=True)

    async def call(self, server: str, *_: object) -> object:
        self.asked.append(server)
        await asyncio.sleep(60 if server in self.silent else self.seconds)
        answer = self.answers[server].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def mark_unresponsive(self, server: str, why: str, *, given_up: bool) -> None:
        self.left.append((server, given_up))


class ScriptedLookup:
    def __init__(self, *candidates: str, seconds: float = 0.0) -> None:
        self._candidates = candidates
        self._seconds = seconds
        self.asked = 0

    async def locate(
        self, namespace: object, part: int, digests: Sequence[bytes], deadline: float
    ) -> tuple[list[ReadResult], list[list[str]]]:
        self.asked += 1
        await asyncio.sleep(self._seconds)
        missing = ReadResult(ReadStatus.SERVER_LOST)
        return [missing] * len(digests), [list(self._candidates) for _ in digests]


def reader(servers: ScriptedServers, lookup: ScriptedLookup, **settings: float) -> Reader:
    config = ClientConfig(masters=["m:1"], **settings)  # type: ignore[arg-type]
    return Reader(
        config,
        cast(Lookup, lookup),
        cast(Servers, servers),
        LocationCache(),
        cast(BlockTransfers, None),
        ReadRates(),
        Counter(),
    )


async def read(reading: Reader, count: int) -> list[ReadStatus]:
    chain = keys("chain", count)
    results = await reading.read(NAMESPACE, 0, chain, host_memory(count), None, later(20))
    return [result.status for result in results]


@virtual_time
async def test_a_server_that_makes_progress_is_not_left() -> None:
    """Each answer has one block more: the time of silence begins anew with each."""
    servers = ScriptedServers(seconds=0.12)
    servers.answers["a"] = [[HIT, *[NOT_YET] * left] for left in (3, 2, 1, 0)]
    reading = reader(servers, ScriptedLookup("b", "a"), hedge_s=0.2)
    assert await read(reading, 4) == [ReadStatus.HIT] * 4
    assert servers.asked == ["a"] * 4


@virtual_time
async def test_a_server_that_makes_no_progress_is_left_for_another() -> None:
    servers = ScriptedServers(seconds=0.12)
    servers.answers["a"] = [[HIT, NOT_YET], *[[NOT_YET]] * 9]
    servers.answers["b"] = [[HIT]]
    reading = reader(servers, ScriptedLookup("b", "a"), hedge_s=0.2)
    assert await read(reading, 2) == [ReadStatus.HIT] * 2
    assert servers.asked[-1] == "b"
    assert 2 <= servers.asked.count("a") <= 4


@pytest.mark.parametrize("sole", [(True, False), (True, True)])
@virtual_time
async def test_one_block_with_another_replica_is_enough_to_leave_a_silent_server(
    sole: tuple[bool, bool],
) -> None:
    """Blocks whose location is remembered are asked for together."""
    servers = ScriptedServers("a")
    servers.answers["b"] = [[HIT, HIT]]
    reading = reader(servers, ScriptedLookup("b"), hedge_s=0.05, attempt_s=0.3)
    for digest, alone in zip(keys("chain", 2), sole, strict=True):
        location = CachedLocation(NAMESPACE, "a", sole_replica=alone)
        reading._locations.put(location, [digest])
    assert await read(reading, 2) == [ReadStatus.HIT] * 2
    assert servers.left == [("a", False)]
    assert servers.asked == ["a", "b"]


@pytest.mark.parametrize("alone", [False, True])
@virtual_time
async def test_a_slow_server_is_left_early_only_if_another_may_have_the_block(alone: bool) -> None:
    """By what is remembered. Masters name no other one here, so it is asked once more."""
    servers = ScriptedServers("a")
    reading = reader(servers, ScriptedLookup("a"), hedge_s=0.05, attempt_s=0.2)
    location = CachedLocation(NAMESPACE, "a", sole_replica=alone)
    reading._locations.put(location, keys("chain", 1))
    await read(reading, 1)
    early, late = [("a", False)], [("a", True)]
    assert servers.left == (late if alone else early + late)


async def remembered(servers: ScriptedServers, lookup: ScriptedLookup) -> tuple[Reader, float]:
    """Read one block that "a" alone had: the reader, and how long that took."""
    reading = reader(servers, lookup, hedge_s=0.1, attempt_s=1.0)
    here = CachedLocation(NAMESPACE, "a", sole_replica=True)
    reading._locations.put(here, keys("chain", 1))
    began = later(0)
    await read(reading, 1)
    return reading, later(0) - began


@virtual_time
async def test_a_copy_made_since_saves_the_wait_for_a_server_that_was_alone() -> None:
    servers = ScriptedServers("a")
    servers.answers["b"] = [[HIT]]
    reading, seconds = await remembered(servers, ScriptedLookup("a", "b"))
    assert servers.asked == ["a", "b"]
    assert servers.left == [("a", False)]
    assert 0.09 < seconds < 0.9
    (location,) = reading._locations.get(NAMESPACE, keys("chain", 1))
    assert (location.server, location.sole_replica) == ("b", False)


@virtual_time
async def test_a_server_that_is_still_alone_is_asked_once_and_given_up_once() -> None:
    servers = ScriptedServers("a")
    lookup = ScriptedLookup("a")
    _, seconds = await remembered(servers, lookup)
    assert servers.asked == ["a"]
    assert servers.left == [("a", True)]
    assert 0.99 < seconds < 5
    assert lookup.asked == 2  # while it is silent, and when it is given up


@virtual_time
async def test_silent_masters_make_no_read_longer() -> None:
    servers = ScriptedServers(seconds=0.3)
    servers.answers["a"] = [[HIT]]
    lookup = ScriptedLookup("a", "b", seconds=60)
    _, seconds = await remembered(servers, lookup)
    assert servers.asked == ["a"]
    assert not servers.left
    assert seconds < 5
    assert lookup.asked == 1


@virtual_time
async def test_a_remembered_server_that_answers_costs_no_question_to_a_master() -> None:
    servers = ScriptedServers(seconds=0.01)
    servers.answers["a"] = [[HIT]]
    lookup = ScriptedLookup("a", "b")
    await remembered(servers, lookup)
    assert (servers.asked, lookup.asked) == (["a"], 0)


@virtual_time
async def test_a_read_that_is_cancelled_counts_as_no_load_of_a_server_any_more() -> None:
    """Or others would avoid it for ever."""
    servers = ScriptedServers("a")
    reading = asyncio.create_task(read(reader(servers, ScriptedLookup("a")), 2))
    await asyncio.sleep(0.01)
    assert servers.under_way == {"a": 1}
    reading.cancel()
    await asyncio.wait([reading])
    assert not servers.under_way


# --- writes ----------------------------------------------------------------------------------


class PlacingMaster:
    def __init__(self, *servers: str) -> None:
        self._servers = list(servers)
        self.asked = 0

    async def ask(self, message: wire.Place, answer: object, deadline: float) -> wire.PlaceReply:
        self.asked += 1
        count = len(message.digests) // message.digest_size
        return wire.PlaceReply(self._servers, bytes(count))


async def write(
    servers: ScriptedServers, master: PlacingMaster, count: int, timeout_s: float = 20
) -> tuple[list[WriteStatus], LocationCache]:
    locations = LocationCache()
    writer = Writer(
        Places("host", cast(Masters, master)),
        cast(Servers, servers),
        locations,
        cast(Versions, None),  # with one server there is one version
        [],  # and no other server that could have the parent
        cast(BlockTransfers, None),
        Counter(),
    )
    chain = keys("chain", count)
    parents = [b"", *chain[:-1]]
    statuses = await writer.write(OPTIONS, chain, parents, host_memory(count), 1, later(timeout_s))
    return statuses, locations


@pytest.mark.parametrize(
    ("failure", "meaning"),
    [
        (LinkBroken("gone"), WriteStatus.SERVER_LOST),
        (Overloaded("too many connections"), WriteStatus.REFUSED),
        (BadMessage("not an answer"), WriteStatus.SERVER_LOST),
        (DeadlineExceeded("late"), WriteStatus.DEADLINE),
    ],
)
@virtual_time
async def test_what_was_stored_before_a_later_step_failed_stays_stored(
    failure: KvpoolError, meaning: WriteStatus
) -> None:
    servers = ScriptedServers()
    stored, not_yet = WriteStatus.STORED, WriteStatus.NOT_YET
    servers.answers["s"] = [[stored, not_yet, not_yet], [stored, not_yet], failure]
    statuses, locations = await write(servers, PlacingMaster("s"), 3)
    assert statuses == [stored, stored, meaning]
    assert len(locations) == 2


@pytest.mark.parametrize("taken", [0, 1])
@virtual_time
async def test_a_write_goes_on_only_as_long_as_each_step_stores_something(taken: int) -> None:
    """A server that answers NOT_YET for ever would keep its client busy until the deadline."""
    servers, stored, not_yet = ScriptedServers(), WriteStatus.STORED, WriteStatus.NOT_YET
    servers.answers["s"] = [[stored] * taken + [not_yet] * (n - taken) for n in (3, 2, 1)]
    statuses, _ = await write(servers, PlacingMaster("s"), 3)
    assert len(servers.asked) == (3 if taken else 1)
    assert set(statuses) == {stored if taken else WriteStatus.NO_SPACE}


@virtual_time
async def test_after_a_batch_that_is_late_nothing_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "_BATCH_BYTES", 200)
    servers, master = ScriptedServers(), PlacingMaster("s")
    servers.answers["s"] = [DeadlineExceeded("late")]
    statuses, _ = await write(servers, master, 6)
    assert statuses == [WriteStatus.DEADLINE] * 6
    assert master.asked == 1
