"""What a process is to others: where it runs, what it is called, how much memory it uses."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """This process's surroundings, as servers and clients tell others of them."""

    #: Equal for processes that can share memory.
    id: str
    #: For logs and default server ids.
    name: str
    #: `name/pid`, for logs.
    process: str
    #: Bytes of resident memory now.
    resident: Callable[[], int]


def this_host() -> Host:
    """Where this process really runs."""
    name = socket.gethostname()
    return Host(host_id(), name, f"{name}/{os.getpid()}", resident_bytes)


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
