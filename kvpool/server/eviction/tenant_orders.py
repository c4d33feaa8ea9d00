"""One order of eviction for each tenant, and which of them gives up a block (design: quotas).

With one order for all, a policy whose next victims are all protected would be walked past each of
them, for each block that is written. So each tenant has an order of its own: a policy with its
session hints, which therefore apply to no other tenant. The order that gives up a block is chosen
by the rules, in this sequence, about the bytes of each `TenantAccount`:

1. A tenant that would be above its limit evicts its own.
2. From a tenant nothing is taken for others that it would miss within its guarantee.
3. A tenant that stays within its guarantee takes from others what is beyond theirs. No policy and
   no hint of others can refuse that. Only if nothing of theirs may go, it evicts its own.
4. Else its own blocks and what is beyond the guarantees of others are one store: the block goes
   that was used least recently, of those that each order would evict next; blocks that are of no
   use by the hints of their sessions go before it, and then extra copies.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, TypeAlias, cast

from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Decision, Inferred
from kvpool.server.eviction.order import JUST_NOW, Find, Order, Subject
from kvpool.server.state.entry import Account, Entry, Index
from kvpool.server.state.quota import Accounts, TenantAccount
from kvpool.tenant_names import tenant_of
from kvpool.types import SessionHint

#: Evictions of one order between two comparisons of all.
_TURNS: Final = 32
#: Orders of which one call asks for a victim, at most.
_ASKED_MAX: Final = 64
#: Victims that are younger than the order seemed to be: so many are put back in one call.
_YOUNGER_MAX: Final = 8
_NEVER: Final = (3, math.inf)
#: Entries of the heap that do not count any more, beside one for each that does.
_OUTDATED_MAX: Final = 64

#: The rank of an order, the numbers of its account and of this entry, and the account.
_Ranked: TypeAlias = tuple[tuple[int, float], int, int, TenantAccount]


def check_orders(
    orders: TenantOrders, entries: Collection[Entry], tenant: str | None = None
) -> None:
    """As `Order.check`, each order for its blocks."""
    of: dict[Account, list[Entry]] = {account: [] for account in orders._orders}
    for entry in entries:
        of.setdefault(entry.index.account, []).append(entry)
    for account, blocks in of.items():
        orders._order(account).check(blocks, account.name)


class OldestOrder:
    """The order that evicts next what was used least recently, of those beyond their guarantee.

    To compare all of them for each block would take a time that grows with the tenants. So the
    order that was found keeps its turn for some evictions, while it stays the oldest; and each one
    stands in a heap by the rank that it had when it was last asked. Blocks that are used or leave
    only make a rank later, so it is asked again when it comes first. What makes it earlier is told
    (`on_change`), but for what a policy thinks of blocks that grow old: one more is asked in turn.
    """

    def __init__(self, orders: dict[Any, Order]) -> None:
        self._orders = orders
        #: Orders that have no victim until one of their blocks or sessions changes.
        self.dry: set[Account] = set()
        #: Whose turn it is, up to which rank, and for how many evictions more.
        self._turn: TenantAccount | None = None
        self._until = _NEVER
        self._left = 0
        #: By rank. An entry counts while it is the latest of its account, which `_latest` has;
        #: those that may give nothing have none until they change.
        self._heap: list[_Ranked] = []
        self._latest: dict[TenantAccount, _Ranked] = {}
        self._changed: dict[Any, None] = dict.fromkeys(orders)
        self._numbers: dict[TenantAccount, int] = {}  # of equals the first goes
        self._serial = itertools.count()
        self._round: Iterator[TenantAccount] = iter(())

    def on_change(self, account: Account) -> None:
        """A block, a session or the quota of this account has changed."""
        self.dry.discard(account)
        self._changed[account] = None

    def on_bytes(self, account: TenantAccount) -> None:
        """It has more bytes than a moment ago: perhaps it is beyond its guarantee."""
        if account not in self._latest:
            self._changed[account] = None

    def end_turn(self) -> None:
        """What was found may not be the oldest any more."""
        self._turn = None

    def is_younger(self, account: Account, victim: Entry) -> bool:
        """Whether another order is older than this victim, so that the turn has ended."""
        return account is self._turn and (2, victim.last_used / 1e6) > self._until

    def find(
        self, asked: set[Account], now: float
    ) -> tuple[TenantAccount | None, tuple[int, float]]:
        """The account whose order it is, of those that were not asked yet, and its rank."""
        turn = self._turn
        if turn is not None and self._left and turn not in asked and self._may_give(turn):
            rank = self._orders[turn].rank(now)
            if rank <= self._until:
                self._left -= 1
                return turn, rank
        self._rank_some(now)
        aside: list[_Ranked] = []
        first = self._first(asked, now, aside)
        if first is not None:
            aside.append(heapq.heappop(self._heap))
        second = self._first(asked, now, aside)
        for one in aside:
            heapq.heappush(self._heap, one)
        self._turn = first[3] if first is not None else None
        self._until = second[0] if second is not None else _NEVER
        self._left = _TURNS
        return self._turn, first[0] if first is not None else _NEVER

    def _may_give(self, account: TenantAccount) -> bool:
        return (
            account.spare >= account.needed and account not in self.dry and account in self._orders
        )

    def _rank_some(self, now: float) -> None:
        """What has changed, and one more."""
        for account in self._changed:
            self._rank(account, now)
        self._changed.clear()
        another = next(self._round, None)
        if another is None:
            self._round = iter(list(self._latest))
        elif another in self._latest:
            self._rank(another, now)
        if len(self._heap) > 2 * len(self._latest) + _OUTDATED_MAX:
            self._heap = list(self._latest.values())
            heapq.heapify(self._heap)

    def _rank(self, account: TenantAccount, now: float) -> None:
        if self._may_give(account):
            serial = next(self._serial)
            number = self._numbers.setdefault(account, serial)
            ranked = self._orders[account].rank(now), number, serial, account
            self._latest[account] = ranked
            heapq.heappush(self._heap, ranked)
        else:
            self._latest.pop(account, None)
            if account not in self._orders:
                self._numbers.pop(account, None)

    def _first(self, asked: set[Account], now: float, aside: list[_Ranked]) -> _Ranked | None:
        """What stands first when it has been asked just now; `aside` gets what was asked before."""
        while self._heap:
            ranked = self._heap[0]
            account = ranked[3]
            if self._latest.get(account) is not ranked:
                heapq.heappop(self._heap)
            elif account in asked and self._may_give(account):
                aside.append(heapq.heappop(self._heap))
            elif self._may_give(account) and self._orders[account].rank(now) <= ranked[0]:
                return ranked
            else:
                heapq.heappop(self._heap)
                self._rank(account, now)
        return None


class TenantOrders(Order):
    """What the store calls instead of one `Order`, when it has tenants.

    `extent` gives the bytes that leave with a block, `rounded` those of one of this size.
    """

    accounts: Accounts
    check = check_orders

    def __init__(
        self,
        accounts: Accounts,
        pool: Order,
        make: Callable[[], Order],
        extent: Callable[[Entry], int],
        rounded: Callable[[int], int],
    ) -> None:
        super().__init__(pool.policy, 0, rounded)
        self.touch = lambda entry, now: self.order_of(entry.index).touch(entry, now)
        self.programs = pool.programs
        self.accounts = accounts
        self.account_of = accounts.of
        self._orders: dict[Any, Order] = {accounts.pool: pool}
        self._make = make
        self._extent = extent
        self._rounded = rounded
        self._oldest = OldestOrder(self._orders)
        self._dry = self._oldest.dry
        self._useless_of: Account = accounts.pool
        #: Of all orders, and of each as it was asked last.
        self._figures: Counter[str] = Counter()
        self._figures_of: dict[Any, Counter[str]] = {}
        #: When the next victim of each was used, as it was asked last; infinite without one.
        self._oldest_use: dict[Any, float] = {}
        #: By what they are asked for: the place of the next one to ask.
        self._next_asked: Counter[str] = Counter()

    def evicting(self, victim: Entry, by: Account) -> int:
        """It is counted for the victim's tenant, too."""
        size, account = self._extent(victim), victim.index.account
        cast("TenantAccount", account).lost(size, by.name)
        return size

    def order_of(self, index: Index) -> Order:
        """The order of the blocks of one index, in which a block may become a victim now."""
        self._oldest.on_change(index.account)
        return self._order(index.account)

    def _order(self, account: Account) -> Order:
        order = self._orders.get(account)
        if order is None:
            order = self._orders[account] = self._make()
            if self.programs is not None:
                order.programs.names = self.programs.names
            self._oldest.on_change(account)
        return order

    def forget(self, accounts: Collection[Account]) -> None:
        """Nothing counts in these accounts any more, and quotas of others have changed."""
        for account in (*self._orders, *accounts):
            self._oldest.on_change(account)
        for account in accounts:
            self._orders.pop(account, None)
            self._oldest_use.pop(account, None)
            self._figures.subtract(self._figures_of.pop(account, {}))
        self._oldest.end_turn()
        self._useless_of = self.accounts.pool

    # --- about one block or session ----------------------------------------------------------

    def add_candidate(self, entry: Entry) -> None:
        self.order_of(entry.index).add_candidate(entry)

    def remove(self, entry: Entry) -> None:
        self.order_of(entry.index).remove(entry)

    def reject(self, entry: Entry) -> None:
        self._order(entry.index.account).reject(entry)

    def block_added(self, entry: Entry) -> None:
        self._order(entry.index.account).block_added(entry)

    def block_shared(self, entry: Entry) -> None:
        self.order_of(entry.index).block_shared(entry)

    def answered(self, entry: Entry, now: float) -> None:
        self.order_of(entry.index).answered(entry, now)

    def is_over(self, entry: Entry) -> bool:
        return self._order(entry.index.account).is_over(entry)

    def holds(self, entry: Entry) -> bool:
        return self._order(entry.index.account).holds(entry)

    def due(self, entry: Entry) -> float | None:
        return self._order(entry.index.account).due(entry)

    def begin_write(self, index: Index, request: ReserveRequest, now: float, *, moved: bool) -> Any:
        """Hints apply to blocks of their tenant only."""
        hint = request.session_hint
        if hint is not None and tenant_of(hint.session) != index.account.name:
            return None
        return self.order_of(index).begin_write(index, request, now, moved=moved)

    def end_write(
        self, session: Any, granted: Sequence[Entry], request: ReserveRequest, *, promoted: bool
    ) -> None:
        order = self.order_of(granted[0].index)
        order.end_write(session, granted, request, promoted=promoted)

    def hint(
        self, subject: Subject, resume_in: float | None, now: float, *, age_s: float, find: Find
    ) -> bool | None:
        name = subject if isinstance(subject, str) else subject.namespace
        account = self.accounts.get(tenant_of(name))
        order = self._orders.get(account) if account is not None else None
        if account is None or order is None:
            return None
        self._oldest.on_change(account)
        return order.hint(subject, resume_in, now, age_s=age_s, find=find)

    def hint_of(self, session: Any, now: float) -> SessionHint | None:
        return self._orders[self.accounts.pool].hint_of(session, now)

    # --- about all of them -----------------------------------------------------------------------

    def victim(
        self,
        newcomer: Entry,
        evictable: Callable[[Entry], bool],
        now: float,
        last_used: int = JUST_NOW,
        *,
        foreign: bool = False,
        owed: bool = False,
        wanted: bool = False,
    ) -> Entry | Decision | None:
        """As `Order.victim`, of the order that the rules choose.

        BYPASS only where the newcomer has no right to a place: above its limit, or beyond its
        guarantee.
        """
        mine = cast("TenantAccount", newcomer.index.account)
        size = self._rounded(newcomer.size)
        own = self._order(mine)
        if mine.exceeds(size):
            above = mine.used > mine.limit  # what is too much goes, also for a block of less worth
            return own.victim(
                newcomer, evictable, now, last_used, foreign=above, owed=above, wanted=wanted
            )
        owed = mine.owns(size)
        asked: set[Account] = set()
        younger = 0
        while len(asked) < _ASKED_MAX:
            account = self._next(mine, owed, asked, now)
            if account is None:
                if not owed:
                    return None
                return own.victim(newcomer, evictable, now, last_used, wanted=wanted)
            order = self._orders[account]
            foreign = account is not mine
            found = order.victim(
                newcomer, evictable, now, last_used, foreign=foreign, owed=owed, wanted=wanted
            )
            if found is None:
                self._dry.add(account)
                asked.add(account)
            elif found is Decision.BYPASS and owed:
                asked.add(account)
            elif isinstance(found, Decision):
                return found
            elif foreign and account.spare < (needed := self._extent(found)):
                account.needed = needed
                order.add_candidate(found)
                asked.add(account)
            elif (
                younger < _YOUNGER_MAX
                and self._oldest.is_younger(account, found)
                and found.copies
                and not order.is_over(found)
            ):
                younger += 1  # its place in the order was old: it was used again
                order.add_candidate(found)
                self._oldest.end_turn()
            else:
                return found
        return Decision.NOT_YET

    def next_useless(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """As `Order.next_useless`, of all orders."""
        for account in (self._useless_of, *self._orders):
            found = self._orders[account].next_useless(evictable)
            if found is not None:
                self._useless_of = account
                return found
        return None

    def victim_age(self, now: float) -> float:
        """Of blocks beyond the guarantees; of all if there are none. Asked as for `figures`."""
        uses = self._oldest_use
        for account in _some(self._orders, self._next_asked, "age"):
            age = self._orders[account].victim_age(now)
            uses[account] = now - age if age else math.inf
        beyond = [
            used_at
            for account, used_at in uses.items()
            if account.spare > 0 and account not in self._dry
        ]
        return max(0.0, now - min(beyond or uses.values()))

    @property
    def figures(self) -> Counter[str]:
        """As of all orders; of more than `_ASKED_MAX` each call asks some anew, in turn."""
        for account in _some(self._orders, self._next_asked, "figures"):
            new = self._orders[account].figures
            self._figures.subtract(self._figures_of.get(account, {}))
            self._figures.update(new)
            self._figures_of[account] = new
        return self._figures.copy()

    def inferred(self) -> Inferred:
        """Of all; what comes of hints is among the figures."""
        whys = [order.inferred().why for order in self._orders.values()]
        return Inferred(self.figures, lambda digest: max([why(digest) for why in whys]))

    def bytes_of_programs(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for order in self._orders.values():  # an `update` takes longer than those of one tenant
            for program, size in order.bytes_of_programs().items():
                found[program] += size
        return found

    # --- inside --------------------------------------------------------------------------------

    def _next(
        self, mine: TenantAccount, owed: bool, asked: set[Account], now: float
    ) -> TenantAccount | None:
        """The account whose order gives up a block for a newcomer of `mine`, by rules 2 to 4."""
        self._oldest.on_bytes(mine)
        found, rank = self._oldest.find(asked, now)
        # What is beyond its guarantee is compared above, as that of others is.
        if not owed and mine.spare < mine.needed and mine not in asked and mine not in self._dry:
            order = self._orders.get(mine)
            if order is not None and order.rank(now) <= rank:
                return mine
        return found


def _some(orders: Collection[Any], following: Counter[str], what: str) -> list[Any]:
    """Those that are asked for this now, in turn: one call must not ask all."""
    first, after = following[what], following[what] + _ASKED_MAX
    following[what] = after if after < len(orders) else 0
    return list(orders)[first:after]
