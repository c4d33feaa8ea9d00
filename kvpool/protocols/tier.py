"""What a tier must do: memory with addresses, and what some tiers can do besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvpool.types import Record


class Tier(Protocol):
    """Memory with addresses. It moves bytes and never allocates.

    Offsets are multiples of `alignment`, sizes are any; the bytes between the end of a write and
    the next multiple may change. Any number of calls at once. A call that has ended, cancelled or
    not, touches neither its buffer nor the memory any more. Outside of 0 to `capacity` it raises
    UsageError, after `close` Closed.
    """

    @property
    def name(self) -> str:
        """The name of its entry point: `dram`."""

    @property
    def capacity(self) -> int:
        """Fixed; a multiple of `alignment`, and no more than was asked for (or one extent)."""

    @property
    def alignment(self) -> int:
        """A power of two."""

    @property
    def survives_restart(self) -> bool:
        """The bytes are there again when the same storage is opened again."""

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises Corrupt or Unavailable when the medium fails."""

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        """Store `buffer` at `offset`. Raises Unavailable when the medium fails."""

    def close(self) -> None:
        """Give the memory back. Idempotent. Views that are still held keep it alive."""


@runtime_checkable
class Addressable(Protocol):
    """A tier whose memory can be looked at in place."""

    def view(self, offset: int, size: int) -> memoryview:
        """`size` bytes at `offset`, no copy, writable."""


class DeviceMemory(Protocol):
    """Bytes that lie on a device, as array libraries exchange them without a copy: DLPack.

    A `torch.Tensor`, a `cupy.ndarray`. One in CUDA memory offers `__cuda_array_interface__`, too.
    """

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


@runtime_checkable
class DeviceAddressable(Protocol):
    """A tier whose memory lies on a device, for transports that move bytes from and to there."""

    def device_view(self, offset: int, size: int) -> DeviceMemory:
        """`size` bytes at `offset` as one row of bytes, no copy, writable.

        What `write_from` has stored is there for work on any of the device's streams. Who writes
        into it waits for the device before he says so.
        """


@runtime_checkable
class SupportsStatusText(Protocol):
    """A tier or transport with something to say that an operator wants to know."""

    @property
    def status_text(self) -> str:
        """A few words: where a tier lies and how it is accessed (`kvpool status`), or what a
        transport finds on this machine (`kvpool doctor`; raises ConfigError when it is no use)."""


@runtime_checkable
class Mappable(Protocol):
    """A tier that other processes on this host can map."""

    @property
    def fd(self) -> int:
        """A sealed memfd of `capacity` bytes; the tier keeps owning it."""


@runtime_checkable
class PersistentTier(Protocol):
    """A tier whose bytes survive its process, and what they mean, too.

    It stores what it is told and draws no conclusions: whether two records are one block, whether
    a parent is there, and what may be thrown out is up to the server. Calls for different extents
    may run at once. For one extent the order is: write its bytes, `persist` it, and `erase` it
    before its bytes are written over. A record that outlived its bytes for lack of that `erase`
    does no harm but a miss: whoever reads an extent compares the checksum (G1).
    """

    async def persist(self, records: Sequence[Record]) -> None:
        """Found again by `recover` after kill -9, once it has returned; in any order until then.

        Called when the bytes have been written. Raises Unavailable when the medium fails: then any
        of `records` may be found again or not. UsageError for an extent that it cannot hold, and
        then none is. A tier may have room for only so many namespaces: what it cannot remember
        for that reason it counts, and says nothing.
        """

    async def erase(self, offsets: Sequence[int]) -> None:
        """Not found again: the extents that start there. Where none does, nothing happens.

        Raises Unavailable when the medium fails: then any of them may still be found.
        """

    async def recover(self) -> Sequence[Record]:
        """What was remembered and still verifies, no two overlapping; the rest is dropped.

        Called once, before anything is written. Whatever the medium contains, it never raises for
        that, and never returns a record that was not remembered so. Where extents overlap, the
        highest generation wins; what was dropped does not come back later. Raises Unavailable when
        the medium fails as a whole, ConfigError when it is none of this tier's.
        """
