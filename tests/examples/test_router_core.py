"""The reference router's decisions, by table; the hashes of prompts as vLLM has them."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path
from typing import Any

import pytest

from examples.router import core
from examples.router.core import DeviceBlocks, Engine, Estimate, Prompt, Router, estimate
from examples.router.prompts import block_hashes
from kvpool.kv_events import ClearedEvent, RemovedEvent, StoredEvent
from kvpool.types import HostScore

ROUTER = Path(core.__file__).parent
BLOCKS = list(range(100, 110))


def stored(*hashes: Any, medium: str | None = "GPU", group: int | None = None) -> StoredEvent:
    return StoredEvent(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[],
        block_size=16,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
    )


def engine(url: str, blocks: int = 0, **fields: Any) -> Engine:
    made = Engine(url, **{"host": url, "prefill_rate": 1000.0, **fields})
    made.blocks.apply([stored(*BLOCKS[:blocks])])
    return made


def router(policy: str, *engines: Engine) -> Router:
    made = Router(policy)
    made.engines = {one.url: one for one in engines}
    return made


def score(host: str, near: int, far: int, seconds: float, size: int = 1000) -> HostScore:
    return HostScore(host, near, far, {"dram": near}, {"dram": far}, size, seconds, True)


def known(**scores: HostScore) -> Prompt:
    """A prompt of 170 tokens: ten blocks and a rest."""
    return Prompt("s", tokens=170, block_size=16, hashes=BLOCKS, scores=scores)


#: Of the pool's blocks, for an engine on host a, and for one on host b: near, far, and seconds.
NEAR_B = known(a=score("a", 0, 10, 0.1), b=score("b", 10, 0, 0.01))
SLOW = known(a=score("a", 0, 10, 9.0), b=score("b", 0, 10, 9.0))
NEAR_BOTH = known(a=score("a", 10, 0, 0.0), b=score("b", 10, 0, 0.1))
ONLY_B = known(b=score("b", 10, 0, 0.01))


def two(a: dict[str, Any], b: dict[str, Any]) -> list[Engine]:
    return [engine("a", **a), engine("b", **b)]


@pytest.mark.parametrize(
    ("policy", "engines", "prompt", "expected"),
    [
        ("round_robin", two({}, {}), known(), ("b", "turn")),
        ("least_loaded", two({"answering": 2}, {"answering": 1}), known(), ("b", "load")),
        ("least_loaded", two({"reported": 3}, {"answering": 1}), known(), ("b", "load")),
        ("session", two({"answering": 1}, {}), known(), ("b", "load")),
        ("precise", two({"blocks": 8}, {"blocks": 2}), known(), ("a", "device")),
        ("precise", two({"lost": True}, {"blocks": 2}), known(), ("b", "device")),
        ("precise", two({"blocks": 8, "pending_s": 0.5}, {"blocks": 2}), known(), ("b", "queue")),
        ("precise", two({"blocks": 8, "pending_s": 0.05}, {"blocks": 2}), known(), ("a", "device")),
        ("precise", two({}, {"answering": 9}), known(), ("a", "cold")),
        # The pool has all of it; one engine's host is nearer.
        ("precise", two({}, {}), NEAR_B, ("b", "pool")),
        # Loading takes longer than computing: as if the pool had nothing.
        ("precise", two({}, {"answering": 1}), SLOW, ("a", "cold")),
        # What an engine has measured counts more than the score: 1,000 bytes at 1 B/s, 1 MB/s.
        ("precise", two({"load_rate": 1.0}, {"load_rate": 1e6}), NEAR_BOTH, ("b", "pool")),
        # Three blocks on the device and seven from the pool beat eight on a device that waits.
        ("precise", two({"blocks": 8, "pending_s": 0.2}, {"blocks": 3}), ONLY_B, ("b", "queue")),
        ("precise", two({"answering": 1}, {}), Prompt("s"), ("b", "load")),
    ],
)
def test_decisions(
    policy: str, engines: list[Engine], prompt: Prompt, expected: tuple[str, str]
) -> None:
    for blocks in engines:
        assert blocks.load >= 0
    chosen = router(policy, *engines).decide(prompt)
    assert chosen is not None
    assert (chosen.engine.url, chosen.reason) == expected


def test_a_session_stays_and_its_children_come_along_while_there_is_no_queue() -> None:
    a, b = engine("a"), engine("b")
    fleet = router("session", a, b)

    def asked(prompt: Prompt, *without: str) -> tuple[str, str]:
        chosen = fleet.decide(prompt, without)
        assert chosen is not None
        return chosen.engine.url, chosen.reason

    home, _ = asked(Prompt("root"))
    fleet.engines[home].answering = 1
    assert asked(Prompt("root")) == (home, "session")
    assert asked(Prompt("child", "root")) == (home, "parent")
    fleet.engines[home].answering = 3
    other = "b" if home == "a" else "a"
    assert asked(Prompt("second child", "root")) == (other, "load")
    assert asked(Prompt("child", "root")) == (home, "session")
    # Its engine fails: the other one, and there it stays.
    assert asked(Prompt("root"), home) == (other, "load retry")
    assert asked(Prompt("root")) == (other, "session")
    fleet.ended(Prompt("root"))
    assert asked(Prompt("root")) == (other, "session")  # it did not say that it ends
    fleet.ended(Prompt("root", ends=True))
    assert asked(Prompt("root")) == (other, "load")
    a.lost = b.lost = True
    assert fleet.decide(Prompt("root")) is None


def test_each_decision_is_explained_and_everything_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "SESSIONS_MAX", 100)
    fleet = router("precise", engine("a", 8), engine("b"))
    for number in range(core.DECISIONS_MAX + 100):
        fleet.decide(known()._replace(session=f"s{number}"))
    assert len(fleet.decisions) == core.DECISIONS_MAX
    assert len(fleet._homes) == 100
    last = fleet.decisions[-1]
    assert (last["engine"], last["reason"], last["tokens"]) == ("a", "device", 170)
    assert {one["engine"]: one["device"] for one in last["estimates"]} == {"a": 8, "b": 0}


def test_an_estimate_loads_only_what_the_device_lacks() -> None:
    prompt = known(a=score("a", 5, 5, 1.0))
    found = estimate(prompt, engine("a", 4, pending_s=2.0, prefill_rate=10.0), 1.0)
    assert found._replace(engine=None) == Estimate(None, 2.0, 0.6, 1.0, 4, 5, 5)  # type: ignore[arg-type]
    unknown = estimate(prompt, engine("a", prefill_rate=0.0), usual_rate=100.0)
    assert (unknown.load_s, unknown.compute_s) == (1.0, 0.1)


def test_a_fan_out_is_spread_once_to_hosts_that_lack_it() -> None:
    a, b, c = engine("a"), engine("b"), engine("c", host=core.NOWHERE)
    fleet = router("precise", a, b, c)
    scores = {"a": score("a", 10, 0, 0.1), "b": score("b", 0, 10, 0.1)}
    scores[core.NOWHERE] = score(core.NOWHERE, 0, 10, 0.1)
    child = known(**scores)._replace(parent="root")
    chosen = fleet.decide(child)
    assert chosen is not None
    assert fleet.spread_to(child, chosen) == ["b"]
    assert fleet.spread_to(child._replace(session="second"), chosen) == []
    several = known(**scores)._replace(choices=4)
    assert fleet.spread_to(several, chosen._replace(engine=b)) == ["b"]
    assert fleet.spread_to(several, chosen._replace(engine=a)) == []
    assert fleet.spread_to(known(**scores), chosen._replace(engine=b)) == []


def test_what_a_device_has_follows_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = DeviceBlocks()
    blocks.apply([stored(1, 2, 3), stored(9, medium="CPU"), stored(8, group=1)])
    blocks.apply([stored(b"\0" * 24 + (4).to_bytes(8, "big"), medium=None, group=0)])
    assert blocks.leading([1, 2, 3, 4, 9]) == 4
    blocks.apply([RemovedEvent(block_hashes=[3], medium="CPU")])
    assert blocks.leading([1, 2, 3]) == 3
    blocks.apply([RemovedEvent(block_hashes=[2, 77], medium="GPU")])
    assert blocks.leading([1, 2, 3]) == 1
    blocks.apply([ClearedEvent()])
    assert len(blocks) == 0
    monkeypatch.setattr(core, "DEVICE_BLOCKS_MAX", 2)
    blocks.apply([stored(1), stored(2), stored(3)])
    assert len(blocks) == 2


def test_hashes_are_those_of_vllm() -> None:
    """Computed with vLLM 0.32 and cbor2, tokens of each length of an integer."""
    hashes = block_hashes(list(range(100)), 32)
    assert len(hashes) == 3
    assert hashes[-1].hex() == "80d0a9942e3cb1f85f03b63b76721c23d7e141ad355a78653b9609db03c257b7"
    salted = block_hashes([300] * 32 + [70000] * 32, 32, salt="tenant")
    assert salted[-1].hex() == "9447bfc268952fa4cb102a67306c28e5d92f87c463451101e9a07a71ce25a3db"
    assert block_hashes([1] * 31, 32) == []


def test_it_stays_small() -> None:
    """It is read as a whole: at most 650 lines, not counting blank lines, docstrings, comments."""
    lines = set()
    for path in ROUTER.glob("*.py"):
        tree = ast.parse(path.read_text())
        texts = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                code = token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
                if code and token.start[0] not in texts:
                    lines.add((path.name, token.start[0]))
    assert len(lines) <= 650, len(lines)


def test_the_core_is_pure() -> None:
    for name in ("core.py", "prompts.py"):
        for node in ast.walk(ast.parse((ROUTER / name).read_text())):
            assert not isinstance(node, ast.Await | ast.AsyncFunctionDef), name
            if isinstance(node, ast.Import):
                assert not {"asyncio", "time", "random"} & {one.name for one in node.names}, name
