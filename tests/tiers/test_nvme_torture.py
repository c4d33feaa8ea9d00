"""A few histories of `tests/tiers/nvme_torture.py`, and proof that they can fail."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvpool_tiers.nvme import recovery
from kvpool_tiers.nvme.format import ValidHeader
from kvpool_tiers.nvme.tier import Nvme
from tests.simulation.disk import SimDisk
from tests.simulation.loop import Process, SimLoop
from tests.simulation.platter import PAGE, Platter
from tests.tiers.nvme_torture import play


def test_histories_end_well_and_meet_all_that_a_disk_may_do() -> None:
    counts: Counter[str] = Counter()
    for seed in range(15, 27):
        report = play(seed)
        assert report.failure is None, f"seed {seed}"
        counts += report.counts
    silent = {"lost", "misdirected", "power cut", "rot", "torn"}
    assert counts.keys() >= silent | {"hung", "ENOSPC", "EIO", "failed reads"}


@pytest.mark.parametrize("seed", range(8))
def test_an_encrypted_history_ends_well(seed: int) -> None:
    pytest.importorskip("cryptography", reason="needs cryptography")
    assert play(seed, encrypt=True).failure is None


def test_a_seed_is_one_history() -> None:
    assert play(3) == play(3)
    assert play(3).counts != play(4).counts


def written_while_its_buffer_changed(seed: int) -> set[int]:
    loop = SimLoop(random.Random(seed), 0.001)  # type: ignore[abstract]
    platter = Platter(loop, 8 * PAGE, random.Random(seed))

    async def write() -> None:
        buffer = bytearray(b"\1" * platter.size)
        call = asyncio.ensure_future(SimDisk(platter).write(0, memoryview(buffer)))
        await asyncio.sleep(platter.latency_s / 2)
        buffer[:] = bytes(len(buffer))
        await call

    async def main() -> None:
        await Process(loop, "server", "host", random.Random(seed)).spawn(write())

    loop.run(main())
    return set(platter.memory)


def test_who_reuses_a_buffer_too_early_has_written_something_else() -> None:
    found = [written_while_its_buffer_changed(seed) for seed in range(30)]
    assert all(one in found for one in ({0}, {1}, {0, 1})), "some of it before, some after"


async def forgets_some(self: Nvme, offsets: Sequence[int]) -> None:
    await erase(self, list(offsets)[1:])


async def lets_go_of_writes(self: Nvme, offset: int, buffer: memoryview) -> None:
    await asyncio.shield(asyncio.ensure_future(write_from(self, offset, buffer)))


async def remembers_later(self: Nvme, records: Any) -> None:
    asyncio.ensure_future(persist(self, records))


def recalls_older(header: Any, *arguments: Any) -> Any:
    found = unpack_header(header, *arguments)
    if isinstance(found, ValidHeader):
        older = found.record._replace(generation=found.record.generation - 1)
        return found._replace(record=older)
    return found


erase, write_from, persist = Nvme.erase, Nvme.write_from, Nvme.persist
unpack_header = recovery.unpack_header


@pytest.mark.parametrize(
    ("where", "name", "wrong", "failure"),
    [
        (Nvme, "erase", forgets_some, "which was forgotten"),
        (Nvme, "write_from", lets_go_of_writes, "wrong bytes"),
        (Nvme, "persist", remembers_later, "which was remembered"),
        (recovery, "unpack_header", recalls_older, "never remembered so"),
    ],
)
def test_a_broken_tier_is_noticed(
    where: Any, name: str, wrong: Callable[..., Any], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failures() -> Iterator[str]:
        for seed in (28, 31, *range(20, 40)):  # one of the first two, as long as nothing changes
            yield play(seed).failure or ""

    monkeypatch.setattr(where, name, wrong)
    assert any(failure in one for one in failures())
