"""Three engines, each in its own process with one core: A and B share a pool, C has none.

Each finds tokens in its own cache or in the pool and computes the rest. All must output the same
tokens as C, also after the pool was killed.
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from rich.console import Console
from rich.table import Table

from examples.mini_engine.engine import Engine
from examples.mini_engine.model import Model, Shape


def serve(asked: Connection, pool: str | None) -> None:
    """An engine's process: it answers lists of prompts."""
    torch.set_num_threads(1)
    logging.getLogger("kvpool").setLevel(logging.ERROR)  # the connector logs failures itself
    engine = Engine(Model(Shape(), seed=0), blocks=1024, pool=pool)
    while True:
        requests = [engine.add(prompt, new_tokens=16) for prompt in asked.recv()]
        engine.run()
        found = sum(r.from_cache for r in requests), sum(r.from_pool for r in requests)
        slowest_s = max(request.first_token_s for request in requests)
        asked.send(([request.output for request in requests], slowest_s, *found))


def play(pool: subprocess.Popen[str], length: int) -> bool:
    """Ask all engines about a document of `length` tokens; True when all outputs are the same."""
    address = pool.stdout.readline().rpartition(" ")[2].strip() if pool.stdout else ""
    engines, forks = [], get_context("fork")  # this process has no threads yet
    for joins in (address, address, None):
        here, there = forks.Pipe()
        forks.Process(target=serve, args=(there, joins), daemon=True).start()
        there.close()
        engines.append(here)
    a, b, c = engines
    rng = random.Random(7)
    texts = [rng.choices(range(4096), k=n) for n in (length, length, 32, 32, 32, 32)]
    questions, other = [texts[0] + end for end in texts[2:]], [texts[1] + texts[2]]
    table = Table("engine", "is asked", "cached", "pool", "computed", "TTFT", "output")
    truth: dict[str, list[int]] = {}
    first_s: dict[str, float] = {}
    right: list[bool] = []
    for name, asked, engine, prompts in (
        ("C, no pool", "all four", c, questions),
        ("C, no pool", "another", c, other),
        ("A", "question 1", a, questions[:1]),
        ("A", "2, 3 and 4", a, questions[1:]),
        ("B", "question 1", b, questions[:1]),
        ("A", "another", a, other),
        ("B, pool gone", "another", b, other),
    ):
        if name == "B, pool gone":
            pool.kill()
        engine.send(prompts)
        outputs, ttft_s, *found = engine.recv()
        first_s.setdefault(name, ttft_s)
        expected = [truth.setdefault(str(p), o) for p, o in zip(prompts, outputs, strict=True)]
        right.append(outputs == expected)
        counts = map(str, (*found, sum(map(len, prompts)) - sum(found)))
        table.add_row(name, asked, *counts, f"{ttft_s:.3f} s", "the same" if right[-1] else "NO")
    Console().print(table)
    print(f"B's first token came {first_s['A'] / first_s['B']:.1f} times sooner than A's.")
    return all(right)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=int, default=2048, help="its length in tokens")
    line = [sys.executable, "-m", "kvpool", "dev", "--bind", "127.0.0.1:0", "--capacity", "256MiB"]
    length = parser.parse_args().document
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as pool:
        try:
            sys.exit(not play(pool, length))
        finally:
            pool.kill()
