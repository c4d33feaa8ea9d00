"""What a call of a policy costs, with few blocks and with many, and at its worst.

Costs are counted, in instructions of the interpreter; one check reads a clock besides, for what a
call does outside of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

from kvpool.testing.policy_checks import (
    CALL_MAX,
    MakePolicy,
    PolicyCheck,
    Promise,
    WrittenBlocks,
    work,
)

#: Calls of `evictable` for each victim and each rejected candidate, at most, plus a constant.
ASKED_MAX: Final = 8


@PolicyCheck
def a_call_does_as_much_with_many_blocks(promise: Promise, make: MakePolicy) -> None:
    """O(log n): the work is counted, so that it is the same on every machine."""
    few, many = (_turn_work(promise, make, count) for count in (250, 8000))
    limit = 2 * few + 500
    promise.expect(
        many <= limit,
        f"at most {limit} instructions for a block that comes and one that goes, of 8000",
        f"{many}, and {few} of 250",
    )


def _turn_work(promise: Promise, make: MakePolicy, count: int) -> int:
    blocks = WrittenBlocks(promise, make, count)
    return min(work(functools.partial(_turn, blocks, turn)) for turn in range(3)) // 8


@PolicyCheck
def no_call_is_long(promise: Promise, make: MakePolicy) -> None:
    """One that has more to do says NOT_YET: after thousands of blocks were read, are pinned, have
    left, or where those that may not go lie far apart."""
    for case in ("all were read", "all are pinned", "all but one have left", "few are pinned"):
        blocks = WrittenBlocks(promise, make, 6000)
        for number, block in enumerate(blocks.here[1:]):
            if case == "all but one have left":
                blocks.policy.remove(block)
            elif case == "all were read" or (case == "few are pinned" and number % 500):
                blocks.policy.touch(block, blocks.now + 1.0)
        if case.endswith("pinned"):
            blocks.pinned = set(blocks.here)
        blocks.counts = True
        victim = blocks.victim()
        promise.expect((victim is None) is bool(blocks.pinned), "the right answer", repr(victim))
        promise.expect(
            blocks.longest <= CALL_MAX,
            f"at most {CALL_MAX} instructions in one call of `victim` where {case}",
            str(blocks.longest),
        )
        steps: dict[str, Callable[[], object]] = {
            "victim_age": functools.partial(blocks.policy.victim_age, blocks.now),
            "remove": functools.partial(blocks.policy.remove, blocks.here[0]),
            "add_candidate": functools.partial(blocks.policy.add_candidate, blocks.here[0]),
            "touch": functools.partial(blocks.policy.touch, blocks.here[0], blocks.now + 2.0),
        }
        for name, step in steps.items():
            took = work(step)
            promise.expect(took <= CALL_MAX, f"{CALL_MAX} instructions for `{name}`", str(took))


@PolicyCheck
def a_call_takes_as_long_with_many_blocks(promise: Promise, make: MakePolicy) -> None:
    """O(log n): with 32 times as many blocks a turn takes as long, but for a little."""
    few, many = (min(_turns(promise, make, count)) for count in (500, 16_000))
    limit = 8 * few + 20e-6
    promise.expect(
        many <= limit,
        f"at most {limit * 1e6:.0f} us for a block that comes and one that goes, of 16,000",
        f"{many * 1e6:.0f} us, and {few * 1e6:.0f} us of 500",
    )


def _turns(promise: Promise, make: MakePolicy, count: int) -> list[float]:
    """Seconds of a block that comes, one that is read, the age, and a victim that leaves; the mean
    of several, some times."""
    blocks, took = WrittenBlocks(promise, make, count), []
    for turn in range(12):
        began = time.perf_counter()
        _turn(blocks, turn)
        took.append((time.perf_counter() - began) / 8)
    return took


def _turn(blocks: WrittenBlocks, turn: int) -> None:
    for number in range(8):
        blocks.admitted((turn, number))
        blocks.policy.touch(blocks.here[-1 - number], blocks.now)
        blocks.policy.victim_age(blocks.now)
        victim = blocks.victim()
        if victim is not None:
            blocks.policy.remove(victim)


@PolicyCheck
def the_number_of_questions_is_bounded(promise: Promise, make: MakePolicy) -> None:
    """`evictable` is called a few times for each victim, however many candidates there are."""
    blocks = WrittenBlocks(promise, make, 4000)
    blocks.asked = 0
    for block in blocks.here[::2]:
        blocks.policy.touch(block, blocks.now + 1.0)
    promise.expect(not blocks.asked, "touch to ask nothing", f"{blocks.asked} calls of `evictable`")
    for _ in range(500):
        victim = blocks.victim()
        if victim is not None:
            blocks.policy.remove(victim)
    limit = 500 * ASKED_MAX
    promise.expect(blocks.asked <= limit, f"at most {limit} calls", f"{blocks.asked} calls")
    blocks.pinned, blocks.asked = set(blocks.here), 0
    promise.expect(blocks.victim() is None, "None: nothing may go", "a victim")
    promise.expect(blocks.victim() is None, "None: nothing may go", "a victim")
    limit = len(blocks.here) * 2 + ASKED_MAX
    promise.expect(
        blocks.asked <= limit, "each rejected candidate to be asked about once", f"{blocks.asked}"
    )
