"""`kvpool replay --dry`: policies measured by the real stores, without processes and bytes.

The pool is a `DryPool`: what it is made of is the code of the product; time is the trace's. Beside
it stands MIN, the hit rate that no policy can exceed in one store. The rules: a hit is a block of
the longest prefix that is here; then the rest of the chain is written; the blocks of a request stay
until it is through.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from kvpool import registry
from kvpool.errors import ConfigError
from kvpool.tools import cache_bounds, workloads
from kvpool.tools.dry_pool import DryPool, Foresight, PolicyOf
from kvpool.tools.traces import Request
from kvpool.types import WriteStatus

#: The name of the bound among the policies.
MIN = "MIN"
_HINTS = "+hints"
#: How well sessions know when they resume: sigma of a lognormal error, 95 % within a factor 1.6.
_HINT_SIGMA = 0.25
#: After these shares of the requests the loss of each server is measured.
_LOSSES_AT = (0.4, 0.6, 0.8)


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What to play; capacities in blocks."""

    name: str
    requests: list[Request]
    policies: list[str]
    capacities: list[int]
    foresight: Foresight
    servers: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class StudyRow:
    """What came of one policy at one capacity, on so many servers.

    `usable_worst` and `usable_mean` are the shares of the living prefixes' blocks that can be read
    when one of the servers is lost; `place_us` is the median time of one placement.
    """

    policy: str
    capacity: int
    hit_rate: float
    seconds: float
    servers: int = 1
    evicted: int = 0
    usable_worst: float = 0.0
    usable_mean: float = 0.0
    servers_per_chain: float = 1.0
    place_us: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Study:
    """All that was played of one workload. Equal for one seed, but for `seconds` and `place_us`."""

    name: str
    requests: int
    blocks: int
    ideal: float
    working_set: int
    working_set_peak: int
    rows: list[StudyRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def rate(self, policy: str, capacity: int, servers: int | None = None) -> float:
        """The hit rate of a policy that was played; without `servers`, on the first number."""
        return next(
            row.hit_rate
            for row in self.rows
            if (row.policy, row.capacity) == (policy, capacity) and servers in (None, row.servers)
        )


def study(options: StudyOptions, progress: Callable[[str], None]) -> Study:
    """Play every policy at every capacity, LRU and the bound among them."""
    requests = options.requests
    done = Study(
        options.name,
        len(requests),
        workloads.blocks(requests),
        cache_bounds.ideal(requests),
        cache_bounds.working_set(requests),
        cache_bounds.working_set_peak(requests),
    )
    for capacity in options.capacities:
        for name in dict.fromkeys(["lru", *options.policies, MIN]):
            for servers in options.servers if name != MIN else (1,):
                row = _row(options, name, capacity, servers)
                done.rows.append(row)
                progress(
                    f"{name} at {capacity:,} blocks on {servers}: {row.hit_rate:.2%} "
                    f"({row.seconds:.0f} s)"
                )
    return done


def noisy(sigma: float, seed: int) -> Foresight:
    """Users who know when they come back, with a lognormal error; the same for the same seed."""

    def foresee(request: Request) -> float | None:
        if request.resumes_s is None:
            return None
        rng = random.Random(f"{seed}/{request.session}/{request.time_s}")
        return request.resumes_s * math.exp(rng.gauss(0, sigma))

    return foresee


def play(
    requests: Sequence[Request],
    policy: PolicyOf,
    capacity: int,
    foresight: Foresight | None = None,
    *,
    servers: int = 1,
    hosts: int = 0,
    heartbeat_s: float = 1.0,
) -> DryPool:
    """The pool after all requests. With more servers, losses were measured on the way."""
    pool = DryPool(servers, capacity, policy, hosts, heartbeat_s)
    losses_at = {int(len(requests) * share) for share in _LOSSES_AT} if servers > 1 else set()
    for number, request in enumerate(requests):
        if number in losses_at:
            pool.lose_each(requests[number:])
        pool.play(request, foresight)
    return pool


def real_hit_rate(
    requests: Sequence[Request],
    policy: str,
    capacity: int,
    *,
    servers: int,
    seconds: float,
    heartbeat_s: float,
) -> float:
    """The hit rate of a real pool on one host that plays all requests in so many seconds.

    Raises ConfigError.
    """
    pace_s = seconds / len(requests)
    paced = [request._replace(time_s=n * pace_s) for n, request in enumerate(requests)]
    pool = play(
        paced, _policy_of(policy), capacity, servers=servers, hosts=1, heartbeat_s=heartbeat_s
    )
    return workloads.hit_rate(pool.played.hits, requests)


def _policy_of(name: str) -> PolicyOf:
    return lambda size: registry.policy(name, size)


def _row(options: StudyOptions, name: str, capacity: int, servers: int) -> StudyRow:
    started = time.monotonic()
    if name == MIN:
        rate = cache_bounds.belady(options.requests, capacity)
        return StudyRow(name, capacity, rate, time.monotonic() - started)
    foresight = options.foresight if name.endswith(_HINTS) else None
    policy = _policy_of(name.removesuffix(_HINTS))
    pool = play(options.requests, policy, capacity, foresight, servers=servers)
    played, stores = pool.played, pool.stores
    counters: dict[str, int] = {}
    for store in stores:
        for counter, count in store.extents.policy.figures.items():
            counters[counter] = counters.get(counter, 0) + count
    counters["bypassed"] = played.statuses[WriteStatus.BYPASSED]
    return StudyRow(
        name,
        capacity,
        workloads.hit_rate(played.hits, options.requests),
        time.monotonic() - started,
        servers,
        sum(store.extents.evicted for store in stores),
        min((loss.worst for loss in played.losses), default=0.0),
        statistics.fmean([loss.mean for loss in played.losses] or [0.0]),
        played.servers_of_hits / max(1, played.hit_prompts),
        statistics.median(played.place_s or [0.0]) * 1e6,
        counters,
    )


def options(
    *,
    name: str,
    requests: list[Request],
    policies: str,
    capacities: list[int],
    hints: bool,
    seed: int,
    servers: Sequence[int] = (1,),
) -> StudyOptions:
    """From what a user says. With `hints`, each policy is played without and with them.

    Of one policy only `lease+hints` asks for the same.

    Raises ConfigError.
    """
    for count in servers:
        if any(capacity < count for capacity in capacities):
            raise ConfigError(
                f"{min(capacities)} blocks over {count} servers: expected one on each"
            )
    wanted = [one.strip() for one in policies.split(",") if one.strip()]
    known = registry.installed(registry.POLICIES)
    for one in wanted:
        if one.removesuffix(_HINTS) not in known:
            raise ConfigError(f"no policy {one!r} is installed: have {sorted(known)}")
    if hints:
        wanted += [f"{one}{_HINTS}" for one in wanted if not one.endswith(_HINTS)]
    if any(one.endswith(_HINTS) for one in wanted) and all(
        request.resumes_s is None for request in requests
    ):
        raise ConfigError("hints need sessions, and this trace names none")
    foresight = noisy(_HINT_SIGMA, seed)
    return StudyOptions(name, requests, wanted, capacities, foresight, tuple(servers))


def tables(done: Study) -> list[Table]:
    """The result, for a terminal."""
    if all(row.servers == 1 for row in done.rows):
        return [_policy_table(done)]
    return [_server_table(done, one) for one in dict.fromkeys(row.capacity for row in done.rows)]


def _server_table(done: Study, capacity: int) -> Table:
    """One capacity, by policy and number of servers."""
    shown = Table(
        title=f"{done.name}: {done.requests:,} requests, {capacity:,} blocks in all servers, "
        f"{capacity / max(1, done.working_set):.2f} ws",
        caption=f"left without one, at worst: blocks of living prefixes that can be read when one "
        f"server is lost, mean and worst; fair: 1 - 1/servers. servers per chain: that one prompt "
        f"is read from. place: median time of one placement. {_working_set(done)}",
        caption_justify="left",
    )
    for name in ("policy", "servers", "hit rate", "left without one", "at worst", "fair"):
        shown.add_column(name, justify="left" if name == "policy" else "right")
    shown.add_column("servers per chain", justify="right")
    shown.add_column("place", justify="right")
    for row in done.rows:
        if row.capacity != capacity:
            continue
        cells = [row.policy, f"{row.servers}", f"{row.hit_rate:.2%}"]
        if row.policy == MIN:
            cells[0] = "MIN, the exact bound"
        elif row.servers > 1:
            cells += [f"{row.usable_mean:.1%}", f"{row.usable_worst:.1%}"]
            cells += [f"{1 - 1 / row.servers:.1%}", f"{row.servers_per_chain:.2f}"]
            cells.append(f"{row.place_us:.0f} us")
        shown.add_row(*cells)
    return shown


def _working_set(done: Study) -> str:
    return (
        f"ws, the working set: {done.working_set:,} blocks between their first and their last use, "
        "the mean over the middle half of the time, as the live working set of `kvpool status`; at "
        f"its most {done.working_set_peak:,}. A load that grows needs 1.25 of its most."
    )


def _policy_table(done: Study) -> Table:
    """Hit rates by capacity; with LRU, how much of the way from it to the bound."""
    shown = Table(
        title=f"{done.name}: {done.requests:,} requests, {done.blocks:,} blocks, "
        f"at most {done.ideal:.1%} can hit",
        caption="blocks found, of all that were asked for; in brackets how much of the way from "
        f"lru to MIN, which no policy can exceed. {_working_set(done)}",
        caption_justify="left",
    )
    shown.add_column("policy")
    capacities = list(dict.fromkeys(row.capacity for row in done.rows))
    for capacity in capacities:
        share = capacity / max(1, done.working_set)
        shown.add_column(f"{capacity:,} blocks\n{share:.2f} ws", justify="right")
    for policy in dict.fromkeys(row.policy for row in done.rows):
        cells = []
        for capacity in capacities:
            lru, best = done.rate("lru", capacity), done.rate(MIN, capacity)
            rate = done.rate(policy, capacity)
            way = (rate - lru) / (best - lru) if best - lru > 0.0005 else 1.0
            inner = policy not in ("lru", MIN)
            cells.append(f"{rate:.2%}" + (f" ({way:+.0%})" if inner else ""))
        shown.add_row("MIN, the exact bound" if policy == MIN else policy, *cells)
    return shown
