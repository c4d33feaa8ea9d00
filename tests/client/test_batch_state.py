"""One batch of a write, pure: which servers are asked for which blocks, and what they answered."""

from __future__ import annotations

import pytest

from kvpool import Namespace, WriteStatus
from kvpool.client.writer import BatchState
from kvpool.protocols import WriteOptions
from kvpool.types import WriteBlock

STORED = WriteStatus.STORED


def batch(blocks: int, servers: list[str], copies: int = 1) -> tuple[BatchState, dict[int, int]]:
    rows = [WriteBlock(bytes([i]) * 16, b"", (memoryview(b"x"),), 1) for i in range(blocks)]
    options = WriteOptions(Namespace("one"), 0, True)
    return BatchState(options, rows, copies, 9.0, servers), dict.fromkeys(range(blocks), copies)


@pytest.mark.parametrize("refusal", ["NO_SPACE", "SERVER_LOST", "REFUSED", "TOO_LARGE", "DEADLINE"])
def test_a_block_that_a_server_refuses_is_the_next_ones(refusal: str) -> None:
    state, needed = batch(3, ["a", "b"])
    assert state.next_batches(needed) == {"a": [0, 1, 2]}
    state.answered("a", [0, 1, 2], [STORED, WriteStatus[refusal], WriteStatus.IN_PROGRESS], needed)
    assert needed == {1: 1}
    assert state.next_batches(needed) == {"b": [1]}
    state.answered("b", [1], [STORED], needed)
    assert not needed
    assert state.results(0.0) == [STORED, STORED, WriteStatus.IN_PROGRESS]
    assert state.holders == [{"a"}, {"b"}, set()]


def test_each_copy_is_on_another_server() -> None:
    state, needed = batch(2, ["a", "b", "c"], copies=2)
    assert state.next_batches(needed) == {"a": [0, 1], "b": [0, 1]}
    state.answered("a", [0, 1], [STORED, WriteStatus.ALREADY_STORED], needed)
    assert needed == {0: 1, 1: 1}
    state.answered("b", [0, 1], [STORED, WriteStatus.NO_SPACE], needed)
    assert needed == {1: 1}
    assert state.next_batches(needed) == {"c": [1]}
    state.answered("c", [1], [STORED], needed)
    assert not needed
    assert state.stored_on == [{"a", "b"}, {"c"}]
    assert state.holders == [{"a", "b"}, {"a", "c"}]


@pytest.mark.parametrize("answers", ["NO_SPACE", "NO_SPACE SERVER_LOST", "SERVER_LOST NO_SPACE"])
def test_when_every_server_was_asked_there_is_no_other(answers: str) -> None:
    """That one is dead does not hide why the block is not stored."""
    state, needed = batch(1, ["a", "b"][: len(answers.split())], copies=3)
    for server, answer in zip(state.next_batches(needed), answers.split(), strict=True):
        state.answered(server, [0], [WriteStatus[answer]], needed)
    assert state.next_batches(needed) == {}
    assert state.results(0.0) == [WriteStatus.NO_SPACE]


@pytest.mark.parametrize(
    ("servers", "now", "status"),
    [
        ([], 8.9, WriteStatus.NO_SPACE),
        (["a"], 8.9, WriteStatus.SERVER_LOST),
        ([], 9.0, WriteStatus.DEADLINE),
        (["a"], 9.0, WriteStatus.DEADLINE),
    ],
)
def test_a_block_that_no_server_was_asked_for_says_why(
    servers: list[str], now: float, status: WriteStatus
) -> None:
    """There was none, it was gone at once, or there was no time."""
    state, _ = batch(1, servers)
    assert state.results(now) == [status]
