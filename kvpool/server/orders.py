"""The joint of a store: in which order it evicts (`eviction/order.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Final

from kvpool.protocols.policy import Policy
from kvpool.server.eviction.order import Order
from kvpool.server.state.entry import Entry

#: `module:class`; the last one wraps the policy. Without its line and file the policy decides.
ORDERS: Final = (
    "kvpool.server.eviction.order:Order",
    "kvpool.server.eviction.session_hints:SessionAwarePolicy",
)


def make_order(policy: Policy[Entry], budget: int, rounded: Callable[[int], int]) -> Order:
    made: Order = resolve_name(ORDERS[-1])(policy, budget, rounded)
    return made
