"""The joint of a client for blocks whose memory is not the host's (design: device-memory).

Without the ring's files and its lines here a client takes memory of the host alone, and refuses
other memory as it refuses what is no memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias

from kvpool.client.buffers import DeviceBlock, HostRows
from kvpool.client.context import ClientContext
from kvpool.client.reader import Reader, ReadState
from kvpool.config import ClientConfig
from kvpool.errors import UsageError
from kvpool.protocols import DeviceWriteBlock, WriteOptions
from kvpool.types import WriteBlock, WriteStatus

#: `module:class`; the last one is made.
TRANSFERS: Final = (
    "kvpool.client.block_transfers:BlockTransfers",
    "kvpool.client.device_transfers:DeviceTransfers",
)

#: Place blocks and write them to servers; one status each.
WriteBlocks: TypeAlias = Callable[[Sequence[DeviceWriteBlock]], Awaitable[list[WriteStatus]]]
#: The same for blocks in rows of the host.
WriteRows: TypeAlias = Callable[[HostRows], Awaitable[Mapping[int, WriteStatus]]]
#: Write blocks to one server, from memory of the host.
ThroughHost: TypeAlias = Callable[[Sequence[WriteBlock]], Awaitable[list[WriteStatus]]]


class BlockTransfers:
    """What reads and writes of one client ask for blocks that are not in memory of the host."""

    def __init__(self, config: ClientConfig, context: ClientContext) -> None:
        pass

    async def read(self, reader: Reader, state: ReadState, blocks: dict[int, DeviceBlock]) -> None:
        """Read these blocks, by position, and set their results in `state`."""
        raise UsageError("this client takes memory of the host alone")

    async def write(
        self,
        options: WriteOptions,
        names: Mapping[int, tuple[bytes, bytes]],
        blocks: Mapping[int, DeviceBlock],
        write_blocks: WriteBlocks,
        write_rows: WriteRows,
        deadline: float,
    ) -> Mapping[int, WriteStatus]:
        """Write these blocks, in order; `names` are their digests and parents."""
        raise UsageError("this client takes memory of the host alone")

    async def write_to(
        self,
        server: str,
        options: WriteOptions,
        blocks: Sequence[DeviceWriteBlock],
        through_host: ThroughHost,
        deadline: float,
    ) -> list[WriteStatus]:
        """`Channel.write` to one server, of blocks that `write` has passed to `write_blocks`."""
        raise UsageError("this client takes memory of the host alone")

    def close(self) -> None:
        """The client has closed its connections: give the memory back."""
