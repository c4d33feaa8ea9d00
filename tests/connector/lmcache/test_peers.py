"""LMCache's server and connector as the benchmark beside the peers uses them."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lmcache", reason="needs LMCache 0.5.6: make test WITH=lmcache")
pytest.importorskip("transformers", reason="LMCache's connectors import it: make test WITH=lmcache")

from benchmarks.peers import pool_lmcache
from benchmarks.peers.contract import Memory, Shape
from benchmarks.peers.pool_lmcache import LmcacheClient, LmcacheSystem
from benchmarks.peers.processes import Rig

SIZE = 64 << 10


@pytest.fixture
async def lmcache(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a real server, and its memory."""
    monkeypatch.setattr(pool_lmcache, "_PYTHON", Path(sys.executable))
    async with AsyncExitStack() as stack:
        system = LmcacheSystem(Rig(sorted(os.sched_getaffinity(0))[:2], stack), Shape(1 << 30))
        await system.start()
        client = LmcacheClient(system.client())
        fd = Memory.create(8 * SIZE)
        yield client, await client.open(Memory(fd))
        await client.close()
        os.close(fd)


async def test_each_block_comes_back_in_its_place(lmcache: Any) -> None:
    client, memory = lmcache
    source, target = memory.blocks(SIZE, 8)
    memory.source[:] = np.random.default_rng(1).integers(0, 256, len(memory.source), np.uint8)
    keys = [client.key(number) for number in range(8)]
    assert all(await client.write(keys, source))
    assert await client.read(keys, target) == [True] * 8
    assert (memory.target == memory.source).all()
    assert await client.read(keys[5:6], target.part(0, 1)) == [True]
    assert (target.rows[0] == source.rows[5]).all()
    assert await client.match(keys) == 8


async def test_what_is_not_there_is_no_hit(lmcache: Any) -> None:
    """LMCache gives what lies before the first hole; what was removed is a hole, too."""
    client, memory = lmcache
    source, target = memory.blocks(SIZE, 8)
    memory.source.fill(3)
    memory.target.fill(0xAA)
    keys = [client.key(number) for number in range(8)]
    await client.write(keys[:2], source.part(0, 2))
    await client.write(keys[3:], source.part(3, 8))
    assert await client.match(keys) == 2
    assert await client.read(keys, target) == [True] * 2 + [False] * 6
    assert await client.read(keys[2:3], target.part(2, 3)) == [False]
    assert await client.load(keys, target) == 2
    assert (target.rows[:2] == 3).all()
    await client.remove(keys[:1])
    assert await client.read([client.key(0)], target.part(0, 1)) == [False]
