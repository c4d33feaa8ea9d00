"""What the settings of all engines' connectors have in common, and how they are checked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

import kvpool
from kvpool import ClientConfig, Cluster, ConfigError, check_transports
from kvpool_engines.session_names import DEFAULT_TENANT

#: Names that engines must have in common. Without a text there would be nothing to have.
_NAMES: Final = ("cluster", "tenant")
_HOST: Final = re.compile(r"[\w.-]+")


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    #: Name of the tenant. Engines of different tenants share no blocks, and no sessions.
    tenant: str = DEFAULT_TENANT
    #: Name of the weights, to be changed with them. Empty: they are told by what the engine shows
    #: of them.
    revision: str = ""

    def client(self) -> ClientConfig:
        return ClientConfig(masters=self.masters, transports=self.transports)

    def member(self) -> Cluster:
        """The cluster with its secret. Raises ConfigError when the secret cannot be read."""
        if not self.secret_file:
            return Cluster(self.cluster)
        try:
            read = kvpool.read_cluster
        except ModuleNotFoundError:
            raise ConfigError("this program runs without secrets (setting secret_file)") from None
        return read(self.cluster, self.secret_file)


Kind = TypeVar("Kind", bound=PoolSettings)


def checked(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Settings of this kind. Raises ConfigError: one sentence that names the setting, what is
    expected, and the nearest name that is known."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name not in known:
            close = nearest(str(name), known)
            meant = f"did you mean {close!r}? " if close else ""
            raise ConfigError(f"unknown setting {name!r}; {meant}known: {', '.join(known)}")
        _check_value(name, value, known[name])
    settings = msgspec.convert(dict(given), kind)
    for name in (*_NAMES, "revision"):
        _check_name(name, getattr(settings, name))
    for master in settings.masters:
        _check_master(master)
    with naming("transports"):
        check_transports(settings.transports)
    return settings


@contextmanager
def naming(what: str) -> Iterator[None]:
    """A ConfigError says that it is about this."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant; empty if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.5)), "")


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
        values = kind.values if isinstance(kind, msgspec.inspect.LiteralType) else ()
        near = nearest(str(value), map(str, values))
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
