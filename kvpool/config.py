"""Every setting, with its unit, default and reason.

Sizes are written `64GiB`, durations `250ms`. An unknown setting or a wrong value is an error that
names it and what is expected; no setting is ignored. Where commands find theirs: `cli/settings.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from kvpool.addresses import is_loopback, split
from kvpool.errors import ConfigError
from kvpool.guard import of_secrets
from kvpool.types import Cluster
from kvpool.units import parse_bool, parse_duration, parse_size

Size = Annotated[int, Meta(ge=0, le=2**60, extra={"unit": "size"})]
Seconds = Annotated[float, Meta(gt=0, le=86_400, extra={"unit": "seconds"})]
#: As one text, these are split only where a new `scheme://` begins: settings may have commas.
Addresses = Annotated[list[str], Meta(extra={"separator": r",(?=\s*[\w.+-]+://)"})]

#: Values of `server.write_mode`, and of `client.device_path`.
WRITE_THROUGH: Final = "write_through"
WRITE_BACK: Final = "write_back"
STAGED: Final = "staged"
DIRECT: Final = "direct"
AUTO: Final = "auto"

DEFAULT_MASTER: Final = "127.0.0.1:7450"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class MasterConfig(_Section, frozen=True):
    #: Host and port for servers and clients. With port 0 the system chooses a free port.
    bind: str = DEFAULT_MASTER
    #: Time without a heartbeat after which a server counts as lost. The default is three heartbeat
    #: intervals, so that one lost heartbeat does not matter.
    timeout_s: Seconds = 3.0
    #: Blocks in the map; each takes some 100 to 150 bytes of the master's memory. Servers of one
    #: address may use half of it. Blocks beyond the limit are not listed, so nobody finds them.
    blocks_max: Annotated[int, Meta(ge=1)] = 50_000_000
    #: Host and port for metrics, health and readiness over HTTP, usually 127.0.0.1:7452. Empty, the
    #: default: no HTTP server, because several masters may share a host.
    http: str = ""
    #: Listen beyond loopback although access needs no secret.
    insecure: bool = False


class ServerConfig(_Section, frozen=True):
    #: Name of this server, unique in the cluster. Empty: the host's name and random digits.
    id: str = ""
    #: File with the secret that proves to masters that this server has its id; made at the first
    #: start. Put it where it outlives the machine or container: then the id is reserved for this
    #: server while it is away. Empty: a file in a directory of this user, which lasts until the
    #: next reboot (design: server-identity).
    identity_file: str = ""
    #: Host and port of every master. The server announces its blocks to each of them, so that
    #: clients may ask any.
    masters: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_MASTER])
    #: Memory for blocks in bytes, allocated once at start. The same as the single tier `dram` with
    #: this size.
    capacity: Size = 1 << 30
    #: Tiers instead of `capacity`, the fastest first: dram:8GiB, nvme:/path/to/file:100GiB. The
    #: last tier holds every block, so its size is the server's capacity; the tiers above hold
    #: copies of blocks that are in use.
    tiers: list[str] = msgspec.field(default_factory=list)
    #: When a block is copied to the last tier, if that is not the memory. write_through: as soon as
    #: it is written, so kill -9 loses almost nothing. write_back: when memory would drop it, so
    #: blocks of conversations that end before that are never written (design: tiers).
    write_mode: str = WRITE_THROUGH
    #: With write_back, a server that is stopped (SIGTERM) takes so long at most to write what only
    #: memory has. Keep it below the time that your service manager gives a process to stop (10 s
    #: for docker, 30 s for Kubernetes, 90 s for systemd).
    flush_s: Seconds = 8.0
    #: One address for each transport. With port 0 the system chooses a free port. Settings of a
    #: transport follow a question mark: ucx://10.0.0.1:7461?tls=rc,self&rails=2.
    listen: Addresses = msgspec.field(default_factory=lambda: ["tcp://127.0.0.1:0", "shm://"])
    #: Where others reach this server, if not where it listens (a NAT, a published port): a host,
    #: 203.0.113.7, or for one transport tcp://203.0.113.7:17460. Empty: where it listens; for
    #: 0.0.0.0 and [::] the address from which this host reaches a master.
    announce: Addresses = msgspec.field(default_factory=list)
    #: Interval of heartbeats to the masters. Keep it at most a third of `master.timeout_s`.
    heartbeat_s: Seconds = 1.0
    #: Eviction policy: lru, arc, lease, density, programs, or an installed one. Empty: density.
    policy: str = ""
    #: Client connections at the same time, so that the memory for them is bounded. Clients share
    #: them: where none is left, idle ones end for new ones.
    connections_max: Annotated[int, Meta(ge=1)] = 1024
    #: While this server is full and another one has room, hand over the chains that belong there.
    #: If false, they stay until they are evicted, and a server that joins gets new chains only
    #: (design: movers).
    balance: bool = True
    #: Time that a server which gets SIGTERM takes to hand over its blocks to the others before it
    #: ends. 0: it ends at once. Give the service manager more (design: movers).
    drain_s: Annotated[float, Meta(ge=0, le=86_400, extra={"unit": "seconds"})] = 0.0
    #: If it is back so soon after SIGTERM, with its file, blocks in that stay. 0: it may not be.
    back_in_s: Annotated[float, Meta(ge=0, le=86_400, extra={"unit": "seconds"})] = 0.0
    #: Host and port for metrics, health and readiness over HTTP. Empty: no HTTP server.
    http: str = ""
    #: Listen beyond loopback although access needs no secret.
    insecure: bool = False


class ClientConfig(_Section, frozen=True):
    #: Host and port of the masters. One that answers is enough: each knows all blocks.
    masters: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_MASTER])
    #: Transports to use, best first. Those that are not installed are left out, and ucx without a
    #: fabric comes last (design: ucx). Settings follow a
    #: question mark, as in server.listen: ucx?tls=rc,self. In a comma-separated text (in an
    #: environment variable) a comma inside a setting is written %2C: ucx?tls=rc%2Cself,tcp.
    transports: list[str] = msgspec.field(default_factory=lambda: ["inproc", "shm", "ucx", "tcp"])
    #: Timeout of a call without a `timeout` argument.
    timeout_s: Seconds = 5.0
    #: Time without a byte from a server or master after which the client ends its call to it. A
    #: block that no other server has is then a miss.
    attempt_s: Seconds = 1.0
    #: Time without a byte after which the client asks another replica or another master. Choose it
    #: well above the time in which a healthy server sends its first byte (design: hedging).
    hedge_s: Seconds = 0.1
    #: Check the checksum of every block that is read. If false, damaged bytes are not noticed.
    verify: bool = True
    #: Bytes of pinned memory through which blocks move from and to CUDA devices; allocated by
    #: reserve_device_memory, or with the first such block. One block must fit. Room for several
    #: steps of 16 MiB lets copies and transfers overlap (design: device-memory).
    device_staging: Size = 128 << 20
    #: How blocks reach a CUDA device, and leave it. staged: through the pinned memory, hashed by
    #: the host. direct: between network and device, hashed there, over transports that can do that
    #: (ucx?tls=rc,cuda_copy); what a server has no such path for is a miss, or not stored there.
    #: auto: direct where a network card does it, else staged. Ask the machine first: make
    #: gpu-acceptance (design: device-memory).
    device_path: str = STAGED


class Config(_Section, frozen=True):
    #: Masters, servers and clients of different clusters refuse each other.
    cluster: str = "default"
    #: File with the cluster's shared secret, at least 16 bytes; for clients of a tenant its key,
    #: which `kvpool tenant-key` makes. Empty: no secret, and every process that can reach the pool
    #: may use it.
    secret_file: str = ""
    #: For masters and servers: YAML file with the tenants of this pool, their secrets and shares.
    #: Give all of them the same one. It is read again when it changes, and on SIGHUP. Empty: no
    #: tenants (design: tenants).
    tenants_file: str = ""
    #: Only processes of this user on this host: instead of `secret_file`, a secret that is made at
    #: the first start and that only this user can read (`local_secret`).
    local_only: bool = False
    master: MasterConfig = MasterConfig()
    server: ServerConfig = ServerConfig()
    client: ClientConfig = ClientConfig()


def checked_client(config: ClientConfig) -> ClientConfig:
    """The same, with values as a file could have them: programs may pass `masters="host:7450"`, or
    `timeout_s="5s"`. Raises ConfigError for a value that is not valid."""
    if not isinstance(config, ClientConfig):
        raise ConfigError(f"config is a {type(config).__name__}, expected a kvpool.ClientConfig")
    checked: ClientConfig = convert(msgspec.structs.asdict(config), ClientConfig, "client.")
    check_masters(checked.masters)
    return checked


def check_device_path(config: ClientConfig) -> None:
    """Raises ConfigError for a value that is none."""
    if config.device_path not in (STAGED, DIRECT, AUTO):
        raise ConfigError(
            f"setting 'client.device_path' is {config.device_path!r}, "
            f"expected {STAGED}, {DIRECT} or {AUTO}"
        )


def cluster_of(config: Config) -> Cluster:
    """The cluster that a process belongs to, its secret read from its file. Raises ConfigError."""
    if config.local_only:
        return Cluster(config.cluster, of_secrets("local_secret")())
    if not config.secret_file:
        return Cluster(config.cluster)
    read: Cluster = of_secrets("read_cluster")(config.cluster, config.secret_file)
    return read


class TierSpec(NamedTuple):
    """One tier as users write it: `name:place:size?setting=value&...`; the place is optional."""

    name: str
    place: str
    capacity: int
    settings: dict[str, str]


class TransportSpec(NamedTuple):
    """One transport as users write it: `scheme?setting=value&...` or `scheme://host:port?...`."""

    scheme: str
    #: With the scheme and without settings; empty if there is no `://`.
    address: str
    settings: dict[str, str]


def parse_transport(text: str) -> TransportSpec:
    """`tcp`, `ucx?tls=rc,self`, `ucx://10.0.0.1:7461?rails=2`. Raises ConfigError."""
    place, _, query = text.partition("?")
    scheme, separator, _ = place.partition("://")
    if not scheme:
        raise ConfigError(f"transport {text!r}: expected a name, such as tcp or ucx?tls=tcp")
    settings = _parse_settings(query, f"transport {text!r}")
    return TransportSpec(scheme, place if separator else "", settings)


def _parse_settings(query: str, what: str) -> dict[str, str]:
    """`setting=value&setting=value`, with %XX for special characters."""
    settings: dict[str, str] = {}
    for setting in query.split("&") if query else ():
        name, separator, value = setting.partition("=")
        if not name or not separator:
            raise ConfigError(f"{what}: {setting!r}: expected setting=value")
        if name in settings:
            raise ConfigError(f"{what}: setting {name!r} is given twice")
        settings[name] = unquote(value)
    return settings


def parse_tier(text: str) -> TierSpec:
    """`dram:8GiB`, `nvme:/data/kvpool:100GiB?queue_depth=32`. Raises ConfigError."""
    place, _, query = text.partition("?")
    name, _, rest = place.partition(":")
    place, _, size = rest.rpartition(":")
    if not name or not size or "/" in size:
        raise ConfigError(
            f"tier {text!r}: expected name:size or name:place:size, "
            "such as dram:8GiB or nvme:/data/kvpool:100GiB?queue_depth=32"
        )
    try:
        capacity = parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"tier {text!r}: {error}") from None
    if capacity < 1:
        raise ConfigError(f"tier {text!r}: expected a size of at least 1 byte")
    return TierSpec(name, place, capacity, _parse_settings(query, f"tier {text!r}"))


def check_bind(address: str, insecure: bool) -> None:
    """Refuse to listen beyond loopback without a secret, unless `insecure`. Raises ConfigError."""
    parts = split(address)
    if parts is None:
        raise ConfigError(
            f"address {address!r}: expected host:port, such as {DEFAULT_MASTER} or [::1]:7450"
        )
    if not is_loopback(parts[1]) and not insecure:
        raise ConfigError(
            f"address {address} is reachable from other machines, but access needs no secret: give "
            "the cluster a secret (--secret-file; ucx does not check it), listen on 127.0.0.1, or "
            "pass --insecure if the network is trusted"
        )


def convert(raw: Mapping[str, Any], section: type[Any], prefix: str) -> Any:
    """A section with these values, as users write them. Raises ConfigError for an unknown setting
    or a value that is not valid."""
    hints = get_type_hints(section, include_extras=True)
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in hints:
            if (instead := _GONE.get(f"{prefix}{name}")) is not None:
                raise ConfigError(f"setting {prefix + str(name)!r} is gone: {instead}")
            close = difflib.get_close_matches(str(name), list(hints), 1)  # `server.` is no likeness
            known = ", ".join(f"{prefix}{field}" for field in hints)
            hint = f"did you mean {prefix + close[0]!r}?" if close else f"known: {known}"
            raise ConfigError(f"unknown setting {prefix + str(name)!r}; {hint}")
        values[name] = _value(value, hints[name], f"{prefix}{name}")
    try:
        return msgspec.convert(values, section, strict=False)
    except msgspec.ValidationError as error:
        expected, _, where = str(error).partition(" - at `$.")
        name = re.split(r"\W", where)[0]
        given = f"{values.get(name)!r:.80}"
        raise ConfigError(f"setting {prefix + name!r} is {given}: {expected}") from None


_UCX: Final = {"ucx_tls": "tls", "ucx_devices": "net_devices", "ucx_rails": "rails"}
#: Settings that are gone, and what there is in their place.
_GONE: Final = {
    "client.copies_max": "remove it: blocks that many chains share get two copies",
    "client.measure": "remove it: paths are taken in the order of client.transports",
    "master.forget_s": "remove it: a lost server is forgotten after ten minutes",
    "master.servers_max": "remove it: there is room for 4,096 servers",
    "server.alignment": "remove it: blocks start at multiples of a page, 4096 bytes",
    "server.copies_max": "remove it: lost copies are made again, and kvpool spread makes more",
    "server.fetch_rate": "remove it: fetches take a quarter of the speed that they reach",
    "server.fetches_max": "remove it: two transfers from one other server run at a time",
    "server.pinned_max": "remove it: readers may pin a quarter of the memory",
    "server.prefault": "remove it, or write server.tiers: dram:8GiB?prefault=no",
    "server.prefetch_rate": "remove it: prefetches take a quarter of the speed of the disk",
    "server.promote_after": "remove it: a block that is read once is promoted",
    "server.reserved_max": "remove it: writers may reserve a quarter of the memory",
    **{f"client.{old}": f"write client.transports: ucx?{new}=..." for old, new in _UCX.items()},
    **{
        f"server.{old}": f"write server.listen: ucx://10.0.0.1:7461?{new}=..."
        for old, new in _UCX.items()
    },
}


def _value(value: Any, hint: Any, name: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if not isinstance(value, Mapping):
            raise ConfigError(f"setting {name!r}: expected a section, got {value!r}")
        return convert(value, hint, f"{name}.")
    if isinstance(value, str):  # [$(POD_IP)]:7450 in a manifest, whichever family the cluster has
        value = re.sub(r"\[(\d+(?:\.\d+){3})\]", r"\1", value)
    meta = next((m for m in get_args(hint)[1:] if isinstance(m, Meta)), None)
    unit = (meta.extra or {}).get("unit") if meta is not None else None
    try:
        if unit == "size":
            return parse_size(value)
        if unit == "seconds":
            return parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"setting {name!r}: {error}") from None
    if isinstance(value, str) and "list[" in str(hint):
        separator = (meta.extra or {}).get("separator", ",") if meta is not None else ","
        return [part.strip() for part in re.split(separator, value) if part.strip()]
    if isinstance(value, str) and hint is bool:
        return parse_bool(value, name)
    return value


def check_masters(masters: list[str]) -> None:
    """Raises ConfigError if there is none."""
    if not masters:
        raise ConfigError("setting 'masters' is empty: expected at least one host:port")
