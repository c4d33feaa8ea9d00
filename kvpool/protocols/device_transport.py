"""What a transport may do beside: move blocks from and to memory of devices, past the host's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from kvpool.protocols.tier import DeviceReadBlock, DeviceToken, DeviceWriteBlock
from kvpool.protocols.transport import ReadOptions, WriteOptions
from kvpool.types import ReadStatus, WriteStatus


@runtime_checkable
class ReachesDevices(Protocol):
    """A transport whose channels may be `SupportsDeviceRead` and `SupportsDeviceWrite`."""

    @property
    def device_lack(self) -> str:
        """What this machine or its settings lack for that, for an operator; empty: nothing, and
        every channel is `SupportsDeviceRead`."""


class DeviceArrival(NamedTuple):
    """What a server answered for one block that goes to a device. Nobody has verified it yet.

    After a HIT the first `size` bytes of the block's memory are what the server sent, and
    `checksum` is what they must have. A small answer brings the bytes with it: then they are in
    `data`, memory of the host, and the block's own memory is untouched.
    """

    status: ReadStatus
    size: int = 0
    checksum: int = 0
    data: memoryview | None = None


@runtime_checkable
class SupportsDeviceRead(Protocol):
    """A channel that receives blocks into memory on a device, without a stop in that of the host
    (design: device-memory)."""

    async def read_to_device(
        self, options: ReadOptions, blocks: Sequence[DeviceReadBlock], *, deadline: float
    ) -> list[DeviceArrival]:
        """As `read`, but it verifies nothing: the caller does, on the device.

        When it returns, work that is then started on any stream of the device sees the bytes. It
        does not wait for what the device still does with the memory: the caller does, before.
        However it ends, nothing writes into the memory any more.
        """


#: Copies of small blocks in memory of the host. Raises DeadlineExceeded, and Overloaded when their
#: device fails.
BlocksToHost: TypeAlias = Callable[[Sequence[DeviceWriteBlock]], Awaitable[list[memoryview]]]


@runtime_checkable
class SupportsDeviceWrite(Protocol):
    """A channel that sends blocks from memory on a device, without a stop in that of the host
    (design: device-memory)."""

    async def write_from_device(
        self,
        options: WriteOptions,
        blocks: Sequence[DeviceWriteBlock],
        token: DeviceToken,
        to_host: BlocksToHost,
        *,
        deadline: float,
    ) -> list[WriteStatus]:
        """As `write`, with the checksums that the caller has computed on the device.

        The blocks and the token lie on one device, which has done all work on that memory before
        the call. However it ends, nothing reads from the memory any more.
        """
