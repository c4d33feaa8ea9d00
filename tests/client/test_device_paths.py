"""Which paths of a client's servers reach memory on devices."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, cast

import pytest

from kvpool import ClientConfig, Cluster
from kvpool.client.device_paths import DevicePaths
from kvpool.client.servers import Servers
from kvpool.errors import Overloaded
from kvpool.protocols import Channel
from kvpool.runtime import Host
from kvpool.types import Member, ServerStats
from kvpool.wire import messages as wire


class Lane:
    """A transport that reaches devices, fast or not."""

    device_lack = ""
    same_host = False

    def __init__(self, has_fabric: bool) -> None:
        self.has_fabric = has_fabric


class Told:
    """Masters that know one server on another host, and one on this host."""

    async def ask(self, *_: object, **__: object) -> wire.MembersReply:
        members = [
            Member(name, 1, host, (f"x://{name}",), ("dram",), True, 0.0, 1 << 30, ServerStats())
            for name, host in (("far", "there"), ("near", "here"))
        ]
        return wire.MembersReply("m", 1.0, 0, members, False)


async def paths_of(has_fabric: bool) -> DevicePaths:
    transports = cast(Any, {"x": Lane(has_fabric)})
    here = Host("here", "client", "client/1", lambda: 0)
    rng = random.Random(1)
    masters = cast(Any, Told())
    servers = Servers(ClientConfig(), Cluster(), here, transports, masters, Counter(), rng)
    await servers.refresh(asyncio.get_running_loop().time() + 1)
    return DevicePaths(servers)


@pytest.mark.parametrize("has_fabric", [True, False])
async def test_auto_takes_fast_paths_to_other_hosts_alone(has_fabric: bool) -> None:
    paths = await paths_of(has_fabric)
    assert paths.reach("far", only_fabrics=True) == has_fabric
    assert not paths.reach("near", only_fabrics=True)
    assert paths.reach_some(only_fabrics=True) == has_fabric
    assert paths.reach("far", only_fabrics=False)
    assert paths.reach("near", only_fabrics=False)
    assert not paths.reach("unknown", only_fabrics=False)


async def test_a_path_that_was_silent_is_not_taken_for_a_while() -> None:
    async def never(_: Channel) -> None:
        raise AssertionError("called")

    paths = await paths_of(has_fabric=True)
    paths.avoid("far")
    paths.avoid("unknown")
    assert not paths.reach("far", only_fabrics=False)
    assert paths.reach("near", only_fabrics=False)
    deadline = asyncio.get_running_loop().time() + 1
    with pytest.raises(Overloaded, match="far has no path to devices here that works"):
        await paths.call("far", never, deadline, only_fabrics=False, counted_as="read")
