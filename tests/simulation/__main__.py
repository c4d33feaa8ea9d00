"""Play many histories: `python -m tests.simulation --seeds 0:2000 --jobs 2`.

A failing seed prints one line, and that line says how to play it again. `--reduce SEED` looks for a
smaller world in which it still fails; `--bugs` grades the simulator with planted bugs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from tests.simulation import planted, run
from tests.simulation.nemesis import FAULTS, FAULTS_OF_DISKS
from tests.simulation.oracles import PROBES
from tests.simulation.world import Report

#: What `--without` may name: kinds of fault, and disks themselves.
_PARTS: Final = (*FAULTS, *FAULTS_OF_DISKS, "disk")
_CHUNK: Final = 20
#: Each planted bug must be found within this many seeds.
_BUG_SEEDS: Final = 200
_PROGRAM: Final = (sys.executable, "-m", "tests.simulation")
_COMMAND: Final = "python -m tests.simulation"


def main(
    seeds: Annotated[str, typer.Option(help="first:last, the last one excluded")] = "0:2000",
    jobs: Annotated[int, typer.Option(min=0, help="processes; 0: one for each core")] = 0,
    ops: Annotated[int, typer.Option(min=1, help="operations in each history")] = 40,
    without: Annotated[str, typer.Option(help="kinds of fault to leave out, by comma")] = "",
    seed: Annotated[int | None, typer.Option(help="play one history")] = None,
    trace: Annotated[bool, typer.Option(help="print every event of it")] = False,
    reduce: Annotated[int | None, typer.Option(help="shrink the world of a failing seed")] = None,
    bugs: Annotated[bool, typer.Option(help="grade the simulator with planted bugs")] = False,
    replays: Annotated[
        int, typer.Option(min=0, help="seeds to play again in other processes")
    ] = 20,
) -> None:
    """Play histories of a whole cluster under faults; exit code 1 if one fails."""
    console = Console()
    excluded = frozenset(filter(None, without.split(",")))
    unknown = excluded - set(_PARTS)
    if unknown:
        raise typer.BadParameter(f"no such fault: {', '.join(sorted(unknown))}; know {_PARTS}")
    workers = jobs or os.cpu_count() or 1
    if seed is not None:
        report = run(seed, ops=ops, without=excluded, trace=trace)
        print(json.dumps(_plain(report)))
        raise typer.Exit(1 if report.failure else 0)
    if reduce is not None:
        raise typer.Exit(_reduce(console, reduce, ops))
    if bugs:
        raise typer.Exit(_grade(console, workers))
    wanted = _range(seeds)
    failed = _play(console, wanted, workers, ops, excluded)
    failed += _replay(console, wanted[:replays], ops)
    raise typer.Exit(1 if failed else 0)


def _range(seeds: str) -> range:
    """`first:last`; no seeds at all are a mistake, too: they would pass."""
    first, _, last = seeds.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise typer.BadParameter(f"seeds {seeds!r}: expected first:last, such as 0:2000")
    return range(int(first), int(last))


def _play(console: Console, seeds: range, workers: int, ops: int, without: frozenset[str]) -> int:
    """Play all seeds; how many failed."""
    started = time.monotonic()
    faults: Counter[str] = Counter()
    probes: Counter[str] = Counter()
    played = operations = steps = failed = 0
    virtual_s = 0.0
    for report in _reports(seeds, workers, ops, without):
        played += 1
        operations += report.ops
        steps += report.steps
        virtual_s += report.virtual_s
        faults += report.faults
        probes.update(report.probes)
        if report.failure is not None:
            failed += 1
            left_out = f" --without '{','.join(sorted(without))}'" if without else ""
            said = f"seed {report.seed}: {report.failure}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            again = f"  replay: {_COMMAND} --seed {report.seed} --ops {ops}{left_out} --trace"
            console.print(again, markup=False, highlight=False, soft_wrap=True)
    seconds = time.monotonic() - started
    _tables(console, faults, probes, played)
    reached = sum(probe in probes for probe in PROBES)
    console.print(
        f"{played} histories in {seconds:.0f} s on {workers} processes: {operations:,} operations, "
        f"{sum(faults.values()):,} faults ({sum(faults.values()) - faults['chopped']:,} without "
        f"chopped deliveries), {virtual_s / 3600:.1f} virtual hours, {steps:,} steps, "
        f"{reached} of {len(PROBES)} probes reached, [bold]{failed} failed[/bold]"
    )
    return failed


def _tables(console: Console, faults: Counter[str], probes: Counter[str], played: int) -> None:
    table = Table("fault", "times", box=None)
    for name, count in faults.most_common():
        table.add_row(name, f"{count:,}")
    console.print(table)
    table = Table("probe", "histories", box=None)
    for name in PROBES:
        share = f"{probes[name]:,}" if probes[name] else "[red]never[/red]"
        table.add_row(name, share)
    console.print(table)


def _reports(seeds: range, workers: int, ops: int, without: frozenset[str]) -> Iterator[Report]:
    parts = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    if workers == 1:
        for part in parts:
            yield from _chunk(part, ops, without)
        return
    with ProcessPoolExecutor(workers) as pool:
        for reports in pool.map(_chunk, parts, [ops] * len(parts), [without] * len(parts)):
            yield from reports


def _chunk(seeds: Sequence[int], ops: int, without: frozenset[str]) -> list[Report]:
    # Generators of simulated processes that were killed end when they are collected, on no loop.
    sys.unraisablehook = lambda _: None
    return [run(seed, ops=ops, without=without) for seed in seeds]


def _plain(report: Report) -> dict[str, object]:
    return {
        "seed": report.seed,
        "failure": report.failure,
        "trace_hash": report.trace_hash,
        "ops": report.ops,
        "steps": report.steps,
        "virtual_s": round(report.virtual_s, 3),
        "faults": dict(report.faults),
        "probes": sorted(report.probes),
    }


def _replay(console: Console, seeds: range, ops: int) -> int:
    """Play seeds twice in fresh processes with different hash seeds; how many differ."""
    differ = 0
    for seed in seeds:
        hashes = set()
        for hash_seed in ("1", "2"):
            done = subprocess.run(
                [*_PROGRAM, "--seed", str(seed), "--ops", str(ops)],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=False,
            )
            hashes.add(json.loads(done.stdout)["trace_hash"])
        if len(hashes) != 1:
            differ += 1
            console.print(f"seed {seed}: two runs differ: {hashes}", markup=False)
    console.print(f"{len(seeds)} seeds played again in other processes: {differ} differ")
    return differ


def _reduce(console: Console, seed: int, ops: int) -> int:
    """Leave out kinds of fault, then operations, as long as the seed still fails."""
    without: frozenset[str] = frozenset()
    failure = run(seed, ops=ops).failure
    if failure is None:
        console.print(f"seed {seed} does not fail with {ops} operations")
        return 0
    for kind in _PARTS:
        smaller = run(seed, ops=ops, without=without | {kind})
        if smaller.failure is not None:
            without, failure = without | {kind}, smaller.failure
    while ops > 1 and (found := run(seed, ops=ops // 2, without=without).failure) is not None:
        ops, failure = ops // 2, found
    left = sorted(set(_PARTS) - without)
    console.print(f"seed {seed}: {failure}", markup=False, highlight=False)
    console.print(f"  needs {ops} operations and, at most, these faults: {', '.join(left)}")
    console.print(
        f"  {_COMMAND} --seed {seed} --ops {ops} --without '{','.join(sorted(without))}' --trace",
        markup=False,
        highlight=False,
    )
    return 1


def _grade(console: Console, workers: int) -> int:
    """Plant each bug in a process of its own; how many were not found."""
    script = Path(planted.__file__)

    def grade(bug: planted.Bug) -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, str(script), "--bug", bug.name, "--seeds", f"0:{_BUG_SEEDS}"],
            capture_output=True,
            text=True,
            check=True,
        )
        verdict: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return verdict

    table = Table("planted bug", "breaks", "seed", "how it was found", box=None)
    missed = 0
    with ThreadPoolExecutor(workers) as pool:
        for bug, verdict in zip(planted.BUGS, pool.map(grade, planted.BUGS), strict=True):
            caught = verdict["caught"]
            if isinstance(caught, dict):
                how = str(caught["failure"])[:90]
                table.add_row(bug.name, bug.promise, str(caught["seed"]), how)
            else:
                missed += 1
                table.add_row(bug.name, bug.promise, "[red]-[/red]", "[red]not found[/red]")
    console.print(table)
    console.print(f"{len(planted.BUGS) - missed} of {len(planted.BUGS)} planted bugs found")
    return missed


if __name__ == "__main__":
    typer.run(main)
