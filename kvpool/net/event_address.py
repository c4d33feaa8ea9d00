"""Addresses for zmq, whose sockets are of one family: IPv4 unless `zmq.IPV6` is set before.

With it a name has its IPv6 addresses only, and zmq takes the first and reports no failure. So a
name is asked for which family answers.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from ipaddress import IPv6Address
from typing import Any, Final

import zmq

from kvpool.addresses import numeric, split
from kvpool.backoff import Backoff

#: Between two questions to a name that does not answer: at first, and at most.
_ASK_S, _ASK_MAX_S = 0.05, 1.0
#: For a connection that is neither made nor refused.
_CONNECT_S: Final = 2.0


def host_of(address: str) -> str:
    """The host of an endpoint; empty for those that have none."""
    parts = split(address)
    return parts[1] if parts is not None else ""


def is_ipv6(address: str) -> bool:
    return isinstance(numeric(host_of(address)), IPv6Address)


def is_named(address: str) -> bool:
    return bool(host := host_of(address)) and numeric(host) is None


def bind(listener: zmq.Socket[Any], where: str) -> None:
    """Listen at this endpoint, of IPv4 if it is a name that has both. On `[::]` callers of both
    come. Raises zmq.ZMQError."""
    listener.setsockopt(zmq.IPV6, is_ipv6(where))
    try:
        listener.bind(where)
    except zmq.ZMQError as error:
        if error.errno != errno.ENODEV or not is_named(where):
            raise
        listener.setsockopt(zmq.IPV6, 1)
        listener.bind(where)


async def answers_on_ipv6(address: str) -> bool:
    """Wait until something listens at the name in `address`; whether on IPv6 alone."""
    parts = split(address)
    assert parts is not None
    loop, pause = asyncio.get_running_loop(), Backoff(_ASK_S, _ASK_MAX_S)
    while True:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    transport, _ = await loop.create_connection(
                        asyncio.Protocol, *parts[1:], family=family
                    )
            except (OSError, TimeoutError, ValueError):  # ValueError: a name that is none
                continue
            transport.abort()
            return family == socket.AF_INET6
        await asyncio.sleep(pause.next_delay())
