"""Where the settings of a command come from.

The last one wins: the default (`kvpool.config`), a YAML file, the environment (`KVPOOL_`, then the
section and name: KVPOOL_SERVER_CAPACITY=4GiB), the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvpool.addresses import announced_parts, is_loopback, split
from kvpool.config import (
    WRITE_BACK,
    WRITE_THROUGH,
    Config,
    check_device_path,
    check_masters,
    convert,
    parse_tier,
    parse_transport,
)
from kvpool.errors import ConfigError
from kvpool.types import ALIGNMENT
from kvpool.units import human

#: Bytes of a configuration, which has some 40 settings.
_FILE_SIZE_MAX: Final = 1 << 16
#: With `tcp://` and a port an address of it fits into a message.
_HOST_MAX: Final = 244

#: Variables of the environment that are read elsewhere: the file's name, and whether there are
#: spans (`kvpool.tracing`).
_NO_SETTINGS: Final = frozenset({"KVPOOL_CONFIG", "KVPOOL_OTEL"})


def load(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """The configuration from a file, the environment and flags (`{"server.capacity": "1GiB"}`).

    Raises ConfigError for an unknown setting or a value that is not valid.
    """
    raw: dict[str, Any] = read_file(Path(path)) if path is not None else {}
    for name, value in (environment or {}).items():
        if name.startswith("KVPOOL_") and name not in _NO_SETTINGS:
            setting = setting_of(name)
            alone: dict[str, Any] = {}
            _set(alone, setting, value, name)
            try:
                convert(alone, Config, "")
            except ConfigError as error:
                raise ConfigError(f"environment variable {name}: {error}") from None
            _set(raw, setting, value, name)
    for name, flag in (flags or {}).items():
        if flag is not None:
            _set(raw, name.split("."), flag, name)
    config: Config = convert(raw, Config, "")
    _check(config)
    return config


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a file as they are written, unchecked. Raises ConfigError."""
    from kvpool.yaml_file import read_yaml  # for files alone

    loaded = read_yaml(path, f"config file {path}", size_max=_FILE_SIZE_MAX)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path}: expected settings, got {type(loaded).__name__}")
    return loaded


def setting_of(name: str) -> list[str]:
    """Section and name of the setting that a variable of the environment has, known or not."""
    rest = name.removeprefix("KVPOOL_").lower()
    section, _, setting = rest.partition("_")
    return [section, setting] if section in ("master", "server", "client") else [rest]


def _set(raw: dict[str, Any], path: list[str], value: object, source: str) -> None:
    for section in path[:-1]:
        inner = raw.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: {section!r} is not a section in the config file")
        raw = inner
    raw[path[-1]] = value


def _check_local_only(config: Config) -> None:
    if config.secret_file:
        raise ConfigError("settings 'local_only' and 'secret_file': a cluster has one secret")
    if config.tenants_file:
        raise ConfigError("settings 'local_only' and 'tenants_file': tenants are of other users")
    if config.master.insecure or config.server.insecure:
        raise ConfigError("settings 'local_only' and 'insecure' contradict each other")
    for text in (f"tcp://{config.master.bind}", *config.server.listen):
        parts = split(parse_transport(text).address)  # None: `check_bind` explains it
        if parts is not None and not is_loopback(parts[1]):
            raise ConfigError(
                f"setting 'local_only': address {text} is reachable from other machines, "
                "choose one on 127.0.0.1"
            )


def _check(config: Config) -> None:
    for tier in config.server.tiers:
        parse_tier(tier)
    for transport in (*config.server.listen, *config.client.transports):
        parse_transport(transport)
    if config.server.capacity < ALIGNMENT:
        raise ConfigError(
            f"setting 'server.capacity' is {human(config.server.capacity)}, "
            f"expected at least {human(ALIGNMENT)}: one aligned extent"
        )
    if config.server.write_mode not in (WRITE_THROUGH, WRITE_BACK):
        raise ConfigError(
            f"setting 'server.write_mode' is {config.server.write_mode!r}, "
            f"expected {WRITE_THROUGH} or {WRITE_BACK}"
        )
    check_device_path(config.client)
    if config.local_only:
        _check_local_only(config)
    if config.tenants_file and not config.secret_file:
        raise ConfigError(
            "setting 'tenants_file': tenants have secrets of their own, so the cluster needs one, "
            "too: set 'secret_file'"
        )
    if config.server.identity_file and not config.server.id:
        raise ConfigError(
            "setting 'server.identity_file' is the proof of an id: set 'server.id', too"
        )
    if not re.fullmatch(r"[^\s,]{0,256}", config.server.id) or not config.server.id.isprintable():
        raise ConfigError(
            f"setting 'server.id' is {config.server.id[:40]!r}, "
            "expected at most 256 printable characters, without blanks and commas"
        )
    listens = {parse_transport(text).scheme for text in config.server.listen}
    for chosen in config.server.announce:
        scheme, host, _ = announced_parts(chosen)
        if len(host) > _HOST_MAX:
            raise ConfigError(
                f"setting 'server.announce': {host[:40]!r}... has {len(host)} characters: expected "
                f"a host of {_HOST_MAX} at most"
            )
        if scheme and scheme not in listens:
            raise ConfigError(
                f"setting 'server.announce': {chosen!r}: 'server.listen' has no {scheme}"
            )
    for section in (config.server, config.client):
        check_masters(section.masters)
