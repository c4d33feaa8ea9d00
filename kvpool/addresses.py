"""`host:port` and `scheme://host:port`: taken apart, put together, judged.

An IPv6 address stands in brackets: `[fd00::7]:7450`. `0.0.0.0` and `[::]` are every address of a
host: something to listen on, and never where others find it. Who listens on `[::]` has IPv4's
callers, too.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from kvpool.errors import ConfigError


def split(address: str) -> tuple[str, str, int] | None:
    """Scheme (empty if there is none), host without brackets, and port; None if it is no such."""
    scheme, separator, rest = address.rpartition("://")
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
        if host and port is not None and bool(scheme) == bool(separator) and _may_be_host(host):
            return scheme, host, port
    except ValueError:
        pass
    return None


def _may_be_host(host: str) -> bool:
    """Whether it is an address, or may be a name: `a..b` and `a b` are none."""
    if numeric(host) is not None:
        return True
    labels = host.removesuffix(".").split(".")
    return not any(map(str.isspace, host)) and all(0 < len(label) < 64 for label in labels)


def join(host: str, port: int) -> str:
    """`host:port`, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric(host: str) -> IPv4Address | IPv6Address | None:
    """The address that this text is; None for a name. IPv4 inside IPv6 is IPv4."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach it. Of names only `localhost` is known to be that."""
    address = numeric(host)
    return host == "localhost" if address is None else address.is_loopback


def is_everywhere(host: str) -> bool:
    """Whether it stands for every address of this host."""
    address = numeric(host)
    return host == "*" if address is None else address.is_unspecified


def network_of(host: str) -> str:
    """The part of a peer's address that one host cannot choose freely; empty if it is a name.

    Of an IPv6 address its network of 64 bits, because a host has all addresses in there.
    """
    address = numeric(host)
    if isinstance(address, IPv6Address):
        return str(ip_network((address, 64), strict=False))
    return "" if address is None else str(address)


def listening(host: str, port: int, backlog: int = 100) -> dict[str, Any]:
    """Arguments for the loop's `create_server`, which by itself has no callers of IPv4 on `[::]`.
    Raises OSError."""
    if not (isinstance(numeric(host), IPv6Address) and is_everywhere(host)):
        return {"host": host, "port": port, "backlog": backlog}
    return {"sock": listening_socket(host, port, backlog), "backlog": backlog}


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there, not blocking; of IPv4 if it is a name that has both. Raises
    OSError."""
    known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, where = min(known, key=lambda one: one[0] != socket.AF_INET)
    both = family == socket.AF_INET6 and is_everywhere(host) and socket.has_dualstack_ipv6()
    listener = socket.create_server(where, family=family, backlog=backlog, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener


def parse(address: str, scheme: str) -> tuple[str, int]:
    """Host and port of `scheme://host:port`. Raises ConfigError."""
    parts = split(address)
    if parts is None or parts[0] != scheme:
        raise ConfigError(
            f"address {address!r}: expected {scheme}://host:port, an IPv6 address in brackets"
        )
    return parts[1:]


def announced_parts(chosen: str) -> tuple[str, str, int]:
    """Scheme, host and port of one entry of `server.announce`; empty and 0 if they are left out.

    Raises ConfigError.
    """
    scheme, separator, rest = chosen.rpartition("://")
    if separator:
        parts = split(chosen) or split(f"{chosen}:0")
    else:
        parts = split(f"//{join(rest.strip('[]'), 0)}") if numeric(rest.strip("[]")) else None
        parts = parts or split(f"{rest}:0")
    if parts is None or is_everywhere(parts[1]) or bool(separator) != bool(scheme):
        raise ConfigError(
            f"setting 'server.announce': {chosen!r}: expected a host that others can reach, such "
            "as 10.0.0.7, or tcp://10.0.0.7:7460 for one transport"
        )
    return scheme, parts[1], parts[2]
