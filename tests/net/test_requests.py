"""Requests that are under way on one link: each ends once, and leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvpool.errors import Closed, DeadlineExceeded, KvpoolError, Overloaded, PeerError
from kvpool.net import requests
from kvpool.net.requests import PendingRequests

CLUSTER = 7


class Link(PendingRequests):
    """Requests that are sent, and replies to them."""

    def __init__(self) -> None:
        super().__init__("m:1", CLUSTER)
        self.sent: list[int] = []
        self.silences: list[float | None] = []
        self.loop: Any = asyncio.get_running_loop()

    def ask(self, timeout_s: float = 60.0) -> asyncio.Task[tuple[int, bytes]]:
        request: Coroutine[Any, Any, tuple[int, bytes]] = self.request(
            1, b"question", deadline=self.loop.time() + timeout_s
        )
        return asyncio.get_running_loop().create_task(request)

    def _reconnect(self) -> None:
        self.silences.append(self.silent_since)

    def _transmit(self, message: bytes) -> None:
        self.sent.append(requests.decode_envelope(message, CLUSTER).id)

    def reply(self, id: int, body: bytes = b"answer", cluster: int = CLUSTER) -> None:
        self.on_reply(requests.encode_envelope(2, cluster, id, body))

    def timers(self) -> int:
        return sum(not timer.cancelled() for timer in self.loop._scheduled)


async def begun(link: Link, count: int, timeout_s: float = 60.0) -> list[asyncio.Task[Any]]:
    tasks = [link.ask(timeout_s) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def ended(task: asyncio.Task[Any]) -> KvpoolError:
    with pytest.raises(KvpoolError) as raised:
        await task
    return raised.value


async def test_each_reply_goes_to_its_request() -> None:
    link = Link()
    before = link.timers()
    first, second = await begun(link, 2)
    assert len(link.unanswered()) == 2
    assert link.sent[0] != link.sent[1]
    link.reply(link.sent[1], b"two")
    link.reply(link.sent[1], b"a second reply")
    link.reply(link.sent[0], b"one")
    link.reply(12345, b"to nobody")
    assert (await first, await second) == ((2, b"one"), (2, b"two"))
    assert link.pending == 0
    assert link.timers() == before  # or each would hold its request until its deadline
    assert link.unanswered() == []  # nor are the messages kept


async def test_a_reply_that_is_wrong_ends_its_request_at_once() -> None:
    link = Link()
    (task,) = await begun(link, 1)
    link.on_reply(b"too short")
    link.reply(link.sent[0], cluster=CLUSTER + 1)
    assert isinstance(await ended(task), PeerError)


async def test_a_link_that_is_closed_ends_every_request() -> None:
    link = Link()
    tasks = await begun(link, 3)
    link.reply(link.sent[0])
    link.close()
    assert await tasks[0] == (2, b"answer")
    assert [type(await ended(task)) for task in tasks[1:]] == [Closed, Closed]
    assert isinstance(await ended(link.ask()), Closed)
    assert len(link.sent) == 3


async def test_no_more_requests_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PENDING_MAX", 2)
    link = Link()
    tasks = await begun(link, 3)
    assert isinstance(await ended(tasks[2]), Overloaded)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    (again,) = await begun(link, 1)
    for id in link.sent:
        link.reply(id)
    assert await tasks[1] == await again == (2, b"answer")


async def test_a_deadline_ends_a_request() -> None:
    link = Link()
    (task,) = await begun(link, 1, timeout_s=0.01)
    error = await ended(task)
    assert isinstance(error, DeadlineExceeded)
    assert "m:1" in str(error)
    assert link.pending == 0


async def test_silence_counts_from_the_first_question_since_the_last_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master that has just answered is not left because another request was late."""
    monkeypatch.setattr(requests, "RECONNECT_AFTER_S", 0.02)
    link = Link()
    (late,) = await begun(link, 1, timeout_s=0.03)
    began = link.silent_since
    assert began is not None
    (heard,) = await begun(link, 1)
    assert link.silent_since == began
    link.reply(link.sent[1])
    await heard
    await ended(late)
    await ended(link.ask(0.0))
    assert link.silences == []
    await ended(link.ask(0.03))
    (since,) = link.silences
    assert since is not None
    assert since > began
