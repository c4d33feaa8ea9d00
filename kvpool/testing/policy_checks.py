"""What an eviction policy must do, one check for each promise of `kvpool.protocols.Policy`.

The first checks call the policy directly; the last ones put it into a real store, whose invariants
are checked after every step. Time is an argument.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, TypeAlias

from kvpool.errors import InvariantViolated
from kvpool.protocols import Decision, LearnsFromArrivals, Policy, ReserveRequest
from kvpool.server.state.entry import Entry, Index
from kvpool.server.state.store import Store
from kvpool.testing.harness import ConformanceError, NotDeclared, digest
from kvpool.testing.invariants import check_invariants
from kvpool.types import ARRIVED, ROOT, Namespace, ReadStatus, SessionHint, WriteStatus

PAGE: Final = 4096
#: Seconds after its last use in which every block becomes evictable, hints or not (G9).
LONG_S: Final = 20_000.0
#: Instructions of the interpreter that fit into 5 ms, and into the few hundred steps of one call.
CALL_MAX: Final = 150_000
#: Blocks that leave, of which a policy may keep some until it tidies up.
_REMOVED: Final = 4000

ONE: Final = Namespace("one")
TWO: Final = Namespace("two", parts=2)

MakePolicy: TypeAlias = Callable[[int], Policy[Any]]


class Promise:
    """One check in progress: what it expects."""

    def __init__(self, check: str) -> None:
        self.check = check

    def expect(self, condition: bool, expected: str, happened: str) -> None:
        """Raises ConformanceError unless the condition holds."""
        if not condition:
            raise ConformanceError(self.check, expected, happened)


class PolicyCheck:
    """One check of a policy. Its name is that of the function."""

    def __init__(self, body: Callable[[Promise, MakePolicy], None]) -> None:
        functools.update_wrapper(self, body)
        self.name = getattr(body, "__name__", "")
        self._body = body

    def __call__(self, make: MakePolicy) -> None:
        """See `check_policy` for `make`."""
        try:
            self._body(Promise(self.name), make)
        except (ConformanceError, NotDeclared):
            raise
        except Exception as error:
            happened = f"{type(error).__name__}: {error}"
            raise ConformanceError(self.name, "no exception", happened) from error


class Block(Entry):
    """One that shows who looks at it, also from inside of a function in C, and who changes it."""

    __slots__ = ("__weakref__", "written")

    written: set[str]

    def __init__(self, *fields: Any) -> None:
        object.__setattr__(self, "written", set())
        super().__init__(*fields)
        self.written.clear()

    def __setattr__(self, name: str, value: object) -> None:
        self.written.add(name)
        super().__setattr__(name, value)

    @property
    def last_used(self) -> int:
        return int(_LAST_USED.__get__(self))

    @last_used.setter
    def last_used(self, value: int) -> None:
        _LAST_USED.__set__(self, value)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = Entry.__hash__


_LAST_USED: Final = vars(Entry)["last_used"]


def work(call: Callable[[], object]) -> int:
    """Instructions of the interpreter that a call takes: the same each time, however busy the
    machine is. One that sorts, or looks for a block, with a function in C shows in `Block`."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class WrittenBlocks:
    """A policy and some blocks of one page: reserved, sealed and offered, as the store does it."""

    def __init__(self, promise: Promise, make: MakePolicy, count: int) -> None:
        self.promise = promise
        self.policy = make(count * PAGE)
        self.now = 0.0
        self.asked = 0  # calls of `evictable`
        self.pinned: set[Entry] = set()
        self.longest = 0  # work of the longest call of `victim` in `drain`, if `counts`
        self.counts = False
        self._index = Index(ONE, 0, 0)
        self.here: list[Block] = [self.admitted(number) for number in range(count)]

    def block(self, name: object) -> Block:
        """One that the policy has not seen."""
        return Block(self._index, digest((name,)), ROOT, 0, PAGE, 1)

    def admitted(self, name: object) -> Block:
        """One that was reserved, sealed, and may be evicted."""
        block = self.block(name)
        self.now += 0.001
        self.policy.touch(block, self.now)
        self.policy.touch(block, self.now)
        self.policy.add_candidate(block)
        return block

    def evictable(self, block: Entry) -> bool:
        self.asked += 1
        return block not in self.pinned

    def victim(self, after_s: float = LONG_S) -> Entry | None:
        """The next victim that much later, which is long enough for no BYPASS."""
        newcomer = self.block("newcomer")
        for _ in range(1000):  # a policy may do its work in steps
            answer = self._answer(newcomer, self.now + after_s)
            if answer is not Decision.NOT_YET:
                break
        self.promise.expect(answer is not newcomer, "a block that is stored", "the new one")
        self.promise.expect(
            not isinstance(answer, Decision), f"no BYPASS after {LONG_S:g} s", str(answer)
        )
        return None if isinstance(answer, Decision) else answer

    def _answer(self, newcomer: Block, now: float) -> Entry | Decision | None:
        answer: Entry | Decision | None = None

        def ask() -> None:
            nonlocal answer
            answer = self.policy.victim(newcomer, self.evictable, now)

        if self.counts:
            self.longest = max(self.longest, work(ask))
        else:
            ask()
        return answer

    def drain(self) -> list[Entry]:
        """All victims, each removed as the store does it."""
        victims: list[Entry] = []
        while (victim := self.victim()) is not None:
            self.promise.expect(victim not in victims, "a victim once", f"{victim!r} again")
            self.policy.remove(victim)
            victims.append(victim)
        return victims


# --- the policy alone --------------------------------------------------------------------


@PolicyCheck
def every_candidate_is_a_victim_once(promise: Promise, make: MakePolicy) -> None:
    """All candidates are evicted one after another, each once; then the answer is None."""
    blocks = WrittenBlocks(promise, make, 50)
    victims = blocks.drain()
    missing = len(set(blocks.here) - set(victims))
    promise.expect(not missing, "every candidate to be a victim", f"{missing} never were")
    strange = len(set(victims) - set(blocks.here))
    promise.expect(not strange, "candidates only", f"{strange} other blocks")


@PolicyCheck
def no_victim_that_may_not_go(promise: Promise, make: MakePolicy) -> None:
    """`evictable` is asked about each victim: a block that it rejects is none (G4)."""
    blocks = WrittenBlocks(promise, make, 50)
    blocks.pinned = set(blocks.here[::3])
    victims = blocks.drain()
    bad = [victim for victim in victims if victim in blocks.pinned]
    promise.expect(not bad, "no victim that `evictable` rejects", f"{len(bad)} of them")
    promise.expect(len(victims) == 50 - len(blocks.pinned), "all others", f"{len(victims)} victims")


@PolicyCheck
def a_rejected_block_comes_back_when_it_is_offered(promise: Promise, make: MakePolicy) -> None:
    """A rejected candidate is dropped, and is a candidate again after `add_candidate`."""
    blocks = WrittenBlocks(promise, make, 10)
    pinned = set(blocks.here[:4])
    blocks.pinned = set(pinned)
    blocks.drain()
    blocks.pinned = set()
    kept = [block for block in pinned if block.is_candidate]
    promise.expect(not kept, "a rejected block to leave the queue", f"{len(kept)} are in it")
    early = blocks.drain()
    promise.expect(not early, "no victim before it is offered again", f"{len(early)} victims")
    for block in pinned:
        blocks.policy.add_candidate(block)
    found = set(blocks.drain())
    promise.expect(found == pinned, "the four blocks that were released", f"{len(found)} blocks")


@PolicyCheck
def offering_twice_is_offering_once(promise: Promise, make: MakePolicy) -> None:
    """A second `add_candidate` of a candidate changes nothing."""
    blocks = WrittenBlocks(promise, make, 10)
    for block in blocks.here:
        blocks.policy.add_candidate(block)
    victims = blocks.drain()
    promise.expect(len(victims) == 10, "10 victims", f"{len(victims)}")


@PolicyCheck
def a_victim_has_left_the_queue(promise: Promise, make: MakePolicy) -> None:
    """With the call that chose it: the next one chooses another, also before `remove`."""
    blocks = WrittenBlocks(promise, make, 10)
    victims = [blocks.victim() for _ in range(10)]
    left = set(blocks.here) == set(victims)
    promise.expect(left, "ten victims, each another", f"{len(set(victims))} of them")
    listed = sum(block.is_candidate for block in blocks.here)
    promise.expect(not listed, "no victim to be a candidate", f"{listed} are")
    promise.expect(blocks.victim() is None, "None then", "a victim")


@PolicyCheck
def a_policy_changes_its_own_fields_only(promise: Promise, make: MakePolicy) -> None:
    """`last_used`, `is_candidate` and `policy_data`: the rest of a block is the store's."""
    blocks = WrittenBlocks(promise, make, 20)
    blocks.pinned = set(blocks.here[::5])
    for block in blocks.here[::2]:
        blocks.policy.touch(block, blocks.now + 1.0)
    blocks.drain()
    written = set().union(*(block.written for block in blocks.here))
    strange = sorted(written - {"last_used", "is_candidate", "policy_data"})
    promise.expect(not strange, "no other field to be written", ", ".join(strange))


@PolicyCheck
def what_it_learns_from_arrivals_is_bounded(promise: Promise, make: MakePolicy) -> None:
    """Pauses of any length, many of them: every block is still a victim in the end."""
    blocks = WrittenBlocks(promise, make, 50)
    if not isinstance(blocks.policy, LearnsFromArrivals):
        raise NotDeclared("this policy learns nothing from arrivals")
    most = 0
    for pause_s in (0.0, 1e-9, 0.25, 30.0, 900.0, 1e9) * 500:
        arrived = functools.partial(blocks.policy.arrived, pause_s)
        most = max(most, work(arrived))
    promise.expect(most <= CALL_MAX, f"at most {CALL_MAX} instructions a call", str(most))
    victims = blocks.drain()
    promise.expect(len(victims) == 50, "50 victims after all of them", f"{len(victims)}")


@PolicyCheck
def what_it_infers_is_for_people(promise: Promise, make: MakePolicy) -> None:
    """At most 16 named whole numbers, and why a block went: words, also of one it does not know."""
    blocks = WrittenBlocks(promise, make, 20)
    inferred = getattr(blocks.policy, "inferred", None)
    if inferred is None:
        raise NotDeclared("this policy infers nothing that it shows")
    for _ in range(2):
        figures, why = inferred()
        fine = all(type(name) is str and type(value) is int for name, value in figures.items())
        promise.expect(fine and len(figures) <= 16, "16 whole numbers at most", str(figures)[:200])
        for block in (blocks.here[0], blocks.block("unknown")):
            promise.expect(type(why(block.digest)) is str, "a text", repr(why(block.digest)))
        blocks.drain()


@PolicyCheck
def a_removed_block_is_no_victim(promise: Promise, make: MakePolicy) -> None:
    """Also when the same key is written again: that is another block."""
    blocks = WrittenBlocks(promise, make, 20)
    removed = set(blocks.here[::2])
    for block in removed:
        blocks.policy.remove(block)
    again = {blocks.admitted(number) for number in range(0, 20, 2)}
    victims = set(blocks.drain())
    bad = len(victims & removed)
    promise.expect(not bad, "no victim that was removed before", f"{bad} of them")
    promise.expect(again <= victims, "the blocks written again", f"{len(again - victims)} missing")


@PolicyCheck
def removed_blocks_take_no_memory(promise: Promise, make: MakePolicy) -> None:
    """Thousands come and leave behind others whose turn is earlier: most are not kept."""
    blocks = WrittenBlocks(promise, make, 50)
    removed: weakref.WeakSet[Block] = weakref.WeakSet()
    for number in range(_REMOVED):
        block = blocks.admitted(("short", number))
        removed.add(block)
        blocks.policy.remove(block)
    del block
    kept = len(removed)
    promise.expect(kept <= _REMOVED // 2, "most removed blocks to be gone", f"{kept} are kept")


@PolicyCheck
def removing_is_always_allowed(promise: Promise, make: MakePolicy) -> None:
    """A block that is no candidate, one twice, one that was never touched: nothing happens."""
    blocks = WrittenBlocks(promise, make, 10)
    victim = blocks.victim()
    for block in (blocks.here[3], blocks.here[3], victim, blocks.block("unknown")):
        if block is not None:
            blocks.policy.remove(block)
    left = set(blocks.here) - {blocks.here[3], victim}
    promise.expect(set(blocks.drain()) == left, "the other blocks, as before", "others")


@PolicyCheck
def an_empty_policy_has_no_victim(promise: Promise, make: MakePolicy) -> None:
    """None, not BYPASS and no exception; and the age of the next victim is 0."""
    policy = make(PAGE)
    blocks = WrittenBlocks(promise, make, 0)
    answer = policy.victim(blocks.block("newcomer"), blocks.evictable, 1.0)
    promise.expect(answer is None, "None", repr(answer))
    promise.expect(policy.victim_age(1.0) == 0.0, "an age of 0", str(policy.victim_age(1.0)))


@PolicyCheck
def the_age_of_the_next_victim_changes_nothing(promise: Promise, make: MakePolicy) -> None:
    """`victim_age` is a number of seconds, never negative, and takes nobody's turn."""
    blocks, same = WrittenBlocks(promise, make, 10), WrittenBlocks(promise, make, 10)
    for now in (0.0, 1.0, LONG_S):
        age = blocks.policy.victim_age(now)
        promise.expect(0.0 <= age <= LONG_S, "seconds, 0 or more", str(age))
    order, expected = blocks.drain(), same.drain()
    promise.expect(
        [block.digest for block in order] == [block.digest for block in expected],
        "the same order as without `victim_age`",
        "another",
    )


@PolicyCheck
def bypass_ends(promise: Promise, make: MakePolicy) -> None:
    """Blocks that were used repeatedly keep new blocks out for a bounded time only (G9)."""
    blocks = WrittenBlocks(promise, make, 10)
    for _ in range(300):
        blocks.now += 5.0
        for block in blocks.here:
            blocks.policy.touch(block, blocks.now)
    victim = blocks.victim()
    promise.expect(victim in blocks.here, "a victim in the end", repr(victim))


@PolicyCheck
def a_block_that_was_read_outlives_those_that_were_only_written(
    promise: Promise, make: MakePolicy
) -> None:
    """Reserving and sealing are one use, so one read more is two, and it is the later one, too."""
    blocks = WrittenBlocks(promise, make, 20)
    read = blocks.here[::2]
    for block in read:
        blocks.now += 0.001
        blocks.policy.touch(block, blocks.now)
    order = blocks.drain()
    early = sum(block in read for block in order[:10])
    promise.expect(not early, "those that nobody has read to go first", f"{early} read ones went")


@PolicyCheck
def the_time_of_a_use_is_made_unique(promise: Promise, make: MakePolicy) -> None:
    """`last_used` is the time in microseconds; of two uses the later one has the larger number."""
    blocks = WrittenBlocks(promise, make, 8)
    stamps = []
    for block in blocks.here:
        blocks.policy.touch(block, 5.0)
        stamps.append(block.last_used)
    promise.expect(stamps == sorted(set(stamps)), "growing numbers", str(stamps))
    right = all(5_000_000 <= stamp < 5_001_000 for stamp in stamps)
    promise.expect(right, "5 s in microseconds", str(stamps))


@PolicyCheck
def the_age_is_that_of_the_next_victim(promise: Promise, make: MakePolicy) -> None:
    """In seconds, since its last use; of blocks that are alike and used at the same time."""
    blocks = WrittenBlocks(promise, make, 6)
    age = blocks.policy.victim_age(blocks.now + 100.0)
    promise.expect(99.9 <= age <= 100.1, "100 s", f"{age} s")


# --- in a real store ---------------------------------------------------------------------


class History:
    """Random calls of three owners on a store that is nearly always full."""

    def __init__(self, promise: Promise, make: MakePolicy, seed: int) -> None:
        self.promise = promise
        self.rng = random.Random(seed)
        self.store = Store(24 * PAGE, policy=make(24 * PAGE))
        self.wrong: list[Entry] = []  # victims that may not be evicted
        self.store.extents.on_rejected_victim = self.wrong.append
        self.now = 0.0
        self.held: list[tuple[int, int]] = []  # (owner, id) of reservations
        self.pins: list[tuple[int, int]] = []
        self.digests = [digest(("history", number)) for number in range(60)]
        self.sessions = [f"session {n}" for n in range(6)]

    def step(self) -> None:
        """One random call; then every invariant of the store must hold."""
        rng = self.rng
        self.now += rng.choice([0.0, 0.001, 0.5, 5.0, 40.0])
        calls = [self._reserve, self._reserve, self._pin, self._let_go, self._hint, self._remove]
        rng.choice(calls)()
        try:
            check_invariants(self.store)
        except InvariantViolated as error:
            raise ConformanceError(self.promise.check, "a consistent store", str(error)) from error
        wrong = len(self.wrong)
        self.promise.expect(not wrong, "victims that may be evicted", f"{wrong} that may not")

    def end(self) -> None:
        """After all pins and reservations ended, and much later, every block can be evicted."""
        for owner in (1, 2, 3):
            self.store.drop_owner(owner)
        self.now += LONG_S
        fresh = [digest(("fresh", number)) for number in range(24)]
        statuses = write(self.store, fresh, self.now)
        self.promise.expect(
            statuses == [WriteStatus.RESERVED] * 24 and self.store.index.stored == 24,
            "space for 24 new blocks, for nothing is used any more",
            f"{self.store.index.stored} of 24",
        )

    def _reserve(self) -> None:
        rng, owner = self.rng, self.rng.randint(1, 3)
        namespace = rng.choice([ONE, TWO])
        part = rng.randrange(namespace.parts)
        first = rng.randrange(len(self.digests))
        chain = self.digests[first : first + rng.randint(1, 8)]
        branch = rng.choice([ROOT, self.digests[rng.randrange(first + 1) - 1]])
        parent = branch if branch not in chain else ROOT
        hint = SessionHint(rng.choice(self.sessions), rng.choice([None, 0.1, 8.0, 900.0]))
        sizes = [rng.choice([PAGE, 2 * PAGE])] * len(chain)
        parents = [parent, *chain[:-1]]
        request = ReserveRequest(namespace, part, chain, parents, sizes, rng.choice([None, hint]))
        answers = self.store.reserve(owner, request, self.now)
        self.held += [(owner, answer.id) for answer in answers if answer.extent is not None]

    def _let_go(self) -> None:
        self.rng.shuffle(self.held)
        while self.held and self.rng.random() < 0.8:
            owner, id = self.held.pop()
            if self.rng.random() < 0.8:
                self.store.seal(owner, id, 7, self.now)
            else:
                self.store.cancel(owner, id)
        self.rng.shuffle(self.pins)
        while self.pins and self.rng.random() < 0.8:
            self.store.unpin(*self.pins.pop())

    def _pin(self) -> None:
        owner, namespace = self.rng.randint(1, 3), self.rng.choice([ONE, TWO])
        first = self.rng.randrange(len(self.digests))
        chain = self.digests[first : first + self.rng.randint(1, 5)]
        part = self.rng.randrange(namespace.parts)
        pins = self.store.pin(owner, namespace, part, chain, self.now)
        self.pins += [(owner, pin.id) for pin in pins if pin.extent is not None]

    def _hint(self) -> None:
        session = self.rng.choice(self.sessions)
        kind = self.rng.random()
        if kind < 0.25:
            self.store.hint(session, None, self.now)
        elif kind < 0.5:
            self.store.hint(session, ARRIVED, self.now, age_s=self.rng.choice([0.0, 2.0]))
        else:
            resume_in = self.rng.choice([0.0, 1.0, 30.0, 1e6])
            self.store.hint(session, resume_in, self.now, age_s=self.rng.choice([0.0, 2.0]))

    def _remove(self) -> None:
        digests = self.rng.sample(self.digests, 3)
        self.store.remove(self.rng.choice([ONE, TWO]), digests)


def write(
    store: Store, chain: Sequence[bytes], now: float, namespace: Namespace = ONE, part: int = 0
) -> list[WriteStatus]:
    """Reserve a chain of blocks of one page and seal what was reserved."""
    parents = [ROOT, *chain[:-1]]
    request = ReserveRequest(namespace, part, chain, parents, [PAGE] * len(chain))
    answers = store.reserve(1, request, now)
    for answer in answers:
        if answer.status is WriteStatus.RESERVED:
            store.seal(1, answer.id, 0, now)
    return [answer.status for answer in answers]


@PolicyCheck
def random_histories_in_a_store(promise: Promise, make: MakePolicy) -> None:
    """The store is consistent after every call; when all pins ended, everything is evictable."""
    for seed in range(6):
        history = History(promise, make, seed)
        for _ in range(300):
            history.step()
        history.end()


@PolicyCheck
def parts_of_one_block_leave_together(promise: Promise, make: MakePolicy) -> None:
    """Two ranks write one block each in a small store: no rank's part stays behind."""
    store = Store(8 * PAGE, policy=make(8 * PAGE))
    written = [digest(("parts", number)) for number in range(40)]
    for number, one in enumerate(written):
        now = number * 60.0
        for part in (0, 1):
            write(store, [one], now, TWO, part)
        if number % 3 == 0:
            for pin in store.pin(1, TWO, 0, [one], now + 20.0):
                if pin.status is ReadStatus.HIT:
                    store.unpin(1, pin.id)
        check_invariants(store)
        here = [[store.index.peek(TWO, part, d) is not None for part in (0, 1)] for d in written]
        torn = sum(parts[0] is not parts[1] for parts in here)
        promise.expect(not torn, "both parts or none", f"{torn} blocks with one")
    promise.expect(store.index.stored > 0, "some blocks in the end", "none")
