"""Who is connected, and who must give up what it holds, without a server."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool.errors import KvpoolError, Overloaded
from kvpool.protocols import Peer, ReserveRequest
from kvpool.server.clients import SAMPLE_S, STALLED_S, ConnectedClients, HeldByClient
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.store import Store
from kvpool.types import Cluster
from tests.conftest import NAMESPACE, keys

SIZE = 4096


class LinkOfOne:
    """A connection's link, of which the test says what it does."""

    def __init__(self, idle_since: float | None = None) -> None:
        self.moved = 0
        self.idle = idle_since
        self.ended: list[KvpoolError | None] = []

    def progress(self) -> int:
        return self.moved

    def idle_since(self) -> float | None:
        return self.idle

    def hang_up(self, error: KvpoolError) -> None:
        self.ended.append(error)

    def retire(self) -> None:
        self.ended.append(None)


def client(blocks: Blocks, id: int, name: str, link: LinkOfOne, tenant: str = "") -> HeldByClient:
    proved = Cluster(secret=b"s" * 16, tenant=tenant) if tenant else None
    return HeldByClient(blocks, id, Peer(name, "tcp", link, proved=proved))


def reserve(blocks: Blocks, id: int, count: int) -> None:
    chain = keys(f"chain {id}", count)
    parents = [bytes(32), *chain[:-1]]
    request = ReserveRequest(NAMESPACE, 0, chain, parents, [SIZE] * count)
    assert all(one.extent for one in blocks.reserve(id, request, 0.0))


@pytest.fixture
def blocks() -> Blocks:
    return Blocks([Store(1 << 20)])


def test_only_who_holds_memory_and_moves_nothing_is_cut_off(blocks: Blocks) -> None:
    links = {name: LinkOfOne() for name in ("still", "moving", "empty")}
    counters: Counter[str] = Counter()
    clients = ConnectedClients(8, counters)
    for id, (name, link) in enumerate(links.items(), start=1):
        clients.admit(client(blocks, id, name, link), 0.0)
    reserve(blocks, 1, 2)
    reserve(blocks, 2, 1)
    now = 1.0
    while now < 1.0 + STALLED_S:
        clients.cut_stalled(now)
        assert not counters["cut_connections"]
        now += SAMPLE_S
        links["moving"].moved += 1
    clients.cut_stalled(now)
    assert [bool(link.ended) for link in links.values()] == [True, False, False]
    assert counters["cut_connections"] == 1
    usage = clients.usage(now)
    assert [(one.name, one.reserved_bytes) for one in usage] == [("still", 8192), ("moving", 4096)]


def test_what_a_closed_connection_leaves_in_quarantine_is_still_its_own(blocks: Blocks) -> None:
    clients = ConnectedClients(8, Counter())
    one = client(blocks, 1, "a", LinkOfOne())
    clients.admit(one, 0.0)
    one.quarantined_bytes = 3 * SIZE
    assert [used.quarantined_bytes for used in clients.usage(1.0)] == [3 * SIZE]
    clients.disconnected(one)
    clients.disconnected(one)
    assert (clients.usage(1.0), clients.shares.total) == ([], 0)


def test_of_the_client_that_has_most_the_longest_idle_connection_ends(blocks: Blocks) -> None:
    counters: Counter[str] = Counter()
    clients = ConnectedClients(4, counters)
    links = [LinkOfOne(idle) for idle in (1.0, 5.0, 3.0, None)]
    names = ("one", "many", "many", "busy")
    for id, (name, link) in enumerate(zip(names, links, strict=True)):
        clients.admit(client(blocks, id, name, link), 9.0)
    clients.admit(client(blocks, 9, "new", LinkOfOne()), 10.0)
    assert [link.ended for link in links] == [[], [], [None], []]
    with pytest.raises(Overloaded, match="this client has 2 of 4 connections"):
        clients.admit(client(blocks, 10, "many", LinkOfOne()), 10.0)
    assert counters == {"retired_connections": 1, "refused_connections": 1}


def test_where_all_are_at_work_nobody_ends_for_one_more(blocks: Blocks) -> None:
    clients = ConnectedClients(2, Counter())
    for id, tenant in enumerate(("", "acme")):
        clients.admit(client(blocks, id, "a", LinkOfOne(), tenant), 0.0)
    with pytest.raises(Overloaded, match="all 2 connections are at work"):
        clients.admit(client(blocks, 3, "b", LinkOfOne()), 0.0)
    assert [clients.shares.held(name) for name in ("a", "@acme/", "b")] == [1, 1, 0]
