"""The whole pool in one process: write a chain of blocks, match it, read it back."""

from __future__ import annotations

import asyncio
import hashlib

from kvpool import Namespace, dev


async def main() -> None:
    # The name must differ whenever the bytes of two blocks are not interchangeable.
    model = Namespace("llama-3-8b/bf16/block16/tp1")
    chain = [hashlib.sha256(f"prefix {n}".encode()).digest() for n in range(8)]
    blocks = [bytes([n]) * 131_072 for n in range(8)]

    async with dev.pool("64MiB") as pool:
        await pool.write(model, chain, blocks)
        match = await pool.match(model, [*chain, b"a block nobody has computed yet."])
        print(f"{match.length} of 9 blocks are in the pool; it stopped at: {match.stopped.label}")

        buffers = [bytearray(131_072) for _ in range(match.length)]
        results = await pool.read(model, chain, buffers, match=match)
        print("hits:", sum(result.status.hit for result in results), "equal:", buffers == blocks)


asyncio.run(main())
