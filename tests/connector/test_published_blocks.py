"""Which blocks of the pool are announced to routers, and when that is taken back."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import Namespace
from kvpool.kv_events import RemovedEvent, StoredEvent
from kvpool.types import Presence, Replica
from kvpool_events import published_blocks
from kvpool_events.event_feed import EventFeed
from kvpool_events.published_blocks import PublishedBlocks, Question

NEAR = Presence((Replica("s1", "dram"),), True, "dram")
FAR = Presence((Replica("s2", "dram"),), False, "dram")
DISK = Presence((Replica("s1", "nvme"),), True, "nvme")


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def event(number: int, **fields: object) -> StoredEvent:
    return StoredEvent(
        **{
            "block_hashes": [number],
            "parent_block_hash": number - 1 if number else None,
            "token_ids": [number, number],
            "block_size": 2,
            "lora_id": None,
            "medium": None,
            "lora_name": None,
            "group_idx": 0,
            "session_id": "chat",
            **fields,
        }
    )


@pytest.fixture
def blocks() -> PublishedBlocks:
    return PublishedBlocks("shared", Counter())


def add(blocks: PublishedBlocks, *numbers: int, now: float = 0.0) -> None:
    for number in numbers:
        blocks.add(0, digest(number), event(number), now)


def only(questions: list[Question]) -> Question:
    (question,) = questions
    return question


def stored(blocks: PublishedBlocks) -> list[tuple[list[int], str, str | None, str | None]]:
    return [
        (one.block_hashes, one.medium, one.locality, one.ownership)
        for one in blocks.take(100)
        if isinstance(one, StoredEvent)
    ]


def test_a_block_is_announced_where_a_master_says_that_it_is(blocks: PublishedBlocks) -> None:
    add(blocks, 0, 1, 2, 3)
    assert not blocks.take(10)
    question = only(blocks.questions(0.0))
    assert question.digests == tuple(map(digest, range(4)))
    assert not blocks.questions(0.0), "one question at a time"
    blocks.answer(question.serial, [NEAR, NEAR, FAR, DISK], 0.1)
    assert stored(blocks) == [
        ([0, 1], "CPU", "LOCAL", None),
        ([2], "CPU", "REMOTE", "kvpool"),
        ([3], "STORAGE", "LOCAL", None),
    ]
    assert not blocks.waiting


def test_blocks_of_one_chain_are_one_event_up_to_a_limit(blocks: PublishedBlocks) -> None:
    for number in range(700):
        blocks.add(0, number.to_bytes(32, "big"), event(number), 0.0)
    question = only(blocks.questions(0.0))
    blocks.answer(question.serial, [NEAR] * 700, 0.1)
    first, second = blocks.take(10)
    assert isinstance(first, StoredEvent)
    assert isinstance(second, StoredEvent)
    assert first.block_hashes == list(range(512))
    assert second.parent_block_hash == 511
    assert len(second.token_ids) == 2 * len(second.block_hashes)


def test_other_sessions_and_adapters_are_other_events(blocks: PublishedBlocks) -> None:
    blocks.add(0, digest(1), event(1), 0.0)
    blocks.add(0, digest(2), event(2, session_id="other"), 0.0)
    blocks.add(0, digest(3), event(3, session_id="other", lora_name="adapter"), 0.0)
    blocks.answer(only(blocks.questions(0.0)).serial, [NEAR] * 3, 0.1)
    assert [one[0] for one in stored(blocks)] == [[1], [2], [3]]


def test_a_block_that_no_master_knows_yet_is_asked_about_again(blocks: PublishedBlocks) -> None:
    add(blocks, 1, 2)
    blocks.answer(only(blocks.questions(0.0)).serial, [None, FAR], 0.1)
    assert [one[0] for one in stored(blocks)] == [[2]]
    assert not blocks.questions(0.3)
    question = only(blocks.questions(0.7))
    assert question.digests == (digest(1),)
    blocks.answer(question.serial, [NEAR], 0.7)
    assert [one[0] for one in stored(blocks)] == [[1]]


def test_a_block_that_never_comes_is_not_asked_about_for_ever(blocks: PublishedBlocks) -> None:
    add(blocks, 1)
    for attempt in range(3):
        blocks.answer(only(blocks.questions(float(attempt))).serial, [None], float(attempt))
    assert not blocks.questions(10.0)
    assert not blocks.waiting


def test_what_the_pool_has_lost_is_taken_back_as_it_was_announced(blocks: PublishedBlocks) -> None:
    add(blocks, 1, 2, 3)
    blocks.answer(only(blocks.questions(0.0)).serial, [NEAR, FAR, FAR], 0.0)
    blocks.take(10)
    question = only(blocks.questions(1.0))
    assert question.digests == (digest(1), digest(2), digest(3))
    blocks.answer(question.serial, [None, None, FAR], 1.0)
    removed = blocks.take(10)
    assert removed == [
        RemovedEvent(block_hashes=[1], medium="CPU", group_idx=0, locality="LOCAL"),
        RemovedEvent(
            block_hashes=[2], medium="CPU", group_idx=0, locality="REMOTE", ownership="kvpool"
        ),
    ]
    assert len(blocks) == 1


def test_a_block_that_has_moved_is_announced_where_it_is_now(blocks: PublishedBlocks) -> None:
    add(blocks, 1)
    blocks.answer(only(blocks.questions(0.0)).serial, [NEAR], 0.0)
    blocks.take(10)
    blocks.answer(only(blocks.questions(1.0)).serial, [DISK], 1.0)
    gone, here = blocks.take(10)
    assert isinstance(gone, RemovedEvent)
    assert isinstance(here, StoredEvent)
    assert (gone.medium, here.medium, here.token_ids) == ("CPU", "STORAGE", [1, 1])


def test_announced_blocks_are_asked_about_in_turns(blocks: PublishedBlocks) -> None:
    """However many they are: one question a second, and each of them gets its turn."""
    for number in range(2500):
        blocks.add(0, number.to_bytes(32, "big"), event(number), 0.0)
    while questions := blocks.questions(0.0):
        question = only(questions)
        assert len(question.digests) <= published_blocks.QUESTION_BLOCKS_MAX
        blocks.answer(question.serial, [NEAR] * len(question.digests), 0.0)
    assert len(blocks) == 2500
    asked = Counter[bytes]()
    for second in range(1, 6):
        question = only(blocks.questions(float(second)))
        assert not blocks.questions(float(second))
        asked.update(question.digests)
        blocks.answer(question.serial, [NEAR] * len(question.digests), float(second))
        assert not blocks.questions(second + 0.5)
    assert len(asked) == 2500
    assert set(asked.values()) == {2, 3}
    assert not [one for one in blocks.take(9999) if isinstance(one, RemovedEvent)]


def test_a_master_that_does_not_answer_costs_no_announcement(blocks: PublishedBlocks) -> None:
    add(blocks, 1)
    blocks.answer(only(blocks.questions(0.0)).serial, [NEAR], 0.0)
    add(blocks, 2)
    blocks.answer(only(blocks.questions(1.0)).serial, None, 1.0)
    assert set(only(blocks.questions(2.0)).digests) == {digest(1), digest(2)}
    # And one whose answer never comes.
    assert not blocks.questions(3.0)
    blocks.answer(only(blocks.questions(20.0)).serial, None, 20.0)
    assert set(only(blocks.questions(21.0)).digests) == {digest(1), digest(2)}
    assert len(blocks) == 1


def test_too_many_blocks_are_taken_back_the_oldest_first(
    blocks: PublishedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that believes in a block nobody watches would believe in it for ever."""
    monkeypatch.setattr(published_blocks, "PUBLISHED_MAX", 2)
    add(blocks, 1, 2, 3)
    blocks.answer(only(blocks.questions(0.0)).serial, [NEAR] * 3, 0.0)
    removed = [one for one in blocks.take(10) if isinstance(one, RemovedEvent)]
    assert [one.block_hashes for one in removed] == [[1]]
    assert len(blocks) == 2


def test_after_a_reset_nothing_is_announced_nor_late_answers_heard(
    blocks: PublishedBlocks,
) -> None:
    add(blocks, 1)
    blocks.answer(only(blocks.questions(0.0)).serial, [NEAR], 0.0)
    add(blocks, 2)
    late = only(blocks.questions(0.0))
    blocks.take(10)
    blocks.reset()
    add(blocks, 2)  # under the new name, of which the late answer knows nothing
    again = only(blocks.questions(0.1))
    blocks.answer(late.serial, [NEAR], 0.1)
    (removed,) = blocks.take(10)
    assert isinstance(removed, RemovedEvent)
    assert removed.block_hashes == [1]
    blocks.answer(again.serial, [NEAR], 0.2)
    assert [one[0] for one in stored(blocks)] == [[2]]
    assert not blocks.waiting


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": [("salt",)]},
        {"extra_keys": [("adapter", "salt")], "lora_name": "adapter"},
        {"extra_keys": [(("picture", 3),)]},
        {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64},
    ],
    ids=str,
)
def test_what_makes_vllm_router_forget_is_announced_in_the_plain_form_only(
    fields: dict[str, object],
) -> None:
    for form, announced in (("shared", False), ("plain", True)):
        blocks = PublishedBlocks(form, Counter())  # type: ignore[arg-type]
        blocks.add(0, digest(1), event(1, **fields), 0.0)
        assert bool(blocks.questions(0.0)) is announced


def test_an_adapters_own_name_is_no_such_thing(blocks: PublishedBlocks) -> None:
    named = event(1, lora_name="adapter", extra_keys=[("adapter",)])
    blocks.add(0, digest(1), named, 0.0)
    assert blocks.questions(0.0)


@pytest.mark.parametrize("names", [(), (Namespace("other weights"),)])
def test_an_engine_without_its_names_takes_back_what_it_has_announced(
    names: tuple[Namespace, ...],
) -> None:
    async def where(_: Namespace, digests: tuple[bytes, ...], **__: Any) -> list[Presence]:
        return [NEAR] * len(digests)

    def start(work: Any) -> bool:
        asyncio.run(work())
        return True

    thread: Any = SimpleNamespace(pool=SimpleNamespace(where=where), start=start)
    feed = EventFeed("shared", thread, Counter())
    for _ in range(2):
        feed.step((Namespace("a"),), 0.0)
        feed.add([(0, digest(1), event(1))], 0.0)
        feed.step((Namespace("a"),), 0.1)
        feed.step((Namespace("a"),), 0.2)
        assert [type(one) for one in feed.take()] == [StoredEvent]
        feed.add([(0, digest(2), event(2))], 0.2)
        feed.step((Namespace("a"),), 0.3)  # asked, and its answer comes too late
        feed.step(names, 0.4)
        assert [type(one) for one in feed.take()] == [RemovedEvent]
        assert not feed.waiting
