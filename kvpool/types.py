"""The values that all packages exchange: keys, statuses, results, statistics.

All are immutable. Sizes, offsets and capacities are bytes; `deadline` and `now` are seconds
of the running event loop's clock. A *digest* is the 16 to 32 bytes an engine computed for a
token prefix; together with its namespace it is the block's key.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvpool.arguments import as_int, as_text
from kvpool.errors import BadKey

R = TypeVar("R", bound=tuple[Any, ...])

#: Anything that exposes its memory: bytes, bytearray, memoryview, numpy array.
Buffer: TypeAlias = "bytes | bytearray | memoryview"


class DeviceBuffer(Protocol):
    """Memory of a CUDA device, as array libraries show it; a torch tensor, also one of the host."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class DeviceEvent(Protocol):
    """A point in the work of a device's stream: `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has done all work before it."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The pieces of one block on a device, and when its owner's work on them has ended.

    Without an event a call waits for what is on the current stream of the thread that calls.
    """

    rows: Sequence[DeviceBuffer]  # one of two dimensions of bytes is pieces of one size
    ready: DeviceEvent


#: The memory of one block: one buffer, or several whose concatenation is the block. An engine
#: that keeps each layer in its own memory passes the pieces; no call joins them by a copy.
Memory: TypeAlias = "Buffer | DeviceBuffer | Sequence[Buffer | DeviceBuffer] | DeviceRows"

#: Bytes of a block in several pieces on a device that `client.device_path: direct` takes at most.
DIRECT_PIECES_MAX: Final = 32 << 20

#: The parent of a chain's first block.
ROOT: Final = b""

DIGEST_SIZE_MIN: Final = 16
DIGEST_SIZE_MAX: Final = 32
#: Blocks in one message. Larger calls are split by the client.
BATCH_BLOCKS_MAX: Final = 1024
SHARED_BYTES_MIN: Final = 4 << 20  # smaller reads come from one server, others from all
#: Bytes: a block starts at a multiple of a page, so clients map it and disks write it as it lies.
ALIGNMENT: Final = 4096
#: The tier that is memory, as masters show it, and all of which nothing outlives their server.
MEMORY_TIER: Final = "dram"
MEMORY_TIERS: Final = ("hbm", MEMORY_TIER)
#: Servers that one block may be written to by one call.
COPIES_MAX: Final = 16
#: Characters of a session's name.
SESSION_NAME_MAX: Final = 128
#: Of its memory a full server uses so much; the rest is for writes until others take some blocks.
FULL_SHARE: Final = 15 / 16
#: A server with less in use has room for what full servers hand over, up to `FULL_SHARE`.
ROOM_SHARE: Final = 13 / 16
#: Bytes of one block, more than any engine's; it bounds the lengths that a peer may send.
BLOCK_SIZE_MAX: Final = 1 << 32

# What a number or a text from a peer may be: decoding refuses anything else.
Count = Annotated[int, Meta(ge=0, lt=2**48)]
Total = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
NAME_MAX: Final = 256
Name = Annotated[str, Meta(max_length=NAME_MAX)]
TEXT_MAX: Final = 2048
Text = Annotated[str, Meta(max_length=TEXT_MAX)]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for bytes to be interchangeable, as one name.

    `parts` is how many writers (tensor- or pipeline-parallel ranks) share one logical block;
    a block is present only when every part is. It is part of the identity: the same name with
    another number of parts is another namespace.
    """

    name: str
    parts: int = 1

    def __post_init__(self) -> None:
        if type(self.name) is not str or type(self.parts) is not int:
            self._be_plain()
        if not 1 <= len(self.name) <= 512 or not self.name.isprintable():
            raise BadKey(f"namespace {self.name[:40]!r}: expected 1 to 512 printable characters")
        if not 1 <= self.parts <= 256:
            raise BadKey(f"namespace {self.name[:40]!r}: parts is {self.parts}, expected 1 to 256")

    def _be_plain(self) -> None:
        """Take what is a text or a whole number of another type. Raises BadKey."""
        name, parts = as_text(self.name), as_int(self.parts)
        if name is None:
            raise BadKey(f"namespace {self.name!r:.40}: expected 1 to 512 printable characters")
        if parts is None:
            raise BadKey(f"namespace {name[:40]!r}: parts is {self.parts!r:.40}, expected 1 to 256")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parts", parts)


class BlockKey(NamedTuple):
    """The key of one part of one block."""

    namespace: Namespace
    digest: bytes
    part: int = 0

    def __str__(self) -> str:
        part = f"#{self.part}" if self.namespace.parts > 1 else ""
        return f"{self.digest.hex()[:12]}{part}"


class Status(enum.IntEnum):
    """What came of a block."""

    @property
    def label(self) -> str:
        """The name in lower-case words for tables and logs: `never written`."""
        return self.name.lower().replace("_", " ")


class ReadStatus(Status):
    """The outcome of one block of a match or read: `HIT`, or the reason of the miss."""

    HIT = 0
    #: No record of this key: never written, or so long ago that the record has aged out.
    NEVER_WRITTEN = 1
    #: Evicted to make room for other blocks.
    EVICTED = 2
    #: Removed by a caller.
    REMOVED = 3
    #: Every server that has the block is lost, unreachable, or restarted without its blocks.
    SERVER_LOST = 4
    #: Its bytes failed their checksum; that copy is dropped.
    CORRUPT = 5
    #: The deadline passed before the block was found or read.
    DEADLINE = 6
    #: A writer has reserved it and not sealed it yet.
    BEING_WRITTEN = 7
    #: Some parts are present, not all.
    PART_MISSING = 8
    #: No master answered, so the client could not look up where the block is.
    NO_MASTER = 9
    #: The server refused for load: too many requests, or views pin all the memory that they may.
    REFUSED = 10
    #: The caller's buffer is smaller than the block. The client raises `BadBuffer` for it.
    BUFFER_TOO_SMALL = 11
    #: It comes up from a slow tier, or readers have pinned what they may. Never a final answer.
    NOT_YET = 12
    #: It could not be read from the tier that it lay in, or that tier is out of service.
    TIER_LOST = 13

    @property
    def hit(self) -> bool:
        """True for HIT alone: the block's bytes are in the caller's buffer."""
        return self is ReadStatus.HIT


class WriteStatus(Status):
    """The outcome of one block of a write."""

    #: Sealed, checksummed, visible.
    STORED = 0
    #: The pool has it; this write moved no bytes.
    ALREADY_STORED = 1
    #: Another writer has reserved the block and will seal or cancel it.
    IN_PROGRESS = 2
    #: No server could free enough space by the deadline, or all are lost or draining.
    NO_SPACE = 3
    #: Space is reserved; the bytes have not arrived. Never a final answer.
    RESERVED = 4
    #: The deadline passed before it was sealed. It is stored if its last bytes were on their way.
    DEADLINE = 5
    #: The connection to the server broke during the write, with the same uncertainty.
    SERVER_LOST = 6
    #: No master answered, so no server could be chosen for the block.
    NO_MASTER = 7
    #: Larger than the server's whole segment.
    TOO_LARGE = 8
    #: The server's policy ranks every block that it stores above this one, and refused it at once.
    #: Waiting would not help (design: eviction).
    BYPASSED = 9
    #: Blocks that this write has reserved must be sealed first: ask again then. Never a final
    #: answer (design: budgets, tiers).
    NOT_YET = 10
    #: The server refused for load: too many connections, or one that moved no byte while others
    #: waited for memory; or this client's tenant writes above its rate.
    REFUSED = 11

    @property
    def present(self) -> bool:
        """True when the pool holds the block now, from this write or from an earlier one."""
        return self in (WriteStatus.STORED, WriteStatus.ALREADY_STORED)


class MoveStatus(Status):
    """How far bringing a block to another place is, from best to worst (design: moves).

    Of a block that a server fetches from another or prefetches into memory, and of all blocks of a
    server that leaves.
    """

    #: It was moved. Every living master knows of it; of a drain, all that it had.
    DONE = 0
    #: It was there; no byte moved.
    HERE = 1
    #: It comes, by this call or by another one. Ask again.
    IN_PROGRESS = 2
    #: The budget or the time of the call is used up; of a drain, some blocks are left. Ask again.
    NOT_YET = 3
    #: The server takes no blocks, because it hands over its own, or too many wait to be moved.
    REFUSED = 4
    #: Only blocks that were used later than this one could make room for it.
    NO_ROOM = 5
    #: The source does not have it, or it was removed on the way; of a prefetch, no server has it.
    GONE = 6
    #: The bytes that arrived have another checksum than the source named.
    CORRUPT = 7
    #: The source is unknown, or no source, server or master answered in time.
    LOST = 8

    @property
    def present(self) -> bool:
        """True when the block is there now."""
        return self in (MoveStatus.DONE, MoveStatus.HERE)


class Cluster(NamedTuple):
    """The cluster that a process belongs to. Processes of other clusters are refused.

    With a secret, each peer must prove that it knows it (design: authentication); never printed.

    For a client of one tenant, `tenant` is its name, `secret` that of the tenant, and `fingerprint`
    the hash of the masters' certificate, which it cannot make from a secret that is not the
    cluster's (design: tenants). `kvpool.read_cluster` reads all of them from one file.
    """

    name: str = "default"
    secret: bytes = b""
    tenant: str = ""
    fingerprint: bytes = b""

    def __repr__(self) -> str:
        tenant = f" for tenant {self.tenant!r}" if self.tenant else ""
        return f"<Cluster {self.name!r}{' with a secret' if self.secret else ''}{tenant}>"


class SessionReport(NamedTuple):
    """What became of the hints about a session, as far as one master knows.

    `hints` has the last hint of each kind: its age in seconds, and `resume_in` (None: the session
    ends; ARRIVED: its prompt waits). `servers` has each server with blocks of the session that has
    answered: its name, whether it follows the last hint as it was given (not if that came too late
    or is too far ahead, the budget is used up, or there are too many branches), and its age.
    """

    hints: list[tuple[float, float | None]]
    servers: list[tuple[str, bool, float]]


#: As the `resume_in` of a hint: the session's prompt is here, and waits to be served.
ARRIVED: Final = 0.0


class ChainEnd(msgspec.Struct, frozen=True, array_like=True):
    """The last block of a chain: what a hint is about where no session is known."""

    namespace: Annotated[str, Meta(max_length=SESSION_NAME_MAX)]
    parts: Annotated[int, Meta(ge=1, le=256)]
    digest: Annotated[bytes, Meta(max_length=DIGEST_SIZE_MAX)]


class SessionHint(NamedTuple):
    """The session of a write and, if known, the seconds until its next prompt (`resume_in`).

    A session is one conversation: of one that branches, the older branch is evicted first, so two
    that continue the same history in parallel are two sessions (design: session-hints).
    """

    session: str
    resume_in: float | None = None


class ReadResult(NamedTuple):
    """One block's outcome; `size` bytes of the buffer are the block, the rest is untouched."""

    status: ReadStatus
    size: int = 0


class Extent(NamedTuple):
    """A range of one segment, in bytes. `generation` grows with each reuse of the range, so a stale
    extent is recognized."""

    offset: int
    size: int
    generation: int


class Reservation(NamedTuple):
    """The server's answer for one block of a write.

    The extent belongs to the writing connection until it is sealed or cancelled.
    """

    status: WriteStatus
    id: int = 0
    extent: Extent | None = None


class Pin(NamedTuple):
    """The server's answer for one block of a read: the extent is not reused before `unpin`."""

    status: ReadStatus
    id: int = 0
    extent: Extent | None = None
    checksum: int = 0
    #: Where the extent lies, if not in the memory that clients read: a tier on a device.
    tier: int | None = None


class Replica(NamedTuple):
    """One sealed copy of one part: where it lies."""

    server: str
    tier: str
    part: int = 0


class Run(NamedTuple):
    """Consecutive blocks `first` to `last` (both included) that have the same replicas."""

    first: int
    last: int
    replicas: tuple[Replica, ...]

    @property
    def in_memory(self) -> bool:
        """Some server has each of their parts in memory."""
        return self.parts_in_memory() == {replica.part for replica in self.replicas}

    def parts_in_memory(self) -> set[int]:
        """The parts that some server has in memory: a reader of them waits for no slower tier."""
        return {replica.part for replica in self.replicas if replica.tier == MEMORY_TIER}


class Match(NamedTuple):
    """The longest prefix of a chain that the pool holds, and why it ends there.

    Advice, not a lease: blocks may be evicted before they are read, which is then a miss.
    """

    runs: tuple[Run, ...]
    length: int
    stopped: ReadStatus

    def of(self, first: int, last: int) -> Match:
        """The match for `chain[first:last]`, for a reader that already has the blocks before."""
        runs = tuple(
            Run(max(run.first, first) - first, min(run.last, last - 1) - first, run.replicas)
            for run in self.runs
            if run.first < last and run.last >= first
        )
        return Match(runs, max(0, min(self.length, last) - first), self.stopped)


class Presence(NamedTuple):
    """Where one block can be read, as one process sees it.

    `near` if servers on this process's host have all of its parts. `tier` is where they have it,
    or, of a block that is far, where other servers do: of its parts the one that lies slowest.
    """

    replicas: tuple[Replica, ...]
    near: bool
    tier: str


class HostScore(NamedTuple):
    """What a reader on `host` would load of a chain.

    Of the blocks that the pool has from the head of the chain on, `near` lie on that host with all
    parts and `far` on others; `near_tiers` and `far_tiers` count the same blocks by tier, as in
    `Presence`. `size` is estimated bytes, `seconds` the time to load them: `measured`, or assumed.
    """

    host: str
    near: int
    far: int
    near_tiers: dict[str, int]
    far_tiers: dict[str, int]
    size: int
    seconds: float
    measured: bool


class WorkingSet(NamedTuple):
    """The live working set of one namespace: `size` bytes, with all parts and copies, of blocks
    that were asked for and are asked for again. Its mean prompt has `prompt` bytes."""

    namespace: Namespace
    size: int
    blocks: int
    prompt: int = 0


class Demand(NamedTuple):
    """What clients ask one master for: means over its last minutes, `seconds` at most so far.

    The working sets are those of the namespaces that were asked for last, the largest first.
    `chain_servers`: servers that a prompt's blocks are read from, 0 if none was found.
    `beyond_hole`: the share of the stored blocks of prompts that no reader can use, because a
    block before them is missing. `asked_blocks` of matches and `found_blocks` of them are sums
    since that master started.
    """

    seconds: float
    working_sets: tuple[WorkingSet, ...]
    chain_servers: float
    beyond_hole: float
    asked_blocks: int = 0
    found_blocks: int = 0

    @property
    def size(self) -> int:
        """Bytes of all live working sets together."""
        return sum(one.size for one in self.working_sets)


class Figure(NamedTuple):
    """How `/metrics` shows a field: its name there, a help text, and whether it only grows."""

    metric: str
    help: str
    grows: bool = False


class TierUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tier of a server: how full it is, and how much is read and written.

    Sizes are bytes. `read_s` and `write_s` are the seconds in which at least one transfer ran.
    Rates are bytes (`write_block_rate`: blocks) per second over the last seconds; they are no
    metrics, because Prometheus computes rates itself. `hits` counts blocks read directly from this
    tier; `status_text` describes how the tier is accessed; `dropped` is by reason.
    """

    name: Name
    status_text: Text = ""
    lost: Annotated[bool, Figure("lost", "1 when it was taken out of service")] = False
    capacity: Annotated[Count, Figure("capacity_bytes", "of the tier")] = 0
    used: Annotated[Count, Figure("used_bytes", "reserved or stored")] = 0
    blocks: Annotated[Count, Figure("blocks", "stored")] = 0
    hits: Annotated[Count, Figure("hits", "blocks that were read where they lay in it", True)] = 0
    read_bytes: Annotated[Total, Figure("read_bytes", "moved up out of it", True)] = 0
    read_s: Annotated[Seconds, Figure("read_seconds", "in which any of that moved", True)] = 0.0
    read_rate: Rate = 0.0
    written_bytes: Annotated[Total, Figure("written_bytes", "moved down into it", True)] = 0
    write_s: Annotated[Seconds, Figure("write_seconds", "in which any of that moved", True)] = 0.0
    write_rate: Rate = 0.0
    failures: Annotated[Count, Figure("failures", "reads and writes that failed", True)] = 0
    corrupt: Annotated[
        Count, Figure("corrupt_blocks", "whose bytes failed their checksum", True)
    ] = 0
    written_blocks: Annotated[Count, Figure("written_blocks", "moved down into it", True)] = 0
    write_block_rate: Rate = 0.0
    dropped: Annotated[
        dict[Name, Count],
        Meta(max_length=64),
        Figure("dropped_blocks", "that were in it and that the last start did not find", True),
    ] = {}
    read_only: Annotated[bool, Figure("read_only", "1 while its disk fails writes")] = False
    files_out: Annotated[Count, Figure("files_out", "out of service, or taking no writes")] = 0


class ClientUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The memory that one client keeps a server from reusing at the moment, over one transport.

    Bytes are the sum of its `connections` that hold any; `oldest_pin_s` is the age of its oldest
    pin. No metrics: clients come and go.
    """

    name: Name
    transport: Name
    connections: Count = 1
    pinned_bytes: Count = 0
    oldest_pin_s: Seconds = 0.0
    reserved_bytes: Count = 0
    #: Of connections that the server has given up, and whose client may still write.
    quarantined_bytes: Count = 0


#: Stands for all consumers that are not listed by themselves.
OTHERS: Final = "(others)"


class Consumer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one tenant, namespace or program has of a server, and what its readers got there.

    `by` is which of the three. An empty `name` is the pool itself, or no program; OTHERS stands for
    all that are not listed. Counts are since the start of the server. `evicted_by` is by tenant.
    """

    by: Name
    name: Name
    tiers: Annotated[
        dict[Name, Count], Meta(max_length=64), Figure("used_bytes", "of whole extents, by tier")
    ] = {}
    hit_blocks: Annotated[Count, Figure("hit_blocks", "that readers got", True)] = 0
    hit_bytes: Annotated[Total, Figure("hit_bytes", "that readers got: saved", True)] = 0
    missed_blocks: Annotated[Count, Figure("missed_blocks", "that readers did not get", True)] = 0
    evicted_by: Annotated[
        dict[Name, Total],
        Meta(max_length=64),
        Figure("evicted_bytes", "that made room, by the tenant that it was for", True),
    ] = {}


class ServerStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The figures of one server, as every heartbeat carries them. Bytes, counts and seconds.

    A new figure is a field here, and a line in `BlockServer.stats`; a count of events is one of the
    `counters`. Masters pass all of it on, and `kvpool status --json` and `/metrics` show it.
    """

    used: Annotated[Count, Figure("used_bytes", "reserved or stored in that tier")] = 0
    blocks: Annotated[Count, Figure("blocks", "stored")] = 0
    pins: Annotated[Count, Figure("pins", "held by readers")] = 0
    reservations: Annotated[Count, Figure("reservations", "held by writers")] = 0
    rss: Annotated[Count, Figure("resident_bytes", "memory of the process")] = 0
    victim_age_s: Annotated[
        Seconds, Figure("victim_age_seconds", "since the next victim was last used")
    ] = 0.0
    #: Each is a metric by its own name.
    counters: Annotated[dict[Name, Count], Meta(max_length=128)] = {}
    #: Each tier has its own figures: metrics of the tier.
    usage: Annotated[list[TierUsage], Meta(max_length=64)] = []
    pinned_bytes: Annotated[Count, Figure("pinned_bytes", "held by readers")] = 0
    oldest_pin_s: Annotated[Seconds, Figure("oldest_pin_seconds", "since the oldest pin")] = 0.0
    reserved_bytes: Annotated[Count, Figure("reserved_bytes", "held by writers")] = 0
    #: The clients that hold most.
    clients: Annotated[list[ClientUsage], Meta(max_length=64)] = []
    draining: Annotated[bool, Figure("draining", "1 while it will leave and takes no blocks")] = (
        False
    )
    drain_left_blocks: Annotated[
        Count, Figure("drain_left_blocks", "that no other server has yet, or could take")
    ] = 0
    drain_left_bytes: Annotated[
        Count, Figure("drain_left_bytes", "that no other server has yet, or could take")
    ] = 0
    #: The tenants, namespaces and programs that have most: metrics of their own.
    consumers: Annotated[list[Consumer], Meta(max_length=64)] = []


class Member(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """A block server as a master sees it, and as `MembersReply` carries it.

    `capacity` is bytes; `heard_s` is the seconds since the master received its last message.
    `epoch` changes with each start of the server. `left`: it is not `alive` because it has ended in
    order.
    """

    server: Name
    epoch: Annotated[int, Meta(ge=0)]
    host: Name
    addresses: Annotated[tuple[Name, ...], Meta(max_length=64)]
    tiers: Annotated[tuple[Name, ...], Meta(max_length=64)]
    alive: bool
    heard_s: Seconds
    capacity: Count
    stats: ServerStats
    left: bool = False


class Duration(NamedTuple):
    """How long a client waited for an answer, rounded to two digits.

    `operation` is `match`, `read` or `write`, `transport` a scheme: `tcp` for masters.
    """

    operation: str
    transport: str
    seconds: float


class Explanation(NamedTuple):
    """Where one block is, or why the pool does not have it; `text` is for people."""

    key: BlockKey
    status: ReadStatus
    replicas: tuple[Replica, ...]
    text: str


class WriteBlock(NamedTuple):
    """One block to be written: the concatenation of its pieces, `size` bytes in all.

    Each piece is contiguous bytes (format `B`), and not empty.
    """

    digest: bytes
    parent: bytes
    pieces: tuple[memoryview, ...]
    size: int


class ReadBlock(NamedTuple):
    """One block to be read: it fills the pieces one after the other, `size` bytes at most.

    Each piece is contiguous, writable bytes (format `B`), and not empty.
    """

    digest: bytes
    pieces: tuple[memoryview, ...]
    size: int


def row_of(kind: type[R]) -> Callable[[tuple[Any, ...]], R]:
    """What makes a named tuple of all of its fields, in half the time of a call of its class.

    For batches of many small blocks: that call is one of Python, and this is none.
    """
    return functools.partial(tuple.__new__, kind)
