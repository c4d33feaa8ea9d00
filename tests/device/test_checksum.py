"""The checksum as a program of torch: bit for bit that of xxhash, wherever the bytes lie."""

from __future__ import annotations

import itertools
import random

import pytest
import xxhash

from kvpool.checksum import checksum

torch = pytest.importorskip("torch", reason="devices need torch")

from kvpool.device import checksum as device  # noqa: E402  (it is for torch)

DATA = random.Random(24).randbytes((4 << 20) + 4096)
SEEDS = (0, 1, 0x9E3779B185EBCA87, 2**64 - 1)
#: Around the places where the algorithm takes another way.
EDGES = sorted(
    {
        edge + off
        for edge in (1, 4, 8, 16, 128, 240, 256, 1024, 2048, 8192, 9216, 16384)
        for off in (-1, 0, 1)
    }
    | {1024 * k + 64 * s + off for k in (1, 2, 9) for s in (0, 1, 15) for off in (-1, 0, 1)}
)


def tensor(data: bytes, shift: int = 0) -> torch.Tensor:
    """Its bytes, `shift` bytes behind an address at which a word may begin."""
    whole = torch.zeros(len(data) + shift + 8, dtype=torch.uint8)
    first = -whole.data_ptr() % 8 + shift
    row = whole[first : first + len(data)]
    if data:
        row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return row


def on_device(blocks: list[list[torch.Tensor]], seeds: list[int]) -> list[int]:
    return device.unsigned(device.device_checksums(blocks, seeds))


def test_every_length_up_to_4_kib() -> None:
    blocks = [DATA[:size] for size in range(4097)]
    seeds = [SEEDS[size % 4] for size in range(4097)]
    want = [
        xxhash.xxh3_64_intdigest(block, seed) for block, seed in zip(blocks, seeds, strict=True)
    ]
    found = on_device([[tensor(block)] for block in blocks], seeds)
    assert [size for size in range(4097) if found[size] != want[size]] == []


@pytest.mark.parametrize("shift", [1, 3, 4, 7])
def test_blocks_that_begin_anywhere(shift: int) -> None:
    blocks = [DATA[size : 2 * size] for size in EDGES if size]
    found = on_device([[tensor(block, shift)] for block in blocks], [5] * len(blocks))
    assert found == [checksum(block, 5) for block in blocks]


def test_a_block_in_pieces_is_its_concatenation() -> None:
    drawn = random.Random(3)
    blocks, want = [], []
    for seed in range(40):
        rows = [drawn.randrange(1, 700) for _ in range(drawn.randrange(1, 9))]
        begin = drawn.randrange(4096)
        data = DATA[begin : begin + sum(rows)]
        want.append(checksum(data, seed))
        cuts = [sum(rows[:i]) for i in range(len(rows) + 1)]
        blocks.append([tensor(data[a:b], seed % 8) for a, b in itertools.pairwise(cuts)])
    assert on_device(blocks, list(range(40))) == want


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, (4 << 20) + 777])
def test_large_blocks(size: int) -> None:
    """Several windows of the torch program, of which the last is not whole."""
    assert on_device([[tensor(DATA[:size])]] * 2, [9, 10]) == [
        checksum(DATA[:size], 9),
        checksum(DATA[:size], 10),
    ]


def test_64_mib() -> None:
    whole = (DATA[: 4 << 20]) * 16
    row = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    assert on_device([[row]], [1]) == [checksum(whole, 1)]


def test_one_bit_anywhere_changes_it() -> None:
    data = bytearray(DATA[:3000])
    seen = {checksum(data, 2)}
    blocks = []
    for at in range(0, 3000, 37):
        data[at] ^= 1 << at % 8
        blocks.append([tensor(bytes(data))])
        data[at] ^= 1 << at % 8
    seen |= set(on_device(blocks, [2] * len(blocks)))
    assert len(seen) == len(blocks) + 1
