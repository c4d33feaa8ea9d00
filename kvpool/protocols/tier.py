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

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvpool.types import Record


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


@runtime_checkable
class PersistentTier(Protocol):
    """A tier that keeps its bytes and their records when its process ends.

    It only stores records. The server decides whether two records are one block, whether a parent
    exists, and what is evicted. Calls for different extents may run at once. For one extent the
    order is: write its bytes, `persist` it, and `erase` it before its bytes are overwritten. If
    that `erase` is missing, a record of overwritten bytes remains. It costs one miss, because each
    read compares the checksum (G1). (design: nvme-format)
    """

    async def persist(self, records: Sequence[Record]) -> None:
        """Store `records`: after the call has returned, `recover` finds them, also after kill -9.

        Called when the bytes have been written. Until it returns, `recover` may find any subset of
        `records`; the same after Unavailable, which it raises when the medium fails. Raises
        UsageError for an extent that does not fit; then none of the records is stored. A tier may
        have room for a limited number of namespaces, of each tenant its share: it leaves out a
        record of another one without an error, and counts it (`KeepsSome`).
        """

    async def erase(self, offsets: Sequence[int]) -> None:
        """Delete the records of the extents that start at these offsets.

        An offset where no extent starts is ignored. Raises Unavailable when the medium fails: then
        `recover` may still find any of them.
        """

    async def recover(self) -> Sequence[Record]:
        """The records that were persisted and still verify, no two overlapping.

        Called once, before anything is written. Damaged contents raise no error: a record that does
        not verify is dropped, and does not come back later. (One that was hidden by damage
        elsewhere, and is whole again, may come back.) Every record returned was persisted in this
        form. Of extents that overlap, the one with the highest generation is returned. A list is
        the caller's, who empties it. Raises Unavailable when the medium fails as a whole, and
        ConfigError when its contents are not this tier's.
        """


@runtime_checkable
class BelongsToOwner(Protocol):
    """A persistent tier that keeps for whom it stores, so that nobody else is served from it."""

    def claim(self, owner: bytes) -> None:
        """Before `recover`: these 16 bytes name the cluster of this server, and its secret.

        `recover` then raises ConfigError for contents of another owner.
        """


@runtime_checkable
class Encrypts(Protocol):
    """A persistent tier that can encrypt what it keeps."""

    @property
    def encrypted(self) -> bool:
        """Whether it does; then it needs a key."""

    def use_key(self, key: bytes) -> None:
        """Before `recover`: these 32 bytes, which the same cluster has after each start and nobody
        else has. What the tier encrypts with is derived from them."""


@runtime_checkable
class KeepsSome(Protocol):
    """A persistent tier that may leave out a record of `persist`, and knows which."""

    def keeps(self, offset: int) -> bool:
        """Whether the record of the extent that starts there was stored, and not left out."""


@runtime_checkable
class ReportsDropped(Protocol):
    """A persistent tier that counts what `recover` did not return."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records that the last `recover` dropped, by reason: a few words, as in `damaged`. For the
        log, `kvpool status` and `/metrics`; empty when it returned everything."""


class TierPart(NamedTuple):
    """One device of a tier: its place, such as a path, and its bytes."""

    place: str
    size: int


@runtime_checkable
class HasParts(Protocol):
    """A tier of several devices that fail one by one. The server lets no extent cross from one part
    into the next, and goes on with the others when one is lost."""

    @property
    def parts(self) -> Sequence[TierPart]:
        """In the order of their offsets, in multiples of `alignment`; together `capacity`."""
