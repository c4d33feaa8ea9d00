"""What every kvpool process has in common: groups of tasks, and the host that it runs on."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import asyncio


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """`asyncio.TaskGroup` for callers that are promised single errors: the first leaves as it is.

    As there, it ends when every task has ended, and the first error cancels the others.
    """
    import asyncio

    task = cast("asyncio.Task[Any]", asyncio.current_task())
    before = inside = task.cancelling()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
            inside = task.cancelling()
    except BaseExceptionGroup as errors:
        # Before Python 3.13 its own cancellation stays counted where a task fails at the end: a
        # timeout around the call, which counts them, would end in CancelledError.
        own = sys.version_info < (3, 13) and getattr(group, "_parent_cancel_requested", False)
        if own and inside == before < task.cancelling():
            task.uncancel()
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@dataclass(frozen=True, slots=True)
class Host:
    """This process's surroundings, as servers and clients tell others of them."""

    #: Equal for processes that can share memory.
    id: str
    #: For logs and default server ids.
    name: str
    #: `name/pid`, for logs, and for servers that share their connections among processes.
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
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def resident_bytes() -> int:
    """This process's resident memory, shared pages included."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
