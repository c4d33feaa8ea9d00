"""Programs are told from chains: whose prompt it is, who goes on, and who goes first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvpool.protocols import ReserveRequest
from kvpool.server.eviction import programs as programs_module
from kvpool.server.eviction.programs import Lives, Programs
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, ReadStatus, WriteStatus
from tests.conftest import key

PAGE = 4096
ONE = Namespace("one")


class Server:
    """A store with room for so many blocks, to which prompts are sent."""

    def __init__(self, pages: int) -> None:
        self.policy = Programs(pages * PAGE)
        self.store = Store(pages * PAGE, policy=self.policy)
        self.now = 0.0

    def prompt(self, chain: Sequence[str], after_s: float = 1.0, prefill_s: float = 0.0) -> int:
        """Read what is here of it, then write the rest. How many blocks were here."""
        self.now += after_s
        digests = [key(name) for name in chain]
        pins = self.store.pin(1, ONE, 0, digests, self.now)
        hits = [pin for pin in pins if pin.status is ReadStatus.HIT]
        held = next((i for i, p in enumerate(pins) if p.status is not ReadStatus.HIT), len(pins))
        if prefill_s:
            self.store.unpin_all(1, [pin.id for pin in hits])
            self.now += prefill_s
        if digests[held:]:
            self.write(digests[held:], digests[held - 1] if held else ROOT)
        if not prefill_s:
            self.store.unpin_all(1, [pin.id for pin in hits])
        check_invariants(self.store)
        return held

    def write(self, digests: list[bytes], parent: bytes) -> list[WriteStatus]:
        parents = [parent, *digests[:-1]]
        request = ReserveRequest(ONE, 0, digests, parents, [PAGE] * len(digests))
        answers = self.store.reserve(1, request, self.now)
        for answer in answers:
            if answer.status is WriteStatus.RESERVED:
                self.store.seal(1, answer.id, 0, self.now)
        return [answer.status for answer in answers]

    def prompts(self, name: str) -> int:
        entry = self.store.index.peek(ONE, 0, key(name))
        assert entry is not None
        return self.policy.prompts_of(entry)

    def here(self, *names: str) -> list[str]:
        return [name for name in names if self.store.index.peek(ONE, 0, key(name)) is not None]


def chain(name: str, length: int, end: str = "") -> list[str]:
    """`length` blocks; with `end` the last one is not full, and another one each time."""
    names = [f"{name}/{number}" for number in range(length)]
    return [*names[:-1], f"{names[-1]}/{end}"] if end else names


@pytest.fixture(autouse=True)
def learn_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "_LEARN_EVERY", 1)
    monkeypatch.setattr(programs_module, "_PRIOR", 1.0)
    monkeypatch.setattr(programs_module, "_SHAPE", 1.0)
    monkeypatch.setattr(programs_module, "_ROW", 0)


# --- whose prompt it is ------------------------------------------------------------------------


def test_the_end_of_a_prompt_may_be_another_one_in_the_next() -> None:
    """But not what comes before it: two chains that part there are two programs."""
    server = Server(100)
    server.prompt(chain("a", 5, "old"), 10.0)
    server.prompt(chain("a", 6, "new"), 10.0)
    assert server.prompts("a/0") == 2
    server.prompt([*chain("a", 4), *chain("other", 3)], 10.0)
    assert server.prompts("a/3") == 0, "it is shared"
    server.prompt([*chain("a", 4), *chain("third", 3)], 10.0)
    assert server.prompts("third/0") == 1, "at its first prompt"
    server.prompt([*chain("a", 4), *chain("third", 4)], 10.0)
    assert (server.prompts("third/0"), server.prompts("a/4")) == (2, 2)


def test_a_prompt_that_is_written_in_steps_is_one() -> None:
    server = Server(100)
    names = [key(name) for name in chain("a", 6)]
    server.write(names[:2], ROOT)
    server.prompt(chain("b", 2), 0.1)  # another one comes between
    server.write(names[2:4], names[1])
    server.prompt(chain("c", 2), 0.1)
    server.write(names[4:], names[3])
    server.prompt(chain("d", 2), 0.1)
    assert server.prompts("a/5") == 1


def test_a_program_is_known_again_when_its_blocks_are_gone() -> None:
    server = Server(8)
    server.prompt(chain("a", 4))
    server.prompt(chain("b", 8))
    assert not server.here(*chain("a", 4))
    server.prompt(chain("a", 6), 5.0)
    server.prompt(chain("c", 1))
    assert server.prompts("a/0") == 2


def test_prompts_are_counted_as_a_model_counts_them() -> None:
    """Random conversations in turns, some of which begin with the same blocks."""
    for seed in range(5):
        chance = random.Random(seed)
        server = Server(3000)
        for one in ("x", "y"):  # so that it is known where conversations part
            server.prompt([*chain("head", 3), *chain(one, 3)], 5.0)
        lengths: dict[int, int] = {}
        turns: dict[int, int] = {}
        for _ in range(200):
            talk = chance.randrange(25)
            shares = talk % 3 == 0
            lengths[talk] = lengths.get(talk, 0) + chance.randint(1, 4)
            turns[talk] = turns.get(talk, 0) + 1
            head = chain("head", 3) if shares else []
            names = [*head, *chain(f"talk {talk}", lengths[talk])]
            prefill_s = chance.choice([0.0, 30.0])  # what is read, and written then, is one prompt
            server.prompt(names, chance.uniform(2, 20), prefill_s=prefill_s)
        server.prompt(["last"])
        assert {talk: server.prompts(f"talk {talk}/0") for talk in turns} == turns


# --- who goes first ----------------------------------------------------------------------------


def trained(pages: int) -> Server:
    """Conversations that go on once they have had a second prompt, and many that never do."""
    server = Server(pages)
    for number in range(60):
        for turn in range(1, 6):
            server.prompt(chain(f"talk {number}", 2 * turn), 2.0)
        for once in range(6):
            server.prompt(chain(f"once {number}.{once}", 2), 0.2)
    return server


def test_a_conversation_outlives_what_has_only_begun() -> None:
    server = trained(30)
    for turn in range(1, 4):
        server.prompt(chain("talk", 3 * turn), 2.0)
    for number in range(10):
        server.prompt(chain(f"begun {number}", 3), 0.1)
    assert server.here(*chain("talk", 9)) == chain("talk", 9)


def test_ends_go_first_where_the_next_prompt_has_others() -> None:
    server = Server(24)
    for number in range(80):
        for turn in range(1, 4):
            server.prompt(chain(f"t{number}", 3 * turn, f"end {turn}"), 2.0)
    names = [chain(f"new {number}", 4, "end") for number in range(4)]
    for one in names:
        server.prompt(one, 0.2)
    server.prompt(chain("more", 12), 1.0)
    assert not server.here(*(one[-1] for one in names))
    assert all(server.here(*one) == one[:-1] for one in names)


def test_of_two_kinds_that_go_on_nearly_as_often_the_lesser_goes_first() -> None:
    """Not the older one."""
    server = Server(98)
    for number in range(120):
        for length, goes_on in ((3, number % 4 > 0), (16, number % 2 > 0)):
            server.prompt(chain(f"{length}: {number}", length))
            if goes_on:
                server.prompt(chain(f"{length}: {number}", length + 1), 60.0)
    new = [chain(f"new {number}", 3 if number < 5 else 16) for number in range(10)]
    for names in (*new, *(chain(f"more {number}", 1) for number in range(10))):
        server.prompt(names, 0.11)
    assert all(server.here(*names[:2]) for names in new[:5])
    assert not server.here(new[5][-1])


# --- what is measured --------------------------------------------------------------------------


def test_few_that_were_seen_are_taken_for_like_all_others() -> None:
    everyone, new, own = Lives(), Lives(), Lives()
    for _ in range(1000):
        everyone.began += 1
        everyone.ended(4.0)
        own.began += 1
    new.learn_beside(everyone)
    own.learn_beside(everyone)
    assert new.density(0.0) == pytest.approx(1 / 4, rel=0.3)
    assert own.density(0.0) < new.density(0.0) / 50, "of these, none came back"


def test_who_paused_longer_than_any_other_is_expected_no_more() -> None:
    lives, everyone = Lives(), Lives()
    for number in range(1000):
        lives.began += 1
        if number % 2:
            lives.ended(4.0)
    lives.learn_beside(everyone)
    assert lives.density(3.0) > lives.density(0.0) > 0
    assert lives.density(10.0) == 0.0
