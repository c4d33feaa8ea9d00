"""The master's map: exactly what living servers said, in order (G5, G7, G9)."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.config import MasterConfig
from kvpool.errors import Unauthenticated
from kvpool.fingerprint import MapFingerprint, location_seed
from kvpool.master import server_requests
from kvpool.master.extension import NoHints
from kvpool.master.server_requests import ServerRequests
from kvpool.master.service import Master
from kvpool.master.state.change_ring import ChangeRing
from kvpool.master.state.changes import ChangeKind
from kvpool.master.state.directory import Directory
from kvpool.master.state.explanations import explain
from kvpool.master.state.server_record import Refusal, Registration, SequenceCheck
from kvpool.master.state.server_table import ServerTable
from kvpool.master.state.snapshot import server_page
from kvpool.master.state.sweeper import Sweeper
from kvpool.net.control_network import TcpNetwork
from kvpool.piecewise_dict import PIECE_KEYS
from kvpool.protocols import Caller
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace, ReadStatus, ServerStats
from kvpool.wire import messages as wire
from tests.conftest import key, keys
from tests.support.sweeping import sweep_all

ONE = Namespace("one")
TWO = Namespace("two", parts=2)
HOST = "host-a"
OTHER = b"another token"
NEXT, GAP, DUPLICATE = SequenceCheck.NEXT, SequenceCheck.GAP, SequenceCheck.DUPLICATE


def directory_of(*servers: str, now: float = 0.0) -> Directory:
    """A map that knows these servers, at epoch 1, with 1000 bytes each."""
    made = Directory()
    for server in servers:
        assert registered(made, server, now=now) is None
    return made


def registered(
    directory: Directory,
    server: str,
    epoch: int = 1,
    *,
    token: bytes = b"",
    kept: bool = False,
    sequence: int = 0,
    now: float = 0.0,
) -> Refusal | None:
    own = Registration(epoch, HOST, (f"tcp://{server}:1",), ("dram",), 1000, token, kept)
    return directory.servers.register(server, own, now, sequence=sequence)


def announcement(directory: Directory, sequence: int) -> SequenceCheck:
    """Of `s`, whose process has epoch 1."""
    return directory.servers.check_sequence("s", 1, sequence)


def piece(directory: Directory, sequence: int, number: int, *, last: bool = False) -> SequenceCheck:
    """Of the inventory of `s` that has this sequence number."""
    return directory.servers.check_piece("s", 1, sequence, number, last=last)


def prefix(directory: Directory, chain: list[bytes], namespace: Namespace = ONE) -> int:
    return directory.match(namespace, chain).length


def fingerprint(*held: tuple[Namespace, int, int, list[bytes]]) -> tuple[int, bytes]:
    """The blocks and the fingerprint of a server with these: namespace, part, tier, digests."""
    counted = MapFingerprint()
    for namespace, part, tier, digests in held:
        for digest in digests:
            counted.count(digest, location_seed(namespace, part, tier), 1)
    return counted.blocks, counted.packed()


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
    directory = Directory(ServerTable(timeout_s=3.0, forget_s=60.0))
    sweeper = Sweeper(directory)
    digests = keys("d", 12)
    truth: dict[str, set[tuple[Namespace, int, bytes]]] = {}  # what each server really has
    told: dict[str, set[tuple[Namespace, int, bytes]]] = {}  # what the master has heard of it
    epoch: dict[str, int] = {}
    sequence: dict[str, int] = {}
    alive: dict[str, bool] = {}
    now = 0.0

    def resync(server: str, attempts: int = 3) -> None:
        register(server)
        sequence[server] += 1
        assert directory.servers.check_piece(server, epoch[server], sequence[server], 0) is NEXT
        for namespace, part, digest in sorted(truth[server], key=repr):
            directory.stored(server, namespace, part, 0, [digest])
            told[server].add((namespace, part, digest))
            if rng.random() < 0.1:
                compare()  # what was known stays in force until the inventory is complete
                own = directory.servers.records[server].inventories
                assert own.differs(sequence[server], *fingerprint()), "the server calls it complete"
            if attempts and rng.random() < 0.05:
                return resync(server, attempts - 1)  # it fails halfway and begins again
        assert directory.servers.end_inventory(server) == len(told[server] - truth[server])
        told[server] = set(truth[server])

    def register(server: str) -> None:
        number = sequence[server]
        assert not registered(directory, server, epoch[server], sequence=number, now=now)

    def start(server: str) -> None:
        epoch[server] = epoch.get(server, 0) + 1
        truth[server], told[server] = set(), set()
        sequence[server], alive[server] = 0, True
        register(server)

    def compare() -> None:
        check_invariants(directory)
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
            assert prefix(directory, digests, namespace) == expected

    def compare_fingerprints() -> None:
        """A server's map differs from any other, by a block, a part, a tier or a namespace."""
        for server, known in told.items():
            own = directory.servers.records[server].inventories
            held = [(namespace, part, 0, [digest]) for namespace, part, digest in known]
            assert not own.differs(own.sequence, *fingerprint(*held))
            assert not own.differs(own.sequence + 1, *fingerprint()), "not of the same moment"
            if held:
                namespace, part, _, digest = held.pop(rng.randrange(len(held)))
                assert own.differs(own.sequence, *fingerprint(*held))
                other = rng.choice(
                    [
                        (namespace, part, 1, digest),
                        (namespace, part ^ 1, 0, digest),
                        (Namespace("three"), part, 0, digest),
                        (namespace, part, 0, keys("x", 1)),
                    ]
                )
                assert other in held or own.differs(own.sequence, *fingerprint(*held, other))

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
                if directory.servers.check_sequence(server, epoch[server], number) is NEXT:
                    if gone:
                        directory.removed(server, namespace, part, some, ReadStatus.EVICTED)
                    else:
                        directory.stored(server, namespace, part, 0, some)
                    told[server] = set(truth[server])
                    assert (
                        directory.servers.check_sequence(server, epoch[server], number) is DUPLICATE
                    )  # a double
                else:
                    resync(server)
        elif step < 0.78:
            start(server)
        elif step < 0.86:
            directory.servers.leave(server, epoch[server])
            alive[server] = False
        elif step < 0.94:
            assert directory.servers.heartbeat(server, epoch[server], ServerStats(), now)
            alive[server] = True
        else:
            sweeper.step(rng.randint(1, 20))
        if rng.random() < 0.5:
            compare()
            compare_fingerprints()
    for server in sorted(truth):
        if alive[server]:
            resync(server)
    compare()
    while sweeper.step(5):
        compare()
    assert len(directory) == len(
        {(name, held) for known in told.values() for name, _, held in known}
    )


def test_a_server_goes_through_the_states_of_its_table() -> None:
    """`ServerRecord` has the table: one line of it is one step here."""
    directory, chain = directory_of("s"), keys("c", 2)  # unknown -> registered

    register = partial(registered, directory)

    def reason() -> ReadStatus:
        check_invariants(directory)
        return directory.match(ONE, chain).stopped

    assert reason() is ReadStatus.NEVER_WRITTEN
    assert directory.servers.check_sequence("s", 2, 1) is GAP  # another process
    assert announcement(directory, 1) is NEXT
    directory.stored("s", ONE, 0, 0, chain)  # registered -> live
    assert reason() is ReadStatus.HIT
    assert announcement(directory, 3) is GAP
    assert piece(directory, 4, 0) is GAP  # it has to register first
    assert register("s", sequence=3) is None
    assert piece(directory, 4, 0) is NEXT  # live -> syncing
    assert reason() is ReadStatus.HIT
    directory.stored("s", ONE, 0, 0, chain[:1])
    assert piece(directory, 4, 1) is NEXT
    directory.servers.end_inventory("s")  # syncing -> live
    assert directory.match(ONE, chain).length == 1
    assert register("s", 2, token=OTHER) is not None  # its id is taken
    directory.servers.leave("s", 1)  # live -> lost
    assert reason() is ReadStatus.SERVER_LOST
    assert directory.servers.heartbeat("s", 1, ServerStats(), 1.0, 4)  # lost -> live
    assert directory.match(ONE, chain).length == 1
    directory.servers.leave("s", 1)
    assert register("s", 2, now=2.0) is None  # lost -> registered
    assert reason() is ReadStatus.SERVER_LOST
    for second in range(2, 700):
        directory.servers.tick(float(second))  # registered -> lost -> unknown
    assert not directory.servers.members(700.0)
    assert directory.servers.check_sequence("s", 2, 1) is GAP


def test_a_belated_greeting_is_not_all_there_is_to_know() -> None:
    """Our predecessor had heard everything; of that, only the greeting came to us, too."""
    directory = directory_of("s")
    assert not directory.servers.heartbeat("s", 1, ServerStats(), 1.0, sequence=7)
    assert directory.servers.members(1.0)[0].alive
    assert registered(directory, "s", sequence=7) is None
    assert piece(directory, 8, 0) is NEXT
    directory.servers.end_inventory("s")
    assert directory.servers.heartbeat("s", 1, ServerStats(), 1.0, sequence=8)
    assert directory.servers.heartbeat("s", 1, ServerStats(), 1.0, sequence=7)  # a late one


def test_a_master_that_slept_does_not_bury_everybody() -> None:
    """No mass expiry: the time that the master itself missed counts against nobody."""
    directory = directory_of("a", "b")
    for tenth in range(10):
        directory.servers.tick(tenth / 10)
    directory.servers.tick(500.0)
    assert all(member.alive for member in directory.servers.members(500.0))
    for second in range(501, 506):
        directory.servers.tick(float(second))
    assert not any(member.alive for member in directory.servers.members(506.0))


def test_a_forgotten_server_is_the_reason_of_its_misses() -> None:
    directory = directory_of("s")
    directory.stored("s", ONE, 0, 0, keys("c", 3))
    for second in range(1, 700):
        directory.servers.tick(float(second))
    sweep_all(directory)
    assert len(directory) == 0
    assert directory.match(ONE, keys("c", 3)).stopped is ReadStatus.SERVER_LOST
    assert directory.servers.members(700.0) == []


def test_an_id_belongs_to_the_living() -> None:
    directory = directory_of("s")
    refusal = registered(directory, "s", 2, token=OTHER, now=1.0)
    assert refusal is not None
    assert "tcp://s:1, and its last message came 1.0 s ago" in refusal.problem
    assert "free in 2.0 s" in refusal.problem
    assert not directory.servers.records["s"].registration.shows(OTHER)
    assert directory.servers.records["s"].registration.shows(b"")
    assert registered(directory, "s", 2, token=OTHER, now=3.0) is None
    assert directory.servers.records["s"].registration.shows(OTHER)
    assert not directory.servers.records["s"].registration.shows(b"")
    assert not directory.servers.heartbeat("s", 1, ServerStats(), 10.0)


def test_a_restarted_server_has_its_id_at_once_and_its_past_is_over() -> None:
    directory = directory_of("s")
    for epoch in (2, 3):
        assert registered(directory, "s", epoch, now=0.1) is None
    for former in (1, 2):  # a late message, or a second process with the same identity
        refusal = registered(directory, "s", former, now=0.2)
        assert refusal is not None
        assert refusal.lasting
    assert directory.servers.heartbeat("s", 3, ServerStats(), 0.3)
    assert registered(directory, "s", 2, now=3.4) is None  # the later one is lost
    assert registered(directory, "s", 2, now=3.5) is None  # again: it lost an announcement


def test_a_server_whose_id_was_taken_and_is_free_again_keeps_it() -> None:
    """Its epoch is one of the earlier server's, and yet of no earlier process of its own."""
    directory = directory_of("s")
    assert registered(directory, "s", 2, token=OTHER, now=3.0) is None
    assert registered(directory, "s", 1, now=6.0) is None  # the other one is lost
    assert registered(directory, "s", 1, sequence=5, now=6.1) is None  # it lost an announcement
    assert registered(directory, "s", 3, now=6.2) is None
    refusal = registered(directory, "s", 1, now=6.3)  # now it is an earlier process
    assert refusal is not None
    assert refusal.lasting


def test_an_identity_that_is_kept_reserves_its_id() -> None:
    """Longer than it takes to restart: nobody takes the id of a server that is away."""
    directory = Directory(ServerTable(timeout_s=3.0, forget_s=60.0))
    registered(directory, "s", kept=True)
    directory.servers.leave("s", 1)
    refusal = registered(directory, "s", 2, token=OTHER, now=59.0)
    assert refusal is not None
    assert refusal.lasting
    assert registered(directory, "s", 3, kept=True, now=59.5) is None
    assert registered(directory, "s", 2, token=OTHER, now=59.5 + 60.0) is None


def test_a_process_that_registers_again_has_its_new_addresses_and_its_blocks() -> None:
    """And nothing else of what it says: its host has a place in the order of writes."""
    directory, chain = directory_of("s"), keys("c", 2)
    directory.stored("s", ONE, 0, 0, chain)
    moved = Registration(1, "host-b", ("tcp://moved:1",), ("dram",), 9000)
    assert directory.servers.register("s", moved, 1.0) is None
    (member,) = directory.servers.members(1.0)
    assert (member.addresses, member.host, member.capacity) == (("tcp://moved:1",), HOST, 1000)
    assert prefix(directory, chain) == 2
    check_invariants(directory)


def test_a_registration_takes_no_number_back() -> None:
    directory = directory_of("s")
    assert announcement(directory, 1) is NEXT
    assert registered(directory, "s", sequence=0) is None  # a second copy that came late
    assert directory.servers.records["s"].inventories.sequence == 1
    assert announcement(directory, 1) is DUPLICATE
    assert registered(directory, "s", sequence=5) is None  # four announcements were lost
    assert announcement(directory, 5) is DUPLICATE
    assert piece(directory, 6, 0) is NEXT


@pytest.mark.parametrize("number", [3, 2**32, 2**62, 2**63 - 1])
def test_a_number_that_is_made_up_is_a_gap(number: int) -> None:
    """Otherwise every later message would count as a repeated one, and be ignored."""
    directory = directory_of("s")
    assert announcement(directory, 1) is NEXT
    assert piece(directory, number, 0) is GAP
    assert announcement(directory, number) is GAP
    assert announcement(directory, 2) is NEXT


def test_a_run_ends_where_the_place_changes() -> None:
    directory = directory_of("a", "b")
    chain = keys("c", 6)
    directory.stored("a", ONE, 0, 0, chain[:3])
    directory.stored("b", ONE, 0, 0, chain[2:5])
    match = directory.match(ONE, chain)
    assert [(run.first, run.last) for run in match.runs] == [(0, 1), (2, 2), (3, 4)]
    assert [len(run.replicas) for run in match.runs] == [1, 2, 1]
    assert (match.length, match.stopped) == (5, ReadStatus.NEVER_WRITTEN)


def test_each_miss_is_explained() -> None:
    directory = directory_of("s")
    directory.stored("s", ONE, 0, 0, keys("k", 3))
    directory.removed("s", ONE, 0, [keys("k", 3)[0]], ReadStatus.EVICTED)
    texts = {
        answer.status: answer.text
        for answer in explain(directory, ONE, [*keys("k", 2), key("never")])
    }
    assert texts[ReadStatus.HIT] == "present on s (dram)"
    assert "evicted" in texts[ReadStatus.EVICTED]
    assert "never written" in texts[ReadStatus.NEVER_WRITTEN]


def test_a_piece_of_an_inventory_that_comes_again_changes_nothing() -> None:
    directory = directory_of("s")
    registered(directory, "s", sequence=4)
    assert piece(directory, 5, 0) is NEXT
    directory.stored("s", ONE, 0, 0, keys("first", 2))
    assert piece(directory, 5, 1) is NEXT
    directory.stored("s", ONE, 0, 0, keys("second", 2))
    assert piece(directory, 5, 0) is DUPLICATE  # doubled on the way, and late
    assert piece(directory, 5, 3) is NEXT  # it overtook piece 2
    assert piece(directory, 5, 3) is DUPLICATE
    assert piece(directory, 5, 4, last=True) is GAP  # piece 2 is missing
    assert announcement(directory, 6) is GAP
    assert piece(directory, 5, 2) is NEXT
    assert piece(directory, 5, 68) is GAP  # so far ahead is no server
    assert piece(directory, 5, 4, last=True) is NEXT
    directory.servers.end_inventory("s")
    assert piece(directory, 5, 4, last=True) is DUPLICATE
    assert piece(directory, 5, 5) is GAP
    assert prefix(directory, keys("first", 2)) == 2
    assert announcement(directory, 6) is NEXT
    assert piece(directory, 5, 0) is DUPLICATE
    assert announcement(directory, 7) is NEXT
    assert prefix(directory, keys("second", 2)) == 2
    check_invariants(directory)


def test_who_has_said_that_it_ends_has_left_and_is_not_lost() -> None:
    directory = directory_of("s")
    directory.servers.changes = log = ChangeRing()
    directory.servers.heartbeat("s", 1, ServerStats(), 0.0)

    def told() -> tuple[bool, bool, ChangeKind]:
        (member,) = directory.servers.members(0.0)
        return member.alive, member.left, server_page(directory.servers)[0][-1].kind

    assert not directory.servers.leave("s", 2), "another process of it"
    assert told() == (True, False, ChangeKind.BACK)
    assert directory.servers.leave("s", 1)
    at = log.last
    directory.servers.tick(5.0)
    assert told() == (False, True, ChangeKind.LEFT)
    assert log.last == at, "its silence is no news"
    directory.servers.heartbeat("s", 1, ServerStats(), 6.0)  # the message was late, or it stays
    assert told() == (True, False, ChangeKind.BACK)
    for now in (6.0, 7.0, 8.0, 9.0):
        directory.servers.tick(now)
    assert told() == (False, False, ChangeKind.LOST)
    directory.servers.leave("s", 1)
    assert told() == (False, True, ChangeKind.LEFT)
    directory.servers.register("s", Registration(2, "h", (), ("dram",), 1 << 20), 10.0)
    assert told() == (True, False, ChangeKind.BACK)


def test_a_master_that_slept_gives_no_credit_from_the_future() -> None:
    directory = directory_of("s")
    directory.servers.tick(0.0)
    directory.servers.heartbeat("s", 1, ServerStats(), 20.0)  # the first thing after it woke up
    for halves in range(7):
        directory.servers.tick(20.0 + halves / 2)
    (member,) = directory.servers.members(20.0 + directory.servers.timeout_s)
    assert not member.alive


def test_an_inventory_says_why_blocks_are_gone() -> None:
    """A master that lost touch, or is new, tells the true reason and not "server lost"."""
    directory = directory_of("s", "t")
    directory.stored("s", ONE, 0, 0, keys("x", 2))
    directory.stored("t", ONE, 0, 0, keys("x", 1))
    for server in ("t", "s"):  # both were out of touch when they threw it out
        registered(directory, server, sequence=4)
        assert directory.servers.check_piece(server, 1, 5, 0) is NEXT
        directory.removed(server, ONE, 0, keys("x", 1), ReadStatus.EVICTED)
        directory.servers.end_inventory(server)
    assert directory.match(ONE, keys("x", 1)).stopped is ReadStatus.EVICTED
    assert directory.match(ONE, keys("x", 2)[1:]).stopped is ReadStatus.NEVER_WRITTEN  # no reason
    sweep_all(directory)
    assert directory.match(ONE, keys("x", 1)).stopped is ReadStatus.EVICTED
    new = directory_of("s")
    registered(new, "s", sequence=5)
    assert new.servers.check_piece("s", 1, 6, 0) is NEXT
    new.removed("s", ONE, 0, keys("x", 1), ReadStatus.REMOVED)
    new.servers.end_inventory("s")
    assert new.match(ONE, keys("x", 1)).stopped is ReadStatus.REMOVED
    check_invariants(new)


def listed_again(directory: Directory, server: str, digests: Sequence[bytes], part: int) -> None:
    """The whole inventory of a server: one namespace, one part."""
    sequence = directory.servers.records[server].inventories.sequence + 1
    assert directory.servers.check_piece(server, 1, sequence, 0, last=True) is NEXT
    directory.stored(server, TWO, part, 0, digests)
    directory.servers.end_inventory(server)


def test_what_a_living_server_lists_no_more_is_not_lost() -> None:
    """A wrong map is mended by an inventory that gives no reason for what was made up."""
    directory, (stays, goes) = directory_of("s", "t"), keys("x", 2)
    for part, server in enumerate("st"):
        directory.stored(server, TWO, part, 0, [stays])
    directory.stored("s", TWO, 0, 0, [goes])

    def explained() -> list[tuple[ReadStatus, str]]:
        check_invariants(directory)
        return [(one.status, one.text) for one in explain(directory, TWO, [stays, goes])]

    listed_again(directory, "s", [], part=0)
    for _ in range(2):
        missing, unknown = explained()
        assert missing[0] is ReadStatus.PART_MISSING
        assert "parts [1] of 2" in missing[1]  # `s` lives, and part 0 is nowhere
        assert unknown[0] is ReadStatus.NEVER_WRITTEN
        assert "no record" in unknown[1]  # before the sweep and after it: it may have been written
        sweep_all(directory)
    listed_again(directory, "s", [goes], part=0)
    assert explained()[1][0] is ReadStatus.PART_MISSING
    directory.servers.leave("s", 1)
    assert explained()[1][0] is ReadStatus.SERVER_LOST
    assert registered(directory, "s", 2, now=2.0) is None  # without what it had
    assert explained()[1][0] is ReadStatus.SERVER_LOST
    sweep_all(directory)
    assert explained()[1][0] is ReadStatus.SERVER_LOST


def test_a_block_that_came_back_was_not_evicted_when_its_server_is_lost() -> None:
    directory, chain = directory_of("s"), keys("x", 2)
    directory.stored("s", ONE, 0, 0, chain)
    directory.removed("s", ONE, 0, chain, ReadStatus.EVICTED)
    assert directory.match(ONE, chain).stopped is ReadStatus.EVICTED
    directory.stored("s", ONE, 0, 0, chain[:1])
    directory.servers.leave("s", 1)
    found = [one.status for one in explain(directory, ONE, chain)]
    assert found == [ReadStatus.SERVER_LOST, ReadStatus.EVICTED]


def test_a_lost_copy_is_named_and_no_replaced_one() -> None:
    directory, chain = directory_of("s", "t"), keys("x", 1)
    for server in ("s", "t"):
        directory.stored(server, TWO, 0, 0, chain)
    listed_again(directory, "s", [], part=0)
    directory.servers.leave("t", 1)
    (answer,) = explain(directory, TWO, chain)
    assert answer.status is ReadStatus.SERVER_LOST
    assert answer.text == "held by t, which is lost or was restarted"


def test_an_inventory_equal_to_what_is_known_leaves_nothing_to_sweep() -> None:
    """A master that lost touch with all its servers would otherwise walk its whole map for each."""
    directory = directory_of("s", "t")
    sweeper = Sweeper(directory)
    chain = keys("c", 50)
    for server in ("s", "t"):
        directory.stored(server, ONE, 0, 0, chain)
        assert directory.servers.check_piece(server, 1, 1, 0) is NEXT
        directory.stored(server, ONE, 0, 0, chain)
        assert directory.servers.end_inventory(server) == 0
        assert not sweeper.step()
    assert piece(directory, 2, 0) is NEXT
    directory.stored("s", ONE, 0, 0, chain[1:])
    assert directory.servers.end_inventory("s") == 1
    assert len(directory.match(ONE, chain).runs) == 2
    while sweeper.step(1):
        check_invariants(directory)
    check_invariants(directory)


def test_useless_sets_of_locations_are_forgotten() -> None:
    """Resyncs that lose nothing are not swept, but each leaves sets that nobody uses."""
    directory = directory_of("s")
    for sequence in range(1, 3000):
        assert piece(directory, sequence, 0) is NEXT
        directory.stored("s", ONE, 0, 0, keys("c", 2))
        assert directory.servers.end_inventory("s") == 0
        sweep_all(directory)
    assert len(directory.locations.by_id) < 1100
    assert prefix(directory, keys("c", 2)) == 2


def test_servers_that_come_and_go_leave_nothing_behind() -> None:
    """Each of them has a block for a while that a server that stays has, too."""
    directory, chain = directory_of("stays"), keys("c", 1000)
    directory.stored("stays", ONE, 0, 0, chain)
    for number in range(1000):
        assert at(directory, "elsewhere", f"s{number}") is None
        directory.stored(f"s{number}", ONE, 0, 0, chain[number : number + 1])
        directory.servers.leave(f"s{number}", 1)
        sweep_all(directory)
    kept = directory.locations.by_id.values()
    assert len(kept) + sum(len(one.after_add) + len(one.after_remove) for one in kept) < 600
    assert prefix(directory, chain) == 1000
    check_invariants(directory)


def test_attempts_at_an_inventory_leave_a_bounded_number_behind() -> None:
    directory = directory_of("s")
    sweeper = Sweeper(directory)
    directory.stored("s", ONE, 0, 0, keys("c", 100))
    for attempt in range(20):
        assert piece(directory, attempt + 1, 0) is NEXT
        directory.stored("s", ONE, 0, 0, keys("c", 20 - attempt))
        check_invariants(directory)
    assert len(directory.servers.records["s"].inventories.earlier) <= 4
    assert prefix(directory, keys("c", 100)[20:]) == 80, "the largest of them stay readable"
    directory.servers.end_inventory("s")
    while sweeper.step():
        check_invariants(directory)
    assert (len(directory), prefix(directory, keys("c", 1))) == (1, 1)


@pytest.mark.parametrize("wrong", [None, True, False, 0, "text", bytearray(16)])
def test_only_bytes_are_digests(wrong: object) -> None:
    directory = directory_of("s")
    with pytest.raises(TypeError):
        directory.stored("s", ONE, 0, 0, [key("x"), wrong])  # type: ignore[list-item]
    assert len(directory) == 0
    check_invariants(directory)


def test_no_step_of_a_large_map_is_long() -> None:
    """Counted, not timed: a sweep visits its limit and at most one piece, and pieces are small."""
    directory = directory_of("s", "t")
    sweeper = Sweeper(directory)
    chain = keys("c", 30_000)
    for first in range(0, len(chain), 1000):
        directory.stored("st"[first // 1000 % 2], ONE, 0, 0, chain[first : first + 1000])
    (blocks,) = directory.blocks.values()
    largest = max(map(len, blocks.pieces()))
    assert largest < 3 * PIECE_KEYS
    assert not any(map(gc.is_tracked, blocks.pieces())), "the collector would visit every block"
    directory.servers.leave("t", 1)
    assert not directory.servers.register("t", Registration(2, HOST, (), ("dram",), 1000), 0.0)
    left = [len(directory)]
    while sweeper.step(limit=100):
        left.append(len(directory))
    assert max(before - after for before, after in itertools.pairwise(left)) <= 100 + largest
    assert len(directory) == 15_000
    check_invariants(directory)


def test_what_is_empty_is_a_step_of_a_sweep_too() -> None:
    """A map that has become small has as many pieces as before."""
    directory, chain = directory_of("s", "t"), keys("c", 30_000)
    sweeper = Sweeper(directory)
    directory.stored("s", ONE, 0, 0, chain)
    directory.removed("s", ONE, 0, chain[1:], ReadStatus.EVICTED)
    directory.stored("t", ONE, 0, 0, chain[:1])
    directory.servers.leave("t", 1)
    assert registered(directory, "t", 2) is None
    (blocks,) = directory.blocks.values()
    pieces = len(list(blocks.pieces()))
    assert pieces > 5
    steps = 0
    while sweeper.step(limit=1):
        steps += 1
    assert steps >= pieces


def at(directory: Directory, caller: str, server: str, now: float = 0.0) -> Refusal | None:
    own = Registration(1, HOST, (), ("dram",), 1 << 40, caller=caller)
    return directory.servers.register(server, own, now)


def test_the_servers_of_one_address_are_limited_and_lost_ones_make_room() -> None:
    directory = Directory(ServerTable(servers_max=5, per_host_max=3))
    for number in range(3):
        assert at(directory, "10.0.0.1", f"s{number}", now=number) is None
    refusal = at(directory, "10.0.0.1", "s3")
    assert refusal is not None
    assert refusal.full
    assert "3 servers are registered from 10.0.0.1" in refusal.problem
    assert "3 servers are registered from" in refusal.problem
    assert at(directory, "10.0.0.1", "s1") is None  # it is registered already
    assert at(directory, "10.0.0.2", "t0") is None
    directory.servers.leave("s2", 1)
    directory.servers.leave("s0", 1)
    assert at(directory, "10.0.0.1", "s3") is None  # in the place of s0, which was lost for longer
    assert {member.server for member in directory.servers.members(3.0)} == {"s1", "s2", "s3", "t0"}
    assert at(directory, "10.0.0.3", "u0") is None  # five in all
    assert at(directory, "10.0.0.4", "v0") is None  # in the place of s2
    refusal = at(directory, "10.0.0.5", "w0")
    assert refusal is not None
    assert "5 servers are registered, the limit" in refusal.problem
    check_invariants(directory)


def listed(directory: Directory, server: str, digests: list[bytes]) -> int:
    """Announce blocks as the master does; returns how many were listed."""
    within = directory.within_limits(server, ONE, 0, digests)
    directory.stored(server, ONE, 0, 0, within)
    return len(within)


def test_a_server_lists_as_many_blocks_as_it_can_hold() -> None:
    directory, chain = Directory(), keys("c", 9)
    assert (
        directory.servers.register("s", Registration(1, HOST, (), ("dram",), 1, blocks_max=5), 0.0)
        is None
    )
    assert listed(directory, "s", chain[:4]) == 4
    assert listed(directory, "s", chain[:4] + chain[5:8]) == 5  # the same ones, and one more
    assert listed(directory, "s", chain[8:]) == 0
    assert "'s' has 5 blocks" in directory.limit_reached("s")
    directory.removed("s", ONE, 0, chain[:2], ReadStatus.EVICTED)
    assert listed(directory, "s", chain[:1]) == 1
    assert (
        directory.servers.register("t", Registration(1, HOST, (), ("dram",), 3 * 4096 + 1), 0.0)
        is None
    )
    assert listed(directory, "t", chain) == 3
    check_invariants(directory)


def test_a_map_without_arguments_has_the_limits_of_a_master_without_settings() -> None:
    directory, config = Directory(), MasterConfig()
    assert directory.blocks_max == config.blocks_max
    assert directory.servers.timeout_s == config.timeout_s
    assert directory.tombstones.limit == Store(1 << 20).index.change_log.tombstones.limit == 65_536


@pytest.mark.parametrize(("timeout_s", "forget_s"), [(3.0, 600.0), (3600.0, 3600.0)])
async def test_no_server_is_forgotten_before_it_is_lost(timeout_s: float, forget_s: float) -> None:
    master = Master(MasterConfig(timeout_s=timeout_s), TcpNetwork())
    assert master.directory.servers.forget_s == forget_s


def test_who_speaks_for_many_servers_fills_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines, refusals = [1.0], list[str](), Counter[str]()
    monkeypatch.setattr(
        server_requests.log, "warning", lambda *_, caller, **more: lines.append(caller)
    )
    directory, names = Directory(), [f"s{number}" for number in range(400)]
    for name in names:
        assert registered(directory, name, token=b"its token") is None
    clock = lambda: now[0]  # noqa: E731
    requests = ServerRequests(directory, NoHints(clock), refusals, clock)
    heartbeat = requests.from_owner(lambda message: message)

    def speak(caller: str, servers: Sequence[str]) -> None:
        for server in servers:
            with pytest.raises(Unauthenticated):
                heartbeat(wire.Leave(server, 1, OTHER), Caller(caller))

    speak("loud", names * 3)
    loud = len(lines)
    assert 100 < loud < 200
    speak("other", names[:1] * 3)
    assert lines[loud:] == ["other"]
    now[0] += 3600.0
    speak("loud", names[:1] * 3)
    assert lines[loud + 1 :] == ["loud"]
    assert refusals.total() == 1206, "and each is counted"


def test_a_full_map_and_the_share_of_one_address() -> None:
    directory, digests = Directory(blocks_max=10), keys("c", 30)
    for caller, server in (("a", "a0"), ("a", "a1"), ("b", "b0"), ("c", "c0")):
        assert at(directory, caller, server) is None
    assert listed(directory, "a0", digests[:4]) == 4
    assert listed(directory, "b0", digests[4:6]) == 2
    assert listed(directory, "a1", digests[6:9]) == 1
    assert "the servers at a have 5 blocks" in directory.limit_reached("a1")
    assert listed(directory, "b0", digests[9:12]) == 3
    assert listed(directory, "c0", digests[12:]) == 0
    assert directory.limit_reached("c0") == "this map has 10 blocks, the limit (master.blocks_max)"
    directory.servers.leave("a0", 1)
    listed(directory, "c0", digests[12:])  # this forgets the server that has left
    sweep_all(directory)
    assert listed(directory, "c0", digests[12:]) == 4
    check_invariants(directory)


def test_an_inventory_at_the_limit_lists_again_what_was_listed() -> None:
    directory, chain = Directory(blocks_max=6), keys("c", 6)
    assert at(directory, "a", "s") is None
    assert at(directory, "b", "t") is None
    assert listed(directory, "s", chain[:3]) == 3
    assert listed(directory, "t", chain[3:]) == 3
    assert piece(directory, 1, 0) is NEXT
    assert listed(directory, "s", chain[:3]) == 3
    directory.servers.end_inventory("s")
    assert prefix(directory, chain) == 6
    check_invariants(directory)


def test_a_server_that_will_leave_is_read_and_not_chosen() -> None:
    directory, chain = directory_of("a", "b"), keys("c", 2)
    directory.stored("a", ONE, 0, 0, chain)

    def places() -> set[str]:
        first = directory.place(ONE, keys("new", 1), b"", 100, "").servers
        after = directory.place(ONE, keys("new", 1), chain[-1], 100, "").servers
        assert set(first) == set(after)
        return set(first)

    assert places() == {"a", "b"}
    for steps in range(2):
        directory.servers.heartbeat("a", 1, ServerStats(draining=True), 1.0 + steps)
        assert places() == {"b"}
    assert prefix(directory, chain) == 2
    directory.servers.leave("a", 1)
    directory.servers.heartbeat("a", 1, ServerStats(draining=True), 3.0)
    assert places() == {"b"}
    directory.servers.heartbeat("a", 1, ServerStats(), 4.0)
    assert places() == {"a", "b"}
    directory.servers.heartbeat("a", 1, ServerStats(draining=True), 5.0)
    directory.servers.leave("a", 1)
    directory.servers.heartbeat("a", 1, ServerStats(), 6.0)
    assert places() == {"a", "b"}
    assert len(directory.servers.placer) == 2
    check_invariants(directory)
