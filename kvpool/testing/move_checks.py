"""What a transport does with requests about blocks that move: it carries them, and nothing is lost.

Servers fetch blocks from each other, bring them up and leave when they are asked to, over the
channels of any transport that declares it. Here the server answers what a check has laid down, so
that every field of a request and of an answer is compared (design: moves).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, Protocol, cast

from kvpool.errors import DeadlineExceeded, Overloaded, Unavailable
from kvpool.protocols import (
    Channel,
    SupportsDrain,
    SupportsFetch,
    SupportsPrefetch,
    SupportsRemoveAll,
)
from kvpool.testing.harness import (
    NAMESPACE,
    NotDeclared,
    Stage,
    TransportCheck,
    describe,
    digest,
)
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    COPIES_MAX,
    ROOT,
    DrainOrder,
    DrainReport,
    Holding,
    HoldingsPage,
    Left,
    MoveStatus,
    Namespace,
    Offer,
    ReadStatus,
    Removal,
    RemovalCursor,
    SessionHint,
)


class FetchChannel(Channel, SupportsFetch, Protocol):
    """A channel over which servers can be asked to fetch."""


TWO_PARTS: Final = Namespace("conformance/moves", parts=2)


async def fetching(stage: Stage) -> FetchChannel:
    """Connect. Raises NotDeclared."""
    channel = await stage.connect()
    if not isinstance(channel, SupportsFetch):
        raise NotDeclared("over this channel servers are not asked to fetch blocks")
    return cast(FetchChannel, channel)


def fetch_waits(stage: Stage) -> bool:
    """The server works on a fetch."""
    return stage.recorder.fetches == 1


@TransportCheck
async def an_offer_arrives_as_it_was_made(stage: Stage) -> None:
    """Every property of every block, hits and misses mixed; of keys of any length."""
    channel = await fetching(stage)
    for size in (16, 20, 32):
        parent, hint = digest("parent")[:size], SessionHint("a session", 2.5)
        offers = [
            Offer(ReadStatus.HIT, 1 << 33, (1 << 64) - 1, parent, 1.5, hint, copies=0),
            Offer(ReadStatus.EVICTED),
            Offer(ReadStatus.HIT, 1, 0, ROOT, 0.0, None, copies=COPIES_MAX),
            Offer(ReadStatus.NEVER_WRITTEN),
            Offer(ReadStatus.HIT, 4096, 7, parent, 1e6, SessionHint("another one")),
        ]
        keys = [digest(number)[:size] for number in range(len(offers))]
        stage.recorder.laid_down["offer"] = offers
        got = await channel.offer(TWO_PARTS, 1, keys, "receiver", deadline=stage.within())
        stage.expect(got == offers, f"{offers}", describe(got))
        asked = stage.recorder.moves.pop()
        wanted = ("offer", TWO_PARTS, 1, keys, "receiver")
        stage.expect(asked == wanted, f"the server to be asked {wanted}", describe(asked))


@TransportCheck
async def a_fetch_arrives_as_it_was_asked(stage: Stage) -> None:
    """The server gets every field and no more time than the caller has; each status comes back."""
    channel = await fetching(stage)
    statuses = list(MoveStatus)
    keys = [digest(number) for number in range(len(statuses))]
    stage.recorder.laid_down["fetch"] = statuses
    for extra in (False, True):
        got = await channel.fetch(
            TWO_PARTS, 1, keys, "source", extra=extra, deadline=stage.within(3.0)
        )
        stage.expect(got == statuses, f"{statuses}", describe(got))
        *asked, left_s = stage.recorder.moves.pop()
        wanted = ["fetch", TWO_PARTS, 1, keys, "source", extra]
        stage.expect(asked == wanted, f"the server to be asked {wanted}", describe(asked))
        stage.expect(0.0 < left_s <= 3.1, "3 s for the server at most", f"it had {left_s} s")


@TransportCheck
async def a_full_batch_is_offered_and_fetched(stage: Stage) -> None:
    """BATCH_BLOCKS_MAX blocks in one call."""
    channel = await fetching(stage)
    keys = [digest(f"batch/{number}") for number in range(BATCH_BLOCKS_MAX)]
    offers = [Offer(ReadStatus.HIT, n + 1, n, keys[n - 1], 1.0) for n in range(len(keys))]
    statuses = [MoveStatus(n % len(MoveStatus)) for n in range(len(keys))]
    stage.recorder.laid_down.update(offer=offers, fetch=statuses)
    got = await channel.offer(NAMESPACE, 0, keys, "receiver", deadline=stage.within())
    stage.expect(got == offers, "every offer in its place", f"{len(got)} came, or others")
    statuses_got = await channel.fetch(NAMESPACE, 0, keys, "source", deadline=stage.within())
    stage.expect(statuses_got == statuses, "every status in its place", describe(statuses_got))


@TransportCheck
async def a_fetch_ends_with_its_caller(stage: Stage) -> None:
    """Cancelled, late or cut off: the server stops as soon as nobody waits, and fetches no more."""
    channel = await fetching(stage)
    keys = [digest("slow")]
    for end, expected in (
        ("cancelled", asyncio.CancelledError),
        ("late", DeadlineExceeded),
        ("aborted", Unavailable),
    ):
        stage.recorder.answering.clear()
        deadline = stage.within(0.2 if end == "late" else 10.0)
        call = asyncio.ensure_future(channel.fetch(NAMESPACE, 0, keys, "source", deadline=deadline))
        await stage.eventually(
            lambda: fetch_waits(stage), "the server to be asked", lambda: "it was not"
        )
        if end == "cancelled":
            call.cancel()
        elif end == "aborted":
            channel.abort()
        (outcome,) = await stage.promptly([call], f"when it is {end}")
        fine = isinstance(outcome, expected)
        stage.expect(fine, f"{expected.__name__} from a fetch that is {end}", describe(outcome))
        await stage.eventually(
            lambda: not stage.recorder.fetches,
            f"the server to end a fetch that is {end}",
            lambda: "it goes on",
        )
        stage.recorder.answering.set()


@TransportCheck
async def a_refused_fetch_is_not_repeated(stage: Stage) -> None:
    """What the server raises reaches the caller after one attempt, and the channel goes on."""
    channel = await fetching(stage)
    keys = [digest("refused")]
    stage.recorder.laid_down["fetch"] = Overloaded("not now")
    calling = channel.fetch(NAMESPACE, 0, keys, "source", deadline=stage.within())
    await stage.raises(Overloaded, calling, "a fetch that is refused")
    attempts = len(stage.recorder.moves)
    stage.expect(attempts == 1, "one attempt", f"the server was asked {attempts} times")
    stage.recorder.laid_down["fetch"] = [MoveStatus.DONE]
    got = await channel.fetch(NAMESPACE, 0, keys, "source", deadline=stage.within())
    stage.expect(got == [MoveStatus.DONE], "FETCHED", describe(got))


@TransportCheck
async def a_prefetch_arrives_as_it_was_asked(stage: Stage) -> None:
    """Every field, and one status for each block."""
    channel = await stage.connect()
    if not isinstance(channel, SupportsPrefetch):
        raise NotDeclared("over this channel servers are not asked to bring blocks up")
    statuses = [MoveStatus(n % len(MoveStatus)) for n in range(BATCH_BLOCKS_MAX)]
    for count in (1, len(MoveStatus), BATCH_BLOCKS_MAX):
        keys = [digest(number)[:20] for number in range(count)]
        stage.recorder.laid_down["prefetch"] = statuses[:count]
        got = await channel.prefetch(TWO_PARTS, 1, keys, deadline=stage.within())
        stage.expect(got == statuses[:count], f"{count} statuses in order", describe(got))
        asked = stage.recorder.moves.pop()
        same = asked == ("prefetch", TWO_PARTS, 1, keys)
        stage.expect(same, "the server to be asked for these blocks", describe(asked))


@TransportCheck
async def a_drain_arrives_as_it_was_ordered(stage: Stage) -> None:
    """Each order and each field of the report, with no line, one and many."""
    channel = await stage.connect()
    if not isinstance(channel, SupportsDrain):
        raise NotDeclared("over this channel servers are not asked to leave")
    orders = (
        DrainOrder(),
        DrainOrder(begin=True, within_s=1.5, back_in_s=300.25),
        DrainOrder(cancel=True),
    )
    lines = tuple(Left(f"model/{n}", "no room", n, n << 40) for n in range(1, 65))
    reports = (
        DrainReport(None),
        DrainReport(MoveStatus.IN_PROGRESS, 1 << 40, 5, 1 << 46, 7, 1 << 47, lines[:1]),
        DrainReport(MoveStatus.DONE, 9, 0, 0, 9, 9 << 20),
        DrainReport(MoveStatus.NOT_YET, 10, 9, 8, 7, 6, lines),
    )
    for order in orders:
        for report in reports:
            stage.recorder.laid_down["drain"] = report
            got = await channel.drain(order, deadline=stage.within())
            stage.expect(got == report, f"{report}", describe(got))
            asked = stage.recorder.moves.pop()
            stage.expect(asked == ("drain", order), f"the order {order}", describe(asked))


@TransportCheck
async def a_namespace_is_removed_as_it_was_asked_for(stage: Stage) -> None:
    """What the server has, and each step: every field arrives, at its largest, too."""
    channel = await stage.connect()
    if not isinstance(channel, SupportsRemoveAll):
        raise NotDeclared("over this channel no namespace is removed as a whole")
    large = Namespace("n" * 512, 256)
    at = RemovalCursor(1 << 63, 1 << 60, 3, 255, 1 << 20)
    held = (Holding(NAMESPACE, 3, 4096), Holding(large, 1 << 30, 1 << 60))
    for found in (HoldingsPage(RemovalCursor(), (), False), HoldingsPage(at, held, True)):
        stage.recorder.laid_down["holdings"] = found
        got_held = await channel.holdings(("n" * 512, 256), deadline=stage.within())
        stage.expect(got_held == found, f"{found}", describe(got_held))
        asked = stage.recorder.moves.pop()
        stage.expect(asked == ("holdings", ("n" * 512, 256)), "the place", describe(asked))
    for done in (Removal(0, 0, None), Removal(7, 1 << 50, RemovalCursor(5, 4, 1, 2, 3))):
        stage.recorder.laid_down["remove_all"] = done
        got = await channel.remove_all(large, at, deadline=stage.within())
        stage.expect(got == done, f"{done}", describe(got))
        asked = stage.recorder.moves.pop()
        stage.expect(asked == ("remove_all", large, at), "the step", describe(asked))


@TransportCheck
async def a_closed_channel_moves_nothing(stage: Stage) -> None:
    """Every request about moves ends with Unavailable then."""
    channel: Channel = await stage.connect()
    until, keys = stage.within(1.0), [digest(1)]
    calls: list[Awaitable[object]] = []
    if isinstance(channel, SupportsFetch):
        calls.append(channel.offer(NAMESPACE, 0, keys, "receiver", deadline=until))
        calls.append(channel.fetch(NAMESPACE, 0, keys, "source", deadline=until))
    if isinstance(channel, SupportsPrefetch):
        calls.append(channel.prefetch(NAMESPACE, 0, keys, deadline=until))
    if isinstance(channel, SupportsRemoveAll):
        calls.append(channel.holdings(("", 0), deadline=until))
        calls.append(channel.remove_all(NAMESPACE, RemovalCursor(), deadline=until))
    if isinstance(channel, SupportsDrain):
        calls.append(channel.drain(DrainOrder(begin=True, within_s=1.0), deadline=until))
    if not calls:
        raise NotDeclared("over this channel nothing is moved")
    channel.abort()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        fine = isinstance(outcome, Unavailable)
        stage.expect(fine, "Unavailable after `abort`", describe(outcome))
    stage.expect(not stage.recorder.moves, "no request to the server", stage.recorder.moves)
