"""Blocks from and to memory of a real GPU, over processes. Skipped where there is none.

The ordering of copies is tested without one (test_device.py); here it is that CUDA does what is
believed of it there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvpool import ClientConfig, Pool, ReadStatus, WriteStatus, connect, dev
from kvpool.tools.subprocesses import servers_up
from kvpool_tiers.hbm import Hbm
from tests.conftest import NAMESPACE, UCX, buffers, keys, values
from tests.support.processes import script
from tests.support.programs import master_and_server

torch = pytest.importorskip("torch", reason="devices need torch")
if not torch.cuda.is_available():
    pytest.skip(f"needs a GPU: torch {torch.__version__} finds none", allow_module_level=True)

DEVICE = "cuda"
SIZE, COUNT = 3 << 20, 24  # several rounds, and no multiple of any step

OTHER = """
    import asyncio, sys, torch, kvpool
    from tests.conftest import NAMESPACE, keys, values

    async def main(master, scheme):
        chain = keys("gpu", {count})
        data = [torch.frombuffer(bytearray(b), dtype=torch.uint8).to("{device}")
                for b in values(chain, {size})]
        config = kvpool.ClientConfig(masters=[master], transports=[scheme])
        async with await kvpool.connect(config=config) as pool:
            statuses = await pool.write(NAMESPACE, chain, data)
            print(sorted({{s.name for s in statuses}}), flush=True)

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(params=["shm", "tcp", UCX])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, str]]:
    """A master and a server of their own, by its transport."""
    scheme = request.param
    where = "shm://" if scheme == "shm" else f"{scheme}://127.0.0.1:0"
    async with master_and_server("--listen", where, "--capacity", "256MiB") as (address, _):
        await servers_up(address, 1)
        yield address, scheme


def on_gpu(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)


def content(tensor: Any) -> bytes:
    return bytes(tensor.cpu().numpy())


async def client(place: tuple[str, str]) -> Pool:
    return await connect(config=ClientConfig(masters=[place[0]], transports=[place[1]]))


async def test_hbm_to_hbm_between_two_processes(place: tuple[str, str]) -> None:
    chain = keys("gpu", COUNT)
    other = OTHER.format(count=COUNT, size=SIZE, device=DEVICE)
    async with script(other, *place) as writer:
        assert await writer.line() == "['STORED']"
    async with await client(place) as pool:
        targets = [torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) for _ in chain]
        results = await pool.read(NAMESPACE, chain, targets)
        assert all(result.status.hit for result in results)
        assert [content(target) for target in targets] == values(chain, SIZE)
        assert pool.counters["staged_read_bytes"] == COUNT * SIZE


async def test_hbm_to_the_host_and_back(place: tuple[str, str]) -> None:
    chain = keys("gpu", 4)
    data = values(chain, SIZE)
    async with await client(place) as pool:
        written = await pool.write(NAMESPACE, chain, [on_gpu(block) for block in data])
        assert set(written) == {WriteStatus.STORED}
        got = buffers(4, SIZE)
        assert all(r.status.hit for r in await pool.read(NAMESPACE, chain, got))
        assert got == data


async def test_a_write_waits_for_what_the_caller_computes(place: tuple[str, str]) -> None:
    """On a stream of its own, which ours knows nothing of; and later work sees what was read."""
    chain = keys("computed", 2)
    async with await client(place) as pool:
        with torch.cuda.stream(torch.cuda.Stream()):
            big = torch.randn(8192, 8192, device=DEVICE)
            block = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
            for _ in range(20):
                big = (big @ big).clamp(-1, 1)
            block += (big[0, 0] * 0 + 7).to(torch.uint8)
            await pool.write(NAMESPACE, chain[:1], [block])
            for _ in range(20):
                big = (big @ big).clamp(-1, 1)
            target = torch.full((SIZE,), 9, dtype=torch.uint8, device=DEVICE)
            (result,) = await pool.read(NAMESPACE, chain[:1], [target])
        assert result.status.hit
        assert int(target.min()) == int(target.max()) == 7
        (missed,) = await pool.read(NAMESPACE, chain[1:], [target])
        assert missed.status is ReadStatus.NEVER_WRITTEN


class Foreign:
    """The same memory, as another library would show it."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._tensor.__cuda_array_interface__, "version": 3, "stream": 1}


async def test_arrays_of_other_libraries_are_used_in_place() -> None:
    chain = keys("foreign", 2)
    data = values(chain, SIZE)
    async with dev.pool("64MiB") as pool:
        await pool.write(NAMESPACE, chain, [Foreign(on_gpu(block)) for block in data])
        tensors = [torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) for _ in chain]
        await pool.read(NAMESPACE, chain, [Foreign(tensor) for tensor in tensors])
        assert [content(tensor) for tensor in tensors] == data


async def test_the_tier_on_a_device() -> None:
    """From and to any memory of the host."""
    tier = Hbm(64 << 20, device=DEVICE)
    data = values(keys("tier", 1), SIZE + 1)[0]
    pinned = torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory()
    await tier.write_from(0, pinned.numpy().data)
    await tier.write_from(32 << 20, memoryview(data))
    for offset in (0, 32 << 20):
        for target in (torch.zeros(SIZE + 1, dtype=torch.uint8).pin_memory(), None):
            got = np.zeros(SIZE + 1, np.uint8) if target is None else target.numpy()
            await tier.read_into(offset, got.data)
            assert got.tobytes() == data
    tier.close()
