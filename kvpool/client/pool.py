"""The client: what a program calls. It asks masters where blocks are, and servers for the blocks.

This module checks the arguments of a call and computes its deadline; `lookup.py` asks masters,
`reader.py` and `writer.py` move blocks. A miss is a result, never an exception; exceptions are for
wrong arguments.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from kvpool import removals
from kvpool.client.attempts import ReadRates
from kvpool.client.block_transfers import TRANSFERS, BlockTransfers
from kvpool.client.buffers import BufferLike, check_one_for_each, normalize_buffers
from kvpool.client.checks import (
    check_digests,
    check_parents,
    check_part,
    check_resume_in,
    check_whole,
)
from kvpool.client.context import ClientContext
from kvpool.client.extension import ClientExtensions, ClientParts
from kvpool.client.location_cache import LocationCache
from kvpool.client.masters import Masters
from kvpool.client.reader import Reader
from kvpool.client.servers import Servers, gather_errors
from kvpool.client.versions import Versions
from kvpool.client.writer import Places, Writer
from kvpool.config import ClientConfig, check_device_path
from kvpool.errors import BadBuffer, BadKey, ConfigError, KvpoolError, TooLarge
from kvpool.protocols import Network, Transport, View, WriteOptions
from kvpool.runtime import Host, this_host
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    COPIES_MAX,
    ROOT,
    Cluster,
    HostScore,
    Match,
    Member,
    MoveStatus,
    Namespace,
    Presence,
    ReadResult,
    ReadStatus,
    SessionHint,
    WriteStatus,
)

if TYPE_CHECKING:
    from kvpool.client.pool_events import EventPosition, EventReader
    from kvpool.client.session import ClientSession


class Pool:
    """One client of a pool. It belongs to the event loop that made it.

    Every call takes `timeout` in seconds (default: `ClientConfig.timeout_s`) and ends by then. It
    raises Closed after `close`, in another thread or loop, and after a fork. The digests of one
    call have 16 to 32 bytes each, all the same length.

    `counters` counts since the pool was opened:

    | name | unit | counts |
    |---|---|---|
    | `read_hit`, `read_evicted`, ... | blocks | results of reads, by `ReadStatus` |
    | `read_bytes` | bytes | payload of hits |
    | `corrupt` | blocks | read with a wrong checksum, and reported to the server |
    | `write_stored`, `write_no_space`, ... | blocks | results of writes, by `WriteStatus` |
    | `copies_missing` | copies | asked for with `copies`, not made |
    | `spread_blocks` | blocks | that servers fetched because of `Admin.spread` |
    | `prefetch_coming`, ... | blocks | what prefetches find, see `Pool.prefetch` |
    | `shared_copies` | blocks | that servers fetched because many chains share them |
    | `versions_removed` | copies | that had other bytes than another writer's copy |
    | `hedged` | delays | of a server that sent nothing for `hedge_s` |
    | `failed_SCHEME` | failures | of a transport, which comes last for a while |
    | `staged_read_bytes`, `staged_write_bytes` | bytes | copied to; from CUDA devices |
    | `direct_read_bytes` | bytes | received into CUDA devices and verified there |
    | `direct_corrupt` | blocks | wrong when they were verified on a device |
    | `hint_accepted`, ... | hints | that a master accepted, or none did |

    `durations.counts()` has how many matches, and messages to servers that read or write, were
    answered after so many seconds, by transport; `kvpool.ops.client_metrics` exports both.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        cluster: Cluster,
        network: Network,
        transports: Mapping[str, Transport],
        owns_network: bool = False,
        host: Host | None = None,
        rng: random.Random | None = None,
    ) -> None:
        check_device_path(config)
        self._config = config
        if cluster.tenant:
            transports = _for_tenants(transports)
        self._own_network = network if owns_network else None
        self.counters: Counter[str] = Counter()
        masters = Masters(network, config)
        host = host or this_host()
        counters = self.counters
        self._servers = servers = Servers(config, cluster, host, transports, masters, counters, rng)
        self.durations = servers.durations
        self._context = ClientContext(config, cluster.tenant, masters, servers, counters)
        lookup = self._context.lookup
        memory: BlockTransfers = resolve_name(TRANSFERS[-1])(config, self._context)
        self._memory = memory
        locations = LocationCache()
        rates = ReadRates()
        self._reader = reader = Reader(config, lookup, servers, locations, memory, rates, counters)
        versions = Versions(lookup, reader, servers, counters)
        parts = ClientParts(self._context, rates, on_apart=[])
        self._extensions = ClientExtensions(parts)
        self._places = places = Places(host.id, masters)
        self._writer = Writer(
            places, servers, locations, versions, parts.on_apart, memory, counters
        )

    def __repr__(self) -> str:
        return f"<Pool {'closed' if self._context.closed else 'open'} {self._servers!r}>"

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # --- looking -------------------------------------------------------------------------

    async def match(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        session: str = "",
        timeout: float | None = None,
    ) -> Match:
        """The longest prefix of `chain` that the pool holds, and why it ends there.

        A lookup is no use of a block: it pins nothing and does not change the order of evictions.
        With a `session` it is an arrival as well: a prompt of that conversation waits to be served,
        and asks for `chain` (see `ClientSession.arrived`). If no master answers, `stopped` is
        NO_MASTER. Raises BadKey for an empty `chain` and for digests that are not 16 to 32 bytes or
        differ in length; UsageError for a wrong `session`.
        """
        session = self._context.own_session(session) if session else ""
        namespace = self._context.own(namespace)
        deadline, began = self._context.begin(timeout), self._context.loop.time()
        match = await self._context.lookup.match(namespace, chain, deadline, session)
        self.durations.record("match", "tcp", self._context.loop.time() - began)
        return match

    async def contains(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[bool]:
        """Which of these blocks the pool has, for keys that form no chain: one answer per digest.

        One message to a master for each 4,096 digests. As `match`, it is no use of the blocks and
        pins none: a block may be gone when it is read. A digest may occur twice. Raises BadKey for
        empty `digests` and for those that are not 16 to 32 bytes or differ in length; MasterLost
        when no master answers.
        """
        return await self._context.lookup.contains(
            self._context.own(namespace), digests, self._context.begin(timeout)
        )

    async def where(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[Presence | None]:
        """Where each block is, or None where the pool does not have it, in whatever order.

        For observers: it counts as no demand, and is no use of the blocks. Raises BadKey for
        digests that differ in length, and MasterLost when no master answers.
        """
        found: list[Presence | None] = await self._extensions.get("observation").where(
            self._context.own(namespace), digests, self._context.begin(timeout)
        )
        return found

    async def score(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        hosts: Sequence[str],
        *,
        block_bytes: int | None = None,
        timeout: float | None = None,
    ) -> list[HostScore]:
        """What an engine on each of these hosts would load of `chain`, and for how long.

        For routers, to add to the time that a prompt waits for an engine. One score per host, in
        their order, of the longest prefix that the pool has; a host (`Member.host`) without a
        server, or that no master knows, reads everything from others. A master is asked once for
        all hosts, and every 2 seconds for the figures of servers. It counts as no demand and is no
        use of the blocks.

        `seconds` is the size divided by rates. Memory: what this client's own reads of 1 MiB and
        more have reached, from its host for near blocks, from others for far ones; before the
        first such read 4 and 1 GB/s are assumed. Slower tiers in addition: what their servers'
        heartbeats report, or 1 GB/s. An engine's copy to its device is not in it. The size is
        `block_bytes` for each block, or the mean of what the servers hold, which is 0 until the
        first of them has reported a block.

        Raises BadKey for an empty `chain` or wrong digests; UsageError for wrong `hosts` (1 to
        1,024 names) or `block_bytes`; MasterLost when no master answers.
        """
        deadline = self._context.begin(timeout)
        scores: list[HostScore] = await self._extensions.get("score").score(
            self._context.own(namespace), chain, hosts, block_bytes, deadline
        )
        return scores

    def events(self, from_position: EventPosition | None = None) -> EventReader:
        """What the pool has, and each change of it, as one master sees them, for ever.

        Without a position it begins with RESET, then all servers and blocks in parts, then LIVE,
        then what happens. With the position of an earlier event it goes on behind that one; where
        that is not possible (another master's, too long ago, or none that there ever was), with a
        RESET, so no change is missed unnoticed. Blocks may be STORED again. A reader may be as slow
        as it likes: masters keep nothing for it. While no master answers it waits; `behind_s` of
        what is returned says for how long nothing new was known. Raises Closed, and UsageError for
        a tenant's client (design: pool-events).
        """
        self._context.begin(None)
        reader: EventReader = self._extensions.get("events").reader(from_position)
        return reader

    async def members(self, *, timeout: float | None = None) -> list[Member]:
        """Every server that a master knows, lost ones included. Raises MasterLost."""
        return await self._servers.refresh(self._context.begin(timeout))

    # --- reading -------------------------------------------------------------------------

    async def read(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[BufferLike],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> list[ReadResult]:
        """Fill each buffer with its block: one result per digest, a hit or the reason of the miss.

        A buffer is writable memory of at least the block's size, or a list of pieces that are
        filled one after the other; none may overlap another. It may be on a CUDA device: the copies
        begin when the work that is now on the calling thread's current stream is done, and a hit is
        returned when the device has the bytes. With the `match` in which these digests, or a longer
        chain that begins with them, were found, no master is asked. After the call returns or
        raises, no byte is written to the buffers; those of misses may have been written to before.

        Raises BadKey for digests that are not 16 to 32 bytes, differ in length or occur twice, and
        for a `part` that the namespace does not have; BadBuffer for a buffer that is read-only, not
        contiguous, empty, or smaller than its block, or if there is not one buffer per digest;
        TooLarge for a buffer above 4 GiB; Unavailable when a device fails.
        """
        deadline = self._context.begin(timeout)
        namespace = self._context.own(namespace)
        part = check_part(namespace, part)
        check_digests(digests)
        check_one_for_each(buffers, digests)
        target = normalize_buffers(buffers, writable=True)
        results = await self._reader.read(namespace, part, digests, target, match, deadline)
        for position, result in enumerate(results):
            if result.status is ReadStatus.BUFFER_TOO_SMALL:
                raise BadBuffer(
                    f"buffer {position} has {target.sizes[position]} bytes, block "
                    f"{digests[position].hex()[:12]} is larger"
                )
        return results

    @asynccontextmanager
    async def read_view(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[list[View]]:
        """The pool's own memory, pinned inside the `with`: no copy (design: pins).

        The views are read-only: one per digest. Blocks of a server on another host, or behind a
        transport without views, are misses with the status REFUSED: use `read` for them. Raises
        BadKey for wrong arguments.
        """
        deadline = self._context.begin(timeout)
        namespace = self._context.own(namespace)
        part = check_part(namespace, part)
        check_digests(digests)
        async with self._reader.read_view(namespace, part, digests, match, deadline) as views:
            yield views

    async def prefetch(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        near: str = "",
        match: Match | None = None,
        timeout: float | None = None,
    ) -> list[MoveStatus]:
        """`chain` is read soon: servers bring its blocks from slower tiers into memory.

        Returns before they have come, with a status for each block (HERE: a reader finds it in
        memory; IN_PROGRESS: it comes as soon as the budget allows it), and takes `attempt_s` of the
        configuration at most unless `timeout` says otherwise. With the `match` of this chain no
        master is asked. Advice: each server brings up what its budgets allow, evicts nothing that
        is needed sooner, and keeps the blocks for their reader for 30 seconds. What cannot be
        prefetched is REFUSED or LOST, and is read as ever.

        `near` is the id of a server, or of a host (`Member.host`): a server there fetches what it
        lacks, as with `Admin.spread`, in the background, for 30 seconds at most. If no server lives
        there, blocks come up where they are. Raises BadKey as `match` does (design: promotion).
        """
        deadline = self._context.begin(self._config.attempt_s if timeout is None else timeout)
        check_digests(chain)
        namespace = self._context.own(namespace)
        statuses: list[MoveStatus] = await self._extensions.get("prefetch").prefetch(
            namespace, chain, near, match, deadline
        )
        return statuses

    def session(self, name: str) -> ClientSession:
        """The conversation of this name, to say what will become of it. Asks nobody by itself.

        Raises UsageError for a name that is none, or too long.
        """
        session: ClientSession = self._extensions.get("sessions").named(name)
        return session

    # --- writing -------------------------------------------------------------------------

    async def write(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[BufferLike],
        *,
        parent: bytes = ROOT,
        parents: Sequence[bytes] | None = None,
        part: int = 0,
        copies: int = 1,
        visible: bool = True,
        session: str = "",
        resume_in: float | None = None,
        timeout: float | None = None,
    ) -> list[WriteStatus]:
        """Store blocks: one status per digest.

        The digests are a chain: each block's parent is the one before it, and the first one's is
        `parent` (ROOT at the start of a prompt), unless `parents` names them all. Each of `copies`
        is on another server. With fewer servers, or no space on some, there are fewer copies,
        which `counters["copies_missing"]` counts; a block with one copy is stored. Further copies
        of a block that the pool has are of its bytes, not of the caller's (design: versions).

        A buffer is memory of exactly the block's size, or a list of pieces whose concatenation is
        the block. It may be on a CUDA device: what is stored is what the work that is now on the
        calling thread's current stream leaves there. With `visible` the call returns when every
        living master can find the blocks. After the call returns or raises, the buffers are not
        read any more.

        With a `session` the blocks belong to that conversation: when it ends, or goes on from an
        earlier point, its blocks that no other session uses are evicted first. `resume_in`: its
        next prompt is due in so many seconds (`ClientSession.hint`): known before the blocks are.

        Raises BadKey for wrong digests, parents or `part`; BadBuffer for a buffer that is not
        contiguous or is empty; TooLarge for a block above 4 GiB or larger than any server's memory;
        UsageError for wrong `copies`, `session` or `resume_in`; Unavailable when a device fails.
        """
        deadline = self._context.begin(timeout)
        namespace = self._context.own(namespace)
        part = check_part(namespace, part)
        copies = check_whole("copies", copies, COPIES_MAX)
        size = check_digests(digests)
        if parents is not None:
            check_parents(parents, digests, size)
        else:
            if parent != ROOT:  # keys that passed their check can be each other's parents
                check_parents([parent], digests[:1], size)
                if parent in digests:
                    raise BadKey(f"parent {parent.hex()[:12]} is one of the keys that follow it")
            parents = [parent, *digests[:-1]]
        session_hint = None
        if resume_in is not None:
            resume_in = check_resume_in(resume_in)
        if session or resume_in is not None:
            session_hint = SessionHint(self._context.own_session(session), resume_in)
        check_one_for_each(buffers, digests)
        source = normalize_buffers(buffers, writable=False)
        options = WriteOptions(namespace, part, bool(visible), session_hint, copies)
        statuses = await self._writer.write(options, digests, parents, source, copies, deadline)
        for position, status in enumerate(statuses):
            if status is WriteStatus.TOO_LARGE:
                raise TooLarge(
                    f"block {digests[position].hex()[:12]} has {source.sizes[position]} "
                    "bytes, more than any server's whole segment"
                )
        return statuses

    async def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[bool]:
        """Remove blocks, every part and copy; True where the pool had one.

        No read finds them any more, except on a server that did not answer in time: it may have
        kept them. Their bytes are not overwritten: they stay in the memory of servers and in files
        until other blocks are stored in their place (SECURITY.md).

        Raises BadKey, and MasterLost when no master answers.
        """
        deadline = self._context.begin(timeout)
        check_digests(digests)
        namespace = self._context.own(namespace)
        removed = [False] * len(digests)
        for first in range(0, len(digests), BATCH_BLOCKS_MAX):
            batch = digests[first : first + BATCH_BLOCKS_MAX]
            # All living servers: a master may not know yet of a block that was just written.
            servers = [m.server for m in await self._servers.refresh(deadline) if m.alive]
            remove = functools.partial(
                removals.remove, namespace=namespace, digests=batch, deadline=deadline
            )
            calls = [self._servers.call(server, remove, deadline) for server in servers]
            for answer in await gather_errors(calls):
                if not isinstance(answer, KvpoolError):
                    for position, one in enumerate(answer):
                        removed[first + position] |= one
        return removed

    async def close(self) -> None:
        """End every running call, then every connection. Idempotent. In a fork's child it does
        nothing: the connections are its parent's. Raises Closed in another thread or loop."""
        if not self._context.closed and self._context.pid == os.getpid():
            self._context.begin(None)
            self._context.closed = True
            await self._extensions.close()
            self._context.masters.close()  # first: what a call connects after it is closed at once
            await self._servers.close()
            await self._places.close()  # when no call can tell any more
            self._memory.close()
            if self._own_network is not None:
                self._own_network.close()
                await self._own_network.wait_closed()


def _for_tenants(transports: Mapping[str, Transport]) -> dict[str, Transport]:
    """The transports that serve clients of tenants: those that ask who comes, and where the client
    does not see the server's memory itself. Raises ConfigError if there is none."""
    fit = {s: one for s, one in transports.items() if one.authenticated and not one.same_host}
    if not fit:
        raise ConfigError(
            f"setting 'client.transports': a tenant's client needs tcp, got {', '.join(transports)}"
        )
    return fit
