"""What a client of a tenant may ask for: one table, for both planes.

Servers and masters call `check_access` with each request, once, before they answer any part of it
(design: tenants). A test compares the table with the messages, so none is left out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Final

from kvpool.errors import Forbidden
from kvpool.tenant_names import marker_of
from kvpool.wire import messages as wire


class Access(enum.Enum):
    """What a tenant may do with one message."""

    #: Send it, with namespaces and sessions of its own only.
    OWN = "own names"
    #: Send it: it names nobody's namespace. What belongs to others is left out of the answer, or
    #: cannot be in it: it is about this connection.
    ANSWERED = "answered in part"
    #: Operators and servers alone send it.
    OPERATOR = "operators and servers"
    #: It is no request: an answer, or a part of a handshake that comes before all requests.
    NO_REQUEST = "no request"


_OPERATOR, _OWN, _ANSWERED = Access.OPERATOR, Access.OWN, Access.ANSWERED
_NO_REQUEST = Access.NO_REQUEST

#: By name, since the messages of a ring are where the ring is.
TENANT_MAY: Final[Mapping[str, Access]] = {
    "Error": _NO_REQUEST,
    "Hello": _NO_REQUEST,
    "Challenge": _NO_REQUEST,
    "Proof": _NO_REQUEST,
    "Welcome": _NO_REQUEST,
    "Reserve": _OWN,
    "Reserved": _NO_REQUEST,
    "Seal": _ANSWERED,  # ids are of this connection; the store refuses others
    "StatusReply": _NO_REQUEST,
    "Read": _OWN,
    "Data": _NO_REQUEST,
    "Unpin": _ANSWERED,  # what this connection has pinned
    "Remove": _OWN,
    "Propose": _OPERATOR,  # only servers fetch
    "Proposed": _NO_REQUEST,
    "Fetch": _OWN,  # from another server of the pool, which knows the cluster's secret
    "Prefetch": _OWN,
    "SendToken": _ANSWERED,  # it is about this connection
    "HoldingsReply": _NO_REQUEST,
    "RemoveAll": _OWN,
    "RemovedAll": _NO_REQUEST,
    "Drain": _OPERATOR,  # also its report, which lists namespaces
    "Drained": _NO_REQUEST,
    "Register": _OPERATOR,
    "Registered": _NO_REQUEST,
    "Heartbeat": _OPERATOR,
    "HeartbeatReply": _NO_REQUEST,
    "Leave": _OPERATOR,
    "Announce": _OPERATOR,
    "Inventory": _OPERATOR,
    "Announced": _NO_REQUEST,
    "Find": _OWN,  # marks are looked up in its namespace
    "FindReply": _NO_REQUEST,
    "Place": _OWN,
    "PlaceReply": _NO_REQUEST,
    "Members": _ANSWERED,  # without the figures of servers
    "MembersReply": _NO_REQUEST,
    "Explain": _OWN,
    "Explained": _NO_REQUEST,
    "Hint": _OWN,
    "Namespaces": _ANSWERED,  # its own
    "NamespacesReply": _NO_REQUEST,
    "Demands": _ANSWERED,  # of its own namespaces
    "DemandsReply": _NO_REQUEST,
    "ExplainSession": _OWN,
    "SessionExplained": _NO_REQUEST,
    "Changes": _OPERATOR,  # every change in the pool, with its key
    "ChangesReply": _NO_REQUEST,
    "Snapshot": _OPERATOR,
}


def check_access(tenant: str, request: wire.Message) -> None:
    """Raises Forbidden for what a client of this tenant may not ask for; "" is no tenant.

    The same sentence whether others have such a namespace, session or block or not.
    """
    if not tenant:
        return
    name = type(request).__name__
    access = TENANT_MAY.get(name, Access.OPERATOR)
    if access is Access.OWN:
        marker = marker_of(tenant)
        if not all(one.startswith(marker) for one in names_of(request)):
            raise Forbidden(f"{name}: tenant {tenant!r} may only name what begins with {marker!r}")
    elif access is not Access.ANSWERED:
        raise Forbidden(f"{name} is for {Access.OPERATOR.value}, not for a tenant")


def names_of(request: wire.Message) -> Iterator[str]:
    """The namespaces and sessions that a request is about."""
    for field in ("namespace", "session"):
        name = getattr(request, field, "")
        # A session may be left out; a namespace may not, and an empty one is nobody's.
        if name or (field == "namespace" and hasattr(request, field)):
            yield name
