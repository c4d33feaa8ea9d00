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

TENANT_MAY: Final[Mapping[type[wire.Message], Access]] = {
    wire.Error: _NO_REQUEST,
    wire.Hello: _NO_REQUEST,
    wire.Challenge: _NO_REQUEST,
    wire.Proof: _NO_REQUEST,
    wire.Welcome: _NO_REQUEST,
    wire.Reserve: _OWN,
    wire.Reserved: _NO_REQUEST,
    wire.Seal: _ANSWERED,  # ids are of this connection; the store refuses others
    wire.StatusReply: _NO_REQUEST,
    wire.Read: _OWN,
    wire.Data: _NO_REQUEST,
    wire.Unpin: _ANSWERED,  # what this connection has pinned
    wire.Remove: _OWN,
    wire.Propose: _OPERATOR,  # only servers fetch
    wire.Proposed: _NO_REQUEST,
    wire.Fetch: _OWN,  # from another server of the pool, which knows the cluster's secret
    wire.Prefetch: _OWN,
    wire.SendToken: _ANSWERED,  # it is about this connection
    wire.HoldingsReply: _NO_REQUEST,
    wire.RemoveAll: _OWN,
    wire.RemovedAll: _NO_REQUEST,
    wire.Drain: _OPERATOR,  # also its report, which lists namespaces
    wire.Drained: _NO_REQUEST,
    wire.Register: _OPERATOR,
    wire.Registered: _NO_REQUEST,
    wire.Heartbeat: _OPERATOR,
    wire.HeartbeatReply: _NO_REQUEST,
    wire.Leave: _OPERATOR,
    wire.Announce: _OPERATOR,
    wire.Inventory: _OPERATOR,
    wire.Announced: _NO_REQUEST,
    wire.Find: _OWN,  # marks are looked up in its namespace
    wire.FindReply: _NO_REQUEST,
    wire.Place: _OWN,
    wire.PlaceReply: _NO_REQUEST,
    wire.Members: _ANSWERED,  # without the figures of servers
    wire.MembersReply: _NO_REQUEST,
    wire.Explain: _OWN,
    wire.Explained: _NO_REQUEST,
    wire.Hint: _OWN,
    wire.Namespaces: _ANSWERED,  # its own
    wire.NamespacesReply: _NO_REQUEST,
    wire.Demands: _ANSWERED,  # of its own namespaces
    wire.DemandsReply: _NO_REQUEST,
    wire.ExplainSession: _OWN,
    wire.SessionExplained: _NO_REQUEST,
    wire.Changes: _OPERATOR,  # every change in the pool, with its key
    wire.ChangesReply: _NO_REQUEST,
    wire.Snapshot: _OPERATOR,
}


def check_access(tenant: str, request: wire.Message) -> None:
    """Raises Forbidden for what a client of this tenant may not ask for; "" is no tenant.

    The same sentence whether others have such a namespace, session or block or not.
    """
    if not tenant:
        return
    kind = type(request)
    access = TENANT_MAY.get(kind, Access.OPERATOR)
    if access is Access.OWN:
        marker = marker_of(tenant)
        if not all(name.startswith(marker) for name in names_of(request)):
            raise Forbidden(
                f"{kind.__name__}: tenant {tenant!r} may only name what begins with {marker!r}"
            )
    elif access is not Access.ANSWERED:
        raise Forbidden(f"{kind.__name__} is for {Access.OPERATOR.value}, not for a tenant")


def names_of(request: wire.Message) -> Iterator[str]:
    """The namespaces and sessions that a request is about."""
    for field in ("namespace", "session"):
        name = getattr(request, field, "")
        # A session may be left out; a namespace may not, and an empty one is nobody's.
        if name or (field == "namespace" and hasattr(request, field)):
            yield name
