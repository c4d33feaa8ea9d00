"""Whole namespaces are removed from servers, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import Namespace, Pool, admin, dev
from kvpool.client.namespace_removal import HeldNamespace
from kvpool.client.pool_events import PoolEventKind
from kvpool.operators import RemovalCursor
from kvpool.server import namespace_removal
from kvpool.server.namespace_removal import remove_written
from tests.conftest import eventually, keys
from tests.support.tenant_pool import OPERATOR, tenant, tenant_pool

OLD, OTHER = Namespace("old model=llama"), Namespace("other", parts=2)
SIZE = 8192


@asynccontextmanager
async def serving(**more: Any) -> AsyncIterator[tuple[dev.Dev, Pool]]:
    listen = ("inproc://", "tcp://127.0.0.1:0")
    async with dev.serve(listen=listen, **more) as running, running.pool() as pool:
        yield running, pool


async def put(pool: Pool, namespace: Namespace, digests: Sequence[bytes]) -> None:
    for part in range(namespace.parts):
        for at in range(0, len(digests), 64):
            batch = digests[at : at + 64]
            statuses = await pool.write(
                namespace, batch, [b"x" * SIZE] * len(batch), part=part, timeout=20
            )
            assert all(status.present for status in statuses)


async def present(pool: Pool, namespace: Namespace, digests: Sequence[bytes]) -> int:
    return sum(await pool.contains(namespace, digests))


def of(*names: Namespace) -> Callable[[Namespace], bool]:
    return lambda one: one in names


async def remove(pool: Pool, held: Sequence[HeldNamespace]) -> tuple[int, int]:
    done = [0, 0]

    def report(server: str, blocks: int, size: int) -> None:
        done[0] += blocks
        done[1] += size

    assert await admin(pool).removals.remove(held, timeout=20, report=report) == {}
    return done[0], done[1]


async def test_a_namespace_goes_with_all_its_parts_and_the_others_stay() -> None:
    async with serving(servers=2) as (running, pool):
        old, other = keys("old", 700), keys("other", 70)
        await put(pool, OLD, old)
        await put(pool, OTHER, other)
        held = await admin(pool).removals.held(of(OTHER), timeout=10)
        assert sum(one.blocks for one in held.found) == 140
        assert (await remove(pool, held.found)) == (140, 140 * SIZE)
        assert [name for name, _ in await admin(pool).namespaces()] == [OLD]
        held = await admin(pool).removals.held(of(OLD), timeout=10)
        assert (sum(one.blocks for one in held.found), held.missing) == (700, {})
        events = pool.events()
        assert (await remove(pool, held.found))[0] == 700
        assert await present(pool, OLD, old) == 0
        assert [server.stack.stored for server in running.servers] == [0, 0]
        gone: set[bytes] = set()
        async with asyncio.timeout(10):
            async for event in events:
                if event.kind is PoolEventKind.REMOVED:
                    gone.update(event.digests)
                if gone == set(old) or event.kind is PoolEventKind.LIVE:
                    break


async def test_what_is_written_after_the_look_stays_wherever_old_copies_move(
    tmp_path: Path,
) -> None:
    """Old blocks that come into the file during the removal are old, too."""
    tiers = ["dram:1MiB", f"nvme:{tmp_path}/{{server}}:16MiB"]
    async with serving(tiers=tiers, write_mode="write_back") as (running, pool):
        (server,) = running.servers
        server.stack.backing.held.last_id = 10_000  # as in a file that has seen some restarts
        old, new = keys("old", 60), keys("new", 300)
        await put(pool, OLD, old)
        assert server.stack.front.extents.dirty == 60, "in memory alone"
        held = (await admin(pool).removals.held(of(OLD), timeout=10)).found
        await put(pool, OLD, new)
        await eventually(lambda: server.stack.front.index.peek(OLD, 0, old[0]) is None)
        assert any(server.stack.backing.index.peek(OLD, 0, one) for one in old), "moved since"
        blocks, _ = await remove(pool, held)
        assert blocks == 60
        assert await present(pool, OLD, new) == 300
        assert [server.stack.peek(OLD, 0, one) for one in old] == [None] * 60
        assert len(server.stack.erasures) == 0, "nor is it back after a restart"
        await put(pool, OLD, old[:1])
        assert await remove(pool, held) == (0, 0), "the same removal again does no harm"
        assert await present(pool, OLD, old[:1]) == 1


async def test_a_block_that_is_written_again_under_its_key_stays() -> None:
    async with serving() as (_, pool):
        old = keys("old", 10)
        await put(pool, OLD, old)
        held = (await admin(pool).removals.held(of(OLD), timeout=10)).found
        await pool.remove(OLD, old[:1])
        await put(pool, OLD, old[:1])
        assert (await remove(pool, held))[0] == 9
        assert await pool.contains(OLD, old) == [True] + [False] * 9


async def test_a_call_is_short_and_says_where_to_go_on() -> None:
    async with serving() as (running, pool):
        await put(pool, OLD, keys("old", 1500))
        (held,) = (await admin(pool).removals.held(of(OLD), timeout=10)).found
        store, at, steps = running.servers[0].stack, held.begin, []
        while True:
            step = remove_written(store, OLD, at, 64)
            steps.append(len(step.digests))
            if step.at is None:
                break
            at = step.at
        assert (sum(steps), max(steps), store.stored) == (1500, 64, 0)


async def test_a_place_of_an_earlier_process_ends_and_takes_nothing_new() -> None:
    async with serving() as (_, pool):
        await put(pool, OLD, keys("old", 10))
        (held,) = (await admin(pool).removals.held(of(OLD), timeout=10)).found
        earlier = RemovalCursor(held.begin.epoch ^ 1, 1 << 60, 7, 255, 1 << 20)
        assert await remove(pool, [held._replace(begin=earlier)]) == (0, 0)
        assert await present(pool, OLD, keys("old", 10)) == 10


async def test_namespaces_of_a_second_page_are_found_with_their_parts() -> None:
    async with serving() as (running, pool):
        store = running.servers[0].stack.front

        def wanted(namespace: Namespace) -> bool:
            store.held.last_id += 1  # something is written between two pages
            return True

        names = [Namespace(f"n {n:03}", parts) for n in range(150) for parts in (1, 2)]
        for name in names:
            await pool.write(name, keys("k", 1), [b"x"])
        held = (await admin(pool).removals.held(wanted, timeout=10)).found
        assert [one.namespace for one in held] == names
        assert len({one.begin for one in held}) == 1


async def test_a_page_of_namespaces_of_many_parts_leaves_the_loop_to_others() -> None:
    """A tenant may ask for it again and again. And names are put in order once for all pages, of
    which none is empty: the next one would begin behind its last name."""
    spaces = [Namespace(f"n{number:03d}", 256) for number in range(900)]
    looks = 0

    class Counted(dict[Any, Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    index = Counted({(one, 0): SimpleNamespace(blocks=[0], used=7) for one in reversed(spaces)})
    for one in spaces[:300]:  # more than a page of them leave while it is put together
        index[one, 0].blocks = []
    tier = SimpleNamespace(index=SimpleNamespace(by_part=index))
    front = SimpleNamespace(held=SimpleNamespace(last_id=1))
    store = SimpleNamespace(stores=[tier, tier], online=[tier, tier], front=front)
    context = SimpleNamespace(epoch=1, store=store)
    parts: Any = SimpleNamespace(context=context, extensions=None)
    server, found, after = namespace_removal.NamespaceRemoval(parts), [], ("", 0)
    for more in (True, True, False):
        looking = asyncio.create_task(server.holdings("", after))
        turns = 0
        while not looking.done():
            await asyncio.sleep(0)
            turns += 1
        page = await looking
        assert turns >= len(page.held)
        assert page.more is more
        found += [(one.namespace, one.blocks, one.bytes) for one in page.held]
        after = found[-1][0].name, 256
    assert found == [(one, 1, 14) for one in spaces[300:]]
    assert looks == 2, "of each tier, once"
    assert not server._names, "nothing is kept"


async def test_names_of_a_look_that_was_broken_off_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A minute after its last page. Who goes on later finds what there is then."""
    monkeypatch.setattr(namespace_removal, "_NAMES_S", 0.4)
    index = {
        (Namespace(f"n{one:04d}"), 0): SimpleNamespace(blocks=[0], used=7) for one in range(900)
    }
    tier = SimpleNamespace(index=SimpleNamespace(by_part=index))
    front = SimpleNamespace(held=SimpleNamespace(last_id=1))
    store = SimpleNamespace(stores=[tier], online=[tier], front=front)
    parts: Any = SimpleNamespace(context=SimpleNamespace(epoch=1, store=store), extensions=None)
    server = namespace_removal.NamespaceRemoval(parts)
    fresh = Namespace("n0300 new")
    for after in (("", 0), ("n0255", 1)):
        page = await server.holdings("", after)
        index[fresh, 0] = SimpleNamespace(blocks=[0], used=7)
        assert page.more
        await asyncio.sleep(0.25)
    assert server._names, "each page begins the time anew"
    assert fresh not in [one.namespace for one in page.held]
    await eventually(lambda: not server._names)
    page = await server.holdings("", ("n0255", 1))
    assert fresh in [one.namespace for one in page.held]
    assert server._names
    await server.close()
    assert not server._names


async def test_a_server_that_does_not_answer_is_named() -> None:
    async with serving(servers=2) as (running, pool):
        await put(pool, OLD, keys("old", 64))
        held = await admin(pool).removals.held(of(OLD), timeout=10)
        (gone, *_) = [one for one in running.servers if one.server == held.found[0].server]
        await gone.close()
        left = await admin(pool).removals.remove(held.found, timeout=1.5, report=lambda *_: None)
        assert list(left) == [gone.server]
        looked = await admin(pool).removals.held(of(OLD), timeout=10)
        assert looked.missing == {}, "what was in its memory is gone with it"


async def test_a_tenant_finds_and_removes_its_own_only_and_it_is_on_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvpool.audit")
    model = Namespace("llama")
    async with tenant_pool(tmp_path) as running, AsyncExitStack() as stack:
        acme, blue, operator = [
            await stack.enter_async_context(await running.client(one))
            for one in (tenant("acme"), tenant("blue"), OPERATOR)
        ]
        for one in (acme, blue):
            await one.write(model, keys("k", 3), [b"x"] * 3)
        found = (await admin(operator).removals.held(lambda one: True, timeout=10)).found
        assert {one.namespace.name for one in found} == {"@acme/llama", "@blue/llama"}
        (held,) = (await admin(blue).removals.held(lambda one: True, timeout=10)).found
        assert held.namespace == model
        assert (await remove(blue, [held]))[0] == 3
        assert await present(acme, model, keys("k", 3)) == 3
        assert await present(blue, model, keys("k", 3)) == 0
    (said,) = [vars(one) for one in caplog.records if one.name == "kvpool.audit"]
    assert (said["request"], said["blocks"]) == ("RemoveAll @blue/llama", 3)
