"""Why a master does not answer: a look at the greeting that its socket sends.

CURVE drops a peer with another secret without an error message. But the first 64 bytes of ZMTP,
which both sides send at once, name the mechanism: NULL (no secret) or CURVE (a secret).
(design: authentication)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from kvpool.addresses import split
from kvpool.net.zmq_address import endpoint
from kvpool.types import Cluster

#: Longest wait for the greeting of a master that does not answer.
_GREETING_S: Final = 0.3
_GREETING_SIZE: Final = 64
#: Signature and version, no mechanism: a master that reads a mechanism other than its own closes
#: the connection before it sends its greeting.
_OUR_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00"


async def diagnose_unreachable(masters: Iterable[str], cluster: Cluster) -> str:
    """What is wrong with the secrets, as the end of an error message; empty if nothing is.

    Takes at most 0.3 s for each master. Never raises for a master that is not there.
    """
    hints = []
    for master in masters:
        greeted = await mechanism(master)
        if greeted == b"CURVE" and not cluster.secret:
            hints.append(f"{master} requires a secret: set secret_file")
        elif greeted == b"CURVE" and cluster.tenant:
            hints.append(f"{master} has a secret: check that the key of this tenant is still valid")
        elif greeted == b"CURVE":
            hints.append(f"{master} has a secret: check that it and the cluster's name are equal")
        elif greeted == b"NULL" and cluster.secret:
            hints.append(f"{master} has no secret, but this process has one")
    return "".join(f"; {hint}" for hint in hints)


async def mechanism(address: str) -> bytes | None:
    """NULL, CURVE, or None when there is no ZMTP greeting at that address."""
    parts = split(endpoint(address))
    if parts is None:
        return None  # an ipc
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_GREETING_S):
            reader, writer = await asyncio.open_connection(*parts[1:])
            writer.write(_OUR_GREETING)
            greeting = await reader.readexactly(_GREETING_SIZE)
    except (OSError, TimeoutError, EOFError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
    return greeting[12:32].rstrip(b"\0") if greeting[:1] == b"\xff" else None
