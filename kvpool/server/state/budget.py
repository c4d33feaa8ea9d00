"""How many bytes the connections of a server may hold at a time (design: budgets)."""

from __future__ import annotations

from typing import Final, NamedTuple

#: Bytes for which a connection may have blocks evicted before it has sealed any: this part of
#: what all connections may reserve, and between these.
_START_PART: Final = 16
START: Final = 1 << 20
_START_MAX: Final = 16 << 20

UNLIMITED: Final = 1 << 62


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
        that is less than what is free: one greedy tenant gets half, two get a third each, and
        however many there are, another one finds as much as each of them has.
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
