"""A figure of a server is a field of `ServerStats`, and what measures it: no third place.

Each field gets a value that no other has, goes the whole way (heartbeat, master, answer to a
client), and must come out in `/metrics` of the master, in `status --json`, and unchanged.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from msgspec import structs

from kvpool import dev
from kvpool.config import MasterConfig
from kvpool.master.service import Master
from kvpool.ops import metrics
from kvpool.ops.tables import as_json_object
from kvpool.server.block_server import BlockServer
from kvpool.server.moves import Moves
from kvpool.server.tenancy import Tenancy
from kvpool.types import ClientUsage, Consumer, Member, ServerStats, TierUsage
from kvpool.wire import messages as wire
from tests.wire.offline import NoNetwork

#: A metric is a number, and Prometheus computes rates itself.
NO_METRIC = {"name", "status_text", "read_rate", "write_rate", "write_block_rate"}


def distinct(stats: type[TierUsage | ServerStats], first: int) -> dict[str, Any]:
    """A value for each field that is a number, unlike all others."""
    fields = structs.fields(stats)
    numbers = {field.name: first + n for n, field in enumerate(fields)}
    no_numbers = {"name": "dram", "status_text": "text", "lost": True, "read_only": True}
    no_numbers["dropped"] = {"unnamed": 9}
    return {**numbers, **(no_numbers if stats is TierUsage else {"draining": True})}


def reported() -> ServerStats:
    usage = TierUsage(**distinct(TierUsage, 2000))
    lists = {
        "usage": [usage],
        "clients": [ClientUsage("engine", "shm", 2, 3, 4.0, 5)],
        "consumers": [Consumer("tenant", "acme", {"dram": 31}, 32, 33, 34, {"b": 35})],
    }
    return ServerStats(**{**distinct(ServerStats, 1000), "counters": {"n": 7}, **lists})


async def master_of(stats: ServerStats) -> Master:
    """One that has heard of one server, and what that one reports."""
    master = Master(MasterConfig(), NoNetwork())
    register = wire.Register("s", 1, bytes(16), "h", ["inproc://s"], ["dram"], 1 << 20)
    for message in (register, wire.Heartbeat("s", 1, bytes(16), stats)):
        master.handle(*wire.encode(message))
    return master


async def test_every_figure_is_in_metrics() -> None:
    stats = reported()
    page = metrics.pages_of_master(await master_of(stats))["/metrics"]().body.decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    expected: dict[str, float] = {'kvpool_server_n_total{server="s"}': 7}
    for subject, one, labels in (
        ("server", stats, '{server="s"}'),
        ("tier", stats.usage[0], '{server="s",tier="dram"}'),
    ):
        figures = metrics.figures_of(type(one))
        lists = {"counters", "usage", "clients", "consumers"}
        shown = {field.name for field in structs.fields(one)} - NO_METRIC - lists
        assert set(figures) == shown, "a field without a `Figure`"
        for field, figure in figures.items():
            name = f"kvpool_{subject}_{figure.metric}" + "_total" * figure.grows
            value = getattr(one, field)
            if isinstance(value, dict):
                by_reason = labels.replace("{", '{reason="unnamed",')
                expected[name + by_reason] = value["unnamed"]
            else:
                expected[name + labels] = value
    of_acme = 'by="tenant",name="acme",server="s"'
    for metric, labels, value in (
        ("used_bytes", f'{of_acme},tier="dram"', 31),
        ("hit_blocks_total", of_acme, 32),
        ("hit_bytes_total", of_acme, 33),
        ("missed_blocks_total", of_acme, 34),
        ("evicted_bytes_total", 'by="tenant",by_tenant="b",name="acme",server="s"', 35),
    ):
        expected[f"kvpool_consumer_{metric}{{{labels}}}"] = value
    consumer = {field.name for field in structs.fields(Consumer)} - {"by", "name"}
    assert set(metrics.figures_of(Consumer)) == consumer, "a field without a `Figure`"
    assert {name: float(lines[name]) for name in expected} == expected


async def test_every_figure_is_in_status_json() -> None:
    stats = reported()
    master = await master_of(stats)
    answer = wire.decode(wire.MembersReply, *master.handle(*wire.encode(wire.Members())))
    (info,) = answer.members
    assert info.stats == stats
    shown = as_json_object(Member(**structs.asdict(info)))
    for field in structs.fields(ServerStats):
        if field.name not in ("usage", "clients", "consumers"):
            assert shown[field.name] == getattr(stats, field.name), field.name
    assert shown["usage"] == [structs.asdict(stats.usage[0])]
    assert shown["clients"] == [structs.asdict(stats.clients[0])]
    assert shown["consumers"] == [structs.asdict(stats.consumers[0])]


async def test_a_server_measures_every_figure(pool_dev: dev.Dev) -> None:
    """`BlockServer.stats` and its extensions leave none at its default for lack of a line."""
    measured = pool_dev.servers[0].stats(0.0)
    assert measured.rss > 0
    assert measured.counters
    assert [tier.name for tier in measured.usage] == ["dram"]
    fields = {field.name for field in structs.fields(ServerStats)}
    by_extensions = given(Moves.completed, "replace") | given(Tenancy.completed, "replace")
    assert given(BlockServer.stats, "ServerStats") | by_extensions == fields


def given(method: Callable[..., ServerStats], name: str) -> set[str | None]:
    """The keywords of the one call of this name."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
        if isinstance(node, ast.Call)
        and name in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
    )
    return {keyword.arg for keyword in call.keywords}


async def test_the_page_has_the_process_and_the_interpreter(pool_dev: dev.Dev) -> None:
    pages = metrics.pages_of_server(pool_dev.servers[0])
    text = pages["/metrics"]().body.decode()
    assert "\nprocess_resident_memory_bytes " in text
    assert "\npython_info{" in text
    assert (pages["/ready"]().status, pages["/health"]().status) == (200, 200)
