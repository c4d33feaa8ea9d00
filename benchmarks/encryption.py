"""What encryption at rest costs: the NVMe tier with encrypt=yes and without, in turns, as ratios.

    python -m benchmarks.encryption [directory]

Blocks of one size are written and read, 8 at a time, from and to the memory of a DRAM tier, as a
server does it. The files are removed at the end.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from kvpool.checksum import checksum
from kvpool.ops import process
from kvpool_tiers.dram import Dram
from kvpool_tiers.nvme.tier import Nvme

_CAPACITY: Final = 512 << 20
_ROUND: Final = 128 << 20
_AT_ONCE: Final = 8
_ROUNDS: Final = 9


async def _round(tier: Nvme, memory: Dram, size: int, *, write: bool) -> float:
    """GB/s."""
    places = iter(range(0, _ROUND, size))

    async def work() -> None:
        for place in places:
            view = memory.view(place, size)
            await (tier.write_from(place, view) if write else tier.read_into(place, view))

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return _ROUND / (time.perf_counter() - start) / 1e9


async def _measure(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        plain = Nvme(_CAPACITY, path=Path(made, "plain"))
        sealed = Nvme(_CAPACITY, path=Path(made, "sealed"), encrypt=True)
        sealed.use_key(bytes(32))
        memory = Dram(_ROUND, prefault=False)
        memory.view(0, _ROUND)[:] = bytes(range(256)) * (_ROUND // 256)
        right = checksum(memory.view(0, _ROUND), 0)
        print(f"{plain.mode}, {_AT_ONCE} at once; GB/s, medians of {_ROUNDS} rounds in turns")
        try:
            for size in (64 << 10, 1 << 20, 4 << 20):
                for write in (True, False):
                    speeds: dict[Nvme, list[float]] = {plain: [], sealed: []}
                    for number in range(2 * (_ROUNDS + 1)):
                        tier = (plain, sealed)[number % 2]
                        speeds[tier].append(await _round(tier, memory, size, write=write))
                        assert checksum(memory.view(0, _ROUND), 0) == right
                    a, b = (statistics.median(speeds[tier][1:]) for tier in (plain, sealed))
                    what = f"{'write' if write else 'read':5} {size >> 10:5} KiB"
                    print(f"{what}: plain {a:5.2f}, encrypted {b:5.2f}: {b / a:.2f}")
        finally:
            for tier in (plain, sealed):
                tier.close()
            memory.close()


if __name__ == "__main__":
    process.run(_measure(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())))
