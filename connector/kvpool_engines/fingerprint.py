"""The fingerprint of an engine's weights as they are in memory.

Equal for equal weights on two hosts. Of a large model a part is read: positions are drawn from a
seed that is the same everywhere. (design: namespace)
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import torch

#: Bytes that are read at random positions of all tensors together, and values of each at least.
_SAMPLED_BYTES: Final = 1 << 20
_SAMPLED_VALUES_MIN: Final = 64
#: Bytes of rows that are summed, by the kind of device. A GPU reads all that it has: at 1.6 TB/s or
#: more, in less than 50 ms of its time.
SUMMED_BYTES: Final = {"cuda": 1 << 60}
SUMMED_BYTES_ELSEWHERE: Final = 64 << 20
#: Each row's sum is multiplied by another odd number, so that exchanged rows are seen.
_ROW_STEP: Final = 0x1E3779B97F4A7C15

#: Rows that are summed at a time: beside the weights, a GPU needs 3 x 8 bytes for each.
_SUMS_AT_ONCE: Final = 1 << 18

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MemoryFingerprint(NamedTuple):
    """`hidden` counts tensors whose values the engine keeps where they cannot be read, such as
    weights that a kernel's library has packed for itself."""

    digest: str
    hidden: int


def memory(
    tensors: Iterable[tuple[str, torch.Tensor]], *, summed_bytes: int | None = None
) -> MemoryFingerprint:
    """A hash of tensors where they are, on a CPU or a GPU, with their names, types and shapes.

    It depends on how they lie in memory, which is the same in engines that pack alike. Of each
    tensor it takes the first and the last value and values at random positions, together at
    least 1 MiB (or all there is), and the sum of every row; of tensors that are not on a GPU it
    sums as many rows, evenly spread, as have `summed_bytes` (64 MiB) together.
    """
    plain = [part for name, tensor in tensors for part in _plain(name, tensor)]
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in plain) or 1
    hasher = hashlib.sha256()
    values: dict[torch.device, list[torch.Tensor]] = {}
    hidden = 0
    for name, tensor in plain:
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if not tensor.numel() or tensor.device.type == "meta":
            hidden += 1
            continue
        integers = _as_integers(tensor.detach())
        share = _SAMPLED_BYTES / total
        on_device = values.setdefault(tensor.device, [])
        on_device.append(_sampled(name, integers, share))
        limit = SUMMED_BYTES.get(tensor.device.type, summed_bytes or SUMMED_BYTES_ELSEWHERE)
        on_device.append(_summed(integers, -(-total // limit)))
    for of_device in values.values():  # one copy from each device, whatever the number of tensors
        hasher.update(torch.cat(of_device).cpu().numpy().tobytes())
    return MemoryFingerprint(hasher.hexdigest()[:12], hidden)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor, or those that a wrapper (TorchAO's quantized weights, say) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for inner in flatten()[0]:
        yield from _plain(f"{name}.{inner}", getattr(tensor, inner))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: comparing and adding them is exact, also of NaN."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _sampled(name: str, integers: torch.Tensor, share: float) -> torch.Tensor:
    count = integers.numel()
    wanted = min(count, max(_SAMPLED_VALUES_MIN, int(count * share) + 1))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    positions = torch.randint(count, (wanted,), generator=generator)
    positions[0], positions[-1] = 0, count - 1
    # By coordinates: the tensor may be a view whose rows are not contiguous.
    where = torch.unravel_index(positions.to(integers.device), integers.shape)
    return (integers[where] if integers.ndim else integers.reshape(1)).to(torch.int64)


def _summed(integers: torch.Tensor, every: int) -> torch.Tensor:
    rows = integers[::every] if integers.ndim > 1 else integers
    if rows.ndim > 1 and rows[0].is_contiguous() and rows.stride(-1) == 1 and _wide(rows):
        rows = rows.view(torch.int64)  # adding words of 8 bytes is 20 times faster than converting
    inner = math.prod(rows.shape[1:-1])
    step = max(1, _SUMS_AT_ONCE // inner)
    total = torch.zeros(1, dtype=torch.int64, device=rows.device)
    for first in range(0, rows.shape[0] if rows.ndim else 1, step):
        some = rows[first : first + step] if rows.ndim else rows
        sums = (some.sum(-1, dtype=torch.int64) if rows.ndim > 1 else some.to(torch.int64)).ravel()
        start = 2 * first * inner + 1
        numbers = torch.arange(start, start + 2 * sums.numel(), 2, device=sums.device)
        total += (sums * numbers.mul_(_ROW_STEP)).sum()
    return total


def _wide(rows: torch.Tensor) -> bool:
    """Whether rows can be seen as words of 8 bytes."""
    words = 8 // rows.element_size()
    parts = [rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1]]
    return all(part % words == 0 for part in parts)
