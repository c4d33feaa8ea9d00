"""First token of a prompt that the pool has, behind a slow link: one way, two ways, and a codec.

    .venv-vllm/bin/python -m benchmarks.first_token [--rate 10] [--prompts 5]

A vLLM engine with a tiny model on a CPU. Two servers, each a process behind a link of its own speed
(as in `benchmarks.ways`); they hold each prompt once or twice. The engine always loads.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.engines import PREFIX, SIZES, first_token_s, model
from kvpool.ops import process
from kvpool.tools.subprocesses import process_of, servers_up
from tests.connector.vllm.helpers import Engine, closing, prompt, transfer

_SERVERS: Final = 2
_MODES: Final[dict[str, dict[str, Any]]] = {
    "one way": {},
    "two ways": {"copies": 2},
    "one way, codec": {"codec": "lossless"},
    "two ways, codec": {"copies": 2, "codec": "lossless"},
}
#: Saves end so long after the request, also the second copies.
_SAVED_S: Final = 6.0


async def measure(console: Console, rate: float, prompts: int) -> None:
    async with AsyncExitStack() as stack:
        quiet = ("--log-level", "error")
        bind = ("master", "--bind", "127.0.0.1:0", *quiet)
        master = await stack.enter_async_context(process_of("kvpool", *bind))
        address = (await master.line()).removeprefix("master at ")
        for number in range(_SERVERS):
            place = ("--masters", address, "--id", f"s{number}", "--capacity", "512MiB")
            listen = ("--listen", "tcp://127.0.0.1:0", *quiet, "--die-with-parent")
            serve = ("serve", str(rate), "server", *place, *listen)
            child = await stack.enter_async_context(process_of("benchmarks.ways", *serve))
            await child.line()
        await servers_up(address, _SERVERS)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        console.print(f"prompts of {PREFIX} tokens, {rate / 1e6:g} MB/s from each server")
        for number, (mode, settings) in enumerate(_MODES.items()):
            config = transfer(address, transports=["tcp"], **settings)
            log = folder / f"{number}.log"
            engine = Engine(model(), log, kv_transfer_config=config, **SIZES)
            with closing(engine):
                first = 100 * (number + 1)  # each mode has prompts of its own
                chosen = [prompt(first + one, PREFIX, 0) for one in range(prompts)]
                trial = prompt(first + 99, PREFIX, 0)
                for _ in range(2):  # what a load takes decides whether a codec pays
                    first_token_s(engine, trial)
                    await asyncio.sleep(_SAVED_S)
                computed = [first_token_s(engine, tokens) for tokens in chosen]
                await asyncio.sleep(_SAVED_S)
                before = engine.metrics()
                loaded = [first_token_s(engine, tokens) for tokens in chosen]
                after = engine.metrics()
            moved, loads = (
                after.get(name, 0.0) - before.get(name, 0.0)
                for name in ("vllm:kvpool_load_bytes", "vllm:kvpool_loads")
            )
            one, other = statistics.median(loaded), statistics.median(computed)
            console.print(
                f"{mode:>16}: {one:.3f} s ({min(loaded):.3f} to {max(loaded):.3f}), computed "
                f"{other:.3f} s; {loads:.0f} loads of {moved / max(1.0, loads) / 2**20:.1f} MiB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="MB/s")
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args()
    process.run(measure(Console(width=120), options.rate * 1e6, options.prompts))


if __name__ == "__main__":
    main()
