"""The check on the model: what it makes of a file of `make demo-fleet`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.fleet import demo, demo_results
from benchmarks.fleet.__main__ import app
from benchmarks.fleet.demo_results import DemoRun
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.links import SharedLink


def session(
    name: str,
    *turns: tuple[int, list[int]],
    parent: str = "",
    after: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """`turns`: the tokens of each prompt, and its blocks."""
    listed = [{"tokens": tokens, "blocks": blocks} for tokens, blocks in turns]
    return {"name": name, "parent": parent, "after": after, "turns": listed}


TEN = list(range(10))
#: The second one begins after the first one's first answer and shares its blocks.
SESSIONS = [
    session("root", (330, TEN), (650, list(range(20)))),
    session("child", (490, [*TEN, *range(50, 55)]), parent="root", after=("root", 0)),
]


def probe(kind: str, tokens: int, cached: int, first_s: float, **others: Any) -> dict[str, Any]:
    one = {"kind": kind, "tokens": tokens, "cached": cached, "first_s": first_s, "step_s": 0.01}
    return {**one, "row": 0, **others}


PROBES = [
    probe("held", 1000, 992, 0.05),
    probe("cold", 1000, 0, 1.05),  # 1,000 tokens a second
    probe("loaded", 1000, 1000, 0.15),
    probe("beside", 1000, 0, 1.55, engines=3),  # three in 1.5 s: two at a time
    probe("routed", 100, 96, 0.08),
    probe("crowd", 100, 96, 0.12, engines=4),
]
PROBES += [{**one, "row": 2} for one in PROBES]


def write(tmp_path: Path, mode: str = "with the pool", **changed: Any) -> Path:
    """What a run of the demo leaves."""
    answers = [{"prompt": 330, "cached": 0, "first_s": 0.5}] * 3
    document = {
        **{"engines": 3, "engine_bytes": 8192 * 10_240, "engine_tokens": 10_240},
        **{"pool_bytes": 1 << 30, "block": 32, "at_once": 4, "output": 6},
        "sessions": SESSIONS,
        "probes": PROBES,
        "rows": [
            {"router": router, "mode": mode, "answers": answers, "seconds": 3.0}
            for router in ("example: round_robin", "vllm-router: kv_aware")
        ],
        **changed,
    }
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document))
    return file


def results(tmp_path: Path, mode: str = "with the pool", **changed: Any) -> DemoRun:
    return demo_results.read(write(tmp_path, mode, **changed))


def test_rates_are_those_of_all_probes_of_the_run(tmp_path: Path) -> None:
    """Each prompt alone by the least of its kind, and what they cost each other by the mean."""
    busy = [
        probe("cold", 1000, 0, 9.0, row=5),
        probe("held", 1000, 992, 5.0, row=5),
        probe("beside", 1000, 0, 4.55, engines=3, row=5),
    ]
    known = demo_results.rates(results(tmp_path, probes=[*PROBES, *busy]), 0)
    assert known.token_s == pytest.approx(1e-3)
    assert known.attention_s == 0  # one length says nothing of it
    assert known.load_bytes_s == pytest.approx(1000 * 8192 / 0.1)
    assert known.cores == pytest.approx(1.2)  # three in 1.5, 1.5 and 4.5 s
    assert known.request_s == pytest.approx(0.05)  # no less than alone
    assert known.noise > 0
    known = demo_results.rates(results(tmp_path), 0)
    assert known.cores == pytest.approx(2.0)
    assert known.request_s == pytest.approx(0.06)  # four at a time on two cores
    assert known.step_s == 0.01
    assert known.noise == 0


def test_engines_may_do_less_beside_each_other_than_one_alone(tmp_path: Path) -> None:
    slow = [{**one, "first_s": 6.05} if one["kind"] == "beside" else one for one in PROBES]
    known = demo_results.rates(results(tmp_path, probes=slow), 0)
    assert known.cores == pytest.approx(0.5)


def test_a_token_takes_longer_the_more_there_are_before_it(tmp_path: Path) -> None:
    """100 us each, and 0.1 us for each token before: 0.15 s of 1,000 tokens, 0.4 s of 2,000."""
    cold = [probe("cold", 1000, 0, 0.05 + 0.15), probe("cold", 2000, 0, 0.05 + 0.4)]
    others = [one for one in PROBES if one["kind"] != "cold"]
    file = results(tmp_path, "without the pool", probes=[*others, *cold])
    known = demo_results.rates(file, 0)
    assert known.token_s == pytest.approx(100e-6)
    assert known.attention_s == pytest.approx(100e-9)
    assert known.noise == pytest.approx(0)
    # 330 tokens, and 330 after 320 that are cached; then five steps each.
    alone_s = 330 * (100e-6 + 165 * 100e-9) + 330 * (100e-6 + (320 + 165) * 100e-9)
    one = {"engines": 1, "at_once": 1, "sessions": SESSIONS[:1]}
    file = results(tmp_path, "without the pool", probes=[*others, *cold], **one)
    (row,) = demo.predictions(file)
    work_s = alone_s + 2 * row.rates.request_s
    assert row.predicted.seconds == pytest.approx(work_s / row.rates.cores + 2 * 5 * 0.01)


def test_a_row_with_the_pool_has_what_engines_cost_beside_each_other_with_it(
    tmp_path: Path,
) -> None:
    pooled = [
        probe("pool_beside", 1000, 0, 3.05, engines=3),  # three in 3 s: one at a time
        probe("pool_crowd", 100, 96, 0.8, engines=4),
    ]
    file = results(tmp_path, probes=[*PROBES, *pooled])
    known = demo_results.rates(file, 0)
    assert known.cores == pytest.approx(1.0)
    assert known.request_s == pytest.approx(0.2)
    file = results(tmp_path, mode="without the pool", probes=[*PROBES, *pooled])
    assert demo_results.rates(file, 0).cores == pytest.approx(2.0)


def test_lookups_without_an_answer_are_given_up_and_computed(tmp_path: Path) -> None:
    """As many as did not have in the probes what they had saved: here every one."""
    late = [{**one, "cached": 0} if one["kind"] == "loaded" else one for one in PROBES]
    file = results(tmp_path, probes=late)
    assert demo_results.rates(file, 0).late == 1
    assert demo_results.rates(results(tmp_path), 0).late == 0
    (lost,) = demo.predictions(file)
    assert lost.predicted.hit_rate == 0
    (alone,) = demo.predictions(results(tmp_path, "without the pool"))
    # They wait for half of what computing takes, and no longer.
    assert alone.predicted.first_s < lost.predicted.first_s < 2 * alone.predicted.first_s


def test_a_sessions_next_prompt_comes_before_those_that_wait_for_its_answer(tmp_path: Path) -> None:
    """One place, round robin over one engine that holds one prompt of ten blocks and a little: the
    child that comes between two turns of its parent would take the parent's blocks."""
    child = session("child", (330, list(range(100, 110))), parent="root", after=("root", 0))
    root = session("root", (330, TEN), (330, TEN))
    file = results(
        tmp_path,
        "without the pool",
        **{"engines": 1, "at_once": 1, "sessions": [child, root]},
        **{"engine_tokens": 384, "engine_bytes": 8192 * 384},
    )
    (alone,) = demo.predictions(file)
    assert alone.predicted.hit_rate == pytest.approx(320 / 990)


def test_an_engine_has_a_block_less_than_its_memory(tmp_path: Path) -> None:
    """As vLLM has: a prompt of exactly that memory finds its last block evicted."""
    root = session("root", (330, TEN), (330, TEN))
    file = results(
        tmp_path,
        "without the pool",
        **{"engines": 1, "sessions": [root], "engine_tokens": 320, "engine_bytes": 8192 * 320},
    )
    (alone,) = demo.predictions(file)
    assert alone.predicted.hit_rate == pytest.approx(288 / 660)


def test_the_model_plays_the_demos_sessions(tmp_path: Path) -> None:
    """Round robin: no engine is asked twice, so all that is not computed comes from the pool."""
    (pooled,) = demo.predictions(results(tmp_path))
    assert pooled.predicted.hit_rate == pytest.approx(20 * 32 / (330 + 650 + 490))
    (alone,) = demo.predictions(results(tmp_path, "without the pool"))
    assert alone.predicted.hit_rate == 0
    # The median is of the two that begin together: of 490 and 650 tokens on two cores.
    assert 0.5 < alone.predicted.first_s < 0.75
    assert pooled.predicted.first_s < alone.predicted.first_s
    assert not pooled.hits_are_near
    again = demo.predictions(results(tmp_path))
    assert again == [pooled]


def test_work_on_one_machine_is_shared_and_no_engine_uses_more_than_its_own() -> None:
    events, ends = EventQueue(), []
    machine = SharedLink(events, 2.0, each_max=1.0)
    machine.start(1.0, lambda: ends.append(events.now))
    events.run()
    assert ends == [pytest.approx(1.0)]
    for _ in range(4):
        machine.start(1.0, lambda: ends.append(events.now))
    assert machine.left == pytest.approx(4.0)
    events.run()
    assert ends[1:] == [pytest.approx(3.0)] * 4


def test_the_command_prints_what_was_measured_beside_what_is_predicted(tmp_path: Path) -> None:
    file = str(write(tmp_path))
    done = CliRunner().invoke(app, ["--demo-results", file], catch_exceptions=False)
    assert done.exit_code == 0
    assert "of 1 rows" in done.output
    done = CliRunner().invoke(app, ["--demo-results", file, "--json"])
    (row,) = json.loads(done.stdout)["rows"]
    assert row["measured"] == {"hit_rate": 0.0, "first_s": 0.5, "seconds": 3.0}
    # Three prompts with 5 tokens after the first one each, one of them after another.
    assert 0.3 < row["predicted"]["seconds"] < 3


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "missing required field"), ("no", "not a file of"), (None, "No such file")],
)
def test_a_file_that_is_none_is_an_error(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    done = CliRunner().invoke(app, ["--demo-results", str(file)])
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())


def test_probes_that_are_missing_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, probes=[one for one in PROBES if one["kind"] != "crowd"])
    done = CliRunner().invoke(app, ["--demo-results", str(file)])
    assert done.exit_code != 0
    assert "no probe is crowd" in " ".join(done.output.split())
