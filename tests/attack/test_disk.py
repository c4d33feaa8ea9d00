"""Who may write to a server's file: no read has wrong bytes, and each miss has its reason."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvpool import ReadStatus, WriteStatus
from tests.attack.castle import ATTACK_S, LINES_MAX, MODEL, Castle, castle, right
from tests.conftest import keys, value, values

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE, PAGE = 32 << 10, 4096
Poison = Callable[[bytearray, list[bytes], random.Random], None]


def flip(file: bytearray, chain: list[bytes], rng: random.Random) -> None:
    """A bit here and there, also of headers."""
    for _ in range(400):
        file[rng.randrange(len(file))] ^= 1 << rng.randrange(8)


def exchange(file: bytearray, chain: list[bytes], rng: random.Random) -> None:
    """The bytes of two blocks, each whole: where they are not found, they are encrypted."""
    places = [file.find(value(one, SIZE)[: PAGE // 2]) for one in chain]
    for one, other in zip(places[::2], places[1::2], strict=True):
        if one >= 0 and other >= 0:
            file[one : one + SIZE], file[other : other + SIZE] = (
                file[other : other + SIZE],
                file[one : one + SIZE],
            )


def shuffle(file: bytearray, chain: list[bytes], rng: random.Random) -> None:
    """Pages, with their headers or without."""
    for _ in range(300):
        one, other = (rng.randrange(len(file) // PAGE) * PAGE for _ in range(2))
        file[one : one + PAGE], file[other : other + PAGE] = (
            file[other : other + PAGE],
            file[one : one + PAGE],
        )


def truncate(file: bytearray, chain: list[bytes], rng: random.Random) -> None:
    del file[len(file) // 3 :]


def empty(file: bytearray, chain: list[bytes], rng: random.Random) -> None:
    file.clear()


def zeros(file: bytearray, chain: list[bytes], rng: random.Random) -> None:
    """But for the first page."""
    file[PAGE:] = bytes(len(file) - PAGE)


POISONS: list[Poison] = [flip, exchange, shuffle, truncate, empty, zeros]
QUICK: list[Poison] = [exchange, flip]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["no", "yes"] if ATTACK_S > 1 else ["no"]
)
async def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Castle]:
    """Its server has memory for a part of what it has in its file."""
    folder = tmp_path_factory.mktemp("castle")
    tiers = ("--tier", "dram:1MiB", "--tier", f"nvme:{folder}/file:16MiB?encrypt={request.param}")
    async with castle(folder, *tiers) as made:
        made.plain = request.param == "no"
        yield made


async def restarted(of: Castle, poison: Callable[[Path], None]) -> None:
    """The server, after somebody was at its file."""
    await of.server.stop()
    poison(of.folder / "file")
    await of.server.start()
    while True:
        async with await of.client() as pool:
            if any(one.alive and not one.left for one in await pool.members()):
                return


@pytest.mark.parametrize("poison", POISONS if ATTACK_S > 1 else QUICK)
async def test_a_poisoned_file_is_misses_with_a_reason(attacked: Castle, poison: Poison) -> None:
    chain = keys(poison.__name__, 64)
    async with await attacked.client("acme") as pool:
        written = await pool.write(MODEL, chain, values(chain, SIZE))
        assert set(written) == {WriteStatus.STORED}

    def change(path: Path) -> None:
        file = bytearray(path.read_bytes())
        poison(file, chain, random.Random(poison.__name__))
        path.write_bytes(file)

    lines = len(attacked.lines(attacked.server))
    await restarted(attacked, change)
    found = Counter[ReadStatus]()
    async with await attacked.client("acme") as pool:
        for _ in range(2):  # what was found to be damaged is no hit the second time either
            for at in range(0, len(chain), 8):
                results = await right(pool, chain[at : at + 8], SIZE)
                found.update(one.status for one in results)
        again = await pool.write(MODEL, chain, values(chain, SIZE))
        assert set(again) <= {WriteStatus.STORED, WriteStatus.ALREADY_STORED}
        assert all(one.status.hit for one in await right(pool, chain[:8], SIZE))
    assert set(found) <= {ReadStatus.HIT, ReadStatus.CORRUPT, ReadStatus.SERVER_LOST}, found
    if poison in (truncate, empty, zeros):
        assert ReadStatus.HIT not in found
    if poison is flip or (poison is exchange and attacked.plain):
        assert found[ReadStatus.CORRUPT]
    # One for each block that was damaged, and is dropped then.
    about = [line for line in attacked.lines(attacked.server)[lines:] if "corrupt" not in line]
    assert len(about) <= LINES_MAX
