"""The JSON behind the status page: the figures of `kvpool status`, bounded, not for other sites."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import kvpool
from kvpool import dev
from kvpool.config import MasterConfig
from kvpool.master.service import Master
from kvpool.master.state.directory import Directory
from kvpool.master.state.server_record import Registration
from kvpool.master.state.server_table import ServerTable
from kvpool.net import http_server
from kvpool.net.control_network import TcpNetwork
from kvpool.net.http_server import Page, PageView, pages
from kvpool.ops import pool_watch as pool_watch_module
from kvpool.ops import status_page as status_page_module
from kvpool.ops.pool_watch import AskedTotals
from kvpool.ops.status_page import SERVERS_MAX, StatusPage, status_page
from kvpool.ops.tables import as_json_object
from kvpool.types import Cluster, Consumer, Demand, Member, ServerStats, TierUsage, WorkingSet
from tests.conftest import NAMESPACE, eventually, keys, values
from tests.net.test_http_server import raw
from tests.support.turns import others


@pytest.fixture
async def address(pool_dev: dev.Dev) -> AsyncIterator[str]:
    async with status_page(pool_dev.master, 1.5) as views, pages(views, "127.0.0.1:0") as serving:
        assert serving is not None
        yield serving.address


async def get(address: str, path: str, host: str = "localhost:7452") -> tuple[int, str, str]:
    """Status, head and body."""
    answer = await raw(address, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head, body


async def look(address: str, path: str) -> Any:
    status, _, body = await get(address, path)
    assert status == 200, body
    return json.loads(body)


async def test_its_figures_are_those_of_status(pool_dev: dev.Dev, address: str) -> None:
    async with await kvpool.connect(pool_dev.address) as pool:
        stored = keys("page", 3)
        await pool.write(NAMESPACE, stored, values(stored))
        await pool.match(NAMESPACE, [*stored, keys("page", 4)[3]])
        await pool.session("someone/with/a/long/name").hint(resume_in=30.0)

        def listed() -> bool:
            return pool_dev.master.directory.servers.members(0.0)[0].stats.blocks == 3

        await eventually(listed)
        await asyncio.sleep(status_page_module._FRESH_S)
        [shown] = (await look(address, "/api/v1/servers"))["servers"]
        [member] = await pool.members()
    found = json.loads(json.dumps(as_json_object(member)))
    assert shown.keys() == found.keys() | {"state", "rates"}
    moving = {"heard_s", "rss", "counters", "victim_age_s", "clients"}
    assert {name: shown[name] for name in found.keys() - moving} == {
        name: found[name] for name in found.keys() - moving
    }
    whole = await look(address, "/api/v1/pool")
    assert (whole["version"], whole["kvpool"]) == (1, kvpool.__version__)
    assert whole["servers"] == {"up": 1, "late": 0, "leaving": 0, "left": 0, "lost": 0}
    assert whole["memory"]["blocks"] == 3
    assert whole["memory"]["used"] == member.stats.used
    assert whole["matches"] == {
        "asked_blocks": 4,
        "found_blocks": 3,
        "stopped": {"never written": 1},
    }
    assert whole["attention"] == []
    [session] = whole["sessions"]
    assert (session["session"], session["hint"]) == ("someone/with...", "resumes")


async def test_traffic_and_the_hit_rate_have_a_history(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_page_module, "_SAMPLE_S", 0.05)
    async with status_page(pool_dev.master, 1.5) as views:
        shown = views["/api/v1/pool"]
        assert isinstance(shown, PageView)
        async with await kvpool.connect(pool_dev.address) as pool:
            await asyncio.sleep(0.1)
            stored = keys("page", 3)
            await pool.write(NAMESPACE, stored, values(stored))
            await pool.match(NAMESPACE, stored)
            await asyncio.sleep(1.5)  # the figures come with a heartbeat
        history = json.loads(shown.answer({}, True).body)["history"]
    written = sum(len(value) for value in values(stored))
    # Each point is the mean of three steps, so what was written is in three of them.
    assert sum(history["written_bytes_s"]) * 0.05 == pytest.approx(written, rel=0.6)
    assert max(rate for rate in history["hit_rate"] if rate is not None) == 1.0


async def test_names_of_tenants_stay_on_the_masters_host(pool_dev: dev.Dev) -> None:
    """Nobody is asked who he is: with tenants one of them may be who asks from elsewhere."""
    page, known = (StatusPage(pool_dev.master, 1.5, tenants=one) for one in (True, False))

    def look(of: StatusPage, near: bool) -> str:
        pages = (of._pool_page({}, near), of._servers_page({}, near))
        return "".join(one.body.decode() for one in pages)

    async with await kvpool.connect(pool_dev.address) as pool:
        chain, named = keys("page", 3), kvpool.Namespace("@acme/model")
        await pool.write(named, chain, values(chain))
        for _ in range(2):
            await pool.match(named, chain)
        await pool.session("program=secret-plan;1").hint(resume_in=30.0)
        await eventually(lambda: named.name in str(page._members()[0].stats.consumers))
        for one in (page, known):
            await one._sum_usage()
        found = {one: look(*one) for one in ((page, True), (page, False), (known, False))}
    hidden = found.pop((page, False))
    assert '"named":false' in hidden
    assert '"blocks":3' in hidden, "figures are no names"
    assert not [one for one in ("acme", "secret") if one in hidden]
    for one in found.values():
        assert '"named":true' in one
        assert '"namespaces":[{"name":"@acme/model"' in one
        assert '"session":"program=secret-plan; 1"' in one


async def test_who_is_on_this_host_is_known_by_the_ends_of_the_connection() -> None:
    seen = []
    served = http_server.Pages({"/": PageView(lambda _, near: seen.append(near) or OK)})
    for local, peer in (
        ("127.0.0.1", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.1", ""),
        ("10.0.0.1", "127.0.0.1"),  # a proxy's header would be no end of a connection
    ):
        await served._whole_page("/", "localhost", local, peer)
    assert seen == [True, True, False, False, False]


OK = Page(HTTPStatus.OK, b"")


async def test_a_pool_with_many_servers_is_read_in_pages(tmp_path: Any) -> None:
    network = TcpNetwork(Cluster())
    table = ServerTable(per_host_max=1024)
    master = Master(MasterConfig(), network, directory=Directory(table))
    names = sorted(f"server-{number:04}" for number in range(1000))
    for name in names:
        stats = ServerStats(counters=dict.fromkeys(_COUNTERS, 2**40), usage=[TierUsage("dram")])
        master.directory.servers.register(
            name, Registration(1, "h", ("tcp://x:1",), ("dram",), 1, token=b"t" * 16), 0.0
        )
        master.directory.servers.heartbeat(name, 1, stats, 0.0, 0)
    page = StatusPage(master, 1e9)
    found: list[str] = []
    after: str | None = ""
    spent: list[float] = []
    while after is not None:
        began = time.perf_counter()
        body = page._servers_page({"after": after} if after else {}, True).body
        spent.append(time.perf_counter() - began)
        assert len(body) < 512 << 10
        answer = json.loads(body)
        assert len(answer["servers"]) <= SERVERS_MAX
        found += [one["server"] for one in answer["servers"]]
        after = answer["after"]
    assert found == names
    whole = page.routes()["/api/v1/pool"]
    assert isinstance(whole, PageView)
    assert len(whole.answer({}, True).body) < 64 << 10
    for after in names[
        :20
    ]:  # what is kept for the next second does not grow with what is asked for
        page._servers_page({"after": after}, True)
        page._made = {name: (at - 1, body) for name, (at, body) in page._made.items()}
    assert len(page._made) <= 2
    network.close()


async def test_the_longest_names_make_no_endless_answer(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [f"{number:03}" + chr(0x1F600) * 253 for number in range(99)]
    usage = [TierUsage(name, lost=True) for name in long[:60]]
    consumers = [Consumer(by, name) for by in ("tenant", "program", "namespace") for name in long]
    stats = ServerStats(usage=usage, consumers=consumers, draining=True, drain_left_bytes=1)
    members = [Member(one, 1, "h", (), (), True, 9.0, 1, stats) for one in long]
    sets = tuple(WorkingSet(kvpool.Namespace(one + one), 2**47, 2**47) for one in long)
    page = StatusPage(pool_dev.master, 1.5)
    monkeypatch.setattr(page, "_members", lambda: members)
    monkeypatch.setattr(pool_dev.master.clients, "demand", lambda _: Demand(1.0, sets, 1.0, 1.0))
    for second in range(3700):
        some = [replace(one, alive=second % 2 == 0, epoch=second) for one in members[:3]]
        page._watch.sample(float(second), some, AskedTotals(second * 10**9, second * 10**8))
    for one in members:  # all of them leave
        page._watch._drains[one.server] = drain = pool_watch_module._Drain()
        drain.sample(0.0, 2**47)
    await page._sum_usage()
    assert 100 << 10 < len(page._pool_page({}, True).body) < 256 << 10


async def test_who_has_most_is_summed_in_pieces_while_somebody_looks(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_page_module, "_SAMPLE_S", 0.0)
    page = StatusPage(pool_dev.master, 1.5)
    stats = ServerStats(consumers=[Consumer("namespace", "a", {"dram": 3}, missed_blocks=1)])
    members = [Member(str(n), 1, "h", (), (), True, 0.0, 1, stats) for n in range(100)]
    monkeypatch.setattr(page, "_members", lambda: members)
    await page.watch()
    assert page._usage == {}, "nobody looks"
    page._pool_page({}, True)
    async with others() as turns:
        await page.watch()
    assert turns.count >= 10
    (found,) = page._usage["namespaces"]
    assert found == {"name": "a", "used_bytes": 300, "hit_blocks": 0, "missed_blocks": 100}
    assert page._usage["tenants"] == []


_COUNTERS = [f"counter_{number:02}" for number in range(60)]


async def test_what_was_made_serves_all_who_ask_at_about_the_same_time(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names that strangers make up are not kept for longer than that."""
    now, made = 1000.0, []
    page = StatusPage(pool_dev.master, 1.5)
    monkeypatch.setattr(page, "_loop", SimpleNamespace(time=lambda: now))

    def ask(*keys: str) -> None:
        for key in keys:
            page._answer(key, lambda key=key: made.append(key))

    ask("a", "b", "a", "b", "a")
    now += status_page_module._FRESH_S * 0.9
    ask("a", "c", "b")
    assert made == ["a", "b", "c"]
    now += status_page_module._FRESH_S * 0.2
    ask("a", "c", *map(str, range(100)))
    assert made[3:5] == ["a", "0"]
    now += status_page_module._FRESH_S
    ask("a")
    assert list(page._made) == ["a"]


async def test_a_query_that_means_nothing_is_refused(address: str) -> None:
    status, _, body = await get(address, "/api/v1/servers?before=x")
    assert (status, "expected: after" in body) == (400, True)
    status, _, _ = await get(address, "/api/v1/servers?" + "&".join(f"a{n}=1" for n in range(99)))
    assert status == 400
    assert (await look(address, "/api/v1/servers?after=zzz"))["servers"] == []


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7452", "127.0.0.1.evil.eu", ""])
async def test_another_site_whose_name_points_here_gets_nothing(address: str, host: str) -> None:
    for path in ("/", "/api/v1/pool", "/api/v1/servers"):
        status, _, body = await get(address, path, host)
        assert (status, "{" in body) == (403, False)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:9", "[::1]", "127.0.0.1"])
async def test_this_host_may_look(address: str, host: str) -> None:
    assert (await get(address, "/api/v1/pool", host))[0] == 200


async def test_only_the_script_of_the_page_runs(address: str) -> None:
    status, head, body = await get(address, "/")
    assert (status, body.count("<script>")) == (200, 1)
    assert "Content-Security-Policy: default-src 'none'; script-src 'sha256-" in head
    assert "frame-ancestors 'none'" in head
    assert "X-Content-Type-Options: nosniff" in head
    for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert risky not in body
    assert "http://" not in body.replace("http://www.w3.org/2000/svg", "")  # nothing from elsewhere
    assert "https://" not in body
