"""The results: one JSON file for all parts, and tables."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import targets
from benchmarks.peers.field import CONTENDERS
from benchmarks.peers.work import Row

#: How figures are shown: unit factor, format.
_SHOWN = {
    "write": (1.0, "{:.2f} GB/s"),
    "read": (1.0, "{:.2f} GB/s"),
    "write_cpu": (1.0, "{:.2f} s/GB"),
    "read_cpu": (1.0, "{:.2f} s/GB"),
    "write_p50": (1e6, "{:,.0f} us"),
    "write_p99": (1e6, "{:,.0f} us"),
    "read_p50": (1e6, "{:,.0f} us"),
    "read_p99": (1e6, "{:,.0f} us"),
    "p50": (1e6, "{:,.0f} us"),
    "p99": (1e6, "{:,.0f} us"),
    "turn_p50": (1e3, "{:,.1f} ms"),
    "turn_p99": (1e3, "{:,.1f} ms"),
    "hit_rate": (100.0, "{:.1f} %"),
    "cpu": (1e6, "{:,.0f} us"),
    "bytes_per_block": (1.0, "{:,.0f} B"),
    "longest_read": (1.0, "{:.2f} s"),
    "recovered_after": (1.0, "{:.2f} s"),
    "back_after": (1.0, "{:.2f} s"),
    "visible": (100.0, "{:.0f} %"),
    "leaked": (1 / (1 << 20), "{:,.1f} MiB"),
}
#: Printed once for a row, not as a figure.
_QUIET = ("rounds",)
#: Like for like: both over tcp, then both through the memory of the host; and what an engine gets.
_RATIOS = (("kvpool-tcp", "mooncake"), ("kvpool", "mooncake-shm"), ("kvpool", "mooncake"))


class Results:
    """All rows so far. A part that is measured again replaces its older rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}

    @classmethod
    def load(cls, path: Path) -> Results:
        """What an earlier run left there, or nothing."""
        found = cls(path)
        if path.exists():
            held = json.loads(path.read_text())
            found.runs, found.rows = held["runs"], held["rows"]
            found.missing = held["missing"]
        return found

    def add(
        self,
        rows: Sequence[Row],
        run: dict[str, Any],
        abouts: dict[str, dict[str, Any]],
        missing: dict[str, str],
    ) -> None:
        """Add rows, together with the run that they belong to, and write the file."""
        known = self.runs.setdefault(run["at"], {**run, "systems": {}})
        known["systems"] |= abouts
        new = {_place(asdict(row)) for row in rows}
        self.rows = [row for row in self.rows if _place(row) not in new]
        self.rows += [{**asdict(row), "run": run["at"]} for row in rows]
        self.runs = {
            at: run for at, run in self.runs.items() if any(r["run"] == at for r in self.rows)
        }
        self.missing = missing
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(
            json.dumps({"runs": self.runs, "missing": missing, "rows": self.rows}, indent=1)
        )

    def parts(self) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
        """part -> what -> system -> figures, in the order in which they were measured."""
        found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        for row in self.rows:
            whats = found.setdefault(row["part"], {})
            whats.setdefault(row["what"], {})[row["system"]] = row["figures"]
        return found


def _place(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["part"], row["what"], row["system"]


def machine(cores: Sequence[int]) -> dict[str, Any]:
    """What the figures depend on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cpu": model,
        "cores": len(cores),
        "memory_gib": round(memory / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def line(row: Row) -> str:
    """One row on one line, while it is measured."""
    shown = ", ".join(f"{name} {_shown(name, value)}" for name, value in row.figures.items())
    return f"{row.what}, {row.system}: {shown}"


def _shown(name: str, value: Any) -> str:
    if name in _SHOWN and isinstance(value, int | float):
        factor, text = _SHOWN[name]
        return text.format(value * factor)
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(found: Results, console: Console) -> None:
    """A table for each part, the targets, the limits, and the missing systems."""
    for part, whats in found.parts().items():
        console.print(_table(part, whats))
    met = targets.judge(found.parts())
    if met:
        console.print(_targets(met))
    for at, run in found.runs.items():
        limits = run["limits"]
        disk = limits["disk"]
        console.print(
            f"run of {at}: {run['cores']} cores of {run['cpu']}, kernel {run['kernel']}, "
            f"python {run['python']}; memcpy {limits['memcpy']:.2f} GB/s, "
            f"raw sockets {limits['socket']:.2f} GB/s, "
            + (f"raw disk {disk[0]:.2f} / {disk[1]:.2f} GB/s" if disk else "no direct disk I/O"),
            highlight=False,
        )
        for name, about in run["systems"].items():
            console.print(f"  {name} {about['version']}: {about['settings']}", highlight=False)
    for name, why in found.missing.items():
        console.print(f"[yellow]left out[/] {name}: {why}", highlight=False)


def _table(part: str, whats: dict[str, dict[str, dict[str, Any]]]) -> Table:
    names = [name for name in CONTENDERS if any(name in systems for systems in whats.values())]
    names += sorted({name for systems in whats.values() for name in systems} - set(names))
    table = Table(title=part, title_justify="left")
    table.add_column("what")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    pairs = [pair for pair in _RATIOS if set(pair) <= set(names)]
    for ours, theirs in pairs:
        table.add_column(f"{ours} : {theirs}", justify="right")
    for what, systems in whats.items():
        figures = list(dict.fromkeys(f for found in systems.values() for f in found))
        for number, figure in enumerate(f for f in figures if f not in _QUIET):
            cells = [_shown(figure, systems.get(name, {}).get(figure, "")) for name in names]
            ratios = [_ratio(systems, figure, *pair) for pair in pairs]
            table.add_row(what if not number else "", figure, *cells, *ratios)
    return table


def _ratio(systems: dict[str, dict[str, Any]], figure: str, ours: str, theirs: str) -> str:
    values = [systems.get(name, {}).get(figure) for name in (ours, theirs)]
    if figure != "load" and all(isinstance(value, int | float) for value in values) and values[1]:
        return f"{values[0] / values[1]:.2f}"
    return ""


def _targets(met: Sequence[targets.Verdict]) -> Table:
    table = Table(title="targets", title_justify="left")
    for name in ("what", "target"):
        table.add_column(name)
    table.add_column("measured", justify="right")
    table.add_column("")
    for verdict in met:
        mark = "[green]met[/]" if verdict.met else "[red]missed[/]"
        table.add_row(verdict.what, verdict.target, verdict.measured, mark)
    return table
