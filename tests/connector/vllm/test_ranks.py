"""Four tensor parallel ranks: vLLM's scheduler and its merging of reports, real worker halves.

No model runs, and all ranks are in this process: four workers of a real engine need more cores than
a test machine has. What they would compute the test writes into their memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvpool_connector import settings as settings_module
from kvpool_connector.memory.block_memory import memory_of
from kvpool_connector.records.messages import StepWork
from kvpool_connector.vllm_engine.head_split import HeadSplit, head_split
from kvpool_connector.worker.rank_model import ModelInMemory
from kvpool_connector.worker.worker import ConnectorWorker, Rank
from kvpool_engines.pool_thread import PoolThread
from tests.connector.vllm.helpers import Models, transfer
from tests.connector.vllm.played import BLOCK, BLOCKS, Played, output_of
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(120)

#: The model's KV heads. With four ranks two of them have the same head.
HEADS = 2
HEAD_SHAPE = (BLOCK, 32)


class Ranks(Played):
    """An engine of `ranks` worker halves, each with the KV of its own heads."""

    def __init__(self, model: Path, pool: LocalPool, ranks: int, **settings: Any) -> None:
        config = transfer(pool.master, **settings)
        parallel = ParallelConfig(tensor_parallel_size=ranks)
        heads = max(1, HEADS // ranks)
        super().__init__(model, config, ranks=ranks, heads=heads, parallel_config=parallel)
        self.split = self._split(config)
        self.memory = [torch.zeros(BLOCKS, heads, *HEAD_SHAPE) for _ in range(ranks)]
        chosen = settings_module.parse(config["kv_connector_extra_config"])
        self.workers = []
        for number, memory in enumerate(self.memory):
            split = self.split
            part = number // split.replicas * split.parts_per_rank
            saves = number % split.replicas == 0
            thread = PoolThread(chosen.client(), chosen.member(), print)
            assert thread.wait(10)
            rank = Rank(number, part, saves, split.parts_per_rank)
            worker = ConnectorWorker(chosen, thread, rank)
            worker.register([memory_of({"layer": memory}, split.parts_per_rank)], ModelInMemory())
            self.workers.append(worker)
        self.merge = KVOutputAggregator(expected_finished_count=ranks)

    def _split(self, config: dict[str, Any]) -> HeadSplit:
        """As the connector divides the heads, by vLLM's own configuration."""
        connector = self.connector
        chosen = settings_module.parse(config["kv_connector_extra_config"])
        return head_split(connector._vllm_config, connector._kv_cache_config, chosen)

    def end(self, step: Any, **told: Any) -> StepWork:
        """All ranks compute a step; vLLM makes one output of theirs."""
        work: StepWork = step.kv_connector_metadata.work
        for worker in self.workers:
            worker.start_loads(work)
            worker.start_saves(work)
        outputs: list[ModelRunnerOutput | None] = []
        for worker in self.workers:
            done, report = worker.take_finished(), worker.take_report()
            ended = {"finished_recving": done.loaded, "invalid_block_ids": done.bad_blocks}
            outputs.append(output_of(step, report, **ended))
        self.update(step, self.merge.aggregate(outputs))
        return work

    def until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until
            self.step()
            time.sleep(0.001)

    def compute(self, name: str, tokens: int, kv: Callable[[int, int], torch.Tensor]) -> Any:
        """A prompt whose block n has `kv(n, head)` for each KV head of the model, saved."""
        request = self.request(name, tokens)
        self.scheduler.add_request(request)
        written = 0
        until = time.monotonic() + 30
        while self.scheduler.has_requests() or self.connector.has_pending_push_work():
            assert time.monotonic() < until
            step = self.scheduler.schedule()
            (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name) or ((),)
            for number, block in enumerate(ids[: tokens // BLOCK]):
                self._fill(block, number, kv)
                written = max(written, number + 1)
            self.end(step)
            time.sleep(0.001)
        assert written == tokens // BLOCK
        return request

    def _fill(self, block: int, number: int, kv: Callable[[int, int], torch.Tensor]) -> None:
        for rank, memory in enumerate(self.memory):
            for local in range(memory.shape[1]):
                memory[block, local] = kv(number, self.head(rank, local))

    def head(self, rank: int, local: int) -> int:
        """Which of the model's KV heads this is; vLLM gives consecutive ranks the same one."""
        return rank * HEADS // len(self.memory) + local

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        super().close()


def kv(number: int, head: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + head)
    return torch.rand(HEAD_SHAPE, generator=generator)


@pytest.mark.parametrize(("writers", "readers"), [(4, 4), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_what_some_ranks_saved_four_load_head_by_head(
    pool: LocalPool, model: Models, writers: int, readers: int
) -> None:
    settings = {"kv_head_parts": 2, "revision": "one"}
    writer = Ranks(model(), pool, writers, **settings)
    reader = Ranks(model(), pool, readers, **settings)
    try:
        writer.compute("a", 5 * BLOCK + 1, kv)
        # Each of the two parts once, however many ranks have them.
        assert pool.settled() == 2 * 5
        request = reader.request("b", 5 * BLOCK + 1)
        reader.scheduler.add_request(request)
        reader.until(lambda: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
        (ids,) = reader.scheduler.kv_cache_manager.get_block_ids("b")
        reader.until(lambda: request.status != RequestStatus.WAITING_FOR_REMOTE_KVS)
        assert request.num_computed_tokens >= 5 * BLOCK
        assert writer.namespace == reader.namespace
        assert reader.namespace.parts == 2
        for rank, memory in enumerate(reader.memory):
            for number, block in enumerate(ids[:5]):
                for local in range(memory.shape[1]):
                    assert torch.equal(memory[block, local], kv(number, reader.head(rank, local)))
        reader.until(lambda: not reader.scheduler.has_requests())
    finally:
        writer.close()
        reader.close()


def test_a_rank_that_is_late_with_its_description_keeps_no_request_for_long(
    pool: LocalPool, model: Models
) -> None:
    """Four ranks that share two cores: the first step of a fresh engine may take seconds."""
    engine = Ranks(model(), pool, 4, kv_head_parts=2, revision="one")
    try:
        late = engine.workers[3]._model
        info, late.info = late.info, None  # it has not described its model yet
        request = engine.request("a", 3 * BLOCK + 1)
        began = time.monotonic()
        engine.scheduler.add_request(request)
        engine.until(lambda: request.num_computed_tokens > 0)
        assert time.monotonic() - began > 0.9
        late.info = info
        engine.until(lambda: not engine.scheduler.has_requests())
        assert engine.namespace.parts == 2
        assert engine.counters["miss no namespace"] == 1
        engine.scheduler.reset_prefix_cache()
        again = engine.request("b", 3 * BLOCK + 1)
        engine.scheduler.add_request(again)
        engine.until(lambda: not engine.scheduler.has_requests())
    finally:
        engine.close()
