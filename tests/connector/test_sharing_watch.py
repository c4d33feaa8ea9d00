"""Lines about what no request fails for."""

from __future__ import annotations

import pytest

from kvpool import Namespace
from kvpool_connector.scheduler.sharing_watch import (
    LOOKUPS_BEFORE_COMPARED,
    SharingWatch,
    others_of_this_model,
)


def named(parts: int = 1, **fields: str) -> Namespace:
    return Namespace("vllm/5 " + " ".join(f"{k}={v}" for k, v in fields.items()), parts)


OURS = named(model="qwen3-4x128", memory="m", seed="1", group="0:Full")


def test_names_are_compared_once_after_so_many_lookups_and_again_under_a_new_name() -> None:
    watch = SharingWatch(lambda line: None)
    some = {"lookups": LOOKUPS_BEFORE_COMPARED - 1.0}
    assert not watch.on_metrics(some, 0.0)
    assert watch.on_metrics({"lookups": 1.0}, 1.0)
    assert not watch.on_metrics({"lookups": 5000.0}, 2.0)
    watch.on_new_names()
    assert not watch.on_metrics(some, 3.0)
    assert watch.on_metrics(some, 4.0)


@pytest.mark.parametrize(
    ("other", "blocks", "told"),
    [
        (named(model="qwen3-4x128", memory="m", seed="2", group="0:Full"), 7, ["seed"]),
        (OURS, 7, []),
        (named(model="qwen3-4x128", memory="m", seed="2", group="0:Full"), 0, []),
        (named(model="llama-4x128", memory="m", seed="2", group="0:Full"), 7, []),
        (named(model="qwen3-4x128", memory="other", seed="2", group="0:Full"), 7, []),
        (named(model="qwen3-4x128", memory="m", seed="1", group="1:Window"), 7, []),
        (Namespace(OURS.name, 2), 7, ["parts"]),
        (Namespace("by hand"), 7, []),
    ],
)
def test_what_keeps_engines_apart(other: Namespace, blocks: int, told: list[str]) -> None:
    found = others_of_this_model([OURS], [(other, blocks)])
    assert found == [f"7 blocks differ in {field}" for field in told]


def test_of_many_names_the_largest_three_are_told() -> None:
    others = [
        (named(model="qwen3-4x128", memory="m", seed=str(n), group="0:Full"), n)
        for n in range(2, 9)
    ]
    found = others_of_this_model([OURS], others)
    assert [text.split()[0] for text in found] == ["8", "7", "6"]
