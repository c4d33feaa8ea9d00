"""Under which address others find what listens here.

What listens on one address is announced as that. `0.0.0.0` and `[::]` are every address of this
host, so one is chosen: that from which this host reaches a master, or else its way out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from typing import Final

from kvpool.addresses import announced_parts, is_everywhere, is_loopback, join, numeric, split
from kvpool.errors import ConfigError

#: For the names of all masters together.
_LOOKUP_S: Final = 2.0
#: Somewhere else in the world (RFC 5737 and 3849 keep them for documentation). Nothing is sent.
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")


async def announced(address: str, chosen: Sequence[str], masters: Iterable[str]) -> str:
    """The address of a listener at `address`, `scheme://host:port`, as others see it.

    `chosen` is the setting `server.announce`. Raises ConfigError when it is every address of this
    host, and no one is known.
    """
    parts = split(address)
    if parts is None:
        return address
    scheme, host, port = parts
    for one in chosen:
        of, name, other_port = announced_parts(one)
        if of in ("", scheme):
            return f"{scheme}://{join(name, other_port or port)}"
    if is_everywhere(host):
        found = await own_address(host, masters)
        if not found:
            raise ConfigError(
                f"{address} is every address of this host, and there is no route from which to "
                "tell one that others can use: name it with --announce (server.announce), or "
                "listen on it"
            )
        return f"{scheme}://{join(found, port)}"
    return address


async def reachable(address: str) -> str:
    """`host:port` or an endpoint, as it is shown to people who will type it elsewhere: the same, or
    an address of this host instead of all of them, if one is known."""
    parts = split(address)
    if parts is None or not is_everywhere(parts[1]) or not (own := await own_address(parts[1])):
        return address
    return f"{parts[0]}{'://' if parts[0] else ''}{join(own, parts[2])}"


async def own_address(host: str, masters: Iterable[str] = ()) -> str:
    """An address of this host for others, of a family that `host` (`0.0.0.0`, `[::]`) has; empty
    if there is none but loopback and those of one link."""
    only_ipv4 = ":" not in host
    for there in [*await _addresses_of(masters), *_ELSEWHERE]:
        found = _source(there, only_ipv4=only_ipv4)
        if found:
            return found
    return ""


async def _addresses_of(masters: Iterable[str]) -> list[str]:
    loop = asyncio.get_running_loop()
    found: list[str] = []
    hosts = [parts[1] for parts in map(split, masters) if parts is not None]
    try:
        async with asyncio.timeout(_LOOKUP_S):
            for host in hosts:
                if numeric(host) is not None:
                    found.append(host)
                    continue
                try:
                    known = await loop.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
                except OSError:
                    continue
                found += [str(one[4][0]) for one in known]
    except TimeoutError:
        pass
    return found


def _source(there: str, *, only_ipv4: bool) -> str:
    """The address that packets from here to `there` have as their source; nothing is sent."""
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    if is_everywhere(there) or (only_ipv4 and family == socket.AF_INET6):
        return ""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((there, 9))
            found = str(probe.getsockname()[0])
    except OSError:
        return ""
    address = numeric(found)
    usable = not (is_loopback(found) or is_everywhere(found))
    return found if usable and address is not None and not address.is_link_local else ""
