"""What `make demo-vllm` makes of its measurements; no engine runs here."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples import vllm_two_instances as demo
from examples.takeover_report import Pair, Turn, compare, conclusion, table
from kvpool.tools.charts import Bar, BarGroup, grouped_bars

ROOT = Path(__file__).parents[2]


def turn(seconds: float, *, pool: int = 0, answer: tuple[int, ...] = (1,)) -> Turn:
    return Turn("one", 5000, 32, pool, seconds, answer, "")


def pairs(pooled: list[float], alone: list[float], pool: int = 4960) -> list[Pair]:
    return [
        Pair(turn(one, pool=pool), turn(other)) for one, other in zip(pooled, alone, strict=True)
    ]


def test_ranges_that_overlap_show_no_difference() -> None:
    """A median alone would make a gain of what is noise, or hide it."""
    assert compare("x", pairs([1.0, 1.1, 1.3], [1.2, 1.4, 1.5])).verdict == "no difference seen"
    assert compare("x", pairs([2.0, 2.2, 2.4], [1.0, 1.1, 1.2])).verdict == "2.0 x LATER"
    assert compare("x", pairs([1.0], [1.0])).verdict == "no difference seen"


def test_the_conclusion_has_what_became_worse_as_well() -> None:
    rows = [
        compare("taken over", pairs([0.5], [5.0])),
        compare("turns after that", pairs([0.5, 0.6, 0.9], [0.6, 0.6, 0.6])),
        compare("a new session", pairs([3.0], [2.0])),
    ]
    text = conclusion(rows)
    assert "taken over: the first token comes 10.0 x sooner with the pool" in text
    assert "a new session: 1.5 x LATER with the pool" in text
    assert "turns after that: no difference" in text
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert "5,000" in lines[1]
    assert "4,960" in lines[1]
    assert "0.60 s (0.50 to 0.90)" in lines[2]


def test_bars_are_as_high_as_their_medians() -> None:
    """Half of the scale is half of the height; the line goes from the lowest to the highest."""
    drawn = grouped_bars("t", "<s>", [BarGroup("g", {"a": Bar(2.0, 1.0, 4.0)})])
    root = ElementTree.fromstring(drawn)
    assert "&lt;s&gt;" in drawn
    *_, bar = (one for one in root.iter() if one.tag.endswith("}rect"))
    *_, line = (one for one in root.iter() if one.tag.endswith("}line"))
    assert float(bar.attrib["height"]) == pytest.approx(165)
    assert float(line.attrib["y1"]) - float(line.attrib["y2"]) == pytest.approx(3 * 82.5)
    for highest in (0.0, 0.0004, 0.7, 1.0, 9.99, 10.0, 123.0):
        assert "<svg" in grouped_bars("t", "s", [BarGroup("g", {"a": Bar(0.0, 0.0, highest)})])


def test_answers_that_differ_end_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Pair(turn(1.0, pool=64), turn(1.0, answer=(2,)))
    right = pairs([0.5], [5.0])
    with pytest.raises(SystemExit, match="the answers differ"):
        demo.report(demo.Measured([[turn(1.0)]], [right, [wrong]], right), None)
    demo.report(demo.Measured([[turn(1.0)]], [right, right], right), None)
    assert "All 3 answers are equal" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it would run")
def test_without_vllm_the_demo_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.vllm_two_instances"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "vLLM is not installed" in done.stderr
    assert "make demo-vllm" in done.stderr
    assert "Traceback" not in done.stderr
