"""What a policy costs: time for each touched block, memory for each block that is here.

Time is what the processor spends inside the policy's methods while a real store writes chains into
a full segment and reads them, less what looking at the clock takes. Memory is what its modules hold
when as many blocks have left as there are, so that ghosts are counted.
"""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console

from kvpool import registry
from kvpool.ops import process
from kvpool.protocols import ReserveRequest
from kvpool.server.eviction import (
    arc,
    density,
    lazy_heap,
    lease,
    lru,
    programs,
    session,
    session_announcements,
    session_branches,
    session_hints,
)
from kvpool.server.eviction.session_hints import SessionAwarePolicy
from kvpool.server.state.store import Store
from kvpool.tools.bench import Row, table
from kvpool.types import ROOT, Namespace, SessionHint, WriteStatus

NAMESPACE = Namespace("bench")
PAGE = 4096
CHAIN = 100
#: Of a block: last_used, is_candidate, policy_data, session, superseded_at.
SLOTS_BYTES = 5 * 8
T = TypeVar("T")


def measure(blocks: int) -> list[Row]:
    """Each policy, without and with hints, in a store of `blocks` blocks."""
    process.freeze_gc()
    rows: list[Row] = []
    for name in ("lru", "arc", "lease", "density", "programs"):
        for hinted in (False, True):
            label = f"{name}, hints" if hinted else name
            write_us, read_us = cost(name, blocks, hinted)
            what = f"policy {label}: a touched block"
            rows.append(Row(what, f"{read_us:.2f} us", "", None, "<= 5 us", read_us <= 5))
            what = f"policy {label}: a block written and one evicted for it"
            rows.append(Row(what, f"{write_us:.2f} us", "", None, "report", None))
            used = memory(name, blocks, hinted)
            what = f"policy {label}: memory per block"
            rows.append(Row(what, f"{used:.0f} bytes", "", None, "<= 200", used <= 200))
    return rows


def cost(name: str, blocks: int, hinted: bool) -> tuple[float, float]:
    """Microseconds inside the policy: per block written into a full store, per block read."""
    store = _store(name, blocks)
    chains = list(_chains(blocks))
    _write(store, chains, 0.0, hinted)
    meter = Meter()
    policy = store.extents.policy
    assert isinstance(policy, SessionAwarePolicy)
    policy.touch = meter.timed(policy.touch)
    for method in (
        "add_candidate",
        "remove",
        "victim",
        "begin_write",
        "block_added",
        "end_write",
    ):
        setattr(policy, method, meter.timed(getattr(policy, method)))
    _write(store, list(_chains(blocks)), 1e4, hinted)
    written_us = meter.take() * 1e6 / blocks
    now, count = 2e4, 0
    for chain in [entry.digest for entry in store.index.inventory()][:: CHAIN // 10]:
        now += 0.1
        for pin in store.pin(1, NAMESPACE, 0, [chain], now):
            store.unpin(1, pin.id)
            count += 1
    return written_us, meter.take() * 1e6 / count


def memory(name: str, blocks: int, hinted: bool) -> float:
    """Bytes that the policy holds for each block."""
    tracemalloc.start()
    store = _store(name, blocks)
    _write(store, _chains(2 * blocks), 0.0, hinted)
    hints = (session, session_announcements, session_branches, session_hints)
    files = [
        tracemalloc.Filter(True, module.__file__ or "")
        for module in (*hints, lru, lazy_heap, arc, lease, density, programs)
    ]
    held = tracemalloc.take_snapshot().filter_traces(files)
    tracemalloc.stop()
    size = sum(trace.size for trace in held.traces)
    return size / store.index.stored + SLOTS_BYTES


def _store(name: str, blocks: int) -> Store:
    return Store(blocks * PAGE, policy=registry.policy(name, blocks * PAGE))


def _chains(blocks: int) -> Iterator[list[bytes]]:
    for _ in range(0, blocks, CHAIN):
        yield [os.urandom(32) for _ in range(CHAIN)]


def _write(
    store: Store, chains: Iterator[list[bytes]] | list[list[bytes]], now: float, hinted: bool
) -> None:
    for number, chain in enumerate(chains):
        now += 0.1
        session_hint = SessionHint(f"{now}", 5.0 + number % 60) if hinted else None
        sizes = [PAGE] * len(chain)
        parents = [ROOT, *chain[:-1]]
        for answer in store.reserve(
            1, ReserveRequest(NAMESPACE, 0, chain, parents, sizes, session_hint), now
        ):
            if answer.status is WriteStatus.RESERVED:
                store.seal(1, answer.id, 0, now)
        store.index.change_log.take()


class Meter:
    """Adds up what calls take, in seconds of this thread's processor time."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._calls = 0
        self._clock_s = 0.0
        empty = self.timed(lambda: None)
        for _ in range(50_000):
            empty()
        self._clock_s = self.take() / 50_000

    def timed(self, method: Callable[..., T]) -> Callable[..., T]:
        clock = time.thread_time

        def timed(*arguments: object, **named: object) -> T:
            started = clock()
            try:
                return method(*arguments, **named)
            finally:
                self._spent += clock() - started
                self._calls += 1

        return timed

    def take(self) -> float:
        """What has come together, less what the clock itself took."""
        spent = self._spent - self._calls * self._clock_s
        self._spent, self._calls = 0.0, 0
        return spent


if __name__ == "__main__":
    Console(width=None if sys.stdout.isatty() else 140).print(table(measure(10_000)))
