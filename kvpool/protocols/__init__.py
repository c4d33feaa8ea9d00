"""What a plug-in implements: transports, tiers, eviction policies; and the control network.

Small `Protocol`s, no base classes: an implementation inherits nothing. Times are seconds of the
running loop's clock; a `deadline` is a point on it. Every error is one of `kvpool.errors`, never an
OSError. `kvpool.testing` checks an implementation against these contracts.

    A transport never retries.   A channel never caches.   A tier never allocates.
"""

from kvpool.protocols.device_transport import (
    BlocksToHost,
    DeviceArrival,
    DeviceReadBlock,
    DeviceWriteBlock,
    ReachesDevices,
    SupportsDeviceRead,
    SupportsDeviceWrite,
)
from kvpool.protocols.network import Caller, CountedListener, Handler, Link, Network
from kvpool.protocols.policy import B, Decision, Evictable, LearnsFromArrivals, Policy
from kvpool.protocols.tier import (
    Addressable,
    BelongsToOwner,
    DeviceAddressable,
    DeviceMemory,
    DeviceToken,
    Encrypts,
    HasParts,
    KeepsSome,
    Mappable,
    PersistentTier,
    ReportsDropped,
    SupportsStatusText,
    Tier,
    TierPart,
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
    "BelongsToOwner",
    "BlockStore",
    "BlocksToHost",
    "Caller",
    "Channel",
    "Connection",
    "CountedListener",
    "Decision",
    "DeviceAddressable",
    "DeviceArrival",
    "DeviceMemory",
    "DeviceReadBlock",
    "DeviceToken",
    "DeviceWriteBlock",
    "Encrypts",
    "Evictable",
    "Handler",
    "HasParts",
    "IdleTimeout",
    "KeepsSome",
    "LearnsFromArrivals",
    "Link",
    "Listener",
    "Mappable",
    "Network",
    "OverFabric",
    "Peer",
    "PersistentTier",
    "Policy",
    "ReachesDevices",
    "ReadOptions",
    "ReportsDropped",
    "RequiresCertificates",
    "ReserveRequest",
    "SupportsDeviceRead",
    "SupportsDeviceWrite",
    "SupportsReachability",
    "SupportsStatusText",
    "SupportsZeroCopyView",
    "Tier",
    "TierPart",
    "Transport",
    "View",
    "WriteOptions",
]
