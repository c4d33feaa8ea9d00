"""XXH3-64 with a seed as a program of torch, for long inputs: bit for bit that of xxhash.

XXH3 takes a long input as *stripes* of 64 bytes, eight 64-bit lanes each. Sixteen stripes, 1 KiB,
are summed in parallel; then the eight accumulators are scrambled. So there is a chain of one short
step for each KiB, and everything else is parallel (design: checksums).

torch has no arithmetic on uint64. int64 wraps around in the same way; only shifts to the right, and
the product of 128 bits at the end, need care.

Source of the algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

#: XXH3 has other programs for inputs up to this many bytes. Such a block is hashed on the host: to
#: bring its bytes there costs what it costs to bring its checksum.
SHORT: Final = 240
STRIPE: Final = 64
STRIPES: Final = 16
#: Bytes between two scrambles.
CHAIN_STEP: Final = STRIPE * STRIPES

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1: Final = 0x9E3779B1
PRIME64_1: Final = 0x9E3779B185EBCA87
AVALANCHE: Final = 0x165667919E3779F9
_START: Final = (
    0xC2B2AE3D,
    PRIME64_1,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    PRIME32_1,
)
#: Where the parts of a row of `key_table` begin, in words of 64 bits.
STRIPE_KEYS: Final = 0
SCRAMBLE_KEYS: Final = 16
LAST_KEYS: Final = 24
MERGE_KEYS: Final = 32
START: Final = 40
KEY_WORDS: Final = 48

_LOW: Final = 0xFFFFFFFF
#: KiB that the torch program takes at a time: its intermediate values need some times as much.
_WINDOW: Final = 4096


def key_table(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """For each seed a row of `KEY_WORDS`: all that the hash of one block needs beside its bytes."""
    secret = np.frombuffer(_SECRET, np.uint64)
    seeded = np.repeat(secret[None], len(seeds), axis=0)
    column = np.array(seeds, np.uint64)[:, None]
    seeded[:, 0::2] += column  # wraps around, as the algorithm wants
    seeded[:, 1::2] -= column
    octets = seeded.view(np.uint8)
    start = np.broadcast_to(np.array(_START, np.uint64), (len(seeds), 8))
    # The last stripe's keys and those of the merge begin at odd places in the secret.
    last, merge = (
        np.ascontiguousarray(octets[:, begin : begin + 64]).view(np.uint64) for begin in (121, 11)
    )
    return np.concatenate([seeded, last, merge, start], axis=1)


def torch_checksums(blocks: Sequence[torch.Tensor], keys: torch.Tensor) -> torch.Tensor:
    """The checksums of long, contiguous blocks, as a program of torch. `keys` is a `key_table`.

    Blocks of equal size are hashed together.
    """
    import torch

    found = torch.empty(len(blocks), dtype=torch.int64, device=keys.device)
    by_size: dict[int, list[int]] = {}
    for position, block in enumerate(blocks):
        by_size.setdefault(len(block), []).append(position)
    for size, positions in by_size.items():
        chosen = torch.tensor(positions, device=keys.device)
        # Stacked, so that the first byte lies where a word may begin, wherever the block does.
        data = torch.stack([blocks[i] for i in positions])
        found[chosen] = _hash_equal(data, size, keys[chosen])
    return found


def _hash_equal(data: torch.Tensor, size: int, keys: torch.Tensor) -> torch.Tensor:
    """Of blocks of `size` bytes each, one in each row of `data`."""
    import torch

    stripe_keys = torch.stack(
        [keys[:, s : s + 8] for s in range(STRIPE_KEYS, STRIPE_KEYS + STRIPES)], 1
    )
    scramble = keys[:, SCRAMBLE_KEYS : SCRAMBLE_KEYS + 8]
    acc = keys[:, START : START + 8].clone()
    steps = (size - 1) // CHAIN_STEP
    for first in range(0, steps, _WINDOW):
        count = min(_WINDOW, steps - first)
        begin = first * CHAIN_STEP
        words = _words(data[:, begin : begin + count * CHAIN_STEP]).unflatten(
            1, (count, STRIPES, 8)
        )
        for sums in _stripe_sums(words, stripe_keys[:, None]).unbind(1):
            acc += sums
            acc = (acc ^ _shift(acc, 47) ^ scramble) * PRIME32_1
    stripes = (size - 1 - steps * CHAIN_STEP) // STRIPE
    if stripes:
        begin = steps * CHAIN_STEP
        words = _words(data[:, begin : begin + stripes * STRIPE]).unflatten(1, (stripes, 8))
        acc += _stripe_sums(words, stripe_keys[:, :stripes])
    last = _words(data[:, size - STRIPE :])[:, None]
    acc += _stripe_sums(last, keys[:, None, LAST_KEYS : LAST_KEYS + 8])
    return _merge(acc ^ keys[:, MERGE_KEYS : MERGE_KEYS + 8], size)


def _stripe_sums(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What stripes add to the accumulators: words and keys are [..., stripes, 8]."""
    mixed = words ^ keys
    products = (mixed & _LOW) * _shift(mixed, 32)
    # Each word also goes to the lane beside its own.
    swapped = words.unflatten(-1, (4, 2)).flip(-1).flatten(-2)
    sums: torch.Tensor = (products + swapped).sum(-2)
    return sums


def _merge(acc: torch.Tensor, size: int) -> torch.Tensor:
    """The eight accumulators of each block as one number."""
    pairs = acc.unflatten(1, (4, 2))
    merged = _fold(pairs[..., 0], pairs[..., 1]).sum(1) + _signed(size * PRIME64_1)
    merged = (merged ^ _shift(merged, 37)) * AVALANCHE
    return merged ^ _shift(merged, 32)


def _fold(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both halves of the product of 128 bits, one XOR the other."""
    low, high = one & _LOW, _shift(one, 32)
    other_low, other_high = other & _LOW, _shift(other, 32)
    bottom, crossed = low * other_low, high * other_low
    middle = _shift(bottom, 32) + (crossed & _LOW) + low * other_high
    upper = _shift(crossed, 32) + _shift(middle, 32) + high * other_high
    return upper ^ ((middle << 32) | (bottom & _LOW))


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros: torch's own shift of int64 repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Rows of bytes as rows of 64-bit words; a copy where a row does not begin at a word."""
    import torch

    aligned = data.storage_offset() % 8 == 0 and data.stride(0) % 8 == 0
    return (data if aligned else data.clone(memory_format=torch.contiguous_format)).view(
        torch.int64
    )


def as_int64(values: NDArray[np.uint64]) -> torch.Tensor:
    import torch

    return torch.from_numpy(values.view(np.int64))


def _signed(value: int) -> int:
    """The number of 64 bits with these lowest bits, as int64 has it."""
    return ((value & 0xFFFFFFFFFFFFFFFF) ^ (1 << 63)) - (1 << 63)
