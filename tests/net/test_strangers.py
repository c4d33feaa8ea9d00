"""Peers that never belong to the cluster: silent ones, and those with a wrong secret (G11)."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from kvpool import ClientConfig, connect, dev, logs
from kvpool import strangers as strangers_module
from kvpool.errors import LinkBroken, Overloaded, Unauthenticated
from kvpool.strangers import (
    HANDSHAKES_MAX,
    LINES_MAX,
    LOG_EVERY_S,
    WRONG_PROOFS_MAX,
    WRONG_PROOFS_PER_S,
    Strangers,
)
from kvpool.types import Cluster
from kvpool.wire import auth
from kvpool_transports.streams import server as serving
from kvpool_transports.streams.stream import Stream, address_of
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.net.test_secret import OURS, pool_of
from tests.support import messages as wire
from tests.support.raw_peers import Raw, frame, raw

LOG = logs.get("test")
WRONG = Unauthenticated("wrong")
HERE = "192.0.2.1"


# --- the table of addresses -----------------------------------------------------------------


def test_an_address_may_send_some_wrong_proofs_and_more_later() -> None:
    strangers = Strangers(LOG, "tcp")
    for _ in range(WRONG_PROOFS_MAX):
        strangers.check(HERE, 10.0)
        strangers.refused(HERE, WRONG, 10.0)
    with pytest.raises(Overloaded):
        strangers.check(HERE, 10.0)
    one_more = 10.0 + 1 / WRONG_PROOFS_PER_S
    with pytest.raises(Overloaded):
        strangers.check(HERE, one_more - 0.01)
    strangers.check(HERE, one_more + 0.01)
    strangers.refused(HERE, WRONG, one_more + 0.01)
    with pytest.raises(Overloaded):
        strangers.check(HERE, one_more + 0.01)


def test_only_wrong_proofs_count_and_only_where_there_are_addresses() -> None:
    """An old client, or a process of the same user over a Unix socket, shuts no other one out."""
    strangers = Strangers(LOG, "tcp")
    for _ in range(10 * WRONG_PROOFS_MAX):
        strangers.refused(HERE, LinkBroken("gone"), 0.0)
        strangers.refused("", WRONG, 0.0)
    strangers.check(HERE, 0.0)
    strangers.check("", 0.0)


def test_the_table_is_bounded_and_keeps_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "ADDRESSES_MAX", 64)
    strangers = Strangers(LOG, "tcp")
    for _ in range(WRONG_PROOFS_MAX):
        strangers.refused(HERE, WRONG, 0.0)
    for number in range(3 * 64):
        strangers.refused(f"198.51.{number >> 8}.{number & 255}", WRONG, 0.0)
        assert len(strangers._addresses) <= 64
    with pytest.raises(Overloaded):
        strangers.check(HERE, 0.0)
    strangers.refused("203.0.113.1", WRONG, LOG_EVERY_S + 1.0)  # by then all others are forgotten
    assert list(strangers._addresses) == ["203.0.113.1"]


def test_one_log_line_stands_for_many_refusals(caplog: pytest.LogCaptureFixture) -> None:
    strangers = Strangers(LOG, "tcp")
    for now in (0.0, *[1.0] * 9, LOG_EVERY_S, LOG_EVERY_S):
        strangers.refused(HERE, WRONG, now)
    strangers.refused("198.51.100.7", WRONG, LOG_EVERY_S)
    counts = [(one.peer, one.count) for one in caplog.records]  # type: ignore[attr-defined]
    assert counts == [(HERE, 1), (HERE, 10), ("198.51.100.7", 1)]


def test_who_has_many_addresses_has_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    strangers = Strangers(LOG, "tcp")
    for minute in range(3):
        for number in range(2 * LINES_MAX):
            strangers.refused(f"198.51.{number >> 8}.{number & 255}", WRONG, minute * LOG_EVERY_S)
        assert len(caplog.records) == (minute + 1) * LINES_MAX


def test_an_address_is_what_one_host_cannot_choose_freely() -> None:
    assert address_of(("192.0.2.7", 4711)) == "192.0.2.7"
    assert address_of(("2001:db8::1", 4711, 0, 0)) == address_of(("2001:db8::ffff", 1, 0, 0))
    assert address_of(("2001:db8::1", 1, 0, 0)) != address_of(("2001:db8:0:1::1", 1, 0, 0))
    assert address_of(("fe80::1%eth0", 4711, 0, 2)) == "fe80::/64"
    assert address_of(("::ffff:192.0.2.7", 4711, 0, 0)) != address_of(("::ffff:192.0.2.8", 1, 0, 0))
    assert address_of("") == address_of(None) == address_of("/path") == ""


# --- at the port ----------------------------------------------------------------------------


def strangers_of(running: dev.Dev, scheme: str = "tcp") -> Strangers:
    (server,) = running.servers
    (listener,) = [one for one in server._listeners if one.address.startswith(scheme)]
    found = listener._sessions.strangers  # type: ignore[attr-defined]
    assert isinstance(found, Strangers)
    return found


@pytest.fixture
def eight_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "HANDSHAKES_MAX", 8)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_a_port_full_of_silent_connections_serves_clients(
    eight_handshakes: None, watched: dev.Dev, scheme: str
) -> None:
    """Also the witness of `watched`, who is connected already, notices nothing."""
    (server,) = watched.servers
    fresh = keys("fresh", 3)
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(raw(watched, scheme)) for _ in range(50)]
        await eventually(lambda: server.stats(0.0).counters.get("displaced_handshakes") == 42)
        assert len(strangers_of(watched, scheme)) == 8
        assert server.stats(0.0).counters["connections"] == 1  # the witness
        config = ClientConfig(masters=[watched.address], transports=[scheme])
        for _ in range(3):
            async with watched.pool(config) as pool:
                await pool.write(NAMESPACE, fresh, values(fresh))
                got = buffers(3)
                results = await pool.read(NAMESPACE, fresh, got)
                assert all(result.status.hit for result in results)
                assert got == values(fresh)
        for peer in silent[:42]:  # the oldest ones have made room
            assert await peer.refusal() == "nothing"


async def test_a_silent_connection_ends(monkeypatch: pytest.MonkeyPatch, pool_dev: dev.Dev) -> None:
    monkeypatch.setattr(serving, "HELLO_S", 0.2)
    async with raw(pool_dev) as silent, raw(pool_dev) as slow:
        await eventually(lambda: len(strangers_of(pool_dev)) == 2)
        for byte in frame(wire.Hello("default", "slow"))[:-1]:
            await slow.send(bytes([byte]))
            await asyncio.sleep(0.01)
        assert await silent.refusal() == await slow.refusal() == "DeadlineExceeded"
    assert len(strangers_of(pool_dev)) == 0


async def test_every_end_of_a_handshake_gives_its_place_back(pool_dev: dev.Dev) -> None:
    strangers = strangers_of(pool_dev)
    async with raw(pool_dev):
        await eventually(lambda: len(strangers) == 1)
    await eventually(lambda: len(strangers) == 0)  # gone without a word
    async with raw(pool_dev) as peer:
        await peer.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await peer.refusal() == "BadFrame"
    async with raw(pool_dev) as peer:
        await peer.ask(wire.Hello("default", "raw"), wire.Welcome)
        assert len(strangers) == 0


@asynccontextmanager
async def raw_from(running: dev.Dev, host: str) -> AsyncIterator[Raw]:
    """As `raw`, from another address of this host."""
    (server,) = running.servers
    address = next(a for a in server.addresses if a.startswith("tcp")).partition("://")[2]
    to, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        sock.bind((host, 0))
        await asyncio.get_running_loop().sock_connect(sock, (to, int(port)))
        yield Raw(sock)


async def prove(running: dev.Dev, host: str, cluster: Cluster) -> str:
    """What a client from `host` with this secret gets: the name of an error, or `Welcome`."""
    hello = wire.Hello("default", "raw", bytes(32))
    async with raw_from(running, host) as peer:
        try:
            challenge = await peer.ask(hello, wire.Challenge)
        except Overloaded as error:
            return type(error).__name__
        proof = auth.client_proof(cluster, hello.nonce, challenge.nonce)
        await peer.send(frame(wire.Proof(proof)))
        if cluster.secret != OURS.secret:
            return await peer.refusal()
        return "Welcome"


async def test_wrong_proofs_shut_their_own_address_out_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strangers_module, "WRONG_PROOFS_PER_S", 0.0)
    chain = keys("throttled", 2)
    guess = Cluster("default", b"0123456789abcdef-guess")
    async with pool_of(OURS) as running:
        (server,) = running.servers
        answers = [await prove(running, "127.0.0.2", guess) for _ in range(WRONG_PROOFS_MAX)]
        assert set(answers) == {"Unauthenticated"}
        # From now on not even the right secret is tried, or guessing would go on.
        assert await prove(running, "127.0.0.2", guess) == "Overloaded"
        assert await prove(running, "127.0.0.2", OURS) == "Overloaded"
        assert server.stats(0.0).counters["refused_handshakes"] == WRONG_PROOFS_MAX + 2
        # Clients at other addresses notice nothing.
        config = ClientConfig(masters=[running.address], transports=["tcp"])
        async with await connect(config=config, cluster=OURS) as pool:
            await pool.write(NAMESPACE, chain, values(chain))
            results = await pool.read(NAMESPACE, chain, buffers(2))
            assert all(result.status.hit for result in results)
        monkeypatch.setattr(strangers_module, "WRONG_PROOFS_PER_S", 1e9)
        assert await prove(running, "127.0.0.2", OURS) == "Welcome"
    lines = [r for r in caplog.records if vars(r).get("event") == "connection closed"]
    assert [(line.levelname, vars(line)["peer"]) for line in lines] == [("WARNING", "127.0.0.2")]


async def test_one_address_ends_no_handshake_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only more addresses than there are places do: then the oldest one is a silent one."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))
    strangers, ended = Strangers(LOG, "tcp"), list[str]()
    for name in ("gone", *["flood"] * 10, *["four"] * 4, *["flood"] * 40, *"abcdefgh"):
        stream = Stream()
        monkeypatch.setattr(stream, "abort", partial(ended.append, name))
        strangers.arrived(stream, name)
        for _ in range(2 if name == "gone" else 0):
            strangers.left(stream)
    assert ended == [*["flood"] * 46, *["four"] * 4, *["flood"] * 4]


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "handshakes"),
    [(400, 100), (1 << 20, HANDSHAKES_MAX), (2, 1), (resource.RLIM_INFINITY, HANDSHAKES_MAX)],
)
async def test_handshakes_leave_files_for_clients(
    monkeypatch: pytest.MonkeyPatch, files: int, handshakes: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    strangers = Strangers(LOG, "tcp")
    streams = [Stream() for _ in range(handshakes + 1)]
    assert [strangers.arrived(one, "") for one in streams] == [False] * handshakes + [True]
