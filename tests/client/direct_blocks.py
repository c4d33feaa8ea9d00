"""What tests of direct reads and writes share: a pool over UCX, fake devices, blocks that move.

All of the path is real but the driver: the server, its lanes (tcp on loopback), the checksum on
the device, its streams. `fake_device.py` has what CUDA may do with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import pytest

from kvpool import ClientConfig, Pool, dev
from kvpool.client import device_direct as direct
from kvpool.client.buffers import DeviceBlock
from kvpool.device.checksum import device_checksums, unsigned
from kvpool.testing.invariants import check_invariants
from kvpool.tools.subprocesses import Child, servers_up
from tests.conftest import NAMESPACE, buffers, eventually, keys, value
from tests.support.fake_device import FakeGpu
from tests.support.programs import master_and_server

torch = pytest.importorskip("torch", reason="devices need torch")
pytest.importorskip("ucxx", reason="direct transfers need ucxx: pip install kvpool[ucx]")

from kvpool_transports import ucx  # noqa: E402
from kvpool_transports.inproc import InprocTransport  # noqa: E402
from kvpool_transports.tcp import TcpTransport  # noqa: E402
from kvpool_transports.ucx import UcxTransport  # noqa: E402

SIZE = 6000
#: Of a payload that comes with its frame, over TCP.
SMALL = 4096
#: Of a block that takes a moment.
LARGE = 2 << 20
LISTEN = ("ucx://127.0.0.1:0", "tcp://127.0.0.1:0", "inproc://")


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


def transports() -> dict[str, Any]:
    return {
        "ucx": UcxTransport(tls="tcp,cuda_copy,self"),
        "tcp": TcpTransport(),
        "inproc": InprocTransport(),
    }


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dev.Dev]:
    """A server that can be reached by UCX, and by TCP."""
    monkeypatch.setattr(ucx, "SMALL", SMALL)
    async with dev.serve("64MiB", listen=LISTEN, transports=transports()) as running:
        yield running
        (server,) = running.servers
        await eventually(lambda: server.store.held.pins == server.store.held.reservations == 0)
        check_invariants(server.store)


def configured(served: dev.Dev, path: str, *transports: str, **settings: Any) -> ClientConfig:
    return ClientConfig(
        masters=[served.address],
        transports=list(transports or ("ucx", "tcp")),
        device_path=path,
        **{"attempt_s": 10.0, "timeout_s": 30.0} | settings,
    )


@pytest.fixture
async def writer(served: dev.Dev) -> AsyncIterator[Pool]:
    """Another client: the one that is tested knows of its blocks what the master says."""
    async with served.pool(configured(served, "staged", "tcp")) as pool:
        yield pool


@pytest.fixture
async def client(served: dev.Dev, gpu: FakeGpu) -> AsyncIterator[Pool]:
    async with served.pool(configured(served, "direct")) as pool:
        yield pool


@pytest.fixture(params=["direct", "staged"])
async def either(
    request: pytest.FixtureRequest, served: dev.Dev, gpu: FakeGpu
) -> AsyncIterator[Pool]:
    """Clients whose blocks go straight, and through memory of the host."""
    async with served.pool(configured(served, request.param)) as pool:
        yield pool


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
    memory = pool._memory
    for number in range(2):
        block = DeviceBlock((gpu.tensor(b"-", number),), 1, ())
        for devices in (memory.direct_reads()._devices, memory.direct_writes()._devices):
            await eventually(partial(devices.is_ready, block))


@pytest.fixture
async def apart() -> AsyncIterator[tuple[str, Child]]:
    """A master, and a server that ends with kill -9."""
    listen = ("--listen", "ucx://127.0.0.1:0?tls=tcp,self")
    async with master_and_server("--id", "one", "--capacity", "128MiB", *listen) as running:
        await servers_up(running[0], 1)
        yield running


def hasty(address: str) -> ClientConfig:
    """A client of `apart`, or of another server over UCX alone."""
    return ClientConfig(
        masters=[address],
        transports=["ucx?tls=tcp,cuda_copy,self"],
        device_path="direct",
        attempt_s=0.5,
        hedge_s=0.4,
        timeout_s=20,
    )


# --- memory of blocks, by their number and contents -------------------------------------------


def layers(gpu: FakeGpu, size: int = SIZE) -> list[Any]:
    """Memory of one block as engines have it: a piece in each layer, of any length and start."""
    count = 6 if size > 300 else 1
    whole = gpu.tensor(b"-" * (size + 64 * count))
    cut, pieces, at = size // count + 8, [], 3
    for number in range(count):
        length = cut if number < count - 1 else size - cut * (count - 1)
        pieces.append(whole[at : at + length])
        at += length + 40
    if count == 6:  # three as one row
        pieces[2:5] = [whole.as_strided((3, cut), (cut + 40, 1), 3 + 2 * (cut + 40))]
    return pieces


def in_layers(gpu: FakeGpu, number: int, content: bytes) -> list[Any]:
    pieces, at = layers(gpu, len(content)), 0
    for piece in pieces:
        filled = bytearray(content[at : at + piece.numel()])
        piece.behind.copy_(torch.frombuffer(filled, dtype=torch.uint8).view(piece.shape))
        at += piece.numel()
    return pieces


def in_rows(gpu: FakeGpu, number: int, content: bytes) -> list[Any]:
    return [gpu.tensor(content)]


def in_both(gpu: FakeGpu, number: int, content: bytes) -> list[Any]:
    return (in_layers if number % 2 else in_rows)(gpu, number, content)


def on_two_devices(gpu: FakeGpu, number: int, content: bytes) -> list[Any]:
    device = number % 2 if number < 10 else 0
    return [gpu.tensor(content[:999], device), gpu.tensor(content[999:], device)]


def partly_on_the_host(gpu: FakeGpu, number: int, content: bytes) -> Any:
    return bytearray(content) if number in (1, 3) else in_layers(gpu, number, content)


def joined(gpu: FakeGpu, memory: Any) -> bytes:
    if isinstance(memory, bytearray):
        return bytes(memory)
    return b"".join(map(gpu.content, memory if isinstance(memory, list) else [memory]))


def labels(results: Sequence[Any]) -> list[str]:
    """Of what a read or a write has returned."""
    return [getattr(one, "status", one).label for one in results]


async def read_back(pool: Pool, chain: Sequence[bytes], size: int = SIZE) -> list[Any]:
    """The blocks as another client sees them, verified: their bytes, or why there are none."""
    targets = buffers(len(chain), size)
    results = await pool.read(NAMESPACE, chain, targets)
    return [
        bytes(target[: result.size]) if result.status.hit else result.status.label
        for target, result in zip(targets, results, strict=True)
    ]


class Blocks:
    """Blocks that a client is to read into a device, or to write from there."""

    def __init__(
        self, gpu: FakeGpu, writer: Pool, kind: str, name: str, sizes: Sequence[int], spare: int
    ) -> None:
        self.gpu, self.writer, self.kind = gpu, writer, kind
        self.reads = kind == "read"
        self.done = "hit" if self.reads else "stored"
        self.chain = keys(f"{kind} {name}", len(sizes))
        self.data = [value(one, size) for one, size in zip(self.chain, sizes, strict=True)]
        #: What a read leaves alone behind each block.
        self.rest = b"-" * (spare if self.reads else 0)
        self.memory: list[Any] = []

    def refill(self, memory: Any = in_layers) -> None:
        """New memory on the device."""
        before = [b"-" * len(one) + self.rest for one in self.data] if self.reads else self.data
        self.memory = [memory(self.gpu, number, one) for number, one in enumerate(before)]

    async def move(self, pool: Pool, part: slice = slice(None), **options: Any) -> list[str]:
        call = pool.read if self.reads else pool.write
        return labels(await call(NAMESPACE, self.chain[part], self.memory[part], **options))

    async def there(self) -> list[Any]:
        """What has arrived on the other side: `data`, if all is well."""
        if not self.reads:
            return await read_back(self.writer, self.chain, max(map(len, self.data)))
        return [joined(self.gpu, one) for one in self.memory]

    async def arrive(self, pool: Pool, **options: Any) -> None:
        """All are moved, and the same bytes are on the other side."""
        assert await self.move(pool, **options) == [self.done] * len(self.chain)
        assert await self.there() == [one + self.rest for one in self.data]

    async def have_not_come(self) -> None:
        blanks = [b"-" * len(one) for one in self.data]
        assert await self.there() == (blanks if self.reads else ["never written"] * len(blanks))

    def counted(self, pool: Pool, path: str) -> int:
        """Bytes that the pool has moved on this path."""
        return pool.counters[f"{path}_{self.kind}_bytes"]


class Make(Protocol):
    def __call__(
        self, name: str, sizes: Sequence[int] = ..., memory: Any = ..., spare: int = ...
    ) -> Awaitable[Blocks]: ...


@pytest.fixture
def of_kind(gpu: FakeGpu, writer: Pool) -> Callable[[str], Make]:
    """Makes blocks that the pool has (`read`), or that the device has (`write`)."""

    async def make(
        kind: str,
        name: str,
        sizes: Sequence[int] = (SIZE,) * 3,
        memory: Any = in_layers,
        spare: int = 0,
    ) -> Blocks:
        made = Blocks(gpu, writer, kind, name, sizes, spare)
        made.refill(memory)
        if made.reads:
            await writer.write(NAMESPACE, made.chain, made.data)
        return made

    return lambda kind: partial(make, kind)


@pytest.fixture
def to_read(of_kind: Callable[[str], Make]) -> Make:
    return of_kind("read")


@pytest.fixture
def to_write(of_kind: Callable[[str], Make]) -> Make:
    return of_kind("write")


@pytest.fixture(params=["read", "write"])
def made(request: pytest.FixtureRequest, of_kind: Callable[[str], Make]) -> Make:
    """The contract of both directions."""
    return of_kind(request.param)
