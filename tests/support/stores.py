"""Blocks of a store without a server, written and read in one line each."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.protocols import ReserveRequest
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.store import Store
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, ReadStatus, SessionHint, WriteStatus

PAGE = 4096
ONE = Namespace("one")
#: Of each block, two parts.
TWO = Namespace("two", parts=2)

AnyStore = Store | TieredStore | Blocks


def write(
    store: AnyStore,
    chain: Sequence[bytes],
    now: float,
    *,
    parent: bytes = ROOT,
    session: str = "",
    resume_in: float | None = None,
    namespace: Namespace = ONE,
    part: int = 0,
    last_used: float | None = None,
    copies: int | None = None,
    owner: int = 1,
    apart: bool = False,
    check: bool = True,
) -> list[WriteStatus]:
    """Pages of a chain, or each of its own, reserved and sealed; the store is checked then.

    `last_used`: they are fetched from another server, where they were used at that time.
    """
    hint = SessionHint(session, resume_in) if session else None
    used = None if last_used is None else [int(last_used * 1e6)] * len(chain)
    request = ReserveRequest(
        namespace,
        part,
        chain,
        [parent] * len(chain) if apart else [parent, *chain[:-1]],
        [PAGE] * len(chain),
        hint,
        used,
        None if copies is None else [copies] * len(chain),
    )
    answers = store.reserve(owner, request, now)
    for answer in answers:
        if answer.extent is not None:
            store.seal_all(owner, [answer.id], [7], now, last_used=used[0] if used else None)
    if check:
        check_invariants(store)
    return [answer.status for answer in answers]


def read(store: Store, chain: Sequence[bytes], now: float) -> int:
    """How many leading blocks were there."""
    pins = store.pin(1, ONE, 0, chain, now)
    for pin in pins:
        if pin.status is ReadStatus.HIT:
            store.unpin(1, pin.id)
    check_invariants(store)
    return next((i for i, pin in enumerate(pins) if pin.status is not ReadStatus.HIT), len(pins))


def here(store: Store, chain: Sequence[bytes], namespace: Namespace = ONE) -> int:
    """How many of these blocks are there."""
    return sum(store.index.peek(namespace, 0, digest) is not None for digest in chain)
