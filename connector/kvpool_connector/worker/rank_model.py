"""What one rank's model is, as the scheduler half is told: it makes names of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool_connector.hook_guard import FailureLog
from kvpool_connector.memory.block_memory import BlockMemory
from kvpool_connector.records.messages import (
    AdapterInfo,
    AdapterKey,
    ModelInfo,
    StepWork,
    WorkerInfo,
    WorkerReport,
)


@dataclass
class ModelInMemory:
    """What tells of the model that a rank computes with. Workers that differ cannot share blocks.
    (design: namespace)"""

    #: The model as it is now. `whole_info` also notices a change of a few weights; it is used when
    #: they may have been changed in place. None: as `info`.
    info: Callable[[], ModelInfo] = ModelInfo
    whole_info: Callable[[], ModelInfo] | None = None
    #: The LoRA adapters beside it.
    adapters: Callable[[], Mapping[int, str]] = dict
    #: Counts the calls that may have changed weights.
    changes: Callable[[], int] = int


class RankModel:
    """Until the scheduler half has made names of what was found last, this is not `registered`, and
    the rank loads and saves nothing."""

    def __init__(self, rank: int, failures: FailureLog) -> None:
        self._rank = rank
        self._failures = failures
        self._memory: Sequence[BlockMemory] = ()
        self._model = ModelInMemory()
        self._changes_seen = 0
        self._adapters: Mapping[int, str] = {}  # those that the scheduler half knows
        self.info: WorkerInfo | None = None
        self.registered = False

    @property
    def serial(self) -> int:
        return self.info.serial if self.info is not None else 0

    def register(self, memory: Sequence[BlockMemory], model: ModelInMemory) -> None:
        self._memory, self._model, self._changes_seen = memory, model, model.changes()
        # What cannot be described is not shared: the engine starts all the same.
        self._failures.guard("describing the model", lambda: self._describe(model.info()), None)

    def on_step(self, work: StepWork) -> None:
        """A step begins. The model is described anew where its weights may have changed."""
        if self.info is not None and work.weights_wanted:
            try:
                changes = self._model.changes()
                if changes != self._changes_seen or self.info.serial < work.serial_min:
                    self._changes_seen = changes
                    # Loads that run fail: what they bring is of other weights.
                    info = self._model.whole_info or self._model.info
                    self._describe(info(), work.serial_min)
            except Exception as error:  # nobody knows what this rank computes now
                self.info = None
                self._failures.add("describing the model", error)
        self.on_names(work)

    def on_names(self, work: StepWork) -> None:
        """The namespaces of this step may be made of what was found last."""
        serials = work.serials[self._rank : self._rank + 1]
        self.registered = self.info is not None and serials == (self.info.serial,)

    def has(self, adapters: frozenset[AdapterKey]) -> bool:
        """Whether these LoRA adapters are the loaded ones: vLLM may have reloaded one."""
        if not adapters:
            return True
        loaded = self._adapters_now()
        return all(loaded.get(number) == by_rank[self._rank] for number, by_rank in adapters)

    def add_to(self, report: WorkerReport) -> None:
        """What the scheduler half does not know yet."""
        if not self.registered and self.info is not None:
            report.worker_infos.append(self.info)
        adapters = self._adapters_now()
        if adapters != self._adapters:
            self._adapters = adapters
            report.adapters.append(AdapterInfo(self._rank, adapters))

    def _describe(self, model: ModelInfo, serial_min: int = 1) -> None:
        packing = "|".join([model.packing, *(memory.packing for memory in self._memory)])
        self.info = WorkerInfo(
            self._rank,
            model._replace(packing=packing),
            tuple(memory.block_bytes for memory in self._memory),
            max(serial_min, self.serial + 1),
        )
        self.registered = False

    def _adapters_now(self) -> Mapping[int, str]:
        """Without them requests that have one are computed."""
        return self._failures.guard("describing adapters", self._model.adapters, {})
