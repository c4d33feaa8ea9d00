"""An engine's blocks, gathered from its layers into the pool and scattered back, against memcpy.

    python -m benchmarks.pieces [--rounds 9]

The KV cache of a prompt of 512 tokens as vLLM keeps it on a CPU: the layers apart, each block one
run in each layer; and the same in parts by KV heads, for engines of different tensor parallel
sizes. The limit is one thread's `numpy.copyto` of whole blocks' pieces into one buffer.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

import kvpool
from kvpool import ClientConfig, Namespace
from kvpool.tools.bench import Row, serving, table
from kvpool_connector.memory.block_memory import memory_of

_TARGET = 0.6


class Shape(NamedTuple):
    """A model's KV cache: bf16, `heads` with K and V of `head` each."""

    name: str
    layers: int
    heads: int
    head: int
    block: int
    parts: int = 1


SHAPES = (
    Shape("8B, block 16", 32, 8, 128, 16),
    Shape("8B, block 16, 2 parts", 32, 8, 128, 16, 2),
    Shape("8B, block 16, 4 parts", 32, 8, 128, 16, 4),
    Shape("8B, block 16, 8 parts", 32, 8, 128, 16, 8),
    Shape("8B, block 128", 32, 8, 128, 128),
    Shape("8B, block 128, 8 parts", 32, 8, 128, 128, 8),
    Shape("tiny, block 32", 4, 2, 32, 32),
)


async def measure(shape: Shape, master: str, rounds: int) -> list[Row]:
    """Gather and scatter beside the limit, taking turns."""
    count = 512 // shape.block
    sizes = (2 * count, shape.heads, shape.block, 2 * shape.head)
    caches = {
        f"layers.{layer}": torch.randint(-100, 100, sizes, dtype=torch.int16)
        for layer in range(shape.layers)
    }
    memory = memory_of(caches, shape.parts)
    whole = memory_of(caches)
    ids, others = list(range(0, 2 * count, 2)), list(range(1, 2 * count, 2))
    size = memory.block_bytes * count
    flat = np.ones(size, np.uint8)
    namespace = Namespace(f"bench/{shape.name}", shape.parts)
    times: dict[str, list[float]] = {"memcpy": [], "gather": [], "scatter": []}
    config = ClientConfig(masters=[master], transports=["shm"])
    async with await kvpool.connect(config=config) as pool:
        for number in range(rounds + 1):
            source: Any
            async with whole.source(ids, None) as source:
                began = time.perf_counter()
                at = 0
                for block in source:
                    for piece in block:
                        np.copyto(flat[at : at + len(piece)], np.frombuffer(piece, np.uint8))
                        at += len(piece)
            copied = time.perf_counter()
            chain = [secrets.token_bytes(32) for _ in ids]
            for part in range(shape.parts):
                async with memory.source(ids, None, part) as source:
                    statuses = await pool.write(namespace, chain, source, part=part)
                assert all(status.present for status in statuses)
            gathered = time.perf_counter()
            for part in range(shape.parts):
                async with memory.target(others, None, part) as target:
                    results = await pool.read(namespace, chain, target, part=part)
                assert all(result.status.hit for result in results)
            scattered = time.perf_counter()
            for layer in caches.values():
                assert torch.equal(layer[0::2], layer[1::2])
                layer[1::2] = 0
            await pool.remove(namespace, chain)
            if number:  # the first round warms pages and connections
                times["memcpy"].append(copied - began)
                times["gather"].append(gathered - copied)
                times["scatter"].append(scattered - gathered)
    rates = {name: size / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    rows = []
    judged = size > 1 << 20 and shape.parts == 1
    for name in ("gather", "scatter"):
        ratio = rates[name] / rates["memcpy"]
        rows.append(
            Row(
                f"{name}, {shape.name} ({size / 2**20:.1f} MiB)",
                f"{rates[name]:.2f} GB/s",
                f"memcpy {rates['memcpy']:.2f} GB/s",
                ratio,
                f">= {_TARGET}" if judged else "",
                ratio >= _TARGET if judged else None,
            )
        )
    return rows


async def run(rounds: int) -> list[Row]:
    async with serving(512 << 20) as address:
        return [row for shape in SHAPES for row in await measure(shape, address, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    Console(width=140).print(table(asyncio.run(run(parser.parse_args().rounds))))


if __name__ == "__main__":
    main()
