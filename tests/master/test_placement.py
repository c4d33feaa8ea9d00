"""Where new blocks go: chains stay whole, and what a server claims decides little."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from kvpool.master.state.directory import Directory
from kvpool.master.state.explanations import explain
from kvpool.master.state.placement import DRAWN, SHARED_FROM
from kvpool.master.state.server_record import Claims, Registration
from kvpool.master.state.server_table import ServerTable
from kvpool.types import ROOT, Namespace, ReadStatus, ServerStats

ONE = Namespace("one")
HOST = "host-a"
CAPACITY = 10_000
FULL = ServerStats(used=CAPACITY)


def key(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def pool(*servers: str, **elsewhere: str) -> Directory:
    """Servers on HOST, and others as `name="host"`. All are empty."""
    made = Directory(ServerTable(per_host_max=4096))
    for server in servers:
        made.servers.register(server, Registration(1, HOST, (), ("dram",), CAPACITY), 0.0)
    for server, host in elsewhere.items():
        made.servers.register(server, Registration(1, host, (), ("dram",), CAPACITY), 0.0)
    return made


def beat(directory: Directory, now: float, **stats: ServerStats) -> None:
    for server, figures in stats.items():
        assert directory.servers.heartbeat(server, 1, figures, now)


def place(
    directory: Directory,
    name: str,
    parent: bytes = ROOT,
    *,
    size: int = 100,
    host: str = "nowhere",
    copies: int = 1,
    session: str = "",
    namespace: Namespace = ONE,
) -> tuple[str, ...]:
    return directory.place(namespace, [key(name)], parent, size, host, copies, session).servers


def test_the_writers_host_is_preferred_as_long_as_it_has_room() -> None:
    directory = pool("near", far="host-b")
    assert place(directory, "a", host=HOST)[0] == "near"
    assert place(directory, "b", host="host-b")[0] == "far"
    beat(directory, 1.0, near=FULL)
    assert [place(directory, f"c{n}", host=HOST)[0] for n in range(3)] == ["far"] * 3
    beat(directory, 2.0, far=FULL)
    sent = Counter(place(directory, f"d{n}", host=HOST)[0] for n in range(40))
    assert max(sent.values()) <= 23  # a full server is no better for being near


@pytest.mark.parametrize("host", [HOST, "host-b"])
def test_a_chain_stays_where_it_is(host: str) -> None:
    """Also on a full, busy server of another host, when others are empty."""
    directory = pool("a", b="host-b")
    directory.stored("b", ONE, 0, 0, [key("parent")])
    beat(directory, 1.0, b=FULL)
    for turn in range(20):
        parent = key(f"turn{turn - 1}") if turn else key("parent")
        assert place(directory, f"turn{turn}", parent, host=host, size=5000)[0] == "b"
        directory.stored("b", ONE, 0, 0, [key(f"turn{turn}")])


def test_a_chain_whose_server_is_lost_begins_anew_and_goes_on_there() -> None:
    directory = pool("a", "b", "c")
    directory.stored("a", ONE, 0, 0, [key("parent")])
    directory.servers.leave("a", 1)
    first = place(directory, "x", key("parent"))
    assert "a" not in first
    directory.stored(first[0], ONE, 0, 0, [key("x")])
    assert place(directory, "y", key("x"))[0] == first[0]
    beat(directory, 1.0, a=ServerStats())
    assert "a" in place(directory, "z")


def test_from_a_block_that_many_chains_share_they_go_to_all_servers() -> None:
    directory = pool("a", "b", "c", "d")
    directory.stored("a", ONE, 0, 0, [key("system prompt")])
    sent = [place(directory, f"chat {n}", key("system prompt"))[0] for n in range(40)]
    assert sent[: SHARED_FROM - 1] == ["a"] * (SHARED_FROM - 1)
    assert Counter(sent).keys() == set("abcd")
    assert max(Counter(sent).values()) <= 14


def test_the_parts_of_one_chain_and_its_other_writers_are_no_branches() -> None:
    """Eight ranks ask for the same blocks, and all of them go to the chain's server."""
    directory = pool("a", "b")
    directory.stored("a", ONE, 0, 0, [key("parent")])
    for n in range(3 * SHARED_FROM):  # and of two chains in turn
        assert place(directory, f"turn {n % 2}", key("parent"))[0] == "a"


def test_all_writers_of_a_new_chain_are_sent_to_one_server() -> None:
    """Together they have more bytes than fits there, and the masters have seen different things."""
    directory = pool("a", "b", "c")
    first = place(directory, "x", size=4000)[0]
    for n in range(20):
        place(directory, f"other {n}")
        assert place(directory, "x", size=4000)[0] == first
    one, other = pool("a", "b", "c"), pool("c", "a", "b")
    sent = [(place(one, f"w{n}")[0], place(other, f"w{n}")[0]) for n in range(30)]
    assert all(here == there for here, there in sent)
    assert len(set(sent)) == 3


def test_a_new_chain_goes_where_the_least_was_sent_lately() -> None:
    directory = pool("a", "b")
    directory.stored("a", ONE, 0, 0, [key("parent")])
    beat(directory, 1.0, a=FULL, b=FULL)
    place(directory, "turn", key("parent"), size=1000)
    sent = Counter(place(directory, f"w{n}")[0] for n in range(12))
    assert sent == {"b": 11, "a": 1}
    place(directory, "turn 2", key("parent"), size=100_000)
    for minute in range(1, 12):  # half of it is forgotten in each
        beat(directory, 1.0 + 60 * minute, a=FULL, b=FULL)
    assert Counter(place(directory, f"v{n}")[0] for n in range(12)).keys() == {"a", "b"}


def test_a_session_begins_anew_where_it_was() -> None:
    """There its server sees what the new chain has made useless of the one before."""
    directory = pool("a", "b", "c")
    beat(directory, 1.0, a=FULL, b=FULL, c=FULL)
    before: dict[str, str] = {}
    for chain in range(4):
        for session in "stu":
            chosen = place(directory, f"{session}{chain}", session=session)[0]
            assert chosen == before.setdefault(session, chosen)
    assert set(before.values()) == {"a", "b", "c"}
    directory.servers.leave(before["s"], 1)
    assert place(directory, "s4", session="s")[0] != before["s"]


def test_one_name_for_everything_fills_no_server() -> None:
    directory = pool("a", "b", "c", "d")
    beat(directory, 1.0, **dict.fromkeys("abcd", FULL))
    sent = Counter(place(directory, f"w{n}", session="default")[0] for n in range(200))
    assert set(sent) == {"a", "b", "c", "d"}
    assert max(sent.values()) <= 2 * min(sent.values()) + 2


def test_a_larger_server_gets_more() -> None:
    directory = pool("a")
    directory.servers.register("b", Registration(1, HOST, (), ("dram",), 3 * CAPACITY), 0.0)
    beat(directory, 1.0, a=FULL, b=ServerStats(used=3 * CAPACITY))
    sent = Counter(place(directory, f"w{n}")[0] for n in range(40))
    assert sent["b"] == pytest.approx(30, abs=1)


def test_a_server_that_comes_back_empty_does_not_get_everything() -> None:
    directory = pool("a", "b", "c", "d", "empty")
    sent: Counter[str] = Counter()
    for second in range(30):
        full = dict.fromkeys("abcd", FULL)
        beat(directory, float(second), **full, empty=ServerStats())
        sent.update(place(directory, f"w{second}/{n}")[0] for n in range(10))
    assert 300 / 5 < sent["empty"] < 300 / 5 * 3


@pytest.mark.parametrize("names", ["@globex/m @acme/m @initech/m", "globex/m acme/m initech/m"])
@pytest.mark.parametrize("used", [0, CAPACITY])
def test_what_a_tenant_claims_steers_others_little(used: int, names: str) -> None:
    """One message a server names more bytes than the server can have; in a pool without tenants a
    namespace is what a tenant is elsewhere."""
    mine, evil, newcomer = map(Namespace, names.split())
    directory = pool(*"abcdefgh")
    beat(directory, 1.0, **dict.fromkeys("abcdefgh", ServerStats(used=used)))
    sent = Counter(place(directory, f"w{n}", namespace=mine, size=10)[0] for n in range(400))
    assert set(sent.values()) == {50}
    named: set[str] = set()
    for n in range(100):
        if len(named) < 7:
            named.add(place(directory, f"e{n}", namespace=evil, size=2**48 - 1)[0])
    assert len(named) == 7, "to the tenant itself its claims count"
    sent = Counter(place(directory, f"v{n}", namespace=mine, size=10)[0] for n in range(400))
    assert max(sent.values()) < 400 * 0.4
    assert min(sent.values()) > 400 / 16
    sent = Counter(place(directory, f"u{n}", namespace=newcomer)[0] for n in range(80))
    assert set(sent.values()) == {10}


def test_claims_are_forgotten_by_tenant_and_together() -> None:
    claims = Claims()
    claims.add("acme", 1000)
    claims.add("globex", 24)
    for _ in range(3):
        claims.keep(0.5)
    assert claims.of("acme") == 125
    assert claims.believed("globex", 1e9) == 128
    assert claims.believed("globex", 7.0) == 10
    claims.add("globex", 1)
    assert claims.of("globex") == 4
    claims.keep(2.0**-40)
    assert claims.of("acme") == claims.believed("globex", 1e9) == 0.0
    claims.add("acme", 5)
    assert claims.of("acme") == claims.believed("globex", 1e9) == 5


def test_made_up_tenants_cost_bounded_memory() -> None:
    claims = Claims()
    for n in range(5000):
        claims.add(f"t{n}", 1)
    assert sum(claims.of(f"t{n}") for n in range(5000)) < 1100
    assert claims.believed("nobody", 1e9) == 5000
    claims.keep(0.0)
    claims.add("t4999", 1)
    assert claims.of("t4999") == 1


STRANGE = [math.nan, math.inf, -math.inf, -1.0, 1e300]


@pytest.mark.parametrize("age", STRANGE)
@pytest.mark.parametrize("used", [-(10**30), 0, 10**30])
@pytest.mark.parametrize("capacity", [-(2**60), 0, 1, 2**60])
def test_a_server_that_claims_strange_figures_is_one_among_others(
    age: float, used: int, capacity: int
) -> None:
    directory = pool("a", "b", "c", "d")
    directory.servers.register("liar", Registration(1, HOST, (), ("dram",), capacity), 0.0)
    sent: Counter[str] = Counter()
    for second in range(20):
        beat(directory, float(second), **dict.fromkeys("abcd", FULL))
        beat(directory, float(second), liar=ServerStats(used=used, victim_age_s=age))
        sent.update(place(directory, f"w{second}/{n}", host=HOST)[0] for n in range(20))
    assert sent["liar"] < 0.85 * 400
    assert all(sent[server] >= 10 for server in "abcd")


def test_copies_are_placed_on_different_hosts_first() -> None:
    """All servers of a host fail together."""
    directory = pool("a", "b", c="host-b")
    for copies in (2, 3):
        placed = place(directory, f"x{copies}", host=HOST, copies=copies)
        assert placed[0] in "ab"
        assert placed[1] == "c"
        assert sorted(placed) == ["a", "b", "c"]


def test_of_many_servers_a_few_are_compared_and_all_are_used() -> None:
    names = [f"s{n:04}" for n in range(1000)]
    directory = pool(*names, last="host-b")
    directory.stored("s0500", ONE, 0, 0, [key("parent")])
    used: Counter[str] = Counter()
    for n in range(8000):
        placed = place(directory, f"w{n}")
        assert len(placed) <= DRAWN
        used[placed[0]] += 1
    assert len(used) == 1001
    assert max(used.values()) <= 14  # 8 each, were it perfect
    assert place(directory, "y", host="host-b")[0] == "last"
    placed = place(directory, "x", key("parent"), host="host-b", copies=16)
    assert placed[0] == "s0500"
    assert 16 < len(placed) <= 34
    assert len(set(placed)) == len(placed)


def test_a_restarted_server_is_chosen_and_a_forgotten_one_is_not() -> None:
    directory = Directory(ServerTable(timeout_s=3.0, forget_s=600.0))
    directory.servers.register("a", Registration(1, HOST, (), ("dram",), CAPACITY), 0.0)
    directory.servers.register("a", Registration(2, "host-b", (), ("dram",), CAPACITY), 1.0)
    assert place(directory, "x") == ("a",)
    directory.servers.tick(1.0)
    directory.servers.heartbeat("a", 2, ServerStats(), 2.0)
    for second in range(3, 700):
        directory.servers.tick(float(second))
    assert directory.servers.members(700.0) == []
    assert place(directory, "y") == ()
    assert explain(directory, ONE, [key("y")])[0].status is ReadStatus.NEVER_WRITTEN


def test_no_tenant_makes_a_master_forget_where_others_are() -> None:
    """Its sessions and new chains, however many: nor do its keys decide for them."""
    mine, evil = Namespace("@globex/m"), Namespace("@acme/m")
    directory = pool("a", "b", "c")
    beat(directory, 1.0, **dict.fromkeys("abc", FULL))
    first = place(directory, "chat 1", session="@globex/s", namespace=mine)[0]
    begun = place(directory, "chain", namespace=mine, size=4000)[0]
    for n in range(40_000):
        place(directory, f"e{n}", session=f"@acme/{n}", namespace=evil)
    assert place(directory, "chain", namespace=mine, size=4000)[0] == begun
    assert place(directory, "chat 2", session="@globex/s", namespace=mine)[0] == first


def test_a_full_server_is_sent_that_another_one_has_room() -> None:
    directory = pool("a", "b", "c")
    full, room = ServerStats(used=9_400), ServerStats(used=8_100)

    def told(now: float, **stats: ServerStats) -> str:
        beat(directory, now, **stats)
        directory.servers.tick(now)
        return "".join(name for name in "abc" if directory.servers.others_have_room(name))

    directory.servers.tick(0.5)
    beat(directory, 0.6, a=full)
    assert not directory.servers.others_have_room("a"), "what has sent no heartbeat may be full"
    assert told(1.0, a=full, b=full, c=full) == ""
    assert told(1.5, a=full, b=ServerStats(used=9_300), c=ServerStats(used=8_200)) == ""
    assert told(2.0, a=full, b=full, c=room) == "ab"
    assert told(2.5, a=full, b=full, c=ServerStats(used=0, draining=True)) == ""
    assert told(3.0, a=full, b=full, c=room) == "ab"
    for now in (4.0, 5.0, 6.0, 7.0):
        assert told(now, a=full, b=full) == ("ab" if now < 6 else ""), "a lost server has no room"


def test_the_order_in_which_servers_got_a_block_decides_nothing() -> None:
    """Locations lie in sets of objects, whose order differs from process to process."""
    hosts = {f"s{number:02}": f"h{number // 2}" for number in range(60)}  # more than are drawn
    holders = random.Random(1).sample(sorted(hosts), 6)
    found = set()
    for _ in range(20):
        random.Random(len(found)).shuffle(holders)
        directory = pool(**hosts)
        for server in holders:
            directory.stored(server, ONE, 0, 0, [key("parent")])
        for copies in (1, 2, 3):
            found.add((copies, place(directory, "child", key("parent"), copies=copies)))
    assert len(found) == 3, "one order for each number of copies"
    assert {placed[0] for _, placed in found} <= set(holders)
