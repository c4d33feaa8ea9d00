"""How one thing of which there is a fixed amount is divided among tenants, or among peers.

A bound for all together is none for one of them: who is first, or asks most often, has everything.
So whatever others can make a process hold is taken from one of these. Pure; a call is O(1).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

from kvpool.tenant_names import TENANTS_MAX

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Holders that are counted by name: tenants, with the pool itself, and some more than there are
#: servers. Names beyond them are made up, and are counted together.
_NAMES_MAX: Final = 2 * TENANTS_MAX
#: Stands for all of those. No tenant or server has such a name.
_OTHERS: Final = "*"


class Shares:
    """`total` units of one thing: bytes, places, or whatever runs out.

    A holder may take as long as it has, with that, no more than is free afterwards. So one alone
    gets half, n greedy ones have n parts of n + 1, and something is left for one that has nothing,
    without a number of holders that somebody must know. The pool itself, the holder "", may have
    all that is free.
    """

    __slots__ = ("_held", "refused", "total", "used")

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        #: Units that were asked for in vain, by holder.
        self.refused: Counter[str] = Counter()
        self._held: dict[str, int] = {}

    def held(self, holder: str) -> int:
        """Units that this holder has."""
        return self._held.get(holder, 0)

    def room(self, holder: str) -> int:
        """Units that this holder may take now."""
        free = self.total - self.used
        if not holder:
            return free
        held = self._held.get(self._name(holder), 0)
        # Who has nothing may have the last one: else it would be nobody's.
        return max((free - held) // 2, int(not held and free > 0))

    def take(self, holder: str, units: int = 1) -> bool:
        """Give so many units to this holder, or count that it was refused; whether it has them."""
        if units > self.room(holder):
            self.refuse(holder, units)
            return False
        self.hold(holder, units)
        return True

    def hold(self, holder: str, units: int = 1) -> None:
        """The holder has so many units more, whatever its share: they were found, not asked for."""
        name = self._name(holder)
        self.used += units
        self._held[name] = self._held.get(name, 0) + units

    def refuse(self, holder: str, units: int = 1) -> None:
        """Count what the holder was not given."""
        known = holder in self.refused or len(self.refused) < _NAMES_MAX
        self.refused[holder if known else _OTHERS] += units

    def give_back(self, holder: str, units: int = 1) -> None:
        """The holder has so many units less, of those that it has taken."""
        name = holder if holder in self._held else _OTHERS
        self.used -= units
        self._held[name] -= units
        if self._held[name] <= 0:  # less, where a name was counted with others for a while
            del self._held[name]

    def clear(self) -> None:
        """Nobody has anything any more; what was refused stays counted."""
        self.used = 0
        self._held.clear()

    def _name(self, holder: str) -> str:
        known = holder in self._held or len(self._held) < _NAMES_MAX
        return holder if known else _OTHERS


class Recent(Generic[K, V]):
    """The last entries of every holder, `total` together. Where one more does not fit, the oldest
    entry of a holder that has more than its part leaves: nobody's flood drives out the others.

    An entry is its holder's: another one finds nothing under the same key.
    """

    __slots__ = ("_entries", "_groups", "_largest", "_since_search", "dropped", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.dropped = 0  # entries that had to leave
        #: By holder and key, the latest last: the group that the entry counts in, and its value.
        self._entries: OrderedDict[tuple[str, K], tuple[str, V]] = OrderedDict()
        self._groups: dict[str, OrderedDict[tuple[str, K], None]] = {}
        self._largest = ""  # the group that had more than its part when that was looked at last
        self._since_search = 0  # entries that have left since then

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, holder: str, key: K) -> V | None:
        """The value; looking at it makes it no younger."""
        return self._entries.get((holder, key), ("", None))[1]

    def put(self, holder: str, key: K, value: V) -> V | None:
        """From now on this is the value, and the youngest entry. The value that had to leave."""
        name = holder, key
        before = self._entries.get(name)
        known = holder in self._groups or len(self._groups) < _NAMES_MAX
        group = before[0] if before is not None else holder if known else _OTHERS
        self._entries[name] = group, value
        self._entries.move_to_end(name)
        entries = self._groups.setdefault(group, OrderedDict())
        entries[name] = None
        entries.move_to_end(name)
        return self._drop_one(group) if len(self._entries) > self.total else None

    def oldest(self) -> tuple[str, K, V] | None:
        """Holder, key and value of the oldest entry of all."""
        return next(((*name, value) for name, (_, value) in self._entries.items()), None)

    def of(self, holder: str) -> Iterator[tuple[K, V]]:
        """The entries of a holder, the oldest first."""
        group = self._groups.get(holder if holder in self._groups else _OTHERS, ())
        return ((name[1], self._entries[name][1]) for name in group if name[0] == holder)

    def pop(self, holder: str, key: K) -> V | None:
        """Forget this entry, if it is there; its value."""
        group, value = self._entries.pop((holder, key), ("", None))
        if value is not None:
            del self._groups[group][holder, key]
            if not self._groups[group]:
                del self._groups[group]
        return value

    def values(self) -> Iterator[V]:
        """All of them, the youngest first."""
        return (value for _, value in reversed(self._entries.values()))

    def _drop_one(self, last: str) -> V | None:
        """Of the largest group, as long as it has more than its part. A search costs as much as
        there are groups: one for as many entries, or where `last`, the newest's, has no more."""
        groups, part = self._groups, self.total / len(self._groups)
        if len(groups.get(self._largest, ())) <= part:
            search = self._since_search >= len(groups) or len(groups[last]) <= part
            self._largest = max(groups, key=lambda name: len(groups[name])) if search else last
            self._since_search *= not search
        self._since_search += 1
        self.dropped += 1
        return self.pop(*next(iter(groups[self._largest])))
