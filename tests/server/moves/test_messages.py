"""What is asked about blocks that move, as messages and back: no field is lost on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvpool import admin, dev, moves
from kvpool.client.drains import report_of
from kvpool.errors import BadMessage
from kvpool.moves import Offer
from kvpool.operators import DrainReport, Left
from kvpool.protocols import Peer
from kvpool.server.moves.drainer import Drainer
from kvpool.server.moves.fetcher import Fetcher
from kvpool.testing.move_checks import SIDE_REQUESTS
from kvpool.types import COPIES_MAX, ROOT, MoveStatus, Namespace, ReadStatus, SessionHint
from tests.conftest import key, keys
from tests.support import messages as wire
from tests.support.moves import moves_of

TWO_PARTS = Namespace("moves", parts=2)


def test_each_request_to_an_extension_is_checked_over_every_transport() -> None:
    assert {type(request) for request, _ in SIDE_REQUESTS} == wire.ASIDE - {wire.Remove}


@pytest.mark.parametrize("size", [16, 20, 32])
def test_an_offer_arrives_as_it_was_made(size: int) -> None:
    parent, hint = key("parent")[:size], SessionHint("a session", 2.5)
    offers = [
        Offer(ReadStatus.HIT, 1 << 33, (1 << 64) - 1, parent, 1.5, hint, copies=0),
        Offer(ReadStatus.EVICTED),
        Offer(ReadStatus.HIT, 1, 0, ROOT, 0.0, None, copies=COPIES_MAX),
        Offer(ReadStatus.HIT, 4096, 7, parent, 1e6, SessionHint("another one")),
    ]
    answer = moves.proposed(offers, size)
    asked = [digest[:size] for digest in keys("offered", len(offers))]
    assert moves.offers_of(answer, asked) == offers
    with pytest.raises(BadMessage):
        moves.offers_of(answer, asked[1:])
    with pytest.raises(BadMessage, match="copies"):
        moves.offers_of(wire.Proposed(b"\0", [1], [1], bytes(size), [0.0], b"\xff"), asked[:1])


def test_what_is_no_status_is_none() -> None:
    assert moves.moved(wire.StatusReply(bytes(MoveStatus)), len(MoveStatus)) == list(MoveStatus)
    for statuses in (b"", b"\0\0", bytes([len(MoveStatus)])):
        with pytest.raises(BadMessage):
            moves.moved(wire.StatusReply(statuses), 1)
    with pytest.raises(BadMessage):
        report_of(wire.Drained(len(MoveStatus), 0, 0, 0, 0, 0, []))


async def test_a_server_gets_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field of a fetch, with no more time than the caller has; and of a drain its report."""
    asked: list[Any] = []
    lines = tuple(Left(f"model/{n}", "no room", n, n << 40) for n in range(64))
    report = DrainReport(MoveStatus.NOT_YET, 10, 9, 8, 7, 6, lines)

    async def fetch(self: Fetcher, *what: Any, deadline: float, **more: Any) -> list[MoveStatus]:
        asked.append((*what, more, deadline))
        return [MoveStatus.GONE]

    def begin(self: Drainer, within_s: float, *, back_in_s: float) -> None:
        asked.append((within_s, back_in_s))

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    monkeypatch.setattr(Drainer, "begin", begin)
    monkeypatch.setattr(Drainer, "report", lambda self: report)
    async with dev.serve("1MiB") as served, served.pool() as pool:
        (server,) = served.servers
        now = pool._context.begin(0.0)
        for extra in (False, True):
            got = await pool._servers.call(
                server.server,
                lambda channel, extra=extra: moves.fetch(  # type: ignore[misc]
                    channel, TWO_PARTS, 1, [key("x")], "source", extra=extra, deadline=now + 9.0
                ),
                now + 9.0,
            )
            *what, more, deadline = asked.pop()
            assert got == [MoveStatus.GONE]
            assert what == [TWO_PARTS, 1, (key("x"),), "source"]
            assert more == {"extra": extra, "tenant": ""}
            assert now + 5.0 < deadline < now + 9.5
        told = await admin(pool).drain(server.server, within_s=1.5, back_in_s=300.25)
        assert told == report
        assert asked.pop() == (1.5, 300.25)
        assert await admin(pool).drain_report(server.server) == report
        connection = server.connect(Peer("x"))
        with pytest.raises(BadMessage, match="to begin and to cancel"):
            await connection.answer(wire.Drain(begin=True, cancel=True))
        connection.close()


async def test_reads_of_a_server_that_fetches_are_no_use_however_many_have_fetched_before(
    pool_dev: dev.Dev,
) -> None:
    """Without --id a server has another name after each restart."""
    running, chain = moves_of(pool_dev.servers[0]), keys("moved", 1)
    running._servers.total = 8
    running._read(TWO_PARTS, 0, chain, "a client")
    assert running.repair.due_at() == math.inf, "no block was written with copies"
    async with pool_dev.pool() as pool:
        await pool.write(TWO_PARTS, chain, [b"x"], copies=2)
    for number in range(20):
        asked = wire.Propose(TWO_PARTS.name, 2, len(chain[0]), chain[0], 0, f"server {number}")
        await running._offer(Peer(f"server {number}"), asked)
        running._read(TWO_PARTS, 0, chain, f"server {number}")
    assert running.repair.due_at() == math.inf
    assert len(running._servers) == 8
    running._read(TWO_PARTS, 0, chain, "a client")
    assert running.repair.due_at() < math.inf
