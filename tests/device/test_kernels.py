"""The Triton kernels: run word for word by Triton's interpreter, and compiled for real devices.

`make test WITH=kernels` runs this in an environment of its own, because triton is a large
package; where it is missing these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="devices need torch")
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
pytest.importorskip("triton", reason="needs triton: make test WITH=kernels")

import torch

from kvpool.checksum import checksum
from kvpool.device import checksum as device
from kvpool.device import kernels, xxh3
from tests.device.test_checksum import DATA, EDGES, SEEDS, tensor

LONG = xxh3.SHORT + 1

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from kvpool.device import kernels

for capability in (80, 90, 100):
    target = GPUTarget("cuda", capability, 32)
    for aligned in (True, False):
        for kernel, signature, fixed in (
            (kernels._hash, "where:*i64 keys:*i64 found:*i64", {"ALIGNED": aligned}),
            (kernels._copy, "where:*i64 rows:i32", {"ALIGNED": aligned, "TILE": kernels.TILE}),
        ):
            types = dict(word.split(":") for word in signature.split())
            names = [*types, *fixed]
            source = ASTSource(
                kernel,
                types | dict.fromkeys(fixed, "constexpr"),
                {(names.index(name),): value for name, value in fixed.items()},
            )
            made = triton.compile(source, target=target, options={"num_warps": 1})
            print(capability, aligned, len(made.asm["cubin"]) > 1000)
"""


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "uses_kernels", lambda _: True)


def hashed(blocks: list[list[torch.Tensor]], seeds: list[int]) -> list[int]:
    return device.unsigned(device.device_checksums(blocks, seeds))


@pytest.mark.parametrize("first", range(0, 4097, 256))
def test_every_length_up_to_4_kib(first: int) -> None:
    sizes = range(first, min(first + 256, 4097))
    found = hashed([[tensor(DATA[:size])] for size in sizes], [SEEDS[size % 4] for size in sizes])
    want = [checksum(DATA[:size], SEEDS[size % 4]) for size in sizes]
    assert [s for s, a, b in zip(sizes, found, want, strict=True) if a != b] == []


@pytest.mark.parametrize("shift", [0, 1, 4, 7])
def test_blocks_that_begin_anywhere(shift: int) -> None:
    blocks = [DATA[size : 2 * size] for size in EDGES if size >= LONG]
    found = hashed([[tensor(block, shift)] for block in blocks], [3] * len(blocks))
    assert found == [checksum(block, 3) for block in blocks]


def test_one_unaligned_block_among_others() -> None:
    blocks = [[tensor(DATA[:1500], shift)] for shift in (0, 0, 5)]
    assert hashed(blocks, [1, 2, 3]) == [checksum(DATA[:1500], seed) for seed in (1, 2, 3)]


def test_blocks_in_pieces() -> None:
    rows = [tensor(DATA[a:b]) for a, b in ((0, 1000), (1000, 1003), (1003, 40000))]
    even = [tensor(DATA[a:b]) for a, b in ((0, 8192), (8192, 8200), (8200, 40000))]
    assert hashed([rows, even], [8, 9]) == [checksum(DATA[:40000], seed) for seed in (8, 9)]


def test_a_mebibyte() -> None:
    size = (1 << 20) + 65
    assert hashed([[tensor(DATA[:size])]], [4]) == [checksum(DATA[:size], 4)]


def test_both_forms_agree_on_a_batch() -> None:
    blocks = [tensor(DATA[i : i + 4096]) for i in range(8)]
    keys = xxh3.as_int64(xxh3.key_table(list(range(8))))
    assert torch.equal(kernels.checksums(blocks, keys), xxh3.torch_checksums(blocks, keys))


@pytest.mark.parametrize("shift", [0, 3])
def test_rows_are_copied_and_nothing_beside_them(shift: int) -> None:
    sizes = (1, 8, 16, 8191, 8192, 8200, 30000) if shift else (8, 16, 8192, 8200, 30000)
    sources = [tensor(DATA[i : i + size], shift) for i, size in enumerate(sizes)]
    around = [torch.full((size + 32,), 7, dtype=torch.uint8) for size in sizes]
    targets = [whole[16:-16] for whole in around]
    layers = [torch.arange(30000).byte().as_strided((3, 2000), (8200, 1), shift) for _ in "ab"]
    sources += [layers[0], sources[-1][:6000]]
    targets += [torch.zeros(6000, dtype=torch.uint8), layers[1]]
    device.copy_rows(sources, targets)
    pairs = zip(sources, targets, strict=True)
    assert all(torch.equal(one.flatten(), two.flatten()) for one, two in pairs)
    assert all(bool((torch.cat([whole[:16], whole[-16:]]) == 7).all()) for whole in around)


def test_they_compile_for_real_devices() -> None:
    """What the interpreter accepts, the compiler may refuse. No GPU and no driver is needed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == [
        f"{capability} {aligned} True"
        for capability in (80, 90, 100)
        for aligned in (True, False)
        for _ in range(2)
    ]
