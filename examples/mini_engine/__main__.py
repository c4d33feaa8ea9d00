"""Engines in processes of their own, one core each, behind one pool: who computes what.

Each finds tokens in its own cache or in the pool and computes the rest. All must say what C says,
the engine without a pool; also when the pool has been killed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

THIS = "examples.mini_engine"


class Remote:
    """A Python module in a process of its own, spoken to in lines."""

    def __init__(self, stack: ExitStack, *command: str) -> None:
        line, pipe = [sys.executable, "-m", *command], subprocess.PIPE
        self.process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True)
        stack.enter_context(self.process)
        stack.callback(self.process.kill)

    def line(self) -> str:
        return self.process.stdout.readline() if self.process.stdout else ""

    def ask(self, prompts: list[list[int]]) -> tuple[list[list[int]], float, int, int]:
        """What it says, the slowest first token in seconds, tokens from its cache and the pool."""
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        outputs, first_token_s, cached, loaded = json.loads(self.line())
        return outputs, first_token_s, cached, loaded


def serve(pool: str | None) -> None:
    """An engine's process: it answers lines of prompts until there are no more."""
    import torch  # here, because the process that only asks would wait for it as well

    from examples.mini_engine.engine import Engine
    from examples.mini_engine.model import Model, Shape

    torch.set_num_threads(1)
    logging.getLogger("kvpool").setLevel(logging.ERROR)  # the connector says it in one line
    engine = Engine(Model(Shape(), seed=0), blocks=1024, pool=pool)
    print("up", flush=True)
    for line in sys.stdin:
        requests = [engine.add(prompt, new_tokens=16) for prompt in json.loads(line)]
        engine.run()
        outputs = [request.output for request in requests]
        slowest_s = max(request.first_token_s for request in requests)
        found = sum(r.from_cache for r in requests), sum(r.from_pool for r in requests)
        print(json.dumps((outputs, slowest_s, *found)), flush=True)
    engine.close()


def play(stack: ExitStack, length: int) -> bool:
    """Ask everybody about a document of this many tokens; whether all said the same."""
    pool = Remote(stack, "kvpool", "dev", "--bind", "127.0.0.1:0", "--capacity", "256MiB")
    join = (THIS, "--serve", pool.line().rpartition(" ")[2].strip())
    a, b, c = Remote(stack, *join), Remote(stack, *join), Remote(stack, THIS, "--serve")
    assert [engine.line().strip() for engine in (a, b, c)] == ["up"] * 3
    chance = random.Random(7)
    texts = [chance.choices(range(4096), k=n) for n in (length, length, 32, 32, 32, 32)]
    questions, other = [texts[0] + end for end in texts[2:]], [texts[1] + texts[2]]
    scene = (
        ("C, no pool", "all four", c, questions),
        ("C, no pool", "another", c, other),
        ("A", "question 1", a, questions[:1]),
        ("A", "2, 3 and 4", a, questions[1:]),
        ("B", "question 1", b, questions[:1]),
        ("A", "another", a, other),
        ("B, pool gone", "another", b, other),
    )
    table = Table("engine", "is asked", title=f"Questions on a document of {length:,} tokens")
    for name in ("cached", "pool", "computed", "TTFT"):
        table.add_column(name, justify="right")
    table.add_column("says")
    truth: dict[str, list[int]] = {}
    right, times_s = True, []
    for name, asked, engine, prompts in scene:
        if name == "B, pool gone":
            pool.process.kill()
        outputs, ttft_s, *found = engine.ask(prompts)
        times_s.append(ttft_s)
        said = [truth.setdefault(str(p), says) for p, says in zip(prompts, outputs, strict=True)]
        counts = [f"{n:,}" for n in (*found, sum(map(len, prompts)) - sum(found))]
        table.add_row(
            name, asked, *counts, f"{ttft_s:.3f} s", "the same" if said == outputs else "NO"
        )
        right = right and said == outputs
    Console().print(table)
    print(f"B's first token came {times_s[2] / times_s[4]:.1f} times sooner than A's.", flush=True)
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m {THIS}", description=__doc__)
    parser.add_argument("--document", type=int, default=2048, help="its length in tokens")
    parser.add_argument("--serve", nargs="?", const="", metavar="POOL", help="be an engine")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve or None)
    else:
        with ExitStack() as processes:
            sys.exit(not play(processes, arguments.document))
