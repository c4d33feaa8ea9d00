"""Blocks that several servers hold are read from all of them, each as fast as it is."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvpool import ReadResult, ReadStatus
from kvpool.client.attempts import Attempt, ReadRates, Standing
from kvpool.client.ways import Ways

MIB = 1 << 20
MISS = ReadResult(ReadStatus.EVICTED)
HEDGE_S = 0.1


class Load:
    """One read, played: servers with a speed each in bytes per second, 0 for one that is silent."""

    def __init__(
        self,
        candidates: list[str],
        speeds: dict[str, float] | None = None,
        *,
        size: int = MIB,
        known: dict[str, float] | None = None,
        near: str = "",
        ailing: str = "",
    ) -> None:
        self.speeds = speeds or {}
        self.sizes = [size] * len(candidates)
        self.results = [MISS] * len(candidates)
        self.candidates = [list(reversed(servers)) for servers in candidates]
        self.unresponsive: set[str] = set()
        self.brought: Counter[str] = Counter()
        self.log: list[Attempt] = []
        self.rates = ReadRates()
        for server, rate in (known or {}).items():
            self.rates.record(server, round(rate), 1.0, 0.0)
        self.ways = Ways(
            self.candidates,
            self.sizes,
            self.results,
            self.unresponsive,
            lambda server: Standing(server in ailing, server not in near, server not in near),
            self.rates,
            Counter(),
            HEDGE_S,
        )
        self.now = 0.0
        self.running: list[tuple[float, Attempt]] = []

    def ask(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            under_way = {i for _, other in self.running for i in other.positions}
            assert not under_way & set(attempt.positions), "a block is asked for twice"
            size = sum(self.sizes[i] for i in attempt.positions)
            speed = self.speeds.get(attempt.server, 1e8)
            # A server that is silent is left by the timer of the call.
            took = 0.0005 + size / speed if speed else HEDGE_S
            self.running.append((self.now + took, attempt))
            self.log.append(attempt)

    def end(self, attempt: Attempt, results: list[ReadResult] | None = None) -> None:
        """With these results; without, it was left."""
        self.running = [one for one in self.running if one[1] is not attempt]
        if results is None:
            self.leave(attempt)
            results = [MISS] * len(attempt.positions)
        for i, result in zip(attempt.positions, results, strict=True):
            self.results[i] = result
            self.brought[attempt.server] += result.size
        self.ask(self.ways.ended(attempt, self.now))

    def leave(self, attempt: Attempt) -> None:
        if attempt.server not in self.unresponsive:
            for i in attempt.positions:
                self.candidates[i].insert(0, attempt.server)
        self.unresponsive.add(attempt.server)

    def play(self, lacks: str = "") -> float:
        """Until nothing is under way; the time that it took. Servers of `lacks` have nothing."""
        self.ask(self.ways.begin(range(len(self.sizes)), self.now))
        return self.play_on(lacks)

    def play_on(self, lacks: str = "") -> float:
        while self.running:
            at, attempt = min(self.running, key=lambda one: one[0])
            overdue = [o for _, o in self.running if o.overdue and o.overdue(self.now)]
            if overdue:
                self.end(overdue[0])
            elif at > self.now + HEDGE_S / 4:  # the timers of calls look as often
                self.now += HEDGE_S / 4
            else:
                self.now = at
                hits = [ReadResult(ReadStatus.HIT, self.sizes[i]) for i in attempt.positions]
                if not self.speeds.get(attempt.server, 1):
                    self.end(attempt)
                elif attempt.server in lacks:
                    self.end(attempt, [MISS] * len(hits))
                else:
                    self.end(attempt, hits)
        return self.now

    def missing(self) -> int:
        return sum(not one.status.hit for one in self.results)


@pytest.mark.parametrize(
    ("servers", "faster"), [("ab", 1.9), ("abcd", 3.6), ("abcdefgh", 6.5), ("abcdefghij", 6.5)]
)
def test_a_load_is_faster_by_the_number_of_its_ways(servers: str, faster: float) -> None:
    one = Load(["a"] * 256).play()
    load = Load([servers] * 256, known=dict.fromkeys(servers, 1e8))
    assert one / load.play() > faster
    assert not load.missing()


@pytest.mark.parametrize("mib", [4, 6, 8, 10, 16, 24])
def test_the_last_pieces_of_a_load_end_together(mib: int) -> None:
    """Of speeds that are known; so a load of a few pieces is faster by its ways, too."""
    for speeds, faster in (
        ({"a": 5e8, "b": 5e8}, 1.75),
        (dict.fromkeys("abcd", 3e8), 3.4),
        ({"a": 1e8, "b": 1e8, "c": 2e8, "d": 4e8}, 1.8 if mib > 6 else 1.2),
    ):
        load = Load(["".join(speeds)] * 16 * mib, speeds, size=MIB // 16, known=speeds)
        assert (0.0005 + mib * MIB / max(speeds.values())) / load.play() > faster
    new = Load(["abcd"] * 16 * mib, dict.fromkeys("abcd", 3e8), size=MIB // 16)
    assert (0.0005 + mib * MIB / 3e8) / new.play() > min(3.4, mib / 2.2)
    assert len(new.log[0].positions) <= 5e6 / (MIB // 16) + 1, "it may be slower than is believed"


def test_no_piece_is_larger_than_a_channel_takes() -> None:
    speeds = {"a": 5e10, "b": 5e10}
    load = Load(["ab"] * 4000, speeds, size=MIB // 4, known=speeds)
    load.play()
    assert max(len(one.positions) for one in load.log) <= 128 * 4
    assert not load.missing()


@pytest.mark.parametrize("known", [True, False])
def test_a_way_brings_by_its_speed(known: bool) -> None:
    speeds = {"a": 1e8, "b": 4e8}
    load = Load(["ab"] * 512, speeds, known=speeds if known else None)
    took = load.play()
    assert took < 1.08 * 512 * MIB / 5e8 + HEDGE_S / 4
    assert 3 < load.brought["b"] / load.brought["a"] < 5
    assert not load.unresponsive


def test_blocks_of_one_server_go_together_and_sole_replicas_apart() -> None:
    load = Load(["ab", "ac", "a", "b"], size=1)
    assert load.ways.begin(range(4), 0.0) == [
        Attempt("a", [0, 1]),
        Attempt("a", [2]),
        Attempt("b", [3]),
    ]
    assert load.ways.begin(range(4), 0.0) == [Attempt("b", [0]), Attempt("c", [1])]
    assert load.ways.begin(range(4), 0.0) == []


def test_ways_that_are_equally_slow_are_not_left_for_each_other() -> None:
    load = Load(["ab"] * 64, {"a": 2e6, "b": 1.5e6}, known={"a": 1e8, "b": 1e8})
    load.play()
    assert not load.unresponsive


def test_a_slow_way_is_not_given_the_last_piece() -> None:
    speeds = {"a": 1e9, "b": 2e7}
    load = Load(["ab"] * 64, speeds, known=speeds)
    assert load.play() < 1.2 * 64 * MIB / 1e9
    assert not load.unresponsive


def test_a_slow_way_is_tried_again_after_a_while() -> None:
    load = Load(["ab"] * 256, known={"a": 1e8, "b": 1.0})
    load.now = 20.0
    load.play()
    assert not load.brought["b"]
    later = Load(["ab"] * 256)
    later.rates, later.now = load.rates, 31.0
    later.ways.rates = load.rates
    later.play()
    assert later.brought["b"] > 100 * MIB


@pytest.mark.parametrize("size", [1, 1 << 10, 4 * MIB // 8 - 1])
def test_a_small_read_is_one_message_to_the_best_server(size: int) -> None:
    load = Load(["ba", "ba", "ba", "ba"] * 2, size=size)
    load.play()
    assert load.log == [Attempt("b", list(range(8)))]


def test_a_server_that_is_slow_or_lost_is_no_way() -> None:
    load = Load(["abc"] * 64, ailing="c")
    load.play()
    assert not load.brought["c"]


@pytest.mark.parametrize("which", [{"near": "ab"}, {"ailing": "ab"}])
def test_servers_that_are_in_memory_or_ailing_share_nothing(which: dict[str, str]) -> None:
    load = Load(["ab"] * 64, **which)  # type: ignore[arg-type]
    load.play()
    assert load.log == [Attempt("a", list(range(64)))]


def test_a_way_that_is_somewhat_slower_is_not_left() -> None:
    """Most of its piece has arrived when the idle one would have brought it."""
    load = Load(["ab"] * 2, {"a": 6e7, "b": 1e8}, size=64 * MIB, known={"a": 1e8, "b": 1e8})
    load.play()
    assert not load.unresponsive


def test_a_silent_way_is_remembered_as_slow() -> None:
    load = Load(["ab"] * 64, {"a": 0.0}, known={"a": 1e9, "b": 1e8})
    load.play()
    rate = load.rates.rate("a")
    assert rate is not None
    assert rate < 0.9e9


def test_a_way_that_has_nothing_any_more_is_asked_once() -> None:
    load = Load(["abc"] * 64)
    load.play(lacks="a")
    assert [attempt.server for attempt in load.log].count("a") == 1
    assert not load.missing()


def test_what_a_way_lied_about_is_read_elsewhere() -> None:
    """Wrong bytes of some blocks, with the others of its piece: it goes on."""
    load = Load(["ab"] * 64)
    load.ask(load.ways.begin(range(64), 0.0))
    lying = load.log[0]
    answer = [ReadResult(ReadStatus.HIT, MIB)] * len(lying.positions)
    answer[0] = ReadResult(ReadStatus.CORRUPT)
    load.now = 0.01
    load.end(lying, answer)
    load.play_on()
    assert not load.missing()
    again = [one.server for one in load.log if lying.positions[0] in one.positions]
    assert again in (["a", "b"], ["b", "a"])


def test_what_nobody_has_is_asked_of_each_server_once() -> None:
    load = Load(["abc"] * 64)
    load.play(lacks="abc")
    asked = Counter((attempt.server, i) for attempt in load.log for i in attempt.positions)
    assert set(asked.values()) == {1}
    assert load.missing() == 64
    assert len(asked) == 3 * 64


def test_a_sole_replica_is_read_beside_shared_blocks() -> None:
    """Whoever alone can bring some brings these first; meanwhile the others bring the rest."""
    load = Load(["ab"] * 64 + ["a"] * 64)
    load.play()
    assert load.brought["a"] == load.brought["b"] == 64 * MIB


def together(
    loads: list[Load], speeds: dict[str, float], known: dict[str, float] | None = None
) -> float:
    """Play loads side by side, which share each server's link; the time until all have ended."""
    rates, under_way = ReadRates(), Counter[str]()
    for server, speed in (known or speeds).items():
        rates.record(server, round(speed), 1.0, 0.0)
    running: list[tuple[Load, Attempt, float]] = []

    def ask(load: Load, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            load.log.append(attempt)
            running.append((load, attempt, float(sum(load.sizes[i] for i in attempt.positions))))

    for load in loads:
        load.ways.rates, load.ways.under_way = rates, under_way
        ask(load, load.ways.begin(range(len(load.sizes)), 0.0))
    ticks = 0
    while running:
        ticks += 1
        now = ticks / 1000
        active = Counter(attempt.server for _, attempt, _ in running)
        before, running = running, []
        for load, attempt, left in before:
            left -= speeds[attempt.server] / active[attempt.server] / 1000
            if left <= 0:
                for i in attempt.positions:
                    load.results[i] = ReadResult(ReadStatus.HIT, load.sizes[i])
                    load.brought[attempt.server] += load.sizes[i]
            elif attempt.overdue and not ticks % 25 and attempt.overdue(now):
                load.leave(attempt)
            else:
                running.append((load, attempt, left))
                continue
            ask(load, load.ways.ended(attempt, now))
    assert not under_way
    return ticks / 1000


@pytest.mark.parametrize("count", [2, 8, 16])
def test_loads_that_share_their_links_do_not_take_them_for_slow(count: int) -> None:
    speeds = {"a": 1e8, "b": 1e8, "c": 5e7}
    loads = [Load(["abc"] * 16) for _ in range(count)]
    took = together(loads, speeds)
    assert not any(load.unresponsive or load.missing() for load in loads)
    assert took < 1.2 * count * 16 * MIB / sum(speeds.values()) + 0.05
    for server, speed in speeds.items():
        rate = loads[0].ways.rates.rate(server)
        assert rate is not None
        assert 0.5 < rate / speed < 2, "the link's, not a read's share of it"


def test_a_load_takes_more_from_a_server_that_others_leave_alone() -> None:
    loads = [Load(["a"] * 32), Load(["a"] * 32), Load(["ab"] * 32)]
    together(loads, {"a": 1e8, "b": 1e8})
    assert loads[2].brought["b"] > 2 * loads[2].brought["a"]


def test_a_piece_is_small_where_many_loads_share_the_links() -> None:
    """What a way that freezes takes with it is a part of a hedge, as for a load alone."""
    loads = [Load(["ab"] * 256) for _ in range(8)]
    rates, under_way = ReadRates(), Counter[str]()
    for server in "ab":
        rates.record(server, 10**9, 1.0, 0.0)
    sizes = []
    for load in loads:
        load.ways.rates, load.ways.under_way = rates, under_way
        pieces = load.ways.begin(range(256), 0.0)
        assert len(pieces) == 2
        sizes.append(len(pieces[1].positions) * MIB)
    assert sizes[0] > 40 * MIB
    assert sizes[-1] <= 1e9 / 8 * HEDGE_S / 2 + MIB


def test_a_way_is_not_slow_because_other_loads_came() -> None:
    load = Load(["ab"] * 8, known={"a": 1e8, "b": 1e8})
    load.ask(load.ways.begin(range(8), 0.0))
    slow = load.log[0]
    assert slow.overdue is not None
    while others := [one for _, one in load.running if one is not slow]:
        load.end(others[0], [ReadResult(ReadStatus.HIT, MIB)] * len(others[0].positions))
    load.ways.under_way["a"] += 7
    assert not slow.overdue(HEDGE_S * 1.5)
    assert slow.overdue(HEDGE_S * 8)


def test_a_slow_way_is_left_also_by_loads_that_share_the_others() -> None:
    loads = [Load(["ab"] * 32) for _ in range(4)]
    took = together(loads, {"a": 1e8, "b": 1e6}, known={"a": 1e8, "b": 1e8})
    assert all("b" in load.unresponsive for load in loads)
    assert took < 4 * 32 * MIB / 1e8 + 4 * HEDGE_S


def test_random_loads_read_everything_and_nothing_twice() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        servers = "abcdef"[: rng.randint(1, 6)]
        candidates = [
            "".join(rng.sample(servers, rng.randint(1, len(servers))))
            for _ in range(rng.randint(1, 4))
        ]
        blocks = [one for one in candidates for _ in range(rng.randint(1, 60))]
        speeds = {one: rng.choice([0.0, 1e6, 1e7, 1e8, 1e9]) for one in servers}
        known = {one: rng.choice([1e6, 1e8, 1e9]) for one in servers if rng.random() < 0.7}
        size = rng.choice([1 << 16, MIB, 9 * MIB])
        load, cut = (Load(blocks, speeds, size=size, known=known) for _ in range(2))
        assert cut.ways.begin(range(len(blocks)), 0.0)
        cut.ways.close()
        assert not cut.ways.under_way, seed
        load.play()
        hits = [any(speeds[s] for s in one) for one in blocks]
        assert [one.status.hit for one in load.results] == hits, seed
        assert not load.ways._waiting, seed
        assert not any(load.ways._asked.values()), seed
        assert not load.ways._pieces, seed
