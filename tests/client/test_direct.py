"""Direct reads and writes, without a GPU: blocks go by UCX into a fake device, or from there.

Most tests are of both directions; those of reads alone come last, and those of writes alone are in
`test_direct_writes.py`. What only hardware can tell is asked by `make gpu-acceptance`.
"""

# ruff: noqa: F811  # fixtures

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any

import pytest

from kvpool import Pool, TooLarge, Unavailable, connect, dev
from kvpool.client import device_direct as direct
from kvpool.client import device_writes
from kvpool.client.buffers import normalize_buffers
from kvpool.client.device_paths import DevicePaths
from kvpool.device.checksum import copy_rows
from kvpool.device.thread import DeviceThread
from kvpool.errors import Closed, ConfigError
from kvpool.tools.subprocesses import Child
from tests.client.direct_blocks import (  # noqa: F401
    LARGE,
    SIZE,
    SMALL,
    Blocks,
    Make,
    TcpTransport,
    UcxTransport,
    apart,
    auto,
    client,
    compiled,
    configured,
    either,
    gpu,
    hasty,
    in_both,
    in_layers,
    in_rows,
    joined,
    labels,
    layers,
    made,
    of_kind,
    on_two_devices,
    partly_on_the_host,
    served,
    to_read,
    torch,
    ucx,
    warm,
    writer,
)
from tests.conftest import NAMESPACE, eventually, key, keys, values
from tests.support.fake_device import FakeGpu, FakeTensor

Transfer = ucx.Transfer
Patch = pytest.MonkeyPatch


# --- the same bytes ---------------------------------------------------------------------------


async def test_blocks_go_straight(client: Pool, made: Make, gpu: FakeGpu) -> None:
    """Each in one row, or in the layers of an engine; no memory of the host is even pinned."""
    blocks = await made("straight", [SIZE] * 9, in_both)
    await blocks.arrive(client)
    assert blocks.counted(client, "direct") == 9 * SIZE
    assert not blocks.counted(client, "staged")
    assert not blocks.reads or client.counters["read_bytes"] == 9 * SIZE
    assert client._memory.pinned is None
    assert any(isinstance(one, FakeTensor) for one in gpu.registered)


async def test_rounds_take_turns_with_the_scratch_memory(
    client: Pool, made: Make, to_read: Make, monkeypatch: Patch
) -> None:
    """Three blocks at a time, of two calls and a read that run at once, on two devices."""
    monkeypatch.setattr(direct, "SCRATCH", 3 * direct.room(SIZE))
    blocks, beside = await made("rounds", [SIZE] * 14, on_two_devices), await to_read("beside")
    halves = [blocks.move(client, part) for part in (slice(7), slice(7, 14))]
    *moved, read = await asyncio.gather(*halves, beside.move(client))
    assert (moved, read) == ([[blocks.done] * 7] * 2, ["hit"] * 3)
    assert await blocks.there() == blocks.data
    assert await beside.there() == beside.data


async def test_a_round_is_on_the_network_while_others_are_verified_and_scattered(
    gpu: FakeGpu, monkeypatch: Patch
) -> None:
    """Engines read several batches at once: three share the memory, whatever one could use."""
    monkeypatch.setattr(direct, "SCRATCH", 6 * direct.room(SIZE))
    reads = direct.DirectReads(direct.Devices(), Counter())
    three = asyncio.Barrier(3)

    async def fetch(_: Any) -> dict[int, Any]:
        async with asyncio.timeout(10):
            await three.wait()
        return {}

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            blocks = normalize_buffers([layers(gpu) for _ in range(6)], writable=True).device
            group.create_task(reads.read(blocks, fetch, asyncio.get_running_loop().time() + 20))


async def test_device_and_host_memory_in_one_call(either: Pool, made: Make) -> None:
    blocks = await made("both", [SIZE] * 5, partly_on_the_host)
    await blocks.arrive(either)
    assert blocks.counted(either, "direct") + blocks.counted(either, "staged") == 3 * SIZE


@pytest.mark.parametrize("memory", [in_both, in_rows])
@pytest.mark.parametrize(
    "sizes",
    [(1, 240, 241, 1200), (100, 2 * SIZE, 1), (SMALL // 2,), (SMALL // 2 + 1,)],
    ids=["small", "mixed", "limit", "above"],
)
async def test_blocks_of_every_size(
    either: Pool, made: Make, sizes: Sequence[int], memory: Any
) -> None:
    """What a read's memory has more is left alone. Small payloads come with their frame, to the
    host: they cross by a copy. Two of SMALL / 2 are one, if they are in rows of one kind."""
    pairs = [size for size in sizes for _ in range(2)]
    await (await made(f"{sizes} {memory.__name__}", pairs, memory, spare=999)).arrive(either)


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_one_launch_hashes_a_batch_and_without_kernels_it_is_done_in_steps(
    client: Pool, of_kind: Callable[[str], Make], kind: str, monkeypatch: Patch
) -> None:
    """The torch program alone would take memory of the whole batch, some times over."""
    batches: list[int] = []
    hash_blocks = direct.device_checksums

    def counted(blocks: Any, seeds: Any) -> Any:
        batches.append(len(blocks))
        return hash_blocks(blocks, seeds)

    monkeypatch.setattr(direct, "_STEP", 2 * SIZE)
    await (await of_kind(kind)("first")).arrive(client)  # all is compiled
    monkeypatch.setattr(direct, "device_checksums", counted)
    for kernels, expected in ((False, [2, 2, 1]), (True, [5])):
        monkeypatch.setattr(direct, "uses_kernels", lambda _, kernels=kernels: kernels)
        await (await of_kind(kind)(f"steps {kernels}", [SIZE] * 5)).arrive(client)
        assert batches == expected
        batches.clear()


# --- auto --------------------------------------------------------------------------------------


async def test_auto_is_direct_where_a_fabric_leads_to_the_server(auto: Pool, made: Make) -> None:
    blocks = await made("auto")
    await blocks.arrive(auto)
    assert blocks.counted(auto, "direct") == 3 * SIZE


async def test_auto_is_staged_where_memory_is_shared_or_the_device_is_slow(
    served: dev.Dev, auto: Pool, made: Make, monkeypatch: Patch
) -> None:
    """Without Triton's kernels it takes longer to verify a block than to stage it. And a server of
    this host is not asked over the network for what is beside it."""
    monkeypatch.setattr(direct, "is_fast", lambda block: block.device.index == 1)
    blocks = await made("slow", [SIZE] * 4, on_two_devices)
    await blocks.arrive(auto)
    assert blocks.counted(auto, "direct") == blocks.counted(auto, "staged") == 2 * SIZE
    monkeypatch.setattr(direct, "is_fast", lambda block: True)
    async with served.pool(configured(served, "auto")) as near:
        await near.members()
        blocks = await made("beside")
        await blocks.arrive(near)
        assert blocks.counted(near, "staged") == 3 * SIZE


async def test_auto_stages_where_the_direct_path_fails_and_says_why(
    auto: Pool, made: Make, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(moves: Callable[..., Any]) -> Callable[..., Any]:
        def tried(transfer: Transfer, buffer: Any) -> Any:
            if isinstance(buffer, FakeTensor):
                raise Unavailable("UCX: this memory cannot be registered")
            return moves(transfer, buffer)

        return tried

    caplog.set_level("INFO", "kvpool")
    for name in ("receive", "send"):
        monkeypatch.setattr(Transfer, name, fails(getattr(Transfer, name)))
    for number in range(3):
        blocks = await made(f"fails {number}")
        await blocks.arrive(auto)
    assert auto.counters["failed_ucx"] == 1  # it is not tried for each call
    assert blocks.counted(auto, "staged") == 9 * SIZE
    assert blocks.reads or "blocks from devices are staged" in caplog.text
    assert caplog.text.count("are staged") <= 2


async def test_auto_goes_through_the_host_until_kernels_are_compiled(
    auto: Pool, made: Make, served: dev.Dev, gpu: FakeGpu, monkeypatch: Patch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(direct, "_compile", lambda device: go_on.wait(20))
    async with served.pool(configured(served, "auto")) as pool:
        pool._servers._host = auto._servers._host
        await pool.members()
        for number in range(2):
            blocks = await made(f"compiling {number}")
            await blocks.arrive(pool)
        assert not blocks.counted(pool, "direct")
        go_on.set()
        await compiled(pool, gpu)
        blocks = await made("compiled")
        await blocks.arrive(pool)
        assert blocks.counted(pool, "direct") == 3 * SIZE


NO_COMPILER = (
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    type("CompilationError", (Exception,), {})("at 1:0"),
)


@pytest.mark.parametrize(
    ("kind", "step", "error"),
    [
        *(("read", "device_checksums", error) for error in NO_COMPILER),
        *(("read", step, NO_COMPILER[0]) for step in ("copy_rows", "_allocate")),
        *(("write", step, NO_COMPILER[1]) for step in ("hash_rows", "copy_rows", "_allocate")),
        ("write", "_upload", NO_COMPILER[1]),
    ],
)
async def test_auto_goes_through_the_host_when_the_device_cannot_do_its_part(
    auto: Pool,
    of_kind: Callable[[str], Make],
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    step: str,
    error: Exception,
) -> None:
    """No compiler for kernels, no memory: every block comes, with one warning, and later ones do
    not try any more."""
    calls = []

    def fails(*of: Any) -> None:
        calls.append(of)
        raise error

    module = device_writes if (kind, step) == ("write", "copy_rows") else direct
    monkeypatch.setattr(module, step, fails)
    for batch in ("one", "two"):
        await (await of_kind(kind)(batch)).arrive(auto)
    assert len(calls) == (2 if step == "_upload" else 1)  # the token is tried with each batch
    assert kind == "write" or caplog.text.count("staged from now on") == 1
    assert not auto.counters["failed_ucx"]


# --- what is refused ----------------------------------------------------------------------------


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
    client: Pool, made: Make, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", SIZE - 1)
    blocks = await made("large", [SIZE])
    with pytest.raises(TooLarge, match=r"in pieces.*device_path to auto"):
        await blocks.move(client)
    blocks.refill(in_rows)  # one row needs no memory of ours
    await blocks.arrive(client)


async def test_direct_leaves_servers_without_a_path_out(
    client: Pool, made: Make, monkeypatch: Patch
) -> None:
    """It is what `direct` says: no pinned memory, no other way; a miss with its reason."""
    monkeypatch.setattr(DevicePaths, "_paths", lambda *_, **__: [])
    blocks = await made("refused")
    assert await blocks.move(client) == ["refused"] * 3
    await blocks.have_not_come()
    assert client._memory.pinned is None
    on_the_host = [b"x" * SIZE] * 3
    assert all(one.present for one in await client.write(NAMESPACE, keys("host", 3), on_the_host))


# --- time, ends and errors -----------------------------------------------------------------------


async def test_a_busy_device_costs_a_deadline(either: Pool, made: Make, gpu: FakeGpu) -> None:
    blocks = await made("busy")
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        gpu.tensor(b"x").add_(1)
        gpu.stop()
        assert await blocks.move(either, timeout=0.2) == ["deadline"] * 3
    await blocks.have_not_come()
    gpu.go_on()
    await blocks.arrive(either)


@pytest.mark.parametrize("ending", ["deadline", "cancel"])
async def test_a_call_waits_for_a_device_that_has_begun(
    either: Pool, made: Make, gpu: FakeGpu, ending: str
) -> None:
    """Its kernels use the memory: nobody may have that back before they have ended."""
    await (await made("first")).arrive(either)  # all is compiled
    blocks = await made("begun")
    timeout = 0.3 if ending == "deadline" else 30.0
    moving = asyncio.ensure_future(blocks.move(either, timeout=timeout))
    await asyncio.sleep(0)
    gpu.stop()
    await asyncio.sleep(0.4)
    if ending == "cancel":
        moving.cancel()
    await asyncio.sleep(0.05)
    assert not moving.done()
    gpu.go_on()
    if ending == "cancel":
        with pytest.raises(asyncio.CancelledError):
            await moving
    else:
        assert await moving == ["deadline"] * 3
    await still(either, gpu, blocks.memory)
    assert blocks.reads or await blocks.there() == ["never written"] * 3


async def still(client: Pool, gpu: FakeGpu, memory: Sequence[Any]) -> None:
    """Nothing writes into this memory any more."""
    before = [joined(gpu, one) for one in memory]
    await asyncio.sleep(0.02)
    for devices in client._memory.devices:
        for thread in devices._threads.values():
            await thread.run(lambda: None, lambda _: None)
    assert [joined(gpu, one) for one in memory] == before


async def test_a_call_that_is_cancelled_anywhere_leaves_nothing_behind(
    client: Pool, made: Make, served: dev.Dev, gpu: FakeGpu
) -> None:
    """After every number of turns of the loop, until one has ended by itself. Its memory is used
    again at once: what the pool has then is right, or nothing."""
    (server,) = served.servers
    turns = cancelled = 0
    blocks, ended = await made("cancelled", [SIZE] * 4, in_both), False
    while not ended:
        if blocks.reads:
            blocks.refill(in_both)
        else:
            blocks = await made(f"cancelled {turns}", [SIZE] * 4, in_both)
        moving = asyncio.ensure_future(blocks.move(client))
        for _ in range(turns):
            await asyncio.sleep(0)
        moving.cancel()
        await asyncio.wait([moving])
        ended = not moving.cancelled()
        if blocks.reads:
            await still(client, gpu, blocks.memory)
        else:
            scratch = client._memory.direct_writes()._devices._scratch.values()
            for piece in chain(*blocks.memory, (one.memory for one in scratch)):
                piece.behind.fill_(7)
        for number, (found, block) in enumerate(
            zip(await blocks.there(), blocks.data, strict=True)
        ):
            whole = number % 2 == 1  # in layers: all of it or nothing
            if not blocks.reads or whole:
                assert found in (block, b"-" * SIZE, "never written", "removed")
        turns += 1 + turns // 6
        cancelled += 1
    assert moving.result() == [blocks.done] * 4
    assert cancelled > 10
    await eventually(lambda: server.store.held.pins == server.store.held.reservations == 0)
    await (await made("after")).arrive(client)


async def test_an_error_of_the_device_is_told(either: Pool, made: Make, gpu: FakeGpu) -> None:
    """No other copy of the block would help; the server and the path to it are well."""
    blocks = await made("broken")
    for _ in range(3):
        gpu.fails = "CUDA error: an illegal memory access was encountered\nCUDA kernel"
        with pytest.raises(Unavailable, match=r"device cuda:0: .*access was encountered$"):
            await blocks.move(either)
    assert not either.counters["failed_ucx"]
    await blocks.arrive(either)


# --- reads alone -----------------------------------------------------------------------------


async def test_a_miss_among_the_hits_leaves_its_memory_alone(
    either: Pool, to_read: Make, gpu: FakeGpu
) -> None:
    blocks = await to_read("some", [SIZE] * 3, in_both)
    asked = [blocks.chain[0], key("never"), *blocks.chain[1:]]
    targets = [blocks.memory[0], layers(gpu), *blocks.memory[1:]]
    found = labels(await either.read(NAMESPACE, asked, targets))
    assert found == ["hit", "never written", "hit", "hit"]
    assert await blocks.there() == blocks.data
    assert joined(gpu, targets[1]) == b"-" * SIZE


async def test_without_checksums_bytes_come_as_they_are(
    served: dev.Dev, of_kind: Callable[[str], Make]
) -> None:
    async with served.pool(configured(served, "direct", "ucx", verify=False)) as pool:
        for kind in ("read", "write"):
            await (await of_kind(kind)("unverified", [500, SIZE] * 2, in_both)).arrive(pool)


async def test_bytes_that_rot_in_the_server_reach_no_device(
    either: Pool, to_read: Make, served: dev.Dev
) -> None:
    (server,) = served.servers
    blocks = await to_read("rot", [SIZE] * 4)
    for digest in blocks.chain[1:3]:
        entry = server.store.index.peek(NAMESPACE, 0, digest)
        server.tier.view(entry.offset, SIZE)[SIZE - 1] ^= 1  # type: ignore[attr-defined]
    assert await blocks.move(either) == ["hit", "corrupt", "corrupt", "hit"]
    nothing = b"-" * SIZE  # no wrong byte reaches an engine's layers
    assert await blocks.there() == [blocks.data[0], nothing, nothing, blocks.data[3]]
    assert either.counters["corrupt"] == 2
    assert server.store.index.peek(NAMESPACE, 0, blocks.chain[1]) is None  # it has looked, too


def damage(monkeypatch: Patch, at: int = 5) -> None:
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
    client: Pool, to_read: Make, served: dev.Dev, monkeypatch: Patch
) -> None:
    blocks = await to_read("wire")
    damage(monkeypatch)
    assert await blocks.move(client) == ["corrupt", "hit", "hit"]
    assert await blocks.there() == [b"-" * SIZE, *blocks.data[1:]]
    (server,) = served.servers  # its copy is right, so it stays
    assert server.store.index.peek(NAMESPACE, 0, blocks.chain[0]) is not None


async def test_auto_stages_what_came_wrong_and_then_all(
    auto: Pool, to_read: Make, monkeypatch: Patch
) -> None:
    """The pool's copy is right, and the request gets it. That way is not used again."""
    blocks = await to_read("distrust", memory=in_both)
    with monkeypatch.context() as patch:
        damage(patch)
        await blocks.arrive(auto)
    assert auto.counters["direct_corrupt"] == 2
    assert auto.counters["direct_read_bytes"] == SIZE
    blocks.refill()
    await blocks.arrive(auto)
    assert auto.counters["direct_read_bytes"] == SIZE
    assert auto.counters["staged_read_bytes"] == 5 * SIZE


async def test_auto_without_a_fabric_is_staged_and_says_so_once(
    served: dev.Dev, to_read: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvpool")
    for transports, why in ((("ucx",), "on this host"), (("tcp",), "none of tcp reaches devices")):
        blocks = await to_read(f"no fabric {why}")
        caplog.clear()
        async with served.pool(configured(served, "auto", *transports)) as pool:
            for _ in range(2):
                blocks.refill()
                await blocks.arrive(pool)
            assert pool.counters["staged_read_bytes"] == 6 * SIZE
        (said,) = [one for one in caplog.messages if "are staged" in one]
        assert said.startswith("blocks for devices are staged")
        assert why in said


async def test_direct_without_a_fabric_says_so_at_the_start(
    served: dev.Dev, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    for has_fabric, path in ((False, "direct"), (True, "direct"), (False, "auto")):
        caplog.clear()
        monkeypatch.setattr(UcxTransport, "has_fabric", has_fabric)
        async with served.pool(configured(served, path)):
            said = "no lane to devices has RDMA" in caplog.text
        assert said is (not has_fabric and path == "direct")


async def test_a_silent_lane_to_devices_is_left_for_a_while(
    auto: Pool, to_read: Make, served: dev.Dev, monkeypatch: Patch
) -> None:
    """The server is well, and so are its lanes to the host, the only way to it: the next read has
    its blocks at once."""
    asked = []

    async def silent(*arguments: Any, **named: Any) -> None:
        asked.append(arguments)
        await asyncio.sleep(60)

    blocks = await to_read("silent")
    monkeypatch.setattr(ucx.UcxDeviceChannel, "read_to_device", silent)
    hasty = configured(served, "auto", "ucx", attempt_s=0.2, hedge_s=0.2)
    async with served.pool(hasty) as pool:
        pool._servers._host = auto._servers._host
        await pool.members()
        await compiled(pool, blocks.gpu)
        await blocks.move(pool)
        assert len(asked) == 1
        blocks.refill()
        await blocks.arrive(pool, timeout=10.0)
        assert len(asked) == 1
        assert pool.counters["staged_read_bytes"] == 3 * SIZE


async def test_no_byte_comes_before_the_callers_own_work_has_ended(
    client: Pool, to_read: Make, gpu: FakeGpu
) -> None:
    """What it has asked the device for may still read the old contents of that memory."""
    blocks = await to_read("computed", memory=in_rows)
    (old,) = blocks.memory[0]
    seen = gpu.tensor(bytes(SIZE))
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
        seen.copy_(old)  # runs when it is asked for
        reading = asyncio.ensure_future(blocks.move(client))
        gpu.stop()
        await asyncio.sleep(0.1)
        assert not reading.done()
        assert gpu.content(old) == b"-" * SIZE
    gpu.go_on()
    assert await reading == ["hit"] * 3
    assert gpu.content(seen) == b"-" * SIZE
    assert await blocks.there() == blocks.data


@pytest.mark.parametrize("memory", [in_rows, in_layers])
async def test_no_call_waits_for_a_compiler_beyond_its_deadline(
    client: Pool, to_read: Make, monkeypatch: Patch, memory: Any
) -> None:
    """It takes seconds, once; a call that ends meanwhile, in any way, does not end that."""
    go_on, compilations = threading.Event(), []

    def compiles(device: Any) -> None:
        compilations.append(device)
        assert go_on.wait(20)

    monkeypatch.setattr(direct, "_compile", compiles)
    blocks = await to_read("compiler", memory=memory)
    calls = [blocks.move(client, slice(n, n + 1), timeout=0.3) for n in range(3)]
    async with asyncio.timeout(10):
        assert await asyncio.gather(*calls) == [["deadline"]] * 3
    cancelled = asyncio.ensure_future(blocks.move(client))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    await asyncio.wait([cancelled], timeout=10)
    assert cancelled.cancelled()
    reading = asyncio.ensure_future(blocks.arrive(client))
    await asyncio.sleep(0.05)
    go_on.set()
    await reading
    assert len(compilations) == 1


async def test_closing_the_pool_ends_direct_reads(served: dev.Dev, to_read: Make) -> None:
    blocks = await to_read("closing")
    async with served.pool(configured(served, "direct")) as pool:
        await blocks.arrive(pool)
        reading = asyncio.ensure_future(blocks.move(pool))
        await asyncio.sleep(0)
    with contextlib.suppress(Closed, Unavailable):
        await reading
    assert not [t for t in threading.enumerate() if t.name.startswith("kvpool-device")]


async def read_while_it_ends(
    apart: tuple[str, Child],
    gpu: FakeGpu,
    patch: Patch,
    signal_: int,
    written: Callable[[], Awaitable[None]] | None = None,
) -> list[bytes]:
    """No hit, no byte after the answer, also when a frozen one goes on to send. What has arrived.

    `written` is called between what is written and what is read.
    """
    address, server = apart
    digests = keys("dies", 24)
    look, ended = Transfer.look, []

    def die(transfer: Transfer) -> None:
        look(transfer)
        received = any(isinstance(one, FakeTensor) for one in gpu.registered)
        if received and transfer.completed >= 5 and not ended:
            ended.append(transfer.completed)
            server.signal(signal_)

    async with await connect(config=hasty(address)) as pool:
        await pool.write(NAMESPACE, digests, values(digests, LARGE))
        if written is not None:
            await written()
        patch.setattr(Transfer, "look", die)
        targets = [in_both(gpu, number, b"-" * LARGE) for number in range(1, 25)]
        try:
            results = await pool.read(NAMESPACE, digests, targets, timeout=3.0)
            assert ended
            assert not any(result.status.hit for result in results)
            before = [joined(gpu, one) for one in targets]
        finally:
            if signal_ == signal.SIGSTOP:
                server.signal(signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert [joined(gpu, one) for one in targets] == before
        assert all(one == b"-" * LARGE for one in before[::2]), "in layers: all of it or nothing"
    return before


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_ends_in_mid_transfer(
    apart: tuple[str, Child], gpu: FakeGpu, monkeypatch: Patch, signal_: int
) -> None:
    before = await read_while_it_ends(apart, gpu, monkeypatch, signal_)
    assert any(one[:1] != b"-" for one in before)  # in its midst


# --- mistakes that people make: each is seen ------------------------------------------------------


def hash_before_the_copy_has_ended(patch: Patch) -> None:
    """The transport answers when the receives are posted."""

    async def at_once(self: Any, payload: Any, deadline: float | None) -> None:
        async with self._moving() as transfer:
            for (buffer,) in payload.blocks:
                transfer.receive(buffer)

    patch.setattr(ucx.UcxStream, "_fetch", at_once)


def wrong_stream(patch: Patch) -> None:
    """The kernels run on one stream, and another one is waited for."""

    def elsewhere(sources: Any, targets: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream(sources[0].device)):
            copy_rows(sources, targets)

    patch.setattr(direct, "copy_rows", elsewhere)


def buffer_reused_before_the_event(patch: Patch) -> None:
    """The scatter is queued, and the scratch memory goes to the next round."""

    async def queued(self: Any, queue: Any, finish: Any) -> Any:
        if finish is not direct._nothing:
            return await run(self, queue, finish)
        with self.on_stream():
            return finish(queue())

    run = DeviceThread.run
    patch.setattr(DeviceThread, "run", queued)


@pytest.mark.parametrize(
    "mistake",
    [
        hash_before_the_copy_has_ended,
        wrong_stream,
        buffer_reused_before_the_event,
    ],
)
async def test_a_planted_mistake_is_seen(
    client: Pool, to_read: Make, monkeypatch: Patch, mistake: Any
) -> None:
    monkeypatch.setattr(direct, "SCRATCH", 2 * SIZE + 1000)
    right, wrong = [await to_read(name, [SIZE] * 7, in_both) for name in ("right", "wrong")]
    await right.arrive(client)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        await wrong.arrive(client)


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
