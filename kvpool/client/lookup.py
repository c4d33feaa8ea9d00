"""Where blocks are: requests to masters, and the checks of their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from kvpool.client.masters import Masters
from kvpool.client.presence import presence
from kvpool.client.servers import Servers
from kvpool.errors import BadKey, MasterLost, Unavailable
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    BlockKey,
    Demand,
    Explanation,
    Match,
    Namespace,
    Presence,
    ReadResult,
    ReadStatus,
    Replica,
    Run,
    WorkingSet,
    check_digest_size,
    check_digests,
)
from kvpool.wire import messages as wire

#: Keys in one request to a master: an answer where each block is elsewhere must fit, too.
_FIND_KEYS: Final = 4096
#: Pages of a list that a master may send.
_PAGES_MAX: Final = 1000


class Asks(Protocol):
    """What a lookup needs of `Masters`."""

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        """The first good answer. Raises Unavailable."""


async def match(
    masters: Asks,
    namespace: Namespace,
    chain: Sequence[bytes],
    deadline: float,
    session: str = "",
    *,
    observes: bool = False,
) -> Match:
    """As `Pool.match`; it is no demand if it only `observes`. It awaits nothing but
    `masters.ask`."""
    size = check_digest_size(chain)
    runs: list[Run] = []
    for first in range(0, len(chain), _FIND_KEYS):
        digests = chain[first : first + _FIND_KEYS]
        packed = b"".join(digests)
        if len(packed) != size * len(digests):  # cheaper than a check of each key
            check_digests(chain)
        arrived = "" if first else session  # once for a chain
        request = wire.Find(namespace.name, namespace.parts, size, packed, True, arrived, observes)
        try:
            found = await masters.ask(request, wire.FindReply, deadline)
            runs += _runs(found, first, len(digests))
        except Unavailable:
            return Match(tuple(runs), first, ReadStatus.NO_MASTER)
        if found.misses:
            length = runs[-1].last + 1 if runs else 0
            return Match(tuple(runs), length, _miss(found.misses[0]))
    return Match(tuple(runs), len(chain), ReadStatus.HIT)


class Lookup:
    """Requests to masters: the first that answers is believed."""

    def __init__(self, masters: Masters, servers: Servers) -> None:
        self._masters = masters
        self._servers = servers

    async def match(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        deadline: float,
        session: str = "",
        *,
        observes: bool = False,
    ) -> Match:
        """As `Pool.match`; it is no demand if it only `observes`."""
        return await match(self._masters, namespace, chain, deadline, session, observes=observes)

    async def explain(
        self, namespace: Namespace, digests: Sequence[bytes], deadline: float
    ) -> list[Explanation]:
        """As `Pool.explain`."""
        size = check_digests(digests)
        answers: list[Explanation] = []
        for first in range(0, len(digests), BATCH_BLOCKS_MAX):
            batch = digests[first : first + BATCH_BLOCKS_MAX]
            request = wire.Explain(namespace.name, namespace.parts, size, b"".join(batch))
            explained = await self._masters.ask(request, wire.Explained, deadline)
            if len(explained.blocks) != len(batch):
                raise MasterLost(f"a master answered for {len(explained.blocks)} of {len(batch)}")
            answers += [
                Explanation(
                    BlockKey(namespace, digest),
                    _read_status(status),
                    tuple(Replica(*replica) for replica in replicas),
                    text,
                )
                for digest, (status, text, replicas) in zip(batch, explained.blocks, strict=True)
            ]
        return answers

    async def namespaces(self, deadline: float) -> list[tuple[Namespace, int]]:
        """As `Pool.namespaces`."""
        found: list[tuple[Namespace, int]] = []
        for _ in range(_PAGES_MAX):
            last = found[-1][0] if found else None
            question = wire.Namespaces(last.name, last.parts) if last else wire.Namespaces()
            answer = await self._masters.ask(question, wire.NamespacesReply, deadline)
            page = answer.namespaces
            # Pages are sorted. A master whose pages do not go on would be asked in vain.
            if not page or page[-1][:2] <= (question.after, question.parts):
                break
            try:
                found += [(Namespace(name, parts), count) for name, parts, count in page]
            except BadKey as error:
                raise MasterLost(f"a master answered with {error}") from None
            if not answer.more:
                break
        return found

    async def demand(self, deadline: float) -> Demand:
        """As `Pool.demand`."""
        answer = await self._masters.ask(wire.Demands(), wire.DemandsReply, deadline)
        try:
            sets = [
                WorkingSet(Namespace(name, parts), size, blocks)
                for name, parts, size, blocks in answer.working_sets
            ]
        except BadKey as error:
            raise MasterLost(f"a master answered with {error}") from None
        return Demand(answer.seconds, tuple(sets), answer.chain_servers, answer.beyond_hole)

    async def locate(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float
    ) -> tuple[list[ReadResult], list[list[str]]]:
        """For each block the result so far, and the servers to ask, best last (they are popped).

        Blocks that no master was asked about, because none answered, are misses: NO_MASTER.
        """
        results = [ReadResult(ReadStatus.NO_MASTER)] * len(digests)
        runs: list[Run] = []
        for first in range(0, len(digests), _FIND_KEYS):
            batch = digests[first : first + _FIND_KEYS]
            try:
                packed = b"".join(batch)
                request = wire.Find(namespace.name, namespace.parts, len(batch[0]), packed, False)
                found = await self._masters.ask(request, wire.FindReply, deadline)
                batch_runs = _runs(found, first, len(batch))
            except Unavailable:
                break
            runs += batch_runs
            found_at = {i for run in batch_runs for i in range(run.first, run.last + 1)}
            misses = iter(found.misses)
            for position in range(first, first + len(batch)):
                if position not in found_at:
                    results[position] = ReadResult(_miss(next(misses, 0)))
        return results, self._candidates(runs, part, len(digests))

    async def where(
        self, namespace: Namespace, digests: Sequence[bytes], deadline: float
    ) -> list[Presence | None]:
        """As `Pool.where`."""
        size = check_digest_size(digests)
        answers: list[Presence | None] = []
        for first in range(0, len(digests), _FIND_KEYS):
            batch = digests[first : first + _FIND_KEYS]
            packed = b"".join(batch)
            if len(packed) != size * len(batch):  # cheaper than a check of each key
                check_digests(digests)
            request = wire.Find(namespace.name, namespace.parts, size, packed, False, observes=True)
            found = await self._masters.ask(request, wire.FindReply, deadline)
            runs = _runs(found, 0, len(batch))
            near = await self._servers.near(
                {replica.server for run in runs for replica in run.replicas}, deadline
            )
            page: list[Presence | None] = [None] * len(batch)
            for run in runs:
                here = presence(run.replicas, namespace.parts, near)
                page[run.first : run.last + 1] = [here] * (run.last + 1 - run.first)
            answers += page
        return answers

    async def holders(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float
    ) -> list[list[str]]:
        """The servers that have this part of each block. Raises MasterLost when it is not known.

        Also of blocks whose other parts are missing, which `locate` reports as misses.
        """
        if namespace.parts == 1:
            _, candidates = await self.locate(namespace, part, digests, deadline)
            return candidates
        explained = await self.explain(namespace, digests, deadline)
        return [
            [replica.server for replica in one.replicas if replica.part == part]
            for one in explained
        ]

    def locate_in(
        self, match: Match, part: int, count: int
    ) -> tuple[list[ReadResult], list[list[str]]]:
        """The same, from a match of the first `count` blocks or more."""
        # What a match does not cover was not asked for: never a hit, whatever the match says.
        unknown = ReadStatus.NEVER_WRITTEN if match.stopped is ReadStatus.HIT else match.stopped
        return [ReadResult(unknown)] * count, self._candidates(match.runs, part, count)

    def _candidates(self, runs: Iterable[Run], part: int, count: int) -> list[list[str]]:
        """The servers that have each of `count` blocks, best last."""
        candidates: list[list[str]] = [[] for _ in range(count)]
        for run in runs:
            servers = [replica.server for replica in run.replicas if replica.part == part]
            if len(servers) > 1:
                servers = self._servers.rank(servers)[::-1]
            for position in range(run.first, min(run.last + 1, count)):
                candidates[position] = servers[:]  # of its own: each block pops from its list
        return candidates


def _runs(found: wire.FindReply, first: int, count: int) -> list[Run]:
    """The runs of an answer, with positions in the whole chain.

    Raises Unavailable for an answer that contradicts itself: that master did not answer.
    """
    runs = []
    position = covered = 0
    for run_first, run_last, replicas in found.runs:
        if not position <= run_first <= run_last < count:
            raise Unavailable(f"a master answered with run {run_first}-{run_last} of {count}")
        position = run_last + 1
        covered += position - run_first
        runs.append(Run(first + run_first, first + run_last, tuple(Replica(*r) for r in replicas)))
    if not found.misses and covered != count:
        raise Unavailable(f"a master answered for {covered} of {count} blocks")
    return runs


def _read_status(value: int) -> ReadStatus:
    try:
        return ReadStatus(value)
    except ValueError:
        return ReadStatus.NEVER_WRITTEN


def _miss(value: int) -> ReadStatus:
    """The reason of a miss; a hit is no reason."""
    status = _read_status(value)
    return ReadStatus.NEVER_WRITTEN if status.hit else status
