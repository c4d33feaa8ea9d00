"""Who may write where a cold tier lies: no read has wrong bytes, and a miss is nobody's loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvpool import WriteStatus
from tests.attack.castle import (
    ATTACK_S,
    LINES_MAX,
    MIB,
    MODEL,
    Castle,
    castle,
    private_bytes,
    right,
)
from tests.conftest import keys, values

pytest.importorskip("obstore")
pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 32 << 10
Poison = Callable[[list[Path], random.Random], None]


def flip(objects: list[Path], rng: random.Random) -> None:
    """A bit here and there, of blocks, indexes and what was removed."""
    for one in objects:
        data = bytearray(one.read_bytes())
        for _ in range(1 + len(data) // 2000):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        one.write_bytes(data)


def exchange(objects: list[Path], rng: random.Random) -> None:
    """Whole objects, each under the name of another."""
    written = [one.read_bytes() for one in objects]
    for one, data in zip(objects, written[1:] + written[:1], strict=True):
        one.write_bytes(data)


def truncate(objects: list[Path], rng: random.Random) -> None:
    for one in objects:
        one.write_bytes(one.read_bytes()[: rng.randrange(one.stat().st_size)])


def bomb(objects: list[Path], rng: random.Random) -> None:
    """An end that claims more than there is, and objects of others without number."""
    for one in objects:
        data = one.read_bytes()
        one.write_bytes(data[:-64] + b"\xff" * 64)
        for number in range(100):
            one.with_name(f"{one.name}-{number}").write_bytes(rng.randbytes(2000))


POISONS: list[Poison] = [flip, exchange, truncate, bomb]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Castle]:
    """Its server has memory for a part of what lies in its cold tier."""
    folder = tmp_path_factory.mktemp("castle")
    settings = "object_size=256KiB&wait_s=0.2&beat_s=0.5"
    tiers = ("--tier", "dram:1MiB", "--tier", f"file://{folder}/cold:64MiB?{settings}")
    (folder / "cold").mkdir()
    async with castle(folder, *tiers) as made:
        yield made


@pytest.mark.parametrize("poison", POISONS if ATTACK_S > 1 else POISONS[:1])
async def test_a_poisoned_cold_store_is_misses(attacked: Castle, poison: Poison) -> None:
    chain = keys(poison.__name__, 64)
    async with await attacked.client("acme") as pool:
        for at in range(0, len(chain), 8):
            part = chain[at : at + 8]
            assert set(await pool.write(MODEL, part, values(part, SIZE))) == {WriteStatus.STORED}
            await asyncio.sleep(0.3)
    lines = len(attacked.lines(attacked.server))
    private = private_bytes(attacked.server)
    objects = [one for one in sorted((attacked.folder / "cold").rglob("*")) if one.is_file()]
    objects = [one for one in objects if one.stat().st_size > 4096]
    assert objects, "nothing came to the cold tier"
    poison(objects, random.Random(poison.__name__))
    misses = 0
    for restart in (False, True):
        if restart:
            await attacked.server.stop()
            lines = min(lines, len(attacked.lines(attacked.server)))
            await attacked.server.start()
            await asyncio.sleep(2.0)  # it searches
            private = max(private, private_bytes(attacked.server))
        async with await attacked.client("acme") as pool:
            for at in range(0, len(chain), 8):
                results = await right(pool, chain[at : at + 8], SIZE)
                misses += sum(not one.status.hit for one in results)
            fresh = keys(f"after {poison.__name__}", 4)
            assert set(await pool.write(MODEL, fresh, values(fresh, SIZE))) <= {
                WriteStatus.STORED,
                WriteStatus.ALREADY_STORED,
            }
    assert misses
    attacked.server.check()
    assert private_bytes(attacked.server) - private < 32 * MIB
    # One for each block that was damaged, and a search names eight objects that it leaves out.
    said = attacked.lines(attacked.server)[lines:]
    assert sum("left out" in one for one in said) <= 3 * 9, said[:20]
    about = [one for one in said if "corrupt" not in one and "left out" not in one]
    assert len(about) <= LINES_MAX, about[:20]
