"""The invariants of the pure state, for tests, the simulator and the conformance kits.

They read what is inside, and change nothing; the classes themselves have no such code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import singledispatch
from importlib import import_module
from importlib.util import find_spec

from kvpool import spans
from kvpool.errors import InvariantViolated
from kvpool.fingerprint import MapFingerprint, location_seed
from kvpool.master.state.block_map import MARK_BITS
from kvpool.master.state.directory import Directory
from kvpool.master.state.locations import ServerInventory
from kvpool.master.state.placement import Placer
from kvpool.master.state.server_record import ServerRecord
from kvpool.server.state.allocator import Allocator, _class_of
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Account, Entry, Index
from kvpool.server.state.extent_state import State
from kvpool.server.state.holdings import TenantHoldings
from kvpool.server.state.store import Store
from kvpool.types import ROOT, Namespace


@singledispatch
def check_invariants(state: object) -> None:
    """Of a Store, Blocks, Directory or Allocator: all that must hold between two calls.

    Raises InvariantViolated; takes time in proportion to the blocks.
    """
    raise TypeError(f"no invariants are known of {state!r}")


@check_invariants.register
def _check_allocator(one: Allocator) -> None:
    """Free and allocated extents tile the segment exactly, and every index agrees."""
    fenced: dict[int, int] = getattr(one, "_fenced", {})  # of a ring
    extents = sorted([*one._sizes.items(), *one._free.items(), *fenced.items()])
    position = 0
    for offset, size in extents:
        if offset != position or size <= 0 or size % one.alignment:
            raise InvariantViolated(f"extent {offset}+{size}: expected one at {position}")
        position += size
    if position != one.capacity:
        raise InvariantViolated(f"extents end at {position}, capacity is {one.capacity}")
    if sum(one._sizes.values()) != one.allocated:
        raise InvariantViolated(f"allocated is {one.allocated}, the extents sum to another size")
    start, end = getattr(one, "fence", (0, 0))
    if any(not start <= offset < end for offset in fenced) or (
        any(start <= offset < end for offset in one._free)
    ):
        raise InvariantViolated(f"what is free within {(start, end)} is not kept, or more is")
    if any(offset + size in fenced for offset, size in fenced.items()):
        raise InvariantViolated("free neighbours in the fenced range were not joined")
    if sum(fenced.values()) != (counted := getattr(one, "fenced", 0)):
        raise InvariantViolated(f"{counted} bytes are fenced, the pieces sum to others")
    if {end: offset for offset, size in one._free.items() for end in (offset + size,)} != (
        one._free_ends
    ):
        raise InvariantViolated("free extents and their ends disagree")
    for offset, size in one._free.items():
        if offset + size in one._free:
            raise InvariantViolated(f"free neighbours at {offset + size} were not joined")
        if offset not in one._classes.get(_class_of(size // one.alignment), ()):
            raise InvariantViolated(f"free extent {offset}+{size} is in no class")
    if sum(map(len, one._classes.values())) != len(one._free):
        raise InvariantViolated("a class names an extent that is not free")
    if one._nonempty != sum(1 << index for index, offsets in one._classes.items() if offsets):
        raise InvariantViolated("the class mask is wrong")


@check_invariants.register
def check_store(store: Store) -> None:
    """Also the table of states in `Store`."""
    check_invariants(store.allocator)
    held: dict[int, Entry] = {}
    blocks = [e for index in store.index.by_part.values() for e in index.blocks.values()]
    store.extents.policy.check(blocks)
    for (namespace, part), index in store.index.by_part.items():
        if (index.namespace, index.part) != (namespace, part):
            raise InvariantViolated(f"index of {namespace} part {part} is misfiled")
        if not index.blocks and not index.orphans:
            raise InvariantViolated(f"empty index of {namespace} part {part} was kept")
        children: dict[bytes, int] = {}
        for digest, entry in index.blocks.items():
            if entry.digest != digest or entry.index is not index:
                raise InvariantViolated(f"{entry!r} is misfiled")
            if entry.state not in (State.RESERVED, State.STORED):
                raise InvariantViolated(f"{entry!r} is in the index")
            if entry.parent != ROOT:
                children[entry.parent] = children.get(entry.parent, 0) + 1
            held[entry.offset] = entry
        for digest, entry in index.blocks.items():
            if entry.children != children.pop(digest, 0):
                raise InvariantViolated(f"{entry!r} has a wrong count of children")
            if (
                entry.clean
                and store.extents.evictable(entry)
                and not any(map(store.extents.policy.holds, store.index.parts(entry)))
            ):
                raise InvariantViolated(f"{entry!r} is evictable but no candidate: a leak")
        if children != index.orphans:
            raise InvariantViolated("the count of children of absent parents is wrong")
    quarantined = [entry for entries in store.held._quarantine.values() for entry in entries]
    for state, entries in (
        (State.PENDING_FREE, list(store.extents.pending_free.values())),
        (State.QUARANTINED, quarantined),
    ):
        for entry in entries:
            if entry.state is not state:
                raise InvariantViolated(f"{entry!r} is listed as {state.name}")
            if entry.offset in held:
                raise InvariantViolated(f"{entry!r} shares its extent with another block")
            held[entry.offset] = entry
    if held != store.extents.blocks_at:
        raise InvariantViolated("blocks and what lies at their offsets disagree")
    sizes = {offset: store.allocator.rounded(entry.size) for offset, entry in held.items()}
    for offset, size in store.extents.move_targets.items():
        sizes[offset] = store.allocator.rounded(size)
    if sizes != store.allocator.extents():
        raise InvariantViolated("allocated extents and blocks disagree (G3)")
    _check_owners(store, held)
    _check_accounts(store, held.values())


def _check_accounts(store: Store, held: Iterable[Entry]) -> None:
    """Each account counts exactly what lies in the extents of its tenant's blocks."""
    used: Counter[Account] = Counter()
    for entry in held:
        used[entry.index.account] += store.allocator.rounded(entry.size)
    indexes = Counter(index.account for index in store.index.by_part.values())
    accounts = set(store.extents.policy.accounts)
    for account in accounts.union(used, indexes):
        if (account.used, account.indexes) != (used[account], indexes[account]):
            raise InvariantViolated(f"{account!r}: its blocks have {used[account]} bytes")
        if account not in accounts:
            raise InvariantViolated(f"{account!r} is forgotten, and counts still")
    sizes: Counter[Index] = Counter()
    for entry in held:
        sizes[entry.index] += store.allocator.rounded(entry.size)
    for index in store.index.by_part.values():
        if index.used != sizes[index]:
            raise InvariantViolated(f"{index.namespace}: its blocks have {sizes[index]} bytes")
        if index.account is not store.extents.policy.account_of(index.namespace.name):
            raise InvariantViolated(f"{index.namespace} counts for {index.account!r}")


def _check_owners(store: Store, held: dict[int, Entry]) -> None:
    pins: dict[int, int] = {}
    reserved: set[int] = set()
    for owner in store.held._owners.values():
        for entry in owner.pins.values():
            if held.get(entry.offset) is not entry:
                raise InvariantViolated(f"{entry!r} is pinned, but its extent was freed (G4)")
            pins[entry.offset] = pins.get(entry.offset, 0) + 1
        for entry in owner.reservations.values():
            if held.get(entry.offset) is not entry or entry.offset in reserved:
                raise InvariantViolated(f"{entry!r} is reserved twice or was freed (G4)")
            reserved.add(entry.offset)
    for offset, entry in held.items():
        if entry.pins != pins.get(offset, 0):
            raise InvariantViolated(f"{entry!r} counts {entry.pins} pins")
        if (entry.state is State.RESERVED) != (offset in reserved):
            raise InvariantViolated(f"{entry!r}: state and reservations disagree")
        if entry.state is State.PENDING_FREE and not entry.pins:
            raise InvariantViolated(f"{entry!r} is pending free, but nothing pins it")
    stored = [entry for entry in held.values() if entry.state is State.STORED]
    if (len(stored), sum(entry.size for entry in stored)) != (
        store.index.stored,
        store.index.stored_bytes,
    ):
        raise InvariantViolated("the counts of stored blocks and bytes are wrong")
    if not store.index.copied and any(entry.copies > 1 for entry in stored):
        raise InvariantViolated("a block has copies, and the index does not know it")
    _check_budgets(store)


def _check_budgets(store: Store) -> None:
    """Each budget counts exactly what connections hold."""
    used = {id(budget): 0 for budget in store.held.limits}
    together = {id(one): TenantHoldings() for one in store.held._together.values()}
    for owner in store.held._owners.values():
        pinned, reserved = (
            store.held.size_of(held.values()) * owner.limited
            for held in (owner.pins, owner.reservations)
        )
        if (pinned, reserved) != (owner.pinned_bytes, owner.reserved_bytes):
            raise InvariantViolated(f"a connection holds {pinned}, {reserved} bytes: {owner!r}")
        if owner.together is not None:
            counted = together[id(owner.together)]
            counted.connections += 1
            counted.reserved += reserved
            counted.views += pinned * owner.views
            counted.copies += pinned * (not owner.views)
        used[id(store.held.pin_budget(owner))] += pinned
        used[id(store.held.limits.writes)] += reserved
        used[id(store.held.limits.lent)] += reserved * owner.lent
    quarantined = sum(map(store.held.size_of, store.held._quarantine.values()))
    if quarantined != store.held.quarantined_bytes:
        raise InvariantViolated(f"{quarantined} bytes are in quarantine: {store!r}")
    used[id(store.held.limits.lent)] += quarantined
    for tenant, one in store.held._together.items():
        if one != together[id(one)]:
            raise InvariantViolated(f"{tenant!r} holds {together[id(one)]}, not {one}")
    for budget in store.held.limits:
        if budget.used != used[id(budget)]:
            raise InvariantViolated(f"{budget!r}, but {used[id(budget)]} bytes are held")


@check_invariants.register
def _check_blocks(blocks: Blocks) -> None:
    for store in blocks.stores:
        check_invariants(store)
    check_fingerprint(blocks)


def check_fingerprint(stack: Blocks) -> None:
    """It is that of the blocks that readers find, where they find them."""
    expected = MapFingerprint()
    blocks = {(one.index.namespace, one.index.part, one.digest) for one in inventory(stack)}
    for namespace, part, digest in blocks:
        found = stack.peek(namespace, part, digest)
        assert found is not None
        expected.count(digest, location_seed(namespace, part, found.index.tier), 1)
    if stack.fingerprint is not None and stack.fingerprint != expected:
        raise InvariantViolated(f"counted {stack.fingerprint}, has {expected}")


def inventory(blocks: Blocks) -> list[Entry]:
    """One entry for every sealed block of a server, where readers find it."""
    entries = (entry for store in blocks.online for entry in store.index.inventory())
    return [entry for entry in entries if blocks.is_first(entry)]


@check_invariants.register
def _check_directory(directory: Directory) -> None:
    listed: dict[ServerInventory, MapFingerprint] = {}
    total = 0
    for namespace, blocks in directory.blocks.items():
        if not len(blocks):
            raise InvariantViolated(f"empty namespace {namespace} was kept")
        if sum(1 for _ in blocks) != len(blocks):
            raise InvariantViolated(f"{namespace} counts {len(blocks)} blocks")
        total += len(blocks)
        sizes = Counter(blocks.values())
        for mark, tag in blocks.spans.items():
            if sizes[tag] != spans.SPAN_BLOCKS:
                raise InvariantViolated(f"span {mark:x} has {sizes[tag]} blocks")
        for digest, tag in blocks.items():
            _check_block(directory, namespace, digest, tag >> MARK_BITS)
            for one in directory.locations.by_id[tag >> MARK_BITS].locations:
                seed = location_seed(namespace, one.part, one.tier)
                listed.setdefault(one.inventory, MapFingerprint()).count(digest, seed, 1)
    if total != directory._count:
        raise InvariantViolated(f"counted {directory._count} blocks, has {total}")
    _check_placement(
        directory.servers.placer,
        [one for one in directory.servers.records.values() if one.alive and not one.draining],
    )
    for record in directory.servers.records.values():
        for inventory in record.inventories:
            found = listed.get(inventory, MapFingerprint())
            if inventory.listed != found:
                raise InvariantViolated(f"{record.server}: counted {inventory.listed}, has {found}")
            if inventory.retired:
                raise InvariantViolated(f"{record.server} has a retired inventory")
        if record.inventories.earlier and not record.inventories.syncing:
            raise InvariantViolated(f"{record.server} is not syncing, but has two inventories")


def _check_block(directory: Directory, namespace: Namespace, digest: bytes, id: int) -> None:
    name = digest.hex()[:12]
    held = directory.locations.by_id.get(id)
    if held is None or not held.locations:
        raise InvariantViolated(f"{name} has no location, but is in the directory")
    if directory.locations.get(namespace.parts, held.locations) is not held:
        raise InvariantViolated(f"{name}: its locations are not shared")
    if len({(one.inventory.server, one.part) for one in held.locations}) < len(held.locations):
        raise InvariantViolated(f"{name} is twice on one server")
    for one in held.locations:
        if not 0 <= one.part < namespace.parts:
            raise InvariantViolated(f"{name} has part {one.part}")
        if not one.inventory.retired:
            record = directory.servers.records.get(one.inventory.server)
            if record is None or one.inventory not in record.inventories:
                raise InvariantViolated(f"{name} is in an inventory that no server has")


def _check_placement(placer: Placer, living: Collection[ServerRecord]) -> None:
    """Exactly these servers are chosen."""
    names = sorted(record.server for record in living)
    here = [record.server for record in placer._records]
    near = sorted(record.server for records in placer._by_host.values() for record in records)
    if not names == placer._names == here == near:
        raise InvariantViolated(f"servers {names} live, writers are sent to {placer._names}")
    if any(record not in placer._by_host[record.registration.host] for record in living):
        raise InvariantViolated("a server is chosen on another host than its own")


#: The checks of rings; what is not there needs none.
for _name in ("kvpool.testing.tier_invariants",):
    if find_spec(_name) is not None:
        import_module(_name)
