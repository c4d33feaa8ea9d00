"""What every kvpool process has in common: its loop, signals, garbage collection, host id.

A process ends within a second of Ctrl-C or SIGTERM, or, if asked for, with the process that started
it. Kernel-owned resources (sockets, memfds) are freed with it even after kill -9.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_FILES = 65_536
_UID_MIN = 1000  # below are the accounts of services


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop where it is installed."""
    import asyncio  # here: `kvpool --help` needs no loop (design: import-time)

    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """`asyncio.TaskGroup` for callers that are promised single errors: the first leaves as it is.

    As there, it ends when every task has ended, and the first error cancels the others.
    """
    import asyncio

    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def wait_for_signal() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    import asyncio

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:  # it ended before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def raise_file_limit() -> None:
    """Let this process open as many files as it may, up to 65,536.

    Shells give 1,024 by default, as many as a server accepts connections (`connections_max`).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def freeze_gc() -> None:
    """For processes with millions of blocks: avoid collections that visit all of them.

    A full collection stops the loop while it visits every entry, and frees nothing: the index has
    no cycles that outlive a block. Young garbage is still collected, in portions of some thousand
    objects, because new entries are young, too (design: garbage-collection).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 3, 1_000_000)


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
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def has_other_users(accounts: str = "/etc/passwd") -> bool:
    """Users besides this one and root have an account to log in with, or run processes.

    As far as this process can see: it is for a hint, not for a decision.
    """
    own = {0, os.geteuid()}
    with contextlib.suppress(OSError), open(accounts) as lines:
        for fields in (line.rstrip("\n").split(":") for line in lines):
            if len(fields) != 7 or not fields[2].isdecimal():
                continue
            uid, may_log_in = int(fields[2]), not fields[6].endswith(("/nologin", "/false"))
            if may_log_in and uid >= _UID_MIN and uid not in own:
                return True
    with contextlib.suppress(OSError), os.scandir("/proc") as found:
        for entry in found:
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and entry.stat().st_uid not in own:
                    return True
    return False


def runtime_directory() -> Path:
    """Where files of running processes lie that nobody misses after a reboot."""
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if directory:
        return Path(directory) / "kvpool"
    import tempfile

    return Path(tempfile.gettempdir()) / f"kvpool-{os.geteuid()}"


def make_private_directory(directory: Path) -> None:
    """Make it for this user alone. Raises OSError when it is there and somebody else's.

    Everybody may write into /tmp, so another user may have made it first.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    if not private or found.st_uid != os.geteuid():
        raise PermissionError(0, f"{directory} is not a directory of this user alone")


def resident_bytes() -> int:
    """This process's resident memory, shared pages included."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
