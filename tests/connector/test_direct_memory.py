"""The connector hands an engine's rows on a device to the pool's client as they are.

On a fake device, over real UCX, with the worker half that vLLM's connector uses. What vLLM's own
backends allocate is tested in `tests/connector/vllm`, by shapes and strides.
"""

# ruff: noqa: F811  # fixtures

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import ROOT, Cluster, Namespace, dev
from kvpool.client import device_direct as direct
from kvpool.device.xxh3 import SHORT
from kvpool.errors import ConfigError
from kvpool_connector import settings
from kvpool_connector.memory import block_memory
from kvpool_connector.memory.block_memory import (
    DeviceBlockMemory,
    DirectBlockMemory,
    memory_of,
    views_of,
)
from kvpool_connector.records.messages import (
    GroupBlocks,
    LoadRequest,
    ModelInfo,
    SaveRequest,
    StepWork,
    VerifyRequest,
)
from kvpool_connector.records.provenance import MARK_BYTES
from kvpool_connector.worker.rank_model import ModelInMemory
from kvpool_connector.worker.worker import ConnectorWorker, Rank
from kvpool_engines.pool_thread import PoolThread
from tests.client.direct_blocks import gpu, served, torch, warm  # noqa: F401
from tests.conftest import eventually, keys
from tests.connector.test_connector_parts import LAYOUTS, caches
from tests.support.fake_device import FakeGpu, FakeTensor

pytest.importorskip("ucxx", reason="direct transfers need ucxx: pip install kvpool[ucx]")

SHAPE = LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 8, 2, 16, 64


class Engine:
    """A KV cache on a fake device, and a twin of it on the host, which shows its blocks."""

    def __init__(
        self, gpu: FakeGpu, served: dev.Dev, layout: str, parts: int = 1, device: int = 0
    ) -> None:
        self.layers = caches(LAYOUTS[layout], SHAPE)
        buffers: list[Any] = []
        self.views = views_of(self.layers, buffers)
        (self.host,) = buffers
        self.gpu = gpu
        self.device = gpu.tensor(bytes(self.host.numpy()), device)
        self.memory = DirectBlockMemory(self.views, [self.device], parts)
        chosen = settings.parse(
            {
                "masters": [served.address],
                "transports": ["ucx?tls=tcp,cuda_copy,self"],
                "device_path": "direct",
                "verify_rate": 1.0,
            }
        )
        self.thread = PoolThread(
            chosen.client(), Cluster(), str, on_start=block_memory.device_of_this_thread()
        )
        self.worker = ConnectorWorker(chosen, self.thread, Rank(0, 0, True, parts))
        self.worker.register([self.memory], ModelInMemory(partial(ModelInfo, packing="kernel")))
        self.step = 0

    def work(self, **what: Any) -> StepWork:
        self.step += 1
        namespace = Namespace("direct", self.memory.parts)
        return StepWork(self.step, (namespace,), serials=(1,), mark=bytes(MARK_BYTES), **what)

    async def connected(self) -> None:
        await eventually(lambda: self.thread.pool is not None)

    async def save(self, chain: Sequence[bytes], ids: Sequence[int]) -> Any:
        parents = (ROOT, *chain[:-1])
        blocks = GroupBlocks(0, tuple(chain), tuple(ids), tuple(parents))
        self.worker.start_saves(self.work(saves=[SaveRequest(self.step, (blocks,))]))
        return (await self._report("saves"))[0]

    async def load(self, chain: Sequence[bytes], ids: Sequence[int]) -> Any:
        blocks = GroupBlocks(0, tuple(chain), tuple(ids))
        self.worker.start_loads(self.work(loads=[LoadRequest("r", (blocks,), 10.0)]))
        finished = None
        while finished is None or not (finished.loaded or finished.failed):
            await asyncio.sleep(0.005)
            finished = self.worker.take_finished()
        return finished

    async def _report(self, kind: str) -> Any:
        while True:
            await asyncio.sleep(0.005)
            report = self.worker.take_report()
            if report is not None and getattr(report, kind):
                return getattr(report, kind)

    def expect(self, moved: dict[int, int]) -> None:
        """Blocks have the bytes that others had at the start; no other byte has changed."""
        now = self.host.clone()
        now.copy_(torch.frombuffer(bytearray(self.gpu.content(self.device)), dtype=torch.uint8))
        before = {name: cache.clone() for name, cache in self.layers.items()}
        self.host.copy_(now)
        for name, cache in self.layers.items():
            for block in range(BLOCKS):
                assert torch.equal(cache[block], before[name][moved.get(block, block)])

    async def close(self) -> None:
        await asyncio.to_thread(self.worker.close)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_blocks_leave_and_come_back_without_a_stage(
    gpu: FakeGpu, served: dev.Dev, layout: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layout, also in parts of the heads; a block that the pool lacks is left alone."""

    def no_stage(*_: Any) -> None:
        raise AssertionError("nothing is staged")

    monkeypatch.setattr(block_memory, "stage_of", no_stage)
    engine = Engine(gpu, served, layout, parts)
    chain = keys(f"{layout} {parts}", 4)
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        try:
            await engine.connected()
            saved = await engine.save(chain[:3], [1, 4, 6])
            assert (saved.size, saved.refused) == (3 * engine.memory.block_bytes, ())
            finished = await engine.load(chain, [2, 0, 7, 5])
            assert finished.bad_blocks == {5}
            engine.expect({2: 1, 0: 4, 7: 6})
            pool = engine.thread.pool
            assert pool._memory.pinned is None
            moved = 3 * (engine.memory.block_bytes + parts * MARK_BYTES)
            assert pool.counters["direct_write_bytes"] == moved
            assert pool.counters["direct_read_bytes"] == moved
            assert any(isinstance(one, FakeTensor) for one in gpu.registered)
        finally:
            await engine.close()


async def test_what_the_engine_still_computes_is_waited_for(gpu: FakeGpu, served: dev.Dev) -> None:
    """A save takes what the step has computed, a load comes after the blocks' last user."""
    engine = Engine(gpu, served, "LBHNC")
    chain = keys("computing", 2)
    stream = torch.cuda.Stream(torch.device("cuda", 0))
    with torch.cuda.stream(stream):
        try:
            await engine.connected()
            late = gpu.tensor(bytes(engine.host.numpy()))
            engine.device.zero_()
            engine.device.copy_(late)  # runs when it is waited for
            seen = gpu.tensor(bytes(len(late)))
            assert not (await engine.save(chain, [1, 4])).refused
            seen.copy_(engine.device)
            assert (await engine.load(chain, [2, 0])).loaded
            assert gpu.content(seen) == gpu.content(late)
            engine.expect({2: 1, 0: 4})
        finally:
            await engine.close()


async def test_a_rank_has_a_context_on_its_own_device_only(
    gpu: FakeGpu, served: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a GB of the first device for each rank, else."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    torch.cuda.set_device(1)
    engine = Engine(gpu, served, "BLHNC", device=1)
    chain = keys("second device", 2)
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 1))):
        try:
            await engine.connected()
            assert not (await engine.save(chain, [1, 4])).refused
            assert (await engine.load(chain, [2, 0])).loaded
            engine.expect({2: 1, 0: 4})
            await engine.memory.host_source(2, engine.memory.record_event())
        finally:
            await engine.close()
    assert gpu.contexts == {torch.device("cuda", 1)}


async def test_computed_blocks_are_compared_on_the_host(gpu: FakeGpu, served: dev.Dev) -> None:
    engine = Engine(gpu, served, "LHBNC")
    chain = keys("compared", 2)
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        try:
            await engine.connected()
            await engine.save(chain, [1, 4])
            host = block_memory.HostBlockMemory(engine.views, [engine.host])
            ours = await engine.memory.host_source(4, engine.memory.record_event())
            theirs = await host.host_source(4, None)
            assert b"".join(map(bytes, ours)) == b"".join(map(bytes, theirs))
            blocks = GroupBlocks(0, tuple(chain[1:]), (4,))
            engine.worker.start_saves(engine.work(verify=VerifyRequest(3, (blocks,), 5.0)))
            (verified,) = await engine._report("verified")
            assert verified.job == 3
        finally:
            await engine.close()


# --- which memory is chosen ---------------------------------------------------------------------


def test_memory_of_the_host_is_used_in_place_whatever_is_set() -> None:
    layers = caches(LAYOUTS["LBHNC"], SHAPE)
    assert isinstance(memory_of(layers, direct=True), block_memory.HostBlockMemory)


def test_blocks_too_large_for_the_client_are_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = block_memory.DeviceStage(torch.device("cpu"), 4096)
    monkeypatch.setattr(block_memory, "stage_of", lambda device: stage)
    layers = {name: one.to("meta") for name, one in caches(LAYOUTS["LBHNC"], SHAPE).items()}
    assert isinstance(memory_of(layers, direct=True), DirectBlockMemory)
    assert isinstance(memory_of(layers), DeviceBlockMemory)
    block = LAYERS * HEADS * TOKENS * CONTENT * 2
    monkeypatch.setattr(block_memory, "DIRECT_PIECES_MAX", block - 1)
    assert isinstance(memory_of(layers, direct=True), DeviceBlockMemory)
    assert isinstance(memory_of(layers, 2, direct=True), DirectBlockMemory)


def test_a_path_that_is_none() -> None:
    given = {"masters": ["127.0.0.1:1"], "device_path": "dirct"}
    with pytest.raises(ConfigError, match=r"device_path is 'dirct'.*did you mean 'direct'"):
        settings.parse(given)
    chosen = settings.parse({"masters": ["127.0.0.1:1"], "device_path": "direct"})
    assert chosen.client().device_path == "direct"


async def test_the_clients_memory_is_taken_before_the_engine_measures(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives the rest of the device to its KV cache: later there is none."""
    replaced = pytest.importorskip("kvpool_connector.vllm_engine.replaced", reason="needs vLLM")
    taken: list[Any] = []
    monkeypatch.setattr(direct, "_reserved", {})
    monkeypatch.setattr(direct, "_allocate", lambda device: taken.append(device) or object())
    monkeypatch.setattr(direct, "_compile", lambda device: taken.append("kernels"))
    transfer = SimpleNamespace(
        kv_connector=settings.CONNECTOR, kv_connector_extra_config={"device_path": "direct"}
    )
    wrapper = SimpleNamespace(
        worker=SimpleNamespace(device=torch.device("cuda", 0)),
        vllm_config=SimpleNamespace(kv_transfer_config=transfer),
    )
    replaced._reserve(lambda wrapper: None, wrapper)
    assert taken == [torch.device("cuda", 0)] * 2 + ["kernels"]


def test_kernels_of_both_kinds_are_compiled_where_memory_is_taken(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For rows of whole words, and for rows that begin anywhere: nothing is left for a call."""
    hashed, copied = [], []
    monkeypatch.setattr(direct, "_reserved", {})
    monkeypatch.setattr(direct, "hash_rows", lambda rows, seeds: hashed.extend(rows))
    monkeypatch.setattr(direct, "copy_rows", lambda *rows: copied.extend(rows[0] + rows[1]))
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        direct.reserve_device_memory(device)
    for rows in (hashed, copied):
        assert {row.data_ptr() % 8 == 0 for row in rows} == {True, False}
        assert all(len(row) > SHORT for row in rows)


async def test_a_client_uses_what_was_taken_for_it(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(direct, "_reserved", {})
    with torch.cuda.stream(torch.cuda.Stream(device)):
        direct.reserve_device_memory(device)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        direct.reserve_device_memory(torch.device("cuda"))
    (reserved,) = [list(memories) for memories in direct._reserved.values()]
    reads, writes, others = direct.Devices(), direct.Devices(), direct.Devices()
    until = asyncio.get_running_loop().time() + 9
    there = {memory.data_ptr() for memory in reserved}
    async with reads.scratch(device, 1, until) as one, writes.scratch(device, 1, until) as other:
        assert {one.data_ptr(), other.data_ptr()} == there
        async with others.scratch(device, 1, until) as third:
            assert third.data_ptr() not in there
    for devices in (reads, writes, others):
        devices.close()
