"""How long a server starts from a file with many blocks, and how long its loop stands still.

    python -m benchmarks.recovery /disk [--blocks 300000]

It writes the headers of so many blocks of 4 KiB into a sparse file, in chains of 64, and starts a
server on it, as `kvpool server` does. A turn is measured in CPU time of the loop's thread, so that
other programs change little.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Final

from kvpool import Namespace, dev
from kvpool.ops import process
from kvpool.protocols.persistent_tier import Record
from kvpool_tiers.nvme.format import ALIGNMENT_MIN
from kvpool_tiers.nvme.tier import Nvme

_NAMESPACE: Final = Namespace("bench")
_CHAIN: Final = 64
_AT_ONCE: Final = 4096
_SHOWN: Final = 8


async def write(path: Path, blocks: int) -> None:
    """The file of a server that has held so many blocks. Their payload is a hole."""
    tier = Nvme(blocks * ALIGNMENT_MIN, path)
    records, parent = [], b""
    for number in range(blocks):
        digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
        above = parent if number % _CHAIN else b""
        place = number * ALIGNMENT_MIN
        records.append(
            Record(_NAMESPACE, 0, digest, above, place, ALIGNMENT_MIN, number, number + 1)
        )
        parent = digest
        if len(records) == _AT_ONCE or number == blocks - 1:
            await tier.persist(records)
            records = []
    tier.close()


async def start(path: Path, blocks: int) -> None:
    turns: list[float] = []

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            turns.append(time.thread_time() - before)

    process.freeze_gc()
    watching = asyncio.create_task(watch())
    began, cpu = time.perf_counter(), time.process_time()
    tiers = ["dram:64MiB", f"nvme:{path}:{blocks * ALIGNMENT_MIN}"]
    async with dev.serve(listen=("inproc://",), tiers=tiers) as running:
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        watching.cancel()
        found = running.servers[0].stack.backing.index.stored
        longest = ", ".join(f"{1e3 * turn:.1f}" for turn in sorted(turns)[: -_SHOWN - 1 : -1])
        print(f"{found} of {blocks} blocks in {took:.1f} s, {cpu:.1f} s of CPU")
        print(f"the longest of {len(turns)} turns, in ms: {longest}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("directory", type=Path, help="where the file goes")
    arguments.add_argument("--blocks", type=int, default=300_000)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        path = Path(folder) / "pool.kv"
        asyncio.run(write(path, options.blocks))
        process.run(start(path, options.blocks))


if __name__ == "__main__":
    main()
