"""`python -m benchmarks.peers`: start everything, measure, print, write, stop everything."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers import failures, limits, plot, report, sessions, work
from benchmarks.peers.contract import Failed, Shape
from benchmarks.peers.field import CONTENDERS, HARDENED, Contender, Field
from benchmarks.peers.processes import Rig
from kvpool.errors import KvpoolError
from kvpool.ops import process
from kvpool.units import parse_size

RESULTS = Path(__file__).parent.parent / "results"
PARTS = ("reads", "singles", "clients", "match", "replay", "pressure", "memory", "failures")
_SIZES = "64KiB,128KiB,1MiB,2MiB,4MiB,16MiB"
_CLIENTS = 4
_KEYS = (64, 640, 6400)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    contenders = ",".join(CONTENDERS)
    parser.add_argument("--systems", default=contenders, help=f"of {contenders}")
    parser.add_argument("--sizes", default=_SIZES, help="of blocks")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--capacity", default="2304MiB", help="of each system")
    parser.add_argument("--region", default="1GiB", help="the largest batch in bytes")
    parser.add_argument("--cores", type=int, default=2, help="that all processes are pinned to")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="loops that use the same cores meanwhile"
    )
    parser.add_argument("--replay-capacities", default="64MiB,88MiB,128MiB")
    parser.add_argument("--seconds", type=float, default=12.0, help="for one figure, about")
    known = ",".join(failures.FAILURES)
    parser.add_argument("--failures", default=known, help=f"which of {known}")
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="mooncake.NAME=VALUE",
        help="a flag of a peer's server, or an MC_ variable; again for more",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller blocks")
    parser.add_argument("--results", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what is there")
    options = parser.parse_args()
    for option, known_names in (("systems", CONTENDERS), ("only", PARTS)):
        if unknown := sorted(set(getattr(options, option).split(",")) - set(known_names)):
            parser.error(
                f"--{option} {','.join(unknown)}: expected some of {', '.join(known_names)}"
            )
    return options


async def measure(options: argparse.Namespace, console: Console, found: report.Results) -> None:
    """All parts that were asked for; each is in `found`, and in the file, when it has ended."""
    async with AsyncExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))[: options.cores]
        os.sched_setaffinity(0, cores)
        rig = Rig(cores, stack)
        field = Field(rig, parse_size(options.region))
        stack.callback(field.close)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        run = report.machine(cores)
        run["limits"] = {
            "memcpy": await limits.memcpy(),
            "socket": await limits.raw_socket(rig),
            "disk": await limits.raw_disk(options.results.parent),
        }
        run["argv"] = sys.argv[1:]
        for _ in range(options.busy):
            await rig.run("busy", sys.executable, "-c", "while True: pass")
        part = Parts(options, console, field, found, run)
        for name in options.only.split(","):
            await getattr(part, name)()


class Parts:
    """One method for each part; rows go to `found` as they come."""

    def __init__(
        self,
        options: argparse.Namespace,
        console: Console,
        field: Field,
        found: report.Results,
        run: dict[str, Any],
    ) -> None:
        self._console = console
        self._field = field
        self._found = found
        self._run = run
        self._options = options
        self._systems = options.systems.split(",")
        self._hardened = [n for n in HARDENED if n.partition("-")[0] in self._systems]
        self._region = parse_size(options.region)
        self._tuning: dict[str, dict[str, str]] = {}
        for text in options.tune:
            place, _, value = text.partition("=")
            system, _, name = place.partition(".")
            self._tuning.setdefault(system, {})[name] = value
        self._shape = self._of(options.capacity)
        seconds, rounds = (options.seconds, 5) if not options.quick else (2.0, 2)
        self._effort = work.Effort(rounds=rounds, seconds=seconds)
        self._sizes = [parse_size(size) for size in options.sizes.split(",")]
        self._batches = [int(count) for count in options.batches.split(",")]

    async def reads(self) -> None:
        async with self._field.contenders(self._systems, self._shape) as contenders:
            for size in self._sizes:
                for count in self._batches:
                    if size * count <= self._region:
                        self._add(
                            await work.batches(contenders, size, count, self._effort), contenders
                        )

    async def singles(self) -> None:
        async with self._field.contenders(self._systems, self._shape) as contenders:
            for size in self._sizes:
                self._add(await work.singles(contenders, size, self._effort), contenders)

    async def clients(self) -> None:
        async with self._field.contenders(self._systems, self._shape, _CLIENTS) as contenders:
            for size in self._sizes:
                if size * 64 * _CLIENTS <= self._region:
                    self._add(
                        await work.several_clients(contenders, size, 64, self._effort), contenders
                    )

    async def match(self) -> None:
        async with self._field.contenders(self._systems, self._shape) as contenders:
            for count in _KEYS:
                self._add(await work.match(contenders, count, self._effort), contenders)

    async def replay(self) -> None:
        """A curve: 88 MiB is a little more than the working set of 12 live sessions. The trace is
        played a hundred times too fast, so Mooncake takes part with leases to scale, too."""
        systems = self._field.taking_part("replay", self._systems)
        if "mooncake" in systems:
            systems.insert(systems.index("mooncake") + 1, "mooncake-scaled")
        count = 4 if self._options.quick else 30
        for capacity in self._options.replay_capacities.split(","):
            async with self._field.contenders(
                systems, self._of(capacity), apart=True
            ) as contenders:
                self._add(await sessions.replay(contenders, count, 12, capacity), contenders)

    async def pressure(self) -> None:
        shape = self._of("512MiB")
        systems = self._field.taking_part("pressure", self._hardened)
        async with self._field.contenders(systems, shape) as contenders:
            self._add(await sessions.pressure(contenders, shape.capacity), contenders)

    async def memory(self) -> None:
        systems = [name for name in self._systems if name not in ("kvpool-tcp", "mooncake-shm")]
        async with self._field.contenders(systems, self._shape) as contenders:
            count = 10_000 if self._options.quick else 100_000
            self._add(await sessions.memory(contenders, count), contenders)

    async def failures(self) -> None:
        patience = failures.Patience()
        if self._options.quick:
            patience = failures.Patience(6.0, 4.0, 3.0, 5.0, 2)
        systems = self._field.taking_part("failures", self._hardened)
        for what in self._options.failures.split(","):
            rows, abouts = await failures.play(self._field, what, systems, patience)
            self._add(rows, abouts)

    def _of(self, capacity: str) -> Shape:
        return Shape(parse_size(capacity), tuning=self._tuning)

    def _add(self, rows: list[work.Row], who: Sequence[Contender] | dict[str, Any]) -> None:
        abouts = who if isinstance(who, dict) else {c.name: c.system.about() for c in who}
        for row in rows:
            row.figures["load"] = round(os.getloadavg()[0], 1)
            if self._options.busy:  # beside what a quiet run has measured, not in its place
                row.what += f", {self._options.busy} busy loops"
        self._found.add(rows, self._run, abouts, self._field.missing)
        for row in rows:
            self._console.print(f"  {row.part}: {report.line(row)}", highlight=False)


async def _until_told(measuring: asyncio.Task[None]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    await measuring


def main() -> int:
    options = arguments()
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        print(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
        return 2
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = report.Results.load(options.results)

    async def run() -> None:
        if not options.report:
            await _until_told(asyncio.create_task(measure(options, console, found)))

    try:
        process.run(run())
    except (Failed, KvpoolError) as error:
        console.print(f"[red]failed[/]: {error}", highlight=False)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("[yellow]stopped[/]; what was measured so far:")
        return 1
    finally:
        report.show(found, console)
        picture = options.results.with_suffix(".svg")
        if plot.draw(found, picture):
            console.print(f"written to {options.results} and {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
