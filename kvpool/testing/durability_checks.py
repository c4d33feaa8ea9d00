"""What a tier that remembers does when nobody closes it, when another owner or key comes, and when
it has no room for all."""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Final

from kvpool.errors import ConfigError, Corrupt, KvpoolError
from kvpool.protocols.persistent_tier import (
    BelongsToOwner,
    Encrypts,
    HasParts,
    KeepsSome,
    ReportsDropped,
)
from kvpool.testing.harness import NotDeclared, Scene, content, describe, digest
from kvpool.testing.record_checks import durable, found, listed, record, recovered
from kvpool.testing.tier_checks import STEPS, MakeTier, TierCheck, opened, read
from kvpool.types import Namespace

#: More namespaces than a table has room for, if there is a table.
_NAMESPACES: Final = 1500


@TierCheck
async def what_was_remembered_survives_a_kill(scene: Scene, make: MakeTier) -> None:
    """As soon as `persist` and `erase` have returned; the process has no time to close anything."""
    async with opened(make) as tier:
        durable(tier)
        step = tier.alignment
    records = [record(number * step, step, number + 1) for number in range(4)]

    async def remember() -> None:
        tier = make_again()
        memory = durable(tier)
        await memory.recover()
        for one in records:
            await tier.write_from(one.offset, memoryview(content(one.digest, one.size)))
        await memory.persist(records)
        await memory.erase([step])

    def make_again() -> Any:
        return make(tier.capacity)

    status = await _killed(remember)
    scene.expect(status == -signal.SIGKILL, "the other process to come to its end", str(status))
    async with opened(make) as tier:
        back = set(await durable(tier).recover())
        wanted = {one for one in records if one.offset != step}
        scene.expect(back == wanted, "the records, without the erased", listed(back))
        for one in back:
            same = await read(tier, one.offset, one.size) == content(one.digest, one.size)
            scene.expect(same, f"the bytes at {one.offset} as they were written")


async def _killed(body: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run it in a process of its own, which is killed where it ends: how that process ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: it starts its own
        child = os.fork()
    if not child:
        try:
            asyncio.new_event_loop().run_until_complete(body())
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    try:
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
    except asyncio.CancelledError:
        os.kill(child, signal.SIGKILL)
        raise
    return os.waitstatus_to_exitcode(status)


@TierCheck
async def erasing_ignores_where_no_extent_starts(scene: Scene, make: MakeTier) -> None:
    """In the middle of one, or where there is none."""
    async with recovered(make) as (tier, memory):
        step = tier.alignment
        records = {record(0, 3 * step, 1), record(4 * step, step, 2)}
        await memory.persist(list(records))
        await memory.erase([step, 2 * step, 3 * step, 9 * step])
    now = await found(make)
    scene.expect(now == records, "both extents, as they were", listed(now))


@TierCheck
async def a_cancelled_call_remembers_nothing_later(scene: Scene, make: MakeTier) -> None:
    """Once it has ended: what is erased then, or persisted there, is the last word."""
    async with recovered(make) as (tier, memory):
        step = tier.alignment
        for number, after in enumerate(STEPS):
            records = [record((number % 4 + 4 * n) * step, step, 1) for n in range(32)]
            task = asyncio.ensure_future(memory.persist(records))
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await memory.erase([one.offset for one in records])
            await asyncio.sleep(0.002)
        last = record(0, step, 9)
        await memory.persist([last])
    now = await found(make)
    scene.expect(now == {last}, "what was erased after it was cancelled to be gone", listed(now))


@TierCheck
async def what_is_left_out_is_known(scene: Scene, make: MakeTier) -> None:
    """Of many namespaces: `recover` finds the records that `keeps` names, without it all."""
    async with opened(make, _NAMESPACES * 4096) as tier:
        memory = durable(tier)
        await memory.recover()
        records = [
            record(offset, 1, offset + 1)._replace(namespace=Namespace(f"tenant-{offset}/model"))
            for offset in range(0, tier.capacity, max(tier.alignment, 4096))
        ]
        await memory.persist(records)
        kept = {one for one in records if not isinstance(tier, KeepsSome) or tier.keeps(one.offset)}
    async with opened(make, _NAMESPACES * 4096) as tier:
        now = set(await durable(tier).recover())
    scene.expect(
        now == kept,
        f"the {len(kept)} records that were kept",
        f"{len(now)} found, {len(now - kept)} others, {len(kept - now)} missing",
    )


@TierCheck
async def nothing_is_dropped_unsaid(scene: Scene, make: MakeTier) -> None:
    """`dropped` is empty when all came back, and counts by reason what did not."""
    async with opened(make) as tier:
        if not isinstance(tier, ReportsDropped):
            raise NotDeclared(f"tier {tier.name!r} does not count what it drops")
        await durable(tier).recover()
        scene.expect(not any(tier.dropped.values()), "nothing dropped", describe(tier.dropped))
        await durable(tier).persist([record(0, tier.alignment, 1)])
    for _ in range(2):
        async with opened(make) as tier:
            await durable(tier).recover()
            assert isinstance(tier, ReportsDropped)
            counts = dict(tier.dropped)
            fine = not any(counts.values()) and all(map(str.isprintable, counts))
            scene.expect(fine, "nothing dropped, for all came back", describe(counts))


@TierCheck
async def parts_make_up_the_tier(scene: Scene, make: MakeTier) -> None:
    """In multiples of `alignment`, each with a place, together `capacity`."""
    async with opened(make) as tier:
        if not isinstance(tier, HasParts):
            raise NotDeclared(f"tier {tier.name!r} is one device")
        parts = list(tier.parts)
        places = all(part.place for part in parts)
        scene.expect(places, "a place of each part", describe(parts))
        whole = all(part.size > 0 and not part.size % tier.alignment for part in parts)
        scene.expect(whole, f"multiples of {tier.alignment} bytes", describe(parts))
        total = sum(part.size for part in parts)
        scene.expect(total == tier.capacity, f"{tier.capacity} bytes together", describe(total))


@TierCheck
async def nobody_else_is_served_from_it(scene: Scene, make: MakeTier) -> None:
    """With another owner `recover` is a ConfigError, and changes nothing; its owner has all."""
    mine, other = b"m" * 16, b"o" * 16
    one = record(0, 1, 1)
    async with opened(make) as tier:
        if not isinstance(tier, BelongsToOwner):
            raise NotDeclared(f"tier {tier.name!r} belongs to nobody")
        tier.claim(mine)
        await durable(tier).recover()
        await durable(tier).persist([one])
    async with opened(make) as tier:
        assert isinstance(tier, BelongsToOwner)
        tier.claim(other)
        await scene.raises(ConfigError, durable(tier).recover(), "another owner's `recover`")
    async with opened(make) as tier:
        assert isinstance(tier, BelongsToOwner)
        tier.claim(mine)
        now = set(await durable(tier).recover())
    scene.expect(now == {one}, "what its owner has persisted", listed(now))


@TierCheck
async def another_key_reads_nothing(scene: Scene, make: MakeTier) -> None:
    """Bytes and records of a tier that encrypts are there for its key alone."""
    one = record(0, 4096, 1)
    data = content(digest("secret"), 4096)

    async def tried(key: bytes) -> tuple[object, bytes]:
        async with opened(make) as tier:
            assert isinstance(tier, Encrypts)
            tier.use_key(key)
            try:
                records = set(await durable(tier).recover())
                return records, bytes(await read(tier, 0, 4096))
            except (ConfigError, Corrupt) as error:
                return error, b""

    async with opened(make) as tier:
        if not isinstance(tier, Encrypts) or not tier.encrypted:
            raise NotDeclared(f"tier {tier.name!r} does not encrypt")
        tier.use_key(b"k" * 32)
        await durable(tier).recover()
        await tier.write_from(0, memoryview(data))
        await durable(tier).persist([one])
    records, got = await tried(b"k" * 32)
    scene.expect((records, got) == ({one}, data), "all of it with its key", describe(records))
    records, got = await tried(b"x" * 32)
    fine = isinstance(records, KvpoolError) or not records
    scene.expect(fine and got != data, "nothing with another key", describe(records))
