"""The result of a run: faults, figures, results without an explanation, and broken promises."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rich.table import Table

from kvpool.config import ClientConfig, ServerConfig

#: For this long after a fault its consequences explain a miss: clients avoid a server for up to 5 s
#: after a failure, masters count it as lost after 3 s, hanging connections are noticed after 5 s.
SETTLE_S: Final = 15.0
HEDGE_S: Final = ClientConfig().hedge_s
HEARTBEAT_S: Final = ServerConfig().heartbeat_s


@dataclass(slots=True)
class IncidentRecord:
    """One fault: its kind, its target, and its times on the monotonic clock of the host."""

    kind: str
    target: str
    began: float
    ended: float = float("inf")


class Restart(NamedTuple):
    """A restarted master: the share of living blocks that it knew, and after how long."""

    share: float
    seconds: float


@dataclass(slots=True)
class ChaosReport:
    """Everything that a run observed. `broken` has one sentence for each broken promise."""

    seed: int
    masters: tuple[str, ...]
    #: Seconds that a busy machine may add to a limit before a promise counts as broken.
    allowance_s: float
    seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong_bytes: int = 0
    late_s: float = 0.0
    failover_s: list[float] = field(default_factory=list)
    frozen_read_s: list[float] = field(default_factory=list)
    hedged_s: list[float] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    map_checked: int = 0
    unexplained: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    incidents: list[IncidentRecord] = field(default_factory=list)

    @contextmanager
    def incident(self, clock: Callable[[], float], kind: str, target: str) -> Iterator[None]:
        """Records a fault that lasts as long as the `with` block."""
        self.faults[kind] += 1
        incident = IncidentRecord(kind, target, clock())
        self.incidents.append(incident)
        try:
            yield
        finally:
            incident.ended = clock()

    # --- judging ----------------------------------------------------------------------------

    def add(self, client: str, printed: dict[str, Any]) -> None:
        """Add one report that a client printed."""
        self.operations.update(printed["operations"])
        self.statuses.update(printed["statuses"])
        self.wrong_bytes += printed["wrong"]
        self.hedged_s += printed["hedged_s"]
        for event in printed["events"]:
            self._judge(client, event)

    def _judge(self, client: str, event: dict[str, Any]) -> None:
        what, began, ended = event["what"], event["began"], event["ended"]
        asleep_s = self._frozen_s(client, began, ended)
        if what == "late":
            self.late_s = max(self.late_s, event["late_s"] - asleep_s)
            return
        if what == "late bytes":
            self.broken.append("G1: a buffer changed after its call had ended")
            return
        explained = asleep_s > 0
        if what == "no master":
            explained |= all(
                self._had_incident(began - SETTLE_S, ended, (master, f"clients > {master}"))
                for master in self.masters
            )
        elif what in ("miss", "write"):
            explained |= self._had_incident(event["since"] - SETTLE_S, ended)
        if what == "lie" or not explained:
            answer = f"{client} got {event['status']} ({what}, {ended - began:.3f} s)"
            self.unexplained.append(
                f"{answer}; faults before: {self._recent_incidents(began, ended)}"
            )

    def _had_incident(self, began: float, ended: float, targets: Sequence[str] = ()) -> bool:
        """Whether any master, server or link (or one of `targets`) had a fault in this time."""
        return any(
            incident.began <= ended
            and incident.ended >= began
            and (incident.target in targets if targets else incident.target[:7] != "client-")
            for incident in self.incidents
        )

    def _recent_incidents(self, began: float, ended: float) -> str:
        """The faults shortly before `ended`, in seconds relative to `began`, as text."""
        return ", ".join(
            f"{incident.kind} ({incident.target}) {incident.began - began:+.1f} s"
            + (f" to {incident.ended - began:+.1f} s" if incident.ended < ended else "")
            for incident in self.incidents
            if incident.began <= ended and incident.ended >= began - SETTLE_S
        )

    def _frozen_s(self, client: str, began: float, ended: float) -> float:
        """Seconds between two times for which a client was stopped."""
        return sum(
            max(0.0, min(incident.ended, ended) - max(incident.began, began))
            for incident in self.incidents
            if incident.kind == "freeze client" and incident.target == client
        )

    def conclude(self) -> None:
        """Write one sentence for each promise that the figures show as broken."""
        allowed, broken = self.allowance_s, self.broken
        if self.wrong_bytes:
            broken.append(f"G1: {self.wrong_bytes} wrong bytes were read")
        if self.unexplained:
            count, first = len(self.unexplained), self.unexplained[0]
            broken.append(f"G5: {count} results have no explanation, the first: {first}")
        if self.late_s > allowed:
            broken.append(f"G6: a call ended {self.late_s:.2f} s after its deadline")
        if max(self.failover_s, default=0.0) > 1.0 + allowed:
            broken.append(
                f"G6: after kill -9 it took {max(self.failover_s):.2f} s to read another replica"
            )
        if max(self.frozen_read_s, default=0.0) > HEDGE_S + 0.05 + allowed:
            slowest = max(self.frozen_read_s)
            broken.append(f"G6: a read took {slowest:.2f} s while one of two owners was frozen")
        for share, seconds in self.restarts:
            if share < 1 or seconds > 2 * HEARTBEAT_S + allowed:
                broken.append(f"G7: {seconds:.2f} s after its start a master knew {share:.1%}")
        if self.leaks:
            broken.append(f"G4: left behind: {'; '.join(self.leaks)}")

    # --- showing ----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "operations": dict(self.operations.most_common()),
            "faults": dict(self.faults.most_common()),
            "statuses": dict(self.statuses.most_common()),
            "wrong_bytes": self.wrong_bytes,
            "late_s": round(self.late_s, 3),
            "failover_s": _spread(self.failover_s),
            "frozen_owner_read_s": _spread(self.frozen_read_s),
            "hedged_read_s": _spread(self.hedged_s),
            "master_restarts": len(self.restarts),
            "matched_again": min((restart.share for restart in self.restarts), default=None),
            "matched_again_s": _spread([restart.seconds for restart in self.restarts]),
            "map_checked_blocks": self.map_checked,
            "unexplained": self.unexplained[:20],
            "leaks": self.leaks,
            "broken": self.broken,
        }

    def table(self) -> Table:
        """The report as a table for a terminal."""
        table = Table(title=f"{self.seconds:.0f} s of chaos, seed {self.seed}", show_header=False)
        table.add_column("what")
        table.add_column("figure", justify="right")
        for name, counts in (("operations", self.operations), ("faults", self.faults)):
            table.add_row(f"[bold]{name}[/]", f"[bold]{counts.total():,}[/]")
            for kind, count in counts.most_common():
                table.add_row(f"  {kind}", f"{count:,}")
        table.add_section()
        for label, count in sorted(self.statuses.items()):
            table.add_row(label, f"{count:,} blocks")
        table.add_section()
        table.add_row("wrong bytes", f"{self.wrong_bytes:,}")
        table.add_row("longest time of a call beyond its deadline", f"{self.late_s:.3f} s")
        table.add_row(
            "kill -9 of one of two owners: time until read", _spread_text(self.failover_s)
        )
        table.add_row(
            "longest read with one of two owners frozen", _spread_text(self.frozen_read_s)
        )
        table.add_row(
            f"hedged reads of the load (hedge {HEDGE_S:g} s)", _spread_text(self.hedged_s)
        )
        if self.restarts:
            least = min(restart.share for restart in self.restarts)
            seconds = _spread_text([restart.seconds for restart in self.restarts])
            table.add_row("blocks that a restarted master knew again", f"{least:.0%}")
            table.add_row("  time until then", seconds)
        table.add_row(
            "blocks whose location was compared with the servers", f"{self.map_checked:,}"
        )
        table.add_row("results without explanation", f"{len(self.unexplained):,}")
        table.add_row("left behind", "; ".join(self.leaks) or "nothing")
        return table


def _spread(values: Sequence[float]) -> dict[str, float | int]:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "p50": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


def _spread_text(values: Sequence[float]) -> str:
    if not values:
        return "not measured"
    return f"p50 {statistics.median(values):.3f} s, max {max(values):.3f} s, {len(values)} times"
