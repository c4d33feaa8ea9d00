"""What is bound and what is announced; IPv6 wherever there is an address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import pytest

from kvpool import ClientConfig, Cluster, Pool, addresses, dev
from kvpool.cli.settings import load
from kvpool.errors import ConfigError
from kvpool.kv_events import EventBatch, encode_batch
from kvpool.net import event_address
from kvpool.net.announced import announced, reachable
from kvpool.net.control_network import TcpNetwork, master_address
from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
from kvpool.net.event_subscriber import EventSubscriber
from kvpool.net.http_server import Page, PageView, pages
from kvpool.ops.unreachable_master import refusal_of
from kvpool.protocols import Caller
from kvpool_connector import settings
from tests.conftest import NAMESPACE, buffers, keys, value

try:
    addresses.listening_socket("::1", 0, 1).close()
    HAS_IPV6 = True
except OSError:
    HAS_IPV6 = False
SECRET = Cluster("default", b"a secret of the cluster, 32 bytes")
ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this host has no IPv6")


@pytest.fixture
def way_out(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The routes of this host: the source address that packets to a destination have."""
    routes: dict[str, str] = {}

    def source(there: str, *, only_ipv4: bool) -> str:
        return "" if only_ipv4 and ":" in there else routes.get(there, "")

    monkeypatch.setattr("kvpool.net.announced._source", source)
    return routes


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:7450", ("", "10.0.0.1", 7450)),
        ("[fd00::7]:7450", ("", "fd00::7", 7450)),
        ("tcp://[fe80::1%eth0]:0", ("tcp", "fe80::1%eth0", 0)),
        ("master.example:7450", ("", "master.example", 7450)),
        ("fd00::7:7450", None),
        ("10.0.0.1", None),
        ("10.0.0.1:65536", None),
        ("shm://", None),
        ("://10.0.0.1:1", None),
        ("a..b:9", None),
        ("a b:9", None),
        ("tcp://.a:9", None),
        ("a.example.:9", ("", "a.example.", 9)),
        ("a_b:9", ("", "a_b", 9)),
    ],
)
def test_an_address_is_taken_apart(text: str, parts: tuple[str, str, int] | None) -> None:
    assert addresses.split(text) == parts
    if parts is not None and not parts[0]:
        assert addresses.join(*parts[1:]) == text


def test_every_spelling_of_loopback_and_of_everywhere_is_known() -> None:
    assert all(map(addresses.is_loopback, ("127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost")))
    assert not any(map(addresses.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "a.example")))
    assert all(map(addresses.is_everywhere, ("0.0.0.0", "::", "::ffff:0.0.0.0", "*")))
    assert not any(map(addresses.is_everywhere, ("127.0.0.1", "::1", "a.example")))


async def test_the_address_that_reaches_a_master_is_announced(way_out: dict[str, str]) -> None:
    way_out |= {"10.1.0.1": "10.1.0.9", "192.0.2.1": "172.16.0.9", "fd00::1": "fd00::9"}
    assert await announced("tcp://0.0.0.0:1", [], ["10.1.0.1:7450"]) == "tcp://10.1.0.9:1"
    # A master on this host says nothing about the network: the way out does.
    assert await announced("tcp://0.0.0.0:1", [], ["127.0.0.1:7450"]) == "tcp://172.16.0.9:1"
    assert await announced("ucx://[::]:1", [], ["[fd00::1]:7450"]) == "ucx://[fd00::9]:1"
    # Who listens on [::] has callers of IPv4, too; who listens on 0.0.0.0 has none of IPv6.
    assert await announced("tcp://[::]:1", [], ["10.1.0.1:7450"]) == "tcp://10.1.0.9:1"
    assert await announced("tcp://0.0.0.0:1", [], ["[fd00::1]:7450"]) == "tcp://172.16.0.9:1"
    assert await announced("tcp://10.0.0.4:1", [], ["10.1.0.1:7450"]) == "tcp://10.0.0.4:1"


async def test_without_a_route_the_start_is_refused(way_out: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"tcp://0\.0\.0\.0:1 .*--announce"):
        await announced("tcp://0.0.0.0:1", [], ["127.0.0.1:7450"])
    assert await reachable("0.0.0.0:7450") == "0.0.0.0:7450"  # only shown: no reason to refuse


async def test_what_a_user_says_is_announced(way_out: dict[str, str]) -> None:
    told = ["tcp://203.0.113.7:17460", "[fd00::7]"]
    assert await announced("tcp://0.0.0.0:1", told, []) == "tcp://203.0.113.7:17460"
    assert await announced("ucx://10.0.0.1:2", told, []) == "ucx://[fd00::7]:2"
    assert await announced("ucx://0.0.0.0:2", ["gpu-17.example"], []) == "ucx://gpu-17.example:2"
    assert await announced("tls://10.0.0.1:3", ["tcp://10.9.9.9"], []) == "tls://10.0.0.1:3"


@pytest.mark.parametrize(
    "told", ["0.0.0.0", "[::]", "tcp://0.0.0.0:1", "a b:c", "7.7.7.7:1", "", "h" + 122 * ".h"]
)
def test_what_cannot_be_announced_is_refused(told: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.announce.*expected a host"):
        load(None, {}, {"server.announce": [told]})


def test_announce_comes_from_a_variable_and_names_a_transport_that_is_there() -> None:
    listen = {"server.listen": "tcp://10.0.0.1:1,shm://", "server.insecure": True}
    found = load(None, {"KVPOOL_SERVER_ANNOUNCE": "tcp://a.example:9"}, listen)
    assert found.server.announce == ["tcp://a.example:9"]
    with pytest.raises(ConfigError, match=r"'server\.listen' has no ucx"):
        load(None, {"KVPOOL_SERVER_ANNOUNCE": "ucx://a.example:9"}, listen)


async def test_masters_hear_of_no_address_that_means_the_one_who_asks(
    way_out: dict[str, str],
) -> None:
    way_out["192.0.2.1"] = "127.0.0.9"  # of loopback, so that the client below reaches it
    async with _pool("tcp://0.0.0.0:0", bind="0.0.0.0:0") as (running, pool):
        ((address,),) = [server.addresses for server in running.servers]
        assert address.startswith("tcp://127.0.0.9:")
        assert running.address.startswith("127.0.0.9:")
        await _round_trip(pool)
        (member,) = await pool.members()
        assert list(member.addresses) == [address]


@ipv6
async def test_who_listens_on_every_address_has_callers_of_both_kinds(
    way_out: dict[str, str],
) -> None:
    for own in ("127.0.0.1", "::1"):
        way_out["192.0.2.1"] = own
        async with _pool("tcp://[::]:0", bind="127.0.0.1:0") as (running, pool):
            ((address,),) = [server.addresses for server in running.servers]
            assert address.startswith(f"tcp://{addresses.join(own, 0)[:-1]}")
            await _round_trip(pool)


@ipv6
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_page_on_every_address_still_refuses_foreign_names(host: str) -> None:
    view = PageView(lambda fields, near: Page(HTTPStatus.OK, b"state"))
    async with pages({"/": view}, "[::]:0", insecure=True) as serving:
        assert serving is not None
        port = int(serving.address.rpartition(":")[2])
        assert await _get(host, port, "localhost") == 200
        assert await _get(host, port, addresses.join(host, port)) == 200
        assert await _get(host, port, "foreign.example") == 403


async def _get(host: str, port: int, name: str) -> int:
    """The status of the page at `/`, asked for by this name."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


@asynccontextmanager
async def _pool(
    *listen: str, bind: str, cluster: Cluster = SECRET
) -> AsyncIterator[tuple[dev.Dev, Pool]]:
    async with dev.serve("16MiB", bind=bind, listen=listen, cluster=cluster) as running:
        config = ClientConfig(masters=[running.address], transports=["tcp"])
        async with running.pool(config) as pool:
            yield running, pool


async def _round_trip(pool: Pool) -> None:
    (key,) = keys("addresses", 1)
    assert await pool.write(NAMESPACE, [key], [value(key)], visible=True)
    (into,) = buffers(1)
    (result,) = await pool.read(NAMESPACE, [key], [into])
    assert result.status.hit
    assert bytes(into) == value(key)


@ipv6
@pytest.mark.parametrize(
    ("bind", "secret"), [("[::1]:0", b""), ("[::1]:0", SECRET.secret), ("[::]:0", SECRET.secret)]
)
async def test_a_master_has_callers_over_ipv6(
    bind: str, secret: bytes, way_out: dict[str, str]
) -> None:
    way_out["192.0.2.1"] = "::1"
    cluster = Cluster("default", secret)
    async with _pool("tcp://[::1]:0", bind=bind, cluster=cluster) as (running, pool):
        assert running.address.startswith("[::1]:")
        await _round_trip(pool)
        assert await refusal_of(running.address, cluster) is None
        assert await refusal_of(running.address, Cluster("default", bytes(32)))


@ipv6
async def test_a_master_on_every_address_sees_one_host_under_one_name() -> None:
    """Bounds are per host: one over IPv4 must not be another, and two must not be one."""
    seen: list[str] = []

    def answer(type: int, body: bytes, caller: Caller) -> tuple[int, bytes]:
        seen.append(caller.address)
        return type, body

    network = TcpNetwork()
    try:
        port = (await network.serve("[::]:0", answer)).address.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            link = network.connect(f"{host}:{port}")
            await link.request(1, b"", deadline=asyncio.get_running_loop().time() + 5)
        assert seen == ["127.0.0.1", "::1"]
    finally:
        network.close()


@ipv6
@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
async def test_of_a_name_the_address_that_answers_is_used(
    here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By links, which try both; zmq takes one family, and says nothing when no master is there."""
    known = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
    looked_up = socket.getaddrinfo

    def lookup(host: str, port: int, family: int = 0, *_: Any, **__: Any) -> list[Any]:
        if host != "master.example":
            return looked_up(host, port, family, *_, **__)
        return [(family, socket.SOCK_STREAM, 6, "", (known[socket.AddressFamily(family)], port))]

    network = TcpNetwork()
    listener = await network.serve(addresses.join(here, 0), lambda type, body, caller: (type, body))
    name = f"master.example:{listener.address.rpartition(':')[2]}"
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    try:
        assert await event_address.answers_on_ipv6(name) is (here == "::1")
        deadline = asyncio.get_running_loop().time() + 5
        assert await network.connect(name).request(7, b"body", deadline=deadline) == (7, b"body")
    finally:
        network.close()


@ipv6
async def test_events_are_published_and_read_over_ipv6() -> None:
    publisher = EventPublisher("tcp://[::1]:0", "tcp://[::1]:0", buffer=ReplayBuffer())
    publisher.start()
    publisher.publish_encoded(encode_batch(EventBatch(1.0, [], 0)))
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        assert publisher.endpoint.startswith("tcp://[::1]:")
        async with asyncio.timeout(5):
            replayed = await anext(subscriber.batches())
        assert replayed.batch is not None
        assert replayed.batch.events == []
    finally:
        subscriber.close()
        publisher.close()


@pytest.mark.parametrize("address", ["::1:7450", "fd00::7", "[::1]", "[::1]:x", "10.0.0.1"])
def test_an_address_without_brackets_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ConfigError, match=r"\[::1\]:7450"):
        master_address(address)
    with pytest.raises(ConfigError, match=r"expected host:port"):
        settings.parse({"masters": [address]})


def test_a_manifest_may_put_every_pods_address_in_brackets() -> None:
    for pod, bind in (("10.1.2.3", "10.1.2.3:7450"), ("fd00::7", "[fd00::7]:7450")):
        listen = f"shm://,tcp://[{pod}]:7460"
        flags = {"master.bind": f"[{pod}]:7450", "server.listen": listen}
        found = load(None, {}, flags)
        assert found.master.bind == bind
        assert found.server.listen == ["shm://", f"tcp://{bind[:-2]}60"]
