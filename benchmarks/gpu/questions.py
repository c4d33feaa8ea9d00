"""What direct reads and writes rely on of UCX and a device, asked of UCX itself.

Two workers in this process, the same classes that the transport `ucx` uses. Memory of the host is
asked first: it shows that the question can be answered at all (design: device-memory).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from benchmarks.gpu.report import Answer
from kvpool.checksum import checksum
from kvpool.device.checksum import device_checksums, unsigned
from kvpool.ops import process
from kvpool_transports.ucx_context import make_context
from kvpool_transports.ucx_worker import UcxPath, Worker

_TOKEN, _PIECE = 8, 1 << 20
_LARGE = 64 << 20
_WAIT_S = 20.0
#: At most so many, in so many seconds: on a processor a hash of a MiB takes half a second.
_MESSAGES, _ASK_S = 200, 15.0


def rendezvous(device: str) -> Answer:
    """Whether a sender waits for its receiver, from and to memory of this device."""
    return process.run(_rendezvous(device))


def closing(device: str) -> Answer:
    """Whether nothing writes into memory any more after a receive was ended by closing its end."""
    return process.run(_closing(device))


def ordering(device: str) -> Answer:
    """Whether a kernel that starts after UCX's completion sees every byte."""
    return process.run(_ordering(device))


def sending_order(device: str) -> Answer:
    """Whether UCX sends what a kernel has written, once the kernel's event has passed."""
    return process.run(_sending_order(device))


async def _rendezvous(device: str) -> Answer:
    early = []
    async with _ends(device) as (near, far):
        for size in (_TOKEN, _TOKEN, _PIECE):  # the first message also sets up the lanes
            sending, receiving = near.transfer(), far.transfer()
            early.append(sending.send(_buffer(_memory(size, device))))
            receiving.receive(_buffer(_memory(size, device)))
            await _both(sending, receiving)
    return Answer(not any(early[1:]), f"sent without a receiver: {sum(early[1:])} of 2")


async def _closing(device: str) -> Answer:
    count = _LARGE // _PIECE
    async with _ends(device) as (near, far):
        sending, receiving = near.transfer(), far.transfer()
        source, target = _memory(_LARGE, device, 1), _memory(_LARGE, device, 0)
        for number in range(count):
            receiving.receive(_buffer(target[number * _PIECE : (number + 1) * _PIECE]))
        for number in range(count):
            sending.send(_buffer(source[number * _PIECE : (number + 1) * _PIECE]))
        # In the middle of it: some pieces are there, and some have begun.
        await receiving.until(count * 3 // 4, asyncio.get_running_loop().time() + _WAIT_S)
        arrived = int(target.count_nonzero())
        await receiving.stop()
        target.fill_(7)
        _synchronize(device)
        for _ in range(200):  # the sender goes on for a while
            await asyncio.sleep(0.001)
        changed = int((target != 7).sum())
        await sending.stop()
    if not 0 < arrived < _LARGE:
        raise RuntimeError(f"closed with {arrived} of {_LARGE} bytes there: nothing was shown")
    return Answer(changed == 0, f"closed at {arrived >> 20} of 64 MiB; {changed} bytes came later")


async def _ordering(device: str) -> Answer:
    wrong = asked = 0
    async with _ends(device) as (near, far):
        for number in _messages():
            asked += 1
            data = torch.randint(0, 256, (_PIECE,), dtype=torch.uint8)
            want = checksum(data.numpy().data, number)
            target = _memory(_PIECE, device)
            sending, receiving = near.transfer(), far.transfer()
            receiving.receive(_buffer(target))
            sending.send(_buffer(data))
            await _both(sending, receiving)
            wrong += unsigned(device_checksums([[target]], [number])) != [want]
    return Answer(wrong == 0, f"{wrong} of {asked} messages were not whole when they were hashed")


async def _sending_order(device: str) -> Answer:
    wrong = asked = 0
    async with _ends(device) as (near, far):
        source = _memory(_PIECE, device)
        for number in _messages():
            asked += 1
            data = torch.randint(0, 256, (_PIECE,), dtype=torch.uint8)
            source.copy_(data.to(device))
            source.bitwise_xor_(number % 256)
            _synchronize(device)
            target = _memory(_PIECE, "cpu")
            sending, receiving = near.transfer(), far.transfer()
            receiving.receive(_buffer(target))
            sending.send(_buffer(source))
            await _both(sending, receiving)
            wrong += not torch.equal(target, data ^ number % 256)
    return Answer(wrong == 0, f"{wrong} of {asked} messages had other bytes than the kernel's")


def _messages() -> Iterator[int]:
    """Numbers of messages, until there are enough or the time is over."""
    until = time.monotonic() + _ASK_S
    for number in range(_MESSAGES):
        if time.monotonic() > until:
            return
        yield number


@asynccontextmanager
async def _ends(device: str) -> AsyncIterator[tuple[UcxPath, UcxPath]]:
    """Both ends of an endpoint, of two workers."""
    # Others, an RDMA card's for example: UCX_TLS and UCX_NET_DEVICES.
    own = device == "cpu" or "UCX_TLS" in os.environ
    lanes = {} if own else {"TLS": "tcp,cuda_copy,self"}
    context = make_context(local=True, settings=lanes)
    workers = Worker(context), Worker(context)
    near, far = workers[0].path(), workers[1].path()
    near.meet(workers[1].address, far.number)
    far.meet(workers[0].address, near.number)
    try:
        yield near, far
    finally:
        for path in (near, far):
            path.close()
        for worker in workers:
            worker.close()


async def _both(sending: Any, receiving: Any) -> None:
    deadline = asyncio.get_running_loop().time() + _WAIT_S
    for transfer in (receiving, sending):
        await transfer.until(0, deadline)
        transfer.end()


def _memory(size: int, device: str, value: int = 3) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=device)


def _buffer(tensor: torch.Tensor) -> Any:
    """Memory as UCX takes it: a buffer of the host, or what says that it lies on a device."""
    return tensor.numpy().data if tensor.device.type == "cpu" else tensor


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
