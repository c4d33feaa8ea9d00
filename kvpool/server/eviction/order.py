"""The order in which a store evicts: that of a policy, and what else is known of its blocks. Pure.

A ring that knows more has an order of its own (`ORDERS`). What writers say for it passes
through the store unread: hints, and `Entry.session`, which the order makes for each write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pkgutil import resolve_name
from typing import Any, Final, TypeAlias

from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Decision, Inferred, Policy
from kvpool.server.state.entry import Account, Entry, Index
from kvpool.types import ChainEnd, Namespace, SessionHint

#: `module:class`; the last one wraps the policy. Without its line and file the policy decides.
ORDERS: Final = (
    "kvpool.server.eviction.order:Order",
    "kvpool.server.eviction.session_hints:SessionAwarePolicy",
)
#: What a hint is about: a session's name, or the end of a chain; and who has the block of a key.
Subject: TypeAlias = str | ChainEnd
Find: TypeAlias = Callable[[Namespace, int, bytes], Entry | None]
#: Later than the last use of any block, in microseconds.
JUST_NOW: Final = 1 << 62
#: Seconds without a use after which no policy prefers a stored block to a new one (G9).
LONG_S: Final = 86_400.0


class Order:
    """What a store calls. This one knows no hint, and ranks extra copies as other blocks.

    `budget` is bytes of whole extents that hints may keep; a block takes `rounded` of its size.
    """

    def __init__(
        self, policy: Policy[Entry], budget: int, rounded: Callable[[int], int] = int
    ) -> None:
        self.policy = policy
        self.in_a_row: bool = getattr(policy, "in_a_row", False)
        account = Account()
        #: What blocks are counted in, and in which those of a namespace are: here one has all.
        self.accounts: Iterable[Account] = (account,)
        self.account_of: Callable[[str], Account] = lambda namespace: account
        self.touch: Callable[[Entry, float], None] = policy.touch  # direct: it is called per read
        self.programs: Any = None  # `ProgramBytes`, where hints name programs

    def evicting(self, victim: Entry, by: Account) -> int:
        """This victim makes room for a block of that account: the bytes that leave with it, where
        accounts have limits."""
        return 0

    def order_of(self, index: Index) -> Order:
        """The order of the blocks of one index: this one has all."""
        return self

    def add_candidate(self, entry: Entry) -> None:
        self.policy.add_candidate(entry)

    def remove(self, entry: Entry) -> None:
        self.policy.remove(entry)

    def reject(self, entry: Entry) -> None:
        """The store refused a victim: it is no candidate any more. It is still stored."""
        self.policy.remove(entry)

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
        """As `Policy.victim`. An extra copy may take the place of those used before `last_used`.

        Space of a `foreign` tenant that is `owed` cannot be refused: the policy is asked as if the
        blocks were not used for long. Nor can a newcomer that is `wanted` now, by a reader.
        """
        asked_at = now + LONG_S if wanted or (owed and foreign) else now
        return self.policy.victim(newcomer, evictable, asked_at)

    def run_of(
        self, victim: Entry, may_go: Callable[[Entry], bool], now: float, most: int
    ) -> list[Entry]:
        """A victim, and above it in its chain those that go next, one by one, where each `may_go`
        without its only child; `most` in all."""
        return [victim]

    def rank(self, now: float) -> tuple[int, float]:
        """How soon the next victim goes, compared with those of other orders; lower is sooner: its
        kind (0: of no use, 1: an extra copy, 2: any other), and about when it was used last."""
        return 2, now - self.policy.victim_age(now)

    def victim_age(self, now: float) -> float:
        return self.policy.victim_age(now)

    def holds(self, entry: Entry) -> bool:
        """True when the block can be chosen as a victim, for checks."""
        return entry.is_candidate

    # --- for hints -------------------------------------------------------------------------

    def begin_write(self, index: Index, request: ReserveRequest, now: float, *, moved: bool) -> Any:
        """The `Entry.session` of what this call stores. `moved`: blocks change their place only."""

    def end_write(
        self, session: Any, granted: Sequence[Entry], request: ReserveRequest, *, promoted: bool
    ) -> None:
        """Blocks of one chain were granted; `promoted`: they come from a slower tier."""

    def block_added(self, entry: Entry) -> None:
        """A block with a `session` is in the index."""

    def block_shared(self, entry: Entry) -> None:
        """Another session uses the block, too."""

    def answered(self, entry: Entry, now: float) -> None:
        """A reader has got this block, and no later one of its chain."""

    def hint(
        self, subject: Subject, resume_in: float | None, now: float, *, age_s: float, find: Find
    ) -> bool | None:
        """A hint, `age_s` seconds old. None: it is about nothing here, or about no session."""
        return None

    def hint_of(self, session: Any, now: float) -> SessionHint | None:
        """What another store that gets blocks of this `Entry.session` has to know."""

    def due(self, entry: Entry) -> float | None:
        """When the block is needed."""

    def is_over(self, entry: Entry) -> bool:
        """Nobody uses the block again."""
        return False

    def next_useless(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """Such a block that may go, tails first."""

    @property
    def figures(self) -> Counter[str]:
        """What came of hints, and what the policy infers."""
        return Counter(self.inferred().figures)

    def inferred(self) -> Inferred:
        found: Inferred = getattr(self.policy, "inferred", Inferred)()
        return found

    def bytes_of_programs(self) -> Counter[str]:
        """As far as hints name them."""
        return Counter()

    def check(self, entries: Collection[Entry], tenant: str | None = None) -> None:
        """Of the stored blocks, all of one tenant if it is given. Raises InvariantViolated."""


def make_order(policy: Policy[Entry], budget: int, rounded: Callable[[int], int]) -> Order:
    made: Order = resolve_name(ORDERS[-1])(policy, budget, rounded)
    return made
