"""Worlds in which a policy that infers is wrong on purpose: that costs hits, and nothing else.

What looks dead returns, what always returned ends, branches never join, one conversation imitates
another, and clients say what no chain shows. Whatever a policy has learned of that: bytes are
right, a client's hint wins, and no block keeps its place for ever (G9).

    python -m tests.simulation.guesses --bug what-is-shared-stays --seeds 0:40
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, NoReturn
from unittest.mock import patch

if __name__ == "__main__":
    from tests.simulation.planted_guesses import BUGS
    from tests.simulation.small_worlds import plant_chosen, play_worlds

    SEEDS = plant_chosen("tests.simulation.guesses", BUGS)

from kvpool.protocols import ReserveRequest
from kvpool.server.eviction import density, programs
from kvpool.server.state.entry import Entry
from kvpool.server.state.extents import Extents
from kvpool.server.state.store import Store
from kvpool.types import ARRIVED, ROOT, Namespace, ReadStatus, Reservation, SessionHint, WriteStatus
from tests.simulation.blocks import ONE, value
from tests.simulation.loop import Violation
from tests.simulation.oracles import WatchedExtents, WatchedStore
from tests.simulation.truth import GroundTruth

_POLICIES: Final[dict[str, Callable[[int], Any]]] = {
    "programs": programs.Programs,
    "density": density.Density,
}
_PROMPTS: Final = 150
_BLOCK: Final = 384
#: Blocks of a store that has room for those that return, if all others go.
_SCARCE: Final = 72
#: Conversations of the time before, when others went on.
_BEFORE: Final = 600
#: No block that was not used for so long keeps a new one out. A hint may for longer.
_BYPASS_S: Final = 60.0
_HINTS_LAPSE_S: Final = 3 * 300.0 + 1.0
#: After so long no policy expects a use any more: its measurement ends at three or four hours.
_ALL_OVER_S: Final = 5 * 3600.0
#: A block without a hint is expected again so long after its last use.
_UNANNOUNCED_S: Final = 10.0


@contextmanager
def learning_soon() -> Iterator[None]:
    """As after many more prompts: a policy trusts little that it has seen."""
    soon = patch.multiple(programs, _LEARN_EVERY=2, _PRIOR=1.0, _SHAPE=1.0, _REMEMBERED_MIN=64)
    refusing = [patch.object(one, "_BYPASS_S_MAX", _BYPASS_S) for one in (programs, density)]
    sampled = patch.multiple(density, _SAMPLE=1, _RELEARN_EVERY=40, _LATE_MIN=0.01, _GHOSTS_MIN=64)
    with soon, sampled, refusing[0], refusing[1]:
        yield


def _key(*of: object) -> bytes:
    return hashlib.blake2b(repr(of).encode(), digest_size=32).digest()


class _Memory:
    alignment = 64

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = bytearray(capacity)

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview(self.bytes)[offset : offset + size]


class _HintedExtents(WatchedExtents):
    """At each eviction: what a client has said is stronger than what a policy infers."""

    def evict(self, victim: Entry, size: int = 0) -> int | None:
        store = self.watch
        assert isinstance(store, GuessedStore)
        order, now = store.order_of(victim), store.reserved_at
        due = order.due(victim)
        if not order.is_over(victim):
            if store.useless():
                store.truth.fail(f"hints: {victim!r} goes before what a client has ended")
            quiet = [
                entry
                for entry in store.may_go()
                if order.due(entry) is None and now - entry.last_used / 1e6 > _UNANNOUNCED_S
            ]
            if due is not None and quiet and not order.announced.over:
                store.truth.fail(f"hints: {victim!r}, due in {due - now:.1f} s, goes before others")
        return super().evict(victim, size)


class GuessedStore(WatchedStore):
    extents_type: ClassVar[type[Extents]] = _HintedExtents

    def may_go(self) -> list[Entry]:
        return [entry for entry in self.index.inventory() if self.extents.evictable(entry)]

    def useless(self) -> list[Entry]:
        """What clients have ended, and may go."""
        return [entry for entry in self.may_go() if self.order_of(entry).is_over(entry)]


def _store(policy: str, blocks: int) -> Store:
    return Store(_BLOCK * blocks, alignment=64, policy=_POLICIES[policy](_BLOCK * blocks))


def _ask(
    store: Store,
    chain: Sequence[bytes],
    now: float,
    namespace: Namespace = ONE,
    hint: SessionHint | None = None,
) -> tuple[int, list[tuple[bytes, Reservation]]]:
    """Read what is here of a chain, and reserve the rest: how much was here, and the answers."""
    pins = store.pin(1, namespace, 0, chain, now)
    held = next((i for i, pin in enumerate(pins) if not pin.status.hit), len(chain))
    store.unpin_all(1, [pin.id for pin in pins if pin.status is ReadStatus.HIT])
    rest = chain[held:]
    if not rest:
        return held, []
    parents = [chain[held - 1] if held else ROOT, *rest[:-1]]
    sizes = [len(value(ONE, digest, 0)) for digest in rest]
    request = ReserveRequest(namespace, 0, rest, parents, sizes, hint)
    return held, list(zip(rest, store.reserve(1, request, now), strict=True))


def _write(store: Store, chain: Sequence[bytes], now: float, namespace: Namespace = ONE) -> int:
    """As `_ask`, and seal what was granted: how much was here."""
    held, answers = _ask(store, chain, now, namespace)
    ids = [answer.id for _, answer in answers if answer.extent is not None]
    store.seal_all(1, ids, [0] * len(ids), now)
    return held


class Server:
    """A store whose policy infers, and its users."""

    def __init__(self, chance: random.Random, policy: str) -> None:
        memory = _Memory(_BLOCK * chance.choice([12, 24, 40]))
        self.memory = memory
        self.policy = _POLICIES[policy](memory.capacity)
        truth = GroundTruth(lambda: self.now, _fail)
        truth.life_began("s#1")
        self.store = GuessedStore("s#1", memory, truth, every=50, policy=self.policy)
        self.now = 1000.0
        self.made = 0

    def fresh(self, count: int) -> list[bytes]:
        self.made += count
        return [_key("block", self.made - number) for number in range(count)]

    def prompt(
        self, chain: Sequence[bytes], session: str = "", resume_in: float | None = None
    ) -> set[WriteStatus]:
        """Read what is here of a chain, and write the rest; what the store answered to that."""
        store, now = self.store, self.now
        # A session that writes has not ended.
        over = [e for e in store.useless() if e.session is None or e.session.name != session]
        hint = SessionHint(session, resume_in) if session else None
        ids = []
        _, answers = _ask(store, chain, now, hint=hint)
        for digest, answer in answers:
            if answer.extent is not None:
                self.memory.view(answer.extent.offset, answer.extent.size)[:] = value(
                    ONE, digest, 0
                )
                ids.append(answer.id)
        store.seal_all(1, ids, [0] * len(ids), now)
        found = {answer.status for _, answer in answers}
        left = [e for e in store.useless() if e in over and e.digest not in chain]
        if WriteStatus.BYPASSED in found and left:
            _fail("hints: a write is refused beside what a client has ended")
        return found

    def check_bounds(self) -> None:
        """What is learned has a size that follows from what is stored, not from what was asked."""
        stored = self.store.index.stored
        figures = self.policy.inferred().figures
        if isinstance(self.policy, programs.Programs):
            remembered, bound = self.policy.remembered, max(64, stored) + 16
            shown = sum(self.policy._held.blocks) + self.policy._held.common
            if not 0 <= shown <= stored or min(figures.values()) < 0:
                _fail(f"{shown} blocks are shown as inferred, {stored} are stored: {figures}")
        else:
            remembered, bound = self.policy.ghosts, max(64, 2 * stored) + 1
        if remembered > bound:
            _fail(f"G9: {remembered} things are remembered beside {stored} blocks")

    def check_given_back(self, refuses_s: float) -> None:
        """Whatever was inferred of it: in time each block makes room for new ones."""
        self.now += refuses_s
        for _ in range(4):
            found = self.prompt(self.fresh(1))
            if found != {WriteStatus.RESERVED}:
                _fail(f"G9: {refuses_s:g} s after the last use a new block gets {found}")
            self.now += 0.5
        self.now += _ALL_OVER_S
        old = {entry.digest for entry in self.store.index.inventory()}
        written = 0
        while written < self.store.allocator.capacity and old:
            chain = self.fresh(3)
            written += sum(len(value(ONE, digest, 0)) for digest in chain)
            found = self.prompt(chain)
            old &= {entry.digest for entry in self.store.index.inventory()}
            if old and found != {WriteStatus.RESERVED}:
                _fail(f"G9: a new block gets {found} beside blocks of {_ALL_OVER_S:g} s ago")
            self.now += 0.2
        if old:
            _fail(f"G9: {len(old)} old blocks stay")
        self.store.check_all_can_go(self.now)


def _fail(text: str) -> NoReturn:
    raise Violation(text)


class Liars:
    """Users whose conversations go on as nobody would expect; what is usual changes."""

    def __init__(self, chance: random.Random, server: Server, *, hints: bool = False) -> None:
        self._chance = chance
        self._server = server
        self._hints = hints
        self._talks: list[list[bytes]] = [server.fresh(4)]
        self._usual = "goes on"

    def one(self) -> None:
        chance, server = self._chance, self._server
        server.now += chance.choice([0.05, 0.5, 2.0, 2.0, 8.0, chance.choice([40.0, 700.0])])
        if chance.random() < 0.04:
            self._usual = chance.choice(["goes on", "ends", "parts", "imitates", "returns"])
        talks = self._talks
        recent = chance.choice(talks[-8:])
        match self._usual if chance.random() < 0.8 else "goes on":
            case "goes on":
                self._say(recent, chance.randint(1, 3))
            case "ends":  # after one prompt
                begin = recent[: chance.randint(0, 2)]
                talks.append([*begin, *server.fresh(chance.randint(1, 6))])
                self._say(talks[-1], 0)
            case "parts":  # many branches at once, and none of them is heard of again
                for _ in range(chance.randint(2, 8)):
                    self._say(list(recent), chance.randint(1, 3))
            case "imitates":  # it says what another one has said, then something else
                talks.append(recent[: -chance.randint(1, 2)])
                self._say(talks[-1], chance.randint(1, 3))
            case _:  # long after it seemed to have ended
                self._say(chance.choice(talks), chance.randint(0, 2))
        del talks[:-200]

    def _say(self, talk: list[bytes], more: int) -> None:
        chance, server = self._chance, self._server
        if len(talk) > 8:
            del talk[:]
            more = max(1, more)
        talk += server.fresh(more)
        if not talk or not self._hints:
            server.prompt(talk)
            return
        session = talk[0].hex()[:6]
        resume_in = chance.choice([None, None, 1.0, 30.0, 300.0])
        server.prompt(talk, session, resume_in)
        other = chance.choice(self._talks[-30:] or [talk])
        if other:
            said = chance.choice([None, None, ARRIVED, 5.0, 120.0])
            server.store.hint(other[0].hex()[:6], said, server.now)


def _play(seed: int, *, hints: bool) -> str:
    chance = random.Random(seed)
    with learning_soon():
        server = Server(chance, chance.choice([*_POLICIES]))
        liars = Liars(chance, server, hints=hints)
        try:
            for number in range(_PROMPTS):
                liars.one()
                if number % 20 == 0:
                    server.check_bounds()
            server.check_given_back(_HINTS_LAPSE_S if hints else _BYPASS_S + 1.0)
            server.check_bounds()
        except Violation as violation:
            return str(violation)
    return ""


def play_lies(seed: int) -> str:
    """Wrong guesses cost hits, and neither bytes nor space."""
    return _play(seed, hints=False)


def play_hints(seed: int) -> str:
    """What clients say contradicts what their chains show, and is what counts."""
    return _play(seed, hints=True)


def play_changes(seed: int) -> str:
    """What was learned of other traffic is forgotten: it costs hits for a time."""
    with learning_soon():
        fresh, taught = (_hits(seed, taught=taught) for taught in (False, True))
    if taught < fresh * 0.85:
        return f"{taught} hits after other traffic, {fresh} without it"
    return ""


def _hits(seed: int, *, taught: bool) -> int:
    """Of conversations of two prompts, after such as ended earlier, or went on for longer."""
    chance, now, hits = random.Random(seed), 0.0, 0
    store = _store("programs", _SCARCE)
    later: list[tuple[float, int, list[bytes]]] = []
    for number in range(-_BEFORE * taught, 400):
        now += 1.0
        later.append((now, 0, [_key(seed, number, i) for i in range(3)]))
        for one in [one for one in later if one[0] <= now]:
            later.remove(one)
            _, prompts, chain = one
            held = _write(store, chain, now)
            hits += held if number > 250 else 0
            goes_on = prompts == 0 or (prompts == 1 and number < 0)
            if goes_on and (number >= 0 or prompts or chance.random() < 0.2):
                more = [*chain, *(_key(chain[-1], i) for i in range(2))]
                later.append((now + chance.uniform(20.0, 28.0), prompts + 1, more))
    return hits


def play_refusals(seed: int) -> str:
    """Those that always return keep strangers out while they are awaited, and no longer than a
    policy may refuse for them."""
    with learning_soon():
        for policy in _POLICIES:
            chance, now = random.Random(seed), 0.0
            store = _store(policy, _SCARCE)
            talks = [[_key(seed, talk, i) for i in range(3)] for talk in range(_SCARCE // 2)]
            for number in range(700 if policy == "density" else 500):  # until it refuses
                now += 3.0
                is_strange = chance.random() < 0.03
                _write(
                    store, [_key(seed, number)] if is_strange else talks[number % len(talks)], now
                )
            now += _BYPASS_S + 1.0
            for number in range(4):
                _, ((_, answer),) = _ask(store, [_key(seed, "late", number)], now)
                if answer.status is not WriteStatus.RESERVED:
                    return f"G9: {policy}: late as it is, a new block gets {answer.status.name}"
    return ""


WORLDS: Final[dict[str, Callable[[int], str]]] = {
    "lies": play_lies,
    "hints": play_hints,
    "changes": play_changes,
    "refusals": play_refusals,
}


if __name__ == "__main__":
    play_worlds(WORLDS, SEEDS)
