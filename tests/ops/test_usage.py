"""`kvpool usage`: the figures of all servers, summed."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console

from kvpool.ops.usage import as_json_object, usage_by, usage_table
from kvpool.types import OTHERS, Consumer, Member
from tests.support.members import member as usual_member


def member(name: str, *consumers: Consumer, alive: bool = True) -> Member:
    return usual_member(name, alive=alive, consumers=list(consumers))


def acme(size: int) -> Consumer:
    return Consumer("tenant", "acme", {"dram": size}, 3, 300, 1, {"": 5, "blue": 7})


def test_servers_are_summed_and_lost_ones_left_out() -> None:
    others = Consumer("tenant", OTHERS, {"dram": 10_000})
    members = [
        member("a", acme(10), Consumer("namespace", "x", {"dram": 1})),
        member("b", acme(20), Consumer("tenant", "blue", {"nvme": 50}), others),
        member("c", acme(1_000_000), alive=False),
    ]
    found = usage_by("tenant", members)
    assert [one.name for one in found] == ["blue", "acme", OTHERS]
    total = found[1]
    assert (total.stored["dram"], total.hit_blocks, total.hit_bytes) == (30, 6, 600)
    assert total.evicted_by == {"": 10, "blue": 14}
    assert total.hit_rate == 0.75


def test_the_table_and_the_json_have_the_same_figures() -> None:
    found = usage_by("tenant", [member("a", acme(10), Consumer("tenant", "", {"nvme": 2048}))])
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(usage_table("tenant", found))
    text = console.export_text()
    assert "(the pool)" in text
    assert "75.0%" in text
    shown = json.loads(json.dumps([as_json_object(one) for one in found]))
    (of_acme,) = [one for one in shown if one["name"] == "acme"]
    assert of_acme["used_bytes"] == {"dram": 10}
    assert of_acme["evicted_bytes_by_tenant"] == {"": 5, "blue": 7}
    assert dataclasses.is_dataclass(found[0])


def test_of_many_consumers_the_table_shows_some() -> None:
    found = usage_by(
        "program", [member("a", *(Consumer("program", f"p{n}", {"dram": n}) for n in range(60)))]
    )
    assert usage_table("program", found).row_count == 41
