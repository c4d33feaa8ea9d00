"""Which processes can share memory, and how much this one uses."""

from __future__ import annotations

import os
import socket


def host_id() -> str:
    """Equal for processes that can share memory: one kernel, one network namespace.

    (The network namespace, because abstract Unix sockets live in it.)
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def resident_bytes() -> int:
    """This process's resident memory, shared pages included."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
