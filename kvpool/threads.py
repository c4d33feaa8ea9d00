"""Work for threads where a process may start no more of them (`ulimit -u`, `pids.max`).

An executor that can start no thread raises, and keeps what it was given all the same: another
thread would do it at any time later, in memory that has another use by then. Nothing that is begun
here runs after whoever began it has heard that it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(
    call: Callable[..., T], *arguments: object, executor: Executor | None = None
) -> asyncio.Future[T]:
    """`call` in a thread, of the loop's executor if there is no other. Where that can start none it
    runs here and now: the loop waits, and the result is the same. Once in either case."""
    loop, ended = asyncio.get_running_loop(), Future[T]()
    try:
        loop.run_in_executor(executor, _run, ended, call, *arguments)
    except RuntimeError:
        if ended.cancel():  # else a thread has it already
            _run(ended := Future[T](), call, *arguments)
    return asyncio.wrap_future(ended)


def submit(executor: Executor, call: Callable[..., T], *arguments: object) -> Future[T]:
    """As `Executor.submit`, except that `call` never runs when this raises RuntimeError."""
    ended = Future[T]()
    try:
        executor.submit(_run, ended, call, *arguments)
    except RuntimeError:
        if ended.cancel():
            raise
    return ended


def _run(ended: Future[T], call: Callable[..., T], *arguments: object) -> None:
    if ended.set_running_or_notify_cancel():
        try:
            ended.set_result(call(*arguments))
        except BaseException as error:
            ended.set_exception(error)
