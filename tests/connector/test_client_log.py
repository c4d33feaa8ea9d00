"""What the pool's client logs is in the engine's log, once, with a name, a time and a level."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator

import pytest

from kvpool import logs
from kvpool_engines import client_log


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    """The lines of an engine, which has a logger as vLLM's, and of a root logger with a handler."""
    client, root, engine = (logging.getLogger(name) for name in ("kvpool", None, "engine"))
    kept = client.handlers, client.propagate
    client.handlers, output = [], io.StringIO()
    handlers = [logging.StreamHandler(output) for _ in range(2)]
    handlers[0].setFormatter(logging.Formatter("%(levelname)s %(name)s %(filename)s %(message)s"))
    engine.addHandler(handlers[0])
    engine.propagate = False
    engine.setLevel(logging.INFO)
    root.addHandler(handlers[1])
    client_log.hand_on(engine)
    yield lambda: output.getvalue().splitlines()
    client.handlers, client.propagate = kept
    engine.removeHandler(handlers[0])
    root.removeHandler(handlers[1])


def test_each_line_of_the_client_is_one_of_the_engine(said: Callable[[], list[str]]) -> None:
    client_log.hand_on(logging.getLogger("engine"))  # by the other half of the connector
    logs.get("kvpool.client").warning("transport failed", server="a", why="100 % of it")
    logs.get("kvpool.client.masters").error("kvpool: the pool is lost")
    logging.getLogger("kvpool").warning("%d %% of it", 5)  # not by kvpool's own loggers
    logs.get("kvpool.transport").info("not for an engine's log")
    assert said() == [
        "WARNING engine test_client_log.py kvpool: transport failed server=a why='100 % of it'",
        "ERROR engine test_client_log.py kvpool: the pool is lost",
        "WARNING engine test_client_log.py kvpool: 5 % of it",
    ]


def test_the_engines_level_counts(said: Callable[[], list[str]]) -> None:
    logging.getLogger("engine").setLevel(logging.ERROR)
    logs.get("kvpool.client").warning("transport failed")
    assert said() == []


def test_tracebacks_come_along(said: Callable[[], list[str]]) -> None:
    try:
        raise RuntimeError("a mistake")
    except RuntimeError:
        logs.get("kvpool.client").exception("a copy has failed")
    assert said()[-1] == "RuntimeError: a mistake"


def test_handlers_of_an_operator_stay() -> None:
    client = logging.getLogger("kvpool")
    kept, mine = client.handlers, logging.NullHandler()
    client.handlers = [mine]
    try:
        client_log.hand_on(logging.getLogger("engine"))
        assert client.handlers == [mine]
    finally:
        client.handlers = kept
