"""A sandbox for one run: no real clock, entropy, sockets or threads inside (design: simulation)."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from tests.simulation.loop import Forbidden

_FENCED: Final[list[tuple[ModuleType | type, str]]] = [
    *((time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "sleep")),
    *((time, name) for name in ("perf_counter", "perf_counter_ns")),
    *((random, name) for name in ("random", "randint", "randrange", "choice", "choices")),
    *((random, name) for name in ("shuffle", "sample", "uniform", "getrandbits")),
    *((random, name) for name in ("expovariate", "SystemRandom")),
    *((os, name) for name in ("urandom", "getrandom", "fork")),
    *((uuid, name) for name in ("uuid1", "uuid4")),
    *((secrets, name) for name in ("token_bytes", "token_hex", "randbits")),
    *((socket, name) for name in ("socket", "create_connection", "socketpair")),
    (threading.Thread, "start"),
]


@contextmanager
def sandbox(report: Callable[[str], None]) -> Iterator[None]:
    """Calls of the real world raise Forbidden inside, and `report` gets a sentence for each."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in _FENCED]
    for owner, name, original in originals:
        setattr(owner, name, _stopped(f"{owner.__name__}.{name}", original, report))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _stopped(
    name: str, original: Callable[..., Any], report: Callable[[str], None]
) -> Callable[..., Any]:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == logging.__name__:  # log records carry a time that nothing reads
            return original(*args, **kwargs)
        report(f"{caller} called {name}")
        raise Forbidden(f"{caller} called {name} in a simulation")

    return stopped
