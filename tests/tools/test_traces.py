"""Recorded traces: each published format, what a file may have wrong, and what is said of it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.tools import replay, traces, workloads
from kvpool.tools.dry_pool import digest_of
from kvpool.tools.traces import Request, Trace


def row(timestamp: float, ids: list[int], tokens: int, output: int = 10) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": ids,
    }


def chat(id: int, parent: int, timestamp: float, ids: list[int], tokens: int) -> dict[str, Any]:
    return {"chat_id": id, "parent_chat_id": parent, "type": "text", **row(timestamp, ids, tokens)}


def parse(*rows: dict[str, Any], format: str = traces.AUTO, **given: Any) -> Trace:
    return traces.parse([json.dumps(one).encode() + b"\n" for one in rows], format, **given)


def test_mooncake_has_milliseconds_and_blocks_of_512() -> None:
    trace = parse(row(9, [1, 3], 600), row(5, [1, 2], 1024))
    assert trace.requests == [
        Request(0, (1, 2), 0.005, None, 1024, 10),
        Request(1, (1, 3), 0.009, None, 600, 10),
    ]
    assert trace.summary == (
        "trace trace: mooncake, times in ms, 2 prompts, 2 sessions, blocks of 512 tokens, 0.004 s, "
        "the longest prompt has 1,024 tokens; 1 prompts were out of order and are sorted"
    )


def test_qwen_bailian_has_seconds_blocks_of_16_and_sessions() -> None:
    trace = parse(
        chat(7, -1, 61.114, [11, 12, 13], 40),
        chat(9, -1, 100, [11], 16),
        chat(8, 7, 171.5, [11, 12, 13, 14, 11, 11], 90),
    )
    assert (trace.format, trace.block, trace.sessions) == ("qwen-bailian", 16, 2)
    first, other, second = trace.requests
    assert second.time_s - first.time_s == pytest.approx(110.386)
    assert first.resumes_s == pytest.approx(110.386)
    assert (first.session, other.session, second.session) == (0, 1, 0)
    assert second.chain[:3] == first.chain
    # An id names what is in a block: in another place it is another prefix.
    assert len(set(second.chain)) == 6


def test_turns_come_after_their_answer_and_their_delay() -> None:
    """With ids a row is a whole prompt; without, what is new after the answer before."""
    begin = {"session_id": "a", "timestamp": 1000, "input_length": 1024, "output_length": 100}
    then = {"session_id": "a", "delay": 5000, "input_length": 412, "output_length": 1}
    trace = parse(begin | {"hash_ids": [1, 2]}, then, begin | {"session_id": "b"})
    assert (trace.format, trace.unit, trace.sessions) == ("multi-turn", "ms", 2)
    first, other, second = trace.requests
    assert second.time_s == pytest.approx(1.0 + 0.5 + 1.37 + 5.0)
    assert first.resumes_s == pytest.approx(6.87)
    assert second.length == 1024 + 100 + 412
    assert second.chain[:2] == first.chain
    assert len(second.chain) == 3
    assert not {*other.chain} & {*second.chain}
    whole = parse(
        begin | {"hash_ids": [1, 2]}, then | {"input_length": 1536, "hash_ids": [1, 2, 3]}
    )
    assert whole.requests[1].length == 1536
    assert whole.requests[1].chain[:2] == (0, 1)


def test_turns_of_text() -> None:
    turns = [{"text": "x" * 80}, {"text": "y" * 40, "delay": 200}]
    trace = parse({"session_id": "a", "turns": turns}, block=16)
    assert [one.length for one in trace.requests] == [20, 30]
    assert "estimated, 4 characters each" in trace.summary


@pytest.mark.parametrize("whole", [False, True])
def test_conversations_share_what_is_equal_in_their_text(whole: bool) -> None:
    begin = [{"from": "human", "value": "x" * 100}, {"from": "gpt", "value": "y" * 60}]
    rows: list[dict[str, Any]] = [
        {"id": "1", "conversations": [*begin, {"from": "human", "value": "z" * 100}, begin[1]]},
        {
            "messages": [
                {"role": "user", "content": "x" * 100},
                {"role": "assistant", "content": ""},
            ]
        },
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    ]
    text = json.dumps(rows, indent=1).encode()
    trace = traces.parse([text]) if whole else parse(*rows)
    assert (trace.format, trace.block, trace.unit, trace.sessions) == ("sharegpt", 16, "", 3)
    of = {(one.session, one.length): one.chain for one in trace.requests}
    assert {key: len(chain) for key, chain in of.items()} == {
        (0, 25): 1, (0, 65): 4, (1, 25): 1, (2, 1): 0,
    }  # fmt: skip
    assert of[0, 65][:1] == of[0, 25] == of[1, 25]
    assert "no times" in trace.summary
    assert "estimated" in trace.summary


def test_prompts_that_are_shorter_than_a_block() -> None:
    short = {"timestamp": 1, "input_length": 3, "output_length": 1}
    assert parse(short, short | {"hash_ids": []}, short | {"hash_ids": [5]}).requests == [
        Request(0, (), 0.001, None, 3, 1),
        Request(1, (), 0.001, None, 3, 1),
        Request(2, (5,), 0.001, None, 3, 1),
    ]


GOOD = json.dumps(row(1, [1], 512)).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD + b"\n",
        b"\n\n" + GOOD,
        GOOD.replace(b", ", b",") + b"\r\n\r\n",
        b"[" + GOOD + b"]",
        b"\xef\xbb\xbf[\n" + GOOD + b"\n]",
        gzip.compress(GOOD),
    ],
    ids=["byte order mark", "blank lines", "CRLF", "list", "list over lines", "gz"],
)
def test_files_as_people_have_them(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    assert traces.load(path).requests == [Request(0, (1,), 0.001, None, 512, 10)]
    assert capsys.readouterr().err.startswith("trace trace.jsonl: mooncake, times in ms, 1 prompts")


def test_a_pipe_is_read_packed_or_not() -> None:
    command = "from kvpool.tools import traces; print(len(traces.load('-').requests))"
    for content in (GOOD, gzip.compress(GOOD)):
        done = subprocess.run(
            [sys.executable, "-c", command], input=content, capture_output=True, env=os.environ
        )
        assert (done.returncode, done.stdout) == (0, b"1\n"), done.stderr
        assert b"trace stdin: mooncake" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty: no requests; expected one JSON object a line"),
        ("\n \n", "is empty"),
        ("nonsense", "line 1: expected a JSON object, got 'nonsense'"),
        ("3", "line 1: expected a JSON object, got '3'"),
        ("[3]", "entry 1: expected an object, got 3"),
        ("[" * 5000, "line 1: expected a JSON object"),
        ('{"a": 1, "b": 2}', "line 1: no known format has these fields: a, b; expected timestamp"),
        ('{"timestamp": 1, "hash_ids": []}', "line 1: hash_ids has 0 ids"),
        ('{"timestamp": 1, "hash_ids": ["x"]}', "hash_ids is .'x'.*list of integers"),
        ('{"timestamp": 1, "hash_ids": [true]}', "list of integers"),
        ('{"timestamp": 1, "hash_ids": [1, 1]}', "twice"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "line 1: NaN is no number"),
        ('{"timestamp": -5, "hash_ids": [1]}', "line 1: timestamp is -5, expected a number from 0"),
        ('{"timestamp": "5", "hash_ids": [1]}', "timestamp is '5'"),
        ('{"timestamp": 1e300, "hash_ids": [1]}', "timestamp is 1e.300"),
        ('{"timestamp": 1' + "0" * 400 + ', "hash_ids": [1]}', "line 1: timestamp is 1000"),
        ('{"timestamp": 1, "hash_ids": [1]}\n{"hash_ids": [1]}', "line 2: timestamp is missing"),
        ('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 1, "ha', "line 2: expected a JSON"),
        ('{"timestamp": 1, "input_length": -1, "hash_ids": [1]}', "input_length is -1, expected"),
        ('{"timestamp": 1, "input_length": 1.5, "hash_ids": [1]}', "input_length is 1.5"),
        ('{"timestamp": 1, "input_length": 512}', "hash_ids is None"),
        (
            '{"timestamp": 1, "input_length": 513, "hash_ids": [1, 2, 3]}',
            "line 1: hash_ids has 3 ids, but 513 tokens are 2 blocks of 512; .*--block-tokens",
        ),
        ('{"timestamp": 1, "input_length": 1024, "hash_ids": [1]}', "has 1 ids, but 1024 tokens"),
        ('{"timestamp": 61.114, "hash_ids": [1]}', "line 1: timestamp is 61.114.*--time-unit s"),
        ('{"conversations": []}', "line 1: conversations is .., expected a list"),
        ('{"conversations": ["x"]}', "line 1, message 1: expected from and value"),
        ('{"conversations": [{"from": "human", "value": "x"}]}', "no message is answered"),
        ('{"session_id": "a", "delay": -1, "input_length": 5}', "delay is -1"),
        ('{"session_id": [], "input_length": 5}', "session_id is .., expected text"),
        ('{"session_id": "a", "turns": [3]}', "turns is .3., expected a list of objects"),
        (
            '{"timestamp": 1, "hash_ids": [1]}\n{"chat_id": 2}',
            "line 2: .*of qwen-bailian, expected",
        ),
    ],
)
def test_a_bad_trace_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        traces.load(path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        traces.load(tmp_path / "nowhere")
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(GOOD * 100)[:-9])
    with pytest.raises(ConfigError, match="no whole gzip file"):
        traces.load(path)
    path.write_bytes(b'{"\xff')
    with pytest.raises(ConfigError, match=r"line 1: .* got something binary"):
        traces.load(path)
    monkeypatch.setattr(traces, "_ROW_MAX", len(GOOD) - 1)
    path.write_bytes(b"\n" + GOOD)
    with pytest.raises(ConfigError, match=r"trace, line 2: more than \d+ bytes"):
        traces.load(path)


def test_the_format_and_its_parts_may_be_given() -> None:
    fields = row(61.5, [1, 2], 32)
    with pytest.raises(ConfigError, match="format 'x': expected one of auto, "):
        parse(fields, format="x")
    with pytest.raises(ConfigError, match="time unit 'h': expected s or ms"):
        parse(fields, unit="h")
    with pytest.raises(ConfigError, match="block 0: expected at least 1 token"):
        parse(fields, block=0)
    with pytest.raises(ConfigError, match="fields of mooncake, expected qwen-bailian"):
        parse(fields, format="qwen-bailian")
    given = parse(fields, block=16, unit="s")
    assert (given.block, given.requests[0].time_s) == (16, 61.5)
    assert parse(fields, block=16, unit="ms").requests[0].time_s == pytest.approx(0.0615)


def test_whole_seconds_that_are_read_as_milliseconds_are_noticed() -> None:
    rows = [row(n, [n * 30 + i for i in range(24)], 12_000) for n in range(50)]
    with pytest.raises(ConfigError, match=r"600,000 tokens .* be times in seconds.*-unit s"):
        parse(*rows)
    assert parse(*rows, unit="s").span_s == 49.0
    few = parse(*(row(10 * n, [1], 512) for n in range(50)))
    assert "so many prompts a second may be times in seconds" in few.summary
    turns = [{"session_id": "a", "delay": 3, "input_length": 5} for _ in range(3)]
    assert "delays this short may be seconds" in parse(*turns).summary


def test_milliseconds_that_are_read_as_seconds_are_noticed() -> None:
    rows = [chat(n, -1, 30_000 * n, [1], 16) for n in range(5)]
    with pytest.raises(ConfigError, match=r"120,000 seconds may be milliseconds.*--time-unit ms"):
        parse(*rows)
    assert parse(*rows, unit="ms").span_s == pytest.approx(120.0)
    assert parse(*rows, chat(9, -1, 0.5, [1], 16)).span_s == 120_000.0  # a fraction: seconds
    short = [chat(n, -1, 300 * n, [1], 16) for n in range(10)]
    assert "without a fraction may be milliseconds" in parse(*short).summary
    assert "may be" not in parse(*short, unit="s").summary


def test_a_replay_takes_the_block_of_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(chat(7, -1, 61.114, [11, 12, 13], 40)))
    name, requests = replay.requests_of(path, "codex", 1, 1, 1)
    assert name == "trace.jsonl"
    assert workloads.mooncake(path) == requests
    assert len(requests[0].chain) == 3
    with pytest.raises(ConfigError, match="blocks of 512"):
        replay.requests_of(path, "codex", 1, 1, 1, 512)


def test_ids_may_be_any_whole_numbers() -> None:
    ids = [-(2**63), -1, 0, 1, 2**63, 2**64 - 1, 2**64, 2**200]  # some are hashes
    chains = [request.chain for request in parse(*(row(1, [id], 512) for id in ids)).requests]
    assert len({digest_of(id) for chain in chains for id in chain}) == len(ids)
