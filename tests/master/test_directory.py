"""The master's map: exactly what living servers said, in order (G5, G7, G9)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.master.state.directory import Directory
from kvpool.types import ROOT, Namespace, ReadStatus, ServerStats
from tests.conftest import key, keys

ONE = Namespace("one")
TWO = Namespace("two", parts=2)
HOST = "host-a"


def directory(*servers: str, now: float = 0.0) -> Directory:
    """A map that knows these servers, at epoch 1, with 1000 bytes each."""
    made = Directory()
    for server in servers:
        assert made.register(server, 1, HOST, [f"tcp://{server}:1"], ["dram"], 1000, now)
    return made


def prefix(books: Directory, chain: list[bytes], namespace: Namespace = ONE) -> int:
    return books.match(namespace, chain).length


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_against_a_model(seed: int) -> None:
    history(random.Random(seed), steps=120)


@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(st.randoms(use_true_random=False))
def test_chosen_histories_against_a_model(rng: random.Random) -> None:
    """The same, with a search for the shortest that fails."""
    history(rng, steps=25)


def history(rng: random.Random, steps: int) -> None:
    """Announcements with gaps and doubles, inventories in pieces, silence, restarts, sweeps."""
    books = Directory(timeout_s=3.0, forget_s=60.0)
    digests = keys("d", 12)
    truth: dict[str, set[tuple[Namespace, int, bytes]]] = {}  # what each server really has
    told: dict[str, set[tuple[Namespace, int, bytes]]] = {}  # what the master has heard of it
    epoch: dict[str, int] = {}
    sequence: dict[str, int] = {}
    alive: dict[str, bool] = {}
    now = 0.0

    def resync(server: str) -> None:
        sequence[server] += 1
        assert books.accepts_piece(server, epoch[server], sequence[server], 0)
        for namespace, part, digest in sorted(truth[server], key=str):
            books.stored(server, namespace, part, 0, [digest])
            if rng.random() < 0.1:
                compare()  # what was known stays in force until the inventory is complete
        books.end_inventory(server)
        told[server] = set(truth[server])

    def start(server: str) -> None:
        if server in epoch:
            books.leave(server, epoch[server])
        epoch[server] = epoch.get(server, 0) + 1
        assert books.register(server, epoch[server], HOST, [], ["dram"], 1000, now)
        truth[server], told[server] = set(), set()
        sequence[server], alive[server] = 0, True

    def compare() -> None:
        books.check()
        for namespace in (ONE, TWO):
            expected = 0
            for digest in digests:
                parts = {
                    part
                    for server in told
                    if alive[server]
                    for name, part, held in told[server]
                    if (name, held) == (namespace, digest)
                }
                if len(parts) < namespace.parts:
                    break
                expected += 1
            assert prefix(books, digests, namespace) == expected

    for server in ("s0", "s1", "s2"):
        start(server)
    for _ in range(steps):
        server = rng.choice(sorted(truth))
        step = rng.random()
        namespace, part = rng.choice([(ONE, 0), (TWO, 0), (TWO, 1)])
        some = rng.sample(digests, rng.randint(1, 6))
        if step < 0.7 and alive[server]:
            gone = rng.random() < 0.4
            for digest in some:
                change = (namespace, part, digest)
                truth[server].discard(change) if gone else truth[server].add(change)
            sequence[server] += 1
            lost = rng.random() < 0.1
            if not lost:
                number = sequence[server]
                if books.accepts(server, epoch[server], number):
                    if gone:
                        books.gone(server, namespace, part, some, ReadStatus.EVICTED)
                    else:
                        books.stored(server, namespace, part, 0, some)
                    told[server] = set(truth[server])
                    assert books.accepts(server, epoch[server], number) is None  # a double
                else:
                    resync(server)
        elif step < 0.78:
            start(server)
        elif step < 0.86:
            books.leave(server, epoch[server])
            alive[server] = False
        elif step < 0.94:
            assert books.heartbeat(server, epoch[server], ServerStats(), now)
            alive[server] = True
        else:
            books.sweep(rng.randint(1, 20))
        if rng.random() < 0.5:
            compare()
    for server in sorted(truth):
        if alive[server]:
            resync(server)
    compare()
    while books.sweep(5):
        compare()


def test_inventories_replace_and_do_not_merge() -> None:
    books = directory("s")
    books.stored("s", ONE, 0, 0, keys("old", 3))
    books.accepts_piece("s", 1, 5, 0)
    books.stored("s", ONE, 0, 0, keys("new", 2))
    assert prefix(books, keys("old", 3)) == 3
    assert prefix(books, keys("new", 2)) == 0
    books.end_inventory("s")
    assert prefix(books, keys("old", 3)) == 0
    assert prefix(books, keys("new", 2)) == 2
    books.check()


def test_a_gap_is_noticed() -> None:
    books = directory("s")
    assert books.accepts("s", 1, 1) is True
    assert books.accepts("s", 1, 3) is False
    assert books.accepts("s", 1, 2) is True
    assert books.accepts("s", 1, 2) is None
    assert books.accepts("s", 2, 3) is False
    assert books.accepts("stranger", 1, 1) is False


def test_a_silent_server_comes_back_with_all_it_had() -> None:
    books = directory("s")
    books.stored("s", ONE, 0, 0, keys("c", 3))
    for second in range(1, 6):
        books.tick(float(second))
    assert books.match(ONE, keys("c", 3)).stopped is ReadStatus.SERVER_LOST
    assert books.heartbeat("s", 1, ServerStats(), 6.0)
    assert prefix(books, keys("c", 3)) == 3


def test_a_belated_greeting_is_not_all_there_is_to_know() -> None:
    """Our predecessor had heard everything; of that, only the greeting came to us, too."""
    books = directory("s")
    assert not books.heartbeat("s", 1, ServerStats(), 1.0, sequence=7)
    assert books.members(1.0)[0].alive
    assert books.accepts_piece("s", 1, 8, 0)
    books.end_inventory("s")
    assert books.heartbeat("s", 1, ServerStats(), 1.0, sequence=8)
    assert books.heartbeat("s", 1, ServerStats(), 1.0, sequence=7)  # a late one


def test_a_master_that_slept_does_not_bury_everybody() -> None:
    """No mass expiry: the time that the master itself missed counts against nobody."""
    books = directory("a", "b")
    for tenth in range(10):
        books.tick(tenth / 10)
    books.tick(500.0)
    assert all(member.alive for member in books.members(500.0))
    for second in range(501, 506):
        books.tick(float(second))
    assert not any(member.alive for member in books.members(506.0))


def test_a_forgotten_server_is_the_reason_of_its_misses() -> None:
    books = directory("s")
    books.stored("s", ONE, 0, 0, keys("c", 3))
    for second in range(1, 700):
        books.tick(float(second))
    while books.sweep():
        pass
    assert len(books) == 0
    assert books.match(ONE, keys("c", 3)).stopped is ReadStatus.SERVER_LOST
    assert books.members(700.0) == []


def test_an_id_belongs_to_the_living() -> None:
    books = directory("s")
    assert not books.register("s", 2, HOST, [], ["dram"], 1000, 1.0)
    assert books.register("s", 2, HOST, [], ["dram"], 1000, 10.0)
    assert not books.heartbeat("s", 1, ServerStats(), 10.0)


def test_a_run_ends_where_the_place_changes() -> None:
    books = directory("a", "b")
    chain = keys("c", 6)
    books.stored("a", ONE, 0, 0, chain[:3])
    books.stored("b", ONE, 0, 0, chain[2:5])
    match = books.match(ONE, chain)
    assert [(run.first, run.last) for run in match.runs] == [(0, 1), (2, 2), (3, 4)]
    assert [len(run.replicas) for run in match.runs] == [1, 2, 1]
    assert (match.length, match.stopped) == (5, ReadStatus.NEVER_WRITTEN)


def test_placement_prefers_host_then_room_then_the_parent() -> None:
    books = directory("near", "full")
    books.register("far", 1, "host-b", [], ["dram"], 10_000, 0.0)
    books.heartbeat("full", 1, ServerStats(used=1000, victim_age_s=5), 0.0)
    placed = books.place(ONE, [key("x")], ROOT, 100, HOST)
    assert placed.servers == ("near", "full", "far")
    assert books.place(ONE, [key("x")], ROOT, 100, "host-b").servers[0] == "far"


def test_a_chain_stays_with_its_parent_unless_that_server_is_worn() -> None:
    books = directory("a", "b")
    books.stored("b", ONE, 0, 0, [key("parent")])
    books.heartbeat("a", 1, ServerStats(used=1000, victim_age_s=10), 0.0)
    books.heartbeat("b", 1, ServerStats(used=1000, victim_age_s=9.8), 0.0)
    assert books.place(ONE, [key("x")], key("parent"), 1, HOST).servers[0] == "b"
    books.heartbeat("b", 1, ServerStats(used=1000, victim_age_s=1), 0.0)
    assert books.place(ONE, [key("x")], key("parent"), 1, HOST).servers[0] == "a"


def test_full_servers_share_writes_by_the_age_of_their_victims() -> None:
    books = directory("a", "b")
    first = []
    for digest in keys("w", 500):
        books.heartbeat("a", 1, ServerStats(used=1000, victim_age_s=10), 0.0)
        books.heartbeat("b", 1, ServerStats(used=1000, victim_age_s=5), 0.0)
        first.append(books.place(ONE, [digest], ROOT, 1, HOST).servers[0])
    assert 350 < first.count("a") < 450  # four fifths: the weights are 1 and 1/4


def test_two_writers_of_a_block_are_sent_to_one_server() -> None:
    first = [
        directory("a", "b", "c").place(ONE, [digest], ROOT, 1, HOST).servers[0]
        for digest in keys("block", 30)
    ]
    again = [
        directory("c", "a", "b").place(ONE, [digest], ROOT, 1, HOST).servers[0]
        for digest in keys("block", 30)
    ]
    assert first == again
    assert len(set(first)) == 3


def test_a_hash_at_the_end_of_its_range_is_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever chooses a digest cannot choose one that the weights divide by zero for."""
    for hashed in (0, 2**64 - 1):
        monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda _, hashed=hashed: hashed)
        assert directory("a").place(ONE, [key("x")], ROOT, 1, HOST).servers == ("a",)


def test_each_miss_is_explained() -> None:
    books = directory("s")
    books.stored("s", ONE, 0, 0, keys("k", 3))
    books.stored("s", TWO, 1, 0, [key("half")])
    books.gone("s", ONE, 0, [keys("k", 3)[0]], ReadStatus.EVICTED)
    texts = {
        answer.status: answer.text for answer in books.explain(ONE, [*keys("k", 2), key("never")])
    }
    assert texts[ReadStatus.HIT] == "present on s (dram)"
    assert "evicted" in texts[ReadStatus.EVICTED]
    assert "never written" in texts[ReadStatus.NEVER_WRITTEN]
    assert "parts [1] of 2" in books.explain(TWO, [key("half")])[0].text
    assert "namespaces that are: 'one'" in books.explain(Namespace("typo"), [key("x")])[0].text
    books.leave("s", 1)
    assert "s, silent" in books.explain(ONE, [keys("k", 3)[1]])[0].text


def test_a_piece_of_an_inventory_that_comes_again_changes_nothing() -> None:
    books = directory("s")
    assert books.accepts_piece("s", 1, 5, 0)
    books.stored("s", ONE, 0, 0, keys("first", 2))
    assert books.accepts_piece("s", 1, 5, 1)
    books.stored("s", ONE, 0, 0, keys("second", 2))
    assert books.accepts_piece("s", 1, 5, 0) is None  # doubled on the way, and late
    assert books.accepts_piece("s", 1, 5, 3) is False  # piece 2 is missing
    books.end_inventory("s")
    assert prefix(books, keys("first", 2)) == 2
    assert books.accepts("s", 1, 6)
    assert books.accepts_piece("s", 1, 5, 0) is None
    assert books.accepts("s", 1, 7)
    assert prefix(books, keys("second", 2)) == 2
    books.check()


def test_a_master_that_slept_gives_no_credit_from_the_future() -> None:
    books = directory("s")
    books.tick(0.0)
    books.heartbeat("s", 1, ServerStats(), 20.0)  # the first thing after it woke up
    for halves in range(7):
        books.tick(20.0 + halves / 2)
    (member,) = books.members(20.0 + books.timeout_s)
    assert not member.alive


def test_an_inventory_says_why_blocks_are_gone() -> None:
    """A master that lost touch, or is new, tells the true reason and not "server lost"."""
    books = directory("s", "t")
    books.stored("s", ONE, 0, 0, keys("x", 2))
    books.stored("t", ONE, 0, 0, keys("x", 1))
    for server in ("t", "s"):  # both were out of touch when they threw it out
        assert books.accepts_piece(server, 1, 5, 0)
        books.gone(server, ONE, 0, keys("x", 1), ReadStatus.EVICTED)
        books.end_inventory(server)
    assert books.match(ONE, keys("x", 1)).stopped is ReadStatus.EVICTED
    assert books.match(ONE, keys("x", 2)[1:]).stopped is ReadStatus.SERVER_LOST  # nobody said why
    while books.sweep():
        pass
    assert books.match(ONE, keys("x", 1)).stopped is ReadStatus.EVICTED
    new = directory("s")
    assert new.accepts_piece("s", 1, 6, 0)
    new.gone("s", ONE, 0, keys("x", 1), ReadStatus.REMOVED)
    new.end_inventory("s")
    assert new.match(ONE, keys("x", 1)).stopped is ReadStatus.REMOVED
    new.check()
