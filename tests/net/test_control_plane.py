"""Requests to masters: every answer comes, nobody is in between, and strangers cost little."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from kvpool.errors import (
    BadFrame,
    ConfigError,
    DeadlineExceeded,
    KvpoolError,
    Overloaded,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvpool.net import control_listener, control_network, requests
from kvpool.net.control_network import TcpNetwork
from kvpool.net.control_session import CallerSession, ControlSession, MasterSession, caller_session
from kvpool.net.masters_certificate import Certificate, masters_certificate, masters_fingerprint
from kvpool.net.requests import (
    MESSAGE_SIZE_MAX,
    MessageReader,
    cluster_id,
    encode_envelope,
    with_size,
)
from kvpool.net.secret_sessions import MasterSessions, SecretMasterSession
from kvpool.ops.unreachable_master import refusal_of
from kvpool.protocols import Caller, Link
from kvpool.strangers import WRONG_PROOFS_MAX
from kvpool.tenants import TenantKeys
from kvpool.types import Cluster
from kvpool.wire import auth
from tests.conftest import eventually
from tests.support import messages as wire
from tests.support.between import between
from tests.support.raw_peers import ControlPeer, control_peer, frame

OPEN, SECRET = Cluster(), Cluster("default", b"0123456789abcdef")
ACME = Cluster("default", b"0123456789abcdef-acme", "acme")
CLUSTERS = pytest.mark.parametrize("cluster", [OPEN, SECRET], ids=["open", "secret"])


class Served:
    """A master's address that answers with what it was asked, and a link to it."""

    def __init__(self, cluster: Cluster = OPEN, address: str = "127.0.0.1:0") -> None:
        self.cluster = cluster
        self.address = address
        self.work_s = 0.0
        self.asked: list[bytes] = []
        self.callers: list[Caller] = []

    async def start(self, tenants: TenantKeys | None = None) -> None:
        self.network = TcpNetwork(self.cluster, tenants)
        self.listener: Any = await self.network.serve(self.address, self.handle)
        self.address = self.listener.address

    def handle(self, type: int, body: bytes, caller: Caller) -> tuple[int, bytes]:
        self.asked.append(body)
        self.callers.append(caller)
        time.sleep(self.work_s)
        return 1, body

    def connect(self) -> Link:
        return self.network.connect(self.address)

    async def caller(self) -> Any:
        """A link that has asked, and so has a connection."""
        link = self.connect()
        await ask(link)
        return link


@asynccontextmanager
async def served(
    cluster: Cluster = OPEN, tenants: TenantKeys | None = None
) -> AsyncIterator[Served]:
    master = Served(cluster)
    await master.start(tenants)
    try:
        yield master
    finally:
        master.network.close()


async def ask(
    link: Link, body: bytes = b"", within_s: float = 10.0, *, hasty: bool = False
) -> bytes:
    deadline = asyncio.get_running_loop().time() + within_s
    return (await link.request(1, body, deadline=deadline, hasty=hasty))[1]


def request(body: bytes = b"") -> bytes:
    return encode_envelope(1, cluster_id("default"), 1, body)


# --- a caller and its master -------------------------------------------------------------------


@CLUSTERS
async def test_every_question_has_its_answer(cluster: Cluster) -> None:
    async with served(cluster) as master:
        link = master.connect()
        assert await ask(link, b"first") == b"first"
        bodies = [b"%d" % number * number for number in range(200)] + [bytes(1 << 20)]
        assert await asyncio.gather(*(ask(link, body) for body in bodies)) == bodies
        assert set(master.callers) == {Caller("127.0.0.1")}
        assert master.listener.callers == 1


@CLUSTERS
async def test_what_was_asked_on_a_connection_that_ends_is_asked_again(cluster: Cluster) -> None:
    async with served(cluster) as master:
        link = await master.caller()
        link._end._on_message = lambda message: None  # as if no reply came through
        asked = [asyncio.create_task(ask(link, b"%d" % number)) for number in range(5)]
        await eventually(lambda: len(master.asked) == 6)
        (end,) = master.listener._callers
        end.abort()
        assert await asyncio.gather(*asked) == [b"%d" % number for number in range(5)]
        assert len(master.asked) == 11


async def test_who_is_hasty_does_not_wait_for_a_master_that_is_gone() -> None:
    """But for one whose connection has ended, as it does when nobody uses it."""
    async with served() as master:
        link = await master.caller()
        (end,) = master.listener._callers
        end.abort()
        assert await ask(link, b"again", hasty=True) == b"again"
        link._end.send = lambda message: None  # the master is too busy to answer
        waiting = [asyncio.create_task(ask(link, b"?", 60, hasty=one)) for one in (True, False)]
        await asyncio.sleep(0.01)
        master.listener.stop()
        hasty, patient = waiting
        for _ in range(2):  # one that has been asked, and one that is asked now
            with pytest.raises(DeadlineExceeded, match="refused"):
                await asyncio.wait_for(hasty, 5)
            hasty = asyncio.create_task(ask(link, b"now", 60, hasty=True))
        await master.start()
        assert await patient == b"?"
        assert await ask(link, b"back", hasty=True) == b"back"


async def test_a_master_is_found_where_another_program_has_been() -> None:
    """It had the master's address for a while, and answered in a language of its own."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read(64)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as other:
        master = Served(address=f"127.0.0.1:{other.sockets[0].getsockname()[1]}")
        callers = TcpNetwork()
        link = callers.connect(master.address)
        with pytest.raises(Unavailable):
            await ask(link, within_s=0.2)
    await master.start()
    assert await ask(link, b"?") == b"?"
    callers.close()
    master.network.close()


async def test_a_network_forgets_links_that_are_closed() -> None:
    """A server closes those that it does not use, and makes new ones, for as long as it lives."""
    async with served() as master:
        callers = TcpNetwork()
        for _ in range(9):
            link = callers.connect(f"tcp://{master.address}")  # a scheme may be written
            assert await ask(link, b"?") == b"?"
            link.close()
            await link.wait_closed()  # type: ignore[attr-defined]
        assert len(callers._links) == 1
        used, unused = callers.connect(master.address), callers.connect(master.address)
        assert await ask(used, b"?") == b"?"
        callers.connect(master.address)
        assert {used, unused} <= set(callers._links)
        callers.close()
        await callers.wait_closed()
        await eventually(lambda: not master.listener.callers)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_silent_master_is_left_when_another_connection_is_there(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its callers have less patience than their deadlines."""
    monkeypatch.setattr(requests, "RECONNECT_AFTER_S", 0.1)
    async with served() as master:
        link = await master.caller()
        before = link._end
        before.send = lambda message: None  # as if the network swallowed all
        lost = ask(link, b"lost", within_s=60 if cancelled else 0.15)
        with pytest.raises(TimeoutError if cancelled else DeadlineExceeded):
            await asyncio.wait_for(lost, 0.15 if cancelled else 60)
        assert await ask(link, b"found", within_s=5) == b"found"
        assert link._end is not before
        assert not before.is_open


async def test_after_a_reply_the_next_connection_is_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master ends connections that nobody uses, as often as it likes."""
    monkeypatch.setattr(control_network, "RETRY_S", 60.0)
    monkeypatch.setattr(control_network, "RETRY_MAX_S", 60.0)
    async with served() as master:
        link = await master.caller()
        for _ in range(3):
            (end,) = master.listener._callers
            end.abort()
            assert await ask(link, b"again", within_s=5) == b"again"


async def test_a_request_that_nobody_waits_for_reaches_no_later_master() -> None:
    async with served() as master:
        callers = TcpNetwork()
        link = callers.connect(master.address)
        master.listener.stop()
        with pytest.raises(DeadlineExceeded, match=r"did not answer: .*refused"):
            await ask(link, b"too late", within_s=0.1)
        await master.start()
        assert await ask(link, b"in time") == b"in time"
        assert master.asked == [b"in time"]
        callers.close()


async def test_with_no_file_left_a_request_ends_in_time_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as master:
        link = master.connect()

        async def none_left(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_connection", none_left)
            with pytest.raises(Unavailable, match="Too many open files"):
                await ask(link, within_s=0.1)
        assert await ask(link, b"again", within_s=5) == b"again"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_network_that_is_closed_has_no_file_open(loop: str) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def play(when: str) -> None:
        async with served(SECRET) as master:
            caller = TcpNetwork(SECRET)
            before = open_files()
            link: Any = caller.connect(master.address)
            asking = asyncio.create_task(ask(link))
            if when == "open":
                await asking
            elif when == "shaking":
                while not link._connected:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(0)
            caller.close()
            async with asyncio.timeout(1):
                await caller.wait_closed()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: not master.listener._arrived)
            await eventually(lambda: open_files() <= before)

    async def main() -> None:
        for when in ("open", "shaking", "connecting"):
            await play(when)

    uvloop.run(main()) if loop == "uvloop" else asyncio.run(main())


async def test_a_port_that_is_taken_is_one_clear_error() -> None:
    async with served() as first:
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:.*--bind"):
            await first.network.serve(first.address, first.handle)


@pytest.mark.parametrize("address", ["7450", "http://a:1", "ipc:///tmp/x", "::1:7450"])
async def test_what_is_no_address_of_a_master_is_refused(address: str) -> None:
    network = TcpNetwork()
    with pytest.raises(ConfigError, match="expected host:port, such as"):
        network.connect(address)
    with pytest.raises(ConfigError, match="expected host:port, such as"):
        await network.serve(address, lambda *_: (1, b""))


# --- who may ask -------------------------------------------------------------------------------


def shaken(caller: ControlSession, master: ControlSession) -> None:
    """Carry bytes until both have nothing to say."""
    while True:
        from_master, from_caller = master.take(), caller.take()
        if from_master:
            caller.feed(from_master)
        if from_caller:
            master.feed(from_caller)
            if master.shaking:
                master.shake()
        if not from_master and not from_caller:
            return


def master_of(
    cluster: Cluster,
    certificate: Certificate | None = None,
    tenants: TenantKeys | None = None,
) -> MasterSession:
    if certificate is None and cluster.secret:
        certificate = masters_certificate(cluster, tenants=tenants is not None)
    secrets_of = (tenants or TenantKeys()).secrets_of
    if certificate is None:
        return MasterSession(cluster, lambda tenant: None)
    return MasterSessions(cluster, secrets_of, certificate)(lambda tenant: None)


def keys_of_acme() -> TenantKeys:
    keys = TenantKeys()
    keys.replace({"acme": (ACME.secret,)})
    return keys


@pytest.mark.parametrize(
    ("caller", "master", "why"),
    [
        (OPEN, SECRET, (Unauthenticated, "it requires a secret: set secret_file")),
        (SECRET, OPEN, (Unauthenticated, "it has no secret, but this process has one")),
        (SECRET._replace(secret=b"x" * 16), SECRET, (Unauthenticated, "the cluster's name are eq")),
        (Cluster("other", SECRET.secret), SECRET, (VersionMismatch, "another cluster")),
        (Cluster("other"), OPEN, (VersionMismatch, "another cluster")),
        (ACME, SECRET, (Unauthenticated, "is not that of the masters")),
    ],
)
async def test_who_may_not_ask_is_told_why_and_at_once(
    caller: Cluster, master: Cluster, why: tuple[type[KvpoolError], str]
) -> None:
    async with served(master) as one:
        network = TcpNetwork(caller)
        with pytest.raises(why[0], match=why[1]):
            await ask(network.connect(one.address), within_s=5)
        assert not one.asked
        assert isinstance(await refusal_of(one.address, caller), why[0])
        network.close()


async def test_a_tenant_is_known_by_its_secret_and_its_masters_by_their_certificate() -> None:
    mine = ACME._replace(fingerprint=masters_fingerprint(SECRET))
    async with served(SECRET, keys_of_acme()) as master:
        network = TcpNetwork(mine)
        await ask(network.connect(master.address))
        assert master.callers == [Caller("127.0.0.1", "acme")]
        for posing in (
            mine._replace(tenant="blue"),
            mine._replace(secret=SECRET.secret),
            mine._replace(secret=b"x" * 20),
            SECRET._replace(secret=mine.secret),
        ):
            assert isinstance(await refusal_of(master.address, posing), Unauthenticated)
        network.close()
    # Another client of the tenant knows as much of it as the masters do, but for their certificate.
    posing_master = master_of(SECRET._replace(secret=b"it knows another"), tenants=keys_of_acme())
    with pytest.raises(Unauthenticated, match="not that of the masters of this cluster"):
        shaken(caller_session(mine), posing_master)


def test_all_masters_of_a_pool_with_tenants_show_one_certificate_and_others_their_own() -> None:
    """What is in the key files of tenants, and so may never change."""
    assert masters_certificate(SECRET, tenants=True).hash == masters_fingerprint(SECRET)
    assert masters_fingerprint(SECRET).hex() == (
        "c509b83f1117019685f2b2cb45db2483f2278904d947e8a20a38fb596139ba1e"
    )
    assert masters_fingerprint(SECRET) != masters_fingerprint(SECRET._replace(name="other"))
    shown = [masters_certificate(SECRET, tenants=False).hash for _ in range(2)]
    assert len({*shown, masters_fingerprint(SECRET)}) == 3


async def test_a_master_with_a_secret_needs_no_place_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    before = set(os.listdir("/proc/self/fd"))
    for tenants in (True, False):
        masters_certificate(SECRET, tenants=tenants)
    assert set(os.listdir("/proc/self/fd")) <= before
    async with served(SECRET):
        pass


class Middle:
    """Who stands between both with a certificate of his own, and passes on what they say."""

    def __init__(self, caller: CallerSession, master: MasterSession) -> None:
        self.caller, self.master = caller, master
        mine = Cluster("default", b"he has a secret, too")
        self.to_caller: Any = master_of(mine)
        self.to_master: Any = caller_session(mine)
        self.passed: list[bytes] = []

    def play(self) -> None:
        # He opens both, and then speaks in the place of both.
        self.to_caller._handshake = self.listening()
        next(self.to_caller._handshake)
        self.to_master._handshake = self.speaking()
        shaken(self.to_master, self.master)
        shaken(self.caller, self.to_caller)

    def speaking(self) -> Any:
        while True:
            self.passed.append((yield None))

    def listening(self) -> Any:
        while True:
            said = yield None
            self.to_master._out.append(self.to_master.seal(said))
            before = len(self.passed)
            shaken(self.to_master, self.master)
            for answer in self.passed[before:]:
                self.to_caller._out.append(self.to_caller.seal(answer))


def test_a_proof_that_is_passed_on_is_none() -> None:
    caller, master = caller_session(SECRET), master_of(SECRET)
    with pytest.raises(Unauthenticated):
        Middle(caller, master).play()
    assert not caller.open
    assert not master.open


def played(master: Callable[[Any], Any]) -> tuple[CallerSession, Any]:
    """A caller, and a master that says what it likes."""
    one: Any = master_of(SECRET)
    one._handshake = master(one)
    next(one._handshake)
    return caller_session(SECRET), one


def test_who_does_not_know_the_secret_is_believed_to_be_no_master() -> None:
    ours = cluster_id("default")

    def say(one: Any, message: wire.Message) -> None:
        type, body = wire.encode(message)
        one._out.append(one.seal(encode_envelope(type, ours, 0, body)))

    def guess(one: Any) -> Any:
        yield None
        say(one, wire.Hello("default", "master", bytes(32)))
        yield None
        say(one, wire.Proof(bytes(32)))
        yield None

    def echo(one: Any) -> Any:
        nonce = wire.decode(wire.Hello, 2, (yield None)[16:]).nonce
        say(one, wire.Hello("default", "master", nonce))
        proof = yield None
        one._out.append(one.seal(proof))  # the caller's own
        yield None

    def skip(one: Any) -> Any:
        yield None
        say(one, wire.Proof(bytes(32)))
        yield None

    for master in (guess, echo, skip):
        caller, one = played(master)
        with pytest.raises(KvpoolError):
            shaken(caller, one)
        assert not caller.open


@pytest.mark.parametrize("size", [0, 31])
def test_a_caller_with_a_short_nonce_is_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its proof would be good once more, for whoever has heard it."""
    caller, master = caller_session(SECRET), master_of(SECRET)
    monkeypatch.setattr("secrets.token_bytes", lambda _: bytes(size))
    with pytest.raises(Unauthenticated, match="no secret that is valid here"):
        shaken(caller, master)


def test_who_breaks_tls_is_refused_without_a_word() -> None:
    """It could not be sealed: what was raised then filled the log, and the connection stayed."""
    master, stranger = master_of(SECRET), caller_session(SECRET)
    while master.shaking:
        stranger.feed(master.take())
        master.feed(stranger.take())
        master.shake()
    with pytest.raises(BadFrame, match="TLS was broken"):
        master.feed(b"\x17\x03\x03\x00\x40" + bytes(64))
    master.take()
    master.refuse(wire.Error("BadFrame", "TLS was broken"))
    assert master.take() == b""


def test_a_stranger_gets_nothing_on_which_to_try_guesses() -> None:
    """Neither before its proof nor after a wrong one: no byte of what it gets is made from the
    secret."""
    master: Any = master_of(SECRET)
    stranger: Any = caller_session(SECRET._replace(secret=b"x" * 16))
    heard: list[bytes] = []
    go_on = stranger._go_on
    stranger._go_on = lambda answer: (heard.append(answer or b""), go_on(answer))
    with pytest.raises(Unauthenticated, match="no secret that is valid here"):
        shaken(stranger, master)
    assert [message[3] for message in heard if message] == [wire.TYPES[wire.Hello]]
    master.refuse(wire.Error("Unauthenticated", "no"))
    with pytest.raises(Unauthenticated):
        stranger.feed(master.take())
    assert [message[3] for message in heard if message][1:] == [wire.TYPES[wire.Error]]


def test_a_proof_of_one_plane_is_none_of_the_other() -> None:
    """Both are made from the secret, the nonces and a certificate; here from some words more."""
    certificate = masters_certificate(SECRET, tenants=False)
    caller: Any = caller_session(SECRET)
    master: Any = master_of(SECRET, certificate)
    said: list[Any] = []
    for one in (caller, master):
        one._say = lambda message, say=one._say: (said.append(message), say(message))
    shaken(caller, master)
    nonces = [message.nonce for message in said if isinstance(message, wire.Hello)]
    proof = next(message.proof for message in said if isinstance(message, wire.Proof))
    of_this = auth.client_proof(SECRET, *nonces, b"kvpool control 1" + certificate.hash)
    assert proof == of_this != auth.client_proof(SECRET, *nonces, certificate.hash)


# --- what travels ------------------------------------------------------------------------------


class Tap:
    """A process between a caller and its master, on the way of their bytes."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.questions = bytearray()
        #: Whether the last byte of each piece is another one: of questions, of replies.
        self.alters = {"questions": False, "replies": False}

    def passes(self, data: bytes, reply: bool) -> bytes:
        way = "replies" if reply else "questions"
        self.seen += data
        if not reply:
            self.questions += data
        altered = data[:-1] + bytes([data[-1] ^ self.alters[way]])
        self.alters[way] = False
        return altered


@CLUSTERS
async def test_with_a_secret_nobody_on_the_way_reads_or_repeats_a_message(cluster: Cluster) -> None:
    tap = Tap()
    async with served(cluster) as master, between(master.address, tap.passes) as address:
        link = master.network.connect(address)
        await ask(link, b"a name that is nobody's business")
        assert (b"nobody's business" in tap.seen) == (cluster is OPEN)
        link.close()
        reader, writer = await asyncio.open_connection(*master.address.split(":"))
        writer.write(tap.questions)
        if cluster.secret:
            assert await asyncio.wait_for(reader.read(8), 5) != b""
            await asyncio.wait_for(reader.read(), 5)
        else:
            await eventually(lambda: len(master.asked) == 2)
        assert len(master.asked) == 1 + (cluster is OPEN)
        writer.close()


@pytest.mark.parametrize("way", ["questions", "replies"])
async def test_a_message_that_is_altered_on_the_way_is_asked_again(way: str) -> None:
    tap = Tap()
    async with served(SECRET) as master, between(master.address, tap.passes) as address:
        link = master.network.connect(address)
        await ask(link)
        tap.alters[way] = True
        master.asked.clear()
        assert await ask(link, b"question", within_s=2) == b"question"
        assert set(master.asked) == {b"question"}


@CLUSTERS
async def test_masters_and_callers_of_former_releases_get_one_clear_error(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Those spoke zmq, which says so in its first byte."""
    greeting = b"\xff" + bytes(7) + b"\x01\x7f"

    async def former(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(former, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    network = TcpNetwork(cluster)
    with pytest.raises(VersionMismatch, match="it speaks zmq, as former releases did: run the sa"):
        await ask(network.connect(address), within_s=5)
    network.close()
    server.close()
    async with served(cluster) as master:
        reader, writer = await asyncio.open_connection(*master.address.split(":"))
        writer.write(greeting)
        await asyncio.wait_for(reader.read(), 1)
        writer.close()
    (line,) = closed(caplog)
    assert "speaks zmq" in line.why  # type: ignore[attr-defined]


# --- what strangers cost -----------------------------------------------------------------------


def closed(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What a master has said of connections that it refused or ended."""
    return [one for one in caplog.records if one.message.startswith("connection closed")]


async def silent(master: Served, count: int) -> list[asyncio.StreamWriter]:
    address = master.address.split(":")
    return [(await asyncio.open_connection(*address))[1] for _ in range(count)]


@CLUSTERS
async def test_a_port_full_of_silent_connections_still_takes_an_honest_caller(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_listener, "HELLO_S", 1.0)
    monkeypatch.setattr("kvpool.strangers.WRONG_PROOFS_PER_S", 0.0)
    async with served(cluster) as master:
        master.listener._strangers._limit = limit = WRONG_PROOFS_MAX + 20
        writers = await silent(master, limit + 40)
        await eventually(lambda: master.listener.refused == 40)
        assert len(master.listener._arrived) == limit
        await ask(master.connect())
        await eventually(lambda: len(master.listener._arrived) == 1)  # they are ended, too
        await ask(master.connect())  # and were no wrong proofs of this address
        for writer in writers:
            writer.close()


async def test_an_address_that_breaks_handshakes_is_soon_heard_no_more_and_callers_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.strangers.WRONG_PROOFS_PER_S", 0.0)  # however long this takes
    async with served(SECRET) as master:
        link = await master.caller()
        for _ in range(WRONG_PROOFS_MAX + 20):
            reader, writer = await asyncio.open_connection(*master.address.split(":"))
            writer.write(b"no TLS at all")
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        assert await ask(link, b"goes on") == b"goes on"
        with pytest.raises(EOFError):
            async with control_peer(master.address, SECRET) as peer:
                await peer.shake()  # not even a greeting
        assert master.listener.refused > WRONG_PROOFS_MAX


async def test_handshakes_leave_half_of_the_time_to_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many come at once."""
    async with served(SECRET) as master:
        link = await master.caller()
        shaking: list[float] = []
        shake = SecretMasterSession.shake

        def slow(self: SecretMasterSession) -> list[bytes]:
            began = time.perf_counter()
            time.sleep(0.001)
            done = shake(self)
            shaking.append(time.perf_counter() - began)
            return done

        monkeypatch.setattr(SecretMasterSession, "shake", slow)
        others = [TcpNetwork(SECRET) for _ in range(100)]
        began = time.perf_counter()
        asked = [asyncio.create_task(ask(one.connect(master.address))) for one in others]
        turns: list[float] = []
        while not all(task.done() for task in asked):
            begun = time.perf_counter()
            await ask(link)
            turns.append(time.perf_counter() - begun)
        assert sum(shaking) < 0.6 * (time.perf_counter() - began)
        assert len(turns) > 50
        for one in others:
            one.close()


@pytest.mark.parametrize(
    "said",
    [
        with_size(bytes(1025)),
        (1 << 20).to_bytes(4, "little") + bytes(99),
        b"\xff\xff\xff\xff",
        with_size(b""),
        with_size(bytes(16)),
        with_size(request()),
        with_size(request()[:2] + b"\x09" + request()[3:]),  # another version
        b"GET / HTTP/1.1\r\n\r\n",
        bytes.fromhex("16030100dc010000d80303") + bytes(200),  # TLS, where there is none
        frame(wire.Hello("default", "of the other plane")),
        bytes(100_000),
    ],
)
async def test_who_says_anything_but_hello_is_cut_off_at_once(said: bytes) -> None:
    async with served() as master:
        reader, writer = await asyncio.open_connection(*master.address.split(":"))
        writer.write(said)
        await asyncio.wait_for(reader.read(), 1)
        await eventually(lambda: not master.listener._arrived)
        assert not master.asked
        writer.close()


async def test_what_comes_before_a_proof_is_bounded() -> None:
    master: Any = master_of(SECRET)
    for _ in range(32):
        master.feed(b"\x16\x03\x01\x10\x00" + bytes(1000))
    with pytest.raises(BadFrame, match="before it has proved itself"):
        master.feed(bytes(1000))


@CLUSTERS
async def test_a_message_that_is_too_long_ends_the_connection_before_it_is_here(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """And those who do that again and again fill no log."""
    async with served(cluster) as master:
        for _ in range(5):
            async with control_peer(master.address, cluster) as peer:
                await peer.shake()
                peer.send_unframed((MESSAGE_SIZE_MAX + 1).to_bytes(4, "little"))
                with pytest.raises(EOFError):
                    await peer.receive()
        assert master.listener.callers == 0
        assert len(closed(caplog)) == 1


async def test_a_caller_that_reads_no_replies_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_listener, "_HELD_S", 0.3)
    async with served() as master:
        other = await master.caller()
        async with control_peer(master.address) as deaf:
            await deaf.shake()
            deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
            deaf.send(*[request(bytes(1 << 20))] * 12)
            await eventually(lambda: master.listener.callers == 1)
            assert await ask(other, b"others go on") == b"others go on"
        assert master.listener._held.used == 0


async def test_a_caller_that_reads_late_is_answered_no_further_and_then_to_the_end() -> None:
    bodies = [bytes([number]) * (1 << 20) for number in range(24)]
    async with served() as master, control_peer(master.address) as late:
        await late.shake()
        late.writer.transport.pause_reading()  # type: ignore[attr-defined]
        late.send(*map(request, bodies))
        other = await master.caller()
        for _ in range(50):
            await ask(other)
        held = master.listener._held
        await eventually(lambda: held.used > 1 << 20)
        assert held.used < 4 << 20
        assert len(master.asked) < 24 + 51
        late.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert [(await late.receive())[16:] for _ in bodies] == bodies
        await eventually(lambda: held.used == 0)


async def test_requests_in_parts_take_no_more_than_their_tenants_share() -> None:
    keys, acme, blue = two_tenants()
    long = request(bytes(200_000))
    async with served(SECRET, keys) as master:
        held = master.listener._held
        held.total = 1 << 20
        peers: list[ControlPeer] = []
        await fill(peers, master, acme, 8)
        for peer in peers:
            peer.send_unframed(with_size(long)[:-1])
        await eventually(lambda: master.listener.callers < 8 and held.used > 100_000)
        await fill(peers, master, blue, 1)
        peers[-1].send(long)
        assert await peers[-1].receive() == long  # there is room for others
        assert held.held("acme") == held.used <= 1 << 19
        for peer in peers[:-1]:
            peer.send_unframed(long[-1:])
        await eventually(lambda: held.used == 0)
        assert 0 < len(master.asked) - 1 == master.listener.callers - 1 < 8


class Unread:
    """A transport whose other end has left so many bytes unread."""

    def __init__(self, transport: Any, size: int) -> None:
        self.transport, self.size = transport, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def get_write_buffer_size(self) -> int:
        return self.size


async def test_who_sends_or_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB, in some times what a connection has on which nothing moves."""
    monkeypatch.setattr(control_listener, "_HELD_S", 0.4)
    monkeypatch.setattr(control_listener, "_HELD_FREE", 10_000)
    sent = request(bytes(MESSAGE_SIZE_MAX - 16))
    async with served() as master, control_peer(master.address) as peer:
        await peer.shake()
        whole = with_size(sent)
        for at in range(0, len(whole), 1 << 16):
            peer.writer.write(whole[at : at + (1 << 16)])
            await asyncio.sleep(0.08)
        assert await peer.receive() == sent
        (end,) = master.listener._callers
        end._transport = slow = Unread(end._transport, 1 << 20)
        end._weigh()
        while slow.size > 20_000:  # nothing tells the master of it
            await asyncio.sleep(0.08)
            slow.size -= 1 << 16
            assert master.listener.callers == 1
        slow.size = 20_000
        await eventually(lambda: master.listener.callers == 0)


async def test_a_request_that_stays_in_parts_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_listener, "_HELD_S", 0.5)
    long = with_size(request(bytes(200_000)))
    async with served() as master, control_peer(master.address) as peer:
        await peer.shake()
        peer.writer.write(long[:-99])
        for _ in range(4):  # each of them comes whole, soon enough
            await asyncio.sleep(0.2)
            peer.writer.write(long[-99:] + long[:-99])
            await peer.receive()
        for _ in range(20):  # a byte now and then is no progress
            peer.writer.write(b"\0")
            with contextlib.suppress(TimeoutError, EOFError, ConnectionError):
                async with asyncio.timeout(0.1):
                    await peer.receive()
        await eventually(lambda: not master.listener.callers)
        assert master.listener._held.used == 0
    (line,) = closed(caplog)
    assert "little has moved in 0.5 s" in line.why  # type: ignore[attr-defined]


async def fill(peers: list[ControlPeer], master: Served, cluster: Cluster, count: int) -> None:
    """Open so many connections of this caller; raises what one of them is refused with."""
    for _ in range(count):
        reader, writer = await asyncio.open_connection(*master.address.split(":"))
        peer = ControlPeer(reader, writer, cluster)
        peers.append(peer)
        await peer.shake()


def two_tenants() -> tuple[TenantKeys, Cluster, Cluster]:
    keys, hash = TenantKeys(), masters_fingerprint(SECRET)
    keys.replace({name: (name.encode() * 4,) for name in ("acme", "blue")})
    acme, blue = (Cluster("default", name.encode() * 4, name, hash) for name in ("acme", "blue"))
    return keys, acme, blue


async def test_one_tenant_leaves_room_for_others_and_its_idle_connections_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_listener, "_IDLE_S", 0.1)
    keys, acme, blue = two_tenants()
    async with served(SECRET, keys) as master:
        master.listener._shares.total = 8
        peers: list[ControlPeer] = []
        await fill(peers, master, blue, 1)
        with pytest.raises(Overloaded, match="of 8 connections are in use"):
            await fill(peers, master, acme, 8)
        assert 2 <= (held := master.listener._shares.held("acme")) <= 4
        await asyncio.sleep(0.15)
        await fill(peers, master, acme, 1)
        assert master.listener._shares.held("acme") == held
        peers[0].send(request(b"?"))
        assert (await peers[0].receive())[16:] == b"?"
        master.listener.stop()
        assert master.listener._shares.used == 0


async def test_idle_links_give_way_and_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_listener, "_IDLE_S", 0.0)
    async with served() as master:
        master.listener._shares.total = 20
        links = [master.connect() for _ in range(100)]
        for link in [*links, *links]:
            assert await ask(link, b"?", within_s=5) == b"?"
        assert master.listener.callers <= 20


# --- whose turn it is --------------------------------------------------------------------------


async def test_a_burst_of_one_caller_leaves_the_loop_to_others() -> None:
    async with served() as master:
        busy, other = await master.caller(), await master.caller()
        master.work_s = 0.001
        burst = [asyncio.create_task(ask(busy, b"%d" % number)) for number in range(300)]
        await asyncio.sleep(0)
        begun = len(master.asked)
        assert await ask(other, b"another") == b"another"
        assert len(master.asked) - begun < 150
        assert await asyncio.gather(*burst) == [b"%d" % number for number in range(300)]
        assert await ask(busy, b"reads again") == b"reads again"


async def test_a_tenant_with_many_connections_has_as_many_turns_as_one_with_one() -> None:
    keys, *tenants = two_tenants()
    async with served(SECRET, keys) as master:
        peers: list[ControlPeer] = []
        for tenant, count in zip(tenants, (40, 1), strict=True):
            await fill(peers, master, tenant, count)
        master.work_s = 0.001
        for peer in [*peers, *peers]:
            peer.send(request(b"blue" if peer is peers[-1] else b"acme"))
        await eventually(lambda: len(master.asked) == 82)
        assert max(at for at, body in enumerate(master.asked) if body == b"blue") < 20
        peers[-1].send(*[request(b"blue")] * 100)
        for peer in peers[1:-1]:
            peer.send(request(b"gone"))
            peer.writer.close()
        peers[0].send(request(b"last"))
        await eventually(lambda: b"last" in master.asked)
        assert master.asked[82:].count(b"blue") < 20, "who has gone takes no turn"


async def test_however_many_ask_at_once_a_turn_of_the_loop_is_short() -> None:
    async with served() as master:
        links = [await master.caller() for _ in range(40)]
        master.work_s = 0.001
        tasks = [asyncio.create_task(ask(link, b"?")) for link in links]
        before, most = len(master.asked), 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            most = max(most, len(master.asked) - before)
            before = len(master.asked)
        assert 0 < most <= 5


async def test_a_caller_that_asks_faster_than_it_is_answered_is_read_no_further() -> None:
    async with served() as master:
        link = await master.caller()
        (end,) = master.listener._callers
        master.work_s = 0.005
        bodies = [bytes(200_000) + b"%d" % number for number in range(60)]
        tasks = [asyncio.create_task(ask(link, body, 30)) for body in bodies]
        held = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            held = max(held, sum(map(len, end._waiting)) + len(end._session.reader.rest))
        assert held < 2_000_000  # of 12 MB
        assert [task.result() for task in tasks] == bodies


async def test_a_caller_on_which_an_answer_fails_leaves_the_others_alone() -> None:
    async with served() as master:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        bad = await master.caller()
        (end,) = master.listener._callers
        good = await master.caller()

        def fails(*_: object) -> bool:
            raise RuntimeError("the handle is closed")

        end.answer_one = fails
        asked = asyncio.create_task(ask(bad, b"?", within_s=0.2))
        replies = [asyncio.create_task(ask(good, b"%d" % number)) for number in range(20)]
        assert await asyncio.gather(*replies) == [b"%d" % number for number in range(20)]
        with pytest.raises(DeadlineExceeded):
            await asked


# --- messages as bytes -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_however_a_stream_is_cut_its_messages_are_the_same(seed: int) -> None:
    draw = random.Random(seed)
    messages = [draw.randbytes(draw.choice([0, 1, 3, 16, 200, 70_000])) for _ in range(30)]
    stream = b"".join(map(with_size, messages))
    reader, got = MessageReader(), []
    while stream:
        size = draw.choice([1, 2, 3, 5, 100, 4096, 65536, len(stream)])
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == messages
    assert not reader.rest


@CLUSTERS
def test_however_a_handshake_is_cut_it_is_the_same(cluster: Cluster) -> None:
    caller, master = caller_session(cluster), master_of(cluster)
    for _ in range(20):
        for byte in master.take():
            caller.feed(bytes([byte]))
        for byte in caller.take():
            master.feed(bytes([byte]))
            if master.shaking:
                master.shake()
    assert caller.open
    assert master.open
    for byte in caller.seal(request(b"?")):
        got = master.feed(bytes([byte]))
    assert got == [request(b"?")]


async def test_a_connection_that_ends_leaves_nothing_for_the_collector() -> None:
    """Servers and masters collect no old garbage (`process.freeze_gc`), and TLS has 100 KiB of each
    connection: of strangers in mid-handshake, of those who say nothing, and of callers."""

    def sessions() -> int:
        return sum(isinstance(one, MasterSession) for one in gc.get_objects())

    cluster = Cluster(secret=b"s" * 32)
    serving = TcpNetwork(cluster)
    listener = await serving.serve("127.0.0.1:0", lambda type, body, caller: (type, body))
    gc.collect()
    gc.disable()
    try:
        before = sessions()
        for hello in (b"", b"\x16\x03\x01\x02\x00\x01", b"nonsense" * 4):
            reader, writer = await asyncio.open_connection(*listener.address.split(":"))
            await reader.read(16)
            writer.write(hello)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await writer.wait_closed()
        calling = TcpNetwork(cluster)
        link = calling.connect(listener.address)
        later = asyncio.get_running_loop().time() + 5.0
        assert await link.request(1, b"x", deadline=later) == (1, b"x")
        calling.close()
        await calling.wait_closed()
        del link, calling, reader, writer
        await eventually(lambda: sessions() == before)
    finally:
        gc.enable()
        serving.close()
        await listener.close()
