"""What a transport must do, the server's half and the client's half."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from kvpool.protocols.tier import Tier
from kvpool.types import (
    Cluster,
    Extent,
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


class Peer(NamedTuple):
    """Who is at the other end, for the server's books and logs."""

    name: str
    transport: str = ""


class ReserveRequest(NamedTuple):
    """What a connection asks room for: the blocks of one write. The three lists run parallel.

    `parents` are the digests before them in their chains (ROOT for the first), `sizes` bytes. A
    `session_hint` names the session whose chain the blocks are part of.
    """

    namespace: Namespace
    part: int
    digests: Sequence[bytes]
    parents: Sequence[bytes]
    sizes: Sequence[int]
    session_hint: SessionHint | None = None

    def subset(self, positions: Sequence[int]) -> ReserveRequest:
        """The same for some of the blocks."""
        return self._replace(
            digests=[self.digests[i] for i in positions],
            parents=[self.parents[i] for i in positions],
            sizes=[self.sizes[i] for i in positions],
        )


class Connection(Protocol):
    """One client connection in the server's books. Its pins and reservations die with it."""

    async def reserve(self, request: ReserveRequest, *, deadline: float) -> list[Reservation]:
        """Room for each block; waits for space until `deadline`, then says NO_SPACE.

        BYPASSED, without waiting, where the server keeps what it has instead. A status other
        than RESERVED asks for no bytes.
        """

    async def seal(
        self, ids: Sequence[int], checksums: Sequence[int], *, visible: bool, deadline: float
    ) -> list[WriteStatus]:
        """The bytes are in place: the blocks become visible, and with `visible` the masters know.

        Every other reservation of this connection is given back. Raises BadMessage for an id
        that is not reserved here.
        """

    async def pin(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], buffer_sizes: Sequence[int]
    ) -> list[Pin]:
        """Hold the blocks that are here; the extent of a hit is safe to read until `unpin`.

        NOT_YET where a block is on its way from a slow tier: ask again for that one. It waits for
        some of them, but only for a moment, and only where there is no hit.
        """

    def unpin(self, pins: Sequence[Pin]) -> None:
        """Let go of the hits among `pins`."""

    async def remove(self, namespace: Namespace, digests: Sequence[bytes]) -> list[bool]:
        """Forget blocks, every part; True where one was. The masters have been told."""

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> list[bool]:
        """A reader saw a wrong checksum: look again here, and drop what is rotten."""

    def views(self, extents: Sequence[Extent]) -> list[memoryview]:
        """The memory of extents that this connection has reserved or pinned."""

    def close(self, *, writer_may_be_alive: bool = False) -> bool:
        """Drop all pins and reservations. Idempotent.

        With `writer_may_be_alive` the reserved extents are not reused before `writer_exited`; True
        when there are any, so when that must be said.
        """

    def writer_exited(self) -> None:
        """The client that might still write has stopped, or its process has ended."""


class BlockStore(Protocol):
    """What a block server offers to the transports that listen for it."""

    @property
    def cluster(self) -> Cluster:
        """Only clients of the same cluster are served, who know its secret if it has one."""

    @property
    def server(self) -> str:
        """This server's id."""

    @property
    def tier(self) -> Tier:
        """The memory that extents lie in."""

    def connect(self, peer: Peer) -> Connection:
        """Open the books for one client connection. Raises Overloaded at the limit."""


class Listener(Protocol):
    """A transport that accepts clients for one server."""

    @property
    def address(self) -> str:
        """`scheme://...`, as a client must dial it."""

    async def close(self) -> None:
        """Stop accepting and end every connection. Idempotent.

        Calls in progress end with Unavailable; when it returns, no connection is open in the
        books, nothing looks at the tier any more, and the address is free.
        """


# --- the client's side of a transport ----------------------------------------------------


class WriteOptions(NamedTuple):
    """What is common to the blocks of one write."""

    namespace: Namespace
    part: int
    visible: bool
    session_hint: SessionHint | None = None


class IdleTimeout(Protocol):
    """Ends a read when the server has been silent for too long; a slow one is not a lost one."""

    def touch(self) -> None:
        """Something of the answer has come: wait as long again."""

    def disarm(self) -> None:
        """Nothing more is expected of the server: what is left to do is local."""


class ReadOptions(NamedTuple):
    """What is common to the blocks of one read. `verify` checks every checksum.

    A channel tells `idle_timeout` whatever it hears; without one only the deadline counts.
    """

    namespace: Namespace
    part: int
    verify: bool = True
    idle_timeout: IdleTimeout | None = None


class Channel(Protocol):
    """A client's path to one server. Any number of calls at once.

    A cancelled or failed call leaves nothing behind: no pin, no reservation, and no byte is
    written into or read from the caller's buffers after it has ended. The server lets go as soon
    as it hears of it, also while it is still at work on that call.

    Every call ends by its deadline (DeadlineExceeded), and with Unavailable when either side
    closes. A refusal of the server (PeerError, Refused) is raised as what it is.
    """

    async def write(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], *, deadline: float
    ) -> list[WriteStatus]:
        """Store blocks, at most BATCH_BLOCKS_MAX; one status each, in their order.

        A block is the concatenation of its pieces, and has one checksum over all of them. They are
        never joined on the loop's thread: that would stall every other call of the process.
        """

    async def read(
        self, options: ReadOptions, blocks: Sequence[ReadBlock], *, deadline: float
    ) -> list[ReadResult]:
        """Fill the memory of the blocks that are there; CORRUPT where a checksum is wrong.

        A block fills its pieces one after the other; what it does not need of them is untouched.
        One result each, in their order. The memory of a miss is untouched, except after CORRUPT.
        NOT_YET is no miss: the server is bringing the block from a slow tier, and wants to be
        asked again.
        """

    async def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        """Forget blocks; True where the server had one."""

    async def report_corruption(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        """Tell the server of wrong checksums; True where it agreed and dropped the block."""

    async def close(self) -> None:
        """`abort`, and give back all it holds. Idempotent; waits for its own copies only."""

    def abort(self) -> None:
        """End it now: synchronous, idempotent, the only reaction to a half-sent frame.

        Running calls and all later ones end with Unavailable. Before the server hears of it, every
        copy into or out of the pool's memory has stopped: the server may reuse that at once.
        """


class View(NamedTuple):
    """A block in place: the pool's own memory, read-only.

    Valid inside the `with`, as long as neither side has closed: then the pins are gone, and the
    memory may become another block's.
    """

    status: ReadStatus
    data: memoryview | None = None


@runtime_checkable
class SupportsZeroCopyView(Protocol):
    """A channel that can show pinned memory itself, without any copy (shm, inproc)."""

    def read_view(
        self, options: ReadOptions, digests: Sequence[bytes], *, deadline: float
    ) -> AbstractAsyncContextManager[list[View]]:
        """Pin blocks and look at them; they are unpinned on exit.

        The deadline is for getting them; looking has none.
        """


class Transport(Protocol):
    """One per scheme. Interchangeable: the pool never asks which one it has."""

    @property
    def scheme(self) -> str:
        """`tcp`, `shm`, `inproc`, `ucx`."""

    @property
    def same_host(self) -> bool:
        """True when it reaches servers on the caller's host only."""

    @property
    def authenticated(self) -> bool:
        """True when nobody reaches anything of a server who does not know its cluster's secret."""

    async def listen(self, address: str, store: BlockStore) -> Listener:
        """Serve `store` at `address` (empty: a free one).

        Raises ConfigError when it is taken or no address of this scheme.
        """

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        """Dial a server.

        Raises Unavailable, by the deadline; PeerError when it belongs to another cluster and
        Overloaded at its limit (these two perhaps only in the first call); ConfigError when
        `address` is no address of this scheme.
        """


@runtime_checkable
class SupportsReachability(Protocol):
    """A transport that can tell, without dialling, that nobody is ever going to answer there."""

    def can_reach(self, address: str) -> bool:
        """False: do not even try."""


@runtime_checkable
class NeedsMeasurement(Protocol):
    """A transport that is not worth being tried first on every machine."""

    @property
    def needs_measurement(self) -> bool:
        """True: nothing here says that it is faster than others, so they come first until it has
        been measured."""
