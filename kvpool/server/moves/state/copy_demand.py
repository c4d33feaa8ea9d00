"""Which blocks of a server are read, of those that should have copies; and the extra copies here.

The server that is read knows with how many copies a block was written. Pure: `hand_over.py` asks
masters who has the block, and another server to fetch it (design: movers).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, groupby, islice, zip_longest
from typing import Final

from kvpool.server.moves.state.drain_plan import DrainPlan
from kvpool.server.moves.state.wants import PAUSE, BlockName, MovePlanner, MoveView, Want, Wants
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.shares import Recent
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace

#: What was read is looked at so often.
_ROUND_S: Final = 1.0
#: Stretches of one round, of tenants in turns, of whom others come first the next time: more wait
#: until they are read again.
_STRETCHES_MAX: Final = 16
#: Extra copies here of which masters are asked in one round whether they are the last ones.
_EXTRAS: Final = 512

#: Reads that are remembered until they are looked at, each tenant's last ones, and at most so many
#: blocks of them in one round, of each tenant its part. What is still read comes again.
_BATCHES_MAX: Final = 256
_COUNTED_MAX: Final = 4096
_STEP: Final = 512
_FOLLOWED_MAX: Final = 8192
_EXTRAS_MAX: Final = 65_536
#: A block is looked at again after so long at the earliest.
CHECK_S: Final = 5.0

_Batch = tuple[Namespace, int, Sequence[bytes]]


@dataclass(slots=True)
class _Followed:
    """A block that is read and was written with copies."""

    checked_at: float = -math.inf
    short: int = 0  # looks in a row at which it had too few copies


class RepairPlanner(MovePlanner):
    """Wants lost copies of what is read to be made again, and looks after extra copies here; the
    reads that it knows are bounded whatever clients do."""

    copies, stalled_s = 2, 0.0  # what did not come is wanted again when it is read again

    def __init__(self, store: Blocks) -> None:
        self._store = store
        self._batches: Recent[int, _Batch] = Recent(_BATCHES_MAX)
        self._numbers = itertools.count()
        self._followed: Recent[BlockName, _Followed] = Recent(_FOLLOWED_MAX)
        self._extras: Recent[BlockName, BlockName] = Recent(_EXTRAS_MAX)
        self._next_at = -math.inf
        self._rounds = 0
        self.repaired = 0

    def read(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> bool:
        """A client has read these blocks; True for the first read of a round. One entry, for any
        size."""
        batch = namespace, part, digests
        self._batches.put(tenant_of(namespace.name), next(self._numbers), batch)
        return len(self._batches) == 1

    def brought_extra(self, name: BlockName) -> None:
        """An extra copy was fetched. Of too many one counts as any other block from now on."""
        if (dropped := self._extras.put(tenant_of(name.namespace.name), name, name)) is not None:
            self._keep(dropped)

    def due_at(self) -> float:
        return self._next_at if len(self._batches) or len(self._extras) else math.inf

    def wants(self, view: MoveView) -> Wants:
        self._next_at = view.now + _ROUND_S
        plans: dict[str, DrainPlan] = {}
        for due in self.read_since(view.now):
            for tenant, entries in groupby(due, lambda one: tenant_of(one.index.namespace.name)):
                plans.setdefault(tenant, DrainPlan(self._store.peek)).add(list(entries))
            yield PAUSE
        self._rounds += 1
        first = self._rounds * _STRETCHES_MAX % max(1, len(plans))
        turns = islice(cycle(plans.values()), first, first + len(plans))
        in_turns = chain.from_iterable(zip_longest(*(one.stretches() for one in turns)))
        yield from map(Want, islice(filter(None, in_turns), _STRETCHES_MAX))
        yield from map(Want, self._next_extras())

    def missing(
        self,
        entries: Mapping[BlockName, Entry],
        holders: Mapping[BlockName, set[str]],
        view: MoveView,
    ) -> list[BlockName]:
        lost = []
        for name, entry in entries.items():
            count = len(holders[name])
            if not entry.copies:
                if holders[name] <= {view.server}:  # the last one is extra no more, in any tier
                    self._keep(name)
                    self._extras.pop(tenant_of(name.namespace.name), name)
            elif view.server in holders[name]:  # else masters do not know of it any more, or yet
                rank = sorted(holders[name]).index(view.server)
                if self.may_copy(name, rank, short=count < entry.copies):
                    lost.append(name)
        return lost

    def _keep(self, name: BlockName) -> None:
        """The block is no extra copy any more, in each tier that has it."""
        for store in self._store.stores:
            entry = store.index.peek(*name)
            if entry is not None:
                store.index.raise_copies(entry, 1)

    def came(self, name: BlockName, target: str, *, moved: bool) -> None:
        self._follow(name).short = 0
        self.repaired += moved

    def read_since(self, now: float) -> Iterator[list[Entry]]:
        """What was read since the last round, in small steps: the blocks whose copies should be
        looked at."""
        names = _last_of(self._batches.values())
        self._batches = Recent(_BATCHES_MAX)
        for first in range(0, len(names), _STEP):
            due = []
            for name in names[first : first + _STEP]:
                entry = self._store.peek(*name)
                if entry is None or entry.copies <= 1:
                    continue
                followed = self._follow(name)
                if now >= followed.checked_at + CHECK_S:
                    followed.checked_at = now
                    due.append(entry)
            yield due

    def may_copy(self, name: BlockName, rank: int, *, short: bool) -> bool:
        """Whether this server has a copy of the block made now, if it has too few (`short`).

        Of the servers that have it the one with `rank` 0 does so at once, and each other one only
        if at later looks nobody has: two of them would make two.
        """
        followed = self._follow(name)
        followed.short = followed.short + 1 if short else 0
        return followed.short > rank

    # --- inside ------------------------------------------------------------------------------

    def _next_extras(self) -> Iterator[list[Entry]]:
        """Those to look at now, of one namespace and part each; they come last the next time."""
        groups: dict[tuple[Namespace, int, int], list[Entry]] = {}
        for _ in range(min(_EXTRAS, len(self._extras))):
            oldest = self._extras.oldest()
            assert oldest is not None
            tenant, name, _ = oldest
            self._extras.pop(tenant, name)
            entry = self._store.peek(*name)
            if entry is not None and not entry.copies:  # it is here, and still an extra copy
                self._extras.put(tenant, name, name)
                key = name.namespace, name.part, len(name.digest)
                groups.setdefault(key, []).append(entry)
        return iter(groups.values())

    def _follow(self, name: BlockName) -> _Followed:
        tenant = tenant_of(name.namespace.name)
        followed = self._followed.get(tenant, name) or _Followed()
        self._followed.put(tenant, name, followed)
        return followed


def _last_of(batches: Iterable[_Batch]) -> list[BlockName]:
    """The blocks of the last batches, the latest first, as many as one round looks at: of a tenant
    as many as of every other one, or all that it has read."""
    read: defaultdict[str, list[_Batch]] = defaultdict(list)
    for batch in batches:
        read[tenant_of(batch[0].name)].append(batch)
    sizes = {one: sum(len(digests) for *_, digests in found) for one, found in read.items()}
    names: list[BlockName] = []
    for number, tenant in enumerate(sorted(read, key=sizes.__getitem__)):
        left = (_COUNTED_MAX - len(names)) // (len(read) - number)
        for namespace, part, digests in read[tenant]:
            taken = digests[:left]
            left -= len(taken)
            names += [BlockName(namespace, part, digest) for digest in taken]
    return names
