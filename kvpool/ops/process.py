"""What a command is as a process: its loop, signals, garbage collection.

A process ends within a second of a signal that asks for it, or, if asked for, with the process that
started it. Kernel-owned resources (sockets, memfds) are freed with it even after kill -9.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_ASKED = (signal.SIGINT, signal.SIGTERM)
_OTHERS = ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR")
#: Of a child's environment: the process that it is to die with.
PARENT = "_KVPOOL_PARENT"


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop where it is installed.

    SIGTERM cancels `main`, if that does not wait for signals itself, and then it is SystemExit: so
    a command leaves no children, and ends as process 1, too, which the kernel spares otherwise.
    """
    import asyncio  # here: `kvpool --help` needs no loop (design: layout)

    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    asked: list[signal.Signals] = []

    async def until_asked() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            asked.append(signal.SIGTERM)
            task.cancel()

        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        return await main

    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            return runner.run(until_asked())
        except asyncio.CancelledError:
            if not asked:
                raise
    raise SystemExit(128 + asked[0])


async def until_stopped(endless: Coroutine[Any, Any, None]) -> None:
    """Run it until this process is asked to end, which is its right end."""
    import asyncio

    tasks = [asyncio.ensure_future(endless), asyncio.ensure_future(wait_for_signal())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if not tasks[0].cancelled():
        tasks[0].result()


def stop_signals() -> list[signal.Signals]:
    """What asks a process to end in order: it hands over and writes back what it would lose.

    Also what others send and would end it as a crash does: a closed terminal, Ctrl-\\, who rotates
    logs, a limit of CPU time, a supply of power that fails; but not where one has another meaning
    (files are read again) or is ignored (`nohup`).
    """
    more = map(signal.Signals.__getitem__, _OTHERS)
    return [*_ASKED, *(one for one in more if signal.getsignal(one) is signal.SIG_DFL)]


async def wait_for_signal() -> None:
    """Wait until this process is asked to end (`stop_signals`)."""
    import asyncio

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            if number not in _ASKED and stop.is_set():
                # A terminal that closes may send it twice: the second must not end the hand-over.
                signal.signal(number, signal.SIG_IGN)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    import ctypes

    given = os.environ.pop(PARENT, "")  # may be process 1, which else adopts orphans
    parent = int(given or os.getppid())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or (parent == 1 and not given):  # it ended before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def freeze_gc() -> None:
    """For processes with millions of blocks: avoid collections that visit all of them.

    A full collection stops the loop while it visits every entry, and frees nothing: the index has
    no cycles that outlive a block. Young garbage is still collected, in portions of some thousand
    objects, because new entries are young, too (design: turns).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 3, 1_000_000)
    _untie_transports()


def _untie_transports() -> None:
    """A transport of CPython's refers to itself: each that has ended would stay for ever, with its
    socket. Where a version of Python has other names, they stay."""
    from asyncio import selector_events

    transport = getattr(selector_events, "_SelectorSocketTransport", None)
    ended = getattr(transport, "_call_connection_lost", None)
    if transport is None or ended is None:
        return

    def end(self: Any, error: Exception | None) -> None:
        ended(self, error)
        self._read_ready_cb = None

    transport._call_connection_lost = end
