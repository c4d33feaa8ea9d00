"""What servers and clients ask of a server about blocks that move, and what it answers.

Over any channel: a transport carries these messages and looks into neither. (design: moves)
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from kvpool.errors import BadMessage
from kvpool.protocols import Channel
from kvpool.types import COPIES_MAX, ROOT, MoveStatus, Namespace, ReadStatus, SessionHint
from kvpool.wire.messages import StatusReply, keys_of, pack_parents, unpack_parents
from kvpool.wire.moves import SESSION_RUNS_MAX, Fetch, Propose, Proposed, SessionRun

S = TypeVar("S")

#: By value; calling an enum takes ten times as long.
_MOVE: Final = tuple(MoveStatus)
_READ: Final = tuple(ReadStatus)


class Offer(NamedTuple):
    """What a server tells another one about a block that it may fetch.

    The rest is of a hit only: bytes, checksum, parent, the seconds since its last use, the session
    that alone uses it, if that has not ended, and with how many copies it was written (0: this one
    is an extra copy).
    """

    status: ReadStatus
    size: int = 0
    checksum: int = 0
    parent: bytes = ROOT
    age_s: float = 0.0
    session_hint: SessionHint | None = None
    copies: int = 1


async def offer(
    channel: Channel,
    namespace: Namespace,
    part: int,
    digests: Sequence[bytes],
    receiver: str,
    *,
    deadline: float,
) -> list[Offer]:
    """What the server `receiver`, which is about to fetch these blocks, must know of them.

    It is no use of a block. Removals of the hits are passed on to the receiver from now on. At most
    BATCH_BLOCKS_MAX blocks. Raises BadMessage for an answer that does not fit the request.
    """
    message = Propose(*keys_of(namespace, digests), part, receiver)
    return offers_of(await channel.request(message, Proposed, deadline=deadline), digests)


async def fetch(
    channel: Channel,
    namespace: Namespace,
    part: int,
    digests: Sequence[bytes],
    source: str,
    *,
    extra: bool = False,
    deadline: float,
) -> list[MoveStatus]:
    """Have the server read blocks from the server `source` and store them, in their order.

    At `deadline` the rest is NOT_YET. A cancelled call leaves no reservation. `extra` copies are
    evicted before all others. At most BATCH_BLOCKS_MAX blocks.
    """
    wait_s = max(0.0, deadline - asyncio.get_running_loop().time())
    message = Fetch(*keys_of(namespace, digests), part, source, wait_s, extra)
    return moved(await channel.request(message, StatusReply, deadline=deadline), len(digests))


def moved(answer: StatusReply, count: int) -> list[MoveStatus]:
    """One status for each of `count` blocks. Raises BadMessage."""
    return _statuses(answer.statuses, _MOVE, count)


def _statuses(packed: bytes, kinds: Sequence[S], count: int) -> list[S]:
    if len(packed) != count:
        raise BadMessage(f"{len(packed)} statuses for {count} blocks")
    try:
        return [kinds[value] for value in packed]
    except IndexError:
        raise BadMessage(f"{max(packed)} is not a valid {type(kinds[0]).__name__}") from None


def proposed(offers: Sequence[Offer], digest_size: int) -> Proposed:
    """These offers as an answer."""
    hits = [offer for offer in offers if offer.status.hit]
    return Proposed(
        bytes([offer.status for offer in offers]),
        [offer.size for offer in hits],
        [offer.checksum for offer in hits],
        pack_parents([offer.parent for offer in hits], digest_size),
        [offer.age_s for offer in hits],
        bytes([offer.copies for offer in hits]),
        pack_sessions([offer.session_hint for offer in hits]),
    )


def offers_of(answer: Proposed, digests: Sequence[bytes]) -> list[Offer]:
    """The other way round. Raises BadMessage for an answer that does not fit these blocks."""
    offers = [Offer(status) for status in _statuses(answer.statuses, _READ, len(digests))]
    hits = [i for i, offer in enumerate(offers) if offer.status.hit]
    parents = unpack_parents(answer.parents, len(digests[0]))
    sizes, checksums, ages_s, copies = answer.sizes, answer.checksums, answer.ages_s, answer.copies
    counts = {len(sizes), len(checksums), len(parents), len(ages_s), len(copies)}
    if counts != {len(hits)}:
        raise BadMessage(f"{len(hits)} blocks offered, and properties of {sorted(counts)}")
    if max(copies, default=0) > COPIES_MAX:
        raise BadMessage(f"{max(copies)} copies of a block, limit {COPIES_MAX}")
    properties = zip(sizes, checksums, parents, ages_s, copies, strict=True)
    for position, (size, checksum, parent, age_s, count) in zip(hits, properties, strict=True):
        offers[position] = Offer(ReadStatus.HIT, size, checksum, parent, age_s, copies=count)
    for position, hint in zip(hits, unpack_sessions(answer.sessions), strict=False):
        offers[position] = offers[position]._replace(session_hint=hint)
    return offers


def pack_sessions(hints: Sequence[SessionHint | None]) -> list[SessionRun]:
    """The sessions of blocks, in runs; of too many runs the first ones."""
    runs: list[SessionRun] = []
    for hint, group in itertools.groupby(hints):
        session, resume_in = hint or ("", None)
        runs.append((sum(1 for _ in group), session, resume_in))
    return runs[:SESSION_RUNS_MAX] if any(session for _, session, _ in runs) else []


def unpack_sessions(runs: Sequence[SessionRun]) -> Iterator[SessionHint | None]:
    """The other way round; it ends behind the last run."""
    for count, session, resume_in in runs:
        yield from itertools.repeat(SessionHint(session, resume_in) if session else None, count)
