"""Lookups of a program that polls: the answers of `Pool.match`, without a loop or a thread."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import kvpool.sync
from kvpool import (
    BadKey,
    ClientConfig,
    Closed,
    Cluster,
    Match,
    MatchPoller,
    Namespace,
    ReadStatus,
    UsageError,
    dev,
    spans,
)
from kvpool.client import lookup as lookup_module
from kvpool.errors import Overloaded
from kvpool.net.control_network import TcpNetwork
from kvpool.net.control_session import MasterSession
from kvpool.net.requests import cluster_id, decode_envelope, encode_envelope
from kvpool.wire.messages import Error, FindReply, encode
from tests.conftest import keys

SPACE = Namespace("polled")
CLUSTER = cluster_id("default")


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Peer(NamedTuple):
    """A connection of a poller, at its master."""

    socket: socket.socket
    session: MasterSession


class FakeMaster:
    """A master that shakes hands in a thread; for all else the test is the master."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        host, _, port = address.partition(":")
        self._listening = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self._requests: queue.Queue[tuple[Peer, int]] = queue.Queue()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.01):
                if key.fileobj is self._listening:
                    accepted, _address = self._listening.accept()
                    session = MasterSession(Cluster(), lambda tenant: None)
                    accepted.sendall(session.take())
                    self._selector.register(accepted, selectors.EVENT_READ, Peer(accepted, session))
                else:
                    self._hear(key.data)

    def _hear(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            return
        for message in peer.session.feed(data):
            self._requests.put((peer, decode_envelope(message, CLUSTER).id))
        peer.socket.sendall(peer.session.take())

    def poll(self, wait_ms: float) -> bool:
        """Whether there is a request; waits for one."""
        until = time.monotonic() + wait_ms / 1e3
        while self._requests.empty():
            if time.monotonic() >= until:
                return False
            time.sleep(0.0005)
        return True

    def take(self, within_s: float = 5.0) -> tuple[Peer, int]:
        assert self.poll(within_s * 1e3), "no request"
        return self._requests.get()

    def reply(self, peer: Peer, id: int, message: Any) -> None:
        type, body = encode(message)
        with contextlib.suppress(OSError):  # it may have left a master that was silent
            peer.socket.sendall(peer.session.seal(encode_envelope(type, CLUSTER, id, body)))

    def answer(self, message: Any) -> None:
        self.reply(*self.take(), message)

    def hang_up(self) -> None:
        """As a master that ends connections which nobody uses."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._listening:
                key.data.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


@pytest.fixture
def masters() -> Iterator[list[FakeMaster]]:
    made = [FakeMaster(), FakeMaster()]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def master(masters: list[FakeMaster]) -> FakeMaster:
    return masters[0]


@pytest.fixture
def open_poller() -> Iterator[Callable[..., MatchPoller]]:
    made = []

    def make(*masters: str, clock: Any = time.monotonic, **settings: Any) -> MatchPoller:
        config = ClientConfig(masters=list(masters), **settings)
        made.append(MatchPoller(config, Cluster(), clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


Open = Callable[..., MatchPoller]


def until_connected() -> None:
    """Nobody polls meanwhile."""
    for thread in threading.enumerate():
        if thread.name == "kvpool-link":
            thread.join()


def until(poller: MatchPoller, within_s: float = 10.0) -> tuple[Match, ...]:
    """The only lookup's matches."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if ended := poller.poll(0.01):
            (one,) = ended
            return one.matches
    raise AssertionError("the lookup did not end")


def until_sent(poller: MatchPoller, name: str) -> None:
    end = time.monotonic() + 10
    while not poller.is_sent(name):
        poller.poll(0.005)
        assert time.monotonic() < end


def until_asked(poller: MatchPoller, master: FakeMaster) -> None:
    while not master.poll(1):
        poller.poll(0.005)


def small_pages(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    monkeypatch.setattr(lookup_module, "_MATCH_KEYS", blocks)
    monkeypatch.setattr(lookup_module, "_FIRST_KEYS", blocks)
    monkeypatch.setattr(spans, "SPAN_BLOCKS", 2)


def miss(status: ReadStatus = ReadStatus.NEVER_WRITTEN) -> FindReply:
    return FindReply([], bytes([status]))


def test_answers_are_those_of_a_pool(
    dev_in_thread: dev.Dev, open_poller: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chains, prefixes and nothing; of several pages; and several chains at once."""
    small_pages(monkeypatch, 4)
    chain, other = keys("chain", 11), keys("other", 3)
    config = ClientConfig(masters=[dev_in_thread.address], transports=["tcp"])
    with kvpool.sync.connect(config=config) as pool:
        pool.write(SPACE, chain[:9], [b"x" * 100] * 9)
        pool.write(SPACE, other, [b"y" * 100] * 3)
        poller = open_poller(dev_in_thread.address)
        for asked in (chain[:9], chain, chain[:4], chain[:5], chain[9:], other):
            poller.start("a", [(SPACE, asked)])
            assert until(poller) == (pool.match(SPACE, asked),)
        poller.start("both", [(SPACE, other), (SPACE, chain), (Namespace("empty"), chain)])
        got = until(poller)
        assert [match.length for match in got] == [3, 9, 0]
        assert len(poller) == 0
        assert poller.poll() == []


def test_no_thread_of_python_takes_part(dev_in_thread: dev.Dev, open_poller: Open) -> None:
    poller = open_poller(dev_in_thread.address)
    until_connected()
    before = threading.active_count()
    poller.start("a", [(SPACE, keys("x", 2))])
    until(poller)
    assert threading.active_count() == before


def test_a_wait_ends_with_the_reply_and_releases_the_interpreter(
    master: FakeMaster, open_poller: Open
) -> None:
    poller = open_poller(master.address)
    poller.start("a", [(SPACE, keys("x", 2))])
    began = time.monotonic()
    assert [poller.poll() for _ in range(100)] == [[]] * 100  # without a wait it returns at once
    assert time.monotonic() - began < 1.0
    thread = threading.Thread(target=master.answer, args=(miss(),))
    thread.start()
    began = time.monotonic()
    polls = 1
    while not (ended := poller.poll(0.005)):
        polls += 1
        assert time.monotonic() - began < 5.0
    thread.join()
    assert ended == [("a", (Match((), 0, ReadStatus.NEVER_WRITTEN),))]
    # It slept, and did not turn.
    assert polls < 50 + (time.monotonic() - began) / 0.002


def test_a_lookup_ends_when_no_master_answers(master: FakeMaster, open_poller: Open) -> None:
    clock = Clock()
    poller = open_poller(master.address, "127.0.0.1:9", clock=clock, attempt_s=3.0)
    poller.start("a", [(SPACE, keys("x", 2))])
    until_sent(poller, "a")
    peer, id = master.take()
    clock.ahead_s += 2.5
    assert poller.poll() == []
    clock.ahead_s += 0.6
    assert until(poller) == (Match((), 0, ReadStatus.NO_MASTER),)
    assert len(poller) == 0
    master.reply(peer, id, miss())  # too late: of no lookup
    time.sleep(0.05)
    assert poller.poll() == []


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address where nobody listens, and which no other process takes."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_lookup_is_sent_when_the_master_comes(refusing: str, open_poller: Open) -> None:
    poller = open_poller(refusing, attempt_s=60.0, hedge_s=60.0)
    poller.start("a", [(SPACE, keys("x", 2))])
    while poller._links._links[0]._retry.failures < 2:
        assert poller.poll(0.005) == []
    assert not any(poller.poll(0.005) or poller.promising for _ in range(20))
    assert not poller.is_sent("a")
    assert not poller.connected
    master = FakeMaster(refusing)
    try:
        until_sent(poller, "a")
        assert poller.connected
        master.answer(miss())
        until(poller)
        master.hang_up()
        poller.start("a", [(SPACE, keys("x", 2))])
        assert poller.promising
    finally:
        master.close()


def test_another_master_is_asked_when_one_sends_nothing_or_refuses(
    masters: list[FakeMaster], open_poller: Open
) -> None:
    first, second = masters
    clock = Clock()
    settings = {"attempt_s": 20.0, "hedge_s": 2.0}
    poller = open_poller(first.address, second.address, clock=clock, **settings)
    until_connected()
    poller.start("slow", [(SPACE, keys("x", 1))])
    first.take()
    poller.poll()
    assert not second.poll(50)
    clock.ahead_s += 2.1
    poller.poll()
    second.answer(miss())
    until(poller)

    poller.start("refused", [(SPACE, keys("x", 1))])  # the one that answered is asked first
    second.answer(Error("Overloaded", "busy"))
    while not first.poll(1):
        poller.poll(0.001)
    first.answer(Error("Overloaded", "busy, too"))
    assert until(poller) == (Match((), 0, ReadStatus.NO_MASTER),)

    poller.start("nonsense", [(SPACE, keys("x", 3))])
    second.answer(FindReply([(2, 1, [("a", "dram", 0)])], b"\x01"))
    assert until(poller)[0].stopped is ReadStatus.NO_MASTER


def test_a_miss_of_a_master_that_was_just_started_is_not_believed(
    masters: list[FakeMaster], open_poller: Open
) -> None:
    """Unless no other one answers soon, or knows more."""
    clock = Clock()
    addresses = [master.address for master in masters]
    poller = open_poller(*addresses, clock=clock, attempt_s=20.0, hedge_s=2.0)
    until_connected()
    hit = FindReply([(0, 0, [("s", "dram", 0)])], b"")
    little = FindReply([], bytes([ReadStatus.NEVER_WRITTEN]), partial=True)
    for then in (hit, little, Error("Overloaded", "busy"), None):
        poller.start(str(then), [(SPACE, keys("x", 1))])
        asked = masters[poller._preferred]
        other = masters[1 - poller._preferred]
        asked.answer(little)
        while not other.poll(1):
            assert poller.poll(0.001) == []
        if then is None:  # late
            clock.ahead_s += 2.1
        else:
            other.answer(then)
        assert until(poller)[0].length == (then is hit)
        while other.poll(0):
            other.take()


def test_a_request_that_has_ended_is_not_ended_again(
    masters: list[FakeMaster], open_poller: Open
) -> None:
    """By the second master's answer, or by the deadline."""
    clock = Clock()
    addresses = [master.address for master in masters]
    poller = open_poller(*addresses, clock=clock, attempt_s=20.0, hedge_s=0.1)
    for answer in (miss(), Error("Overloaded", "busy")):
        poller.start("a", [(SPACE, keys("x", 1))])
        asked = []
        while len(asked) < 2:
            clock.ahead_s += 0.2
            poller.poll(0.005)
            asked += [master for master in masters if master.poll(1) and master not in asked]
        for master in asked:
            master.answer(answer)
        until(poller)
        time.sleep(0.1)
        assert poller.poll(0.005) == []
        clock.ahead_s += 21.0
        assert poller.poll(0.005) == []
        assert not poller._requests


def test_all_pages_of_a_lookup_have_one_deadline(
    master: FakeMaster, open_poller: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when each is answered, a little late: one that would begin behind it is not asked."""
    small_pages(monkeypatch, 2)
    clock = Clock()
    poller = open_poller(master.address, clock=clock, attempt_s=20.0, hedge_s=10.0)
    poller.start("a", [(SPACE, keys("x", 20))])
    for _ in range(3):
        until_asked(poller, master)
        for _ in range(2):
            clock.ahead_s += 4.5
            assert poller.poll() == []
        master.answer(FindReply([(0, 1, [("s", "dram", 0)])], b""))
    (found,) = until(poller, within_s=3.0)
    assert (found.length, found.stopped) == (6, ReadStatus.NO_MASTER)


def test_what_an_engine_asks_late_has_its_time(
    master: FakeMaster, open_poller: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects before the first prompt comes; and the second page of a question is not given up
    when it is asked, because a step was long."""
    small_pages(monkeypatch, 2)
    clock = Clock()
    poller = open_poller(master.address, clock=clock, attempt_s=20.0, hedge_s=10.0)
    until_connected()
    poller.start("a", [(SPACE, keys("x", 4))])
    assert poller.is_sent("a")
    for _ in range(2):
        master.answer(FindReply([(0, 1, [("s", "dram", 0)])], b""))
        clock.ahead_s += 60.0
        ended = poller.poll()
    assert ended[0].matches[0].length == 4


def test_a_link_that_was_never_answered_is_opened_again(
    master: FakeMaster, open_poller: Open
) -> None:
    clock = Clock()
    poller = open_poller(master.address, clock=clock)
    peers = set()
    for _ in range(3):
        poller.start("a", [(SPACE, keys("x", 1))])
        until_sent(poller, "a")
        peers.add(master.take()[0])
        clock.ahead_s += 2.1
        until(poller)
    assert len(peers) > 1


def test_a_reply_that_came_in_time_counts_when_nobody_has_looked(
    master: FakeMaster, open_poller: Open
) -> None:
    """The engine has computed a step meanwhile."""
    poller = open_poller(master.address, attempt_s=0.5)
    poller.start("a", [(SPACE, keys("x", 1))])
    until_asked(poller, master)
    master.answer(miss())
    time.sleep(0.6)
    assert until(poller)[0].stopped is ReadStatus.NEVER_WRITTEN


def test_a_connection_that_ends_is_opened_again_at_once(
    master: FakeMaster, open_poller: Open
) -> None:
    """Also with a question on it, which is asked again, but not for ever."""
    clock = Clock()
    poller = open_poller(master.address, clock=clock, attempt_s=20.0, hedge_s=15.0)
    for lost in (False, True):
        poller.start("a", [(SPACE, keys("x", 1))])
        until_asked(poller, master)
        if lost:
            master.take()
            master.hang_up()
            until_asked(poller, master)
        master.answer(miss())
        assert until(poller)[0].stopped is ReadStatus.NEVER_WRITTEN
        master.hang_up()
        time.sleep(0.02)
    poller.start("a", [(SPACE, keys("x", 1))])
    for _ in range(4):
        until_asked(poller, master)
        master.take()
        master.hang_up()
        clock.ahead_s += 12.0
    assert until(poller)[0].stopped is ReadStatus.NO_MASTER


def test_a_poller_finds_a_master_by_name_and_with_a_secret() -> None:
    cluster = Cluster("default", b"0123456789abcdef")
    stop, started = threading.Event(), threading.Event()
    addresses: list[str] = []

    async def serve() -> None:
        network = TcpNetwork(cluster)
        listener = await network.serve("127.0.0.1:0", lambda *_: encode(miss()))
        addresses.append(listener.address.replace("127.0.0.1", "localhost"))
        started.set()
        while not stop.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        network.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait(10)
    config = ClientConfig(masters=addresses, attempt_s=10.0)
    pollers = [MatchPoller(config, one) for one in (cluster, cluster._replace(secret=b"x" * 16))]
    try:
        pollers[0].start("a", [(SPACE, keys("x", 1))])
        assert until(pollers[0])[0].stopped is ReadStatus.NEVER_WRITTEN
        pollers[1].start("a", [(SPACE, keys("x", 1))])
        for _ in range(20):
            assert pollers[1].poll(0.005) == []
        assert not pollers[1].is_sent("a")
    finally:
        for poller in pollers:
            poller.close()
        stop.set()
        thread.join()


def test_wrong_calls(
    master: FakeMaster, open_poller: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller = open_poller(master.address)
    with pytest.raises(BadKey):
        poller.start("a", [(SPACE, keys("x", 1)), (SPACE, [])])
    assert len(poller) == len(poller._requests) == 0
    poller.start("a", [(SPACE, keys("x", 1))])
    with pytest.raises(UsageError):
        poller.start("a", [(SPACE, keys("x", 1))])
    with pytest.raises(UsageError):
        poller.start("b", [])
    monkeypatch.setattr("kvpool.client.match_poller.PENDING_MAX", 2)
    poller.start("b", [(SPACE, keys("x", 1))])
    with pytest.raises(Overloaded):
        poller.start("c", [(SPACE, keys("x", 1))])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(Closed):
        poller.poll()
    monkeypatch.undo()
    poller.close()
    poller.close()
    with pytest.raises(Closed):
        poller.start("d", [(SPACE, keys("x", 1))])


@pytest.mark.parametrize(
    ("of", "lacks"), [(socket, "socket"), (threading.Thread, "start"), (socket, "getaddrinfo")]
)
def test_a_poller_that_cannot_connect_tries_again(
    of: Any, lacks: str, master: FakeMaster, open_poller: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No socket can be opened, no thread started, or no name looked up. The engine's scheduler
    calls it: nothing of this is an error there."""

    def refuse(*_: Any, **__: Any) -> Any:
        if lacks == "socket":
            raise OSError(errno.EMFILE, "Too many open files")
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvpool.net.polled_links.RETRY_MAX_S", 0.05)
    clock = Clock()
    poller = open_poller(master.address, clock=clock)
    poller.start("silent", [(SPACE, keys("chain", 2))])
    until_sent(poller, "silent")
    master.take()
    clock.ahead_s += 60.0
    with monkeypatch.context() as patch:
        patch.setattr(of, lacks, refuse)
        (ended,) = poller.poll()
        poller.poll(0.02)
        open_poller("127.0.0.1:9")
    assert ended.matches[0].stopped is ReadStatus.NO_MASTER
    poller.start("again", [(SPACE, keys("chain", 2))])
    until_sent(poller, "again")
