"""What a plug-in implements: transports, tiers, eviction policies; and the control network.

Small `Protocol`s, no base classes: an implementation inherits nothing. Times are seconds of the
running loop's clock; a `deadline` is a point on it. Every error is one of `kvpool.errors`, never an
OSError. `kvpool.testing` checks an implementation against these contracts.

    A transport never retries.   A channel never caches.   A tier never allocates.
"""

from kvpool.protocols.network import Caller, CountedListener, Handler, Link, Network
from kvpool.protocols.policy import B, Decision, Evictable, LearnsFromArrivals, Policy
from kvpool.protocols.tier import (
    Addressable,
    DeviceAddressable,
    DeviceMemory,
    DeviceReadBlock,
    DeviceToken,
    DeviceWriteBlock,
    Mappable,
    SupportsStatusText,
    Tier,
)
from kvpool.protocols.transport import (
    BlockStore,
    Channel,
    Connection,
    IdleTimeout,
    Listener,
    OverFabric,
    Peer,
    ReadOptions,
    RequiresCertificates,
    ReserveRequest,
    SupportsReachability,
    SupportsZeroCopyView,
    Transport,
    View,
    WriteOptions,
)

__all__ = [
    "Addressable",
    "B",
    "BlockStore",
    "Caller",
    "Channel",
    "Connection",
    "CountedListener",
    "Decision",
    "DeviceAddressable",
    "DeviceMemory",
    "DeviceReadBlock",
    "DeviceToken",
    "DeviceWriteBlock",
    "Evictable",
    "Handler",
    "IdleTimeout",
    "LearnsFromArrivals",
    "Link",
    "Listener",
    "Mappable",
    "Network",
    "OverFabric",
    "Peer",
    "Policy",
    "ReadOptions",
    "RequiresCertificates",
    "ReserveRequest",
    "SupportsReachability",
    "SupportsStatusText",
    "SupportsZeroCopyView",
    "Tier",
    "Transport",
    "View",
    "WriteOptions",
]
