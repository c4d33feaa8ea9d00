"""The invariants of servers with several tiers, as `invariants.py` has the others."""

from __future__ import annotations

from kvpool.errors import InvariantViolated
from kvpool.server.state.divided_allocator import DividedAllocator
from kvpool.server.state.entry import MOVER
from kvpool.server.state.extent_state import State
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.tier_stores import Addresses, cold_store
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_fingerprint, check_invariants, check_store


@check_invariants.register
def _check_addresses(one: Addresses) -> None:
    if sum(one._sizes.values()) != one.allocated:
        raise InvariantViolated(f"allocated is {one.allocated}, the extents sum to another size")


@check_invariants.register
def _check_divided_allocator(one: DividedAllocator) -> None:
    for part in one.parts:
        check_invariants(part)
    used = [part for number, part in enumerate(one.parts) if number not in one.retired]
    if (one.allocated, one.capacity) != (
        sum(part.allocated for part in used),
        sum(part.capacity for part in used),
    ):
        raise InvariantViolated("the parts sum to another size")


@check_invariants.register
def _check_front_store(store: FrontStore) -> None:
    """As of each store, and what is dirty, and what came up before it was read."""
    check_store(store)
    dirty = [entry for entry in store.index.inventory() if not entry.clean]
    size = sum(store.allocator.rounded(entry.size) for entry in dirty)
    if (len(dirty), size) != (store.extents.dirty, store.extents.dirty_bytes):
        raise InvariantViolated("the counts of dirty blocks and bytes are wrong")
    blocks = store.extents.prefetched
    counts = sum(entry.size for entry in blocks), store.held.size_of(blocks)
    if (blocks.bytes, blocks.held) != counts:
        raise InvariantViolated("the count of prefetched bytes is wrong")
    if any(entry.state is not State.STORED for entry in blocks):
        raise InvariantViolated("a prefetched block has left and is still listed")


@check_invariants.register
def _check_tiered_store(stack: TieredStore) -> None:
    """Each store, and that each block is in a place of the table in `TieredStore`."""
    for tier, store in enumerate(stack.stores):
        if tier not in stack.index.offline:
            check_invariants(store)
    waiting = set(map(id, stack.queue.dirty))
    check_fingerprint(stack)
    moving = {id(entry) for entry in stack.front.held.pinned_by(MOVER)}
    for entry in stack.front.index.inventory():
        if not entry.clean and id(entry) not in waiting and id(entry) not in moving:
            raise InvariantViolated(f"{entry!r} is dirty and in no queue: a leak")
    for entry in stack.queue.unwritten:
        if entry.state is not State.STORED or not entry.clean:
            raise InvariantViolated(f"{entry!r} has left or is dirty, but is to be written")
    lowest = len(stack.stores) - 1 - (cold_store(stack.stores) is not None)
    arriving = stack.stores[lowest].held.known(MOVER) if lowest > stack.front_tier else None
    rounded = stack.front.allocator.rounded
    arriving_bytes = (
        sum(rounded(one.size) for one in arriving.reservations.values()) if arriving else 0
    )
    if arriving and stack.queue.moving_bytes != arriving_bytes:
        raise InvariantViolated("the bytes on their way to the backing tier are wrong")
    mover = stack.front.held.known(MOVER)
    promoted = mover.reservations.values() if mover else ()
    if not 0 <= stack.front.extents.prefetched.coming <= sum(rounded(one.size) for one in promoted):
        raise InvariantViolated("more is prefetched than is on its way to the front tier")
