"""Which chains belong to which server, and which of them a full server hands over first."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool.server.moves.state.share_plan import SHARED_FROM, ChainOwners, SharePlan
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.server.state.store import Store
from tests.conftest import key, keys
from tests.support.stores import ONE, PAGE, write

KEYS = [key(number) for number in range(4000)]


def owners(capacities: dict[str, int]) -> list[str]:
    shares = ChainOwners(capacities)
    return [shares.owner(digest, capacities) for digest in KEYS]


def test_a_chain_has_one_server_and_moves_only_to_one_that_joins() -> None:
    before, after = owners({"a": 5, "b": 5}), owners({"a": 5, "b": 5, "c": 5})
    changed = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert {other for _, other in changed} == {"c"}
    assert Counter(one for one, _ in changed)["a"] == pytest.approx(len(KEYS) / 6, rel=0.12)
    assert len(changed) == pytest.approx(len(KEYS) / 3, rel=0.08)


def test_a_share_is_as_large_as_the_memory_but_no_claim_takes_everything() -> None:
    counts = Counter(owners({"small": 10, "a": 30, "b": 30, "c": 30}))
    assert counts["small"] == pytest.approx(len(KEYS) / 10, rel=0.15)
    counts = Counter(owners({"liar": 1 << 60, "a": 10, "b": 10, "c": 10}))
    assert counts["liar"] == pytest.approx(len(KEYS) * 4 / 7, rel=0.06)


@pytest.mark.parametrize("count", [3, 16, 1000])
def test_a_few_servers_are_asked_about_as_if_all_were(count: int) -> None:
    capacities = {f"server-{number}": 5 for number in range(count)}
    shares = ChainOwners(capacities)
    few = ["server-0", "server-2"]
    for digest in KEYS[: 40_000 // count]:
        owner = shares.owner(digest, capacities)
        assert shares.owner(digest, few) == (owner if owner in few else "")


def test_without_servers_nothing_belongs_anywhere() -> None:
    assert ChainOwners({}).owner(key("a"), ()) == ""
    assert ChainOwners({"a": 0}).owner(key("a"), ("a",)) == "a"


# --- chains --------------------------------------------------------------------------------


def a_store() -> Blocks:
    return Blocks([Store(1000 * PAGE, alignment=PAGE)])


def planned(store: Blocks) -> list[list[Entry]]:
    plan = SharePlan(store, ChainOwners({"other": 1}), {"other"})
    for entry in store.front.index.inventory():
        if plan.is_end(entry):
            plan.add(entry, list(plan.climb(entry))[-1])
    return [list(plan.climb(end))[::-1] for target, end in plan.chains() if target == "other"]


def digests(chains: list[list[Entry]]) -> list[list[bytes]]:
    return [[entry.digest for entry in chain] for chain in chains]


def test_chains_come_whole_and_those_used_last_first() -> None:
    store = a_store()
    old, new = keys("old", 90), keys("new", 90)
    write(store, old, 1.0)
    write(store, new, 2.0)
    assert digests(planned(store)) == [new, old]


def test_what_many_chains_share_stays() -> None:
    store = a_store()
    prompt = keys("prompt", 5)
    write(store, prompt, 1.0)
    chains = [keys(f"chain {number}", 3) for number in range(SHARED_FROM)]
    for chain in chains[:-1]:
        write(store, chain, 2.0, parent=prompt[-1])
    assert {len(chain) for chain in planned(store)} == {8}
    write(store, chains[-1], 2.0, parent=prompt[-1])
    assert sorted(digests(planned(store))) == sorted(chains)


def test_branches_of_one_chain_belong_together() -> None:
    store = a_store()
    head = keys("head", 5)
    write(store, head, 1.0)
    tails = [keys(f"tail {number}", 3) for number in range(SHARED_FROM - 1)]
    for tail in tails:
        write(store, tail, 2.0, parent=head[-1])
    shares = ChainOwners({"a": 1, "b": 1, "c": 1})
    found = {shares.owner(chain[0].digest, {"a", "b", "c"}) for chain in planned(store)}
    assert len(planned(store)) == len(tails)
    assert len(found) == 1


def test_what_no_session_reads_again_stays() -> None:
    store = a_store()
    write(store, keys("over", 3), 1.0, session="over")
    write(store, keys("goes on", 3), 1.0, session="goes on")
    store.hint("over", None, 2.0)
    assert digests(planned(store)) == [keys("goes on", 3)]


def test_a_chain_that_goes_on_or_left_after_it_was_planned_is_skipped() -> None:
    store = a_store()
    write(store, keys("left", 3), 1.0)
    write(store, keys("grown", 3), 1.0)
    plan = SharePlan(store, ChainOwners({"other": 1}), {"other"})
    for entry in store.front.index.inventory():
        if plan.is_end(entry):
            plan.add(entry, entry)
    store.remove(ONE, keys("left", 3))
    write(store, [key("more")], 2.0, parent=keys("grown", 3)[-1])
    assert (len(plan), list(plan.chains())) == (2, [])
