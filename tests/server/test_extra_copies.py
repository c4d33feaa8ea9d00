"""Which extra copy goes for a new block, without a store."""

from __future__ import annotations

from kvpool.protocols.policy import Decision
from kvpool.server.eviction.extra_copies import ExtraCopies
from kvpool.server.eviction.order import JUST_NOW
from kvpool.server.state.entry import Entry, Index
from kvpool.types import ROOT
from tests.conftest import NAMESPACE, keys

INDEX = Index(NAMESPACE, 0, 0)


def block(number: int, *, copies: int = 0) -> Entry:
    entry = Entry(INDEX, keys("block", number + 1)[number], ROOT, 0, 1, number)
    entry.last_used, entry.copies = number * 1_000_000, copies
    return entry


class Kept:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.extra = ExtraCopies(self.entries.append)
        self.blocks = [block(number) for number in range(1, 5)]
        for entry in self.blocks:
            self.extra.add(entry)

    def take(self, newcomer: Entry, last_used: int = JUST_NOW, *pinned: Entry) -> object:
        return self.extra.take(newcomer, lambda entry: entry not in pinned, last_used)


def test_the_least_recently_used_one_goes_for_a_block() -> None:
    kept = Kept()
    one, two, three, four = kept.blocks
    kept.extra.discard(two)
    kept.extra.discard(two)
    assert kept.take(block(9, copies=1), JUST_NOW, three) is one
    assert kept.take(block(9, copies=1), JUST_NOW, three) is four
    assert one not in kept.extra.listed


def test_what_has_become_the_last_copy_is_no_extra_any_more() -> None:
    kept = Kept()
    one, two, *_ = kept.blocks
    one.copies = 1
    assert kept.take(block(9), JUST_NOW) is two
    assert kept.entries == [one]
    assert kept.extra.listed == set(kept.blocks[2:])


def test_one_call_looks_at_a_bounded_number() -> None:
    kept = Kept()
    for number in range(5, 400):
        kept.extra.add(block(number))
    found = kept.extra.take(block(900, copies=1), lambda entry: False, JUST_NOW)
    assert found is Decision.NOT_YET
