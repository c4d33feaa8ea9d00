"""Play many histories: `python -m tests.simulation --seeds 0:2000 --jobs 2`.

For each seed that fails it prints the violation and the command that plays the seed again.
`--reduce SEED` looks for a smaller world in which the seed still fails. `--bugs` checks that the
simulator finds each planted bug.

Exit codes: 0 success, 1 a history failed or a planted bug was not found, 2 usage error.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

if __package__ != "tests.simulation":
    raise SystemExit("start this program from the repository root: python -m tests.simulation")

from tests.simulation.nemesis import FAULTS, FAULTS_OF_DISKS, HOARD
from tests.simulation.open_failures import OPEN_FAILURES
from tests.simulation.planted import BUGS as OF_CLUSTERS
from tests.simulation.planted import Bug
from tests.simulation.planted_devices import DEVICE_BUGS
from tests.simulation.reports import REPORTS
from tests.simulation.task_faults import TASK_FAULT
from tests.simulation.truth import PROBES
from tests.simulation.world import HistoryReport, run
from tests.simulation.wrong_maps import FAULTS_OF_MAPS

#: What `--without` may name: kinds of fault, `disk` for the disks themselves, `contests` for
#: writers that disagree, `crowds` for many servers with a shared prompt, `circles` for blocks that
#: are their own ancestors, `write-back` for servers that write to their disks what memory would
#: drop, `sessions` for conversations whose prompts wait, `moves` for blocks that servers fetch from
#: each other, `copies` for those of which they make copies by themselves, `joins` for full
#: servers that hand over chains to an empty one, `one-request` for writes that come so, `cold` for
#: an object store below memory, and `guesses` for a policy that infers conversations.
_WORLDS: Final = (
    "disk",
    "contests",
    "crowds",
    "circles",
    "write-back",
    "sessions",
    "moves",
    "joins",
    "copies",
    "tenants",
    "one-request",
    "cold",
    "guesses",
)
_PARTS: Final = (*FAULTS, *FAULTS_OF_DISKS, *FAULTS_OF_MAPS, HOARD, TASK_FAULT, REPORTS, *_WORLDS)
BUGS: Final = (*OF_CLUSTERS, *DEVICE_BUGS)
_OPS: Final = 40
#: Seeds that one process plays before it reports.
_CHUNK: Final = 20
#: Each planted bug must be found by the seed that it names or within this many others. One that
#: needs more names one that finds it.
_BUG_SEEDS: Final = 200
_COMMAND: Final = "python -m tests.simulation"
#: Child processes run here, so that they find the package `tests`.
_ROOT: Final = Path(__file__).resolve().parents[2]


def main(
    seeds: Annotated[
        str, typer.Option(help="Seeds to play: first:last, the last one excluded.")
    ] = "0:2000",
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0 means one per core.")] = 0,
    ops: Annotated[int, typer.Option(min=1, help="Operations in each history.")] = _OPS,
    without: Annotated[
        str, typer.Option(help="Kinds of fault to leave out, separated by commas.")
    ] = "",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Play one seed and print its report as JSON.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="With --seed: print every event of the history.")
    ] = False,
    reduce: Annotated[
        int | None, typer.Option(min=0, help="Find a smaller world in which this seed fails.")
    ] = None,
    bugs: Annotated[
        bool, typer.Option("--bugs", help="Check that the simulator finds the planted bugs.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="With --bugs: only these bugs, separated by commas.")
    ] = "",
    replays: Annotated[
        int, typer.Option(min=0, help="Seeds to play twice more and compare, in other processes.")
    ] = 20,
) -> None:
    """Play simulated histories of a whole cluster under faults."""
    console = Console()
    excluded = frozenset(_names("--without", without, _PARTS))
    chosen = _names("--only", only, [bug.name for bug in BUGS])
    if (seed is not None) + (reduce is not None) + bugs > 1:
        raise typer.BadParameter("--seed, --reduce and --bugs exclude each other")
    if trace and seed is None:
        raise typer.BadParameter("--trace needs --seed")
    if only and not bugs:
        raise typer.BadParameter("--only needs --bugs")
    workers = jobs or os.cpu_count() or 1
    if seed is not None:
        report = run(seed, ops=ops, without=excluded, trace=trace)
        print(json.dumps(_plain(report)))
        raise typer.Exit(1 if report.failure else 0)
    if reduce is not None:
        raise typer.Exit(_reduce(console, reduce, ops))
    if bugs:
        missed = _grade(console, [bug for bug in BUGS if not only or bug.name in chosen], workers)
        raise typer.Exit(1 if missed else 0)
    wanted = _range(seeds)
    failed = _play(console, wanted, workers, ops, excluded)
    failed += _replay(console, wanted[:replays], workers, ops)
    raise typer.Exit(1 if failed else 0)


def _names(option: str, text: str, known: Sequence[str]) -> set[str]:
    names = set(filter(None, text.split(",")))
    if unknown := names - set(known):
        raise typer.BadParameter(
            f"{option}: unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}"
        )
    return names


def _range(seeds: str) -> range:
    """The seeds of `first:last`. No seeds at all are a mistake: nothing would be checked."""
    first, _, last = seeds.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise typer.BadParameter(f"--seeds {seeds!r}: expected first:last, such as 0:2000")
    return range(int(first), int(last))


def _play(console: Console, seeds: range, workers: int, ops: int, without: frozenset[str]) -> int:
    """Play all seeds; returns how many failed."""
    started = time.monotonic()
    faults: Counter[str] = Counter()
    probes: Counter[str] = Counter()
    played = operations = steps = failed = open_ones = 0
    virtual_s = 0.0
    for report in _reports(seeds, workers, ops, without):
        played += 1
        operations += report.ops
        steps += report.steps
        virtual_s += report.virtual_s
        faults += report.faults
        probes.update(report.probes)
        known = OPEN_FAILURES.get(report.seed) if ops == _OPS and not without else None
        if known is not None:
            still = report.failure is not None and report.failure.startswith(known)
            what = "known and open" if still else "no known failure any more, mend open_failures.py"
            console.print(f"seed {report.seed}: {what}: {known}", markup=False, soft_wrap=True)
            if still:
                open_ones += 1
                continue
        if report.failure is not None:
            failed += 1
            left_out = f" --without '{','.join(sorted(without))}'" if without else ""
            line = f"seed {report.seed}: {report.failure}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            again = f"  replay: {_COMMAND} --seed {report.seed} --ops {ops}{left_out} --trace"
            console.print(again, markup=False, highlight=False, soft_wrap=True)
    seconds = time.monotonic() - started
    _tables(console, faults, probes, played)
    reached = sum(probe in probes for probe in PROBES)
    console.print(
        f"{played} histories in {seconds:.0f} s on {workers} processes: {operations:,} operations, "
        f"{sum(faults.values()):,} faults ({sum(faults.values()) - faults['chopped']:,} without "
        f"chopped deliveries), {virtual_s / 3600:.1f} virtual hours, {steps:,} steps, "
        f"{reached} of {len(PROBES)} probes reached, [bold]{failed} failed[/bold], "
        f"{open_ones} failures are known and open"
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


def _reports(
    seeds: range, workers: int, ops: int, without: frozenset[str]
) -> Iterator[HistoryReport]:
    parts = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    if workers == 1:
        for part in parts:
            yield from _chunk(part, ops, without)
        return
    with ProcessPoolExecutor(workers) as pool:
        for reports in pool.map(_chunk, parts, [ops] * len(parts), [without] * len(parts)):
            yield from reports


def _chunk(seeds: Sequence[int], ops: int, without: frozenset[str]) -> list[HistoryReport]:
    # Coroutines of killed processes are closed by the garbage collector, when no loop runs any
    # more; what they raise then means nothing.
    sys.unraisablehook = lambda _: None
    return [run(seed, ops=ops, without=without) for seed in seeds]


def _plain(report: HistoryReport) -> dict[str, object]:
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


def _replay(console: Console, seeds: range, workers: int, ops: int) -> int:
    """Play seeds twice in new processes with different hash seeds; returns how many differ."""

    def play(run: tuple[int, str]) -> object:
        seed, hash_seed = run
        line = _child(["tests.simulation", f"--seed={seed}", f"--ops={ops}"], hash_seed)
        return line["trace_hash"]

    runs = list(itertools.product(seeds, ("1", "2")))
    with ThreadPoolExecutor(workers) as pool:
        hashes = list(pool.map(play, runs))
    differ = 0
    for seed, one, other in zip(seeds, hashes[::2], hashes[1::2], strict=True):
        if one != other:
            differ += 1
            console.print(f"seed {seed}: two runs differ: {one}, {other}", markup=False)
    console.print(f"{len(seeds)} seeds played again in other processes: {differ} differ")
    return differ


def _child(module: Sequence[str], hash_seed: str = "random") -> dict[str, object]:
    """Run a module in a process of its own; returns the JSON object on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=_ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.strip():  # exit code 1 with a report is a failed history, not a failed child
        raise SystemExit(f"{' '.join(module)} ended with code {done.returncode}:\n{done.stderr}")
    verdict: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return verdict


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
    console.print(f"  still fails with {ops} operations and only these faults: {', '.join(left)}")
    console.print(
        f"  {_COMMAND} --seed {seed} --ops {ops} --without '{','.join(sorted(without))}' --trace",
        markup=False,
        highlight=False,
    )
    return 1


def _grade(console: Console, bugs: Sequence[Bug], workers: int) -> int:
    """Plant each bug in a process of its own; returns how many were not found."""

    def grade(bug: Bug) -> object:
        options = [f"--bug={bug.name}", f"--seeds=0:{_BUG_SEEDS}"]
        return _child(["tests.simulation.plant", *options])["caught"]

    missed = []
    with ThreadPoolExecutor(workers) as pool:
        playing = {pool.submit(grade, bug): bug for bug in bugs}
        for played in as_completed(playing):
            bug, caught = playing[played], played.result()
            if isinstance(caught, dict):
                how = f"seed {caught['seed']}: {caught['failure'][:90]}"
            else:
                missed.append(bug.name)
                how = "not found"
            line = f"{bug.name} ({bug.promise}): {how}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(bugs) - len(missed)} of {len(bugs)} planted bugs found")
    for name in sorted(missed):
        again = f"{_COMMAND}.plant --bug {name} --seeds {_BUG_SEEDS}:{20 * _BUG_SEEDS}"
        console.print(f"not found: {name}; another seed for it: {again}", soft_wrap=True)
    return len(missed)


if __name__ == "__main__":
    typer.run(main)
