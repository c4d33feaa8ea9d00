"""What a worker's transfers ended with: written in the pool's thread, taken by the engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvpool import WriteStatus
from kvpool_connector.records.messages import (
    LoadRequest,
    LoadResult,
    ProbeResult,
    SaveRequest,
    SaveResult,
    VerifyResult,
    WorkerReport,
)
from kvpool_connector.records.provenance import MetWriters

#: An engine that has nothing to compute steps without a pause until its transfers have ended, and
#: keeps the GIL from the thread that does them. Such a step waits so long for a transfer to end.
IDLE_S: Final = 0.001


class FinishedTransfers(NamedTuple):
    """Ids of requests whose loads have ended, those of them that failed, and the blocks that were
    not filled. Each load is in one of these."""

    loaded: set[str]
    failed: set[str]
    bad_blocks: set[int]


class EndedTransfers:
    """Each transfer that was begun ends once, and is reported once."""

    def __init__(self) -> None:
        self._one_ended = threading.Event()
        self._lock = threading.Lock()  # guards what follows: both threads use it
        self.running = 0
        self._report = WorkerReport(0)  # its step is set when it is taken
        self._finished = FinishedTransfers(set(), set(), set())
        self._counters: dict[str, float] = {}

    def begin(self) -> None:
        with self._lock:
            self.running += 1

    def on_load(
        self,
        load: LoadRequest,
        size: int,
        missing: Sequence[int],
        seconds: float,
        waited_s: float = 0.0,
        met: MetWriters | None = None,
    ) -> None:
        writers, refused = (met.writers, met.refused) if met is not None else (set(), set())
        ended = LoadResult(
            *(load.request_id, size, not missing, seconds, waited_s),
            *(frozenset(writers), frozenset(refused)),
        )
        with self._lock:
            self._finished.loaded.add(load.request_id)
            if missing:
                self._finished.failed.add(load.request_id)
                self._finished.bad_blocks.update(missing)
            self._report.loads.append(ended)
            self.running -= 1
        self._one_ended.set()
        self.count("load_bytes", size)
        self.count("load_blocks_missing", len(missing))

    def on_save(
        self, save: SaveRequest, size: int, refused: Mapping[tuple[int, bytes], WriteStatus]
    ) -> None:
        rows = tuple((group, digest, status) for (group, digest), status in refused.items())
        with self._lock:
            ended = SaveResult(save.job, size, rows, -time.monotonic())  # its age at time 0
            self._report.saves.append(ended)
            self.running -= 1
        self._one_ended.set()
        self.count("save_bytes", size)

    def on_check(self, result: ProbeResult | VerifyResult) -> None:
        with self._lock:
            if isinstance(result, ProbeResult):
                self._report.probes.append(result)
            else:
                self._report.verified.append(result)
            self.running -= 1
        self._one_ended.set()

    def on_compared(self, result: VerifyResult) -> None:
        """A save, which goes on, has compared what was there."""
        with self._lock:
            self._report.verified.append(result)

    def count(self, name: str, amount: float) -> None:
        if amount:
            with self._lock:
                self._counters[name] = self._counters.get(name, 0.0) + amount

    def take_finished(self, *, idle: bool) -> FinishedTransfers:
        """The loads that have ended since the last call; an idle engine waits for one."""
        if idle and self.running:
            self._one_ended.wait(IDLE_S)
        self._one_ended.clear()
        with self._lock:
            finished, self._finished = self._finished, FinishedTransfers(set(), set(), set())
        return finished

    def take_report(self, step: int) -> WorkerReport:
        with self._lock:
            report, self._report = self._report, WorkerReport(0)
        report.step = step
        report.saves = [one._replace(age_s=one.age_s + time.monotonic()) for one in report.saves]
        return report

    def take_counters(self) -> dict[str, float]:
        with self._lock:
            counters, self._counters = self._counters, {}
        return counters
