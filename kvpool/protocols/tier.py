"""What a tier must do: memory with addresses, and what some tiers can do besides.

`kvpool.testing.TIER_CHECKS` tests an implementation. The smallest tier keeps its bytes in a
bytearray::

    class Heap:
        name, alignment, survives_restart = "heap", 4096, False

        def __init__(self, capacity: int) -> None:
            self.capacity = max(capacity - capacity % self.alignment, self.alignment)
            self._memory: bytearray | None = bytearray(self.capacity)

        def view(self, offset: int, size: int) -> memoryview:  # makes it Addressable
            if self._memory is None:
                raise Closed("the tier is closed")
            if not 0 <= offset <= offset + size <= self.capacity:
                raise UsageError(f"{size} bytes at {offset}: there are {self.capacity}")
            return memoryview(self._memory)[offset : offset + size]

        async def read_into(self, offset: int, buffer: memoryview) -> None:
            buffer[:] = self.view(offset, len(buffer))

        async def write_from(self, offset: int, buffer: memoryview) -> None:
            self.view(offset, len(buffer))[:] = buffer

        def close(self) -> None:
            self._memory = None

(design: tiers)
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable


class Tier(Protocol):
    """Memory with addresses. A tier moves bytes; the server decides which block is stored where.

    All offsets and sizes are bytes. Offsets are multiples of `alignment`, sizes are any; the bytes
    between the end of a write and the next multiple may change. Any number of calls run at
    once. After a call has returned, failed or been cancelled, it touches neither its buffer nor the
    tier's memory. No call takes more than 5 ms of the loop at a time. Every call raises UsageError
    for bytes outside of 0 to `capacity`, and Closed after `close`.
    """

    @property
    def name(self) -> str:
        """The name of its entry point in `kvpool.tiers`: `dram`."""

    @property
    def capacity(self) -> int:
        """Bytes; fixed. A multiple of `alignment`: the size passed to the constructor, rounded
        down, but at least one `alignment`."""

    @property
    def alignment(self) -> int:
        """Bytes; a power of two, usually 4096 for memory and disks."""

    @property
    def survives_restart(self) -> bool:
        """True when the bytes are still there after the same storage is closed and opened again."""

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer`, which is contiguous, writable bytes, from `offset`.

        Raises Corrupt or Unavailable when the medium fails; then any bytes of `buffer` may have
        changed.
        """

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        """Store all of `buffer`, which is contiguous bytes, at `offset`.

        Raises Unavailable when the medium fails; then any of the bytes may be stored.
        """

    def close(self) -> None:
        """Free the memory. Idempotent. Views that are still in use keep the memory mapped."""


@runtime_checkable
class Addressable(Protocol):
    """A tier whose memory this process can use in place, without a copy."""

    def view(self, offset: int, size: int) -> memoryview:
        """`size` bytes at `offset`, writable. Raises UsageError and Closed, as above."""


class DeviceMemory(Protocol):
    """Bytes on a device, as array libraries exchange them without a copy: DLPack.

    A `torch.Tensor`, a `cupy.ndarray`. One in CUDA memory has `__cuda_array_interface__` as well.
    One of one dimension has a length, and parts of it are the same memory.
    Source: https://dmlc.github.io/dlpack/latest/python_spec.html
    """

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> DeviceMemory: ...

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class DeviceToken(NamedTuple):
    """Eight bytes on a device, and what they are: sent first, they show what the lanes do with
    memory of that device."""

    device: str
    memory: DeviceMemory
    content: bytes


class DeviceReadBlock(NamedTuple):
    """One block to be read into memory on a device, which has room for `size` bytes of it."""

    digest: bytes
    memory: DeviceMemory

    @property
    def size(self) -> int:
        return len(self.memory)


class DeviceWriteBlock(NamedTuple):
    """One block to be written from memory on a device, all of which it is, with its checksum."""

    digest: bytes
    parent: bytes
    memory: DeviceMemory
    checksum: int

    @property
    def size(self) -> int:
        return len(self.memory)


@runtime_checkable
class DeviceAddressable(Protocol):
    """A tier whose memory is on a device, for transports that move bytes from and to a device.

    A block of it is read from there into memory on another device, without a stop in that of a
    host (design: device-memory).
    """

    @property
    def device_token(self) -> DeviceToken:
        """Of the same device, always the same bytes."""

    def device_view(self, offset: int, size: int) -> DeviceMemory:
        """`size` bytes at `offset`: one dimension of bytes, no copy, writable.

        What `write_from` has stored is visible to work on any of the device's streams. A transport
        that writes into it waits for the device before it reports the bytes as written. Raises
        UsageError and Closed, as above. (design: device-memory)
        """


@runtime_checkable
class SupportsStatusText(Protocol):
    """A tier or transport that has something to show to an operator."""

    @property
    def status_text(self) -> str:
        """A few words. A tier (`kvpool status`): where its bytes are and how they are accessed, as
        in `/mnt/pool, O_DIRECT`. A transport (`kvpool doctor`): what it finds on this machine;
        raises ConfigError when it cannot be used here."""


@runtime_checkable
class Mappable(Protocol):
    """A tier that other processes on this host can map. (design: shared-memory)"""

    @property
    def fd(self) -> int:
        """A memfd of `capacity` bytes, sealed against resizing. The tier keeps owning it."""
