"""Child processes that are pinned to the same cores and never outlive this process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_END_S = 3.0
_libc = ctypes.CDLL(None)


class Process:
    """A child process, with or without lines on its stdin and stdout."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def kill(self) -> None:
        """`kill -9`, and wait until it has ended."""
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not end. Frozen processes get SIGCONT first."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            await self.kill()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def line(self) -> str:
        """The next line of its stdout; empty when it has ended."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
        return ""

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, also of those that have ended."""
        return cpu_s(self.pid)

    def memory(self) -> dict[str, int]:
        """Resident bytes, by kind: anonymous, file, shared."""
        found = {}
        with open(f"/proc/{self.pid}/status") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name in ("RssAnon", "RssFile", "RssShmem"):
                    found[name] = int(value.split()[0]) << 10
        return found


def cpu_s(pid: int) -> float:
    """The CPU clock of another process: clock_getcpuclockid(3), which Python lacks."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Rig:
    """The cores, the processes on them, and a directory for what they write down.

    Every process of every system is pinned to the same cores, so no system has more CPU.
    """

    def __init__(self, cores: Sequence[int], stack: AsyncExitStack) -> None:
        self.cores = list(cores)
        self._stack = stack
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        self._count = 0

    async def run(
        self,
        name: str,
        *command: str,
        environment: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start `command`; it ends with this rig, or with this process, however that ends."""
        self._count += 1
        log = self.directory / f"{self._count:02}-{name}.log"
        with log.open("wb") as stderr:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=1 << 26,
                env={**os.environ, **(environment or {})},
                cwd=os.getcwd(),
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C is for us; we end them in order
                preexec_fn=_pinned(self.cores, os.getpid()),
            )
        process = Process(child, log)
        self._stack.push_async_callback(process.stop)
        return process


def _pinned(cores: Sequence[int], parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)
        os.sched_setaffinity(0, cores)

    return before_exec


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with contextlib.ExitStack() as stack:
        return [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(count)
        ]


async def until(
    true: Callable[[], Awaitable[bool]], seconds: float, every: float = 0.05
) -> float | None:
    """Seconds until `true` returned true; None if it did not in time."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if await true():
            return time.monotonic() - started
        await asyncio.sleep(every)
    return None
