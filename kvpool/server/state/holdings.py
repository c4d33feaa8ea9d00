"""What connections hold of a store: reservations, pins, extents in quarantine; and how much they
may (design: budgets)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.errors import BadMessage
from kvpool.server.state.entry import MOVER, UNLIMITED, Entry

#: Of `Budget.start`: this part of what all connections may reserve, and between these.
_START_PART: Final = 16
START: Final = 1 << 20
_START_MAX: Final = 16 << 20


class Budget:
    """Bytes that connections may hold: `each` of them, and all together (`total`).

    A connection may take a block while it holds less than `each` and all hold less than `total`, so
    a limit is exceeded by one block at most, and a block of any size can be taken in the end. What
    is used of the budget `inside` counts here, too.
    """

    __slots__ = ("each", "inside", "start", "total", "used")

    def __init__(
        self, each: int = UNLIMITED, total: int = UNLIMITED, inside: Budget | None = None
    ) -> None:
        self.each = each
        self.total = total
        self.inside = inside
        #: Bytes for which a connection may have blocks evicted before it has sealed any.
        self.start = max(START, min(_START_MAX, total // _START_PART))
        self.used = 0

    def left(self, held: int, of_tenant: int | None = None) -> int:
        """What a connection that holds `held` bytes may still take; nothing if that is below 1.

        The connections of one tenant, which hold `of_tenant` bytes together, may take only while
        that is less than what is free: however many are greedy, another one finds as much.
        """
        inside = self.inside.used if self.inside is not None else 0
        free = self.total - self.used - inside
        if of_tenant is not None:
            free -= of_tenant
        return min(self.each - held, free)

    def fits(self, size: int) -> bool:
        """Whether `size` bytes more stay within the total; any size does while nothing is held."""
        return not self.used or self.used + size <= self.total


class Limits(NamedTuple):
    """The budgets of a store. Without arguments there is no limit."""

    #: Pins of readers that copy the bytes: a server may take them back (design: pins).
    copies: Budget
    #: Pins of readers that use the memory itself, for as long as they like.
    views: Budget
    #: Reservations that are not sealed.
    writes: Budget
    #: Extents into which a client may write by itself: reservations that are lent, and quarantine.
    lent: Budget

    @classmethod
    def none(cls) -> Limits:
        """No limits: each budget only counts."""
        return cls(Budget(), Budget(), Budget(), Budget())

    @classmethod
    def of(cls, pinned_max: int, reserved_max: int) -> Limits:
        """Bytes for all pins and all reservations: one connection gets at most half of them, and
        all views together get half of the pins, so that reads that copy always go on."""
        half = max(1, pinned_max // 2)
        views = Budget(half, half)
        return cls(
            Budget(half, pinned_max, inside=views),
            views,
            Budget(max(1, reserved_max // 2), reserved_max),
            Budget(total=reserved_max),
        )


@dataclass(slots=True)
class TenantHoldings:
    """What the connections of one tenant hold together, in bytes (design: budgets)."""

    connections: int = 0
    reserved: int = 0
    copies: int = 0  # pins of readers that copy
    views: int = 0


@dataclass(slots=True)
class Owner:
    """The reservations and pins of one connection, by their ids."""

    reservations: dict[int, Entry]
    pins: dict[int, Entry]
    limited: bool  # False for the server's own transfers
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    sealed_bytes: int = 0  # since the connection began
    lent: bool = False  # its client may write into the reservations by itself
    views: bool = False  # its pins are those of `read_view`
    pinned_at: float = 0.0  # when it got the pins that it has now
    #: The block that no range could be emptied for, and the free bytes that were not enough.
    gave_up: tuple[bytes, int] | None = None
    #: The block for which it waits for the disk, or has waited, and since when (design: tiers).
    waits_for: tuple[bytes, float] | None = None
    #: Of all connections of its tenant; None: it is not a tenant's.
    together: TenantHoldings | None = None

    def left_to_evict(self, writes: Budget) -> int:
        """Bytes of reservations for which blocks may be evicted; none if that is below 1.

        Before it has sealed anything, a connection has evictions for `start` bytes only; then for
        twice what it has sealed. So what a writer throws out is in proportion to what it
        stores (design: budgets).
        """
        if not self.limited:
            return UNLIMITED
        return min(writes.each, max(writes.start, 2 * self.sealed_bytes)) - self.reserved_bytes


class ConnectionHoldings:
    """Each connection's `Owner`, counted in whole extents against `limits`, and together with those
    of its tenant (design: budgets)."""

    def __init__(self, alignment: int) -> None:
        self._mask = alignment - 1
        #: What connections may pin and reserve.
        self.limits = Limits.none()
        self.quarantined_bytes = 0
        self.last_id = 1  # of a block (its generation), a reservation or a pin; they only grow
        self._owners: dict[int, Owner] = {}
        self._together: dict[str, TenantHoldings] = {}  # by tenant
        self._quarantine: dict[int, list[Entry]] = {}

    @property
    def pins(self) -> int:
        return sum(len(owner.pins) for owner in self._owners.values())

    @property
    def reservations(self) -> int:
        return sum(len(owner.reservations) for owner in self._owners.values())

    @property
    def quarantined(self) -> int:
        return sum(len(entries) for entries in self._quarantine.values())

    @property
    def is_empty(self) -> bool:
        """Nothing is reserved, pinned or in quarantine."""
        return not (self.pins or self.reservations or self.quarantined)

    def owner(self, owner: int) -> Owner:
        """What one connection holds; a new one holds nothing."""
        held = self._owners.get(owner)
        if held is None:
            held = self._owners[owner] = Owner({}, {}, limited=owner != MOVER)
        return held

    def known(self, owner: int) -> Owner | None:
        """As `owner`; None if it never held anything. Live: do not change it."""
        return self._owners.get(owner)

    def pinned_by(self, owner: int) -> list[Entry]:
        """The entries that one owner has pinned, each as often as it is pinned."""
        held = self._owners.get(owner)
        return list(held.pins.values()) if held is not None else []

    def join_tenant(self, owner: int, tenant: str) -> None:
        """This connection, which is new, is one of that tenant's: what all of them hold counts
        together."""
        together = self._together.setdefault(tenant, TenantHoldings())
        together.connections += 1
        self.owner(owner).together = together

    def forget(self, owner: int) -> bool:
        """A connection that holds nothing any more is closed. True if it is in quarantine."""
        held = self._owners.pop(owner)
        if held.together is not None:
            held.together.connections -= 1
            if not held.together.connections:
                self._together = {n: one for n, one in self._together.items() if one.connections}
        return owner in self._quarantine

    # --- reservations ----------------------------------------------------------------------

    def left_to_reserve(self, holder: Owner) -> int:
        """Bytes that it may still reserve; none if that is below 1."""
        if not holder.limited:
            return UNLIMITED
        of_tenant = holder.together.reserved if holder.together is not None else None
        return self.limits.writes.left(holder.reserved_bytes, of_tenant)

    def charge_writes(self, holder: Owner, held: int) -> None:
        """Count the extents of reservations, or with a negative size their end."""
        if holder.limited:
            holder.reserved_bytes += held
            self.limits.writes.used += held
            if holder.together is not None:
                holder.together.reserved += held
            if holder.lent:
                self.limits.lent.used += held
                holder.lent = holder.reserved_bytes > 0

    def take_reservations(self, owner: int, ids: Sequence[int]) -> list[Entry]:
        """The entries of reservations that end. Raises BadMessage, and takes none, if one of them
        is another owner's."""
        holder = self.owner(owner)
        entries = _take(holder.reservations, ids)
        self.charge_writes(holder, -self.size_of(entries))
        return entries

    def lend(self, owner: int) -> bool:
        """Whether its client may write into what it has reserved now, in memory that it has mapped.

        False when that and the extents in quarantine would be more than the budget. Then the server
        has to receive the bytes, and nothing of it can come into quarantine (design: budgets).
        """
        holder = self.owner(owner)
        if not holder.lent and self.limits.lent.fits(holder.reserved_bytes):
            holder.lent = True
            self.limits.lent.used += holder.reserved_bytes
        return holder.lent

    def quarantine(self, owner: int, entry: Entry) -> None:
        """A reservation that has ended, into whose extent its writer may still write."""
        self._quarantine.setdefault(owner, []).append(entry)
        self._charge_quarantine(self._rounded(entry.size))

    def release_quarantine(self, owner: int) -> list[Entry]:
        """The extents of this owner, which nobody writes into any more."""
        entries = self._quarantine.pop(owner, [])
        self._charge_quarantine(-self.size_of(entries))
        return entries

    # --- pins ------------------------------------------------------------------------------

    def pin_budget(self, holder: Owner) -> Budget:
        return self.limits.views if holder.views else self.limits.copies

    def count_pins(self, holder: Owner, held: int) -> None:
        """So many bytes more are pinned, or less."""
        if not holder.limited:
            return
        holder.pinned_bytes += held
        self.pin_budget(holder).used += held
        if holder.together is None:
            return
        if holder.views:
            holder.together.views += held
        else:
            holder.together.copies += held

    def pin(self, owner: int, entry: Entry) -> int:
        """Pin a sealed block for a transfer, also beyond the budget; it does not count as a use."""
        holder = self.owner(owner)
        entry.pins += 1
        self.last_id = id = self.last_id + 1
        holder.pins[id] = entry
        self.count_pins(holder, self._rounded(entry.size))
        return id

    def take_pins(self, owner: int, ids: Sequence[int]) -> list[Entry]:
        """The entries of pins that end. Raises BadMessage, and takes none, if it does not hold one
        of them."""
        holder = self.owner(owner)
        entries = _take(holder.pins, ids)
        self.count_pins(holder, -self.size_of(entries))
        return entries

    # --- inside ----------------------------------------------------------------------------

    def size_of(self, entries: Iterable[Entry]) -> int:
        """The bytes of their extents."""
        mask = self._mask
        return sum([(entry.size + mask) & ~mask for entry in entries])

    def _rounded(self, size: int) -> int:
        return (size + self._mask) & ~self._mask

    def _charge_quarantine(self, held: int) -> None:
        self.quarantined_bytes += held
        self.limits.lent.used += held


def _take(held: dict[int, Entry], ids: Sequence[int]) -> list[Entry]:
    """The entries with these ids, which are held no more. Raises BadMessage, and changes nothing,
    for an id that is not held, or is named twice."""
    entries = [entry for id in ids if (entry := held.get(id)) is not None]
    if len(entries) < len(ids) or len(set(ids)) < len(ids):
        raise BadMessage(f"ids {list(ids)[:8]}: this connection does not hold each of them, once")
    for id in ids:
        del held[id]
    return entries
