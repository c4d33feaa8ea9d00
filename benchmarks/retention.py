"""What better knowledge of sessions and of kinds of blocks is worth, in the real store.

    python -m benchmarks.retention pauses
    python -m benchmarks.retention kinds --block-tokens 512 --sessions 60 --concurrent 24
    python -m benchmarks.retention kinds --workload fanout
    python -m benchmarks.retention kinds --trace conversation_trace.jsonl --limit 3000
    python -m benchmarks.retention names

`pauses`: resume hints that are learned from each session's own pauses, as the connector's
middleware does, beside none and beside sessions that know. The agents of this workload differ in
how long their tools take (`--spread`, the sigma of a lognormal factor for each session).

`kinds`: blocks that are tagged in advance by an oracle. `system` is what a twentieth of the
sessions share; it stays, up to a tenth of the memory. `scratch` is what one prompt contains and no
later one of its session; it leaves first. No client could know this much, so what is gained here is
the most that such tags can gain. Only full blocks count, as the connector saves no others.

`names`: two sessions with one name.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator

from kvpool import registry
from kvpool.protocols.policy import Decision, Policy
from kvpool.server.state.entry import Entry
from kvpool.tools import cache_bounds, policy_study, traces, workloads
from kvpool.tools.dry_pool import BLOCK_SIZE, Foresight, digest_of
from kvpool.tools.traces import Request
from kvpool_agents.pauses import Answer, Pauses

#: Share of the sessions that must use a block before it counts as `system`.
SHARED_BY = 0.05
SYSTEM_BUDGET = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["pauses", "kinds", "names"])
    parser.add_argument("--trace")
    parser.add_argument("--format", default=traces.AUTO, help=f"of the trace: {traces.NAMES}")
    parser.add_argument("--workload", choices=["codex", "fanout"], default="codex")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--block-tokens", type=int, default=2048)
    parser.add_argument("--spread", type=float, default=1.0)
    parser.add_argument("--policies", default="lru,lease")
    parser.add_argument("--shares", default="0.5,0.75,0.9,1.1")
    given = parser.parse_args()
    if given.trace:
        requests = traces.load(given.trace, given.format).requests
    elif given.workload == "fanout":
        requests = workloads.fan_out(given.sessions // 5, 12, block=given.block_tokens)
    else:
        requests = workloads.codex(given.sessions, given.concurrent, block=given.block_tokens)
    if given.what == "pauses":
        requests = list(spread(requests, given.spread))
    requests = [one._replace(chain=one.chain[:-1]) for one in requests[: given.limit]]
    requests = [one for one in requests if one.chain]
    if not requests:
        raise SystemExit("error: no prompt has a whole block besides its last one")
    working_set = cache_bounds.working_set(requests)
    print(f"{len(requests):,} requests, working set {working_set:,} blocks")
    ways: dict[str, dict[str, Way]] = {
        "pauses": {"none": plain, "names": sessions_only, "learned": learned, "known": known},
        "kinds": {
            "plain": sessions_only,
            "system kept": lambda *a: tagged(*a, keep=True),
            "scratch first": lambda *a: tagged(*a, drop=True),
        },
        "names": {"alone": sessions_only, "two share a name": shared_names},
    }
    for share in map(float, given.shares.split(",")):
        for policy in given.policies.split(","):
            print(f"{share:<5}{policy:8}", end="", flush=True)
            for name, way in ways[given.what].items():
                rate = way(requests, policy, int(working_set * share))
                print(f"{name} {rate:.2%}", end="   ", flush=True)
            print()


def spread(requests: list[Request], sigma: float) -> Iterator[Request]:
    """The same sessions, each with pauses longer or shorter by a factor of its own."""
    factors: dict[int, float] = {}
    begins: dict[int, float] = {}
    shifted = []
    for request in requests:
        session = request.session
        factor = factors.setdefault(session, random.Random(session).lognormvariate(0, sigma))
        now = begins.setdefault(session, request.time_s)
        resumes_s = None if request.resumes_s is None else request.resumes_s * factor
        shifted.append(request._replace(time_s=now, resumes_s=resumes_s))
        begins[session] = now + (resumes_s or 0.0)
    yield from sorted(shifted, key=lambda request: request.time_s)


def hit_rate(
    requests: list[Request], policy: MakePolicy, blocks: int, foresight: Foresight | None
) -> float:
    pool = policy_study.play(requests, policy, blocks, foresight)
    return workloads.hit_rate(pool.played.hits, requests)


MakePolicy = Callable[[int], Policy[Entry]]
Way = Callable[[list[Request], str, int], float]


def policy_of(name: str) -> MakePolicy:
    return lambda size: registry.policy(name, size)


def unsure(request: Request) -> float | None:
    """The session goes on; when, it does not say."""
    return math.inf


def plain(requests: list[Request], policy: str, blocks: int) -> float:
    return hit_rate(requests, policy_of(policy), blocks, None)


def known(requests: list[Request], policy: str, blocks: int) -> float:
    return hit_rate(requests, policy_of(policy), blocks, policy_study.noisy(0.25, 1))


def learned(requests: list[Request], policy: str, blocks: int) -> float:
    """No session says when it resumes, and none that it ends."""
    pauses = Pauses()

    def foresee(request: Request) -> float | None:
        name = str(request.session)
        pauses.on_prompt(name, request.time_s)
        expected = pauses.on_answer(name, Answer.TOOL_CALL, request.time_s).resume_in_s
        return math.inf if expected is None else expected

    return hit_rate(requests, policy_of(policy), blocks, foresee)


def sessions_only(requests: list[Request], policy: str, blocks: int) -> float:
    """Sessions have names, and say no more."""
    return hit_rate(requests, policy_of(policy), blocks, unsure)


def shared_names(requests: list[Request], policy: str, blocks: int) -> float:
    halved = [request._replace(session=request.session // 2) for request in requests]
    return sessions_only(halved, policy, blocks)


def tagged(
    requests: list[Request], policy: str, blocks: int, *, keep: bool = False, drop: bool = False
) -> float:
    kinds = kinds_of(requests)

    def made(size: int) -> Policy[Entry]:
        return Tagged(registry.policy(policy, size), kinds, int(size * SYSTEM_BUDGET), keep, drop)

    return hit_rate(requests, made, blocks, unsure)


class Tagged:
    """A policy with tags: `scratch` leaves first, and `system` last, up to its budget."""

    def __init__(
        self, policy: Policy[Entry], kinds: dict[bytes, str], budget: int, keep: bool, drop: bool
    ) -> None:
        self._policy, self._kinds = policy, kinds
        self._kept_max = budget // BLOCK_SIZE
        self._keep, self._drop = keep, drop
        self._kept: OrderedDict[Entry, None] = OrderedDict()
        self._scratch: OrderedDict[Entry, None] = OrderedDict()
        self.touch = policy.touch

    def add_candidate(self, block: Entry) -> None:
        kind = self._kinds.get(block.digest)
        if kind == "scratch" and self._drop:
            self._scratch[block] = None
        elif kind == "system" and self._keep and len(self._kept) < self._kept_max:
            self._kept[block] = None
        else:
            self._policy.add_candidate(block)
            return
        block.is_candidate = True

    def remove(self, block: Entry) -> None:
        if block in self._scratch or block in self._kept:
            self._scratch.pop(block, None)
            self._kept.pop(block, None)
            block.is_candidate = False
        else:
            self._policy.remove(block)

    def victim(
        self, newcomer: Entry, evictable: Callable[[Entry], bool], now: float
    ) -> Entry | Decision | None:
        if (found := self._next(self._scratch, evictable)) is not None:
            return found
        found_inside = self._policy.victim(newcomer, evictable, now)
        return found_inside if found_inside is not None else self._next(self._kept, evictable)

    def _next(
        self, tagged_blocks: OrderedDict[Entry, None], evictable: Callable[[Entry], bool]
    ) -> Entry | None:
        while tagged_blocks:
            block, _ = tagged_blocks.popitem(last=False)
            block.is_candidate = False
            if evictable(block):
                return block
        return None

    def victim_age(self, now: float) -> float:
        return self._policy.victim_age(now)


def kinds_of(requests: list[Request]) -> dict[bytes, str]:
    """What an oracle tags: shared by many, and in one prompt alone that is not its session's last.

    In a trace that names no sessions, `scratch` is all that no later prompt contains.
    """
    users: dict[int, set[int]] = defaultdict(set)
    uses: Counter[int] = Counter()
    last: dict[int, tuple[int, ...]] = {}
    for request in requests:
        uses.update(request.chain)
        last[request.session] = request.chain
        for id in request.chain:
            users[id].add(request.session)
    if any(request.resumes_s for request in requests):
        uses.update(id for chain in last.values() for id in chain)
    kinds = {digest_of(id): "scratch" for id, count in uses.items() if count == 1}
    for id, sessions in users.items():
        if len(sessions) >= max(2, len(last) * SHARED_BY):
            kinds[digest_of(id)] = "system"
    return kinds


if __name__ == "__main__":
    main()
