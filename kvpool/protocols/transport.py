"""What a transport must do: the server's half and the client's half (design: ownership)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kvpool.errors import KvpoolError
from kvpool.guard import Guard
from kvpool.protocols.tier import DeviceAddressable, Tier
from kvpool.types import (
    Cluster,
    Namespace,
    Pin,
    ReadBlock,
    ReadResult,
    ReadStatus,
    Reservation,
    SessionHint,
    WriteBlock,
    WriteStatus,
)

# --- the server's side of a transport ----------------------------------------------------


class ClientLink(Protocol):
    """The server's end of one client's connection, as far as the server itself may use it."""

    def progress(self) -> object:
        """A value that is equal to that of the last call if since then no byte has moved, and only
        the client could move one."""

    def hang_up(self, why: KvpoolError) -> None:
        """End the connection, and tell the client why if that is possible. `Connection.close`
        follows in the usual order, when nothing uses the memory any more."""

    def idle_since(self) -> float | None:
        """Since when (loop time) the client has asked for nothing and holds nothing; None while it
        does."""

    def retire(self) -> None:
        """End an idle connection, without a word: its client connects again for its next call."""


class Peer(NamedTuple):
    """The client of one connection, as the server's logs show it.

    Without a `link` the server waits for this client as long as the client likes. `address` is that
    of its host as the network shows it, without a port, or an IPv6 network of 64 bits; empty if
    there is none.
    """

    name: str
    transport: str = ""
    link: ClientLink | None = None
    address: str = ""
    #: What a client of a tenant has proved that it knows; None for every other client.
    proved: Cluster | None = None

    @property
    def tenant(self) -> str:
        """The tenant whose client it is; empty: one with the cluster's secret, or no secret."""
        return self.proved.tenant if self.proved is not None else ""


class ReserveRequest(NamedTuple):
    """The blocks of one write, for which a connection reserves space. The three lists run parallel.

    `parents` are the digests before them in their chains (ROOT for the first), `sizes` are bytes. A
    `session_hint` names the session whose chain the blocks are part of. `last_used` is set for
    blocks that a server fetches: the time of the last use of each, in microseconds of the loop's
    clock. They keep it, and only blocks that were used before are evicted for them (design: moves).
    `copies` says with how many copies each is written, 1 without it; 0 is an extra copy, which is
    worth less than any other (design: movers).
    """

    namespace: Namespace
    part: int
    digests: Sequence[bytes]
    parents: Sequence[bytes]
    sizes: Sequence[int]
    session_hint: SessionHint | None = None
    last_used: Sequence[int] | None = None
    copies: Sequence[int] | None = None

    def subset(self, positions: Sequence[int]) -> ReserveRequest:
        """The request for the blocks at `positions` alone."""
        return self._replace(
            digests=[self.digests[i] for i in positions],
            parents=[self.parents[i] for i in positions],
            sizes=[self.sizes[i] for i in positions],
            last_used=self.last_used and [self.last_used[i] for i in positions],
            copies=self.copies and [self.copies[i] for i in positions],
        )


class Connection(Protocol):
    """The server's record of one client connection. Its pins and reservations end with it
    (design: pins)."""

    @property
    def alone(self) -> bool:
        """All masters say that no other server has any of the blocks that were sealed last."""

    async def reserve(self, request: ReserveRequest, *, deadline: float) -> list[Reservation]:
        """Reserve an extent for each block; one answer each, in their order.

        Waits for space until `deadline`, then answers NO_SPACE. Answers BYPASSED at once where the
        policy prefers the stored blocks, and NOT_YET for blocks that the client must ask for again
        when it has sealed the others (design: budgets). Only RESERVED comes with an extent to write
        to.
        """

    def reserve_now(self, request: ReserveRequest) -> list[Reservation]:
        """As `reserve`, at once: NOT_YET where that would wait, or has more to do than fits into
        one turn of the loop. For a write whose bytes are on their way already."""

    def lend(self) -> bool:
        """Whether the client may write the reserved blocks itself, into memory that it has mapped.

        Ask after each `reserve`, before the client gets an address. False when writers that were
        given up have too much memory in quarantine: then receive the bytes into `views`, and close
        without `writer_may_be_alive` (design: budgets).
        """

    async def seal(
        self, ids: Sequence[int], checksums: Sequence[int], *, visible: bool, deadline: float
    ) -> list[WriteStatus]:
        """Make reserved blocks readable after their bytes were written.

        With `visible` the call returns when every living master can find the blocks, or at
        `deadline`. Every other reservation of this connection is cancelled. Raises BadMessage for
        an id that this connection has not reserved.
        """

    async def pin(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        buffer_sizes: Sequence[int],
        *,
        view: bool = False,
        in_place_above: int | None = None,
    ) -> list[Pin]:
        """Pin the blocks that are stored; the extent of a hit is not reused before `unpin`.

        NOT_YET where a block is being promoted from a slow tier, or this connection has pinned as
        much as it may: ask for that block again. If there is no hit at all, the call waits a moment
        for some of those blocks (design: promotion, budgets). With `view` the client uses the
        memory for as long as it likes: these pins have a budget of their own, beyond which a block
        is REFUSED.

        A transport that can send from memory of a device, to a client that can receive it, gives
        `in_place_above`: if the hits have more bytes than that together, some may lie in the
        memory of a `device_tier` (`Pin.tier`). Without it `views` has all of them.
        """

    def device_tier(self, tier: int) -> DeviceAddressable:
        """The tier that `Pin.tier` names."""

    def unpin(self, pins: Sequence[Pin]) -> None:
        """Release the hits among `pins`."""

    async def answer(self, request: Any) -> Any:
        """The answer to a message that moves no block between client and server: about blocks that
        are removed, are corrupt, or move elsewhere. Raises Forbidden where nobody answers it.

        After a removal it waits a moment until the masters know.
        """

    def views(self, held: Sequence[Reservation | Pin]) -> list[memoryview]:
        """The memory of those that have an extent, in order; none has been given back."""

    def close(self, *, writer_may_be_alive: bool = False) -> bool:
        """Drop all pins and reservations. Idempotent.

        With `writer_may_be_alive` the reserved extents are quarantined until `writer_exited`. True
        when there are such extents, so that the caller must call `writer_exited` later
        (design: quarantine).
        """

    def writer_exited(self) -> None:
        """The client writes no more, because it stopped or its process ended: end the
        quarantine."""


class BlockStore(Protocol):
    """What a block server offers to the transports that listen for it."""

    @property
    def cluster(self) -> Cluster:
        """The server's cluster. A transport refuses clients of other clusters and, if the cluster
        has a secret, clients that do not prove that they know it (design: authentication)."""

    @property
    def guard(self) -> Guard:
        """It knows the secrets of tenants. A transport admits a client that proves one, if it
        shows that client nothing but answers, passes on what it has proved (`Peer.proved`) and
        checks its requests; or it refuses such clients (design: tenants)."""

    def forbidden(self, peer: Peer, message: str, why: str) -> None:
        """Record that a client of a tenant asked for what belongs to others."""

    @property
    def server(self) -> str:
        """This server's id."""

    @property
    def tier(self) -> Tier:
        """The memory that contains the extents."""

    def connect(self, peer: Peer) -> Connection:
        """Record one more client connection. Raises Overloaded at the limit of connections."""

    def count(self, event: str) -> None:
        """Add one to the server's counter `event`, for `kvpool status --json` and `/metrics`."""


class Listener(Protocol):
    """A transport that accepts clients for one server."""

    @property
    def address(self) -> str:
        """`scheme://...`, the address to which a client connects; where it listens on every address
        of the host, that is what it says, and its server knows what to tell clients."""

    async def close(self) -> None:
        """Stop accepting and end every connection. Idempotent.

        Calls in progress end with Unavailable. When it returns, every `Connection` is closed, no
        task uses the tier's memory, and the address is free.
        """


# --- the client's side of a transport ----------------------------------------------------


class WriteOptions(NamedTuple):
    """What is common to the blocks of one write, of which each is written to `copies` servers.

    `on_alone` hears of each answer by which blocks are stored whether they are `alone`.
    """

    namespace: Namespace
    part: int
    visible: bool
    session_hint: SessionHint | None = None
    copies: int = 1
    on_alone: Callable[[bool], None] | None = None


class IdleTimeout(Protocol):
    """Ends a read after a time without a byte from the server; a slow answer does not end it
    (design: hedging)."""

    def touch(self) -> None:
        """A part of the answer arrived: start the time again."""

    def rest(self) -> None:
        """The read waits for other calls of this client: stop the time until the next `touch`."""

    def disarm(self) -> None:
        """The answer is complete: the rest of the read is local work and may take longer."""


class ReadOptions(NamedTuple):
    """What is common to the blocks of one read. `verify` checks every checksum.

    A channel calls `idle_timeout.touch` for each part of an answer that arrives; without an
    `idle_timeout` only the deadline ends a read.
    """

    namespace: Namespace
    part: int
    verify: bool = True
    idle_timeout: IdleTimeout | None = None


class Channel(Protocol):
    """A client's connection to one server. Any number of calls at once; none waits for a timer.

    A cancelled or failed call leaves no pin and no reservation, and after it has ended no byte is
    written into or read from the caller's buffers. The server releases them as soon as it notices
    the end of the call, also while it still works on it.

    Every call ends by its deadline (DeadlineExceeded), and with Unavailable when either side
    closes. An error that the server sends (PeerError, Refused) is raised unchanged.
    """

    async def write(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], *, deadline: float
    ) -> list[WriteStatus]:
        """Store blocks, at most BATCH_BLOCKS_MAX; one status each, in their order.

        A block is the concatenation of its pieces, with one checksum over all of them. A transport
        never joins the pieces on the loop's thread: that would stall every other call.
        """

    async def read(
        self, options: ReadOptions, blocks: Sequence[ReadBlock], *, deadline: float
    ) -> list[ReadResult]:
        """Fill the memory of the blocks that the server has; one result each, in their order.

        A block fills its pieces one after the other; the rest of them is untouched. CORRUPT where a
        checksum is wrong. The memory of other misses is untouched. NOT_YET is no miss: the server
        is promoting the block from a slow tier; ask for it again.
        """

    async def request(self, message: Any, answer: type[Any], *, deadline: float) -> Any:
        """The server's answer to any other message of `kvpool.wire.messages`, of this type.

        A transport carries both and looks into neither. It asks once.
        """

    async def close(self) -> None:
        """`abort`, then free its memory and threads. Idempotent; waits only for its own copies."""

    def abort(self) -> None:
        """Close the connection at once: synchronous, idempotent. A half-sent frame leaves no other
        choice. Views alone outlive it: without their pins they would show other blocks' bytes.

        Running and later calls end with Unavailable. Every copy into or out of the pool's memory
        stops before the server can notice the end, because the server then reuses that memory at
        once (design: quarantine).
        """


class View(NamedTuple):
    """A block in the pool's own memory, read-only (design: pins).

    Valid inside the `with`, until the server closes: that ends the pins, and the memory may then be
    used for another block.
    """

    status: ReadStatus
    data: memoryview | None = None


@runtime_checkable
class SupportsZeroCopyView(Protocol):
    """A channel that can return views of pinned memory, without a copy (shm, inproc)."""

    def read_view(
        self, options: ReadOptions, digests: Sequence[bytes], *, deadline: float
    ) -> AbstractAsyncContextManager[list[View]]:
        """Pin blocks and return views of them; they are unpinned on exit.

        `deadline` bounds the pinning; the views may be used for longer.
        """


class Transport(Protocol):
    """A way to move blocks between processes, one for each scheme.

    Transports are interchangeable: the pool never tests which one it has.
    """

    @property
    def scheme(self) -> str:
        """The name of its entry point in `kvpool.transports`, which begins its addresses: `tcp`."""

    @property
    def same_host(self) -> bool:
        """True when it can reach only servers on the caller's host."""

    @property
    def authenticated(self) -> bool:
        """True when a client must prove that it knows the cluster's secret before a server answers
        any request."""

    async def listen(self, address: str, store: BlockStore) -> Listener:
        """Serve `store` at `address`; if that is empty, at a free address.

        Raises ConfigError when the address is in use or is no address of this scheme.
        """

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        """Connect to the server at `address`; `client` names the caller in the server's logs.

        Raises Unavailable by `deadline`; ConfigError when `address` is no address of this scheme;
        PeerError when the server belongs to another cluster, and Overloaded at its limit of
        connections (the last two may be raised by the first call on the channel instead).
        """


@runtime_checkable
class SupportsReachability(Protocol):
    """A transport that can tell from an address alone that connecting is useless."""

    def can_reach(self, address: str) -> bool:
        """False when no connection to `address` can ever succeed from this process."""


@runtime_checkable
class RequiresCertificates(Protocol):
    """A transport that may ask its clients for certificates, in place of a secret."""

    @property
    def requires_certificates(self) -> bool:
        """Only clients with a certificate of the right authority are served."""


@runtime_checkable
class OverFabric(Protocol):
    """A transport that is faster than others over an RDMA fabric, and not without one
    (design: ucx)."""

    @property
    def has_fabric(self) -> bool:
        """Whether this machine and the transport's settings have one."""
