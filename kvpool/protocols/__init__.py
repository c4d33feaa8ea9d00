"""What a plug-in implements: transports, tiers, eviction policies; and the control network.

Small `Protocol`s, no base classes: an implementation inherits nothing. Times are seconds of the
running loop's clock; a `deadline` is a point on it. Whatever fails raises one of `kvpool.errors`,
never an OSError. `kvpool.testing` checks an implementation against every sentence.

    A transport never retries.   A channel never caches.   A tier never allocates.
"""

from kvpool.protocols.network import Handler, Link, Network
from kvpool.protocols.policy import B, Evictable, Policy, Verdict
from kvpool.protocols.tier import (
    Addressable,
    Described,
    DeviceAddressable,
    DeviceMemory,
    Durable,
    Mappable,
    Tier,
)
from kvpool.protocols.transport import (
    BlockStore,
    Channel,
    Connection,
    Discerning,
    Listener,
    Patience,
    Peer,
    Piecewise,
    Reading,
    Transport,
    Unproven,
    View,
    Viewable,
    Writing,
)

__all__ = [
    "Addressable",
    "B",
    "BlockStore",
    "Channel",
    "Connection",
    "Described",
    "DeviceAddressable",
    "DeviceMemory",
    "Discerning",
    "Durable",
    "Evictable",
    "Handler",
    "Link",
    "Listener",
    "Mappable",
    "Network",
    "Patience",
    "Peer",
    "Piecewise",
    "Policy",
    "Reading",
    "Tier",
    "Transport",
    "Unproven",
    "Verdict",
    "View",
    "Viewable",
    "Writing",
]
