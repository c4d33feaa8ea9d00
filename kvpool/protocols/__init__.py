"""What a plug-in implements: transports, tiers, eviction policies; and the control network.

Small `Protocol`s, no base classes: an implementation inherits nothing. Times are seconds of the
running loop's clock; a `deadline` is a point on it. Every error is one of `kvpool.errors`, never an
OSError. `kvpool.testing` checks an implementation against these contracts (design: plug-ins).

    A transport never retries.   A channel never caches.   A tier never allocates.
"""

from kvpool.protocols.network import Caller, CountsRefused, Handler, Link, Network
from kvpool.protocols.policy import B, Decision, Evictable, LearnsFromArrivals, Policy
from kvpool.protocols.tier import (
    Addressable,
    BelongsToOwner,
    DeviceAddressable,
    DeviceMemory,
    Encrypts,
    Mappable,
    PersistentTier,
    ReportsDropped,
    SupportsStatusText,
    Tier,
)
from kvpool.protocols.transport import (
    BlockStore,
    Channel,
    Connection,
    DeviceArrival,
    DeviceReadBlock,
    IdleTimeout,
    Listener,
    NeedsMeasurement,
    Peer,
    ReachesDevices,
    ReadOptions,
    RequiresCertificates,
    ReserveRequest,
    SupportsDeviceRead,
    SupportsDrain,
    SupportsFetch,
    SupportsPrefetch,
    SupportsReachability,
    SupportsZeroCopyView,
    Transport,
    View,
    WriteOptions,
)

__all__ = [
    "Addressable",
    "B",
    "BelongsToOwner",
    "BlockStore",
    "Caller",
    "Channel",
    "Connection",
    "CountsRefused",
    "Decision",
    "DeviceAddressable",
    "DeviceArrival",
    "DeviceMemory",
    "DeviceReadBlock",
    "Encrypts",
    "Evictable",
    "Handler",
    "IdleTimeout",
    "LearnsFromArrivals",
    "Link",
    "Listener",
    "Mappable",
    "NeedsMeasurement",
    "Network",
    "Peer",
    "PersistentTier",
    "Policy",
    "ReachesDevices",
    "ReadOptions",
    "ReportsDropped",
    "RequiresCertificates",
    "ReserveRequest",
    "SupportsDeviceRead",
    "SupportsDrain",
    "SupportsFetch",
    "SupportsPrefetch",
    "SupportsReachability",
    "SupportsStatusText",
    "SupportsZeroCopyView",
    "Tier",
    "Transport",
    "View",
    "WriteOptions",
]
