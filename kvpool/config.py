"""Every setting, with its unit, default and reason.

A value comes from, last one wins: the default here, a YAML file, the environment (`KVPOOL_`, then
the section and name: KVPOOL_SERVER_CAPACITY=4GiB), the command line. Sizes are written `64GiB`,
durations `250ms`. What is not understood is an error that names the value and what was expected;
nothing is guessed and nothing is ignored.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvpool.errors import ConfigError
from kvpool.types import Cluster
from kvpool.units import parse_bool, parse_duration, parse_size

Size = Annotated[int, Meta(ge=0, le=2**60, extra={"unit": "size"})]
Seconds = Annotated[float, Meta(gt=0, le=86_400, extra={"unit": "seconds"})]

DEFAULT_MASTER: Final = "127.0.0.1:7450"
_SECRET_SIZE_MIN: Final = 16
_SECRET_SIZE_MAX: Final = 4096


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class MasterConfig(_Section, frozen=True):
    #: Where servers and clients reach this master; port 0 takes a free one.
    bind: str = DEFAULT_MASTER
    #: A server is silent after this long without a heartbeat. Three heartbeats: one may be lost.
    timeout_s: Seconds = 3.0
    #: A silent server is remembered this long: when it comes back, it is simply back.
    forget_s: Seconds = 600.0
    #: Metrics, health and readiness over HTTP, at host:port, usually 127.0.0.1:7452. Empty:
    #: nowhere, because several masters may share a host.
    http: str = ""
    #: Listen beyond loopback though nobody is asked for a secret.
    insecure: bool = False


class ServerConfig(_Section, frozen=True):
    #: Unique in the cluster; empty: the host's name and some random digits.
    id: str = ""
    #: Every master; all are told everything.
    masters: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_MASTER])
    #: Memory for blocks. Taken once, never exceeded. Short for one tier, dram.
    capacity: Size = 1 << 30
    #: Several tiers instead, the fastest first: dram:8GiB, nvme:/path/to/file:100GiB. The last
    #: one's capacity is the server's; those above make it fast.
    tiers: list[str] = msgspec.field(default_factory=list)
    #: One address for each transport; port 0 takes a free one.
    listen: list[str] = msgspec.field(default_factory=lambda: ["tcp://127.0.0.1:0", "shm://"])
    #: How often masters hear from this server.
    heartbeat_s: Seconds = 1.0
    #: Extents start at multiples of this: a page, so that they can be mapped and sent directly.
    alignment: Size = 4096
    #: Which block goes next when memory is full: lru, arc, lease, density, or one that you wrote.
    policy: str = "lru"
    #: Connections at once; beyond it new ones are refused.
    connections_max: int = 1024
    #: A block goes up to a tier above the one that clients reach when it was read so often.
    promote_after: int = 1
    #: Touch all memory in the background at start: the first write to a page is slow.
    prefault: bool = True
    #: What UCX may use, as in UCX_TLS and UCX_NET_DEVICES, which hold where these are empty, and
    #: how many network cards one block may take at once (0: what UCX_MAX_RNDV_RAILS says, or 2).
    ucx_tls: str = ""
    ucx_devices: str = ""
    ucx_rails: Annotated[int, Meta(ge=0, le=16)] = 0
    #: Metrics, health and readiness over HTTP, at host:port; empty: nowhere.
    http: str = ""
    #: Listen beyond loopback though nobody is asked for a secret.
    insecure: bool = False


class ClientConfig(_Section, frozen=True):
    #: Any that answers is good.
    masters: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_MASTER])
    #: Transports that may be used, best first; those that are not installed are left out.
    transports: list[str] = msgspec.field(default_factory=lambda: ["inproc", "shm", "ucx", "tcp"])
    #: Of several transports that lead to another host take the fastest, as measured on calls that
    #: are made anyway; otherwise the order of `transports` holds.
    measure: bool = True
    #: For a call that names no deadline.
    timeout_s: Seconds = 5.0
    #: A server or master that has been silent for this long is given up; the call ends in a miss.
    attempt_s: Seconds = 1.0
    #: After this long without a word from it, another replica, or another master, is asked.
    #: Well above what a healthy server takes for its first word, or healthy ones are left, too.
    hedge_s: Seconds = 0.1
    #: Check the checksum of every block that is read.
    verify: bool = True
    #: Pinned memory through which blocks go from and to CUDA devices; none is taken before the
    #: first of them. A block must fit, several rounds of 16 MiB should.
    device_staging: Size = 128 << 20
    #: The same as of a server.
    ucx_tls: str = ""
    ucx_devices: str = ""
    ucx_rails: Annotated[int, Meta(ge=0, le=16)] = 0


class Config(_Section, frozen=True):
    #: Masters, servers and clients of different clusters refuse each other.
    cluster: str = "default"
    #: A file with the cluster's secret, at least 16 bytes, for all of them. Empty: there is none,
    #: and whoever reaches the pool may use it.
    secret_file: str = ""
    master: MasterConfig = MasterConfig()
    server: ServerConfig = ServerConfig()
    client: ClientConfig = ClientConfig()


def cluster_of(config: Config) -> Cluster:
    """The cluster that a process belongs to, its secret read from its file. Raises ConfigError."""
    return Cluster(config.cluster, read_secret(config.secret_file))


def read_secret(path: str) -> bytes:
    """What is in the file, without white space around it; nothing for no path.

    Raises ConfigError, which never says what was in it.
    """
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            secret = file.read(_SECRET_SIZE_MAX + 1).strip()
    except OSError as error:
        raise ConfigError(f"secret file {path!r}: {error.strerror}") from None
    if not _SECRET_SIZE_MIN <= len(secret) <= _SECRET_SIZE_MAX:
        raise ConfigError(
            f"secret file {path!r} holds {len(secret)} bytes, expected {_SECRET_SIZE_MIN} to "
            f"{_SECRET_SIZE_MAX}: openssl rand -hex 32 makes a good one"
        )
    return secret


def load(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """The configuration from a file, the environment and flags (`{"server.capacity": "1GiB"}`).

    Raises ConfigError for whatever is unknown or makes no sense.
    """
    raw: dict[str, Any] = _read(Path(path)) if path is not None else {}
    for name, value in (environment or {}).items():
        if name.startswith("KVPOOL_") and name != "KVPOOL_CONFIG":  # that one names the file
            _set(raw, _from_environment(name), value, name)
    for name, flag in (flags or {}).items():
        if flag is not None:
            _set(raw, name.split("."), flag, name)
    config: Config = _convert(raw, Config, "")
    _check(config)
    return config


class TierSpec(NamedTuple):
    """One tier as it is written: `name:place:size?setting=value&...`; not every one has a place."""

    name: str
    place: str
    capacity: int
    settings: dict[str, str]


def transport_settings(section: ServerConfig | ClientConfig) -> dict[str, dict[str, str]]:
    """What a transport is told, by scheme; only what was said."""
    ucx = {
        "TLS": section.ucx_tls,
        "NET_DEVICES": section.ucx_devices,
        "MAX_RNDV_RAILS": str(section.ucx_rails or ""),
    }
    return {"ucx": {name: value for name, value in ucx.items() if value}}


def parse_tier(text: str) -> TierSpec:
    """`dram:8GiB`, `nvme:/data/kvpool:100GiB?queue_depth=32`. Raises ConfigError."""
    place, _, query = text.partition("?")
    name, _, rest = place.partition(":")
    place, _, size = rest.rpartition(":")
    if not name or not size:
        raise ConfigError(
            f"tier {text!r}: expected name:size or name:place:size, "
            "such as dram:8GiB or nvme:/data/kvpool:100GiB"
        )
    try:
        capacity = parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"tier {text!r}: {error}") from None
    if capacity < 1:
        raise ConfigError(f"tier {text!r}: a tier of {capacity} bytes holds nothing")
    settings = {}
    for setting in query.split("&") if query else ():
        key, found, value = setting.partition("=")
        if not key or not found or key in settings:
            raise ConfigError(f"tier {text!r}: {setting!r}: expected setting=value, each once")
        settings[key] = value
    return TierSpec(name, place, capacity, settings)


def check_bind(address: str, insecure: bool) -> None:
    """Refuse to listen beyond loopback where nobody proves who he is, unless told to."""
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        host = parts.hostname or ""
        if not host or parts.port is None:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"address {address!r}: expected host:port, such as {DEFAULT_MASTER}"
        ) from None
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not insecure:
        raise ConfigError(
            f"address {address} is reachable from other machines, and nobody would be asked for a "
            "secret: give the cluster one (--secret-file; UCX does not ask for it), bind to "
            "127.0.0.1, or say --insecure if the network is trusted"
        )


def _read(path: Path) -> dict[str, Any]:
    import yaml  # not at the top (design: import-time)

    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except Exception as error:  # besides YAMLError: a date 2020-13-45 is a bare ValueError
        raise ConfigError(f"config file {path}: {str(error)[:300]}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path}: expected settings, got {type(loaded).__name__}")
    return loaded


def _from_environment(name: str) -> list[str]:
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


def _convert(raw: Mapping[str, Any], section: type[Any], prefix: str) -> Any:
    hints = get_type_hints(section, include_extras=True)
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in hints:
            known = [f"{prefix}{field}" for field in hints]
            close = difflib.get_close_matches(f"{prefix}{name}", known, 1, 0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown setting {prefix + str(name)!r}; {hint}")
        values[name] = _value(value, hints[name], f"{prefix}{name}")
    try:
        return msgspec.convert(values, section, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: {error}") from None


def _value(value: Any, hint: Any, name: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if not isinstance(value, Mapping):
            raise ConfigError(f"setting {name!r}: expected a section, got {value!r}")
        return _convert(value, hint, f"{name}.")
    meta = next((m for m in get_args(hint)[1:] if isinstance(m, Meta)), None)
    unit = (meta.extra or {}).get("unit") if meta is not None else None
    try:
        if unit == "size":
            return parse_size(value)
        if unit == "seconds":
            return parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"setting {name!r}: {error}") from None
    if isinstance(value, str) and str(hint).startswith("list["):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, str) and hint is bool:
        return parse_bool(value, name)
    return value


def _check(config: Config) -> None:
    for tier in config.server.tiers:
        parse_tier(tier)
    if config.server.capacity < config.server.alignment:
        raise ConfigError(
            f"setting 'server.capacity' is {config.server.capacity} bytes, "
            f"expected at least {config.server.alignment}: one aligned extent"
        )
    if config.server.alignment < 1 or config.server.alignment & (config.server.alignment - 1):
        raise ConfigError(
            f"setting 'server.alignment' is {config.server.alignment}, expected a power of two"
        )
    if config.server.connections_max < 1:
        raise ConfigError("setting 'server.connections_max': expected at least 1")
    if len(config.server.id) > 256 or not config.server.id.isprintable():
        raise ConfigError(
            f"setting 'server.id' is {config.server.id[:40]!r}, "
            "expected at most 256 printable characters"
        )
    for section in (config.server, config.client):
        if not section.masters:
            raise ConfigError("setting 'masters' is empty: expected at least one host:port")
