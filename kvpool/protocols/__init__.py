"""What a plug-in implements: transports, tiers, eviction policies; and the control network.

Small `Protocol`s, no base classes: an implementation inherits nothing. Times are seconds of the
running loop's clock; a `deadline` is a point on it. Every error is one of `kvpool.errors`, never an
OSError. `kvpool.testing` checks an implementation against these contracts.

    A transport never retries.   A channel never caches.   A tier never allocates.
"""

from kvpool.protocols.network import Caller as Caller
from kvpool.protocols.network import CountedListener as CountedListener
from kvpool.protocols.network import Handler as Handler
from kvpool.protocols.network import Link as Link
from kvpool.protocols.network import Network as Network
from kvpool.protocols.policy import B as B
from kvpool.protocols.policy import Decision as Decision
from kvpool.protocols.policy import Evictable as Evictable
from kvpool.protocols.policy import LearnsFromArrivals as LearnsFromArrivals
from kvpool.protocols.policy import Policy as Policy
from kvpool.protocols.tier import Addressable as Addressable
from kvpool.protocols.tier import DeviceAddressable as DeviceAddressable
from kvpool.protocols.tier import DeviceMemory as DeviceMemory
from kvpool.protocols.tier import DeviceReadBlock as DeviceReadBlock
from kvpool.protocols.tier import DeviceToken as DeviceToken
from kvpool.protocols.tier import DeviceWriteBlock as DeviceWriteBlock
from kvpool.protocols.tier import Mappable as Mappable
from kvpool.protocols.tier import SupportsStatusText as SupportsStatusText
from kvpool.protocols.tier import Tier as Tier
from kvpool.protocols.transport import BlockStore as BlockStore
from kvpool.protocols.transport import Channel as Channel
from kvpool.protocols.transport import Connection as Connection
from kvpool.protocols.transport import IdleTimeout as IdleTimeout
from kvpool.protocols.transport import Listener as Listener
from kvpool.protocols.transport import OverFabric as OverFabric
from kvpool.protocols.transport import Peer as Peer
from kvpool.protocols.transport import ReadOptions as ReadOptions
from kvpool.protocols.transport import RequiresCertificates as RequiresCertificates
from kvpool.protocols.transport import ReserveRequest as ReserveRequest
from kvpool.protocols.transport import SupportsReachability as SupportsReachability
from kvpool.protocols.transport import SupportsZeroCopyView as SupportsZeroCopyView
from kvpool.protocols.transport import Transport as Transport
from kvpool.protocols.transport import View as View
from kvpool.protocols.transport import WriteOptions as WriteOptions
