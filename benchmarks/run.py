"""`make bench`: everything, as a table and as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks import core, moves, policies, steps, ways
from kvpool.ops import process
from kvpool.tools.bench import BenchOptions, bench, table

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print, and write `benchmarks/results/<time>.json`."""
    quick = "--quick" in sys.argv[1:]
    console = Console(width=None if sys.stdout.isatty() else 140)
    report = process.run(bench(BenchOptions(rounds=3 if quick else 15), console))
    report.rows += core.measure(100_000 if quick else 400_000)
    report.rows += policies.measure(10_000 if quick else 30_000)
    report.rows += steps.measure(quick)
    report.rows += moves.measure(128 if quick else 512)
    report.rows += ways.measure(2 if quick else 5)
    console.print(table(report.rows))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(report.as_dict(), indent=1))
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
