"""Many namespaces: in order, and no question costs more with many of them."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import pytest

from kvpool.config import MasterConfig
from kvpool.master.service import Master
from kvpool.master.state.block_map import BlockMap
from kvpool.master.state.directory import Directory
from kvpool.master.state.explanations import explain
from kvpool.master.state.namespace_map import NamespaceMap
from kvpool.master.state.server_record import Registration
from kvpool.types import TEXT_MAX, Namespace
from kvpool.wire import messages as wire
from tests.conftest import key, keys


def directory_of(*names: str) -> Directory:
    directory = Directory()
    directory.servers.register("s", Registration(1, "h", ("tcp://1",), ("dram",), 1 << 40), 0.0)
    for name in names:
        directory.stored("s", Namespace(name), 0, 0, [key(name)])
    return directory


def calls_of(work: Callable[[], object]) -> int:
    """Calls that it makes, and steps of generators: the same each time, on any machine."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("seed", range(3))
def test_namespaces_are_in_order(seed: int) -> None:
    rng = random.Random(seed)
    blocks = NamespaceMap()
    model: set[tuple[str, int]] = set()
    for step in range(9000):
        name, parts = f"{rng.randrange(4000):x}", rng.choice((1, 2, 8))
        goes = rng.random() < (0.9 if 5000 < step < 8000 else 0.2)
        if not goes:
            blocks[Namespace(name, parts)] = BlockMap()
            model.add((name, parts))
        elif (name, parts) in model:
            del blocks[Namespace(name, parts)]
            model.remove((name, parts))
        if step % 1000 == 0:
            place = name, parts
            found = [(one.name, one.parts) for one in blocks.after(*place)]
            assert found == sorted(one for one in model if one > place)
    for namespace in list(blocks):
        del blocks[namespace]
    assert list(blocks.after("")) == []
    blocks[Namespace("again")] = BlockMap()
    assert list(blocks.after("")) == [Namespace("again")]


def test_a_namespace_that_comes_again_is_there_once() -> None:
    blocks = NamespaceMap()
    for _ in range(2):
        blocks[Namespace("one")] = BlockMap()
    assert list(blocks.after("")) == [Namespace("one")]


def test_a_question_about_a_namespace_without_blocks_costs_the_same_with_many() -> None:
    asked = keys("x", 50)
    few = directory_of(*(f"@globex/{n}" for n in range(3)))
    many = directory_of(*(f"@globex/{n}" for n in range(3000)))
    for name in ("typo", "@acme/typo", "@globex/typo"):
        costs = [calls_of(partial(explain, one, Namespace(name), asked)) for one in (few, many)]
        assert costs[1] < 1.2 * costs[0]


def test_an_explanation_names_what_its_own_tenant_has() -> None:
    directory = directory_of("@acme/a", "@acme/b", "@acme2/c", "@globex/d", "model")

    def text(name: str) -> str:
        return explain(directory, Namespace(name), [key("x")])[0].text

    assert text("@acme/typo").endswith("namespaces with blocks: '@acme/a', '@acme/b'")
    assert text("@acme2/typo").endswith("namespaces with blocks: '@acme2/c'")
    assert text("@zebra/typo") == "this tenant has no blocks"
    assert text("typo").endswith("namespaces with blocks: '@acme/a', '@acme/b', '@acme2/c'")
    assert explain(Directory(), Namespace("typo"), [key("x")])[0].text == "the pool holds no blocks"


def test_an_explanation_fits_into_a_message() -> None:
    directory = Directory()
    wide = Namespace("wide", 8)
    for number in range(8):
        server = f"{number}" * 256
        own = Registration(1, "h", ("tcp://1",), ("d" * 256,), 1 << 40)
        directory.servers.register(server, own, 0.0)
        for part in range(8):
            directory.stored(server, wide, part, 0, [key("x")])
    (here,) = explain(directory, wide, [key("x")])
    assert len(here.text) == TEXT_MAX
    assert len(here.replicas) == 64
    for number in range(8):
        directory.servers.leave(f"{number}" * 256, 1)
    (lost,) = explain(directory, wide, [key("x")])
    assert lost.text.startswith("held by ")
    assert len(lost.text) == TEXT_MAX


async def test_a_master_that_has_just_begun_says_so() -> None:
    """And not that a block was never written, which it cannot know."""
    master = Master(MasterConfig(timeout_s=0.3), cast(Any, None))
    master._started = asyncio.get_running_loop().time() - 0.2

    def explained() -> str:
        asked = wire.Explain("one", 1, 16, b"x" * 16)
        answer = wire.decode_answer(wire.Explained, *master.handle(*wire.encode(asked)))
        return answer.blocks[0][1]

    await master._tick()
    assert "just begun, and not heard from all servers yet" in explained()
    master._started -= 1
    await master._tick()
    assert explained() == "the pool holds no blocks"
