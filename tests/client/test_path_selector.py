"""The selection of paths to other hosts, by what calls have measured (`path_selector.py`)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from kvpool import ClientConfig, Pool, WriteStatus, dev
from kvpool.client.path_selector import AGAIN_S, AGAIN_S_MAX, CALLS, GAIN, LARGE, PathSelector
from kvpool.errors import LinkBroken
from kvpool.net.zmq_rpc import ZmqNetwork
from kvpool.protocols import BlockStore, Channel, Listener, Transport
from kvpool.types import Cluster
from kvpool_transports.tcp import TcpTransport
from tests.conftest import NAMESPACE, buffers, eventually, key, keys, values


class World:
    """Calls, one after the other, over paths of a given speed."""

    def __init__(self, **rates: float) -> None:
        self.rates = rates
        self.selector = PathSelector(list(rates))
        self.now = 0.0
        self.taken: dict[str, int] = dict.fromkeys(rates, 0)

    def call(self, size: int = LARGE) -> str:
        path = self.selector.select(size, self.now, self.rates)[0]
        self.taken[path] += 1
        seconds = size / self.rates[path]
        self.now += seconds
        self.selector.record(path, size, seconds, self.now)
        self.selector.check()
        return path

    def calls(self, count: int) -> None:
        for _ in range(count):
            self.call()


def test_a_faster_path_is_found_and_kept() -> None:
    world = World(tcp=1e9, ucx=4e9)
    world.calls(CALLS)
    assert world.taken == {"tcp": CALLS, "ucx": 0}
    world.calls(CALLS + 1)
    assert world.taken["ucx"] == CALLS + 1
    assert world.selector.best == "ucx"
    world.calls(100)
    assert world.taken["tcp"] == CALLS


def test_the_first_call_of_a_trial_does_not_count() -> None:
    """It opens connections. And of those that count, one may have had to wait for another call."""
    world = World(tcp=1e9, ucx=4e9)
    world.calls(CALLS)
    for rate in (1e6, 1e6, 4e9, 4e9):
        world.rates["ucx"] = rate
        assert world.call() == "ucx"
    assert world.selector.best == "ucx"


def test_each_other_path_has_its_turn() -> None:
    world = World(first=4e9, second=1e9, third=2e9, fourth=1e9)
    tried = []
    for _ in range(5):
        world.now += 2 * AGAIN_S_MAX
        world.calls(CALLS)
        tried.append(world.call())
        world.calls(CALLS)
    assert sorted(tried[:3]) == ["fourth", "second", "third"]
    assert tried[3:] == tried[:2]


def test_a_path_must_be_clearly_faster() -> None:
    """What is nearly as fast is not worth a change."""
    world = World(tcp=1e9, ucx=1e9 * GAIN * 0.99)
    world.calls(100)
    assert world.selector.best == "tcp"


def test_a_path_must_be_faster_by_the_whole_factor() -> None:
    world = World(tcp=2.0**30, ucx=2.0**30 * GAIN)
    world.calls(3 * CALLS)
    assert world.taken["ucx"] == CALLS + 1
    assert world.selector.best == "tcp"


def test_a_slower_path_costs_little_and_ever_less() -> None:
    """It is tried again, because things change, at most so often."""
    world = World(tcp=1e9, ucx=1e7)
    trials = []
    while world.now < 4 * 3600:
        if world.call() == "ucx" and (not trials or world.now - trials[-1] > 5):
            trials.append(world.now)
        world.now += 1.0
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps[0] >= AGAIN_S
    assert all(after > before - 5 for before, after in itertools.pairwise(gaps))
    assert max(gaps) < AGAIN_S_MAX + 60
    assert world.taken["ucx"] <= (CALLS + 1) * 16
    world.rates["ucx"] = 1e10
    while world.now < 6 * 3600:
        world.call()
        world.now += 1.0
    assert world.selector.best == "ucx"


def test_small_calls_say_nothing() -> None:
    world = World(tcp=1e9, ucx=4e9)
    for _ in range(100):
        world.call(LARGE - 1)
    assert world.taken["ucx"] == 0
    assert not any(world.selector._rates.values())


def test_one_call_at_a_time_is_on_trial() -> None:
    """Everybody else goes the way that is known."""
    world = World(tcp=1e9, ucx=4e9)
    world.calls(CALLS)
    assert world.selector.select(LARGE, world.now, world.rates)[0] == "ucx"
    assert world.selector.select(LARGE, world.now, world.rates) == ["tcp", "ucx"]


def test_a_trial_that_fails_is_over() -> None:
    world = World(tcp=1e9, ucx=4e9)
    world.calls(CALLS)
    assert world.selector.select(LARGE, world.now, world.rates)[0] == "ucx"
    world.selector.record_failure("ucx", world.now)
    world.selector.check()
    assert world.selector.select(LARGE, world.now, world.rates)[0] == "tcp"
    assert world.selector.select(LARGE, world.now + AGAIN_S, world.rates)[0] == "ucx"


def test_what_did_not_move_is_not_fast() -> None:
    """A trial whose blocks were all misses was quick, and says nothing."""
    world = World(tcp=1e9, ucx=1e6)
    world.calls(CALLS)
    for _ in range(50):
        path = world.selector.select(LARGE, world.now, world.rates)[0]
        world.selector.record(path, 0 if path == "ucx" else LARGE, 1e-3, world.now)
        world.selector.check()
    assert world.selector.best == "tcp"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_books_agree(seed: int) -> None:
    chance = random.Random(seed)
    selector = PathSelector(["a", "b", "c"])
    now, out = 0.0, []
    for _ in range(2000):
        now += chance.random() * 5
        if out and chance.random() < 0.5:
            path = out.pop(chance.randrange(len(out)))
            if chance.random() < 0.2:
                selector.record_failure(path, now)
            else:
                selector.record(path, chance.choice([0, LARGE]), chance.random(), now)
        else:
            order = selector.select(
                chance.choice([0, LARGE]), now, chance.choice(["ab", "abc", ""])
            )
            assert sorted(order) == ["a", "b", "c"]
            out.append(order[0])
        selector.check()


# --- in a client -----------------------------------------------------------------------------


class Paced:
    """tcp under another name, which takes its time over each call, or fails."""

    same_host = False
    authenticated = True

    def __init__(self, scheme: str, delay_s: float, *, needs_measurement: bool = False) -> None:
        self.scheme = scheme
        self.delay_s = delay_s
        self.needs_measurement = needs_measurement
        self.calls = 0
        self.silent = False
        self.broken = False
        self._inner = TcpTransport()

    async def listen(self, address: str, store: BlockStore) -> Listener:
        listener = await self._inner.listen(address.replace(self.scheme, "tcp", 1), store)
        return _Named(listener, self.scheme)

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        if self.broken:
            raise LinkBroken("broken")
        if self.silent:
            await asyncio.sleep(deadline - asyncio.get_running_loop().time())
            raise LinkBroken("nobody answers")
        address = address.replace(self.scheme, "tcp", 1)
        channel = await self._inner.connect(
            address, cluster=cluster, client=client, deadline=deadline
        )
        read = channel.read

        async def slowly(*args: object, **options: object) -> object:
            self.calls += 1
            await asyncio.sleep(self.delay_s)
            return await read(*args, **options)  # type: ignore[arg-type]

        channel.read = slowly  # type: ignore[method-assign]
        return channel


class _Named:
    def __init__(self, inner: Listener, scheme: str) -> None:
        self._inner = inner
        self._scheme = scheme

    @property
    def address(self) -> str:
        return self._inner.address.replace("tcp", self._scheme, 1)

    async def close(self) -> None:
        await self._inner.close()


@asynccontextmanager
async def client(
    transports: Mapping[str, Transport], *, measure: bool = True
) -> AsyncIterator[tuple[Pool, list[bytes]]]:
    """A pool of 8 blocks, 8 MiB together, and a client that may take any of these transports."""
    listen = tuple(f"{scheme}://127.0.0.1:0" for scheme in transports)
    async with dev.serve("64MiB", listen=listen, transports=transports) as running:
        config = ClientConfig(
            masters=[running.address], transports=list(transports), measure=measure
        )
        async with Pool(
            config,
            cluster=Cluster(),
            network=ZmqNetwork(),
            transports=transports,
            owns_network=True,
        ) as pool:
            chain = keys("paths", 8)
            statuses = await pool.write(NAMESPACE, chain, values(chain, 1 << 20))
            assert set(statuses) == {WriteStatus.STORED}
            yield pool, chain


async def reads(pool: Pool, chain: list[bytes], count: int) -> None:
    for _ in range(count):
        got = buffers(len(chain), 1 << 20)
        results = await pool.read(NAMESPACE, chain, got)
        assert all(result.status.hit for result in results)
        assert got == values(chain, 1 << 20)


async def test_a_client_moves_to_the_faster_path() -> None:
    slow, fast = Paced("slow", 0.3), Paced("fast", 0.0)
    async with client({"slow": slow, "fast": fast}) as (pool, chain):
        await reads(pool, chain, 2 * CALLS + 4)
        assert pool.counters["chosen_fast"] == 1
        assert slow.calls <= CALLS + 1
        before = slow.calls
        await reads(pool, chain, 3)
        assert slow.calls == before


async def test_a_client_comes_back_from_a_slower_path() -> None:
    fast, slow = Paced("fast", 0.0), Paced("slow", 0.3)
    async with client({"fast": fast, "slow": slow}) as (pool, chain):
        await reads(pool, chain, 2 * CALLS + 6)
        assert slow.calls <= CALLS + 1
        assert pool.counters["chosen_slow"] == 0


async def test_large_calls_over_a_nearer_path_are_not_compared() -> None:
    """On the server's own host: shared memory serves, beside two paths that would reach further."""
    near, far, other = Paced("near", 0.0), Paced("far", 0.0), Paced("other", 0.0)
    near.same_host = True
    async with client({"near": near, "far": far, "other": other}) as (pool, chain):
        await reads(pool, chain, CALLS + 2)
        assert (near.calls, far.calls, other.calls) == (CALLS + 2, 0, 0)


async def test_what_is_unproven_comes_after_what_is_not() -> None:
    first, second = Paced("first", 0.0, needs_measurement=True), Paced("second", 0.0)
    async with client({"first": first, "second": second}) as (pool, chain):
        await reads(pool, chain, 1)
        assert (first.calls, second.calls) == (0, 1)
    async with client({"first": first, "second": second}, measure=False) as (pool, chain):
        await reads(pool, chain, 8)
        assert (first.calls, second.calls) == (8, 1)


async def test_a_path_whose_connecting_is_silent_leaves_time_for_the_next() -> None:
    """Within the deadline of that call, and the next one does not even try."""
    mute, tcp = Paced("mute", 0.0), TcpTransport()
    async with client({"mute": mute, "tcp": tcp}, measure=False) as (writer, chain):
        mute.silent = True
        await writer._servers.close()
        async with Pool(
            writer._config,
            cluster=Cluster(),
            network=ZmqNetwork(),
            transports={"mute": mute, "tcp": tcp},
            owns_network=True,
        ) as pool:
            await reads(pool, chain, 1)
            assert pool.counters["failed_mute"] == 1
            await reads(pool, chain, 3)
            assert pool.counters["failed_mute"] == 1


async def test_a_call_that_was_given_up_while_it_connected_is_a_lesson_for_the_next() -> None:
    mute, tcp = Paced("mute", 0.0), TcpTransport()
    async with client({"mute": mute, "tcp": tcp}, measure=False) as (pool, chain):
        (record,) = pool._servers._records.values()
        pool._servers._close_channels(record)
        mute.silent = True
        late = asyncio.create_task(reads(pool, chain, 1))
        await asyncio.sleep(3 * pool._config.hedge_s)
        late.cancel()
        await asyncio.wait([late])
        await reads(pool, chain, 1)
        assert pool.counters["failed_mute"] == 0


async def test_a_server_that_is_silent_is_called_over_another_network() -> None:
    """It may be the network's fault. Within a host there is none."""
    near, one, other = Paced("near", 0.0), Paced("one", 0.0), Paced("other", 0.0)
    async with client({"one": one, "other": other}) as (pool, chain):
        await reads(pool, chain, 1)
        assert (one.calls, other.calls) == (1, 0)
        (record,) = pool._servers._records.values()
        pool._servers.mark_unresponsive(record.server, given_up=True)
        assert not record.channels
        await reads(pool, chain, 1)
        assert (one.calls, other.calls) == (1, 1)
    near.same_host = True
    async with client({"near": near, "one": one, "other": other}) as (pool, chain):
        (record,) = pool._servers._records.values()
        pool._servers.mark_unresponsive(record.server, given_up=True)
        await reads(pool, chain, 1)
        assert near.calls == 1


async def test_a_trial_that_breaks_is_a_hit_all_the_same() -> None:
    tcp, other = Paced("one", 0.0), Paced("other", 0.0)
    async with client({"one": tcp, "other": other}) as (pool, chain):
        await reads(pool, chain, 2)
        other.broken = True
        await reads(pool, chain, CALLS + 4)
        await eventually(lambda: pool.counters["failed_other"] == 1)
        assert other.calls == 0


class Deaf(Paced):
    """Servers at some addresses do not answer reads."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme, 0.0)
        self.deaf: set[str] = set()
        self.asked: list[str] = []

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        channel = await super().connect(address, cluster=cluster, client=client, deadline=deadline)
        read = channel.read

        async def unless_deaf(*args: object, **options: object) -> object:
            self.asked.append(address)
            if address in self.deaf:
                await asyncio.sleep(60)
            return await read(*args, **options)  # type: ignore[arg-type]

        channel.read = unless_deaf  # type: ignore[method-assign, assignment]
        return channel


async def test_a_server_that_does_not_answer_is_asked_last_for_a_while() -> None:
    transports = {"one": (transport := Deaf("one"))}
    listen, chain = ("one://127.0.0.1:0",), keys("copies", 2)
    async with dev.serve(servers=2, listen=listen, transports=transports) as running:
        config = ClientConfig(masters=[running.address], transports=["one"], attempt_s=0.5)
        async with Pool(
            config,
            cluster=Cluster(),
            network=ZmqNetwork(),
            transports=transports,
            owns_network=True,
        ) as pool:
            servers = pool._servers
            await pool.write(NAMESPACE, chain, values(chain), copies=2)
            await pool.read(NAMESPACE, chain, buffers(2))
            transport.deaf = set(transport.asked)
            (record,) = [
                r for r in servers._records.values() if r.paths[0].address in transport.deaf
            ]
            for _ in range(2):
                results = await pool.read(NAMESPACE, chain, buffers(2))
                assert all(result.status.hit for result in results)
                assert pool.counters["hedged"] == 1
                assert servers.rank(sorted(servers._records))[1] == record.server
            assert len(transport.asked) == 4
            # Of a block that no other server has, the connection is given up.
            status = await pool.write_to(record.server, NAMESPACE, key("alone"), bytes(100))
            assert status is WriteStatus.STORED
            assert record.channels
            (result,) = await pool.read(NAMESPACE, [key("alone")], buffers(1))
            assert not result.status.hit
            assert not record.channels
            assert pool.counters["hedged"] == 1


async def test_nobody_waits_for_a_path_that_is_to_be_tried() -> None:
    """It is connected beside the calls, which go on over the other one meanwhile."""
    tcp, mute = Paced("one", 0.0), Paced("mute", 0.0)
    mute.silent = True
    async with client({"one": tcp, "mute": mute}) as (pool, chain):
        loop = asyncio.get_running_loop()
        await reads(pool, chain, CALLS)
        began = loop.time()
        await reads(pool, chain, 1)
        assert loop.time() - began < 0.8
        assert pool._servers._preparing
        await eventually(lambda: pool.counters["failed_mute"] == 1)
