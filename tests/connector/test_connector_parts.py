"""The connector's parts that need no engine: layouts, memory, names, fingerprints, settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from kvpool import ConfigError
from kvpool_connector import settings
from kvpool_connector.hints.request_params import OTHERS, Asked, Mistakes, parse_request
from kvpool_connector.memory import kv_layout as layout
from kvpool_connector.memory.block_memory import views_of
from kvpool_connector.memory.kv_layout import LayerSlice, LayerView, UnsupportedLayout
from kvpool_engines import namespace

SHAPE = LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 2, 4, 8

#: vLLM's layouts: the order of layer, block, head, token and content in memory.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def caches(order: Sequence[int], shape: Sequence[int] = SHAPE) -> dict[str, torch.Tensor]:
    """Layers as vLLM shows them, [block, head, token, content], over one allocation."""
    flat = torch.arange(math.prod(shape), dtype=torch.int32).to(torch.int16)
    shaped = flat.view([shape[axis] for axis in order])
    whole = shaped.permute([list(order).index(axis) for axis in range(5)])
    return {f"model.layers.{layer}.attn": whole[layer] for layer in range(shape[0])}


def test_neighbouring_layers_are_one_piece() -> None:
    """Where all layers of a block lie together it is copied at once."""
    buffers: list[torch.Tensor] = []
    (piece,) = layout.layer_slices(views_of(caches(LAYOUTS["BLHNC"]), buffers))
    size = LAYERS * HEADS * TOKENS * CONTENT * 2
    assert piece == LayerSlice(0, 0, size, size)
    assert len(layout.layer_slices(views_of(caches(LAYOUTS["LBHNC"]), buffers))) == LAYERS


def test_layers_are_taken_by_their_numbers() -> None:
    layers = {f"layers.{n}": torch.zeros(2, 1, 1, 1) for n in (10, 9, 1)}
    names = [view.layer for view in views_of(layers, [])]
    assert names == ["layers.1", "layers.9", "layers.10"]


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (LayerView("l", (4,), (1,), 2, 0, 0), "shape"),
        (LayerView("l", (4, 0), (1, 1), 2, 0, 0), "shape"),
        (LayerView("l", (4, 8192, 2), (1, 8, 3), 2, 0, 0), "pieces"),
        (LayerView("l", (4, 8, 8), (64, 1, 1), 2, 0, 0), "overlap"),
    ],
)
def test_a_layout_that_cannot_be_taken_is_refused(view: LayerView, why: str) -> None:
    with pytest.raises(UnsupportedLayout, match=why):
        layout.layer_slices([view])


def test_another_order_inside_a_block_is_another_packing() -> None:
    texts = {name: layout.describe(views_of(caches(order), [])) for name, order in LAYOUTS.items()}
    assert texts["LBHNC"] != texts["LBNHC"]
    assert texts["LBHNC"] == texts["BLHNC"]  # the bytes of a block are the same ones


def test_namespaces_tell_every_field_apart() -> None:
    base = {"model": "qwen", "weights": "abc", "seed": "1"}
    one = namespace.name(base, parts=1)
    assert one == namespace.name(dict(base), parts=1)
    assert one.name == "vllm/5 model=qwen weights=abc seed=1"
    others = [
        namespace.name({**base, "model": value}, parts=1)
        for value in ("qwen weights=abc", "qwen=", "", "q" * 600, "q" * 601, "qw\nen", "qwen~1")
    ]
    names = {other.name for other in others}
    assert len(names) == len(others)
    assert all(len(name.split(" ")) == 4 for name in names)
    assert namespace.name(base, parts=2) != one
    many = {f"field{n}": "x" * 60 for n in range(12)}
    first, second = (namespace.name({**many, "z": z}, parts=1) for z in "ab")
    assert first != second


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"load_timeout": 1}, "did you mean 'load_timeout_s'"),
        ({"zzz": 1}, "unknown setting 'zzz'; known: masters, cluster"),
        ({"masters": []}, "masters is [], expected a list of at least one text"),
        ({"masters": ["x:99999"]}, "master 'x:99999': expected host:port, such as 127.0.0.1:7450"),
        ({"load": "alwys"}, "one of 'always', 'auto', 'never'; did you mean 'always'?"),
        ({"load": 3}, "load is 3, expected one of 'always', 'auto', 'never'"),
        ({"copies": 0}, "copies is 0, expected a whole number from 1 to 16"),
        ({"load_timeout_s": "5"}, "is '5', expected a number from 0.001 to 3600"),
        ({"save_decode": "no"}, "save_decode is 'no', expected true or false"),
        ({"verify_rate": "1:10"}, "verify_rate is '1:10', expected a number from 0 to 1"),
        ({"verify_rate": float("nan")}, "verify_rate is nan, expected a number from 0 to 1"),
        ({"transports": ["smh"]}, "unknown transport 'smh'; did you mean 'shm'? installed: "),
        ({"transports": ["tcp?x=1"]}, "transport 'tcp' has no setting 'x'"),
        ({"transports": ["tcp", "?"]}, "transport '?': expected a name"),
    ],
)
def test_a_value_that_is_not_valid_is_answered_with_the_valid_ones(
    wrong: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings.parse(wrong)
    text = str(caught.value)
    assert text.startswith("kv_connector_extra_config: ")
    assert sentence in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"skipload": True}, "unknown key 'skipload'; did you mean 'skip_load'?"),
        ({"max_tokens_load": 3}, "did you mean 'max_load_tokens'?"),
        ({"zzz": 3}, "unknown key 'zzz'; known: session_id, resume_in_s, end_session, skip_save"),
        ({"skip_save": "yes"}, "skip_save is 'yes', expected true or false"),
        ({"max_load_tokens": -1}, "max_load_tokens is -1, expected a whole number from 0"),
        ({"max_load_tokens": True}, "max_load_tokens is True, expected a whole number"),
        ({"a\nb" * 99: 1}, "unknown key 'a\\nba"),
        ({"skip_load": [[1]] * 9}, "skip_load is list, expected true or false"),
        ({"max_load_tokens": -(10**4000)}, "max_load_tokens is int, expected a whole number"),
    ],
)
def test_a_key_that_is_misspelt_is_answered(given: dict[str, object], sentence: str) -> None:
    hints, (mistake,), _ = parse_request(Asked(given))
    assert hints == parse_request(Asked()).hints
    assert sentence in mistake
    assert len(mistake) < 300
    assert mistake.isprintable()


def test_keys_of_other_connectors_are_no_mistake() -> None:
    remote = {"do_remote_prefill": True, "remote_engine_id": "a", "_p_side_truncated": 1}
    hints, mistakes, _ = parse_request(
        Asked({**remote, **dict.fromkeys(OTHERS, 1), "skip_load": True})
    )
    assert (hints.skip_load, hints.skip_save, mistakes) == (True, False, [])


def test_clients_cannot_fill_the_log() -> None:
    mistakes = Mistakes()
    assert mistakes.new(["a", "b"]) == ["a", "b"]
    assert mistakes.new(["b", "c"]) == ["c"]
    assert sum(len(mistakes.new([str(n)])) for n in range(1000)) == 29
