"""A process of the cluster that speaks in the name of a server. Its id and epoch are public."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from kvpool.errors import PeerError
from kvpool.net.control_network import TcpNetwork
from kvpool.types import Namespace, ReadStatus, ServerStats
from kvpool.wire import messages as wire

_WITHIN_S = 5.0
#: After an inventory with this number every message of the server would count as an old one.
_FAR_AHEAD = 2**62


async def impersonate(
    master: str, server: str, namespace: Namespace, digests: Sequence[bytes]
) -> list[str]:
    """Register, announce, send an inventory and leave as `server`; returns what was accepted.

    Raises Unavailable when the master does not answer.
    """
    network = TcpNetwork()
    try:
        link = network.connect(master)

        async def request(message: wire.Message) -> tuple[int, bytes]:
            deadline = asyncio.get_running_loop().time() + _WITHIN_S
            return await link.request(*wire.encode(message), deadline=deadline)

        members = wire.decode_answer(wire.MembersReply, *await request(wire.Members())).members
        (victim,) = [member for member in members if member.server == server]
        name = (server, victim.epoch, os.urandom(wire.TOKEN_SIZE))
        gone = wire.BlockChanges(
            namespace.name,
            namespace.parts,
            len(digests[0]),
            b"".join(digests),
            0,
            0,
            ReadStatus.REMOVED,
        )
        nowhere = ["tcp://127.0.0.1:1"]
        said: list[tuple[wire.Message, type[wire.Message], str]] = [
            (
                wire.Register(*name, victim.host, nowhere, ["dram"], 1 << 40),
                wire.Registered,
                "accepted",
            ),
            (wire.Announce(*name, 1, [gone]), wire.Announced, "applied"),
            (wire.Inventory(*name, _FAR_AHEAD, 0, True, []), wire.Announced, "applied"),
            (wire.Heartbeat(*name, ServerStats()), wire.HeartbeatReply, "known"),
            (wire.Leave(*name), wire.HeartbeatReply, "known"),
        ]
        accepted = []
        for message, answer, field in said:
            try:
                if getattr(wire.decode_answer(answer, *await request(message)), field):
                    accepted.append(type(message).__name__)
            except PeerError:
                continue  # refused, with a reason
        return accepted
    finally:
        network.close()
