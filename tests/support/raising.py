"""Mistakes in any function of the connector that this thread calls, and what a system refuses."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvpool_connector

FOLDER = str(Path(kvpool_connector.__file__).parent)


def no_thread(thread: threading.Thread) -> None:
    """In place of `Thread.start` where a process has as many as it may."""
    raise RuntimeError("can't start new thread")


@contextlib.contextmanager
def called() -> Iterator[dict[CodeType, int]]:
    """The functions that are called inside, and how often."""
    seen: dict[CodeType, int] = {}

    def see(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            seen[frame.f_code] = seen.get(frame.f_code, 0) + 1

    sys.setprofile(see)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def raising(code: CodeType, at_call: int) -> Iterator[None]:
    """Inside, this function raises when it is called for the `at_call`-th time."""
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is code
        if calls == at_call and frame.f_code is code:
            calls += 1
            raise KeyError(f"planted in {code.co_qualname}")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
