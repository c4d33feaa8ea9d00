"""What operators see of tenants: one line with a count, and figures. And the limit of writes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

import pytest

from kvpool import ReadStatus, WriteStatus
from kvpool.audit import CALLERS_MAX, LOG_EVERY_S, AuditLog
from kvpool.errors import Forbidden
from kvpool.guard import Who
from tests.conftest import keys, values
from tests.support import messages as wire
from tests.support.raw_peers import ask, frame
from tests.support.tenant_pool import MODEL, OF_ACME, OPERATOR, reserve, tenant, tenant_pool

CHAIN = keys("audit", 4)
WHO = {"tenant": "acme", "address": "10.0.0.1", "request": "Read"}


def refuse(audit: AuditLog, now: float, **who: str) -> None:
    audit.refused(now, **{**WHO, "client": "c", "why": "not yours", **who})


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.name == "kvpool.audit"]


def test_a_caller_gets_one_line_a_minute_and_every_act_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    audit = AuditLog()
    for number in range(1000):
        refuse(audit, number * 0.01, client=f"name {number}")
    assert len(lines(caplog)) == 1
    audit.flush(LOG_EVERY_S - 1)
    assert len(lines(caplog)) == 1
    audit.flush(LOG_EVERY_S)
    first, second = lines(caplog)
    assert (first.count, second.count) == (1, 999)  # type: ignore[attr-defined]
    assert second.tenant == "acme"  # type: ignore[attr-defined]
    audit.flush(2 * LOG_EVERY_S)
    assert len(audit) == 0


def test_removals_count_blocks_and_keep_apart_from_refusals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    audit = AuditLog()
    for blocks in (3, 4, 5):
        audit.removed(0.0, **{**WHO, "client": "c", "request": "Remove"}, blocks=blocks)
    refuse(audit, 0.0)
    audit.flush(LOG_EVERY_S)
    removed = [one for one in lines(caplog) if one.levelname == "INFO"]
    assert [(one.count, one.blocks) for one in removed] == [(1, 3), (2, 9)]  # type: ignore[attr-defined]
    assert len(lines(caplog)) == 3


def test_callers_without_end_cost_neither_memory_nor_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    audit = AuditLog()
    many = CALLERS_MAX + 1000
    for number in range(2 * many):
        refuse(audit, 0.0, tenant=("acme", "red")[number % 2], address=f"address {number}")
    assert len(audit) == len(lines(caplog)) <= CALLERS_MAX
    refuse(audit, 0.0, tenant="blue")
    assert [vars(lines(caplog)[-1])[one] for one in WHO] == ["blue", "10.0.0.1", "Read"]
    audit.flush(LOG_EVERY_S)
    seen: Counter[str] = Counter()
    for one in lines(caplog):
        seen[vars(one)["tenant"]] += vars(one)["count"]
    assert seen == {"acme": many, "red": many, "blue": 1}
    audit.flush(3 * LOG_EVERY_S)
    assert len(audit) == 0
    refuse(audit, 4 * LOG_EVERY_S)
    assert vars(lines(caplog)[-1])["request"] == "Read", "it is named again"


async def test_what_no_line_has_yet_is_on_record_when_a_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with tenant_pool(tmp_path) as pool, await pool.client(tenant("acme")) as acme:
        await acme.write(MODEL, CHAIN, values(CHAIN))
        for key in CHAIN:
            await acme.remove(MODEL, [key])
        pool.master._guard.removed(0.0, Who("blue", "b", "b"), "Remove", 3)
        pool.master._guard.removed(0.0, Who("blue", "b", "b"), "Remove", 4)
    removed = {"acme": 0, "blue": 0}
    for one in lines(caplog):
        removed[one.tenant] += one.blocks  # type: ignore[attr-defined]
    assert removed == {"acme": len(CHAIN), "blue": 7}


async def test_what_a_tenant_tries_and_removes_is_on_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool.audit")
    async with tenant_pool(tmp_path) as pool:
        async with await pool.client(tenant("acme")) as acme:
            await acme.write(MODEL, CHAIN, values(CHAIN))
            await acme.remove(MODEL, CHAIN[:3])
        async with await pool.client(OPERATOR) as operator:
            await operator.remove(OF_ACME, CHAIN[3:])
            await operator.remove(MODEL, CHAIN)  # nothing is there: no line
        async with pool.raw(tenant("blue")) as peer:
            await peer.send(frame(wire.Read("@acme/llama", 1, 32, CHAIN[3], 0, [64])))
            await peer.refusal()
        with pool.link(tenant("blue")) as link, pytest.raises(Forbidden):
            await ask(link, wire.Hint("@acme/x", 0.0), wire.Error)
    seen = [
        (one.message.partition(" tenant")[0], one.tenant, one.request)  # type: ignore[attr-defined]
        for one in lines(caplog)
    ]
    assert [(tenant_, request) for _, tenant_, request in seen] == [
        ("acme", "Remove"),
        ("-", "Remove"),
        ("blue", "Read"),
        ("blue", "Hint"),
    ]
    assert {one.address for one in lines(caplog)} == {"127.0.0.1", ""}  # type: ignore[attr-defined]


# --- rates ----------------------------------------------------------------------------------


async def test_a_tenant_writes_at_its_rate_and_others_as_fast_as_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second write waits; one that would wait too long is refused, with the reason in the
    server's log. Its connection stays."""
    caplog.set_level(logging.INFO)
    loop = asyncio.get_running_loop()
    async with tenant_pool(tmp_path) as pool:
        pool.write_tenants(rate="64KiB")
        await pool.read_again()
        chains = [keys(f"rate {number}", 1) for number in range(4)]
        block = [bytearray(96 << 10)]
        async with (
            await pool.client(tenant("acme")) as acme,
            await pool.client(OPERATOR) as operator,
        ):
            began = loop.time()
            assert await acme.write(MODEL, chains[0], block) == [WriteStatus.STORED]
            assert await acme.write(MODEL, chains[1], block) == [WriteStatus.STORED]
            assert 0.4 < loop.time() - began < 2.0
            (status,) = await acme.write(MODEL, chains[2], block, timeout=1.0)
            assert status is WriteStatus.REFUSED
            assert pool.server.stats(0.0).counters["over_rate_writes"] >= 1
            assert any("writes more than its rate" in one.why for one in lines(caplog))  # type: ignore[attr-defined]
            assert not any("closed" in one.message for one in caplog.records)
            assert (await acme.read(MODEL, chains[0], [bytearray(96 << 10)]))[0].status.hit
            began = loop.time()
            for chain in chains:
                assert await operator.write(MODEL, chain, block) == [WriteStatus.STORED]
            assert loop.time() - began < 0.5
            assert (await acme.match(MODEL, chains[2])).stopped is ReadStatus.NEVER_WRITTEN


async def test_what_is_stored_already_costs_nothing_of_the_rate(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with tenant_pool(tmp_path) as pool:
        async with await pool.client(tenant("acme")) as acme:
            await acme.write(MODEL, CHAIN[:1], [bytearray(64 << 10)])
        pool.write_tenants(rate="64KiB")
        await pool.read_again()
        again = reserve("@acme/llama", CHAIN[0], 64 << 10, wait_s=5.0)
        async with pool.raw(tenant("acme")) as peer:
            began = loop.time()
            for _ in range(10):
                answer = await peer.ask(again, wire.Reserved)
                assert list(answer.statuses) == [WriteStatus.ALREADY_STORED]
            assert loop.time() - began < 1.0
