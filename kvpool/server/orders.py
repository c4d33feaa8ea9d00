"""The joints of a store: in which order it evicts (`eviction/order.py`), and its allocator."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Final

from kvpool.protocols.policy import Policy
from kvpool.server.eviction.order import Order
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.entry import Entry

#: `module:class`; the last one wraps the policy. Without its line and file the policy decides.
ORDERS: Final = (
    "kvpool.server.eviction.order:Order",
    "kvpool.server.eviction.session_hints:SessionAwarePolicy",
)
#: The same, of a memory. Without the line and file no range of it can be emptied in steps.
ALLOCATORS: Final = (
    "kvpool.server.state.allocator:Allocator",
    "kvpool.server.state.fenced_allocator:FencedAllocator",
)


def make_order(policy: Policy[Entry], budget: int, rounded: Callable[[int], int]) -> Order:
    made: Order = resolve_name(ORDERS[-1])(policy, budget, rounded)
    return made


def make_allocator(capacity: int, alignment: int) -> Allocator:
    made: Allocator = resolve_name(ALLOCATORS[-1])(capacity, alignment)
    return made
