"""`kvpool replay --dry`: policies measured by the real store, without processes and bytes.

Store, policy and hints are those of a server; time is the trace's. Beside them stands MIN, the hit
rate that no policy can exceed. The rules: a hit is a block of the longest prefix that is here; then
the rest of the chain is written, as far as the whole store could hold it; the blocks of a request
stay until it is through.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from rich.table import Table

from kvpool import registry
from kvpool.errors import ConfigError, InvariantViolated
from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Policy
from kvpool.server.state.entry import Entry
from kvpool.server.state.store import Store
from kvpool.tools import cache_bounds, workloads
from kvpool.tools.workloads import Request
from kvpool.types import ROOT, Namespace, ReadStatus, SessionHint, WriteStatus

#: The name of the bound among the policies.
MIN = "MIN"
_HINTS = "+hints"
#: How well sessions know when they resume: sigma of a lognormal error, 95 % within a factor 1.6.
_HINT_SIGMA = 0.25

_NAMESPACE = Namespace("dry")
_OWNER = 1
#: Every block has this size; the store sees bytes, the result depends on how many blocks fit.
_SIZE = 4096

#: When the next prompt is expected, in seconds; None when this was the last one.
Foresight = Callable[[Request], float | None]


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What to play; capacities in blocks."""

    name: str
    requests: list[Request]
    policies: list[str]
    capacities: list[int]
    foresight: Foresight


@dataclass(frozen=True, slots=True)
class StudyRow:
    """What came of one policy at one capacity."""

    policy: str
    capacity: int
    hit_rate: float
    seconds: float
    evicted: int = 0
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Study:
    """All that was played of one workload."""

    name: str
    requests: int
    blocks: int
    ideal: float
    rows: list[StudyRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def rate(self, policy: str, capacity: int) -> float:
        """The hit rate of a policy that was played."""
        return next(
            row.hit_rate for row in self.rows if (row.policy, row.capacity) == (policy, capacity)
        )


def study(options: StudyOptions, progress: Callable[[str], None]) -> Study:
    """Play every policy at every capacity, LRU and the bound among them."""
    requests = options.requests
    done = Study(
        options.name, len(requests), workloads.blocks(requests), cache_bounds.ideal(requests)
    )
    for capacity in options.capacities:
        for name in dict.fromkeys(["lru", *options.policies, MIN]):
            row = _row(options, name, capacity)
            done.rows.append(row)
            progress(f"{name} at {capacity:,} blocks: {row.hit_rate:.2%} ({row.seconds:.0f} s)")
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
    policy: Policy[Entry],
    capacity: int,
    foresight: Foresight | None = None,
) -> tuple[int, Store]:
    """Blocks that were hit, and the store afterwards."""
    store = Store(capacity * _SIZE, alignment=_SIZE, policy=policy)
    hits = sum(_play_one(store, request, capacity, foresight) for request in requests)
    return hits, store


def hit_rate(requests: Sequence[Request], policy: str, capacity: int) -> float:
    """Of all blocks that are asked for, the share that is here. Raises ConfigError."""
    hits, _ = play(requests, registry.policy(policy, capacity * _SIZE), capacity)
    return hits / workloads.blocks(requests)


def _row(options: StudyOptions, name: str, capacity: int) -> StudyRow:
    started = time.monotonic()
    if name == MIN:
        rate = cache_bounds.belady(options.requests, capacity)
        return StudyRow(name, capacity, rate, time.monotonic() - started)
    policy = registry.policy(name.removesuffix(_HINTS), capacity * _SIZE)
    foresight = options.foresight if name.endswith(_HINTS) else None
    hits, store = play(options.requests, policy, capacity, foresight)
    rate = hits / workloads.blocks(options.requests)
    counters = {**store.hint_counters, "bypassed": store.bypassed}
    return StudyRow(name, capacity, rate, time.monotonic() - started, store.evicted, counters)


def _play_one(store: Store, request: Request, capacity: int, foresight: Foresight | None) -> int:
    now = request.time_s
    chain = [_digest(id) for id in request.chain]
    # Leaves go first, so what is here of a chain is a prefix: its length is found by bisection.
    held = bisect_left(chain, True, key=lambda digest: store.peek(_NAMESPACE, 0, digest) is None)
    pins = store.pin(_OWNER, _NAMESPACE, 0, chain[:held], now)
    if any(pin.status is not ReadStatus.HIT for pin in pins):
        raise InvariantViolated("a head was evicted before its tail")
    session_hint = None
    if foresight is not None:
        session_hint = SessionHint(str(request.session), foresight(request))
    fresh = chain[held:capacity]
    if fresh:
        parents = [chain[held - 1] if held else ROOT, *fresh[:-1]]
        sizes = [_SIZE] * len(fresh)
        for answer in store.reserve(
            _OWNER, ReserveRequest(_NAMESPACE, 0, fresh, parents, sizes, session_hint), now
        ):
            if answer.status is WriteStatus.RESERVED:
                store.seal(_OWNER, answer.id, 0, now)
    elif session_hint is not None and session_hint.resume_in is not None:
        store.resume(session_hint.session, session_hint.resume_in, now)
    if session_hint is not None and session_hint.resume_in is None:
        store.end(session_hint.session, now)
    for pin in pins:
        store.unpin(_OWNER, pin.id)
    store.take_changes()  # nobody listens
    return held


@lru_cache(maxsize=1 << 18)
def _digest(id: int) -> bytes:
    """Spread as real ones are: a policy may sample by them."""
    return hashlib.blake2b(id.to_bytes(8, "little"), digest_size=16).digest()


def options(
    *,
    name: str,
    requests: list[Request],
    policies: str,
    capacities: list[int],
    hints: bool,
    seed: int,
) -> StudyOptions:
    """From what a user says. With `hints`, each policy is played without and with them.

    Of one policy only `lease+hints` asks for the same.

    Raises ConfigError.
    """
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
    return StudyOptions(name, requests, wanted, capacities, noisy(_HINT_SIGMA, seed))


def table(done: Study) -> Table:
    """Hit rates by capacity; with LRU, how much of the way from it to the bound."""
    shown = Table(
        title=f"{done.name}: {done.requests:,} requests, {done.blocks:,} blocks, "
        f"at most {done.ideal:.1%} can hit"
    )
    shown.add_column("policy")
    capacities = list(dict.fromkeys(row.capacity for row in done.rows))
    for capacity in capacities:
        shown.add_column(f"{capacity:,} blocks", justify="right")
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
