"""What a device is asked for: right bytes, and figures. On the device `cpu` the same code runs."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Final

import torch

from benchmarks.device import Memory
from benchmarks.gpu.report import Answer
from benchmarks.transports import WAYS, Lane, lane
from kvpool import Namespace, WriteStatus
from kvpool.checksum import checksum
from kvpool.device.checksum import copy_rows, device_checksums, unsigned, uses_kernels
from kvpool.device.xxh3 import SHORT, as_int64, key_table, torch_checksums
from kvpool.ops import process

_NAMESPACE: Final = Namespace("acceptance")
_BATCH, _SIZE = 64, 2 << 20
#: What a network card of 400 Gb/s brings.
_NETWORK: Final = 50e9
_GEMM: Final = 8192
#: Which short lengths the torch program is asked for.
_EVERY: Final = 5


# --- right bytes ------------------------------------------------------------------------------


def torch_equals_xxhash(device: str) -> Answer:
    """The torch program alone, also where the kernels would run."""

    def hashed(blocks: list[torch.Tensor], seeds: list[int]) -> list[int]:
        return unsigned(torch_checksums(blocks, as_int64(key_table(seeds)).to(device)))

    sizes = [*range(SHORT + 1, 4097, _EVERY), *_edges(), 1 << 20]
    return _compared(sizes, lambda row, seed: hashed([row], [seed])[0], device)


def kernel_equals_xxhash(device: str) -> Answer:
    """What the product calls on this device, for one block and for all of them in one batch."""
    if device != "cpu" and not uses_kernels(torch.device(device)):
        raise RuntimeError("the kernels do not run on this device")
    sizes = [*range(4097), *_edges(), 1 << 20, 64 << 20]
    return _compared(
        sizes, lambda row, seed: unsigned(device_checksums([[row]], [seed]))[0], device
    )


def pieces_are_gathered_and_scattered(device: str) -> Answer:
    """Blocks in rows of any size and start: hashed as a whole, and copied with nothing beside."""
    drawn, wrong = random.Random(5), 0
    for _ in range(20):
        sizes = [drawn.randrange(1, 20000) for _ in range(drawn.randrange(2, 12))]
        data = [_tensor(drawn.randbytes(size), drawn.randrange(8), device) for size in sizes]
        whole = b"".join(bytes(row.cpu().numpy()) for row in data)
        wrong += unsigned(device_checksums([data], [9])) != [checksum(whole, 9)]
        around = [torch.full((size + 32,), 7, dtype=torch.uint8, device=device) for size in sizes]
        copy_rows(data, [row[16:-16] for row in around])
        wrong += not all(map(torch.equal, data, [row[16:-16] for row in around]))
        wrong += not all(bool((torch.cat([r[:16], r[-16:]]) == 7).all()) for r in around)
    return Answer(wrong == 0, f"{wrong} of 60 comparisons differ")


def a_wrong_byte_is_found(device: str) -> Answer:
    drawn = random.Random(6)
    row = _tensor(drawn.randbytes(_SIZE), 0, device)
    before, missed = unsigned(device_checksums([[row]], [1])), 0
    for _ in range(50):
        at, bit = drawn.randrange(_SIZE), 1 << drawn.randrange(8)
        row[at] ^= bit
        missed += unsigned(device_checksums([[row]], [1])) == before
        row[at] ^= bit
    same = unsigned(device_checksums([[row]], [1])) == before
    return Answer(missed == 0 and same, f"{missed} of 50 changed bits went unnoticed")


def tests_pass(*paths: str) -> Callable[[str], Answer]:
    """The repository's own tests in these files, with this interpreter."""

    def ask(device: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *paths],
            capture_output=True, text=True, timeout=140, check=False, env=dict(os.environ),
        )  # fmt: skip
        return Answer(done.returncode == 0, done.stdout.strip().rpartition("\n")[2])

    return ask


# --- figures ----------------------------------------------------------------------------------


def batch_is_hashed_fast(device: str) -> Answer:
    rate = _hash_rate(device)
    text = f"{rate / 1e9:.1f} GB/s for 64 blocks of 2 MiB"
    return Answer(rate >= 190e9, text, rate / 1e9, 190.0)


def one_block_is_hashed_soon(device: str) -> Answer:
    row = [torch.randint(0, 256, (_SIZE,), dtype=torch.uint8, device=device)]
    seconds = _best(lambda: device_checksums([row], [1]), device)
    text = f"{seconds * 1e3:.2f} ms for a block of 2 MiB"
    return Answer(seconds <= 0.7e-3, text, seconds * 1e3, 0.7)


def hashing_leaves_the_device_to_others(device: str) -> Answer:
    blocks = [[row] for row in _batch(device)]
    pause = _BATCH * _SIZE / _NETWORK

    def hash_at_the_networks_rate(stopped: threading.Event) -> None:
        with _own_stream(device):
            due = time.perf_counter()
            while not stopped.is_set():
                unsigned(device_checksums(blocks, list(range(_BATCH))))
                due = max(due + pause, time.perf_counter())
                time.sleep(max(0.0, due - time.perf_counter()))

    return _beside(hash_at_the_networks_rate, 0.03, device)


def pool_beside_a_plain_copy(calls: int) -> Callable[[str], Answer]:
    """`calls` writes and then reads at once, of 64 blocks of 2 MiB together, over shared memory."""

    def ask(device: str) -> Answer:
        return process.run(_pool_rates(device, calls))

    return ask


def pool_leaves_the_device_to_others(device: str) -> Answer:
    """Reads into the device, one after the other, beside products of matrices."""

    def read(stopped: threading.Event) -> None:
        with _own_stream(device):
            process.run(_read_until(stopped, device))

    return _beside(read, 0.05, device)


async def _pool_rates(device: str, calls: int) -> Answer:
    memory = Memory(device)
    limits = memory.limits()
    written, read = 0.0, 0.0
    async with AsyncExitStack() as stack:
        one, _ = await lane(WAYS[0], stack)
        for _ in range(4):  # the first warms pages and the device
            both = await _once(one, memory, calls)
            written, read = max(written, both[0]), max(read, both[1])
    out, into = limits["device to pinned"], limits["pinned to device"]
    return Answer(
        read >= into / 4 and written >= out / 4,
        f"write {written:.1f} GB/s, {written / out:.2f} of a pinned copy; "
        f"read {read:.1f} GB/s, {read / into:.2f} of one",
        read,
        into,
    )


async def _once(one: Lane, memory: Memory, calls: int) -> tuple[float, float]:
    keys = [secrets.token_bytes(32) for _ in range(_BATCH)]
    source, target = list(memory.source["device"]), list(memory.target["device"])
    parts = [slice(i * _BATCH // calls, (i + 1) * _BATCH // calls) for i in range(calls)]
    memory.target["device"].zero_()
    memory.wait()
    began = time.perf_counter()
    stored = await asyncio.gather(
        *(one.pool.write(_NAMESPACE, keys[part], source[part]) for part in parts)
    )
    between = time.perf_counter()
    results = await asyncio.gather(
        *(one.pool.read(_NAMESPACE, keys[part], target[part]) for part in parts)
    )
    ended = time.perf_counter()
    if {status for part in stored for status in part} != {WriteStatus.STORED}:
        raise RuntimeError("the pool did not store every block")
    if not all(result.status.hit for part in results for result in part):
        raise RuntimeError("the pool did not find every block")
    if not torch.equal(memory.source["device"], memory.target["device"]):
        raise RuntimeError("wrong bytes came back")
    await one.pool.remove(_NAMESPACE, keys)
    total = _BATCH * _SIZE / 1e9
    return total / (between - began), total / (ended - between)


async def _read_until(stopped: threading.Event, device: str) -> None:
    memory = Memory(device)
    keys = [secrets.token_bytes(32) for _ in range(_BATCH)]
    async with AsyncExitStack() as stack:
        one, _ = await lane(WAYS[0], stack)
        await one.pool.write(_NAMESPACE, keys, list(memory.source["device"]))
        while not stopped.is_set():
            await one.pool.read(_NAMESPACE, keys, list(memory.target["device"]))


# --- inside -----------------------------------------------------------------------------------


def _compared(sizes: list[int], hashed: Callable[[torch.Tensor, int], int], device: str) -> Answer:
    drawn, wrong = random.Random(7), []
    data = drawn.randbytes(1 << 20) * 64
    for size in sizes:
        seed, shift = drawn.getrandbits(64), size % 8 if size < 1 << 20 else 0
        if hashed(_tensor(data[:size], shift, device), seed) != checksum(data[:size], seed):
            wrong.append(size)
    return Answer(not wrong, f"{len(wrong)} of {len(sizes)} lengths differ{wrong[:5] or ''}")


def _edges() -> list[int]:
    edges = (256, 1024, 2048, 8192, 9216, 65536)
    return [
        edge * scale + off for edge in edges for scale in (1, 3) for off in (-1, 0, 1, 63, 64, 65)
    ]


def _tensor(data: bytes, shift: int, device: str) -> torch.Tensor:
    """These bytes, `shift` bytes behind an address at which a word may begin."""
    whole = torch.zeros(len(data) + 16, dtype=torch.uint8, device=device)
    first = -whole.data_ptr() % 8 + shift
    row = whole[first : first + len(data)]
    if data:
        row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return row


def _batch(device: str) -> torch.Tensor:
    return torch.randint(0, 256, (_BATCH, _SIZE), dtype=torch.uint8, device=device)


def _hash_rate(device: str) -> float:
    blocks = [[row] for row in _batch(device)]
    seeds = list(range(_BATCH))
    return _BATCH * _SIZE / _best(lambda: device_checksums(blocks, seeds), device)


def _best(work: Callable[[], object], device: str, rounds: int = 5) -> float:
    """Seconds of the fastest of some rounds, after one that compiles and warms."""
    seconds = []
    for _ in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _beside(work: Callable[[threading.Event], None], most: float, device: str) -> Answer:
    """By how much products of matrices get slower while `work` runs in a thread."""
    side = _GEMM if device != "cpu" else 32
    kind = torch.bfloat16 if device != "cpu" else torch.float32
    one = torch.randn(side, side, dtype=kind, device=device)
    alone = _best(lambda: [one @ one for _ in range(50)], device)
    stopped = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work(stopped)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        time.sleep(3.0 if device != "cpu" else 0.5)  # it has begun, and compiled what it needs
        together = _best(lambda: [one @ one for _ in range(50)], device)
    finally:
        stopped.set()
        thread.join()
    if failed:
        raise failed[0]
    slower = together / alone - 1
    return Answer(slower <= most, f"{slower:+.1%} ({alone * 1e3:.1f} ms alone)", slower, most)


@contextmanager
def _own_stream(device: str) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()
