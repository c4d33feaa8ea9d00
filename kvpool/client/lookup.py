"""Where blocks are: requests to masters, and the checks of their answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from kvpool import spans
from kvpool.client.checks import check_digest_size, check_digest_types, check_digests
from kvpool.client.location_cache import KnownSpans
from kvpool.client.masters import Masters
from kvpool.client.servers import Servers
from kvpool.errors import MasterLost, Unavailable
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    MEMORY_TIERS,
    BlockKey,
    Explanation,
    Match,
    Namespace,
    ReadResult,
    ReadStatus,
    Replica,
    Run,
)
from kvpool.wire import messages as wire

#: Keys in one request to a master: an answer where each block is elsewhere must fit, too.
_FIND_KEYS: Final = 4096
#: The same of a match, which makes a master learn spans; and of its first question: most prompts
#: are known as far as marks reach, and new a little later.
_MATCH_KEYS: Final = 2048
_FIRST_KEYS: Final = 512


class Asks(Protocol):
    """What a lookup needs of `Masters`."""

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        """The first good answer. Raises Unavailable."""


async def match(
    masters: Asks,
    namespace: Namespace,
    chain: Sequence[bytes],
    deadline: float,
    session: str | None = "",
    *,
    known: KnownSpans,
    observes: bool = False,
) -> Match:
    """As `Pool.match`; it is no demand if it only `observes`. It awaits nothing but
    `masters.ask`. (design: match)"""
    size = check_digest_size(chain)
    try:
        packed = b"".join(chain)
    except TypeError:
        packed = b""
    if len(packed) != size * len(chain):  # cheaper than a check of each key
        check_digests(chain)
    page = _Page(namespace, size, packed, known)
    runs: list[Run] = []
    at = 0
    while at < len(chain):
        question, count = page.question(at, session, observes)
        try:
            found = await masters.ask(question, wire.FindReply, deadline)
            batch = _runs(found, at, count, page.spans_before)
        except Unavailable:
            return Match(tuple(runs), at, ReadStatus.NO_MASTER)
        session = session and ""  # it has arrived; without a name, where the last page ends
        reached = batch[-1].last + 1 if batch else at
        if runs and batch and runs[-1].replicas == batch[0].replicas:
            batch[0] = batch[0]._replace(first=runs.pop().first)
        runs += batch
        page.learn(at, reached, missed=bool(found.misses))
        if found.misses:
            return Match(tuple(runs), reached, _miss(found.misses[0]))
        at = reached
    return Match(tuple(runs), len(chain), ReadStatus.HIT)


class _Page:
    """The questions of one match: marks of spans that are known, then keys, then other marks."""

    def __init__(self, namespace: Namespace, size: int, packed: bytes, known: KnownSpans) -> None:
        self._namespace = namespace
        self._size = size
        self._packed = packed
        self._count = len(packed) // size
        self._marks = spans.marks_of(packed, size)
        self._known = known
        #: Spans of the last question whose keys it does not have.
        self.spans_before = 0
        self._unknown = False  # the last answer ended at a mark
        self._was_unknown = False  # an earlier one did

    def question(self, at: int, session: str | None, observes: bool) -> tuple[wire.Find, int]:
        """About the blocks from position `at` on; and how many they are."""
        first, size = at // spans.SPAN_BLOCKS, self._size
        where = self._namespace.name, self._namespace.parts, size
        if at % spans.SPAN_BLOCKS:  # all that fitted into the last answer: the rest of that span
            self.spans_before = 0
            end = min((first + 1) * spans.SPAN_BLOCKS, self._count)
            keys = self._packed[at * size : end * size]
            return wire.Find(*where, keys, True, session, observes), end - at
        # At least one key: so an answer ends with a reason, or at the end of the question.
        most = min(first + wire.SPANS_MAX, (self._count - 1) // spans.SPAN_BLOCKS)
        known = 0 if self._unknown else self._known.count(self._marks, first, most)
        self.spans_before = known
        begin = at + known * spans.SPAN_BLOCKS
        goes_on = at and not known and not self._unknown  # all that was asked for is there
        keys_max = _MATCH_KEYS if goes_on else _FIRST_KEYS
        end = min(begin + keys_max // spans.SPAN_BLOCKS * spans.SPAN_BLOCKS, self._count)
        keys = self._packed[begin * size : end * size]
        last = end // spans.SPAN_BLOCKS
        # What follows was asked for with the first question.
        behind = self._marks[last : last + wire.SPANS_MAX] if not at else []
        before = spans.pack_marks(self._marks[first : first + known])
        marks = before, spans.pack_marks(behind)
        return wire.Find(*where, keys, True, session, observes, *marks), end - at

    def learn(self, at: int, reached: int, *, missed: bool) -> None:
        """The answer to the last question, which was about the blocks from `at` on."""
        first, last = at // spans.SPAN_BLOCKS, reached // spans.SPAN_BLOCKS
        self._known.add(self._marks[first:last])
        self._unknown = last < first + self.spans_before and not missed
        if self._unknown:
            # One that was broken, or a master that knows few: the second time it is all of them.
            end = first + self.spans_before if self._was_unknown else last + 1
            self._known.discard(self._marks[last:end])
            self._was_unknown = True


class Lookup:
    """Requests to masters: the first that answers is believed."""

    def __init__(self, masters: Masters, servers: Servers) -> None:
        self._masters = masters
        self._servers = servers
        self.match = partial(match, masters, known=KnownSpans())

    async def explain(
        self, namespace: Namespace, digests: Sequence[bytes], deadline: float
    ) -> list[Explanation]:
        """As `Admin.explain`."""
        size = check_digests(digests)
        answers: list[Explanation] = []
        while len(answers) < len(digests):
            batch = digests[len(answers) : len(answers) + BATCH_BLOCKS_MAX]
            request = wire.Explain(namespace.name, namespace.parts, size, b"".join(batch))
            explained = await self._masters.ask(request, wire.Explained, deadline)
            count = len(explained.blocks)
            if not (0 < count <= len(batch) if explained.more else count == len(batch)):
                raise MasterLost(f"a master answered for {count} of {len(batch)}")
            answers += [
                Explanation(
                    BlockKey(namespace, digest),
                    _read_status(status),
                    tuple(Replica(*replica) for replica in replicas),
                    text,
                )
                for digest, (status, text, replicas) in zip(batch, explained.blocks, strict=False)
            ]
        return answers

    async def locate(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float
    ) -> tuple[list[ReadResult], list[list[str]]]:
        """For each block the result so far, and the servers to ask, best last (they are popped).

        Blocks that no master was asked about, because none answered, are misses: NO_MASTER.
        """
        results = [ReadResult(ReadStatus.NO_MASTER)] * len(digests)
        runs: list[Run] = []
        with contextlib.suppress(Unavailable):
            async for first, count, found, reasons in self._found(namespace, digests, deadline):
                runs += found
                found_at = {i for run in found for i in range(run.first, run.last + 1)}
                misses = iter(reasons)
                for position in range(first, first + count):
                    if position not in found_at:
                        results[position] = ReadResult(_miss(next(misses, 0)))
        return results, self._candidates(runs, part, len(digests))

    async def contains(
        self, namespace: Namespace, digests: Sequence[bytes], deadline: float
    ) -> list[bool]:
        """As `Pool.contains`."""
        answers: list[bool] = []
        async for count, runs in self.pages(namespace, digests, deadline, observes=False):
            page = [False] * count
            for run in runs:
                page[run.first : run.last + 1] = [True] * (run.last + 1 - run.first)
            answers += page
        return answers

    async def pages(
        self, namespace: Namespace, digests: Sequence[bytes], deadline: float, *, observes: bool
    ) -> AsyncIterator[tuple[int, list[Run]]]:
        """Of blocks in whatever order: how many one question was about, and the runs found.

        Positions of runs count from the first block of their page. Raises BadKey, MasterLost.
        """
        check_digest_size(digests)
        check_digest_types(digests)
        if len(set(map(len, digests))) != 1:
            check_digests(digests)
        try:
            async for first, count, runs, _ in self._found(namespace, digests, deadline, observes):
                yield (
                    count,
                    [run._replace(first=run.first - first, last=run.last - first) for run in runs],
                )
        except Unavailable as error:  # an answer that contradicts itself is none
            raise MasterLost(str(error)) from None

    async def _found(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        deadline: float,
        observes: bool = False,
    ) -> AsyncIterator[tuple[int, int, list[Run], bytes]]:
        """Answers about these blocks, in turn: the first and the number of blocks that it is about,
        the runs found, and why each of the others is a miss. Raises Unavailable."""
        first = 0
        while first < len(digests):
            batch = digests[first : first + _FIND_KEYS]
            packed, size = b"".join(batch), len(batch[0])
            request = wire.Find(
                namespace.name, namespace.parts, size, packed, False, observes=observes
            )
            found = await self._masters.ask(request, wire.FindReply, deadline)
            runs = _runs(found, first, len(batch))
            count = _answered(found) if found.more else len(batch)
            yield first, count, runs, found.misses
            first += count

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
        """As `locate`, from a match of the first `count` blocks or more."""
        # What a match does not cover was not asked for: never a hit, whatever the match says.
        unknown = ReadStatus.NEVER_WRITTEN if match.stopped is ReadStatus.HIT else match.stopped
        return [ReadResult(unknown)] * count, self._candidates(match.runs, part, count)

    def _candidates(self, runs: Iterable[Run], part: int, count: int) -> list[list[str]]:
        """The servers that have each of `count` blocks, best last."""
        candidates: list[list[str]] = [[] for _ in range(count)]
        for run in runs:
            replicas = [one for one in run.replicas if one.part == part]
            servers = [one.server for one in replicas]
            if len(servers) > 1:
                below = {one.server for one in replicas if one.tier not in MEMORY_TIERS}
                servers = self._servers.rank(servers, *below, now=True)[::-1]
            for position in range(run.first, min(run.last + 1, count)):
                candidates[position] = servers[:]  # of its own: each block pops from its list
        return candidates


def _runs(found: wire.FindReply, first: int, count: int, spans_before: int = 0) -> list[Run]:
    """The runs of an answer, with positions in the whole chain.

    With `more` it is about the first blocks only. Without a reason it may end inside of the
    `spans_before` the keys, behind one of them. Raises Unavailable for an answer that contradicts
    itself: that master did not answer.
    """
    runs = []
    position = covered = 0
    for run_first, run_last, replicas in found.runs:
        if not position <= run_first <= run_last < count:
            raise Unavailable(f"a master answered with run {run_first}-{run_last} of {count}")
        position = run_last + 1
        covered += position - run_first
        runs.append(Run(first + run_first, first + run_last, tuple(Replica(*r) for r in replicas)))
    unknown = covered < spans_before * spans.SPAN_BLOCKS and not covered % spans.SPAN_BLOCKS
    if found.more:
        complete = 0 < _answered(found) <= count and (found.misses or covered == position)
    else:
        complete = found.misses or covered == count or (unknown and covered == position)
    if not complete:
        raise Unavailable(f"a master answered for {covered} of {count} blocks")
    return runs


def _answered(found: wire.FindReply) -> int:
    """The number of blocks that an answer is about."""
    return sum([last + 1 - first for first, last, _ in found.runs]) + len(found.misses)


def _read_status(value: int) -> ReadStatus:
    try:
        return ReadStatus(value)
    except ValueError:
        return ReadStatus.NEVER_WRITTEN


def _miss(value: int) -> ReadStatus:
    """The reason of a miss; a hit is no reason."""
    status = _read_status(value)
    return ReadStatus.NEVER_WRITTEN if status.hit else status
