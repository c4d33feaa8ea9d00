"""Why a master does not answer, as far as the network shows it: from its name to its greeting."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Final

from kvpool.addresses import is_everywhere, join, split
from kvpool.errors import BadFrame, KvpoolError, Unavailable
from kvpool.net.control_network import MasterLink, master_address
from kvpool.types import Cluster

#: Longest wait for a name, and for a connection.
_STEP_S: Final = 1.0
_NO_WAY: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def unreachable(address: str) -> tuple[str, str]:
    """What is wrong and what to do about it; two empty texts where a master greets.

    Takes 7 s at most. Raises ConfigError for what is no address.
    """
    scheme, host, port = split(address) or ("", *master_address(address))
    if scheme not in ("", "tcp"):
        return f"{scheme}:// is no scheme of a master's address", f"give {join(host, port)}"
    if is_everywhere(host):
        return (
            f"{host} is where a master listens, and no address of one",
            "give the address of its host",
        )
    try:
        async with asyncio.timeout(_STEP_S):
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        why = getattr(error, "strerror", "") or "no answer"
        return (
            f"the name {host} does not resolve: {why}",
            "look at DNS and /etc/hosts, or its spelling",
        )
    if found := await _connecting(host, port):
        return found
    refusal = await refusal_of(address, Cluster())
    if isinstance(refusal, BadFrame | Unavailable):
        port_of = "give the port of `kvpool master --bind`: not that of --http, nor of a server"
        if "says nothing" in str(refusal):
            return f"{refusal}: no master, or one that is frozen", f"{port_of}; or look at its host"
        return "what listens there is no master", port_of
    return "", ""


async def refusal_of(address: str, cluster: Cluster) -> KvpoolError | None:
    """Why the master at this address would not answer this process; None if it would. Takes 5 s at
    most. Raises ConfigError."""
    link = MasterLink(address, cluster)
    try:
        (await link.open()).abort()
    except KvpoolError as error:
        return error
    finally:
        link.close()
    return None


async def _connecting(host: str, port: int) -> tuple[str, str] | None:
    try:
        async with asyncio.timeout(_STEP_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return "nothing listens there", f"start it: kvpool master --bind {join(host, port)}"
    except TimeoutError:
        return (
            "nothing comes back from there",
            f"is a firewall between, or a policy of the cloud? TCP port {port} has to be open",
        )
    except OSError as error:
        if error.errno in _NO_WAY:
            family = "IPv6" if ":" in host else "IPv4"
            return f"there is no way: {error.strerror}", f"has this host {family}, and a route?"
        return str(error.strerror or error), "look at the network of this host"
    writer.transport.abort()
    return None
