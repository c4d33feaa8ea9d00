"""Settings of connectors whose engine hands a dictionary on, such as LMCache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvpool import ConfigError
from kvpool_engines.settings import PoolSettings, checked, naming

_Seconds = Annotated[float, Meta(ge=0, le=3600)]


class AdapterSettings(PoolSettings, frozen=True):
    """What an operator can set. Times are in seconds."""

    #: The longest time that the engine's start waits for the pool.
    start_wait_s: _Seconds = 1.0
    lookup_timeout_s: _Seconds = 1.0
    load_timeout_s: _Seconds = 10.0
    store_timeout_s: _Seconds = 10.0
    #: Without calls after a failure.
    pause_s: _Seconds = 5.0

    @classmethod
    def parse(cls, params: Mapping[str, Any], where: str) -> AdapterSettings:
        """Raises ConfigError for an unknown name or a wrong value, with what is expected.

        `where` is what the engine calls the dictionary.
        """
        with naming(where):
            return checked(cls, params)


def check_release(engine: str, found: str, tested: str, log: logging.Logger) -> None:
    """Raises ConfigError for a release of an engine that may have another interface."""
    series = tested.rpartition(".")[0]
    if found.split(".")[:2] != series.split("."):
        raise ConfigError(f"{engine} {found} is not supported: expected {tested}, or {series}.x")
    if found != tested:
        log.warning("kvpool: %s %s: tested with %s", engine, found, tested)
