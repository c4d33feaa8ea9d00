"""What arrivals bring: agents' sessions in a closed loop, before engines whose queues grow.

    python -m benchmarks.queues --concurrent 64 --engines 1 --blocks 3300

The store, its policy and its hints are real; time is virtual. A session's next prompt comes a pause
after its last answer, waits in one queue for a free engine, and computes what the store does not
have. So misses lengthen the queue, the queue lengthens the time between two uses of a block, and a
policy that is too small for that misses again (design: session-hints).
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from kvpool import registry
from kvpool.protocols import ReserveRequest
from kvpool.server.state.store import Store
from kvpool.tools import workloads
from kvpool.tools.traces import Request
from kvpool.types import ARRIVED, ROOT, Namespace, SessionHint, WriteStatus

BLOCK, PAGE, NAMESPACE, OWNER = 512, 4096, Namespace("queues"), 1
#: Seconds to compute a prompt: a fixed part, and operations for each token and each token of its
#: context (Kimi-K2.5), over what four GB200 do in a second.
FIXED_S, PER_TOKEN, PER_CONTEXT, SPEED = 0.06, 66.2e9, 2.5e6, 3.86e15
REPEAT_S, WARM_S, ETA_SIGMA = 60.0, 300.0, 0.25


class Result(NamedTuple):
    """Of the time after `WARM_S`; the wait in the queue is the median."""

    hit_rate: float
    prompts_per_s: float
    wait_s: float


class Fleet:
    """Sessions, a queue, engines and one store."""

    def __init__(self, requests: list[Request], policy: str, blocks: int, engines: int) -> None:
        self.store = Store(
            blocks * PAGE, alignment=PAGE, policy=registry.policy(policy, blocks * PAGE)
        )
        self.turns: dict[int, deque[Request]] = {}
        for request in requests:
            self.turns.setdefault(request.session, deque()).append(request)
        self.next_sessions = iter(list(self.turns))
        self.free = engines
        self.queue: deque[tuple[Request, float]] = deque()
        self.hits = self.asked = self.served = 0
        self.waits: list[float] = []
        self.rng = random.Random(1)
        self.pause_s = self.sigma = 0.0  # other pauses than those of the workload
        self.events: list[tuple[float, int, str, tuple[object, ...]]] = []

    def play(self, concurrent: int, *, hints: bool, etas: bool, arrivals: bool) -> Result:
        self.hints, self.etas, self.arrivals = hints, etas, arrivals and hints
        for _ in range(concurrent):
            self._begin_session(self.rng.random() * 60.0)
        now = 0.0
        while self.events:
            now, _, kind, arguments = heapq.heappop(self.events)
            getattr(self, f"_on_{kind}")(now, *arguments)
        self.waits.sort()
        return Result(self.hits / self.asked, self.served / now, self.waits[len(self.waits) // 2])

    def _at(self, time: float, kind: str, *arguments: object) -> None:
        heapq.heappush(self.events, (time, self.rng.getrandbits(60), kind, arguments))

    def _begin_session(self, now: float) -> None:
        session = next(self.next_sessions, None)
        if session is not None:
            self._at(now, "arrival", self.turns[session].popleft())

    def _on_arrival(self, now: float, request: Request) -> None:
        self.queue.append((request, now))
        self._on_repeat(now, request, now)
        self._serve(now)

    def _on_repeat(self, now: float, request: Request, arrived: float) -> None:
        if (request, arrived) in self.queue:
            if self.arrivals:
                self.store.hint(str(request.session), ARRIVED, now)
            self._at(now + REPEAT_S, "repeat", request, arrived)

    def _serve(self, now: float) -> None:
        while self.free and self.queue:
            request, arrived = self.queue.popleft()
            self.free -= 1
            self.waits.append(now - arrived)
            chain = [digest(id) for id in request.chain]
            held = next(
                (n for n, d in enumerate(chain) if self.store.index.peek(NAMESPACE, 0, d) is None),
                len(chain),
            )
            pins = self.store.pin(OWNER, NAMESPACE, 0, chain[:held], now)
            if now > WARM_S:
                self.hits, self.asked = self.hits + held, self.asked + len(chain)
            before, fresh = held * BLOCK, max(1, (len(chain) - held) * BLOCK)
            work = PER_TOKEN * fresh + PER_CONTEXT * fresh * (before + fresh / 2)
            ids = [pin.id for pin in pins]
            self._at(now + FIXED_S + work / SPEED, "computed", request, chain, held, ids)

    def _on_computed(
        self, now: float, request: Request, chain: list[bytes], held: int, pins: list[int]
    ) -> None:
        name, hint = str(request.session), None
        if self.hints:
            eta = request.resumes_s if self.etas else None
            error = math.exp(self.rng.gauss(0.0, ETA_SIGMA))
            hint = SessionHint(name, eta * error if eta is not None else None)
        fresh = chain[held:]
        if fresh:
            parents = [chain[held - 1] if held else ROOT, *fresh[:-1]]
            wanted = ReserveRequest(NAMESPACE, 0, fresh, parents, [PAGE] * len(fresh), hint)
            for answer in self.store.reserve(OWNER, wanted, now):
                if answer.status is WriteStatus.RESERVED:
                    self.store.seal(OWNER, answer.id, 0, now)
        for pin in pins:
            self.store.unpin(OWNER, pin)
        self.store.index.change_log.take()
        self.free, self.served = self.free + 1, self.served + 1
        if request.resumes_s is not None:
            pause_s = request.resumes_s
            if self.pause_s:
                pause_s = self.pause_s * math.exp(self.rng.gauss(0.0, self.sigma))
            self._at(now + pause_s, "arrival", self.turns[request.session].popleft())
        else:
            if self.hints:
                self.store.hint(name, None, now)
            self._begin_session(now + 5.0)
        self._serve(now)


@lru_cache(maxsize=1 << 18)
def digest(id: int) -> bytes:
    return hashlib.blake2b(id.to_bytes(8, "little"), digest_size=16).digest()


def rows(wanted: argparse.Namespace) -> Iterator[str]:
    """Each policy without and with arrivals."""
    requests = workloads.codex(wanted.sessions, wanted.concurrent)
    for policy, hints, etas in (
        ("lru", False, False),
        ("lru", True, False),
        ("lease", True, False),
        ("lease", True, True),
    ):
        for arrivals in (False, True) if hints else (False,):
            fleet = Fleet(requests, policy, wanted.blocks, wanted.engines)
            fleet.pause_s, fleet.sigma = wanted.pause_s, wanted.sigma
            result = fleet.play(wanted.concurrent, hints=hints, etas=etas, arrivals=arrivals)
            what = f"{policy}{', ends' * hints}{', resume_in' * etas}{', arrivals' * arrivals}"
            yield (
                f"{what:32s} {result.hit_rate:6.1%} hit, {result.prompts_per_s:5.2f} prompts/s, "
                f"{result.wait_s:6.1f} s in the queue"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queues")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=130)
    parser.add_argument("--blocks", type=int, default=3300)
    parser.add_argument("--pause-s", type=float, default=0.0, help="median; 0: as the workload")
    parser.add_argument("--sigma", type=float, default=0.4, help="of the pauses' logarithm")
    for row in rows(parser.parse_args()):
        print(row, flush=True)


if __name__ == "__main__":
    main()
