"""What a transport does with requests that it does not look into: it carries them, unchanged.

Servers fetch blocks from each other, bring them up, remove namespaces and leave when they are asked
to, over the channels of any transport. Here the server answers what a check has laid down, so that
every field of a request and of an answer is compared (design: moves).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvpool.errors import DeadlineExceeded, Overloaded, Unavailable
from kvpool.protocols import Channel
from kvpool.testing.harness import Stage, TransportCheck, describe, digest
from kvpool.types import BATCH_BLOCKS_MAX, COPIES_MAX, MoveStatus, ReadStatus
from kvpool.wire import messages as wire
from kvpool.wire.moves import Drain, Drained, Fetch, Prefetch, Propose, Proposed
from kvpool.wire.questions import Namespaces
from kvpool.wire.removal import HoldingsReply, RemoveAll, RemovedAll

_WHERE: Final = ("conformance/moves", 2)
_LARGE: Final = (1 << 63, 1 << 60, 3, 255, 1 << 20)
_FEW: Final = [digest(number)[:20] for number in range(3)]
_FULL: Final = [digest(f"batch/{number}") for number in range(BATCH_BLOCKS_MAX)]


def named(keys: Sequence[bytes], part: int = 1) -> tuple[str, int, int, bytes, int]:
    """With these fields a request about one part of some blocks begins."""
    return *_WHERE, len(keys[0]), b"".join(keys), part


def _statuses(count: int) -> wire.StatusReply:
    return wire.StatusReply(bytes(n % len(MoveStatus) for n in range(count)))


def _offers(keys: Sequence[bytes]) -> Proposed:
    """Hits but for the second block, each with other properties."""
    hits = len(keys) - 1
    return Proposed(
        bytes([ReadStatus.HIT, ReadStatus.EVICTED, *[ReadStatus.HIT] * (hits - 1)]),
        [(1 << 33) + n for n in range(hits)],
        [(1 << 64) - 1 - n for n in range(hits)],
        b"".join(keys[1:]),
        [1.5 * n for n in range(hits)],
        bytes(n % (COPIES_MAX + 1) for n in range(hits)),
        [(1, "a session", 2.5), (1, "", None)],
    )


#: By request, the answers that are laid down for it.
SIDE_REQUESTS: Final[tuple[tuple[wire.Message, tuple[wire.Message, ...]], ...]] = (
    *((Propose(*named(k), "receiver"), (_offers(k),)) for k in (_FEW, _FULL)),
    *((Fetch(*named(k), "source", 2.5, True), (_statuses(len(k)),)) for k in (_FEW, _FULL)),
    (Fetch(*named(_FEW, 0), "source", 0.25), (_statuses(3),)),
    *((Prefetch(*named(k)), (_statuses(len(k)),)) for k in (_FEW, _FULL)),
    (
        Drain(True, False, 1.5, 300.25),
        (
            Drained(None, 0, 0, 0, 0, 0, []),
            Drained(MoveStatus.IN_PROGRESS, 1 << 40, 5, 1 << 46, 7, 1 << 47, []),
            Drained(3, 10, 9, 8, 7, 6, [(f"m/{n}", "no room", n, n << 40) for n in range(64)]),
        ),
    ),
    (Drain(cancel=True), (Drained(0, 9, 0, 0, 9, 9 << 20, []),)),
    (
        Namespaces("n" * 512, 256),
        (
            HoldingsReply((0, 0, 0, 0, 0), [], False),
            HoldingsReply(_LARGE, [("a", 1, 3, 4096), ("n" * 512, 256, 1 << 30, 1 << 60)], True),
        ),
    ),
    (
        RemoveAll("n" * 512, 256, _LARGE),
        (RemovedAll(0, 0, None), RemovedAll(7, 1 << 50, (5, 4, 1, 2, 3))),
    ),
)


def fetch_waits(stage: Stage) -> bool:
    """The server works on a fetch."""
    return stage.recorder.working == 1


@TransportCheck
async def a_request_arrives_as_it_was_made(stage: Stage) -> None:
    """Every field of every request, and of every answer, at its largest and in a full batch."""
    channel = await stage.connect()
    for request, answers in SIDE_REQUESTS:
        for answer in answers:
            stage.recorder.laid_down[type(request)] = answer
            got = await channel.request(request, type(answer), deadline=stage.within())
            stage.expect(got == answer, f"{answer}", describe(got))
            asked = stage.recorder.moves.pop()
            stage.expect(asked == request, f"the server to be asked {request}", describe(asked))


@TransportCheck
async def a_request_ends_with_its_caller(stage: Stage) -> None:
    """Cancelled, late or cut off: the server stops as soon as nobody waits, and fetches no more."""
    channel = await stage.connect()
    request, (answer,) = SIDE_REQUESTS[2]
    stage.recorder.laid_down[type(request)] = answer
    for end, expected in (
        ("cancelled", asyncio.CancelledError),
        ("late", DeadlineExceeded),
        ("aborted", Unavailable),
    ):
        stage.recorder.answering.clear()
        deadline = stage.within(0.2 if end == "late" else 10.0)
        call = asyncio.ensure_future(channel.request(request, type(answer), deadline=deadline))
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
            lambda: not stage.recorder.working,
            f"the server to end a fetch that is {end}",
            lambda: "it goes on",
        )
        stage.recorder.answering.set()


@TransportCheck
async def a_refused_request_is_not_repeated(stage: Stage) -> None:
    """What the server raises reaches the caller after one attempt, and the channel goes on."""
    channel = await stage.connect()
    for request, (answer, *_) in SIDE_REQUESTS:
        stage.recorder.moves.clear()
        stage.recorder.laid_down[type(request)] = Overloaded("not now")
        calling = channel.request(request, type(answer), deadline=stage.within())
        await stage.raises(Overloaded, calling, "a request that is refused")
        attempts = len(stage.recorder.moves)
        stage.expect(attempts == 1, "one attempt", f"the server was asked {attempts} times")
        stage.recorder.laid_down[type(request)] = answer
        got = await channel.request(request, type(answer), deadline=stage.within())
        stage.expect(got == answer, f"{answer}", describe(got))


@TransportCheck
async def a_closed_channel_moves_nothing(stage: Stage) -> None:
    """Every such request ends with Unavailable then."""
    channel: Channel = await stage.connect()
    until = stage.within(1.0)
    calls = [
        channel.request(request, type(answers[0]), deadline=until)
        for request, answers in SIDE_REQUESTS
    ]
    channel.abort()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        fine = isinstance(outcome, Unavailable)
        stage.expect(fine, "Unavailable after `abort`", describe(outcome))
    stage.expect(not stage.recorder.moves, "no request to the server", stage.recorder.moves)
