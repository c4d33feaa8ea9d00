"""Logs: key-value on a terminal, JSON otherwise; silent below warnings in a host application.

Loggers write through the standard library, so an engine that embeds kvpool decides what it sees.
A block key prints as its first 12 hex digits.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def get(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: `log.info("what happened", key=value)`."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return logger


def configure(level: str = "info") -> None:
    """Send the logs to stderr. For programs; a library leaves this to its host."""
    terminal = sys.stderr.isatty()
    renderer: Any = (
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
