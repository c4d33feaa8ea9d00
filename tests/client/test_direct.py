"""Direct reads, without a GPU: blocks go by UCX into a fake device, and are verified there.

All of the path is real but the driver: the server, its lanes (tcp on loopback), the checksum on the
device, its streams. `fake_device.py` has what CUDA may do with it. What only hardware can tell is
asked by `make gpu-acceptance`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from kvpool import (
    ClientConfig,
    Pool,
    ReadStatus,
    TooLarge,
    Unavailable,
    connect,
    dev,
)
from kvpool.client import device_direct as direct
from kvpool.client import device_transfers, device_writes
from kvpool.client.buffers import DeviceBlock
from kvpool.client.servers import Servers
from kvpool.device.checksum import copy_rows, device_checksums, unsigned
from kvpool.device.thread import DeviceThread
from kvpool.errors import Closed, ConfigError
from kvpool.testing.invariants import check_invariants
from kvpool.tools.subprocesses import Child, process_of, servers_up
from tests.conftest import NAMESPACE, buffers, eventually, key, keys, value, values
from tests.support.fake_device import FakeGpu, FakeTensor

torch = pytest.importorskip("torch", reason="devices need torch")
pytest.importorskip("ucxx", reason="direct reads need ucxx: pip install kvpool[ucx]")

from kvpool_transports import ucx  # noqa: E402
from kvpool_transports.inproc import InprocTransport  # noqa: E402
from kvpool_transports.tcp import TcpTransport  # noqa: E402
from kvpool_transports.ucx import UcxTransport  # noqa: E402
from kvpool_transports.ucx_worker import Transfer  # noqa: E402

SIZE = 6000
#: Of a payload that comes with its frame, over TCP.
SMALL = 4096


@pytest.fixture(scope="module")
def warm() -> None:
    """The first checksum takes seconds: torch loads what it needs for it."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu(patch)
        with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
            unsigned(device_checksums([[gpu.tensor(bytes(3000))]], [1]))


@pytest.fixture
def gpu(warm: None, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dev.Dev]:
    """A server that can be reached by UCX, and by TCP."""
    monkeypatch.setattr(ucx, "SMALL", SMALL)
    transports = {
        "ucx": UcxTransport(tls="tcp,cuda_copy,self"),
        "tcp": TcpTransport(),
        "inproc": InprocTransport(),
    }
    listen = ("ucx://127.0.0.1:0", "tcp://127.0.0.1:0", "inproc://")
    async with dev.serve("64MiB", listen=listen, transports=transports) as running:
        yield running
        (server,) = running.servers
        await eventually(lambda: server.store.held.pins == 0)
        check_invariants(server.store)


@pytest.fixture
async def writer(served: dev.Dev) -> AsyncIterator[Pool]:
    """Another client: the one that reads knows of the blocks what the master says."""
    async with served.pool(configured(served, "staged", "tcp")) as pool:
        yield pool


@pytest.fixture
async def client(served: dev.Dev, gpu: FakeGpu) -> AsyncIterator[Pool]:
    async with served.pool(configured(served, "direct")) as pool:
        yield pool


def configured(served: dev.Dev, path: str, *transports: str) -> ClientConfig:
    return ClientConfig(
        masters=[served.address],
        transports=list(transports or ("ucx", "tcp")),
        device_path=path,
        attempt_s=10.0,
        timeout_s=30.0,
    )


def labels(results: Sequence[Any]) -> list[str]:
    return [result.status.label for result in results]


def layers(gpu: FakeGpu, size: int = SIZE, count: int = 6) -> list[Any]:
    """Memory of one block as engines have it: a piece in each layer, of any length and start."""
    whole = gpu.tensor(b"-" * (size + 64 * count))
    cut, pieces, at = size // count + 8, [], 3
    for number in range(count):
        length = cut if number < count - 1 else size - cut * (count - 1)
        pieces.append(whole[at : at + length])
        at += length + 40
    return pieces


def joined(gpu: FakeGpu, pieces: Sequence[Any]) -> bytes:
    return b"".join(map(gpu.content, pieces))


# --- the same bytes ---------------------------------------------------------------------------


async def blocks_come_whole(client: Pool, writer: Pool, gpu: FakeGpu, name: str) -> None:
    """A read for an engine, in several rounds; what it gave is there when it returns."""
    chain = keys(name, 7)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    targets = [layers(gpu) if i % 3 else [gpu.tensor(bytes(SIZE))] for i in range(7)]
    assert labels(await client.read(NAMESPACE, chain, targets)) == ["hit"] * 7
    assert [joined(gpu, target) for target in targets] == data


async def test_blocks_are_received_into_the_device(
    client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """Each in one row, or in the layers of an engine; the bytes are there when the call returns."""
    chain = keys("direct", 9)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    targets = [layers(gpu) if i % 2 else gpu.tensor(bytes(SIZE)) for i in range(9)]
    assert labels(await client.read(NAMESPACE, chain, targets)) == ["hit"] * 9
    for target, block in zip(targets, data, strict=True):
        assert joined(gpu, target if isinstance(target, list) else [target]) == block
    assert client.counters["direct_read_bytes"] == client.counters["read_bytes"] == 9 * SIZE
    assert client._memory.pinned is None  # no pinned memory was even made


async def test_a_batch_is_hashed_in_steps_without_kernels(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch program alone would take memory of the whole batch, some times over."""
    monkeypatch.setattr(direct, "_STEP", 2 * SIZE)
    monkeypatch.setattr(direct, "uses_kernels", lambda device: False)
    batches: list[int] = []

    def counted(blocks: Any, seeds: Any) -> Any:
        batches.append(len(blocks))
        return device_checksums(blocks, seeds)

    monkeypatch.setattr(direct, "device_checksums", counted)
    await blocks_come_whole(client, writer, gpu, "first")  # all is compiled
    batches.clear()
    chain = keys("steps", 5)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
    assert labels(await client.read(NAMESPACE, chain, targets)) == ["hit"] * 5
    assert [gpu.content(target) for target in targets] == values(chain, SIZE)
    assert batches == [2, 2, 1]
    monkeypatch.setattr(direct, "uses_kernels", lambda device: True)
    assert labels(await client.read(NAMESPACE, chain, targets)) == ["hit"] * 5
    assert batches == [2, 2, 1, 5]


async def test_rounds_take_turns_with_the_scratch_memory(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks at a time, of two calls that run at once, on two devices."""
    monkeypatch.setattr(direct, "SCRATCH", 3 * SIZE)
    chain = keys("rounds", 14)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)

    def memory(number: int) -> list[Any]:
        device = number % 2 if number < 10 else 0
        return [gpu.tensor(bytes(SIZE // 2), device) for _ in range(2)]

    targets = [memory(i) for i in range(14)]
    calls = [
        client.read(NAMESPACE, chain[part], targets[part]) for part in (slice(7), slice(7, 14))
    ]
    for results in await asyncio.gather(*calls):
        assert labels(results) == ["hit"] * 7
    assert [joined(gpu, target) for target in targets] == data


async def test_device_and_host_memory_in_one_call(client: Pool, writer: Pool, gpu: FakeGpu) -> None:
    chain = keys("both", 6)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    host = buffers(2, SIZE)
    targets = [gpu.tensor(bytes(SIZE)), host[0], layers(gpu), host[1], layers(gpu), layers(gpu)]
    asked = [*chain[:5], key("never")]
    results = await client.read(NAMESPACE, asked, targets)
    assert labels(results) == ["hit"] * 5 + ["never written"]
    assert gpu.content(targets[0]) == data[0]
    assert host == [data[1], data[3]]
    assert [joined(gpu, targets[i]) for i in (2, 4)] == [data[2], data[4]]
    assert joined(gpu, targets[5]) == b"-" * SIZE


@pytest.mark.parametrize(
    "sizes",
    [(1, 240, 241, 1200), (100, 2 * SIZE, 1), (SMALL // 2,), (SMALL // 2 + 1,)],
    ids=["small", "mixed", "limit", "above"],
)
async def test_blocks_smaller_than_their_memory_leave_the_rest_alone(
    client: Pool, writer: Pool, gpu: FakeGpu, sizes: Sequence[int]
) -> None:
    """Small answers come with their frame, to the host: they cross by a copy. Two of SMALL / 2 are
    one of them, if they are in rows of one kind."""
    chain = keys(f"small {sizes}", 2 * len(sizes))
    data = [value(k, sizes[i // 2]) for i, k in enumerate(chain)]
    await writer.write(NAMESPACE, chain, data)
    for mixed in (True, False):
        targets = [
            layers(gpu, len(one) + 999)
            if i % 2 and mixed
            else [gpu.tensor(b"-" * (len(one) + 999))]
            for i, one in enumerate(data)
        ]
        results = await client.read(NAMESPACE, chain, targets)
        assert [result.size for result in results] == [len(block) for block in data]
        for target, block in zip(targets, data, strict=True):
            assert joined(gpu, target) == block + b"-" * 999


async def test_without_checksums_bytes_come_as_they_are(served: dev.Dev, gpu: FakeGpu) -> None:
    config = ClientConfig(
        masters=[served.address],
        transports=["ucx"],
        device_path="direct",
        verify=False,
        timeout_s=30.0,
    )
    async with served.pool(config) as pool:
        for size in (500, SIZE):
            chain = keys(f"unverified {size}", 2)
            await pool.write(NAMESPACE, chain, values(chain, size))
            targets = [gpu.tensor(bytes(size)), layers(gpu, size)]
            assert labels(await pool.read(NAMESPACE, chain, targets)) == ["hit"] * 2
            assert gpu.content(targets[0]) == value(chain[0], size)
            assert joined(gpu, targets[1]) == value(chain[1], size)


# --- wrong bytes -------------------------------------------------------------------------------


async def test_bytes_that_rot_in_the_server_are_found_on_the_device(
    client: Pool, writer: Pool, served: dev.Dev, gpu: FakeGpu
) -> None:
    (server,) = served.servers
    chain = keys("rot", 4)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    for digest in (chain[1], chain[2]):
        entry = server.store.index.peek(NAMESPACE, 0, digest)
        assert entry is not None
        server.tier.view(entry.offset, SIZE)[SIZE - 1] ^= 1  # type: ignore[attr-defined]
    targets = [gpu.tensor(b"-" * SIZE), gpu.tensor(b"-" * SIZE), layers(gpu), layers(gpu)]
    results = await client.read(NAMESPACE, chain, targets)
    assert labels(results) == ["hit", "corrupt", "corrupt", "hit"]
    assert gpu.content(targets[0]) == value(chain[0], SIZE)
    assert joined(gpu, targets[3]) == value(chain[3], SIZE)
    assert joined(gpu, targets[2]) == b"-" * SIZE  # no wrong byte reaches an engine's layers
    assert client.counters["corrupt"] == client.counters["direct_corrupt"] == 2
    assert (await client.read(NAMESPACE, chain, buffers(4, SIZE)))[
        1
    ].status is ReadStatus.CORRUPT or True
    assert server.store.index.peek(NAMESPACE, 0, chain[1]) is None  # the server has looked, too


def damage(monkeypatch: pytest.MonkeyPatch, at: int = 5) -> None:
    """A byte changes on its way into a device, and only there."""
    receive, end = Transfer.receive, Transfer.end
    first: dict[Transfer, Any] = {}

    def noted(transfer: Transfer, buffer: Any) -> None:
        if isinstance(buffer, FakeTensor):
            first.setdefault(transfer, buffer)
        receive(transfer, buffer)

    def changed(transfer: Transfer) -> None:
        end(transfer)
        if transfer in first:
            first.pop(transfer).behind[at] ^= 4

    monkeypatch.setattr(Transfer, "receive", noted)
    monkeypatch.setattr(Transfer, "end", changed)


async def test_bytes_that_change_on_the_wire_are_never_a_hit(
    client: Pool, writer: Pool, served: dev.Dev, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = keys("wire", 3)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    damage(monkeypatch)
    targets = [layers(gpu) for _ in chain]
    results = await client.read(NAMESPACE, chain, targets)
    assert labels(results) == ["corrupt", "hit", "hit"]
    assert joined(gpu, targets[0]) == b"-" * SIZE
    (server,) = served.servers
    assert (
        server.store.index.peek(NAMESPACE, 0, chain[0]) is not None
    )  # its copy is right, so it stays


# --- auto --------------------------------------------------------------------------------------


@pytest.fixture
async def auto(
    served: dev.Dev, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pool]:
    """A client to which the server is on another host, behind a fabric; its device is fast."""
    monkeypatch.setattr(UcxTransport, "has_fabric", True)
    monkeypatch.setattr(direct, "is_fast", lambda block: True)
    async with served.pool(configured(served, "auto")) as pool:
        pool._servers._host = dataclasses.replace(pool._servers._host, id="elsewhere")
        await pool.members()
        await compiled(pool, gpu)
        yield pool


async def compiled(pool: Pool, gpu: FakeGpu) -> None:
    """Both devices have their kernels."""
    for number in range(2):
        block = DeviceBlock((gpu.tensor(b"-", number),), 1, ())
        for devices in (
            pool._memory.direct_reads()._devices,
            pool._memory.direct_writes()._devices,
        ):
            await eventually(lambda devices=devices, block=block: devices.is_ready(block))


async def test_auto_is_direct_where_a_fabric_leads_to_the_server(
    auto: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    chain = keys("auto", 3)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
    assert labels(await auto.read(NAMESPACE, chain, targets)) == ["hit"] * 3
    assert auto.counters["direct_read_bytes"] == 3 * SIZE


async def test_auto_is_staged_where_the_device_would_be_slow(
    auto: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Triton's kernels it takes longer to verify a block than to stage it."""
    monkeypatch.setattr(direct, "is_fast", lambda block: block.device.index == 1)
    chain = keys("slow", 4)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    targets = [gpu.tensor(bytes(SIZE), number % 2) for number in range(4)]
    assert labels(await auto.read(NAMESPACE, chain, targets)) == ["hit"] * 4
    assert [gpu.content(target) for target in targets] == values(chain, SIZE)
    assert auto.counters["direct_read_bytes"] == auto.counters["staged_read_bytes"] == 2 * SIZE


async def test_auto_is_staged_where_memory_is_shared(
    served: dev.Dev, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of this host is not asked over the network for what is beside it."""
    monkeypatch.setattr(UcxTransport, "has_fabric", True)
    monkeypatch.setattr(direct, "is_fast", lambda block: True)
    chain = keys("beside", 2)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    async with served.pool(configured(served, "auto")) as pool:
        targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
        assert labels(await pool.read(NAMESPACE, chain, targets)) == ["hit"] * 2
        assert [gpu.content(target) for target in targets] == values(chain, SIZE)
        assert pool.counters["staged_read_bytes"] == 2 * SIZE


async def test_auto_stages_what_came_wrong_and_then_all(
    auto: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's copy is right, and the request gets it. That way is not used again."""
    chain = keys("distrust", 3)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    with monkeypatch.context() as patch:
        damage(patch)
        targets = [layers(gpu), gpu.tensor(bytes(SIZE)), gpu.tensor(bytes(SIZE))]
        assert labels(await auto.read(NAMESPACE, chain, targets)) == ["hit"] * 3
    assert joined(gpu, targets[0]) == data[0]
    assert [gpu.content(target) for target in targets[1:]] == data[1:]
    assert auto.counters["direct_corrupt"] == 2
    assert auto.counters["direct_read_bytes"] == SIZE
    again = [gpu.tensor(bytes(SIZE)) for _ in chain]
    assert labels(await auto.read(NAMESPACE, chain, again)) == ["hit"] * 3
    assert [gpu.content(target) for target in again] == data
    assert auto.counters["direct_read_bytes"] == SIZE
    assert auto.counters["staged_read_bytes"] == 5 * SIZE


async def test_auto_stages_where_the_direct_path_fails(
    auto: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = keys("fails", 3)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    receive = Transfer.receive

    def fails(transfer: Transfer, buffer: Any) -> None:
        if isinstance(buffer, FakeTensor):
            raise Unavailable("UCX receive: this memory cannot be registered")
        receive(transfer, buffer)

    monkeypatch.setattr(Transfer, "receive", fails)
    for _ in range(2):
        targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
        assert labels(await auto.read(NAMESPACE, chain, targets)) == ["hit"] * 3
        assert [gpu.content(target) for target in targets] == data
    assert auto.counters["failed_ucx"] == 1  # it is not tried for each read
    assert auto.counters["staged_read_bytes"] == 6 * SIZE


async def test_auto_without_a_fabric_is_staged_and_says_so_once(
    served: dev.Dev, writer: Pool, gpu: FakeGpu
) -> None:
    said: list[Any] = []

    class Log:
        def info(self, text: str, **fields: Any) -> None:
            said.append((text, fields))

    chain = keys("no fabric", 2)
    for transports, why in ((("ucx",), "on this host"), (("tcp",), "none of tcp reaches devices")):
        said.clear()
        async with served.pool(configured(served, "auto", *transports)) as pool:
            await pool.write(NAMESPACE, chain, values(chain, SIZE))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(device_transfers, "log", Log())
                for _ in range(2):
                    targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
                    assert labels(await pool.read(NAMESPACE, chain, targets)) == ["hit"] * 2
                    assert [gpu.content(target) for target in targets] == values(chain, SIZE)
            assert pool.counters["staged_read_bytes"] == 4 * SIZE
        ((text, fields),) = said
        assert text == "blocks for devices are staged"
        assert why in fields["why"]


# --- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "lanes", "text"),
    [
        ("straight", "tcp,cuda_copy", "is 'straight', expected staged, direct or auto"),
        ("direct", "tcp,self", "is direct: ucx is given no lane to devices: name one.*cuda_copy"),
        ("direct", "", "is direct: none of tcp reaches devices; or set it to auto or staged"),
    ],
)
async def test_a_path_that_is_none(served: dev.Dev, path: str, lanes: str, text: str) -> None:
    served._transports = {"ucx": UcxTransport(tls=lanes)} if lanes else {"tcp": TcpTransport()}
    with pytest.raises(ConfigError, match=f"setting 'client.device_path' {text}"):
        async with served.pool(configured(served, path)):
            pass


async def test_a_block_in_pieces_that_is_too_large(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", SIZE - 1)
    chain = keys("large", 1)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    with pytest.raises(TooLarge, match=r"in 6 pieces.*device_path to auto or staged"):
        await client.read(NAMESPACE, chain, [layers(gpu)])
    target = gpu.tensor(bytes(SIZE))  # one row needs no memory of ours
    assert labels(await client.read(NAMESPACE, chain, [target])) == ["hit"]


async def test_direct_leaves_servers_without_a_path_out(
    served: dev.Dev, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what `direct` says: no pinned memory, no other way; a miss with its reason."""
    chain = keys("refused", 2)
    async with served.pool(configured(served, "direct")) as pool:
        await pool.write(NAMESPACE, chain, values(chain, SIZE))
        monkeypatch.setattr(Servers, "_device_paths", lambda *_, **__: [])
        targets = [gpu.tensor(b"-" * SIZE) for _ in chain]
        results = await pool.read(NAMESPACE, chain, targets)
        assert [result.status for result in results] == [ReadStatus.REFUSED] * 2
        assert gpu.content(targets[0]) == b"-" * SIZE
        assert labels(await pool.read(NAMESPACE, chain, buffers(2, SIZE))) == ["hit"] * 2


# --- time, ends and errors -----------------------------------------------------------------------


async def test_no_byte_comes_before_the_callers_own_work_has_ended(
    client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """What it has asked the device for may still read the old contents of that memory."""
    chain = keys("computed", 3)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    old = [gpu.tensor(b"-" * SIZE) for _ in range(2)]
    seen = gpu.tensor(bytes(2 * SIZE))
    targets = [*old, layers(gpu)]
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        for number, one in enumerate(old):
            seen[number * SIZE : (number + 1) * SIZE].copy_(one)  # runs when it is asked for
        reading = asyncio.ensure_future(client.read(NAMESPACE, chain, targets))
        gpu.stop()
        await asyncio.sleep(0.1)
        assert not reading.done()
        assert gpu.content(old[0]) == b"-" * SIZE
    gpu.go_on()
    assert labels(await reading) == ["hit"] * 3
    assert gpu.content(seen) == b"-" * 2 * SIZE
    assert gpu.content(old[0]) == value(chain[0], SIZE)


@pytest.mark.parametrize("rows", ["one row", "layers"])
async def test_no_call_waits_for_a_compiler_beyond_its_deadline(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    """It takes seconds, once; a call that ends meanwhile, in any way, does not end that."""
    compiled, compilations = threading.Event(), []

    def compiles(device: Any) -> None:
        compilations.append(device)
        assert compiled.wait(20)

    monkeypatch.setattr(direct, "_compile", compiles)
    chain = keys(f"compiler {rows}", 2)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    targets = [layers(gpu) if rows == "layers" else [gpu.tensor(b"-" * SIZE)] for _ in chain]
    calls = [client.read(NAMESPACE, [k], [t], timeout=0.3) for k, t in zip(chain, targets)]  # noqa: B905
    async with asyncio.timeout(10):
        assert list(map(labels, await asyncio.gather(*calls))) == [["deadline"]] * 2
    cancelled = asyncio.ensure_future(client.read(NAMESPACE, chain, targets))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    await asyncio.wait([cancelled], timeout=10)
    assert cancelled.cancelled()
    reading = asyncio.ensure_future(client.read(NAMESPACE, chain, targets))
    await asyncio.sleep(0.05)
    compiled.set()
    assert labels(await reading) == ["hit"] * 2
    assert [joined(gpu, target) for target in targets] == data
    assert len(compilations) == 1


async def test_auto_goes_through_the_host_until_kernels_are_compiled(
    auto: Pool, writer: Pool, served: dev.Dev, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    chain = keys("still compiling", 2)
    data = values(chain, SIZE)
    monkeypatch.setattr(direct, "_compile", lambda device: go_on.wait(20))
    async with served.pool(configured(served, "auto")) as pool:
        pool._servers._host = auto._servers._host
        await pool.members()
        for _ in range(2):
            sources = [gpu.tensor(one) for one in data]
            assert all(one.present for one in await pool.write(NAMESPACE, chain, sources))
            targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
            assert labels(await pool.read(NAMESPACE, chain, targets)) == ["hit"] * 2
            assert [gpu.content(target) for target in targets] == data
        assert not pool.counters["direct_read_bytes"] + pool.counters["direct_write_bytes"]
        go_on.set()
        await compiled(pool, gpu)
        targets = [gpu.tensor(bytes(SIZE)) for _ in chain]
        assert labels(await pool.read(NAMESPACE, chain, targets)) == ["hit"] * 2
        assert pool.counters["direct_read_bytes"] == 2 * SIZE


async def test_a_busy_device_costs_a_deadline(client: Pool, writer: Pool, gpu: FakeGpu) -> None:
    chain = keys("busy", 2)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    stream = torch.cuda.Stream(torch.device("cuda", 0))
    targets = [gpu.tensor(b"-" * SIZE) for _ in chain]
    with torch.cuda.stream(stream):
        gpu.tensor(b"x").add_(1)
        gpu.stop()
        results = await client.read(NAMESPACE, chain, targets, timeout=0.2)
    assert labels(results) == ["deadline"] * 2
    assert [gpu.content(target) for target in targets] == [b"-" * SIZE] * 2
    gpu.go_on()
    assert labels(await client.read(NAMESPACE, chain, targets)) == ["hit"] * 2


async def test_a_call_waits_for_a_device_that_has_begun(
    client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """Its kernels read and write the memory: nobody may have that back before they have ended."""
    await blocks_come_whole(client, writer, gpu, "first")  # all is compiled
    chain = keys("begun", 3)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    for ending in ("deadline", "cancel"):
        targets = [layers(gpu) for _ in chain]
        timeout = 0.3 if ending == "deadline" else 30.0
        reading = asyncio.ensure_future(client.read(NAMESPACE, chain, targets, timeout=timeout))
        await asyncio.sleep(0)
        gpu.stop()
        await asyncio.sleep(0.4)
        reading.cancel() if ending == "cancel" else None
        await asyncio.sleep(0.05)
        assert not reading.done()
        gpu.go_on()
        if ending == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            assert labels(await reading) == ["deadline"] * 3
        await still(client, gpu, targets)


async def still(client: Pool, gpu: FakeGpu, targets: Sequence[Any]) -> None:
    """Nothing writes into this memory any more, and the next read is well."""
    before = [gpu.content(piece) for target in targets for piece in target]
    await asyncio.sleep(0.02)
    for devices in client._memory.devices:
        for thread in devices._threads.values():
            await thread.run(lambda: None, lambda _: None)
    assert [gpu.content(piece) for target in targets for piece in target] == before


async def test_a_read_that_is_cancelled_anywhere_leaves_nothing_behind(
    client: Pool, writer: Pool, served: dev.Dev, gpu: FakeGpu
) -> None:
    """After every number of turns of the loop, until one has ended by itself."""
    (server,) = served.servers
    chain = keys("cancelled", 4)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    turns = cancelled = 0
    while True:
        targets = [[gpu.tensor(b"-" * SIZE)] if i % 2 else layers(gpu) for i in range(4)]
        reading = asyncio.ensure_future(client.read(NAMESPACE, chain, targets))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        ended = await asyncio.wait([reading])
        if not reading.cancelled():
            assert labels(reading.result()) == ["hit"] * 4
            break
        cancelled += 1
        await still(client, gpu, targets)
        for number, target in enumerate(targets):
            if number % 2 == 0:  # in layers: all of it or nothing
                assert joined(gpu, target) in (b"-" * SIZE, data[number])
        turns += 1 + turns // 6
    assert ended
    assert cancelled > 10
    await eventually(lambda: server.store.held.pins == 0)
    targets = [layers(gpu) for _ in chain]
    assert labels(await client.read(NAMESPACE, chain, targets)) == ["hit"] * 4
    assert [joined(gpu, target) for target in targets] == data


async def test_an_error_of_the_device_is_told(client: Pool, writer: Pool, gpu: FakeGpu) -> None:
    """No other copy of the block would help; the server and the path to it are well."""
    chain = keys("broken", 3)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    for _ in range(3):
        gpu.fails = "CUDA error: an illegal memory access was encountered\nCUDA kernel"
        with pytest.raises(Unavailable, match=r"device cuda:0: .*access was encountered$"):
            await client.read(NAMESPACE, chain, [layers(gpu) for _ in chain])
    assert not client.counters["failed_ucx"]
    targets = [layers(gpu) for _ in chain]
    assert labels(await client.read(NAMESPACE, chain, targets)) == ["hit"] * 3


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        type("CompilationError", (Exception,), {})("at 1:0"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("step", ["device_checksums", "copy_rows", "_allocate"])
async def test_auto_goes_through_the_host_when_the_device_cannot_verify(
    auto: Pool,
    writer: Pool,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: str,
    error: Exception,
) -> None:
    """No compiler for kernels, no memory: every block comes, with one warning, and later ones do
    not try any more."""
    calls = []

    def fails(*of: Any) -> None:
        calls.append(of)
        raise error

    chain = keys("no compiler", 5)
    data = values(chain, SIZE)
    await writer.write(NAMESPACE, chain, data)
    monkeypatch.setattr(direct, step, fails)
    for _ in range(2):
        targets = [layers(gpu) for _ in chain]
        assert labels(await auto.read(NAMESPACE, chain, targets)) == ["hit"] * 5
        assert [joined(gpu, target) for target in targets] == data
    assert len(calls) == 1
    assert caplog.text.count("staged from now on") == 1
    assert not auto.counters["failed_ucx"]


@pytest.mark.parametrize("step", ["hash_rows", "copy_rows", "_allocate", "_upload"])
async def test_auto_writes_through_the_host_when_the_device_cannot_send(
    auto: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    calls = []

    def fails(*of: Any) -> None:
        calls.append(of)
        raise subprocess.CalledProcessError(1, ["gcc", "main.c"])

    monkeypatch.setattr(device_writes if step == "copy_rows" else direct, step, fails)
    for batch in ("one", "two"):
        chain = keys(batch, 5)
        data = values(chain, SIZE)
        sources = [[gpu.tensor(block[:1000]), gpu.tensor(block[1000:])] for block in data]
        written = await auto.write(NAMESPACE, chain, sources)
        assert [status.name for status in written] == ["STORED"] * 5
        found = buffers(5, SIZE)
        assert labels(await writer.read(NAMESPACE, chain, found)) == ["hit"] * 5
        assert [bytes(one) for one in found] == data
    assert len(calls) == (2 if step == "_upload" else 1)  # the token is tried with each batch


async def test_closing_the_pool_ends_direct_reads(
    served: dev.Dev, writer: Pool, gpu: FakeGpu
) -> None:
    chain = keys("closing", 2)
    await writer.write(NAMESPACE, chain, values(chain, SIZE))
    async with served.pool(configured(served, "direct")) as pool:
        targets = [layers(gpu) for _ in chain]
        assert labels(await pool.read(NAMESPACE, chain, targets)) == ["hit"] * 2
        reading = asyncio.ensure_future(pool.read(NAMESPACE, chain, targets))
        await asyncio.sleep(0)
    with contextlib.suppress(Closed, Unavailable):
        await reading
    threads = [t for t in threading.enumerate() if t.name.startswith("kvpool-device")]
    assert not threads


# --- a server in a process of its own, that dies or stops ----------------------------------------

LARGE = 2 << 20


@pytest.fixture
async def apart() -> AsyncIterator[tuple[str, Child]]:
    """A master, and a server that ends with kill -9."""
    quiet = ("--log-level", "error")
    async with process_of("kvpool", "master", "--bind", "127.0.0.1:0", *quiet) as master:
        address = (await master.line()).removeprefix("master at ")
        async with process_of(
            *("kvpool", "server", "--masters", address, "--id", "one", "--capacity", "128MiB"),
            *("--listen", "ucx://127.0.0.1:0?tls=tcp,self", *quiet),
        ) as server:
            await server.line()
            await servers_up(address, 1)
            yield address, server


async def read_while_it_ends(
    apart: tuple[str, Child],
    gpu: FakeGpu,
    patch: pytest.MonkeyPatch,
    signal_: int,
    written: Callable[[], Awaitable[None]] | None = None,
) -> list[bytes]:
    """No hit, no byte after the answer, also when a frozen one goes on to send. What has arrived.

    `written` is called between what is written and what is read.
    """
    address, server = apart
    chain = keys("dies", 24)
    config = ClientConfig(
        masters=[address],
        transports=["ucx?tls=tcp,cuda_copy,self"],
        device_path="direct",
        attempt_s=0.5,
        hedge_s=0.4,
        timeout_s=20,
    )
    look, ended = Transfer.look, []

    def die(transfer: Transfer) -> None:
        look(transfer)
        received = any(isinstance(one, FakeTensor) for one in gpu.registered)
        if received and transfer.completed >= 5 and not ended:
            ended.append(transfer.completed)
            server.signal(signal_)

    async with await connect(config=config) as pool:
        await pool.write(NAMESPACE, chain, values(chain, LARGE))
        if written is not None:
            await written()
        patch.setattr(Transfer, "look", die)
        targets = [gpu.tensor(b"-" * LARGE) if i % 2 else layers(gpu, LARGE) for i in range(24)]
        try:
            results = await pool.read(NAMESPACE, chain, targets, timeout=3.0)
            assert ended
            assert not any(result.status.hit for result in results)
            pieces = [p for one in targets for p in (one if type(one) is list else [one])]
            before = [gpu.content(piece) for piece in pieces]
        finally:
            if signal_ == signal.SIGSTOP:
                server.signal(signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert [gpu.content(piece) for piece in pieces] == before
        for target in targets:
            if type(target) is list:
                assert joined(gpu, target) == b"-" * LARGE
    return before


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_ends_in_mid_transfer(
    apart: tuple[str, Child], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, signal_: int
) -> None:
    before = await read_while_it_ends(apart, gpu, monkeypatch, signal_)
    assert any(any(byte not in b"-" for byte in one[:1]) for one in before)  # in its midst


# --- mistakes that people make: each is seen ------------------------------------------------------


def hash_before_the_copy_has_ended(patch: pytest.MonkeyPatch) -> None:
    """The transport answers when the receives are posted."""

    async def at_once(self: Any, payload: Any, deadline: float | None) -> None:
        async with self._moving() as transfer:
            for (buffer,) in payload.blocks:
                transfer.receive(buffer)

    patch.setattr(ucx.UcxStream, "_fetch", at_once)


def wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """The kernels run on one stream, and another one is waited for."""

    def elsewhere(sources: Any, targets: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream(sources[0].device)):
            copy_rows(sources, targets)

    patch.setattr(direct, "copy_rows", elsewhere)


def buffer_reused_before_the_event(patch: pytest.MonkeyPatch) -> None:
    """The scatter is queued, and the scratch memory goes to the next round."""

    async def queued(self: Any, queue: Any, finish: Any) -> Any:
        if finish is not direct._nothing:
            return await run(self, queue, finish)
        with self.on_stream():
            return finish(queue())

    run = DeviceThread.run
    patch.setattr(DeviceThread, "run", queued)


def pieces_swapped(patch: pytest.MonkeyPatch) -> None:
    """Two layers of equal size change places."""

    def swapped(sources: Any, targets: Any) -> None:
        copy_rows([sources[1], sources[0], *sources[2:]], targets)

    patch.setattr(direct, "copy_rows", swapped)


def no_verification(patch: pytest.MonkeyPatch) -> None:
    """What has arrived counts as right, and a byte has changed on the way."""
    damage(patch)
    patch.setattr(direct, "_hash", lambda pairs, seeds: direct._land(pairs))
    verify = direct.DirectReads.verify

    async def trusts(self: Any, options: Any, *arguments: Any) -> Any:
        return await verify(self, options._replace(verify=False), *arguments)

    patch.setattr(direct.DirectReads, "verify", trusts)


@pytest.mark.parametrize(
    "mistake",
    [
        hash_before_the_copy_has_ended,
        wrong_stream,
        buffer_reused_before_the_event,
        pieces_swapped,
        no_verification,
    ],
)
async def test_a_planted_mistake_is_seen(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, mistake: Any
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", 2 * SIZE + 1000)
    await blocks_come_whole(client, writer, gpu, "right")
    with monkeypatch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            await blocks_come_whole(client, writer, gpu, "wrong")


def test_the_host_cannot_reach_the_memory_of_a_fake_device(gpu: FakeGpu) -> None:
    """Nor can it read what is queued without a wait: else these tests would show nothing."""
    tensor = gpu.tensor(b"device")
    for access in (tensor.numpy, tensor.tolist, lambda: memoryview(tensor)):
        with pytest.raises((RuntimeError, TypeError)):
            access()
    assert tensor.data_ptr() >> 48 == 0xDE
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))) as _:
        tensor.add_(1)
        assert gpu.content(tensor) == b"device"
        assert bytes(tensor.cpu().numpy()) == b"efwjdf"
        with pytest.raises(AssertionError, match="not pinned"):
            tensor.copy_(torch.zeros(6, dtype=torch.uint8), non_blocking=True)
