"""How commands write what is logged: key-value on a terminal, JSON otherwise."""

from __future__ import annotations

import logging
import sys


def configure(level: str = "info") -> None:
    """Send the logs to stderr."""
    import structlog  # not at the top (design: layout)

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
