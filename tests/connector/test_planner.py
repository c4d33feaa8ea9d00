"""The connector's thinking, without an engine: what is looked up, loaded and saved, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from kvpool import Match, ReadStatus, Replica, Run, WriteStatus
from kvpool_connector.plan.cost_model import PrefillCost, Route, StepTimer, TransferCost
from kvpool_connector.plan.planner import Planner
from kvpool_connector.plan.tracked_request import TRANSITIONS, RequestState, TrackedRequest
from kvpool_connector.records.messages import LoadRequest, LoadResult, ProbeResult, SaveResult
from kvpool_connector.records.values import (
    CacheGroup,
    LookupRequest,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
    StepPlan,
)
from tests.conftest import key

BLOCK = 16


def hashes(name: str, tokens: int) -> list[bytes]:
    return [key(f"{name}/{number}") for number in range(tokens // BLOCK)]


def matched(length: int, stopped: ReadStatus = ReadStatus.NEVER_WRITTEN) -> Match:
    runs = (Run(0, length - 1, (Replica("a", "dram"),)),) if length else ()
    return Match(runs, length, stopped)


class Played:
    """A planner and an engine of one request at a time, at whose clock a test turns."""

    def __init__(
        self,
        *,
        groups: Sequence[CacheGroup] = (CacheGroup(BLOCK, 1),),
        ranks: int = 1,
        **limits: object,
    ) -> None:
        self.planner = Planner(groups, PlannerLimits(**limits), ranks=ranks)  # type: ignore[arg-type]
        self.planner.windows.block_bytes = (1 << 20,) * len(groups)
        self.now = 100.0
        self.reused: set[int] = set()

    def arrive(
        self,
        name: str,
        tokens: int,
        hints: RequestHints = RequestHints(),  # noqa: B008
        prompt: str = "",
    ) -> LookupRequest | None:
        """Requests with one name for their prompt have one prefix."""
        chain = hashes(prompt or name, tokens)
        return self.planner.on_new_request(name, chain, tokens, hints, self.now)

    def look_up(
        self,
        name: str,
        tokens: int,
        found: int | Sequence[int | Match],
        prompt: str = "",
        *,
        hints: RequestHints = RequestHints(),  # noqa: B008
        chain: Sequence[bytes] = (),
    ) -> LookupRequest | None:
        """A new request, of which the pool has so much of each group; what is asked next."""
        digests = list(chain) or hashes(prompt or name, tokens)
        lookup = self.planner.on_new_request(name, digests, tokens, hints, self.now)
        each = [found] if isinstance(found, int) else found
        matches = [matched(one) if isinstance(one, int) else one for one in each]
        return self.planner.lookups.on_result(name, lookup.serial, matches, "")

    def load(self, name: str, blocks: int = 6, prompt: str = "", computed: int = 0) -> LoadRequest:
        """A request of 100 tokens whose load begins with this step."""
        self.look_up(name, 100, blocks, prompt)
        return self.begin(name, blocks * BLOCK - computed, computed)

    def begin(self, name: str, tokens: int = 96, computed: int = 0) -> LoadRequest:
        """What was offered of 100 tokens is taken, and its load begins."""
        assert self.offer(name, 100, computed) == tokens
        self.allocate(name, 7, tokens)
        (load,) = (load for load in self.idle().loads if load.request_id == name)
        return load

    def offer(self, name: str, tokens: int, computed: int = 0) -> int | None:
        late = self.planner.lookups.late(name, tokens, computed, self.now)
        if late is not None:
            self.planner.lookups.on_result(name, late, (), "lookup timeout")
        return self.planner.loadable_tokens(name, tokens, computed, self.now)

    def allocate(self, name: str, blocks: int, tokens: int, first: int = 1) -> None:
        self.planner.on_blocks_allocated(
            name, [list(range(first, first + blocks))], tokens, self.now
        )

    def step(self, name: str, start: int, end: int, first: int = 1) -> StepPlan:
        ids = [list(range(first, first + -(-end // BLOCK)))]
        return self.idle(ScheduledRequest(name, start, end, ids))

    def idle(self, *scheduled: ScheduledRequest) -> StepPlan:
        return self.planner.plan_step(
            scheduled, lambda block, group, digest: block not in self.reused, self.now
        )

    def saved(self, job: int, *refused: tuple[bytes, WriteStatus]) -> list[int]:
        rows = tuple((0, digest, status) for digest, status in refused)
        return self.planner.on_save_result(SaveResult(job, 0, rows), self.now)[0]


def test_a_lookup_covers_what_can_be_used() -> None:
    """The last token is always computed: without it there is nothing to go on from."""
    for tokens, blocks in ((100, 6), (96, 5), (97, 6), (17, 1)):
        lookup = Played().arrive("a", tokens)
        assert [len(chain) for chain in lookup.chains] == [blocks]
    assert Played().arrive("a", 16) is None
    assert Played(load="never").arrive("a", 100) is None


@pytest.mark.parametrize(
    ("found", "computed", "offered"),
    [(6, 0, 80), (3, 0, 32), (1, 0, 0), (0, 0, 0), (6, 80, 0), (6, 64, 16)],
)
def test_with_a_volatile_tail_the_last_block_of_a_prefix_is_computed(
    found: int, computed: int, offered: int
) -> None:
    """Its KV is not of the tokens alone that its key names. The pool has it, so nobody saves it."""
    played = Played(drops_last_block=True, load="always")
    played.look_up("a", 100, found)
    assert played.offer("a", 100, computed) == offered
    if offered:
        played.allocate("a", 7, offered)
        (load,) = played.idle().loads
        assert len(load.blocks[0].digests) == offered // BLOCK
        played.planner.on_load_result(LoadResult("a", 1, True, 0.1), played.now)
    plan = played.step("a", computed + offered, 100)
    saved = [digest for save in plan.saves for blocks in save.blocks for digest in blocks.digests]
    assert saved == hashes("a", 100)[found:]


def test_with_a_volatile_tail_all_of_a_sliding_window_is_looked_up() -> None:
    """The end of the window moves by a block, and what lies before the end may be needed."""
    groups = (CacheGroup(BLOCK, 1), CacheGroup(BLOCK, 1, window_blocks=2))
    for drops, more in ((False, True), (True, False)):
        played = Played(groups=groups, drops_last_block=drops, load="always")
        assert (played.look_up("a", 100, [6, 3]) is not None) is more
    assert played.offer("a", 100) == 2 * BLOCK


def test_the_engine_waits_for_a_lookup_but_not_long() -> None:
    """Before a prefill was measured, and where it has no more."""
    played = Played(load="always", load_timeout_s=0.5)
    lookup = played.arrive("a", 100)
    for _ in range(2):
        assert played.offer("a", 100) is None
        played.now += 0.25
    assert played.offer("a", 100) == 0
    played.planner.lookups.on_result("a", lookup.serial, [matched(6)], "")  # too late
    assert played.offer("a", 100) == 0
    assert played.planner.counters["miss lookup timeout"] == 1


@pytest.mark.parametrize(
    ("prefill_s", "computed", "limits", "waits_s"),
    [
        (None, 0, {}, 0.25),  # nothing is known yet
        (None, 0, {"lookup_timeout_s": 0.1}, 0.1),
        (0.1, 0, {}, 0.05),  # half of what it can save
        (0.1, 50, {}, 0.025),  # the engine has half of the prompt
        (0.004, 0, {}, 0.01),
        (12.6, 0, {}, 1.0),
        (12.6, 0, {"lookup_timeout_s": 10.0}, 6.3),
        (0.1, 0, {"load": "always", "load_timeout_s": 0.7}, 0.7),
    ],
)
def test_a_lookup_may_take_a_share_of_what_it_can_save(
    prefill_s: float | None, computed: int, limits: dict[str, object], waits_s: float
) -> None:
    played = Played(**limits)
    if prefill_s is not None:
        played.planner.choice.prefill_cost.observe([(0, 100)], prefill_s)
    lookup = played.arrive("a", 100)
    played.now += waits_s * 0.99
    assert played.planner.lookups.late("a", 100, computed, played.now) is None
    played.now += waits_s * 0.02
    assert played.planner.lookups.late("a", 100, computed, played.now) == lookup.serial
    assert played.offer("a", 100, computed) == 0
    assert played.planner.lookups.late("a", 100, computed, played.now) is None


def test_a_lookup_that_could_not_begin_has_its_time_from_its_beginning() -> None:
    played = Played(lookup_timeout_s=0.05)
    lookup = played.arrive("a", 100)
    assert played.offer("a", 100) is None
    played.now += 1.0
    played.planner.lookups.began("a", played.now)
    assert played.offer("a", 100) is None
    played.planner.lookups.on_result("a", lookup.serial, [matched(6)], "")
    assert played.offer("a", 100) == 96


def test_what_the_pool_has_is_offered_and_loaded_once() -> None:
    played = Played()
    played.look_up("a", 100, 5)
    assert played.offer("a", 100) == 80
    assert played.offer("a", 100) == 80  # asking changes nothing
    played.allocate("a", 7, 80)
    plan = played.idle()
    (load,) = plan.loads
    (blocks,) = load.blocks
    assert blocks.digests == tuple(hashes("a", 80))
    assert blocks.block_ids == (1, 2, 3, 4, 5)
    assert blocks.match == matched(5)
    assert not played.idle().loads
    played.allocate("a", 7, 0)  # the engine says it again when the load has ended
    assert not played.idle().loads
    assert played.planner.loading == 1
    played.planner.on_load_result(LoadResult("a", 5 << 20, True, 0.01), played.now + 0.01)
    assert played.planner.loading == 0
    played.allocate("a", 7, 0)
    counted = {name for name in played.planner.counters if name.startswith("decision")}
    assert (counted, played.planner.counters["decision load"]) == ({"decision load"}, 1)


def test_a_slow_pool_is_not_waited_for() -> None:
    """G10: a load is chosen only when it is estimated to be faster than computing."""
    played = Played()
    played.planner.choice.prefill_cost.observe([(0, 1000)], 0.1)  # 10,000 tokens a second
    played.planner.choice.transfer_cost.observe(10 << 20, 10.0)  # a megabyte a second
    played.look_up("a", 100, 6)
    assert played.offer("a", 100) == 0
    played.allocate("a", 7, 0)
    assert played.planner.counters["decision slower"] == 1
    plan = played.step("a", 0, 100)
    assert plan.probe is not None  # whether it is faster by now, nobody waits for that
    assert not plan.saves  # the pool has it


def held(*runs: tuple[int, str], tier: str = "dram") -> Match:
    """So many blocks, and the servers that have each of them, one letter each."""
    first, found = 0, []
    for blocks, servers in runs:
        replicas = tuple(Replica(server, tier) for server in servers)
        found.append(Run(first, first + blocks - 1, replicas))
        first += blocks
    return Match(tuple(found), first, ReadStatus.NEVER_WRITTEN)


def decided(played: Played, name: str, match: Match) -> int | None:
    """How much of a prompt with six such blocks is loaded; computing it takes 0.3 s."""
    played.look_up(name, 100, [match])
    tokens = played.offer(name, 100)
    played.allocate(name, 7, tokens or 0)
    played.planner.on_request_finished(name)
    return tokens


def test_a_load_is_as_fast_as_the_ways_that_share_it() -> None:
    """Each server brings 12 MiB/s: six blocks take 0.5 s from one, 0.25 s from two of them."""
    played = Played(loads_max=100)
    cost = played.planner.choice.transfer_cost
    played.planner.choice.prefill_cost.observe([(0, 960)], 3.0)
    for number in range(8):
        for ways in (1, 2):
            cost.observe((6 + number) << 20, (6 + number) / 12 / ways, Route(ways))
    assert decided(played, "two", held((6, "ab"))) == 96
    assert decided(played, "one", held((6, "a"))) == 0
    assert decided(played, "shared", held((3, "ab"), (3, "b"))) == 96, "a has the other half"
    assert decided(played, "apart", held((3, "a"), (3, "b"))) == 96, "both are read at once"
    assert decided(played, "tail", held((1, "ab"), (5, "b"))) == 0, "b has nearly all"
    assert decided(played, "same", held((6, "aa"))) == 0, "in memory and on the disk of one server"


@pytest.mark.parametrize(
    ("match", "ways"),
    [
        (held((6, "abc")), 3),
        (held((1, "a"), (1, "b"), (4, "ab")), 2),
        (held((4, "ab"), (2, "c")), 3),
        (held((2, "ab"), (4, "c")), 1),
        (held((1, "ab")), 1),  # a block comes over one
        (
            Match((Run(0, 5, (Replica("a", "dram"), Replica("b", "dram", 1))),), 6, ReadStatus.HIT),
            1,
        ),
        (Match((), 0, ReadStatus.NO_MASTER), 1),
    ],
)
def test_ways_are_servers_that_are_busy_to_the_end(match: Match, ways: int) -> None:
    assert TransferCost().route(match, 4 << 20).ways == ways
    assert TransferCost().route(match, (4 << 20) - 1).ways == 1, "so little comes over one"


def test_of_a_chain_in_very_many_pieces_the_first_tell() -> None:
    """The engine's thread waits meanwhile."""
    pieces = [(1, "a"), (1, "b")] * 512
    assert TransferCost().route(held(*pieces, (9000, "a")), 4 << 20).ways == 2
    assert TransferCost().route(held(*pieces[:-2], (9000, "a")), 4 << 20).ways == 1


def test_several_ways_that_have_become_slow_leave_no_one_way_that_is_fast() -> None:
    cost = TransferCost()
    for seconds, ways in ((0.4, 1), (0.2, 2), (0.25, 2)):
        cost.observe(6 << 20, seconds, Route(ways))
    assert cost.seconds(6 << 20) == pytest.approx(0.4), "as it was measured"
    for _ in range(10):
        cost.observe(6 << 20, 0.7, Route(2))  # nobody starts over for less than four times
    assert cost.seconds(6 << 20) >= 0.7


def test_what_is_left_after_another_load_comes_over_all_ways() -> None:
    """To wait for half of it and load the rest takes 0.25 s; over one way it would take 0.375 s."""
    played = Played()
    played.planner.choice.prefill_cost.observe([(0, 960)], 3.0)
    for ways in (1, 2):
        played.planner.choice.transfer_cost.observe(12 << 20, 0.5 / ways, Route(ways))
    played.planner.windows.block_bytes = (2 << 20,)
    played.look_up("half", 100, [held((3, "ab"))], "prompt")
    played.begin("half", 3 * BLOCK)
    played.look_up("whole", 100, [held((6, "ab"))], "prompt")
    assert played.offer("whole", 100) is None
    assert played.planner.counters["load_waits"] == 1


def test_more_ways_are_no_faster_until_that_was_measured() -> None:
    """G10: the engine's own link may be what limits. A probe in the background finds out."""
    played = Played()
    played.planner.choice.prefill_cost.observe([(0, 960)], 3.0)
    played.planner.choice.transfer_cost.observe(6 << 20, 0.5)
    assert decided(played, "first", held((6, "ab"))) == 0
    assert played.idle().probe is not None
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.5 * 4 / 6 / 2))
    assert decided(played, "again", held((6, "ab"))) == 96
    assert decided(played, "alone", held((6, "b"))) == 0, "it was no probe of one server"


def test_the_own_host_has_a_rate_and_the_rest_another() -> None:
    """G10: what is fast there makes no load from elsewhere look fast, nor the other way round."""
    played = Played(loads_max=100)
    cost = played.planner.choice.transfer_cost
    played.planner.choice.prefill_cost.observe([(0, 960)], 3.0)
    cost.near = {"a"}
    cost.observe(6 << 20, 0.001, cost.route(held((19, "a"), (1, "b")), 6 << 20))
    cost.observe(6 << 20, 0.001, cost.route(None, 6 << 20))
    assert cost.seconds(6 << 20) > 0.006, "no way was measured: as of any pool"
    cost.observe(6 << 20, 0.5)
    cost.observe(24 << 20, 1.0, cost.route(held((2, "a"), (2, "b")), 24 << 20))  # 12 MiB came so
    assert cost.seconds(6 << 20) == pytest.approx(0.5)
    disk = Match((Run(0, 5, (Replica("a", "nvme"), Replica("b", "dram"))),), 6, ReadStatus.HIT)
    for name, match, tokens in (
        ("near", held((6, "a")), 96),
        ("both", held((6, "ab")), 96),
        ("far", held((6, "b")), 0),
        ("on its disk", disk, 0),
        ("on its device", held((6, "a"), tier="hbm"), 96),
        ("a half", held((3, "a"), (3, "b")), 96),
        ("a third", held((2, "a"), (4, "b")), 0),
    ):
        assert decided(played, name, match) == tokens, name
    assert cost.route(held((2, "a"), (2, "b"), (2, "c")), 5 << 20).ways == 1, "so little comes so"
    cost.start_over(6 << 20, 0, 1.0, cost.route(held((6, "a")), 6 << 20))
    assert decided(played, "slow", held((6, "b"))) == 0, "the pool is slow, until that was measured"


def test_a_probe_asks_all_servers_that_a_load_waits_for() -> None:
    """That which has the beginning may be fast: it would never tell that the rest is so, too."""
    played, match = Played(), held((2, "a"), (3, "b"), (3, "c"))
    cost = played.planner.choice.transfer_cost
    played.planner.choice.prefill_cost.observe([(0, 960)], 3.0)
    cost.near = {"a"}
    cost.observe(6 << 20, 2.0, Route(2))
    played.look_up("a", 132, [match])
    assert played.offer("a", 132, BLOCK) == 0
    (blocks,) = played.idle().probe.blocks
    assert blocks.digests == tuple(hashes("a", 132)[n] for n in (2, 3, 5, 6))
    assert [run.replicas[0].server for run in blocks.match.runs] == [*"bbcc"]
    assert [(run.first, run.last) for run in blocks.match.runs] == [(n, n) for n in range(4)]
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.01))
    assert played.offer("a", 132, BLOCK) == 7 * BLOCK


def test_a_probe_judges_what_a_load_has_brought_over_its_route() -> None:
    """A third of it comes from elsewhere. In the time of the prefill 2 MiB do, and not all 6."""
    played = Played()
    played.planner.choice.prefill_cost.observe([(0, 1000)], 1.0)
    played.planner.choice.transfer_cost.near = {"a"}
    played.look_up("a", 100, [held((4, "a"), (2, "b"))])
    played.begin("a")
    played.planner.on_load_result(LoadResult("a", 6 << 20, True, 0.3), played.now)
    assert len(played.idle().probe.blocks[0].digests) == 2
    played.planner.prober.on_result(ProbeResult(2 << 20, 0.08))
    assert decided(played, "b", held((4, "a"), (2, "b"))) == 96


def test_who_reads_in_the_own_host_takes_no_turn_at_the_link() -> None:
    played = Played()
    played.planner.choice.transfer_cost.near = {"a"}
    for name, match, beside in (
        ("near", held((6, "a")), 0),
        ("a third", held((4, "a"), (2, "b")), 0),
        ("far", held((6, "b")), 2),
        ("a half", held((3, "a"), (3, "b")), (2 + 3) * 2),  # of its 6 MiB 3 take turns
    ):
        played.look_up(name, 100, [match])
        played.begin(name)
        assert played.planner.requests[name].load.size_beside == beside << 20, name  # type: ignore[union-attr]


def test_when_a_way_is_gone_its_speed_is() -> None:
    """Only loads over two ways were measured: one of them has half of the speed, fast or slow."""
    played = Played(load="always")
    played.planner.choice.prefill_cost.observe([(0, 960)], 3.0)
    cost = played.planner.choice.transfer_cost
    for name, took_s in (("fast", 0.01), ("slow", 1.0)):
        played.look_up(name, 100, [held((6, "ab"))])
        played.begin(name)
        played.planner.on_load_result(LoadResult(name, 6 << 20, True, took_s), played.now)
        assert cost.seconds(6 << 20, Route(2)) == pytest.approx(took_s)
        assert cost.seconds(6 << 20) == pytest.approx(2 * took_s)


@pytest.mark.parametrize(
    ("mebibytes_s", "limit_s", "timeout_s"),
    [
        (None, 10.0, 0.96),  # although the own host was measured
        (1000.0, 10.0, 0.5 * 0.96),
        (25.0, 10.0, 3 * 6 / 25),
        (10.0, 10.0, 0.96),
        (10.0, 0.9, 0.9),
    ],
)
def test_a_load_gives_up_before_computing_would_have_been_done(
    mebibytes_s: float | None, limit_s: float, timeout_s: float
) -> None:
    """After three times what was expected, within half and all of the time of computing."""
    played = Played(load_timeout_s=limit_s)
    played.planner.choice.prefill_cost.observe([(0, 1000)], 10.0)  # 96 tokens in 0.96 s
    mebibytes_s, route = (mebibytes_s, Route()) if mebibytes_s else (12_000.0, Route(ways=0))
    played.planner.choice.transfer_cost.observe(6 << 20, 6 / mebibytes_s, route)
    assert played.load("a").timeout_s == pytest.approx(timeout_s)


def test_loads_beside_each_other_are_no_slow_pool() -> None:
    """Four that share the link take four times as long each, and the link is as fast as before."""
    played = Played()
    played.planner.choice.prefill_cost.observe([(0, 1000)], 100.0)  # nothing is slower
    for turn in range(8):
        names = [f"{turn}{letter}" for letter in "abcd"]
        for name in names:
            played.load(name)
        for count, name in enumerate(names, 1):  # 1 ms for each MiB, one behind the other
            result = LoadResult(name, 6 << 20, True, 0.006 * count)
            played.planner.on_load_result(result, played.now)
    assert played.planner.choice.transfer_cost.seconds(100 << 20) == pytest.approx(0.1)


def test_probes_grow_until_they_tell_latency_from_rate() -> None:
    """A link of 4 GiB/s with 10 ms of latency: 4 MiB come at 0.36 GiB/s, a prompt of 600 MiB faster
    than it is computed. A probe that stays small would keep every prompt from loading."""
    played = Played(probe_every_s=5.0)
    played.planner.choice.prefill_cost.observe([(0, 1000)], 0.05)  # 9,600 tokens in 0.48 s
    played.planner.choice.transfer_cost.observe(4 << 20, 0.011)  # 1.6 s at this speed
    sizes = []
    for number in range(20):
        played.now += 5.0
        name = f"r{number}"
        played.look_up(name, 9610, 600)
        offered = played.offer(name, 9610)
        played.allocate(name, 601, offered or 0)
        if offered:
            break
        probe = played.idle().probe
        sizes.append(len(probe.blocks[0].digests))
        seconds = 0.01 + sizes[-1] / 4096
        played.planner.prober.on_result(ProbeResult(sizes[-1] << 20, seconds))
    assert sizes[0] > 4
    assert max(sizes) <= 64
    assert len(sizes) <= 2


def slow_load(played: Played, name: str, seconds: float = 0.3, *, complete: bool = True) -> None:
    """A request whose load of 6 MiB takes longer than computing its 96 tokens, which is 96 ms."""
    if played.planner.choice.prefill_cost.seconds(0, 1) is None:
        played.planner.choice.prefill_cost.observe([(0, 1000)], 1.0)
    played.load(name)
    played.now += seconds
    size = 6 << 20 if complete else 0
    played.planner.on_load_result(LoadResult(name, size, complete, seconds), played.now)


@pytest.mark.parametrize(("before", "complete"), [(5, True), (5, False), (0, True)])
def test_one_slow_load_changes_nothing_when_a_probe_is_fast(before: int, complete: bool) -> None:
    """A core that was busy for a moment must not stop loads: computing makes it busier still.
    And a first load opens the way: what it takes says little about the second."""
    played = Played()
    for _ in range(before):
        played.planner.choice.transfer_cost.observe(6 << 20, 0.006)
    seconds = played.planner.choice.transfer_cost.seconds(6 << 20)
    slow_load(played, "a", complete=complete)
    played.look_up("b", 100, 6)
    assert played.offer("b", 100) == 0  # until the probe has ended
    played.allocate("b", 7, 0)
    assert played.planner.counters["decision measuring"] == 1
    assert played.planner.has_pending_work  # the engine goes on stepping, for this
    probe = played.idle().probe
    assert len(probe.blocks[0].digests) == (6 if before else 4)
    assert played.planner.has_pending_work  # and to hear of its end
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.004))
    assert not played.planner.has_pending_work
    if before:
        now = played.planner.choice.transfer_cost.seconds(6 << 20)
        assert now == pytest.approx(seconds, rel=0.01)
    played.look_up("c", 100, 6)
    assert played.offer("c", 100) == 96


def test_a_slow_load_counts_when_the_probe_is_slow_as_well() -> None:
    played = Played()
    for _ in range(5):
        played.planner.choice.transfer_cost.observe(6 << 20, 0.006)
    slow_load(played, "a")
    played.idle()
    # In time for 4 MiB, and not for 6.
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.065))
    played.look_up("b", 100, 6)
    assert played.offer("b", 100) == 0
    played.allocate("b", 7, 0)
    assert played.planner.counters["decision slower"] == 1
    # Measured again early, and then less and less often.
    probed_at = []
    for number in range(200):
        played.now += 0.05
        played.look_up(f"r{number}", 100, 6)
        assert played.offer(f"r{number}", 100) == 0
        if played.idle().probe is not None:
            probed_at.append(played.now)
            played.planner.prober.on_result(ProbeResult(4 << 20, 0.3))
    delays = [after - before for before, after in itertools.pairwise(probed_at)]
    assert delays == pytest.approx([0.5, 1.0, 2.0, 4.0], abs=0.06)


def test_a_probe_that_brings_nothing_decides_nothing() -> None:
    played = Played(probe_every_s=2.0)
    slow_load(played, "a")
    played.idle()
    played.planner.prober.on_result(ProbeResult(0, 0.001))  # its blocks were evicted
    played.look_up("b", 100, 6)
    assert played.offer("b", 100) == 0
    played.now += 2.1
    assert played.offer("b", 100) == 0
    assert played.idle().probe is not None  # of other blocks
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.004))
    assert played.offer("b", 100) == 96


def test_two_slow_loads_in_a_row_are_no_accident() -> None:
    """Otherwise a pool whose loads are slow, and its probes not, costs every request its load."""
    played = Played()
    for _ in range(5):
        played.planner.choice.transfer_cost.observe(6 << 20, 0.006)
    slow_load(played, "a")
    played.idle()
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.004))
    slow_load(played, "b")
    assert played.planner.choice.transfer_cost.seconds(6 << 20) == pytest.approx(0.3)
    played.look_up("c", 100, 6)
    for _ in range(9):
        assert played.offer("c", 100) == 0
        assert played.idle().probe is None  # it would say the same as the first one
        played.now += 0.5
    played.now += 0.6
    assert played.offer("c", 100) == 0
    assert played.idle().probe is not None
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.004))
    assert played.offer("c", 100) == 96
    played.allocate("c", 7, 96)
    played.planner.on_load_result(LoadResult("c", 6 << 20, True, 0.006), played.now)
    slow_load(played, "d")  # after a good one it may be an accident again
    played.idle()
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.004))
    assert played.planner.choice.transfer_cost.seconds(6 << 20) < 0.02


def test_loads_that_are_slow_together_are_one_accident() -> None:
    played = Played()
    played.planner.choice.prefill_cost.observe([(0, 1000)], 1.0)
    names = ("a", "b", "c")
    for name in names:
        played.load(name)
    played.now += 0.3
    played.planner.on_load_result(LoadResult("a", 6 << 20, True, 0.3), played.now)
    played.planner.on_load_result(LoadResult("b", 6 << 20, True, 0.3), played.now)
    played.idle()
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.004))
    played.planner.on_load_result(LoadResult("c", 6 << 20, True, 0.3), played.now)
    played.look_up("d", 100, 6)
    assert played.offer("d", 100) == 96


def test_what_is_saved_first_is_read_back_to_learn_how_long_that_takes() -> None:
    played = Played()
    lookup = played.arrive("a", 100)
    assert lookup is not None
    (save,) = played.step("a", 0, 100).saves
    assert played.planner.prober.on_result(ProbeResult(0, 0.001)) is None
    assert not played.planner.choice.transfer_cost.samples  # nothing came, and nobody waited
    played.saved(save.job)
    probe = played.idle().probe
    assert (probe.blocks[0].group, probe.blocks[0].digests) == (0, tuple(hashes("a", 64)))
    assert played.idle().probe is None
    played.planner.prober.on_result(ProbeResult(4 << 20, 0.004))
    assert played.planner.choice.transfer_cost.samples == 1
    assert not Played(load="never").idle().probe


def test_no_more_loads_at_once_than_allowed() -> None:
    played = Played(loads_max=2)
    for number, expected in enumerate((96, 96, 0)):
        played.look_up(f"r{number}", 100, 6)
        assert played.offer(f"r{number}", 100) == expected
        played.allocate(f"r{number}", 7, expected)
    assert played.planner.counters["decision too many loads"] == 1


def test_decoding_is_saved_only_if_wanted() -> None:
    for wanted, expected in ((True, 8), (False, 6)):
        played = Played(save_decode=wanted)
        played.planner.on_new_request("a", hashes("a", 160), 100, RequestHints(), played.now)
        plan = played.step("a", 0, 140)
        assert len(plan.blocks_to_pin) == expected


def test_a_refused_save_is_tried_again_while_its_blocks_are_there() -> None:
    played = Played(save_retries=2)
    played.arrive("a", 64)
    (save,) = played.step("a", 0, 64).saves
    chain = hashes("a", 64)
    played.saved(save.job, (chain[2], WriteStatus.NO_SPACE), (chain[3], WriteStatus.NO_SPACE))
    assert not played.idle().saves  # not at once
    played.now += 5
    played.reused.add(4)
    (again,) = played.idle().saves
    assert again.blocks[0].digests == (chain[2],)
    assert played.planner.counters["save_retries"] == 1
    assert again.blocks[0].parents == (chain[1],)
    assert played.planner.counters["dropped block reused"] == 1
    played.saved(again.job, (chain[2], WriteStatus.NO_SPACE))
    played.now += 10
    (again,) = played.idle().saves
    played.saved(again.job, (chain[2], WriteStatus.NO_SPACE))
    played.now += 100
    assert not played.idle().saves
    assert played.planner.counters["dropped no space"] == 1


def test_blocks_that_were_evicted_do_not_make_the_pool_slow() -> None:
    for elapsed_s, measured, reset in ((0.01, False, ""), (20.0, True, ""), (20.0, True, "reset")):
        played = Played()
        played.load("a", 5)
        if reset:
            played.planner.on_reset()
        played.planner.on_load_result(LoadResult("a", 0, False, elapsed_s), played.now + elapsed_s)
        assert played.planner.prober.measuring is measured
        assert (played.idle().probe is not None) is (measured and not reset)


def test_an_aborted_request_is_loaded_to_its_end() -> None:
    """The engine keeps its blocks until it hears that nobody writes to them any more."""
    played = Played()
    played.look_up("a", 100, 5)
    played.offer("a", 100)
    played.allocate("a", 7, 80)
    played.planner.on_request_finished("a")
    assert [load.request_id for load in played.idle().loads] == ["a"]
    assert played.planner.loading == 0
    played.planner.on_load_result(LoadResult("a", 5 << 20, True, 0.0), played.now)


def test_random_lives_of_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens in whatever order: each block is unpinned as often as it is pinned.

    The states that requests pass through are those of the table, and all moves of it happen.
    """
    moves: set[tuple[RequestState, RequestState]] = set()
    move_to = TrackedRequest.move_to

    def watched(request: TrackedRequest, state: RequestState) -> None:
        moves.add((request.state, state))
        move_to(request, state)
        assert request.load is None or state is RequestState.LOADING

    monkeypatch.setattr(TrackedRequest, "move_to", watched)
    for seed in range(60):
        _random_life(random.Random(seed))
    assert moves == {(state, after) for state, some in TRANSITIONS.items() for after in some}


def _random_life(chance: random.Random) -> None:
    played = Played(
        ranks=chance.choice([1, 2]),
        saved_blocks_max=chance.choice([2, 1000]),
        save_gather_s=chance.choice([0.0, 3.0]),
    )
    kept: list[int] = []
    open_jobs: list[int] = []
    loads: list[str] = []
    alive: dict[str, int] = {}
    sizes: dict[str, int] = {}
    ranks = played.planner._ranks

    def answer(name: str, lookup: LookupRequest | None) -> None:
        if lookup and chance.random() < 0.7:
            length = chance.randrange(0, len(lookup.chains[0]) + 1)
            played.planner.lookups.on_result(name, lookup.serial, [matched(length)], "")

    def offer(name: str) -> None:
        offered = played.offer(name, sizes[name])
        if chance.random() < 0.7:
            played.allocate(name, 20, offered or 0 if chance.random() < 0.8 else 0)

    for turn in range(300):
        played.now += chance.random()
        act = chance.randrange(9)
        name = chance.choice(sorted(alive)) if alive else ""
        if act == 0 or not alive:
            name = f"r{turn}"
            alive[name], sizes[name] = 0, chance.randrange(1, 200)
            answer(name, played.arrive(name, sizes[name], prompt=chance.choice("pq")))
            offer(name)
        elif act == 1:
            played.planner.on_request_finished(name)
            del alive[name]
        elif act == 2:
            played.planner.on_preempted(name)
            alive[name] = 0
        elif act == 3:
            offer(name)
        elif act == 4:
            answer(name, played.planner.on_restart(name, sizes[name], played.now))
        elif act == 5 and chance.random() < 0.3:
            played.planner.on_reset()
        plan = played.step(name, alive.get(name, 0), alive.get(name, 0) + chance.randrange(64))
        kept += plan.blocks_to_pin
        for block in played.planner.saves.queue.take_dropped():
            kept.remove(block)
        open_jobs += [save.job for save in plan.saves for _ in range(ranks)]
        loads += [load.request_id for load in plan.loads for _ in range(ranks)]
        while open_jobs and chance.random() < 0.5:
            job = open_jobs.pop(chance.randrange(len(open_jobs)))
            for block in played.saved(job):
                assert job not in open_jobs, "another rank may still read it"
                kept.remove(block)
        while loads and chance.random() < 0.5:
            played.planner.on_load_result(
                LoadResult(loads.pop(), 1, chance.random() < 0.5, 0.0), played.now
            )
    for name in alive:
        played.planner.on_request_finished(name)
    plan = played.idle()
    kept += plan.blocks_to_pin
    open_jobs += [save.job for save in plan.saves for _ in range(ranks)]
    for job in open_jobs:
        for block in played.saved(job):
            kept.remove(block)
    assert not kept
    assert not played.planner.has_pending_work
    assert played.planner.loading == 0


def test_estimates_follow_what_was_measured() -> None:
    load = TransferCost()
    assert 0 < load.seconds(1 << 20) < 0.01  # a guess
    for size in (1 << 20, 4 << 20, 16 << 20, 2 << 20):
        load.observe(size, 0.002 + size / 1e9)
    assert load.seconds(8 << 20) == pytest.approx(0.002 + (8 << 20) / 1e9, rel=0.01)
    assert load.bandwidth == pytest.approx(1e9), "in bytes per second"
    for _ in range(20):
        load.observe(1 << 20, 10.0)
    assert load.seconds(1 << 20) == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(("arrived", "expected_s"), [(0, 2.0), (4 << 20, 2.0), (7 << 20, 8 / 7)])
def test_a_load_that_was_given_up_ends_what_was_known(arrived: int, expected_s: float) -> None:
    """However fast the pool has been: otherwise the next requests would try it in vain, too."""
    load = TransferCost()
    load.observe(8 << 20, 0.01)
    load.start_over(8 << 20, arrived, 1.0, Route())
    assert load.seconds(8 << 20) == pytest.approx(expected_s)


def test_steps_that_overlap_are_told_apart() -> None:
    prefill = PrefillCost()
    times = StepTimer(prefill)
    times.on_start(1, [(0, 100)], 0.0)
    times.on_start(2, [(0, 100)], 0.1)
    times.on_end(1, 1.0)
    times.on_end(2, 2.0)
    assert prefill.seconds(0, 100) == pytest.approx(1.0)
    times.on_start(3, [], 2.0)
    times.on_end(7, 2.5)
