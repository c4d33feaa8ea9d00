"""What many chains share gets copies by itself: no server takes all of them with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from kvpool import Pool, admin, dev
from kvpool.client import shared_copies
from kvpool.client.shared_copies import needs_copy
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, ReadStatus
from tests.conftest import NAMESPACE, eventually, keys, value, values

PROMPT = keys("system prompt", 5)


async def write(pool: Pool, digests: Sequence[bytes], parent: bytes = ROOT) -> None:
    statuses = await pool.write(NAMESPACE, digests, values(digests), parent=parent)
    assert all(status.present for status in statuses)


async def chat(pool: Pool, number: int) -> None:
    """One session that begins with the prompt; then nothing is copied any more."""
    await write(pool, keys(f"chat {number}/", 2), PROMPT[-1])
    await eventually(lambda: pool._extensions.get("shared copies")._task is None)


async def holders(pool: Pool, digests: Sequence[bytes]) -> list[set[str]]:
    explained = await admin(pool).explain(NAMESPACE, digests)
    return [{replica.server for replica in one.replicas} for one in explained]


async def test_a_shared_prompt_is_copied_and_outlives_its_server() -> None:
    async with dev.serve("8MiB", servers=5) as running, running.pool() as pool:
        await write(pool, PROMPT)
        (first,) = (await holders(pool, PROMPT))[0]
        for number in range(24):
            await chat(pool, number)
        found = await holders(pool, PROMPT)
        assert all(len(one) == 2 and first in one for one in found)
        assert len({frozenset(one) for one in found}) == 1  # whole copies
        assert pool.counters["shared_copies"] == len(PROMPT)
        for server in running.servers:
            check_invariants(server.store)
        (server,) = [one for one in running.servers if one.server == first]
        await server.close()
        match = await pool.match(NAMESPACE, PROMPT)
        assert match.length == len(PROMPT)
        into = [bytearray(8192) for _ in PROMPT]
        assert all(result.status.hit for result in await pool.read(NAMESPACE, PROMPT, into))
        assert bytes(into[3]) == value(PROMPT[3])
        lost = 0
        for number in range(24):
            chain = keys(f"chat {number}/", 2)
            lost += (await pool.match(NAMESPACE, chain)).stopped is ReadStatus.SERVER_LOST
        assert lost <= 24 * 1.5 / 5


async def test_a_shared_prompt_of_several_parts_is_looked_at_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each part has servers of its own, which may not have what the chain of another one begins."""
    space = Namespace("parts", 2)
    async with dev.serve("8MiB", servers=4) as running:
        for who in range(2):
            async with running.pool() as pool:
                for part in (0, 1) if not who else ():
                    await pool.write(space, PROMPT, values(PROMPT), part=part)
                for number in range(10):
                    chain = keys(f"chat {who}/{number}/", 2)
                    for part in (0, 1):
                        await pool.write(space, chain, values(chain), part=part, parent=PROMPT[-1])
                        copies = pool._extensions.get("shared copies")
                        await eventually(lambda copies=copies: copies._task is None)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_what_begins_several_shared_prompts_has_no_more_copies_than_they() -> None:
    async with dev.serve("8MiB", servers=5) as running, running.pool() as pool:
        await write(pool, PROMPT)
        papers = [keys(f"paper {number}/", 3) for number in range(6)]
        for paper in papers:
            await write(pool, paper, PROMPT[-1])
        for number in range(6 * 6):
            paper = papers[number % 6]
            await write(pool, keys(f"question {number}/", 2), paper[-1])
            await eventually(lambda: pool._extensions.get("shared copies")._task is None)
        for shared in (PROMPT, *papers):
            assert all(len(one) == 2 for one in await holders(pool, shared))


async def test_all_that_a_shared_prompt_goes_on_from_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it lies on other servers than the prompt."""
    async with dev.serve("8MiB", servers=3) as running, running.pool() as pool:
        monkeypatch.setattr(shared_copies, "SHARED_COPIES_MAX", 1)
        await write(pool, PROMPT)
        papers = [keys(f"paper {number}/", 3) for number in range(6)]
        for paper in papers:
            await write(pool, paper, PROMPT[-1])
        paper = papers[-1]
        assert (await holders(pool, paper))[0] != (await holders(pool, PROMPT))[0]
        monkeypatch.setattr(shared_copies, "SHARED_COPIES_MAX", 2)
        for number in range(12):
            await write(pool, keys(f"question {number}/", 2), paper[-1])
            await eventually(lambda: pool._extensions.get("shared copies")._task is None)
        assert all(len(one) == 2 for one in await holders(pool, [*PROMPT, *paper]))


async def test_a_copy_that_is_lost_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copies, "_DONE_S", 0.0)
    async with dev.serve("8MiB", servers=4) as running, running.pool() as pool:
        await write(pool, PROMPT)
        for number in range(12):
            await chat(pool, number)
        lost = (await holders(pool, PROMPT))[0].pop()
        await next(one for one in running.servers if one.server == lost).close()
        for number in range(12, 36):
            await chat(pool, number)
        assert all(len(one) == 2 for one in await holders(pool, PROMPT))


async def test_a_conversation_that_goes_on_is_not_copied() -> None:
    async with dev.serve("8MiB", servers=3) as running, running.pool() as pool:
        await write(pool, PROMPT)
        parent = PROMPT[-1]
        for turn in range(12):
            blocks = keys(f"turn {turn}/", 2)
            await write(pool, blocks, parent)
            parent = blocks[-1]
        for back in range(2):  # it goes on from earlier points, as agents do that rewrite history
            await write(pool, keys(f"again {back}/", 2), keys("turn 3/", 2)[-1])
        await eventually(lambda: pool._extensions.get("shared copies")._task is None)
        assert sum(server.store.index.stored for server in running.servers) == 5 + 2 * 14
        assert sorted(server.store.index.stored for server in running.servers) == [0, 0, 33]
        assert pool.counters["shared_copies"] == 0


async def test_without_further_copies_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copies, "SHARED_COPIES_MAX", 1)
    async with dev.serve("8MiB", servers=3) as running, running.pool() as pool:
        await write(pool, PROMPT)
        for number in range(12):
            await chat(pool, number)
        assert all(len(one) == 1 for one in await holders(pool, PROMPT))


async def test_a_pool_that_is_closed_leaves_no_copy_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    began = asyncio.Event()

    async def never(*_: object) -> list[bytes]:
        began.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(shared_copies.SharedCopies, "_ancestors", never)
    async with dev.serve("8MiB", servers=3) as running:
        async with running.pool() as pool:
            await write(pool, PROMPT)
            for number in range(12):
                await write(pool, keys(f"chat {number}/", 2), PROMPT[-1])
            await asyncio.wait_for(began.wait(), 5)
            task = pool._extensions.get("shared copies")._task
            assert task is not None
        assert task.cancelled()


def test_when_a_copy_is_needed() -> None:
    assert needs_copy("b", ["a"], 2)
    assert not needs_copy("a", ["a"], 2)
    assert not needs_copy("c", ["a", "b"], 2)
    assert not needs_copy("c", [], 2)  # nobody has it any more
