"""Work for threads where a process may start no more of them (`ulimit -u`, `pids.max`).

An executor that can start no thread raises, and keeps what it was given all the same: another
thread would do it at any time later, in memory that has another use by then. Nothing that is begun
here runs after whoever began it has heard that it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, TypeAlias, TypeVar, cast

T = TypeVar("T")
#: What is to be called, with what: one entry, which is taken out by who calls it.
_Work: TypeAlias = "list[tuple[Callable[..., Any], tuple[object, ...]]]"


def in_thread(
    call: Callable[..., T], *arguments: object, executor: Executor | None = None
) -> asyncio.Future[T]:
    """`call` in a thread, of the loop's executor if there is no other. Where that can start none it
    runs here and now: the loop waits, and the result is the same. Once in either case."""
    loop, ended = asyncio.get_running_loop(), Future[T]()
    work: _Work = [(call, arguments)]
    try:
        inner = loop.run_in_executor(executor, _run, ended, work)
    except BrokenExecutor:
        raise  # its threads are not as this call needs them, nor is this one
    except RuntimeError:
        if work_left := _taken(work):
            _run(ended, work_left)
    else:
        inner.add_done_callback(lambda inner: _pass_on(inner, ended))
    return asyncio.wrap_future(ended)


def submit(executor: Executor, call: Callable[..., T], *arguments: object) -> Future[T]:
    """As `Executor.submit`, except that `call` never runs when this raises RuntimeError."""
    ended, work = Future[T](), [(call, arguments)]
    try:
        inner = executor.submit(_run, ended, work)
    except RuntimeError:
        if _taken(work):
            raise
    else:
        inner.add_done_callback(lambda inner: _pass_on(inner, ended))
    return ended


def _taken(work: _Work) -> _Work:
    """The work, which nobody else will do then; empty if a thread has it already."""
    try:
        return [work.pop()]
    except IndexError:
        return []


def _run(ended: Future[T], work: _Work) -> None:
    for call, arguments in _taken(work):
        if ended.set_running_or_notify_cancel():
            try:
                ended.set_result(call(*arguments))
            except BaseException as error:
                ended.set_exception(error)


def _pass_on(inner: Future[None] | asyncio.Future[None], ended: Future[T]) -> None:
    """What was never called ends, too: an executor that is shut down, or whose threads fail."""
    if inner.cancelled():
        ended.cancel()
    elif (error := inner.exception()) is not None and not ended.done():
        ended.set_exception(error)


async def wait_for_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results, when every call has ended. Raises the first error in their order, and not before
    either: the others may still use memory that the caller gives back then.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast(list[T], outcomes)
