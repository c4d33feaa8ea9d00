"""One engine instance of a replay: `python -m kvpool.tools.replay_engine`, driven by JSON lines.

The first line of stdin is the set-up, every further one a request; each is answered by a line.
What an engine would do: match the prompt, read what the pool has, check it, and write the rest.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from kvpool.client.opening import connect
from kvpool.client.pool import Pool
from kvpool.config import ClientConfig
from kvpool.ops import process
from kvpool.tools.workloads import Payload
from kvpool.types import Match, Namespace

#: Longer chains are read and written in pieces of this many bytes.
_PIECE = 64 << 20


class Engine:
    """Plays requests against a pool and checks every byte that comes back."""

    def __init__(self, pool: Pool, namespace: Namespace, payload: Payload) -> None:
        self._pool = pool
        self._namespace = namespace
        self._payload = payload
        self._memory = np.empty((max(1, _PIECE // payload.size), payload.size), np.uint8)
        self._memory[:] = 0

    async def play(self, chain: list[int]) -> dict[str, Any]:
        """One prompt. `hit` counts the leading blocks that came back right."""
        digests = [self._payload.digest(id) for id in chain]
        answer: dict[str, Any] = {
            "total": len(chain),
            "hit": 0,
            "wrong": 0,
            "read_s": 0.0,
            "write_s": 0.0,
            "statuses": {},
            "match_s": 0.0,
        }
        if not chain:  # shorter than a block
            return answer
        started = time.perf_counter()
        match = await self._pool.match(self._namespace, digests)
        answer["match_s"] = time.perf_counter() - started
        step = len(self._memory)
        for first in range(0, match.length, step):
            piece = digests[first : min(first + step, match.length)]
            if not await self._read(piece, match if not first else None, answer):
                break
        if match.length < len(chain):
            _count(answer, "miss", match.stopped.label)
        for first in range(answer["hit"], len(chain), step):
            parent = digests[first - 1] if first else b""
            if not await self._write(digests[first : first + step], parent, answer):
                break
        return answer

    async def _read(
        self, digests: list[bytes], match: Match | None, answer: dict[str, Any]
    ) -> bool:
        """Read and check; False at the first block that did not come."""
        blocks = [self._memory[i] for i in range(len(digests))]
        for digest, block in zip(digests, blocks, strict=True):
            self._payload.spoil(digest, block)  # a prefix lies where it lay before: hits for free
        started = time.perf_counter()
        results = await self._pool.read(
            self._namespace, digests, [b.data for b in blocks], match=match
        )
        answer["read_s"] += time.perf_counter() - started
        for digest, block, result in zip(digests, blocks, results, strict=True):
            if not result.status.hit:
                _count(answer, "read", result.status.label)
                return False
            answer["wrong"] += self._payload.wrong(digest, block)
            answer["hit"] += 1
        return True

    async def _write(self, digests: list[bytes], parent: bytes, answer: dict[str, Any]) -> bool:
        blocks = [self._memory[i] for i in range(len(digests))]
        for digest, block in zip(digests, blocks, strict=True):
            self._payload.write(digest, block)
        started = time.perf_counter()
        statuses = await self._pool.write(
            self._namespace, digests, [b.data for b in blocks], parent=parent
        )
        answer["write_s"] += time.perf_counter() - started
        for status in statuses:
            _count(answer, "write", status.label)
        return all(status.present for status in statuses)


def _count(answer: dict[str, Any], what: str, label: str) -> None:
    name = f"{what}: {label}"
    answer["statuses"][name] = answer["statuses"].get(name, 0) + 1


async def main() -> None:
    """Serve requests until stdin ends."""
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = json.loads(await reader.readline())
    config = ClientConfig(masters=[setup["master"]], transports=setup["transports"], timeout_s=30.0)
    async with connect(config=config) as pool:
        engine = Engine(pool, Namespace("replay"), Payload(setup["block_size"], setup["seed"]))
        print(json.dumps({"ready": True}), flush=True)
        while line := await reader.readline():
            print(json.dumps(await engine.play(json.loads(line))), flush=True)


if __name__ == "__main__":
    process.die_with_parent()
    process.run(main())
