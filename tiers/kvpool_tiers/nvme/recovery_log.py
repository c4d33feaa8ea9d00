"""How far the recovery of a file is, as lines of the log: that of a large one takes minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from kvpool import logs
from kvpool.units import human

log = logs.get("kvpool.nvme")

_EVERY_S: Final = 10.0


class RecoveryLog:
    """Says every ten seconds how much of `size` bytes was looked at, and the time that is left."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._began = self._logged_at = asyncio.get_running_loop().time()

    def at(self, done: int) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at < _EVERY_S or not done:
            return
        self._logged_at = now
        left_s = (self._size - done) * (now - self._began) / done
        share = f"{human(done)} of {human(self._size)}"
        log.info("the file is being read", path=str(self._path), done=share, left_s=round(left_s))
