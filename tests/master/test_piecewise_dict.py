"""The dict of the map and of a store's index: as a dict, in pieces, for walks in steps."""

from __future__ import annotations

import random

import pytest

from kvpool.piecewise_dict import PIECE_KEYS, PiecewiseDict, compact


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    pieces: PiecewiseDict[int, int] = PiecewiseDict()
    model: dict[int, int] = {}
    for number in range(12_000):
        key = rng.randrange(8_000)
        if rng.random() < 0.8:
            pieces[key] = model[key] = number
        elif key in model:
            del pieces[key], model[key]
        else:
            with pytest.raises(KeyError):
                del pieces[key]
        assert (len(pieces), pieces.get(key)) == (len(model), model.get(key))
        assert (key in pieces) == (key in model)
    assert dict(pieces.items()) == model
    assert sorted(pieces) == sorted(model)
    assert sorted(pieces.values()) == sorted(model.values())
    keys = range(8_000)
    assert pieces.get_all(keys) == [model.get(key) for key in keys]
    assert sum(map(len, pieces.pieces())) == len(model), "each piece once"


def test_one_key_splits_one_piece() -> None:
    pieces: PiecewiseDict[int, None] = PiecewiseDict()
    count = 1
    for key in range(20_000):
        pieces[key] = None
        if key % 97 == 0:
            before, count = count, len(list(pieces.pieces()))
            assert count <= before + 1
    assert max(map(len, pieces.pieces())) <= 2 * PIECE_KEYS + 1


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_meets_every_key_that_stays(seed: int) -> None:
    """Also when pieces are split before, behind and under the walk."""
    rng = random.Random(seed)
    stay = [rng.randbytes(16) for _ in range(5_000)]
    go = [rng.randbytes(16) for _ in range(5_000)]
    pieces: PiecewiseDict[bytes, int] = PiecewiseDict()
    for key in stay + go:
        pieces[key] = 0
    met: set[bytes] = set()
    for piece in pieces.pieces():
        met.update(piece)
        for _ in range(rng.randrange(3_000) if len(pieces) < 100_000 else 0):
            pieces[rng.randbytes(16)] = 1
        for _ in range(min(len(go), rng.randrange(500))):
            del pieces[go.pop()]
    assert met.issuperset(stay)


def test_a_piece_that_lost_its_keys_is_small() -> None:
    piece = dict.fromkeys(range(1000), 0)
    before = piece.__sizeof__()
    for key in range(990):
        del piece[key]
    assert piece.__sizeof__() == before
    compact(piece)
    assert piece == dict.fromkeys(range(990, 1000), 0)
    assert piece.__sizeof__() < before / 10
