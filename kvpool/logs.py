"""Logs: key-value on a terminal, JSON otherwise; silent below warnings in a host application.

Loggers write through the standard library, so an engine that embeds kvpool decides what it sees.
A block key prints as its first 12 hex digits.
"""

from __future__ import annotations

import logging
import sys
import traceback


class Logger:
    """The logger of one module: `log.info("what happened", key=value)`.

    The fields become the `extra` of a standard log record. Nothing here needs structlog: it takes
    80 ms to import, and the first warning may come while a loop has calls to make
    (design: import-time).
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """`error`, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, event, fields | {"exception": traceback.format_exc().rstrip()})

    def _log(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra=fields, stacklevel=3)  # the caller's line


def get(name: str) -> Logger:
    """The logger of a module. Operators filter on its name."""
    return Logger(name)


def configure(level: str = "info") -> None:
    """Send the logs to stderr. For programs; a library leaves this to its host."""
    import structlog  # not at the top (design: import-time)

    terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso"),
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logger = logging.getLogger("kvpool")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
