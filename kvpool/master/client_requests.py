"""What clients ask a master: where blocks are, where to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Final

from kvpool import spans
from kvpool.errors import BadMessage
from kvpool.master.extension import DEMANDS, NoDemand, NoHints
from kvpool.master.state.changes import PAGE_SIZE, size_of
from kvpool.master.state.directory import ChainMatch, Directory
from kvpool.protocols import Caller
from kvpool.spans import MarkedChain
from kvpool.types import Demand, Namespace, ReadStatus, Replica, Run
from kvpool.wire import messages as wire

#: Copies of one block that an answer names, so that they fit into a message with the longest names.
_REPLICAS_MAX: Final = 256
#: Servers for a write that an answer names.
_PLACES_MAX: Final = 64


class ClientRequests:
    """Their handlers, and figures of what was asked for."""

    def __init__(self, directory: Directory, hints: NoHints, now: Callable[[], float]) -> None:
        self._directory = directory
        self._hints = hints
        self.now = now
        self._demand: NoDemand = resolve_name(DEMANDS[-1])(directory)
        #: Servers may be alive whose blocks are not in the map.
        self.partial = True
        #: Matches by what ended them, the first miss or `hit`; blocks asked for, and found.
        self.matches: Counter[ReadStatus] = Counter()
        self.asked_blocks = 0
        self.found_blocks = 0
        #: Matches that ended at a mark, because the map did not know its span.
        self.unknown_spans = 0

    def find(self, m: wire.Find, caller: Caller) -> wire.FindReply:
        if m.prefix:
            return self._match(m)
        if m.before or m.behind:
            raise BadMessage("marks of spans in a question that is no match")
        if m.session:
            self._hints.asked(m.session)
        namespace, digests = wire.unpack_question(m)
        runs, reasons = self._directory.find(namespace, digests)
        if not m.observes:
            self._demand.asked(namespace, digests, self.now())
        return _found(runs, reasons, partial=self.partial)

    def _match(self, m: wire.Find) -> wire.FindReply:
        namespace, chain = wire.unpack_chain(m)
        behind = wire.unpacked_marks(m.behind)
        if m.session:
            self._hints.asked(m.session)
        match = self._directory.match_chain(namespace, chain)
        if m.session is None:
            self._hints.found(namespace, chain, match)
        missed = {} if match.stopped in (None, ReadStatus.HIT) else {match.length: match.stopped}
        if not m.observes:
            self._demand.asked_chain(namespace, chain, self.now(), behind)
            self._count_match(namespace, chain, match)
        return _found(match.runs, missed, spans.SPAN_BLOCKS, self.partial)

    def _count_match(self, namespace: Namespace, chain: MarkedChain, match: ChainMatch) -> None:
        self.found_blocks += match.length
        nth = 0
        if match.stopped is None:  # the client comes again with the keys of what follows
            self.asked_blocks += match.length
            self.unknown_spans += 1
        else:
            self.asked_blocks += len(chain)
            self.matches[match.stopped] += 1
            nth = self.matches[match.stopped]
        self._demand.found(namespace, chain, match, nth)

    def place(self, m: wire.Place, caller: Caller) -> wire.PlaceReply:
        namespace, digests = wire.unpack_question(m)
        if m.host:  # else a server hands them over: no client wants them
            size = m.size * m.parts * m.copies // max(1, len(digests))
            self._demand.asked(namespace, digests, self.now(), size)
        where = m.parent, m.size, m.host, m.copies, m.session
        placement = self._directory.place(namespace, digests, *where)
        return wire.PlaceReply(
            list(placement.servers[:_PLACES_MAX]),
            bytes([min(copies, 255) for copies in placement.copies]),
        )

    def demand(self, now: float) -> Demand:
        """What clients ask this master for, as means over its last minutes."""
        demand = self._demand.demand(now)
        return demand._replace(asked_blocks=self.asked_blocks, found_blocks=self.found_blocks)


def _found(
    runs: Sequence[Run], reasons: Mapping[int, ReadStatus], step: int = 1, partial: bool = False
) -> wire.FindReply:
    """An answer about as many of the blocks as fit into a message; of a chain a multiple of `step`,
    if that is possible."""
    size, more = 0, False
    for run in runs if len(runs) > 1 else ():
        size += 32 + size_of_replicas(run.replicas)
        if size > PAGE_SIZE and run is not runs[0]:
            end = run.first - run.first % step or run.first
            runs = [one._replace(last=min(one.last, end - 1)) for one in runs if one.first < end]
            reasons = {at: reason for at, reason in reasons.items() if at < end}
            more = True
            break
    return wire.FindReply(
        [(run.first, run.last, replicas_of(run.replicas)) for run in runs],
        bytes(reasons.values()),
        more,
        partial and bool(reasons),
    )


def replicas_of(replicas: tuple[Replica, ...]) -> list[tuple[str, str, int]]:
    if len(replicas) > _REPLICAS_MAX:  # so many of each part
        most = max(1, _REPLICAS_MAX // len({one.part for one in replicas}))
        named: Counter[int] = Counter()
        kept = []
        for one in replicas:
            named[one.part] += 1
            if named[one.part] <= most:
                kept.append(one)
        replicas = tuple(kept)
    return [(replica.server, replica.tier, replica.part) for replica in replicas]


def size_of_replicas(replicas: Sequence[Replica]) -> int:
    return sum([16 + size_of(one.server, one.tier) for one in replicas[:_REPLICAS_MAX]])
