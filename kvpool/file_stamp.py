"""Whether a file has changed since it was read, without reading it."""

from __future__ import annotations

import os
from pathlib import Path

#: Its inode, its size and the time of its last change; None: it is not there.
Stamp = tuple[int, int, int] | None


def stamp(path: str | Path) -> Stamp:
    """Take it before the file is read: a change meanwhile is then noticed with the next look."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
