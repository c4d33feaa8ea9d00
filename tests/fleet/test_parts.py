"""What a fleet is made of: links, an engine's own cache, prompts, routers, constants."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.hbm_cache import HbmCache
from benchmarks.fleet.links import QueuedLink, SharedLink
from benchmarks.fleet.memory import FleetMemory
from benchmarks.fleet.mixed import MixedDecoder
from benchmarks.fleet.options import Hints, Incident
from benchmarks.fleet.prompts import Prompt
from benchmarks.fleet.routers import ROUTERS, RouterFacts
from benchmarks.fleet.sessions import LOADS, PromptBlocks
from kvpool.errors import ConfigError
from kvpool.server.eviction.lru import LRU
from kvpool.tools.dry_pool import DryPool
from kvpool.tools.workloads import Turn
from tests.conftest import NAMESPACE, key


def test_events_run_in_their_order_and_never_in_the_past() -> None:
    events, seen = EventQueue(), []
    events.at(2.0, seen.append, "late")
    events.at(1.0, seen.append, "one")
    events.at(1.0, seen.append, "two")
    events.at(1.5, lambda: events.at(0.5, seen.append, "passed"))
    events.run()
    assert seen == ["one", "two", "passed", "late"]
    assert events.now == 2.0


def test_a_queued_link_moves_one_after_another() -> None:
    link = QueuedLink(100.0)
    assert link.take(100, 0.0) == 1.0
    assert link.take(100, 0.5) == 2.0
    assert link.wait_s(0.5) == 1.5
    assert link.take(100, 5.0) == 6.0  # it was free in between
    assert link.moved == 300


def test_a_shared_link_gives_each_an_equal_share() -> None:
    events = EventQueue()
    link, ends = SharedLink(events, 100.0), {}

    def start(name: str, size: float) -> None:
        link.start(size, lambda: ends.__setitem__(name, events.now))

    events.at(0.0, start, "long", 200)
    events.at(1.0, start, "short", 50)  # until 2.0 with half of the link
    events.run()
    assert ends == {"short": pytest.approx(2.0), "long": pytest.approx(2.5)}
    assert link.moved == pytest.approx(250)


def test_what_is_broken_off_frees_the_shared_link() -> None:
    events = EventQueue()
    link, ends = SharedLink(events, 100.0), []
    given_up = link.start(1000, lambda: ends.append("never"))
    link.start(100, lambda: ends.append(events.now))
    passed: list[float] = []
    events.at(1.0, lambda: passed.append(link.stop(given_up)))
    events.run()
    assert ends == [pytest.approx(1.5)]
    assert passed == [pytest.approx(50)]
    assert link.stop(given_up) == pytest.approx(50)  # again: nothing changes
    assert link.moved == pytest.approx(150)


def test_an_engines_cache_drops_the_tail_of_what_was_used_least() -> None:
    cache = HbmCache(6)
    old, new = [key(f"old{n}") for n in range(4)], [key(f"new{n}") for n in range(4)]
    cache.add(old)
    assert cache.held(old) == 4
    cache.add(new)
    assert (cache.held(old), cache.held(new)) == (2, 4)
    cache.add(old[:2])  # used again: now the other one's tail goes first
    cache.add([*old[:2], key("more")])
    assert (cache.held(old), cache.held(new)) == (2, 3)
    cache.add([key(f"long{n}") for n in range(10)])
    assert len(cache) == 6


def test_a_prompts_blocks_are_whole_and_begin_with_what_it_shares() -> None:
    blocks = PromptBlocks(shared_tokens=20, block=8)
    first = blocks.prompt(None, Turn(30, 20, 5, 1.0))
    other = blocks.prompt(None, Turn(17, 20, 5, 1.0))
    assert len(first) == 3
    assert other == first[:2]
    again = blocks.prompt(first, Turn(48, 35, 5, 1.0))  # the answer was 5 tokens
    assert len(again) == 6
    assert again[:3] == first
    assert not set(again[3:]) & set(first)
    rewritten = blocks.prompt(again, Turn(48, 17, 5, 1.0))
    assert rewritten[:2] == again[:2]
    assert not set(rewritten[2:]) & set(again)


def test_the_scaling_load_is_what_was_published() -> None:
    (plan,) = LOADS["scaling"].sessions(1, 1)
    session = plan.turns
    assert len(session) == 30
    assert [turn.length for turn in session[:2]] == [30_000, 32_948]
    assert [turn.prefix for turn in session[:2]] == [20_000, 30_900]
    assert {turn.output for turn in session} == {900}


def test_later_tokens_are_dearer_and_cached_ones_free() -> None:
    constants = Constants()
    cold, warm = constants.prefill_s(0, 50_000), constants.prefill_s(45_000, 50_000)
    early = constants.prefill_s(0, 5_000)
    assert early < warm < cold / 5
    # 50K tokens: 3.3e15 FLOP linear and 3.1e15 of attention, and the start
    assert cold == pytest.approx(0.06 + (66.2e9 * 5e4 + 2.5e6 * 5e4 * 2.5e4) / 3.86e15)


def test_constants_change_by_name() -> None:
    assert Constants().changed({"kv_bytes": 1.0}).kv_bytes == 1.0
    with pytest.raises(ConfigError, match=r"kv_byte'.*kv_bytes"):
        Constants().changed({"kv_byte": 1.0})
    with pytest.raises(ConfigError, match="kv_bytes: -1"):
        Constants().changed({"kv_bytes": -1.0})
    assert {row[3] for row in Constants().rows()} >= {"published", "calibrated", "assumed"}
    assert all(row[2] and row[4] for row in Constants().rows())


def test_an_engine_tells_what_it_holds_and_no_more() -> None:
    """KV events: a subscriber that adds and removes has the engine's cache."""
    cache, held = HbmCache(4), set[bytes]()

    def changed(added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        assert not held & set(added)
        held.update(added)
        held.difference_update(removed)

    cache.changed = changed
    for name, blocks in (("a", 3), ("b", 3), ("a", 2), ("long", 9)):
        cache.add([key(f"{name}{n}") for n in range(blocks)])
        assert len(held) == len(cache)
        assert cache.held([key(f"{name}{n}") for n in range(blocks)]) == min(blocks, 4)
    assert all(key(f"long{n}") in held for n in range(4))


@pytest.mark.parametrize(
    "text", ["", "server:3", "x:server:3", "1:server", "1:rack:3", "1:server:-1", "nan:server:1"]
)
def test_an_incident_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SECONDS:KIND:NUMBER.*e\.g\. 1500:server:3"):
        Incident.parsed(text)


def test_incidents_and_hints_have_names() -> None:
    assert Incident.parsed("1500:server:3") == Incident(1500.0, "server", 3)
    assert Incident.parsed("0.5:masters:30") == Incident(0.5, "masters", 30)
    assert Hints.parsed("") is Hints.NONE
    assert Hints.parsed("end, resume") == Hints.END | Hints.RESUME
    assert Hints.parsed("all") == Hints.ALL
    with pytest.raises(ConfigError, match="hint 'ends': expected some of end, arrival, resume"):
        Hints.parsed("end,ends")


def test_children_begin_with_what_their_parent_has_read() -> None:
    (plan,) = LOADS["fan-out"].sessions(1, 1)
    (first, *later) = plan.turns
    assert len(plan.children) == 16
    assert {child.turns[0].prefix for child in plan.children} == {first.length}
    assert later[0].prefix == first.length
    assert all(child.turns[0].length > first.length for child in plan.children)
    blocks = PromptBlocks(20_000, 512)
    parent = blocks.prompt(None, first)
    children = [blocks.prompt(parent, child.turns[0]) for child in plan.children]
    assert all(child[: len(parent)] == parent for child in children)
    assert len({child[-1] for child in children}) == 16


def test_what_is_left_on_a_shared_link_tells_how_long_a_load_takes() -> None:
    events = EventQueue()
    link = SharedLink(events, 100.0)
    link.start(100, lambda: None)
    link.start(50, lambda: None)
    left: list[float] = []
    events.at(1.0, lambda: left.append(link.left))
    events.run()
    assert left == [pytest.approx(50)]
    assert link.left == 0


@pytest.mark.parametrize("router", ["least-loaded", "sticky", "spill", "fewest"])
def test_idle_engines_take_new_sessions_in_turn(router: str) -> None:
    """Else the first of them would have most sessions, and each too little memory of its own."""
    events, constants = EventQueue(), Constants()
    choose = ROUTERS[router](RouterFacts(events, constants, None, 512, 0.5))
    engines: Any = [SimpleNamespace(number=number, work_s=0.0) for number in range(4)]
    engines[2].work_s = 1.0

    def sent(session: int) -> int:
        return choose(Prompt(str(session), session, 0, [key("a")], 600, 1, 0.0), engines).number

    turns = [0, 1, 3, 2, 0, 1] if router == "fewest" else [0, 1, 3, 0, 1, 3]
    assert [sent(session) for session in range(6)] == turns
    assert sent(2) == (0 if router == "least-loaded" else 3)


def test_a_load_from_a_server_that_is_lost_ends_at_once_and_is_not_whole() -> None:
    events, constants = EventQueue(), Constants().changed({"pool_load_bytes_s": 100.0})
    pools = [DryPool(1, 16, lambda size: LRU())]
    memory = FleetMemory(pools, 1, events, constants, 100.0, shared=True)
    chain = [key(f"chain{n}") for n in range(4)]
    memory.save(0, NAMESPACE, chain, None, 0.0)
    ends: list[tuple[float, float]] = []
    memory.start_load(
        0, NAMESPACE, chain, lambda load: ends.append((events.now, memory.stop_load(load)))
    )
    events.at(1.0, memory.lose_server, 0)
    events.at(2.0, memory.lose_server, 0)  # again: nothing happens
    events.run()
    assert ends == [(1.0, pytest.approx(100))]  # of 400 bytes
    assert memory.match(0, NAMESPACE, chain, 3.0).length == 0


def test_prompts_grow_as_their_loads_say() -> None:
    turns = [plan.turns for plan in LOADS["front-loaded"].sessions(200, 1)]
    added = [
        np.mean([t[n + 1].length - t[n].length for t in turns if len(t) > n + 1]) for n in (0, 12)
    ]
    assert added[0] == pytest.approx(6_200, rel=0.1)
    assert added[1] == pytest.approx(1_700, rel=0.2)  # some answers are longer
    for load in ("front-loaded", "pipeline", "reasoning"):
        for plan in LOADS[load].sessions(50, 2):
            for before, turn in itertools.pairwise(plan.turns):
                assert 0 <= turn.prefix <= min(turn.length, before.length + before.output), load
    (plan,) = LOADS["pipeline"].sessions(1, 1)
    assert len({turn.prefix for turn in plan.turns[1:]}) == 1  # the document


def test_a_step_with_a_chunk_of_a_prompt_takes_longer() -> None:
    constants = Constants().changed({"token_s": 1.0, "token_each_s": 0.0, "chunk_tokens": 100})
    events, done = EventQueue(), []
    decoder = MixedDecoder(events, constants, lambda prompt: done.append((prompt.id, events.now)))
    events.at(0.0, decoder.add, Prompt("long", 0, 0, [], 10, 11, 0.0))
    took: list[float] = []
    events.at(4.0, lambda: took.append(decoder.compute(250, 6.0)))  # 3 chunks of 2 s, and 1 s each
    events.at(13.0, decoder.computed)
    events.at(13.0, decoder.add, Prompt("short", 1, 0, [], 10, 2, 0.0))
    events.run()
    assert took == [9.0]
    assert done == [("short", pytest.approx(14.0)), ("long", pytest.approx(16.0))]
    assert decoder.requests == 0
