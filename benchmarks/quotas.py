"""A tenant inside its guarantee beside one that writes at full speed: what its hit rate is worth.

The real store in virtual time: so the result is the same on every machine.

    python -m benchmarks.quotas
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from kvpool import registry
from kvpool.protocols import ReserveRequest
from kvpool.server.state.quota import Quota
from kvpool.server.state.store import Store
from kvpool.server.state.tenants import account_of, set_quotas
from kvpool.types import ROOT, Namespace, SessionHint, WriteStatus

BLOCK: Final = 4096
BLOCKS: Final = 8_000
#: The tenant's sessions have 25 % of the store, and 30 % are guaranteed.
SESSIONS: Final = 20
CHAIN: Final = 100
GUARANTEED: Final = 0.30
TURNS: Final = 450
#: Blocks that the other tenant writes in the second between two turns: all of the store in 20 s.
HOG_BLOCKS: Final = 400
ACME, HOG = Namespace("@acme/llm"), Namespace("@hog/llm")


class Outcome(NamedTuple):
    hit_rate: float
    hog_stored: float  # of what it wrote
    evicted_by_hog: int  # the tenant's blocks


def play(policy: str, *, hog: bool, quota: bool, hints: bool = False) -> Outcome:
    """Turns of the tenant; with `hog` beside it, which may announce that it needs all it wrote."""
    store = Store(BLOCKS * BLOCK, policy=registry.policy(policy, BLOCKS * BLOCK))
    guaranteed = int(GUARANTEED * BLOCKS * BLOCK) if quota else 0
    set_quotas(store, {"acme": Quota(guaranteed), "hog": Quota()})
    rng, hog_rng = random.Random(7), random.Random(8)
    chains = [_chain(rng) for _ in range(SESSIONS)]
    hits = asked = stored = wrote = 0
    for turn in range(TURNS):
        now = float(turn)
        if rng.random() < 0.05:  # a session ends, and another one begins
            chains[rng.randrange(SESSIONS)] = _chain(rng)
        chain = rng.choice(chains)
        found = _read(store, ACME, chain, now)
        if turn >= TURNS // 3:  # the store is full, and every session has come
            hits, asked = hits + found, asked + len(chain)
        _write(store, ACME, chain, now)
        for n in range(HOG_BLOCKS // CHAIN if hog else 0):
            name = f"@hog/{turn}.{n}"
            statuses = _write(store, HOG, _chain(hog_rng), now + 0.5, SessionHint(name))
            wrote += len(statuses)
            stored += sum(status is WriteStatus.RESERVED for status in statuses)
            if hints:
                store.hint(name, 30.0, now + 0.5)
    account = account_of(store, "acme")
    lost = account.evicted_by["hog"] // BLOCK if account is not None else 0
    return Outcome(hits / asked, stored / max(1, wrote), lost)


def _chain(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(32) for _ in range(CHAIN)]


def _read(store: Store, namespace: Namespace, chain: list[bytes], now: float) -> int:
    pins = store.pin(2, namespace, 0, chain, now)
    held = [pin.id for pin in pins if pin.id]
    for id in held:
        store.unpin(2, id)
    return len(held)


def _write(
    store: Store,
    namespace: Namespace,
    chain: list[bytes],
    now: float,
    session: SessionHint | None = None,
) -> list[WriteStatus]:
    parents = [ROOT, *chain[:-1]]
    request = ReserveRequest(namespace, 0, chain, parents, [BLOCK] * len(chain), session)
    answers = store.reserve(1, request, now)
    for answer in answers:
        if answer.status is WriteStatus.RESERVED:
            store.seal(1, answer.id, 0, now)
    return [answer.status for answer in answers]


def main() -> None:
    table = Table(box=None)
    for name in ("policy", "beside it", "hit rate", "its blocks that went for the other"):
        table.add_column(name)
    table.add_column("of the other's blocks stored")
    for policy in ("lru", "arc", "lease", "density"):
        for label, outcome in (
            ("nobody", play(policy, hog=False, quota=True)),
            ("a hog, guaranteed 30 %", play(policy, hog=True, quota=True)),
            ("a hog with hints, guaranteed 30 %", play(policy, hog=True, quota=True, hints=True)),
            ("a hog, nothing guaranteed", play(policy, hog=True, quota=False)),
        ):
            lost, kept = f"{outcome.evicted_by_hog:,}", f"{outcome.hog_stored:.0%}"
            table.add_row(policy, label, f"{outcome.hit_rate:.2%}", lost, kept)
    Console().print(table)


if __name__ == "__main__":
    main()
