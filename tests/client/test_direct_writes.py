"""Direct writes, without a GPU: blocks are hashed on a fake device and go by UCX from there.

As in `test_direct.py` all of the path is real but the driver. UCX reads a device's memory when it
likes, and knows nothing of streams: what is sent too early are other bytes.
"""

# ruff: noqa: F811  # fixtures

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from kvpool import ClientConfig, Pool, TooLarge, Unavailable, WriteStatus, connect, dev
from kvpool.client import device_direct as direct
from kvpool.client import device_writes as writes
from kvpool.client.servers import Servers
from kvpool.device.checksum import copy_rows
from kvpool.tools.subprocesses import Child
from kvpool.wire import messages as wire
from tests.client.test_direct import (  # noqa: F401
    LARGE,
    SIZE,
    SMALL,
    Transfer,
    UcxTransport,
    apart,
    auto,
    client,
    configured,
    gpu,
    joined,
    labels,
    layers,
    served,
    torch,
    ucx,
    warm,
    writer,
)
from tests.conftest import NAMESPACE, buffers, eventually, keys, value, values
from tests.support.fake_device import FakeGpu, FakeTensor


def in_layers(gpu: FakeGpu, data: bytes) -> list[Any]:
    """The memory of one block of an engine, filled."""
    pieces, at = layers(gpu, len(data)), 0
    for piece in pieces:
        piece.behind.copy_(
            torch.frombuffer(bytearray(data[at : at + len(piece)]), dtype=torch.uint8)
        )
        at += len(piece)
    return pieces


def statuses(written: Sequence[WriteStatus]) -> list[str]:
    return [status.label for status in written]


async def read_back(pool: Pool, chain: Sequence[bytes], size: int = SIZE) -> list[Any]:
    """The blocks as another client sees them, verified, and their bytes."""
    targets = buffers(len(chain), size)
    results = await pool.read(NAMESPACE, chain, targets)
    return [
        bytes(target[: result.size]) if result.status.hit else result.status.label
        for target, result in zip(targets, results, strict=True)
    ]


# --- the same bytes ---------------------------------------------------------------------------


async def blocks_arrive_whole(client: Pool, writer: Pool, gpu: FakeGpu, name: str) -> None:
    """Two writes of an engine at once, in several rounds, with the work that fills the blocks still
    queued; their memory is used again when they have ended."""
    chain = keys(name, 14)
    data = values(chain, SIZE)
    sources = []
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        for number, block in enumerate(data):
            ready = in_layers(gpu, block) if number % 3 else [gpu.tensor(block)]
            late = [gpu.tensor(b"-" * len(piece)) for piece in ready]
            for piece, one in zip(late, ready, strict=True):
                piece.copy_(one)  # runs when it is waited for
            sources.append(late)

        async def write(part: slice) -> list[WriteStatus]:
            written = await client.write(NAMESPACE, chain[part], sources[part])
            for piece in (piece for source in sources[part] for piece in source):
                piece.behind.fill_(7)
            return written

        written = await asyncio.gather(write(slice(7)), write(slice(7, 14)))
    assert [statuses(one) for one in written] == [["stored"] * 7] * 2
    assert await read_back(writer, chain) == data


async def test_blocks_are_sent_from_the_device(
    client: Pool, writer: Pool, served: dev.Dev, gpu: FakeGpu
) -> None:
    """Each in one row, or in the layers of an engine; what is on its way to them is waited for."""
    await blocks_arrive_whole(client, writer, gpu, "sent")
    assert client.counters["direct_write_bytes"] == 14 * SIZE
    assert client._memory.pinned is None  # no pinned memory was even made
    assert any(isinstance(one, FakeTensor) for one in gpu.registered)
    again = [gpu.tensor(block) for block in values(keys("sent", 14), SIZE)]
    written = await client.write(NAMESPACE, keys("sent", 14), again)
    assert statuses(written) == ["already stored"] * 14


def late_card(patch: pytest.MonkeyPatch, seconds: float = 0.15) -> None:
    """A card that has much to do: it begins to read a device's memory some time after it was
    asked."""
    send = Transfer.send

    class LateRequest:
        def __init__(self) -> None:
            self.real: Any = None

        @property
        def completed(self) -> bool:
            return self.real is not None and self.real.completed

        def check_error(self) -> None:
            self.real.check_error()

    def later(transfer: Transfer, buffer: Any) -> bool:
        if not isinstance(buffer, FakeTensor) or len(buffer) == 8:
            return send(transfer, buffer)
        request = LateRequest()

        def begin() -> None:
            others, keep = transfer._requests, transfer._keep
            transfer._requests, transfer._keep = deque(), deque()
            send(transfer, buffer)
            (request.real,) = transfer._requests
            transfer._requests, transfer._keep = others, keep

        transfer._requests.append(request)  # type: ignore[arg-type]
        transfer._keep.append(buffer)
        asyncio.get_running_loop().call_later(seconds, begin)
        return False

    patch.setattr(Transfer, "send", later)


async def test_memory_is_kept_until_a_late_card_has_read_it(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", 2 * SIZE + 1000)
    late_card(monkeypatch)
    await blocks_arrive_whole(client, writer, gpu, "late card")


async def test_one_launch_hashes_a_batch(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    copies: list[int] = []
    hash_blocks = direct.device_checksums

    def counted(blocks: Any, seeds: Any) -> Any:
        batches.append(len(blocks))
        return hash_blocks(blocks, seeds)

    def gathered(sources: Any, targets: Any) -> None:
        copies.append(len(sources))
        copy_rows(sources, targets)

    await blocks_arrive_whole(client, writer, gpu, "first")  # all is compiled
    monkeypatch.setattr(direct, "device_checksums", counted)
    monkeypatch.setattr(direct, "uses_kernels", lambda device: True)
    monkeypatch.setattr(writes, "copy_rows", gathered)
    chain = keys("launch", 5)
    data = values(chain, SIZE)
    written = await client.write(NAMESPACE, chain, [in_layers(gpu, one) for one in data])
    assert statuses(written) == ["stored"] * 5
    assert await read_back(writer, chain) == data
    assert batches == [5]
    assert copies == [5 * 6]


async def test_rounds_take_turns_with_the_scratch_memory(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks at a time, of two writes and a read that run at once, on two devices."""
    monkeypatch.setattr(direct, "SCRATCH", 3 * direct.room(SIZE))
    chain = keys("rounds", 14)
    data = values(chain, SIZE)
    known = keys("known", 5)
    await writer.write(NAMESPACE, known, values(known, SIZE))

    def source(number: int) -> list[Any]:
        block, device = data[number], number % 2 if number < 10 else 0
        return [gpu.tensor(block[:999], device), gpu.tensor(block[999:], device)]

    sources = [source(i) for i in range(14)]
    calls = [
        client.write(NAMESPACE, chain[part], sources[part]) for part in (slice(7), slice(7, 14))
    ]
    targets = [layers(gpu) for _ in known]
    *written, read = await asyncio.gather(*calls, client.read(NAMESPACE, known, targets))
    assert [statuses(one) for one in written] == [["stored"] * 7] * 2
    assert labels(read) == ["hit"] * 5
    assert await read_back(writer, chain) == data
    assert [joined(gpu, target) for target in targets] == values(known, SIZE)


async def test_device_and_host_memory_in_one_write(
    client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    chain = keys("both", 5)
    data = values(chain, SIZE)
    sources = [gpu.tensor(data[0]), data[1], in_layers(gpu, data[2]), data[3], gpu.tensor(data[4])]
    assert statuses(await client.write(NAMESPACE, chain, sources)) == ["stored"] * 5
    assert await read_back(writer, chain) == data
    assert client.counters["direct_write_bytes"] == 3 * SIZE


@pytest.mark.parametrize(
    "sizes",
    [(1, 240, 241, 1200), (100, 2 * SIZE, 1), (SMALL // 2,), (SMALL // 2 + 1,)],
    ids=["small", "mixed", "limit", "above"],
)
async def test_blocks_of_every_size(
    client: Pool, writer: Pool, gpu: FakeGpu, sizes: Sequence[int]
) -> None:
    """Small payloads go with their frame, so they cross the host. Two of SMALL / 2 are one."""
    for kind in (in_layers, FakeGpu.tensor):
        chain = keys(f"{kind.__name__} {sizes}", 2 * len(sizes))
        data = [value(k, sizes[i // 2]) for i, k in enumerate(chain)]
        if kind is in_layers:
            data = [one if len(one) > 300 else bytes(999) + one for one in data]
        written = await client.write(NAMESPACE, chain, [kind(gpu, one) for one in data])
        assert statuses(written) == ["stored"] * len(chain)
        assert await read_back(writer, chain, 3 * SIZE) == data


async def test_a_payload_that_is_small_after_all(client: Pool, writer: Pool, gpu: FakeGpu) -> None:
    """The server has all but one block: what is left is small, and goes with its frame."""
    chain = keys("rest", 6)
    data = [value(k, SMALL - 1) for k in chain]
    await writer.write(NAMESPACE, chain[:5], data[:5])
    written = await client.write(NAMESPACE, chain, [gpu.tensor(one) for one in data])
    assert statuses(written) == ["already stored"] * 5 + ["stored"]
    assert await read_back(writer, chain) == data


async def test_a_write_that_meets_another_version(
    served: dev.Dev, client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """What a device has is compared by its checksum; no byte of it is fetched for that."""
    chain = keys("version", 3)
    await writer.write(NAMESPACE, chain, [bytes(SIZE)] * 3)
    sources = [gpu.tensor(one) for one in values(chain, SIZE)]
    assert statuses(await client.write(NAMESPACE, chain, sources)) == ["already stored"] * 3
    assert await read_back(writer, chain) == [bytes(SIZE)] * 3


# --- the token ---------------------------------------------------------------------------------


async def test_each_lane_is_proved_for_each_device_once(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[wire.SendToken] = []
    send = ucx.Stream.send

    async def noted(self: Any, message: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(message, wire.SendToken):
            sent.append(message)
        return await send(self, message, *arguments, **named)

    monkeypatch.setattr(ucx.Stream, "send", noted)
    for number in range(4):
        chain = keys(f"token {number}", 2)
        blocks = [gpu.tensor(one, number % 2) for one in values(chain, SIZE)]
        assert statuses(await client.write(NAMESPACE, chain, blocks)) == ["stored"] * 2
    assert len(sent) == len({one.content for one in sent}) == 2


async def test_lanes_that_send_without_a_rendezvous_are_refused(
    client: Pool, writer: Pool, served: dev.Dev, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has begun to arrive could not be stopped: no block goes that way."""
    send, sent = Transfer.send, []

    def eager(transfer: Transfer, buffer: Any) -> bool:
        sent.append(len(buffer))
        return send(transfer, buffer) or isinstance(buffer, FakeTensor)

    monkeypatch.setattr(Transfer, "send", eager)
    chain = keys("eager", 2)
    written = await client.write(NAMESPACE, chain, [gpu.tensor(one) for one in values(chain, SIZE)])
    assert statuses(written) == ["refused"] * 2
    assert max(sent) == 8
    assert await read_back(writer, chain) == ["never written"] * 2
    assert client.counters["failed_ucx"]


async def test_a_token_that_arrives_as_another_is_refused(
    client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """Bytes of the device are wrong on their way: known before a block is sent."""
    token = await client._memory.direct_writes()._devices.token(
        torch.device("cuda", 0), asyncio.get_running_loop().time() + 9
    )
    token.memory.behind[0] ^= 1  # type: ignore[attr-defined]
    chain = keys("other token", 2)
    written = await client.write(NAMESPACE, chain, [gpu.tensor(one) for one in values(chain, SIZE)])
    assert statuses(written) == ["refused"] * 2
    assert await read_back(writer, chain) == ["never written"] * 2


# --- wrong bytes -------------------------------------------------------------------------------


def damage(monkeypatch: pytest.MonkeyPatch, *, once: bool = False) -> list[int]:
    """The first byte of each block changes between the device and the wire."""
    send, changed = Transfer.send, []

    def other(transfer: Transfer, buffer: Any) -> bool:
        if isinstance(buffer, FakeTensor) and len(buffer) > 8 and not (once and changed):
            changed.append(len(buffer))
            data = bytearray(buffer.behind.numpy())
            data[0] ^= 4
            return send(transfer, memoryview(data))
        return send(transfer, buffer)

    monkeypatch.setattr(Transfer, "send", other)
    return changed


async def test_bytes_that_change_on_the_wire_are_refused(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is asked to verify the first batch, and drops what is wrong in it."""
    chain = keys("wire", 12)
    data = values(chain, SIZE)
    with monkeypatch.context() as patch:
        changed = damage(patch)
        written = await client.write(NAMESPACE, chain, [gpu.tensor(one) for one in data])
    assert len(changed) == 12
    assert statuses(written) == ["refused"] * 12
    assert client.counters["direct_corrupt"] == 12
    assert not any(isinstance(one, bytes) for one in await read_back(writer, chain))
    written = await client.write(NAMESPACE, chain, [gpu.tensor(one) for one in data])
    assert statuses(written) == ["stored"] * 12
    assert await read_back(writer, chain) == data


async def test_bytes_that_change_later_are_found_by_readers(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, chain = keys("before", 2), keys("later", 3)
    await client.write(NAMESPACE, first, [gpu.tensor(one) for one in values(first, SIZE)])
    damage(monkeypatch, once=True)
    data = values(chain, SIZE)
    await client.write(NAMESPACE, chain, [gpu.tensor(one) for one in data])
    assert await read_back(writer, chain) == ["corrupt", *data[1:]]


# --- auto --------------------------------------------------------------------------------------


async def test_auto_is_direct_where_a_fabric_leads_to_the_server(
    auto: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    chain = keys("auto", 3)
    data = values(chain, SIZE)
    written = await auto.write(NAMESPACE, chain, [gpu.tensor(one) for one in data])
    assert statuses(written) == ["stored"] * 3
    assert auto.counters["direct_write_bytes"] == 3 * SIZE
    assert await read_back(writer, chain) == data


async def test_auto_is_staged_where_memory_is_shared_or_the_device_is_slow(
    served: dev.Dev, auto: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "is_fast", lambda block: block.device.index == 1)
    chain = keys("slow", 4)
    data = values(chain, SIZE)
    written = await auto.write(
        NAMESPACE, chain, [gpu.tensor(one, i % 2) for i, one in enumerate(data)]
    )
    assert statuses(written) == ["stored"] * 4
    assert auto.counters["direct_write_bytes"] == auto.counters["staged_write_bytes"] == 2 * SIZE
    async with served.pool(configured(served, "auto")) as beside:
        await beside.members()
        other = keys("beside", 2)
        sources = [gpu.tensor(one, 1) for one in values(other, SIZE)]
        assert statuses(await beside.write(NAMESPACE, other, sources)) == ["stored"] * 2
        assert beside.counters["staged_write_bytes"] == 2 * SIZE
    assert await read_back(writer, [*chain, *other]) == [*data, *values(other, SIZE)]


async def test_auto_stages_where_the_direct_path_fails_and_says_why(
    auto: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []

    class Log:
        def info(self, text: str, **fields: Any) -> None:
            said.append((text, fields))

    send = Transfer.send

    def fails(transfer: Transfer, buffer: Any) -> bool:
        if isinstance(buffer, FakeTensor):
            raise Unavailable("UCX send: this memory cannot be registered")
        return send(transfer, buffer)

    monkeypatch.setattr(Transfer, "send", fails)
    monkeypatch.setattr(writes, "log", Log())
    for number in range(3):
        chain = keys(f"fails {number}", 3)
        data = values(chain, SIZE)
        sources = [in_layers(gpu, one) for one in data]
        assert statuses(await auto.write(NAMESPACE, chain, sources)) == ["stored"] * 3
        assert await read_back(writer, chain) == data
    assert auto.counters["failed_ucx"] == 1  # it is not tried for each write
    assert auto.counters["staged_write_bytes"] == 9 * SIZE
    assert auto.counters["direct_writes_staged"] + 6 >= 9
    assert said
    assert all(text == "blocks from devices are staged" for text, _ in said)
    assert len(said) <= 2


async def test_auto_stages_what_is_left_where_the_device_fails(
    auto: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    chain = keys("fails to gather", 3)
    data = values(chain, SIZE)
    gpu.fails = "CUDA error: an illegal memory access was encountered"
    written = await auto.write(NAMESPACE, chain, [in_layers(gpu, one) for one in data])
    assert statuses(written) == ["stored"] * 3
    assert auto.counters["staged_write_bytes"] == 3 * SIZE
    assert await read_back(writer, chain) == data


async def test_auto_stages_a_batch_that_came_wrong_and_then_all(
    auto: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = keys("distrust", 3)
    data = values(chain, SIZE)
    with monkeypatch.context() as patch:
        damage(patch, once=True)
        written = await auto.write(NAMESPACE, chain, [gpu.tensor(one) for one in data])
    assert statuses(written) == ["stored"] * 3
    assert await read_back(writer, chain) == data
    assert auto.counters["direct_corrupt"] == 1
    direct_bytes = auto.counters["direct_write_bytes"]
    other = keys("distrusted", 2)
    await auto.write(NAMESPACE, other, [gpu.tensor(one) for one in values(other, SIZE)])
    assert auto.counters["direct_write_bytes"] == direct_bytes == 2 * SIZE
    assert auto.counters["staged_write_bytes"] == 3 * SIZE


# --- what it refuses ----------------------------------------------------------------------------


async def test_a_block_in_pieces_that_is_too_large(
    client: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", SIZE - 1)
    (key,) = keys("large", 1)
    with pytest.raises(TooLarge, match=r"6 pieces.*a direct write takes.*device_path to auto"):
        await client.write(NAMESPACE, [key], [in_layers(gpu, value(key, SIZE))])
    assert statuses(await client.write(NAMESPACE, [key], [gpu.tensor(value(key, SIZE))])) == [
        "stored"
    ]


async def test_direct_leaves_servers_without_a_path_out(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Servers, "_device_paths", lambda *_, **__: [])
    chain = keys("no path", 2)
    written = await client.write(NAMESPACE, chain, [gpu.tensor(one) for one in values(chain, SIZE)])
    assert statuses(written) == ["refused"] * 2
    assert await read_back(writer, chain) == ["never written"] * 2
    assert client._memory.pinned is None


# --- time, ends and errors -----------------------------------------------------------------------


async def test_a_busy_device_costs_a_deadline(client: Pool, writer: Pool, gpu: FakeGpu) -> None:
    chain = keys("busy", 2)
    sources = [gpu.tensor(one) for one in values(chain, SIZE)]
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        gpu.tensor(b"x").add_(1)
        gpu.stop()
        written = await client.write(NAMESPACE, chain, sources, timeout=0.2)
    assert statuses(written) == ["deadline"] * 2
    gpu.go_on()
    assert statuses(await client.write(NAMESPACE, chain, sources)) == ["stored"] * 2


async def test_a_write_waits_for_a_device_that_has_begun(
    client: Pool, writer: Pool, gpu: FakeGpu
) -> None:
    """Its kernels read the memory: nobody may have that back before they have ended."""
    await blocks_arrive_whole(client, writer, gpu, "first")  # all is compiled
    for ending in ("deadline", "cancel"):
        chain = keys(ending, 3)
        sources = [in_layers(gpu, one) for one in values(chain, SIZE)]
        timeout = 0.3 if ending == "deadline" else 30.0
        writing = asyncio.ensure_future(client.write(NAMESPACE, chain, sources, timeout=timeout))
        await asyncio.sleep(0)
        gpu.stop()
        await asyncio.sleep(0.4)
        if ending == "cancel":
            writing.cancel()
        await asyncio.sleep(0.05)
        assert not writing.done()
        gpu.go_on()
        if ending == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await writing
        else:
            assert statuses(await writing) == ["deadline"] * 3
        assert await read_back(writer, chain) == ["never written"] * 3


@pytest.mark.parametrize("slow", ["its device", "its server"])
async def test_a_read_is_not_behind_a_write(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """A request waits for a read, and nobody for a write: it may gather, or be on its way."""
    go_on, begun, sent = threading.Event(), threading.Event(), asyncio.Event()
    gather, send = writes.copy_rows, writes.DirectWrites.write_to

    def gathers(sources: Any, targets: Any) -> None:
        begun.set()
        assert slow == "its server" or go_on.wait(20)
        gather(sources, targets)

    async def sends(*arguments: Any) -> Any:
        await sent.wait()
        return await send(*arguments)

    monkeypatch.setattr(writes, "copy_rows", gathers)
    monkeypatch.setattr(writes.DirectWrites, "write_to", sends)
    old, new = keys("read", 3), keys("written", 3)
    await writer.write(NAMESPACE, old, values(old, SIZE))
    sources = [in_layers(gpu, one) for one in values(new, SIZE)]
    writing = asyncio.ensure_future(client.write(NAMESPACE, new, sources))
    assert await asyncio.to_thread(begun.wait, 20)
    await asyncio.sleep(0.1)
    targets = [in_layers(gpu, b"-" * SIZE) for _ in old]
    async with asyncio.timeout(10):
        results = await client.read(NAMESPACE, old, targets)
    assert [one.status.label for one in results] == ["hit"] * 3
    assert not writing.done()
    go_on.set()
    sent.set()
    assert statuses(await writing) == ["stored"] * 3
    assert await read_back(writer, new) == values(new, SIZE)


async def test_a_write_that_is_cancelled_anywhere_leaves_nothing_behind(
    client: Pool, writer: Pool, served: dev.Dev, gpu: FakeGpu
) -> None:
    """After every number of turns of the loop, until one has ended by itself. Its memory is used
    again at once: what the pool has then is right, or nothing."""
    (server,) = served.servers
    turns = cancelled = 0
    while True:
        chain = keys(f"cancelled {turns}", 4)
        data = values(chain, SIZE)
        sources = [
            [gpu.tensor(one)] if i % 2 else in_layers(gpu, one) for i, one in enumerate(data)
        ]
        writing = asyncio.ensure_future(client.write(NAMESPACE, chain, sources))
        for _ in range(turns):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        for source in sources:
            for piece in source:
                piece.behind.fill_(7)
        for memory in [
            one.memory for one in client._memory.direct_writes()._devices._scratch.values()
        ]:
            memory.behind.fill_(8)
        for found, block in zip(await read_back(writer, chain), data, strict=True):
            assert found in (block, "never written", "removed")
        if not writing.cancelled():
            assert statuses(writing.result()) == ["stored"] * 4
            break
        cancelled += 1
        turns += 1 + turns // 6
    assert cancelled > 10
    await eventually(lambda: server.store.held.reservations == 0)
    await blocks_arrive_whole(client, writer, gpu, "after")


async def test_an_error_of_the_device_is_told(client: Pool, writer: Pool, gpu: FakeGpu) -> None:
    """The server and the path to it are well."""
    chain = keys("broken", 3)
    sources = [in_layers(gpu, one) for one in values(chain, SIZE)]
    for _ in range(3):
        gpu.fails = "CUDA error: an illegal memory access was encountered\nCUDA kernel"
        with pytest.raises(Unavailable, match=r"device cuda:0: .*access was encountered$"):
            await client.write(NAMESPACE, chain, sources)
    assert not client.counters["failed_ucx"]
    assert statuses(await client.write(NAMESPACE, chain, sources)) == ["stored"] * 3


# --- a server in a process of its own, that dies or stops ----------------------------------------


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_ends_in_mid_transfer(
    apart: tuple[str, Child], monkeypatch: pytest.MonkeyPatch, signal_: int
) -> None:
    """No block counts as stored, and UCX has let go of the memory when the call ends."""
    address, server = apart
    gpu = FakeGpu(monkeypatch)
    chain = keys("dies", 24)
    data = values(chain, LARGE)
    config = ClientConfig(
        masters=[address],
        transports=["ucx?tls=tcp,cuda_copy,self"],
        device_path="direct",
        attempt_s=0.5,
        hedge_s=0.4,
        timeout_s=20,
    )
    look, ended = Transfer.look, []
    transfers: list[Transfer] = []

    def die(transfer: Transfer) -> None:
        look(transfer)
        sends = [one for one in gpu.registered if isinstance(one, FakeTensor) and len(one) > 8]
        if sends and transfer.completed >= 5 and not ended:
            ended.append(transfer.completed)
            transfers.append(transfer)
            server.signal(signal_)

    monkeypatch.setattr(direct, "hash_rows", lambda rows, seeds: torch.zeros(len(rows)))
    monkeypatch.setattr(writes, "unsigned", lambda found: [0] * len(found))
    async with await connect(config=config) as pool:
        monkeypatch.setattr(Transfer, "look", die)
        sources = [gpu.tensor(one) if i % 2 else in_layers(gpu, one) for i, one in enumerate(data)]
        try:
            written = await pool.write(NAMESPACE, chain, sources, timeout=3.0)
            assert ended
            assert not any(status.present for status in written)
            assert not transfers[0]._requests  # UCX uses no buffer any more
        finally:
            if signal_ == signal.SIGSTOP:
                server.signal(signal.SIGCONT)
        if signal_ == signal.SIGSTOP:
            for one in gpu.registered:
                one.behind.fill_(9)  # that memory is used again
            await asyncio.sleep(0.3)
            results = await pool.read(NAMESPACE, chain, buffers(24, LARGE))
            assert not any(result.status.hit for result in results)


# --- mistakes that people make: each is seen ------------------------------------------------------


def hashed_before_the_caller_has_ended(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the work that fills the blocks."""

    async def at_once(blocks: Any, deadline: float) -> None:
        pass

    patch.setattr(writes, "wait_for_stream", at_once)


def wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """The gather runs on one stream, and another one is waited for."""

    def elsewhere(sources: Any, targets: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream(sources[0].device)):
            copy_rows(sources, targets)

    patch.setattr(writes, "copy_rows", lambda s, t: elsewhere(s, t) if s else None)


def scratch_used_before_the_bytes_have_left(patch: pytest.MonkeyPatch) -> None:
    """Another round gathers in that memory while UCX still sends from it."""

    @contextlib.asynccontextmanager
    async def without_turns(self: Any, device: Any, deadline: float) -> Any:
        yield self._scratch[device].memory

    late_card(patch)
    patch.setattr(direct.Devices, "scratch", without_turns)


def pieces_swapped(patch: pytest.MonkeyPatch) -> None:
    """Two layers of equal size change places: a wrong block, with the right checksum of it."""

    def swapped(sources: Any, targets: Any) -> None:
        if sources:
            copy_rows([sources[1], sources[0], *sources[2:]], targets)

    patch.setattr(writes, "copy_rows", swapped)


def checksums_swapped(patch: pytest.MonkeyPatch) -> None:
    """The results of a batch are given to the wrong blocks."""
    unsigned = writes.unsigned
    patch.setattr(writes, "unsigned", lambda found: unsigned(found)[::-1])


def stored_before_the_bytes_have_left(patch: pytest.MonkeyPatch) -> None:
    """Neither side waits for its transfers, so the block is sealed when they have begun."""

    async def at_once(self: Transfer, left: int, deadline: float | None) -> None:
        self.look()

    late_card(patch)
    patch.setattr(Transfer, "until", at_once)


@pytest.mark.parametrize(
    "mistake",
    [
        hashed_before_the_caller_has_ended,
        wrong_stream,
        scratch_used_before_the_bytes_have_left,
        stored_before_the_bytes_have_left,
        pieces_swapped,
        checksums_swapped,
    ],
)
async def test_a_planted_mistake_is_seen(
    client: Pool, writer: Pool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, mistake: Any
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", 2 * SIZE + 1000)
    await blocks_arrive_whole(client, writer, gpu, "right")
    with monkeypatch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            await blocks_arrive_whole(client, writer, gpu, "wrong")
