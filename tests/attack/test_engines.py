"""An engine with the cluster's secret that keeps what it reads: others go on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.attack.castle import ATTACK_S, LINES_MAX, MIB, MODEL, Castle, castle, suffered
from tests.conftest import value

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 256 << 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Castle]:
    """What others need is guaranteed to them."""
    async with castle(tmp_path_factory.mktemp("castle"), tenant={"guaranteed": "25%"}) as made:
        yield made


async def test_views_that_are_never_let_go(attacked: Castle) -> None:
    """They may hold a quarter of the memory: of what is read beyond that, nothing."""
    held: list[int] = []

    async def hold() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(24):
                client = await attacked.client(transports=["shm"])
                pool = await stack.enter_async_context(client)
                chain = [secrets.token_bytes(32) for _ in range(8)]
                await pool.write(MODEL, chain, [value(one, BLOCK) for one in chain])
                views = await stack.enter_async_context(pool.read_view(MODEL, chain))
                held.append(sum(one.status.hit for one in views))
            await asyncio.sleep(ATTACK_S)

    costs = await suffered(attacked, hold())
    assert 0 < sum(held) * BLOCK <= 16 * MIB, held
    costs.check(private=8 * MIB, files=128, lines=LINES_MAX)
