"""What the pool does to a real vLLM engine: hits, overhead, slow pools, swarms, many requests.

    .venv-vllm/bin/python -m benchmarks.engines [hits] [overhead] [saves] [never_slower] [steady]
        [swarm] [busy]

Two engines with one tiny model on a CPU, one with a pool and one without, take turns; each in a
process of its own. `never_slower` throttles the pool's link from fast to absurd. The pool is this
process, over tcp there, and over shared memory otherwise.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from examples import tiny_model
from tests.connector.vllm.helpers import Engine, closing, prompt, transfer
from tests.support.local_pool import LocalPool

PREFIX = 2048
#: Bytes per second; 0 is as fast as it goes.
RATES = (0.0, 100e6, 30e6, 10e6, 3e6, 1e6, 100e3)
ROUNDS = 4
PROMPTS = 6
PAIRS = 16
#: Prompts that the pool has when an engine starts on a busy machine, and how many come at a time.
BUSY_PROMPTS = 30
BUSY_TOKENS = 700
BUSY_CLIENTS = 4
SWARMS = (1, 8, 24)
#: Pairs of rounds with saves and without; the first of a process are slow.
SAVE_PAIRS = 500
WARM_UP = 10


SIZES: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 4096}


def model() -> Path:
    cached = Path(tempfile.gettempdir()) / "kvpool-bench-model"
    return tiny_model.make(cached, layers=8, hidden=256)


class Pair:
    """An engine with a pool, and one without."""

    def __init__(
        self, folder: Path, pool: LocalPool, transport: str, load: str, **options: Any
    ) -> None:
        config = _settings(pool, transport, load)
        sizes: dict[str, Any] = {**SIZES, **options}
        self.alone = Engine(model(), folder / "alone.log", **sizes)
        self.pooled = Engine(model(), folder / "pooled.log", kv_transfer_config=config, **sizes)

    def warm(self) -> None:
        """The first requests of a process are slow."""
        for engine in (self.alone, self.pooled):
            for number in range(3):
                engine.generate([prompt(900 + number, PREFIX, 0)])


def _settings(pool: LocalPool, transport: str, load: str) -> dict[str, Any]:
    """The defaults, but for the path and the decision."""
    return transfer(pool.master, transports=[transport], load=load)


def cpu_s(engine: Engine) -> Counter[str]:
    """CPU seconds of its process by kind of thread."""
    used: Counter[str] = Counter()
    for name, seconds in engine.ask("threads"):
        used[name.rstrip("0123456789_- ")] += seconds
    return used


def first_token_s(engine: Engine, tokens: list[int]) -> float:
    """Of a prompt of which the engine itself has nothing."""
    engine.forget()
    seconds: float = engine.generate([tokens], max_tokens=1)["seconds"]
    return seconds


def hits(console: Console, folder: Path) -> None:
    pool = LocalPool()
    pair = Pair(folder, pool, "shm", "auto")
    with closing(pair.alone, pair.pooled):
        pair.warm()
        prompts = [prompt(number, PREFIX, 0) for number in range(ROUNDS)]
        for tokens in prompts:
            pair.pooled.generate([tokens])
        pool.settled()
        first_token_s(pair.pooled, prompts[0])
        times = [(first_token_s(pair.alone, p), first_token_s(pair.pooled, p)) for p in prompts]
        metrics = pair.pooled.metrics()
    pool.close()
    alone, pooled = (statistics.median(column) for column in zip(*times, strict=True))
    console.print(
        f"hit of a prompt of {PREFIX} tokens: {pooled * 1e3:.0f} ms to the first token, computed "
        f"{alone * 1e3:.0f} ms: {alone / pooled:.1f} x"
    )
    for name, value in sorted(metrics.items()):
        if name.startswith(("vllm:kvpool_load", "vllm:kvpool_decisions", "vllm:kvpool_misses")):
            console.print(f"  {name.removeprefix('vllm:kvpool_')}: {value:.6g}")


def overhead(console: Console, folder: Path) -> None:
    """Nothing is ever used again: all that the pool does is in vain."""
    pool = LocalPool()
    pair = Pair(folder, pool, "shm", "auto")
    engines = (pair.alone, pair.pooled)
    times: dict[Engine, list[float]] = {engine: [] for engine in engines}
    with closing(*engines):
        pair.warm()
        before = [cpu_s(engine) for engine in engines]
        for turn in range(PAIRS):
            prompts = [prompt(1000 + 8 * turn + number, 500, 0) for number in range(8)]
            for engine in engines[:: 1 if turn % 2 else -1]:
                times[engine].append(engine.generate(prompts, max_tokens=32)["seconds"])
        used = [cpu_s(engine) - earlier for engine, earlier in zip(engines, before, strict=True)]
    pool.close()
    alone, pooled = times.values()
    ratios = [one / other for one, other in zip(alone, pooled, strict=True)]
    console.print(
        f"throughput without any reuse: {statistics.median(alone) / statistics.median(pooled):.3f} "
        f"of that without a pool (medians of {PAIRS} rounds of 8 prompts of 500 tokens, taking "
        f"turns; pairs {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f})"
    )
    for name in sorted(used[1]):
        console.print(
            f"  {name}: {used[1][name] / PAIRS * 1e3:.1f} ms of CPU a round, "
            f"{used[0][name] / PAIRS * 1e3:.1f} without"
        )


def saves(console: Console, folder: Path) -> None:
    """One engine; of each pair of equal rounds one saves all prompts and answers, the other none.

    On a busy machine wall time says little. What saving costs the answers is CPU of the engine's
    own thread, with which every step begins and ends; other threads copy and hash.
    """
    pool = LocalPool()
    config = _settings(pool, "shm", "auto")
    engine = Engine(model(), folder / "saves.log", kv_transfer_config=config, **SIZES)
    draws = random.Random(1)
    pairs: list[dict[bool, Counter[str]]] = []
    with closing(engine):
        for turn in range(WARM_UP + SAVE_PAIRS):
            pairs.append({})
            for skipped in (False, True)[:: 1 if turn % 2 else -1]:
                prompts = [draws.choices(range(10, 900), k=500) for _ in range(8)]
                params = {"kvpool": {"skip_save": skipped}}
                before, tokens_before = cpu_s(engine), _between_tokens_s(engine)
                engine.generate(prompts, max_tokens=64, params=params)
                answered, tokens_s = cpu_s(engine), _between_tokens_s(engine)
                engine.forget()  # all saves have ended
                used, in_all = answered - before, cpu_s(engine) - before
                pairs[-1][skipped] = Counter(
                    {
                        "CPU of the engine's thread until the answers": used["MainThread"],
                        "CPU of all threads until all is saved": in_all.total(),
                        "wall time between tokens": tokens_s - tokens_before,
                    }
                )
        saved = engine.metrics()["vllm:kvpool_saved_blocks"]
    pool.close()
    pairs = pairs[WARM_UP:]
    console.print(
        f"{len(pairs)} pairs of rounds of 8 x (500 + 64) tokens; {saved:.0f} blocks saved"
    )
    for name in pairs[0][False]:
        ratios = [pair[False][name] / pair[True][name] for pair in pairs]
        drawn = (draws.choices(ratios, k=len(ratios)) for _ in range(1000))
        medians = sorted(map(statistics.median, drawn))
        console.print(
            f"  {name}: {statistics.median(ratios):.3f} of that without saves (median of pairs; "
            f"95 %: {medians[25]:.3f} to {medians[974]:.3f}); "
            f"{statistics.median(pair[True][name] for pair in pairs) * 1e3:.0f} ms without"
        )


def _between_tokens_s(engine: Engine) -> float:
    """Seconds between the tokens of all answers so far."""
    return engine.metrics()["vllm:inter_token_latency_seconds_sum"]


def never_slower(console: Console, folder: Path) -> None:
    pool = LocalPool()
    pair = Pair(folder, pool, "tcp", "auto")
    console.print(f"seconds to the first token of a prompt of {PREFIX} tokens that the pool has")
    console.print("        link | alone: median worst | pool: median first worst | loads (failed)")
    with closing(pair.alone, pair.pooled):
        pair.warm()
        prompts = [prompt(number, PREFIX, 0) for number in range(PROMPTS)]
        for tokens in prompts:
            pair.pooled.generate([tokens])
        pool.settled()
        for rate in RATES:
            pool.conditions.rate = rate
            before = pair.pooled.metrics()
            times = [(first_token_s(pair.alone, p), first_token_s(pair.pooled, p)) for p in prompts]
            after = pair.pooled.metrics()
            alone, pooled = ([*column] for column in zip(*times, strict=True))
            one, other = statistics.median(alone), statistics.median(pooled)
            loads, failed = (
                after.get(name, 0.0) - before.get(name, 0.0)
                for name in ("vllm:kvpool_decisions load", "vllm:kvpool_loads_failed")
            )
            link = f"{rate / 1e6:g} MB/s" if rate else "unlimited"
            console.print(
                f"{link:>12} | {one:13.3f} {max(alone):5.3f} | {other:12.3f} {pooled[0]:5.3f} "
                f"{max(pooled):5.3f} | {loads:.0f} of {PROMPTS} ({failed:.0f}): {one / other:.2f} x"
            )
    pool.close()


def swarm(console: Console, folder: Path) -> None:
    """Many requests with one prefix arrive together, and the engine has nothing of it."""
    pool = LocalPool()
    pair = Pair(folder, pool, "shm", "auto", max_num_seqs=32)
    console.print(f"requests of {PREFIX} shared and 16 own tokens, to the last one's first token")
    with closing(pair.alone, pair.pooled):
        pair.warm()
        for count in SWARMS:
            seconds: dict[Engine, list[float]] = {pair.alone: [], pair.pooled: []}
            read = 0.0
            for number in range(ROUNDS):
                shared = prompt(count * 100 + number, PREFIX, 0)
                pair.pooled.generate([shared], max_tokens=1)
                pool.settled()
                before = pair.pooled.metrics().get("vllm:kvpool_load_bytes", 0.0)
                prompts = [shared + prompt(1000 + n, 16, 0) for n in range(count)]
                for engine in [pair.alone, pair.pooled][:: 1 if number % 2 else -1]:
                    engine.forget()
                    answer = engine.generate(prompts, max_tokens=1)
                    seconds[engine].append(answer["seconds"])
                read += pair.pooled.metrics().get("vllm:kvpool_load_bytes", 0.0) - before
            alone, pooled = (statistics.median(column) for column in seconds.values())
            console.print(
                f"{count:>4}: {pooled:.3f} s, without a pool {alone:.3f} s: "
                f"{alone / pooled:.2f} x; {read / ROUNDS / 2**20:.1f} MiB read a round"
            )
        for name, value in sorted(pair.pooled.metrics().items()):
            if name.startswith("vllm:kvpool_"):
                console.print(f"  {name.removeprefix('vllm:kvpool_')}: {value:.6g}")
    pool.close()


def busy(console: Console, folder: Path) -> None:
    """A fresh engine, and a pool that has all of its prompts; two processes keep two cores busy."""
    pool = LocalPool()
    prompts = [prompt(number, BUSY_TOKENS, 0) for number in range(BUSY_PROMPTS)]
    groups = [
        prompts[first : first + BUSY_CLIENTS] for first in range(0, BUSY_PROMPTS, BUSY_CLIENTS)
    ]
    writer = Engine(
        model(),
        folder / "writer.log",
        kv_transfer_config=_settings(pool, "shm", "auto"),
        **SIZES,
    )
    with closing(writer):
        for group in groups:
            writer.generate(group, max_tokens=1)
        pool.settled()
    with _busy_cores(2):
        pair = Pair(folder, pool, "shm", "auto")
        with closing(pair.alone, pair.pooled):
            first = pair.pooled.generate(prompts[:1], max_tokens=1)["cached"][0]
            pair.alone.generate(prompts[:1], max_tokens=1)
            seconds: dict[Engine, list[float]] = {pair.alone: [], pair.pooled: []}
            cached: list[int] = []
            for number in range(ROUNDS):
                for engine in [pair.alone, pair.pooled][:: 1 if number % 2 else -1]:
                    engine.forget()
                    for group in groups:
                        answer = engine.generate(group, max_tokens=1)
                        seconds[engine].append(answer["seconds"])
                        if engine is pair.pooled:
                            cached += answer["cached"]
            metrics = pair.pooled.metrics()
    pool.close()
    whole = BUSY_TOKENS // 32 * 32
    console.print(
        f"two busy cores: {sum(one == whole for one in cached)} of {len(cached)} prompts loaded "
        f"whole, {sum(one > 0 for one in cached)} loaded; the first of a fresh engine: {first} of "
        f"{whole} tokens"
    )
    alone, pooled = seconds.values()
    slower = sum(one > other for one, other in zip(pooled, alone, strict=True))
    console.print(
        f"  {BUSY_CLIENTS} at a time: {statistics.median(pooled):.3f} s, at worst "
        f"{max(pooled):.3f}, without a pool {statistics.median(alone):.3f} and {max(alone):.3f}; "
        f"{slower} of {len(pooled)} groups took longer"
    )
    for name, value in sorted(metrics.items()):
        if name.startswith(("vllm:kvpool_misses", "vllm:kvpool_decisions", "vllm:kvpool_loads_f")):
            console.print(f"  {name.removeprefix('vllm:kvpool_')}: {value:.6g}")


@contextmanager
def _busy_cores(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def steady(console: Console, folder: Path) -> None:
    """A thousand requests, half of them hits: does anything grow, more than without a pool?"""
    pool = LocalPool()
    pair = Pair(folder, pool, "shm", "always")
    (server,) = pool.dev.servers
    engines = (pair.pooled, pair.alone)
    held: dict[Engine, list[dict[str, int]]] = {engine: [] for engine in engines}
    with closing(*engines):
        for turn in range(10):
            for engine in engines:
                for number in range(5):
                    first = 20 * turn + number // 2 * 10
                    prompts = [prompt(first + n, 200, 100) for n in range(20)]
                    engine.generate(prompts, max_tokens=4)
                engine.forget()
                held[engine].append(engine.ask("held"))
        hits = pair.pooled.metrics()["vllm:kvpool_hit_tokens dram"]
        pool.settled()
        pins, reservations = server.store.held.pins, server.store.held.reservations
    pool.close()
    console.print(f"1,000 requests of 200 tokens, {hits:.0f} tokens of the pool; each hundred:")
    with_pool, alone = held.values()
    for name in with_pool[0]:
        unit, of = (1 << 20, " (MiB)") if "memory" in name else (1, "")
        one, other = ([f"{now[name] / unit:.4g}" for now in those] for those in (with_pool, alone))
        console.print(f"  {name}{of}: {' '.join(one)}; without a pool {' '.join(other)}")
    console.print(f"  in the end: pins {pins}, reservations {reservations}")


def main() -> None:
    known: dict[str, Callable[[Console, Path], None]] = {
        "hits": hits,
        "overhead": overhead,
        "saves": saves,
        "never_slower": never_slower,
        "steady": steady,
        "swarm": swarm,
        "busy": busy,
    }
    chosen = sys.argv[1:] or list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            known[name](console, Path(folder))


if __name__ == "__main__":
    main()
