"""HBM: one buffer on a CUDA device, reached from host memory through pinned staging.

`device_copy.py` copies between host and device without blocking the event loop
(design: device-memory). On the device `cpu` the same code runs, with synchronous copies.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from kvpool.device_copy import STEP, DeviceCopier, first_line
from kvpool.errors import BadBuffer, Closed, ConfigError, UsageError
from kvpool.memory_limits import MemoryLimits, tightest
from kvpool.protocols import DeviceToken
from kvpool.units import human

if TYPE_CHECKING:  # torch takes seconds to import: only `Hbm.__init__` does (design: layout)
    import torch

_TOKEN_SIZE: Final = 8


class Hbm:
    """`capacity` bytes of a device's memory, allocated once.

    When `write_from` returns, the bytes are visible to all streams of the device; when `read_into`
    returns, they are in the caller's buffer.
    """

    name = "hbm"
    alignment = 256  # that of CUDA's own allocations
    survives_restart = False

    def __init__(self, capacity: int, *, device: str = "cuda", staging: int = 8 * STEP) -> None:
        """Allocate `capacity` bytes on `device`, and pin `staging` bytes of host memory.

        Each call that copies uses 2 * STEP bytes of the pinned memory and one thread; with more
        calls at once, the others wait. Raises ConfigError when torch is not installed, the device
        does not exist, or the memory is not free.
        """
        self.device = _usable(device)
        import torch

        if capacity < 1:
            raise ConfigError(f"capacity is {capacity} bytes: it must be positive")
        if staging < 2 * STEP:
            raise ConfigError(f"staging is {human(staging)}: it must be {human(2 * STEP)} or more")
        self.capacity = max(capacity - capacity % self.alignment, self.alignment)
        self._cuda = self.device.type == "cuda"
        at_once = staging // (2 * STEP)
        try:
            free = torch.cuda.mem_get_info(self.device)[0] if self._cuda else memory_available()
            if self.capacity > free:
                raise ConfigError(
                    f"capacity is {human(capacity)}, the device {device!r} has {human(free)} free: "
                    "lower `capacity`"
                )
            memory = torch.empty(self.capacity, dtype=torch.uint8, device=self.device)
            content = os.urandom(_TOKEN_SIZE)
            shown = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
            self.device_token = DeviceToken(str(self.device), shown, content)
            self._copier = DeviceCopier(self.device, at_once)
        except RuntimeError as error:  # torch's out of memory is one
            raise ConfigError(
                f"{human(capacity)} on the device {device!r} and {human(staging)} of pinned host "
                f"memory cannot be had: {first_line(error)}"
            ) from None
        self._memory: torch.Tensor | None = memory

    def __repr__(self) -> str:
        return f"<Hbm {self.capacity} bytes on {self.device}>"

    def device_view(self, offset: int, size: int) -> torch.Tensor:
        """`size` bytes at `offset`, as `DeviceAddressable.device_view`."""
        if not 0 <= offset <= offset + size <= self.capacity:
            raise UsageError(f"{size} bytes at {offset}: there are {self.capacity}")
        if self._memory is None:
            raise Closed("the tier is closed")
        return self._memory[offset : offset + size]

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        if buffer.readonly:
            raise BadBuffer("the buffer is read-only: nothing can be read into it")
        await self._copy(offset, buffer, to_host=True)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        await self._copy(offset, buffer, to_host=False)

    def close(self) -> None:
        """End running calls with Closed; waits until the current step of each copy is done."""
        self._copier.close()
        if self._memory is not None:
            self._memory = None
            if self._cuda:
                import torch

                torch.cuda.empty_cache()  # else torch keeps the memory, for this process only

    async def _copy(self, offset: int, buffer: memoryview, *, to_host: bool) -> None:
        memory = self.device_view(offset, len(buffer))
        if not buffer.c_contiguous or buffer.nbytes != len(buffer):
            raise BadBuffer("the buffer is not a contiguous row of bytes")
        if len(buffer):
            await self._copier.copy(memory, np.frombuffer(buffer, np.uint8), to_host=to_host)


def _usable(device: str) -> torch.device:
    """The device. Raises ConfigError when torch is not installed or has no such device."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        raise ConfigError(
            f"the tier 'hbm' needs torch: pip install 'kvpool[hbm]' ({first_line(error)})"
        ) from None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cuda", "cpu") or (found.type == "cpu" and found.index):
        raise ConfigError(f"device is {device!r}: expected 'cuda', 'cuda:0', ..., or 'cpu'")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= (found.index or 0):
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise ConfigError(
                f"device is {device!r}: torch {torch.__version__} ({built}) finds {count} "
                "CUDA devices"
            )
    return found


def memory_available() -> int:
    """Bytes that can be allocated without swapping, within this process's limits."""
    return tightest(MemoryLimits().memory()).free
