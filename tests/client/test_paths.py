"""Which of several paths to a server a client takes, and what it learns of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from kvpool import ClientConfig, Pool, WriteStatus, admin, dev
from kvpool.errors import Forbidden, LinkBroken
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import BlockStore, Channel, Listener, Transport
from kvpool.types import Cluster
from kvpool_transports.inproc import InprocTransport
from kvpool_transports.tcp import TcpTransport
from tests.conftest import NAMESPACE, buffers, keys, values


class Paced:
    """tcp under another name, which takes its time over each call, or fails."""

    same_host = False
    authenticated = True

    def __init__(self, scheme: str, delay_s: float) -> None:
        self.scheme = scheme
        self.delay_s = delay_s
        self.has_fabric = True
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
async def client(transports: Mapping[str, Transport]) -> AsyncIterator[tuple[Pool, list[bytes]]]:
    """A pool of 8 blocks, 8 MiB together, and a client that may take any of these transports."""
    listen = tuple(f"{scheme}://127.0.0.1:0" for scheme in transports)
    async with dev.serve("64MiB", listen=listen, transports=transports) as running:
        config = ClientConfig(masters=[running.address], transports=list(transports))
        async with Pool(
            config,
            cluster=Cluster(),
            network=TcpNetwork(),
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


async def test_memory_inside_the_host_comes_before_what_would_reach_further() -> None:
    near, far, other = Paced("near", 0.0), Paced("far", 0.0), Paced("other", 0.0)
    near.same_host = True
    async with client({"near": near, "far": far, "other": other}) as (pool, chain):
        await reads(pool, chain, 5)
        assert (near.calls, far.calls, other.calls) == (5, 0, 0)


async def test_the_order_is_as_configured_and_what_lacks_its_fabric_comes_last() -> None:
    first, second, third = (Paced(name, 0.0) for name in ("first", "second", "third"))
    first.has_fabric = False
    async with client({"first": first, "second": second, "third": third}) as (pool, chain):
        await reads(pool, chain, 3)
        assert (first.calls, second.calls, third.calls) == (0, 3, 0)
        (record,) = pool._servers.known.values()
        assert [path.scheme for path in record.paths] == ["second", "third", "first"]


async def test_a_refusal_is_an_answer_after_which_all_is_as_before() -> None:
    """A client of a tenant that asked for too much goes on with what it may do."""
    one, other = Paced("one", 0.0), Paced("other", 0.0)
    async with client({"one": one, "other": other}) as (pool, chain):
        (record,) = pool._servers.known.values()
        asked = []

        async def refused(channel: Channel) -> None:
            asked.append(channel)
            raise Forbidden("not yours")

        deadline = asyncio.get_running_loop().time() + 5
        with pytest.raises(Forbidden, match="not yours"):
            await pool._servers.call(record.server, refused, deadline)
        assert len(asked) == 1
        await reads(pool, chain, 2)
        assert (one.calls, other.calls) == (2, 0)
        assert not any(count for name, count in pool.counters.items() if "failed_" in name)


async def test_a_path_whose_connecting_is_silent_leaves_time_for_the_next() -> None:
    """Within the deadline of that call, and the next one does not even try."""
    mute, tcp = Paced("mute", 0.0), TcpTransport()
    async with client({"mute": mute, "tcp": tcp}) as (writer, chain):
        mute.silent = True
        await writer._servers.close()
        async with Pool(
            writer._config,
            cluster=Cluster(),
            network=TcpNetwork(),
            transports={"mute": mute, "tcp": tcp},
            owns_network=True,
        ) as pool:
            await reads(pool, chain, 1)
            assert pool.counters["failed_mute"] == 1
            await reads(pool, chain, 3)
            assert pool.counters["failed_mute"] == 1


async def test_a_call_that_was_given_up_while_it_connected_is_a_lesson_for_the_next() -> None:
    mute, tcp = Paced("mute", 0.0), TcpTransport()
    async with client({"mute": mute, "tcp": tcp}) as (pool, chain):
        (record,) = pool._servers.known.values()
        pool._servers._close_channels(record)
        mute.silent = True
        late = asyncio.create_task(reads(pool, chain, 1))
        await asyncio.sleep(3 * pool._config.hedge_s)
        late.cancel()
        await asyncio.wait([late])
        await reads(pool, chain, 1)
        assert pool.counters["failed_mute"] == 0


async def test_what_the_system_refuses_a_transport_is_a_path_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no error of a call: another path takes it."""

    async def refuse(*_: object, **__: object) -> Channel:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(InprocTransport, "connect", refuse)
    listen = ("inproc://", "tcp://127.0.0.1:0")
    async with dev.serve(listen=listen, servers=2) as running, running.pool() as pool:
        chain = keys("chain", 4)
        statuses = await pool.write(NAMESPACE, chain, values(chain))
        assert all(status.present for status in statuses)
        report = await admin(pool).spread(NAMESPACE, chain, to=2)
        assert sum(one.fetched for one in report.servers) == len(chain), "servers do the same"
