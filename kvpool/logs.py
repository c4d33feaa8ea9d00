"""Logs: silent below warnings in a host application; `cli/log_lines.py` is how commands show them.

Loggers write through the standard library, so an engine that embeds kvpool decides what it sees.
Each record has its fields twice, because hosts format records in different ways: in the message
(`server is silent server=a`), and as attributes for JSON and structlog. The attribute `event` is
the message without the fields. A block key is its first 12 hex digits.
"""

from __future__ import annotations

import logging
import traceback


class Logger:
    """The logger of one module: `log.info("what happened", key=value)`.

    Nothing here needs structlog: it takes 80 ms to import, and the first warning may come while a
    loop has calls to make (design: layout).
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
            shown = {name: _shown(value) for name, value in fields.items()}
            message = " ".join([event, *map(_as_text, shown, shown.values())])
            # structlog's ExtraAdder takes `event` for the message.
            extra = shown | {"event": event}
            self._logger.log(level, message, extra=extra, stacklevel=3)  # the caller's line


def _shown(value: object) -> object:
    """Bytes are keys of blocks."""
    return value.hex()[:12] if isinstance(value, bytes) else value


def _as_text(name: str, value: object) -> str:
    """`name=value` on one line; quoted if it is not one word, so that lines can be parsed again."""
    if name == "exception":  # a traceback, the last field
        return f"\n{value}"
    text = str(value)
    one_word = text.isprintable() and text and not set(text) & set(" \"'=")
    return f"{name}={text if one_word else repr(text)}"


def get(name: str) -> Logger:
    """The logger of a module. Operators filter on its name."""
    return Logger(name)
