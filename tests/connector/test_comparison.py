"""How different two blocks are: what rounding does is far from what another model does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvpool_engines.comparison import TOLERANCES, LayerBytes, difference, segments, spread

DTYPES = sorted(TOLERANCES)


def numbers(seed: int, count: int = 4096) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def data(values: torch.Tensor, dtype: str) -> memoryview:
    tensor = values.to(getattr(torch, dtype)).contiguous()
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


def measured(ours: torch.Tensor, theirs: torch.Tensor, dtype: str = "float32") -> float:
    return difference([(data(ours, dtype), data(theirs, dtype))], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_and_rounded_numbers_are_within_the_tolerance(dtype: str) -> None:
    values = numbers(1)
    assert measured(values, values, dtype) == 0
    # Sums in another order: an error of a few units in the last place of bfloat16.
    rounded = values * (1 + 2**-8 * numbers(2).clamp(-2, 2) * (dtype not in ("float32",)))
    assert measured(values, rounded, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_numbers_are_beyond_the_tolerance(dtype: str) -> None:
    values = numbers(1)
    assert measured(values, numbers(2), dtype) > 1.2
    assert measured(values, -values, dtype) == pytest.approx(2, rel=0.01)
    assert measured(values, values * 2, dtype) == pytest.approx(2 / 3, rel=0.01)
    changed = measured(values, values + 0.4 * numbers(3), dtype)
    assert TOLERANCES[dtype] < changed < 0.6


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_decoded_as_torch_does(dtype: str) -> None:
    """The difference of two known vectors, whatever their type is."""
    ours, theirs = torch.full((32,), 3.0), torch.full((32,), -5.0)
    assert measured(ours, theirs, dtype) == 2
    ours[:], theirs[:] = 0.25, 0.75
    assert measured(ours, theirs, dtype) == pytest.approx(1.0)
    small = torch.tensor([2.0**-8] * 16 + [0.0] * 16)  # subnormal in float8_e4m3fn
    assert measured(small, small * 3, dtype) == pytest.approx(1.0)


def test_large_numbers_do_not_hide_small_ones() -> None:
    """Keys may be a hundred times as long as values."""
    values = numbers(1).reshape(-1, 32)
    values[1::3] *= 100
    other = values.clone()
    other[0::3], other[2::3] = numbers(2).reshape(-1, 32)[0::3], numbers(3).reshape(-1, 32)[2::3]
    assert measured(values.flatten(), other.flatten()) > 1.2


def test_a_few_tokens_that_differ_are_no_mismatch() -> None:
    values = numbers(1).reshape(-1, 32)
    other = values.clone()
    other[::4] = -other[::4]
    assert measured(values.flatten(), other.flatten()) == 0


def test_what_is_no_number_is_equal_to_itself_only() -> None:
    values = numbers(1)
    other = values.clone()
    other[::32] = np.nan
    assert measured(values, other) == 2
    values[::32] = np.nan
    values[1] = other[1] = np.inf
    other[2::32] += 1.0
    assert measured(values, other) == 2  # NaN says nothing about the other numbers
    assert measured(values, values.clone()) == 0
    zero = torch.zeros(64)
    assert measured(zero, -zero) == 0
    assert measured(zero, zero + 1) == 2


def test_a_vector_that_is_not_full_counts() -> None:
    assert measured(torch.ones(40), torch.ones(40)) == 0
    assert measured(torch.ones(8), -torch.ones(8)) == 2
    assert difference([], "float32") == 0


def test_the_median_is_over_all_pairs_and_steps() -> None:
    values = numbers(1, 1 << 17)
    third = len(values) // 3 // 32 * 32
    other = torch.cat([values[:third], -values[third:]])
    assert measured(values, other) == 2
    pairs = [
        (data(values[:third], "float32"), data(other[:third], "float32")),
        (data(values[third:], "float32"), data(other[third:], "float32")),
    ]
    assert difference(pairs, "float32") == 2
    more, same = [values[:third]] * 2, [other[:third]] * 2
    assert measured(torch.cat([values, *more]), torch.cat([other, *same])) == 0


@pytest.mark.parametrize("cuts", [(), (64,), (10, 20, 96), (32, 64), (96, 96)])
def test_layers_are_cut_out_of_pieces_of_any_size(cuts: tuple[int, ...]) -> None:
    sizes = {"a": 32, "b": 64, "c": 32}
    layers = [LayerBytes(name, size, "float32") for name, size in sizes.items()]
    whole = bytes(range(128))
    bounds = [0, *cuts, 128]
    pieces = [whole[a:b] for a, b in itertools.pairwise(bounds)]
    found = [
        (layer.layer, b"".join(a for a, _ in pairs), b"".join(b for _, b in pairs))
        for layer, pairs in segments(layers, pieces, bytearray(whole))
    ]
    cut = {"a": whole[:32], "b": whole[32:96], "c": whole[96:]}
    assert found == [(name, part, part) for name, part in cut.items()]


def test_blocks_of_another_size_are_refused() -> None:
    layers = [LayerBytes("a", 32, "float32")]
    for ours, theirs in (([bytes(31)], bytes(32)), ([bytes(32)], bytes(33)), ([], bytes(32))):
        with pytest.raises(ValueError, match="another size than 32"):
            list(segments(layers, ours, theirs))


def test_a_type_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(KeyError):
        difference([(memoryview(b"1234"), memoryview(b"1235"))], "uint8")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 31, 4), [0, 10, 20, 30]),
        ((5, 8, 16), [5, 6, 7]),
        ((5, 6, 1), [5]),
        ((0, 9, 1), [8]),
        ((3, 3, 4), []),
        ((4, 3, 4), []),
        ((0, 9, 2), [0, 8]),
    ],
)
def test_blocks_are_spread_evenly(arguments: tuple[int, int, int], expected: list[int]) -> None:
    assert spread(*arguments) == expected
