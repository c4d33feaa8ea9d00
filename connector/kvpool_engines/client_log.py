"""Lines of the pool's client in an engine's log. Without a handler Python prints them as they are:
no time, no level, and nothing that says whose they are."""

from __future__ import annotations

import logging


def hand_on(target: logging.Logger) -> None:
    """From now on records of kvpool's loggers are `target`'s, each once and with `kvpool:` before
    it; not where an operator has given those loggers handlers. Called again, this does nothing."""
    client = logging.getLogger("kvpool")
    if not client.handlers:
        client.addHandler(_Handed(target))
        client.propagate = False  # a root logger with handlers would print each a second time


class _Handed(logging.Handler):
    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        if self._target.isEnabledFor(record.levelno):
            text = record.getMessage().removeprefix("kvpool: ")
            changed = {"msg": f"kvpool: {text}", "args": (), "name": self._target.name}
            self._target.handle(logging.makeLogRecord(record.__dict__ | changed))
