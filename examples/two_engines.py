"""Two engine instances with one pool: the second reads what the first has computed.

Start a pool with `kvpool dev` and pass its address, or let the example start one.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from contextlib import AsyncExitStack

import kvpool
from kvpool import Namespace, Pool, dev

MODEL = Namespace("example/model")
BLOCK = 64 << 10
TOKENS = 16  # in a block


def keys(prompt: list[int]) -> list[bytes]:
    """One key per full block of tokens; each includes the hash of the one before, as in engines."""
    chain, parent = [], b""
    for first in range(0, len(prompt) - TOKENS + 1, TOKENS):
        tokens = str(prompt[first : first + TOKENS]).encode()
        parent = hashlib.sha256(parent + tokens).digest()
        chain.append(parent)
    return chain


class Engine:
    """Computes what the pool does not have, and stores it there."""

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self.pool = pool

    async def serve(self, prompt: list[int]) -> None:
        chain = keys(prompt)
        match = await self.pool.match(MODEL, chain)
        found = match.length
        loaded = [bytearray(BLOCK) for _ in range(found)]
        if found:
            results = await self.pool.read(MODEL, chain[:found], loaded, match=match)
            # A block may have gone since the match: then the prefix is only so long.
            found = next((i for i, r in enumerate(results) if not r.status.hit), found)
        computed = [key * (BLOCK // len(key)) for key in chain[found:]]  # stands for the prefill
        if computed:
            parent = chain[found - 1] if found else kvpool.ROOT
            await self.pool.write(MODEL, chain[found:], computed, parent=parent)
        right = all(data == key * (BLOCK // 32) for key, data in zip(chain, loaded, strict=False))
        print(f"{self.name}: {found} of {len(chain)} blocks from the pool, right: {right}")


async def main(address: str | None) -> None:
    async with AsyncExitStack() as stack:
        if address is None:
            address = (await stack.enter_async_context(dev.serve("64MiB"))).address
        engines = [
            Engine(name, await stack.enter_async_context(await kvpool.connect(address)))
            for name in ("engine A", "engine B")
        ]
        prompt = list(range(160))
        for turn in range(4):
            await engines[turn % 2].serve(prompt)
            prompt = prompt + list(range(1000 * turn, 1000 * turn + 64))


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
