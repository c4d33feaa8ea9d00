"""What a tier that remembers its blocks must do (`kvpool.protocols.persistent_tier`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvpool.errors import Closed, UsageError
from kvpool.protocols import Tier
from kvpool.protocols.persistent_tier import PersistentTier, Record
from kvpool.testing.harness import NotDeclared, Scene, content, describe, digest
from kvpool.testing.loop_checks import keeps_no_loop
from kvpool.testing.tier_checks import MakeTier, TierCheck, opened, read
from kvpool.types import ROOT, Namespace

NAMESPACE: Final = Namespace("conformance/model")
#: What thousands of records may take of the loop at a time: threads that write them hold the
#: interpreter for 5 ms, too.
RECORDS_TURN_S: Final = 0.025
#: The capacity of a tier with thousands of records.
_RECORDED: Final = 8 << 20


def durable(tier: Tier) -> PersistentTier:
    """Raises NotDeclared when it does not remember what its bytes mean."""
    if not isinstance(tier, PersistentTier):
        raise NotDeclared(f"tier {tier.name!r} does not remember what its bytes mean")
    return tier


def record(offset: int, size: int, generation: int, name: object = "") -> Record:
    """An extent without a parent. Its generation distinguishes it from others with the same key."""
    key = digest((name, offset, generation))
    return Record(NAMESPACE, 0, key, ROOT, offset, size, generation * 7, generation)


async def found(make: MakeTier) -> set[Record]:
    """Open the storage again, recover, and close it: the records that a restarted server gets."""
    async with opened(make) as tier:
        return set(await durable(tier).recover())


@asynccontextmanager
async def recovered(make: MakeTier) -> AsyncIterator[tuple[Tier, PersistentTier]]:
    """A tier that is ready to be written to."""
    async with opened(make) as tier:
        await durable(tier).recover()
        yield tier, durable(tier)


def listed(records: set[Record]) -> str:
    """Records, shortly."""
    return describe(sorted((r.offset, r.size, r.generation) for r in records))


@TierCheck
async def what_was_remembered_is_found_again(scene: Scene, make: MakeTier) -> None:
    """Every field of a record, and the bytes, for several namespaces, parts, keys and sizes."""
    names = (NAMESPACE, Namespace("x", 2), Namespace("\N{SNOWMAN}" * 512, 256))
    records, size = set(), 0
    async with recovered(make) as (tier, memory):
        for number, namespace in enumerate(names * 3):
            offset = 2 * number * tier.alignment
            size = (1, tier.alignment, tier.alignment + 1)[number % 3]
            key = digest(number)[: 16 + 2 * number]
            parent = (ROOT, digest("parent")[:16], digest("parent"))[number // 3]
            part = namespace.parts - 1
            top = (1 << 64) - 1 - number
            copies = 1 + number % 3
            records.add(Record(namespace, part, key, parent, offset, size, top, top, copies))
            await tier.write_from(offset, memoryview(content(key, size)))
        await memory.persist(sorted(records, key=lambda r: r.digest))
    for again in ("once", "and again"):
        async with opened(make) as tier:
            back = await durable(tier).recover()
            scene.expect(
                len(back) == len(records) and set(back) == records,
                f"{len(records)} records just as they were remembered, {again}",
                describe(back),
            )
            if isinstance(back, list):
                back.clear()  # it is the caller's
            for one in records:
                same = await read(tier, one.offset, one.size) == content(one.digest, one.size)
                scene.expect(same, f"the bytes at {one.offset} as they were written")


@TierCheck
async def nothing_is_found_that_was_not_remembered(scene: Scene, make: MakeTier) -> None:
    """Bytes alone are no extent."""
    async with recovered(make) as (tier, memory):
        await tier.write_from(0, memoryview(content(digest("bytes"), tier.capacity)))
        await memory.persist([])
    found_ = await found(make)
    scene.expect(not found_, "no record", listed(found_))


@TierCheck
async def what_was_erased_stays_erased(scene: Scene, make: MakeTier) -> None:
    """Its neighbours stay. Erasing a record that does not exist is no error."""
    async with recovered(make) as (tier, memory):
        step = tier.alignment
        records = [record(number * step, step, number + 1) for number in range(8)]
        await memory.persist(records)
        await memory.erase([2 * step, 5 * step, 20 * step])
        await memory.erase([2 * step])
        await memory.erase([])
    left = {one for one in records if one.offset not in (2 * step, 5 * step)}
    for _ in range(2):
        now = await found(make)
        scene.expect(now == left, f"{len(left)} records, without the erased", listed(now))
    async with recovered(make) as (_, memory):
        await memory.erase([one.offset for one in records])
    now = await found(make)
    scene.expect(not now, "no record", listed(now))


@TierCheck
async def an_extent_is_what_was_remembered_last(scene: Scene, make: MakeTier) -> None:
    """Memory that is used again belongs to the new block alone, also if it has another size."""
    async with recovered(make) as (tier, memory):
        step = tier.alignment
        await memory.persist([record(0, step, 1), record(step, step, 2), record(4 * step, 1, 3)])
        await memory.erase([0, step])
        large = record(0, 2 * step, 4)
        await memory.persist([large])
    now = await found(make)
    wanted = {large, record(4 * step, 1, 3)}
    scene.expect(now == wanted, "the new extent, and the one that was left alone", listed(now))


@TierCheck
async def of_overlapping_extents_the_newest_wins(scene: Scene, make: MakeTier) -> None:
    """As after a crash that came before `erase`; and the others do not come back."""
    async with recovered(make) as (tier, memory):
        step = tier.alignment
        apart = record(0, step, 9)
        inside = [record(2 * step, 6 * step, 1), record(4 * step, step, 5)]
        before = [record(10 * step, 4 * step, 7), record(12 * step, 4 * step, 3)]
        same = [record(17 * step, 2 * step, 4), record(17 * step, step, 6)]
        for one in (apart, *inside, *before, *same):
            await memory.persist([one])
    newest = {apart, inside[1], before[0], same[1]}
    for _ in range(2):
        now = await found(make)
        scene.expect(now == newest, "the newest of each", listed(now))
    async with recovered(make) as (_, memory):
        await memory.erase([4 * step, 10 * step, 17 * step])
    now = await found(make)
    scene.expect(now == {apart}, "what was overlapped not to come back", listed(now))


@TierCheck
async def it_remembers_as_many_as_it_has_room_for(scene: Scene, make: MakeTier) -> None:
    """An extent in every place, persisted and erased in parallel, in any order."""
    async with recovered(make) as (tier, memory):
        step = tier.alignment
        records = [record(o, step, o // step + 1) for o in range(0, tier.capacity, step)]
        await asyncio.gather(*(memory.persist(records[first::7]) for first in range(7)))
        gone = records[1::3]
        await asyncio.gather(*(memory.erase([r.offset for r in gone[n::5]]) for n in range(5)))
        again = [one._replace(generation=one.generation + len(records)) for one in gone[::2]]
        await asyncio.gather(*(memory.persist(again[n::3]) for n in range(3)))
    wanted = set(records) - set(gone) | set(again)
    now = await found(make)
    scene.expect(now == wanted, f"{len(wanted)} records", f"{len(now)}, {len(now & wanted)} right")


@TierCheck
async def what_cannot_be_an_extent_is_refused(scene: Scene, make: MakeTier) -> None:
    """With a UsageError, and nothing of that call is remembered."""
    async with recovered(make) as (tier, memory):
        step, end = tier.alignment, tier.capacity
        good = record(0, step, 1)
        for offset, size in ((end, 1), (end - step, step + 1), (-step, 1), (1, 1), (step, 0)):
            refused = memory.persist([good, record(offset, size, 2)])
            await scene.raises(UsageError, refused, f"`persist` of {size} bytes at {offset}")
    now = await found(make)
    scene.expect(not now, "no record", listed(now))


@TierCheck
async def a_closed_tier_remembers_nothing(scene: Scene, make: MakeTier) -> None:
    """A closed tier raises Closed, and does nothing."""
    async with recovered(make) as (tier, memory):
        await memory.persist([record(0, 1, 1)])
        tier.close()
        late = memory.persist([record(tier.alignment, 1, 2)])
        await scene.raises(Closed, late, "`persist` after `close`")
        await scene.raises(Closed, memory.erase([0]), "`erase` after `close`")
        await scene.raises(Closed, memory.recover(), "`recover` after `close`")
    now = await found(make)
    scene.expect(now == {record(0, 1, 1)}, "what was remembered before `close`", listed(now))


@TierCheck
async def no_call_about_records_keeps_the_loop(scene: Scene, make: MakeTier) -> None:
    """Thousands of records are persisted, erased and recovered in small steps."""
    async with opened(make, _RECORDED) as tier:
        memory = durable(tier)
        await memory.recover()
        step = max(tier.alignment, 4096)
        records = [record(at, 1, at + 1) for at in range(0, tier.capacity, step)]
        offsets = [one.offset for one in records]
        await keeps_no_loop(scene, lambda: memory.erase(offsets), "`erase`", RECORDS_TURN_S)
        await keeps_no_loop(scene, lambda: memory.persist(records), "`persist`", RECORDS_TURN_S)
    tiers = [tier]

    counts: list[int] = []

    async def recovering() -> None:
        tiers[-1].close()
        tiers.append(make(_RECORDED))
        counts.append(len(await durable(tiers[-1]).recover()))

    try:
        await keeps_no_loop(scene, recovering, "`recover`", RECORDS_TURN_S)
        await durable(tiers[-1]).erase(offsets)
        await recovering()
    finally:
        tiers[-1].close()
    all_of_them = counts[0] == len(records) and counts[-1] == 0
    scene.expect(
        all_of_them, f"{len(records)} records, and none when they were erased", str(counts)
    )
