"""Checksums and copies of blocks that lie on a device, computed there.

The checksum is that of `kvpool.checksum`, bit for bit. Both have two forms: Triton kernels for
CUDA, with one launch for a batch (`kernels.py`), and a program of torch for any device (`xxh3.py`)
(design: checksums).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvpool.checksum import checksum
from kvpool.device.xxh3 import SHORT, as_int64, key_table, torch_checksums

if TYPE_CHECKING:
    import torch

#: The rows of one block, whose concatenation it is; each is one dimension of bytes, or in copies
#: two: pieces of one size.
DeviceRows: TypeAlias = "Sequence[torch.Tensor]"


def device_checksums(blocks: Sequence[DeviceRows], seeds: Sequence[int]) -> torch.Tensor:
    """The checksum of each block with its seed, as an int64 tensor on the blocks' device.

    All blocks lie on one device; a block of several rows is gathered there first. The work is
    queued on the thread's current stream, of that device: read the result (`unsigned`) when it has
    ended. For a batch with a block of at most `SHORT` bytes the call waits for the stream.
    """
    import torch

    device = blocks[0][0].device
    sizes = [sum(map(len, rows)) for rows in blocks]
    found = torch.empty(len(blocks), dtype=torch.int64, device=device)
    short = [i for i, size in enumerate(sizes) if size <= SHORT]
    if short:
        values = [checksum(_on_host(blocks[i]), seeds[i]) for i in short]
        found[torch.tensor(short, device=device)] = as_int64(np.array(values, np.uint64)).to(device)
    long = [i for i, size in enumerate(sizes) if size > SHORT]
    if not long:
        return found
    whole = contiguous([blocks[i] for i in long])
    keys = as_int64(key_table([seeds[i] for i in long])).to(device, non_blocking=True)
    if uses_kernels(device):
        from kvpool.device import kernels

        hashed = kernels.checksums(whole, keys)
    else:
        hashed = torch_checksums(whole, keys)
    if not short:
        return hashed
    found[torch.tensor(long, device=device)] = hashed
    return found


def unsigned(found: torch.Tensor) -> list[int]:
    """Checksums as `kvpool.checksum` gives them. Waits until the device has them."""
    return [int(value) & 0xFFFFFFFFFFFFFFFF for value in found.cpu().tolist()]


def uses_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on this device."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def contiguous(blocks: Sequence[DeviceRows]) -> list[torch.Tensor]:
    """Each block as one row: its own, if it has one; else all of these are gathered at once."""
    import torch

    whole: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for rows in blocks:
        if len(rows) == 1:
            whole.append(rows[0])
            continue
        sizes = [len(row) for row in rows]
        joined = torch.empty(sum(sizes), dtype=torch.uint8, device=rows[0].device)
        whole.append(joined)
        sources += rows
        targets += torch.split(joined, sizes)
    copy_rows(sources, targets)
    return whole


def copy_rows(sources: DeviceRows, targets: DeviceRows) -> None:
    """Copy each source to the target of equal size, on the current stream: gather and scatter.
    One of each pair has one dimension.

    One launch for all of them where the Triton kernels run, one for each row elsewhere. Targets
    must not overlap each other, nor a source.
    """
    if not sources:
        return
    if uses_kernels(sources[0].device):
        from kvpool.device import kernels

        kernels.copy_rows(sources, targets)
        return
    for source, target in zip(sources, targets, strict=True):
        shape = max(source.shape, target.shape, key=len)
        target.view(shape).copy_(source.view(shape), non_blocking=True)


def _on_host(rows: DeviceRows) -> bytes:
    return b"".join(bytes(row.cpu().numpy()) for row in rows)
