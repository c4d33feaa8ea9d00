"""The kernels of device memory, in Triton: the checksum of a batch, and copies of many rows.

Import it only where `kvpool.device.checksum.uses_kernels` says so: it needs triton. Each function
here makes one launch for a whole batch, on the thread's current stream. With `TRITON_INTERPRET=1`
the same kernels run on a CPU, word for word, which is how the tests compare them with xxhash
(design: checksums).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvpool.device import xxh3 as plan

#: Bytes of one row that one program copies.
TILE: Final = 8192

# Only these may be read inside of a kernel, and no annotation but constexpr stands in one.
_STRIPE = tl.constexpr(plan.STRIPE)
_STRIPES = tl.constexpr(plan.STRIPES)
_STEP = tl.constexpr(plan.CHAIN_STEP)
_KEY_WORDS = tl.constexpr(plan.KEY_WORDS)
_SCRAMBLE = tl.constexpr(plan.SCRAMBLE_KEYS)
_LAST = tl.constexpr(plan.LAST_KEYS)
_MERGE = tl.constexpr(plan.MERGE_KEYS)
_START = tl.constexpr(plan.START)
_PRIME32_1 = tl.constexpr(plan.PRIME32_1)
_PRIME64_1 = tl.constexpr(plan.PRIME64_1)
_AVALANCHE = tl.constexpr(plan.AVALANCHE)


def checksums(blocks: Sequence[torch.Tensor], keys: torch.Tensor) -> torch.Tensor:
    """As `xxh3.torch_checksums`: one launch, with one program of one warp for each block.

    Programs of different blocks run side by side; a program reads its block once, in order.
    """
    where = torch.tensor([(block.data_ptr(), len(block)) for block in blocks], dtype=torch.int64)
    found = torch.empty(len(blocks), dtype=torch.int64, device=keys.device)
    aligned = all(block.data_ptr() % 8 == 0 for block in blocks)
    _hash[(len(blocks),)](where.to(keys.device), keys, found, ALIGNED=aligned, num_warps=1)
    return found


def copy_rows(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """As `checksum.copy_rows`: one launch for all pieces of all rows."""
    rows = np.concatenate([_pieces(*pair) for pair in zip(sources, targets, strict=True)])
    aligned = not (rows & 7).any()
    # The tiles first: a grid has 2**31 - 1 programs in this dimension, 65,535 in the next.
    grid = (triton.cdiv(int(rows[:, 2].max()), TILE) * len(rows),)
    where = torch.from_numpy(rows).to(sources[0].device)
    _copy[grid](where, len(rows), ALIGNED=bool(aligned), TILE=TILE, num_warps=4)


def _pieces(source: torch.Tensor, target: torch.Tensor) -> NDArray[np.int64]:
    """For each piece of a row where it is, where it goes, and its size."""
    in_pieces = max(source, target, key=torch.Tensor.dim)
    count, size = in_pieces.shape if in_pieces.dim() == 2 else (1, len(in_pieces))
    found = np.full((count, 3), size)
    for column, side in enumerate((source, target)):
        step = side.stride(0) if side.dim() == 2 else size
        found[:, column] = side.data_ptr() + step * np.arange(count)
    return found


@triton.jit(do_not_specialize=["rows"])  # or it is compiled again for 1, and for 16
def _copy(where, rows, ALIGNED: tl.constexpr, TILE: tl.constexpr):  # noqa: N803
    program = tl.program_id(0)
    row = where + (program % rows) * 3
    tile = (program // rows).to(tl.int64)
    source, target, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if ALIGNED:
        word = tile * (TILE // 8) + tl.arange(0, TILE // 8)
        source_words = source.to(tl.pointer_type(tl.int64))
        target_words = target.to(tl.pointer_type(tl.int64))
        inside = word < size // 8
        tl.store(target_words + word, tl.load(source_words + word, mask=inside), mask=inside)
    else:
        byte = tile * TILE + tl.arange(0, TILE)
        source_bytes = source.to(tl.pointer_type(tl.uint8))
        target_bytes = target.to(tl.pointer_type(tl.uint8))
        inside = byte < size
        tl.store(target_bytes + byte, tl.load(source_bytes + byte, mask=inside), mask=inside)


@triton.jit
def _words(address, word, inside, ALIGNED: tl.constexpr):  # noqa: N803
    """Words of 64 bits. A device faults on one that is not aligned, so then it is eight bytes."""
    if ALIGNED:
        pointer = address.to(tl.pointer_type(tl.uint64)) + word
        return tl.load(pointer, mask=inside, other=0)
    else:
        first = address.to(tl.pointer_type(tl.uint8)) + word * 8
        value = tl.load(first, mask=inside, other=0).to(tl.uint64)
        for byte in tl.static_range(1, 8):
            value |= tl.load(first + byte, mask=inside, other=0).to(tl.uint64) << (8 * byte)
        return value


@triton.jit
def _swap(lanes):
    """Each of eight lanes at the place of the one beside it."""
    even, odd = tl.split(tl.reshape(lanes, (4, 2)))
    return tl.reshape(tl.join(odd, even), (8,))


@triton.jit
def _stripe_sums(words, keys):
    """What stripes ([stripes, 8]; zeros where there is none) add to the accumulators."""
    mixed = words ^ keys
    products = (mixed & 0xFFFFFFFF) * (mixed >> 32)
    return tl.sum(products, axis=0) + _swap(tl.sum(words, axis=0))


@triton.jit
def _step(acc, words, keys, scramble):
    """The accumulators after one more KiB, and its scramble."""
    acc += _stripe_sums(words, keys)
    return (acc ^ (acc >> 47) ^ scramble) * _PRIME32_1


@triton.jit
def _hash(where, keys, found, ALIGNED: tl.constexpr):  # noqa: N803
    block = tl.program_id(0)
    address, size = tl.load(where + block * 2), tl.load(where + block * 2 + 1)
    keys = keys.to(tl.pointer_type(tl.uint64)) + block * _KEY_WORDS
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, _STRIPES)[:, None]
    word = stripe * 8 + lane[None, :]
    stripe_keys = tl.load(keys + stripe + lane[None, :])
    scramble = tl.load(keys + _SCRAMBLE + lane)
    acc = tl.load(keys + _START + lane)
    steps = (size - 1) // _STEP
    # Eight steps at a time: their loads do not wait for the chain, so several are under way at
    # once. One load after the other would wait for the memory at each KiB.
    for _ in range(steps // 8):
        for ahead in tl.static_range(8):
            words = _words(address + ahead * _STEP, word, word >= 0, ALIGNED)
            acc = _step(acc, words, stripe_keys, scramble)
        address += 8 * _STEP
    for _ in range(steps % 8):
        acc = _step(acc, _words(address, word, word >= 0, ALIGNED), stripe_keys, scramble)
        address += _STEP
    # Stripes that are left are masked: their words and their keys are zero, so they add nothing.
    left = size - steps * _STEP
    inside = (stripe < (left - 1) // _STRIPE) & (lane[None, :] >= 0)
    acc += _stripe_sums(
        _words(address, word, inside, ALIGNED), tl.where(inside, stripe_keys, 0).to(tl.uint64)
    )
    last = _words(address + left - _STRIPE, lane, lane >= 0, False)  # it begins anywhere
    mixed = last ^ tl.load(keys + _LAST + lane)
    acc += (mixed & 0xFFFFFFFF) * (mixed >> 32) + _swap(last)
    even, odd = tl.split(tl.reshape(acc ^ tl.load(keys + _MERGE + lane), (4, 2)))
    merged = tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=0) + size.to(tl.uint64) * _PRIME64_1
    merged = (merged ^ (merged >> 37)) * _AVALANCHE
    merged ^= merged >> 32
    tl.store(found + block, merged.to(tl.int64, bitcast=True))
