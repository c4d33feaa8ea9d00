"""What one rank's model is, as the scheduler half is told: it makes names of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


class RankModel:
    """Until the scheduler half has made names of what was found last, this is not `registered`, and
    the rank loads and saves nothing."""

    def __init__(self, rank: int, failures: FailureLog) -> None:
        self._rank = rank
        self._failures = failures
        self._memory: Sequence[BlockMemory] = ()
        self._whole_info: Callable[[], ModelInfo] = ModelInfo
        self._loaded_adapters: Callable[[], Mapping[int, str]] = dict
        self._weight_changes: Callable[[], int] = int
        self._changes_seen = 0
        self._adapters: Mapping[int, str] = {}  # those that the scheduler half knows
        self.info: WorkerInfo | None = None
        self.registered = False

    @property
    def serial(self) -> int:
        return self.info.serial if self.info is not None else 0

    def register(
        self,
        memory: Sequence[BlockMemory],
        model_info: Callable[[], ModelInfo],
        loaded_adapters: Callable[[], Mapping[int, str]],
        whole_info: Callable[[], ModelInfo],
        weight_changes: Callable[[], int],
    ) -> None:
        self._memory, self._whole_info = memory, whole_info
        self._loaded_adapters = loaded_adapters
        self._weight_changes, self._changes_seen = weight_changes, weight_changes()
        # What cannot be described is not shared: the engine starts all the same.
        self._failures.guard("describing the model", lambda: self._describe(model_info()), None)

    def on_step(self, work: StepWork) -> None:
        """A step begins. The model is described anew where its weights may have changed."""
        if self.info is not None and work.weights_wanted:
            try:
                changes = self._weight_changes()
                if changes != self._changes_seen or self.info.serial < work.serial_min:
                    self._changes_seen = changes
                    self.describe_again(work.serial_min)
            except Exception as error:  # nobody knows what this rank computes now
                self.info = None
                self._failures.add("describing the model", error)
        self.on_names(work)

    def describe_again(self, serial_min: int) -> None:
        """Loads that run fail: what they bring is of other weights."""
        self._describe(self._whole_info(), serial_min)

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
        return self._failures.guard("describing adapters", self._loaded_adapters, {})
