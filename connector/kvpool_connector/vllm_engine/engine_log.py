"""Lines in the engine's log. Each begins with `kvpool:`, so that an operator finds them."""

from __future__ import annotations

from kvpool_connector.vllm_engine.interface import init_logger

logger = init_logger("vllm.kvpool")


def info(line: str) -> None:
    logger.info("kvpool: %s", line)


def warning(line: str) -> None:
    logger.warning("kvpool: %s", line)


def error(line: str, cause: Exception | None = None) -> None:
    """With the traceback of the `cause`, if there is one."""
    logger.error("kvpool: %s", line, exc_info=cause)
