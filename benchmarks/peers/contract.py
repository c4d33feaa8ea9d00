"""What a system must offer to be measured, and the memory that clients read into and write from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.peers.processes import Process

Bytes: TypeAlias = npt.NDArray[np.uint8]
#: The form of keys: 32 raw bytes, or the same as hexadecimal digits.
Key: TypeAlias = str | bytes


class Missing(Exception):
    """A system cannot run here. The message says what is missing and how to get it."""


class Failed(Exception):
    """A process of the benchmark failed or did not answer in time."""


class Blocks:
    """Blocks of equal size in the memory that a client has registered, prepared for every API.

    Addresses and views are made here, outside of the timed calls.
    """

    def __init__(self, rows: Bytes) -> None:
        count, size = rows.shape
        first = int(rows.ctypes.data)
        self.rows = rows
        self.addresses = [first + size * number for number in range(count)]
        self.sizes = [size] * count
        self.views = [row.data for row in rows]

    def __len__(self) -> int:
        return len(self.addresses)

    def part(self, first: int, last: int) -> Blocks:
        part = object.__new__(Blocks)
        part.rows = self.rows[first:last]
        part.addresses = self.addresses[first:last]
        part.sizes = self.sizes[first:last]
        part.views = self.views[first:last]
        return part


class Memory:
    """Two equal regions that all clients map: the source of writes and the target of reads.

    Only one client at a time uses a place in them, so all systems work with the same pages.
    """

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        whole = np.frombuffer(self._map, np.uint8)
        self.source: Bytes = whole[: size // 2]
        self.target: Bytes = whole[size // 2 :]

    def copied_to(self, source: Bytes, target: Bytes) -> Memory:
        """The same in other memory, for a system that has to make its own."""
        np.copyto(source, self.source)
        other = object.__new__(Memory)
        other.source, other.target = source, target
        return other

    @staticmethod
    def create(size: int) -> int:
        """A memfd for two regions of `size` bytes."""
        fd = os.memfd_create("peers")
        os.ftruncate(fd, 2 * size)
        return fd

    def blocks(self, size: int, count: int, offset: int = 0) -> tuple[Blocks, Blocks]:
        """`count` blocks of `size` bytes in either region."""
        end = offset + size * count
        if end > len(self.source):
            raise Failed(f"{count} blocks of {size} bytes at {offset} are more than there is")
        return (
            Blocks(self.source[offset:end].reshape(count, size)),
            Blocks(self.target[offset:end].reshape(count, size)),
        )


class Client(Protocol):
    """One client, alone in its process. All lists run parallel to the keys.

    The calls of systems whose library blocks block: there is nothing else to do in that process.
    """

    def key(self, number: int) -> Key:
        """Key number `number` in the form that this system wants."""

    async def open(self, memory: Memory) -> Memory:
        """Connect; the memory to work with, which is `memory` unless the system wants its own."""

    async def write(
        self, keys: Sequence[Key], blocks: Blocks, copies: int = 1, after: Key | None = None
    ) -> list[bool]:
        """True for each block that is stored. `after`: the block before the first of them."""

    async def read(self, keys: Sequence[Key], blocks: Blocks) -> list[bool]:
        """True for each block that the system reports as read into its buffer."""

    async def match(self, keys: Sequence[Key]) -> int:
        """How many keys, counted from the first without a gap, are in the system."""

    async def load(self, keys: Sequence[Key], blocks: Blocks) -> int:
        """`match`, then `read` the blocks found; returns how many came, counted without a gap."""

    async def replace(self, key: Key, blocks: Blocks) -> bool:
        """Give an existing key other bytes, the way this system does that."""

    async def remove(self, keys: Sequence[Key]) -> None: ...

    async def close(self) -> None: ...


class System(Protocol):
    """The server side. `processes` by role: `master` where there is one, `store-0`, `store-1`."""

    name: str
    processes: dict[str, Process]

    async def start(self) -> None:
        """Returns when clients can use it. Raises Missing."""

    async def restart(self, role: str) -> None:
        """Start a process that was killed, as its operator would."""

    async def used(self) -> int:
        """Bytes of block memory that the system reports as used."""

    def about(self) -> dict[str, Any]:
        """Version and settings, for the report."""

    def client(self) -> dict[str, Any]:
        """What a client process needs to know."""

    async def close(self) -> None:
        """Release what it holds in this process; its server processes end with the rig."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the systems are. `capacity` in bytes, of all stores together."""

    capacity: int
    stores: int = 1
    replicas: int = 1
    #: Settings that differ from the defaults, by system: `{"mooncake": {"lease_ms": "500"}}`.
    tuning: dict[str, dict[str, str]] = field(default_factory=dict)
