"""What came of it: the faults, what was seen, what has no explanation, and which promise broke."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rich.table import Table

from kvpool.config import ClientConfig, ServerConfig

#: For this long after a fault its consequences explain a miss: servers are kept away from for up
#: to 5 s, are silent after 3 s, and connections that hang are found out after 5 s.
SETTLE_S: Final = 15.0
HEDGE_S: Final = ClientConfig().hedge_s
HEARTBEAT_S: Final = ServerConfig().heartbeat_s


@dataclass(slots=True)
class Trouble:
    """One fault: what, to whom, and when on the clock that all processes of a host share."""

    kind: str
    target: str
    began: float
    ended: float = float("inf")


class Restart(NamedTuple):
    """A master came back: the share of living blocks that it knew, and after how long."""

    share: float
    seconds: float


@dataclass(slots=True)
class Report:
    """Everything that a run saw. `broken` has one sentence for each promise that was not kept."""

    seed: int
    masters: tuple[str, ...]
    #: What a busy machine may add to any time before a promise counts as broken.
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
    troubles: list[Trouble] = field(default_factory=list)

    @contextmanager
    def trouble(self, clock: Callable[[], float], kind: str, target: str) -> Iterator[None]:
        """A fault that goes on inside."""
        self.faults[kind] += 1
        trouble = Trouble(kind, target, clock())
        self.troubles.append(trouble)
        try:
            yield
        finally:
            trouble.ended = clock()

    # --- judging ----------------------------------------------------------------------------

    def add(self, client: str, said: dict[str, Any]) -> None:
        """Take in what a client printed."""
        self.operations.update(said["operations"])
        self.statuses.update(said["statuses"])
        self.wrong_bytes += said["wrong"]
        self.hedged_s += said["hedged_s"]
        for event in said["events"]:
            self._judge(client, event)

    def _judge(self, client: str, event: dict[str, Any]) -> None:
        what, began, ended = event["what"], event["began"], event["ended"]
        asleep_s = self._frozen(client, began, ended)
        if what == "late":
            self.late_s = max(self.late_s, event["late_s"] - asleep_s)
            return
        if what == "late bytes":
            self.broken.append("G1: a buffer changed after its call had ended")
            return
        explained = asleep_s > 0
        if what == "no master":
            explained |= all(
                self._troubled(began - SETTLE_S, ended, (master, f"clients > {master}"))
                for master in self.masters
            )
        elif what in ("miss", "write"):
            explained |= self._troubled(event["since"] - SETTLE_S, ended)
        if what == "lie" or not explained:
            told = f"{client} was told {event['status']} ({what}, {ended - began:.3f} s)"
            self.unexplained.append(f"{told}; faults by then: {self._lately(began, ended)}")

    def _troubled(self, began: float, ended: float, targets: Sequence[str] = ()) -> bool:
        """Whether any master, server or link (or one of `targets`) was in trouble."""
        return any(
            trouble.began <= ended
            and trouble.ended >= began
            and (trouble.target in targets if targets else trouble.target[:7] != "client-")
            for trouble in self.troubles
        )

    def _lately(self, began: float, ended: float) -> str:
        """What went wrong shortly before `ended`, in seconds from `began`, for whoever wonders."""
        return ", ".join(
            f"{trouble.kind} ({trouble.target}) {trouble.began - began:+.1f} s"
            + (f" to {trouble.ended - began:+.1f} s" if trouble.ended < ended else "")
            for trouble in self.troubles
            if trouble.began <= ended and trouble.ended >= began - SETTLE_S
        )

    def _frozen(self, client: str, began: float, ended: float) -> float:
        """Seconds between two times for which a client was stopped."""
        return sum(
            max(0.0, min(trouble.ended, ended) - max(trouble.began, began))
            for trouble in self.troubles
            if trouble.kind == "freeze client" and trouble.target == client
        )

    def conclude(self) -> None:
        """Turn the figures into sentences about promises."""
        allowed, broken = self.allowance_s, self.broken
        if self.wrong_bytes:
            broken.append(f"G1: {self.wrong_bytes} wrong bytes were read")
        if self.unexplained:
            count, first = len(self.unexplained), self.unexplained[0]
            broken.append(f"G5: {count} answers have no explanation, the first: {first}")
        if self.late_s > allowed:
            broken.append(f"G6: a call ended {self.late_s:.2f} s after its deadline")
        if max(self.failover_s, default=0.0) > 1.0 + allowed:
            broken.append(
                f"G6: after kill -9 a replica was read {max(self.failover_s):.2f} s later"
            )
        if max(self.frozen_read_s, default=0.0) > HEDGE_S + 0.05 + allowed:
            slowest = max(self.frozen_read_s)
            broken.append(f"G6: with one of two owners frozen a read took {slowest:.2f} s")
        for share, seconds in self.restarts:
            if share < 1 or seconds > 2 * HEARTBEAT_S + allowed:
                broken.append(f"G7: {seconds:.2f} s after its start a master knew {share:.1%}")
        if self.leaks:
            broken.append(f"G4: left behind: {'; '.join(self.leaks)}")

    # --- showing ----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
        """For people."""
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
        table.add_row("longest call beyond its deadline", f"{self.late_s:.3f} s")
        table.add_row("kill -9 of one of two owners, until read", _told(self.failover_s))
        table.add_row("a read with one of two owners frozen", _told(self.frozen_read_s))
        table.add_row(f"reads of the load, hedged after {HEDGE_S:g} s", _told(self.hedged_s))
        if self.restarts:
            least = min(restart.share for restart in self.restarts)
            seconds = _told([restart.seconds for restart in self.restarts])
            table.add_row("living blocks matched again after a master's restart", f"{least:.0%}")
            table.add_row("  which took", seconds)
        table.add_row("blocks in the map, compared with the servers", f"{self.map_checked:,}")
        table.add_row("answers without explanation", f"{len(self.unexplained):,}")
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


def _told(values: Sequence[float]) -> str:
    if not values:
        return "not tried"
    return f"p50 {statistics.median(values):.3f} s, max {max(values):.3f} s, {len(values)} times"
