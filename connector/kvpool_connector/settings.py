"""The connector's settings: `kv_connector_extra_config`, with unit, default and reason."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvpool import ClientConfig, Cluster, ConfigError, check_transports, read_cluster
from kvpool_connector.form_choice import fields_of
from kvpool_connector.session_names import DEFAULT_TENANT

#: The connector's name in vLLM's configuration.
CONNECTOR: Final = "KVPoolConnector"
#: From a millisecond: whoever gives less has meant another unit.
Seconds = Annotated[float, Meta(ge=0.001, le=3600)]
#: Names that engines must have in common. Without a text there would be nothing to have.
_NAMES: Final = ("cluster", "tenant")
_HOST: Final = re.compile(r"[\w.-]+")
#: A lower rate than one in a thousand million is none.
_RATE_MIN: Final = 1e-9
_BOTH: Final = "an engine loads and saves with kv_role kv_both"
#: Settings that are gone, and what holds in their place.
_GONE: Final = {
    "consumer_saves": _BOTH,
    "hit_tokens_min": "a hit is loaded when that is faster than computing it",
    "loads_max": "32 prompts load at once",
    "lookup_timeout_s": "a lookup has half of the time that computing takes, 1 s at most",
    "model": "revision names the weights, and a model is called by its kind, layers and width",
    "prefetch": "a request has skip_prefetch in its kv_transfer_params",
    "probe_every_s": "while loads are too slow, the pool is measured every 5 s",
    "producer_loads": _BOTH,
    "promise_wait_s": "a load waits for promised blocks while they are computed, 10 s at most",
    "save_gather_s": "generated blocks wait 0.1 s for further ones",
    "save_retries": "a refused save is tried three times more",
    "save_share_max": "unfinished saves keep a quarter of the engine's blocks",
    "save_timeout_s": "a save has 10 s",
    "start_wait_s": "the start waits for the pool for 1 s; then the engine runs without it",
    "transfers_max": "a process has four reads and two writes under way",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    #: Host and port of the masters. One that answers is enough: each knows all blocks.
    masters: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:7450"]
    )
    #: Name of the cluster; masters and servers of other clusters refuse the engine.
    cluster: str = "default"
    #: File with the cluster's secret, or the key of a tenant. Empty: the cluster has no secret.
    secret_file: str = ""
    #: Transports to use, best first.
    transports: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["shm", "tcp"]
    )
    #: How blocks cross between the engine's GPU and the network. `staged`: through pinned memory.
    #: `direct`: the pool takes them where they lie, over a transport that can do that, such as
    #: ucx?tls=rc,cuda_copy,self, and nothing else (design: device-memory).
    device_path: Literal["staged", "direct"] = "staged"
    #: Name of the tenant. Engines of different tenants share no blocks, and no sessions.
    tenant: str = DEFAULT_TENANT
    #: Name of the weights. Empty: they are told by what memory has of them, and by their files
    #: where memory hides some.
    revision: str = ""
    #: Parts of equal numbers of KV heads that each block is stored in, so that engines of different
    #: tensor parallel sizes share. 0: one for each tensor parallel rank, and only engines of equal
    #: sizes share. Needs `revision`.
    kv_head_parts: Annotated[int, Meta(ge=0, le=256)] = 0
    #: `auto` loads a prefix if the estimate is that loading is faster than computing it; `always`
    #: and `never` are for experiments (design: load-or-recompute).
    load: Literal["auto", "always", "never"] = "auto"
    #: Time after which the engine computes a prompt instead of waiting for its load. The planner
    #: often ends a load earlier, when it takes much longer than estimated.
    load_timeout_s: Seconds = 10.0
    #: Also save blocks of generated tokens, because the next turn of a conversation contains them.
    save_decode: bool = True
    #: Number of servers to which each block is written.
    copies: Annotated[int, Meta(ge=1, le=16)] = 1
    #: How blocks are made smaller on their way to the pool; empty: not at all. `lossless`, where it
    #: saves time (docs/codecs.md).
    codec: str = ""
    #: With KV events switched on in the engine: how blocks of the pool are announced to routers.
    #: `shared` says which are on other hosts, as vllm-router wants it; `plain` says that those are
    #: on a disk, for Dynamo and llm-d; `off`: not at all, as for `kvpool events` (docs/events.md).
    kv_events: Literal["shared", "plain", "off"] = "shared"
    #: Share of the loads of a writer that are computed instead, to compare them; 0: none
    #: (design: provenance).
    verify_rate: Annotated[float, Meta(ge=0, le=1)] = 1 / 2000

    @property
    def loads_per_check(self) -> int:
        """One of so many loads is verified; 0: none."""
        return math.ceil(1 / max(self.verify_rate, _RATE_MIN)) if self.verify_rate else 0

    def client(self) -> ClientConfig:
        return ClientConfig(
            masters=self.masters, transports=self.transports, device_path=self.device_path
        )

    def member(self) -> Cluster:
        """The cluster with its secret. Raises ConfigError when the secret cannot be read."""
        return read_cluster(self.cluster, self.secret_file)


Kind = TypeVar("Kind", bound=msgspec.Struct)


def parse(given: Mapping[str, Any]) -> Settings:
    """The settings of an engine. Raises ConfigError: one sentence that names the setting, what is
    expected, and the nearest name that is known."""
    with naming("kv_connector_extra_config"):
        for name in given.keys() & _GONE.keys():
            raise ConfigError(f"setting {name!r} is gone, remove it: {_GONE[name]}")
        settings = checked(Settings, given)
        if settings.kv_head_parts and not settings.revision:
            raise ConfigError(
                "kv_head_parts needs revision, a name that is the same for "
                "the same weights only: what ranks have in memory depends on how many they are"
            )
        with naming("codec"):
            fields_of(settings.codec)
        if settings.codec and settings.device_path == "direct":
            raise ConfigError("codec needs blocks in the host's memory: device_path must be staged")
    return settings


def checked(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Settings of this kind, which are for engines. Raises ConfigError as `parse`."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}; {_known(str(name), known)}")
        _check_value(name, value, known[name])
    settings: Any = msgspec.convert(dict(given), kind)
    for name in (*_NAMES, "revision"):
        _check_name(name, getattr(settings, name))
    for master in settings.masters:
        _check_master(master)
    with naming("transports"):
        check_transports(settings.transports)
    chosen: Kind = settings
    return chosen


@contextmanager
def naming(what: str) -> Iterator[None]:
    """A ConfigError says that it is about this."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def given_settings(transfer: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of each connector of this kind: alone, or in a MultiConnector."""
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == CONNECTOR:
        yield extra
    elif transfer.kv_connector == "MultiConnector":
        for child in extra.get("connectors", ()):
            if isinstance(child, Mapping) and child.get("kv_connector") == CONNECTOR:
                yield child.get("kv_connector_extra_config", {})


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant; empty if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.5)), "")


def _known(name: str, known: Iterable[str]) -> str:
    """For the end of a sentence about a name that is not known."""
    known = list(known)
    close = nearest(name, known)
    meant = f"did you mean {close!r}? " if close else ""
    return f"{meant}known: {', '.join(known)}"


def _check_name(name: str, value: str) -> None:
    """A blank or a line's end is no difference that an operator sees, and would split a fleet."""
    if value.strip() != value or not value.isprintable() or (name in _NAMES and not value):
        empty = "a text" if name in _NAMES else "a text, or none"
        raise ConfigError(
            f"{name} is {value!r}, expected {empty} without blanks around it and line ends in it"
        )


def _numeric(host: str) -> IPv4Address | IPv6Address | None:
    """The address that this text is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _check_master(master: str) -> None:
    """Raises ConfigError if no master can have this address."""
    host, _, port = master.rpartition(":")
    inner = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{inner}]" and isinstance(_numeric(inner), IPv6Address)
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not is_port or not (bracketed or _HOST.fullmatch(host)):
        scheme, found, _ = master.rpartition("://")
        hint = f"; leave {scheme + found!r} out" if found else ""
        raise ConfigError(
            f"master {master!r}: expected host:port, such as 127.0.0.1:7450 or [fd00::7]:7450{hint}"
        )
    if (address := _numeric(inner)) and address.is_unspecified:
        raise ConfigError(
            f"master {master!r}: a master listens there; expected the name or the address of its "
            "host, such as 127.0.0.1:7450"
        )


def _check_value(name: str, value: object, wanted: Any) -> None:
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        kind = msgspec.inspect.type_info(wanted)
        near = ""
        if isinstance(kind, msgspec.inspect.LiteralType):
            near = nearest(str(value), map(str, kind.values))
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{name} is {value!r}, expected {_expected(kind)}{hint}") from None


def _expected(kind: msgspec.inspect.Type) -> str:
    """The values of a type, in words."""
    match kind:
        case msgspec.inspect.LiteralType(values):
            return "one of " + ", ".join(repr(value) for value in values)
        case msgspec.inspect.ListType():
            return "a list of at least one text"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            number = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
            limits = [
                f"{words} {limit}"
                for words, limit in (("above", kind.gt), ("from", kind.ge), ("to", kind.le))
                if limit is not None
            ]
            return " ".join([number, *limits])
        case _:
            return "a text"
