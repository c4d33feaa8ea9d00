"""Asks a server to hand its blocks over, and how far that is: for `kvpool.admin`."""

from __future__ import annotations

from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.errors import BadMessage
from kvpool.operators import DrainOrder, DrainReport, Left
from kvpool.protocols import Channel
from kvpool.types import MoveStatus
from kvpool.wire.moves import Drain, Drained


class Drains(ClientExtension):
    """Asks for one client."""

    def __init__(self, parts: ClientParts) -> None:
        self._servers = parts.context.servers

    async def drain(self, server: str, order: DrainOrder, deadline: float) -> DrainReport:
        """As `Admin.drain`."""

        async def ask(channel: Channel) -> DrainReport:
            return report_of(await channel.request(Drain(*order), Drained, deadline=deadline))

        return await self._servers.call(server, ask, deadline)


def report_of(answer: Drained) -> DrainReport:
    """What a server says of its drain. Raises BadMessage."""
    try:
        state = None if answer.state is None else MoveStatus(answer.state)
    except ValueError as error:
        raise BadMessage(str(error)) from None
    return DrainReport(
        state,
        answer.total_blocks,
        answer.left_blocks,
        answer.left_bytes,
        answer.moved_blocks,
        answer.moved_bytes,
        tuple(Left(*line) for line in answer.left),
    )
