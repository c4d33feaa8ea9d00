"""What came of a replay, and how it is shown."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvpool.ops.bars import FillBar, age
from kvpool.ops.tables import as_json_object
from kvpool.types import Member
from kvpool.units import human


@dataclass(slots=True)
class TransportTraffic:
    """What went over one transport."""

    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    write_s: float = 0.0


@dataclass(slots=True)
class ReplayReport:
    """What came of a replay."""

    name: str
    requests: int
    servers: int
    clients: int
    capacity: int
    block_size: int
    seconds: float = 0.0
    blocks: int = 0
    hits: int = 0
    wrong_bytes: int = 0
    offline_policy: float = 0.0
    offline_lru: float = 0.0
    offline_isolated: float = 0.0
    offline_ideal: float = 0.0
    transports: dict[str, TransportTraffic] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    killed_after: tuple[int, int] | None = None  # hits and blocks until then
    match_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    timeline: list[tuple[float, float]] = field(default_factory=list)  # seconds, hit rate
    members: list[Member] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def hit_rates_round_kill(self) -> tuple[float, float] | None:
        """Before the servers were killed, and since."""
        if self.killed_after is None:
            return None
        hits, blocks = self.killed_after
        return hits / max(1, blocks), (self.hits - hits) / max(1, self.blocks - blocks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; latencies as quantiles."""
        found = asdict(self)
        for name in ("match_s", "read_s", "write_s"):
            found[name] = dict(zip(("p50", "p99"), quantiles(getattr(self, name)), strict=True))
        found["hit_rate"] = self.hit_rate
        found["hit_rates_round_kill"] = self.hit_rates_round_kill
        found["members"] = [as_json_object(member) for member in self.members]
        return found


@contextlib.contextmanager
def progress(console: Console, report: ReplayReport) -> Any:
    """A live table on a terminal, a line every five seconds elsewhere."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield lambda seconds: live.update(_now(report, seconds))
        return
    printed = 0.0

    def show(seconds: float) -> None:
        nonlocal printed
        if seconds - printed >= 5:
            printed = seconds
            console.print(
                f"{seconds:5.0f} s  {len(report.match_s):,} of {report.requests:,} requests"
                f"{_left(report, seconds, ', {} left')}  hit rate {report.hit_rate:.1%}  "
                f"wrong bytes {report.wrong_bytes}"
            )

    yield show


def _left(report: ReplayReport, seconds: float, text: str = "{}") -> str:
    """The time that is left, if the other requests take as long; empty while nobody knows."""
    done = len(report.match_s)
    left = report.requests - done
    return text.format(age(seconds * left / done)) if done and left else ""


def _now(report: ReplayReport, seconds: float) -> Group:
    """In lines that no usual terminal cuts."""
    done = len(report.match_s)
    read = sum(path.read_bytes for path in report.transports.values())
    written = sum(path.written_bytes for path in report.transports.values())
    line = Table.grid(padding=(0, 2))
    requests = f"{done:,} of {report.requests:,} requests"
    line.add_row(
        requests, FillBar(done / max(1, report.requests)), _left(report, seconds, "{} left")
    )
    wrong = f"{'[green]' if not report.wrong_bytes else '[bold red]'}{report.wrong_bytes}[/]"
    match_ms = quantiles(report.match_s[-1000:])[0] * 1e3
    return Group(
        escape(report.name),  # that of a file, perhaps
        line,
        f"hit rate [bold green]{report.hit_rate:.1%}[/], match p50 {match_ms:.2f} ms, "
        f"wrong bytes {wrong}",
        f"read {human(read)} ({human(read / max(seconds, 0.1))}/s), written {human(written)}",
    )


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; zeros of nothing."""
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def tables(report: ReplayReport) -> list[Table]:
    """The result, for a terminal."""
    return [_hit_table(report), _byte_table(report), _latency_table(report)]


def _hit_table(report: ReplayReport) -> Table:
    where = f"{report.servers} servers, {report.clients} engine instances"
    memory = f"{human(report.capacity)} of {human(report.block_size)} blocks"
    title = f"{escape(report.name)}: {report.requests:,} requests, {where}, {memory}"
    table = Table(title=title)
    table.add_column("hit rate")
    table.add_column("", justify="right")
    pool, offline = report.hit_rate, report.offline_policy
    table.add_row("[bold]the pool[/]", f"[bold green]{pool:.2%}[/]")
    table.add_row(f"same policy, offline ({100 * (pool - offline):+.2f} points)", f"{offline:.2%}")
    if report.hit_rates_round_kill is not None:
        before, since = report.hit_rates_round_kill
        table.add_row("before every server was killed, and since", f"{before:.2%}, {since:.2%}")
    isolated = f"same memory as {report.clients} isolated caches"
    table.add_row(isolated, f"{report.offline_isolated:.2%}")
    table.add_row("ideal: memory without end", f"{report.offline_ideal:.2%}")
    wrong = f"{report.wrong_bytes:,}"
    table.add_row("wrong bytes", f"[green]{wrong}[/]" if wrong == "0" else f"[red]{wrong}[/]")
    return table


def _byte_table(report: ReplayReport) -> Table:
    table = Table()
    table.add_column("transport")
    for name in ("read", "while reading", "written", "while writing"):
        table.add_column(name, justify="right")
    for name, path in report.transports.items():
        table.add_row(
            name,
            human(path.read_bytes),
            f"{human(path.read_bytes / max(path.read_s, 1e-9))}/s",
            human(path.written_bytes),
            f"{human(path.written_bytes / max(path.write_s, 1e-9))}/s",
        )
    for member in report.members:
        capacity, rss = human(member.capacity), human(member.stats.rss)
        table.add_row(f"{member.server}: capacity {capacity}, RSS {rss}", "", "", "", "")
    return table


def _latency_table(report: ReplayReport) -> Table:
    table = Table(caption=f"{report.seconds:.1f} s in all")
    table.add_column("per request")
    for name in ("p50", "p99", "calls"):
        table.add_column(name, justify="right")
    for name in ("match", "read", "write"):
        values = getattr(report, f"{name}_s")
        p50, p99 = quantiles(values)
        table.add_row(name, f"{p50 * 1e3:.2f} ms", f"{p99 * 1e3:.2f} ms", f"{len(values):,}")
    for name, count in sorted(report.statuses.items()):
        table.add_row(name, "", "", f"{count:,}")
    return table
